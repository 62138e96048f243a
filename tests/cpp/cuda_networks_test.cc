// feed_forward on CUDA where no kernel is the network's own: its layers, bit for bit, and their workspace.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <vector>

#include "core/scalar.h"
#include "cuda_checks.h"
#include "rarefy/feed_forward.h"

namespace rarefy::test {
namespace {

constexpr std::int64_t kIn = 136, kHidden = 256, kOut = 192;

// Workspace as a front's allocator may give it: what was given before is taken back, and written to.
class Provider {
 public:
  Context context() {
    Context context;
    context.workspace.provider = this;
    context.workspace.provide = [](void* self, std::int64_t bytes) {
      auto& given = static_cast<Provider*>(self)->given_;
      if (given) given->fill(kPoison);
      given.emplace(static_cast<std::size_t>(bytes));
      given->fill(kPoison);
      return given->data();
    };
    return context;
  }
  std::int64_t bytes() const { return given_ ? static_cast<std::int64_t>(given_->bytes()) : 0; }

 private:
  std::optional<DeviceBuffer> given_;
};

// Three layers, and places for what each of them makes.
struct Network {
  Problem up_problem, gate_problem, down_problem;
  ProblemIn<DeviceBuffer> up, gate, down;
  DType dtype;
  std::int64_t tokens;
  DeviceBuffer hidden, gated, y, want;

  Network(std::int64_t m, std::int64_t rows, std::int64_t cols, DType type)
      : up_problem(make_problem({m, kHidden, kIn, rows, cols, 0.4, type, false, 0})),
        gate_problem(make_problem({m, kHidden, kIn, rows, cols, 0.3, type, false, 0}, 2)),
        down_problem(make_problem({m, kOut, kHidden, rows, cols, 0.4, type, false, 0}, 3)),
        up(up_problem),
        gate(gate_problem),
        down(down_problem),
        dtype(type),
        tokens(m),
        hidden(room(kHidden)),
        gated(room(kHidden)),
        y(room(kOut)),
        want(room(kOut)) {}

  DeviceBuffer room(std::int64_t cols) const {
    DeviceBuffer buffer(static_cast<std::size_t>(tokens * cols) * size_of(dtype));
    buffer.fill(kPoison);
    return buffer;
  }
  MutableMatrixView view(const DeviceBuffer& of, std::int64_t cols) const {
    return {of.data(), dtype, tokens, cols, cols, Device::cuda};
  }
  void hold_derived() {
    for (ProblemIn<DeviceBuffer>* layer : {&up, &gate, &down}) layer->hold_derived(4096);
  }
  FeedForward layers(bool with_gate) {
    FeedForward layers{
        {up.weight(), up.bias()}, {down.weight(), down.bias()}, Activation::gelu_erf, std::nullopt};
    if (with_gate) layers.gate = LayerView{gate.weight(), gate.bias()};
    return layers;
  }
  Status run(bool with_gate, const Context& context) {
    y.fill(kPoison);
    return feed_forward(up.x_view(), layers(with_gate), view(y, kOut), context);
  }
  // The same by calls of linear, into `want`.
  void run_apart(bool with_gate, const Context& context) {
    const Activation activation = Activation::gelu_erf;
    expect_ok(linear(up.x_view(), up.weight(), up.bias(), with_gate ? Activation::none : activation,
                     view(hidden, kHidden), context));
    if (with_gate) {
      expect_ok(linear(up.x_view(), gate.weight(), gate.bias(), activation, view(gated, kHidden), context));
    }
    const DeviceBuffer between = with_gate ? product() : DeviceBuffer::upload<std::byte>(hidden.download());
    expect_ok(linear(view(between, kHidden), down.weight(), down.bias(), Activation::none, view(want, kOut),
                     context));
  }
  // hidden times gated, by the host.
  DeviceBuffer product() const {
    std::vector<std::byte> a = hidden.download();
    const std::vector<std::byte> b = gated.download();
    visit_float(dtype, [&]<class T>(T) {
      for (std::size_t at = 0; at < a.size(); at += sizeof(T)) {
        T left, right;
        std::memcpy(&left, a.data() + at, sizeof(T));
        std::memcpy(&right, b.data() + at, sizeof(T));
        store(&left, load(&left) * load(&right));
        std::memcpy(a.data() + at, &left, sizeof(T));
      }
    });
    return DeviceBuffer::upload<std::byte>(a);
  }
};

TEST_F(CudaTest, NetworksAreTheirLayers) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const auto& [rows, cols] :
         {std::pair<std::int64_t, std::int64_t>{64, 64}, {16, 16}, {32, 1}, {4, 1}, {1, 1}, {8, 12}}) {
      for (const std::int64_t tokens : {1, 40, 300}) {
        for (const bool held : {false, true}) {
          Network network(tokens, rows, cols, dtype);
          if (held) network.hold_derived();
          for (const bool gate : {false, true}) {
            Provider apart, together;
            network.run_apart(gate, apart.context());
            expect_ok(network.run(gate, together.context()));
            EXPECT_EQ(network.y.download(), network.want.download())
                << name(dtype) << ' ' << rows << 'x' << cols << ' ' << tokens << (held ? " held" : "")
                << (gate ? " gate" : "");
          }
        }
      }
    }
  }
}

// Layers whose kernels differ, as their blocks do: each still gets its own.
TEST_F(CudaTest, NetworksOfUnlikeLayers) {
  Network network(64, 64, 64, DType::bf16);
  const Problem other = make_problem({64, kOut, kHidden, 16, 1, 0.4, DType::bf16, false, 0}, 3);
  ProblemIn<DeviceBuffer> down(other);
  network.hold_derived();
  down.hold_derived(4096);
  Provider apart, together;
  expect_ok(linear(network.up.x_view(), network.up.weight(), network.up.bias(), Activation::relu,
                   network.view(network.hidden, kHidden), apart.context()));
  expect_ok(linear(network.view(network.hidden, kHidden), down.weight(), down.bias(), Activation::none,
                   network.view(network.want, kOut), apart.context()));
  expect_ok(feed_forward(
      network.up.x_view(),
      {{network.up.weight(), network.up.bias()}, {down.weight(), down.bias()}, Activation::relu, {}},
      network.view(network.y, kOut), together.context()));
  EXPECT_EQ(network.y.download(), network.want.download());
}

// Exactly what a provider is asked for does as workspace of the caller's; a byte less is refused, and names
// it.
TEST_F(CudaTest, NetworksSayTheirWorkspace) {
  Network network(300, 32, 32, DType::bf16);
  network.hold_derived();
  Provider provider;
  expect_ok(network.run(false, provider.context()));
  const std::int64_t bytes = provider.bytes();
  ASSERT_GE(bytes, 300 * kHidden * 2);
  const std::vector<std::byte> found = network.y.download();
  const DeviceBuffer workspace(static_cast<std::size_t>(bytes));
  Context context;
  context.workspace = {workspace.data(), bytes};
  expect_ok(network.run(false, context));
  EXPECT_EQ(network.y.download(), found);
  context.workspace.bytes = bytes - 1;
  const Status status = network.run(false, context);
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(status.message().find(std::to_string(bytes)), std::string::npos) << status.message();
}

// Hidden features are not saved there, with a kernel of the network's own or without.
TEST_F(CudaTest, NetworksSaveNothing) {
  Network network(40, 64, 64, DType::bf16);
  Provider provider;
  const Status status =
      feed_forward(network.up.x_view(), network.layers(false), network.view(network.y, kOut),
                   provider.context(), {network.view(network.hidden, kHidden), {}});
  EXPECT_EQ(status.code(), StatusCode::unsupported) << status.message();
}

}  // namespace
}  // namespace rarefy::test
