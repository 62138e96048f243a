// feed_forward of two layers in int8 that round what they multiply, by every family that this machine has:
// bit for bit linear's layers one after the other, with float hidden features; and where activations are made
// to 2⁻¹² the reference's within what a level of each hidden feature makes.
#include "core/registry.h"
#include "int8_checks.h"
#include "rarefy/feed_forward.h"

namespace rarefy::test::int8 {
namespace {

struct Sizes {
  std::int64_t m, k, hidden, n;
  std::pair<std::int64_t, std::int64_t> up, down;
  double density = 0.4;
  bool integers = false;
  DType dtype = DType::f32;
  bool gated = false;
  std::pair<std::int64_t, std::int64_t> gate = up;
};

// Two layers in the memory of a call, or three with a gate; the last one's x is what those before make.
class Network {
 public:
  Network(const Sizes& s, Activation activation, bool derived)
      : sizes_(s),
        activation_(activation),
        up_({s.m, s.hidden, s.k, s.up.first, s.up.second, s.density, s.dtype, s.integers}, 1),
        gate_({s.m, s.hidden, s.k, s.gate.first, s.gate.second, s.density, s.dtype, s.integers}, 3),
        down_({s.m, s.n, s.hidden, s.down.first, s.down.second, s.density, s.dtype, s.integers}, 2),
        up_run_(up_, Scaling::dynamic, {}, derived),
        gate_run_(gate_, Scaling::dynamic, {}, derived),
        down_run_(down_, Scaling::dynamic, {}, derived),
        x_(HostBuffer::upload<std::byte>(encode(up_.x, s.dtype))),
        up_bias_(HostBuffer::upload<std::byte>(encode(up_.bias, s.dtype))),
        gate_bias_(HostBuffer::upload<std::byte>(encode(gate_.bias, s.dtype))),
        down_bias_(HostBuffer::upload<std::byte>(encode(down_.bias, s.dtype))),
        float_up_bias_(HostBuffer::upload<std::byte>(encode(up_.bias, DType::f32))),
        float_gate_bias_(HostBuffer::upload<std::byte>(encode(gate_.bias, DType::f32))),
        float_down_bias_(HostBuffer::upload<std::byte>(encode(down_.bias, DType::f32))),
        y_(static_cast<std::size_t>(s.m * down_.y_stride()) * size_of(s.dtype)) {}

  Status run(Executor executor = {}, const HiddenViews& save = {}) {
    FeedForward layers{
        {up_run_.weight(), up_bias_.data()}, {down_run_.weight(), down_bias_.data()}, activation_, {}};
    if (sizes_.gated) layers.gate = LayerView{gate_run_.weight(), gate_bias_.data()};
    Context context;
    context.executor = executor;
    return feed_forward(x(), layers, y(), context, save);
  }
  const std::vector<float>& hidden() const { return hidden_; }  // of one_by_one
  const std::vector<float>& gates() const { return gates_; }
  // The same by linear, in floats, as a network keeps hidden features; rows without gaps.
  std::vector<double> one_by_one() {
    const std::int64_t hidden = sizes_.hidden;
    hidden_.resize(static_cast<std::size_t>(sizes_.m * hidden));
    const MutableMatrixView out{hidden_.data(), DType::f32, sizes_.m, hidden, hidden};
    const std::vector<float> in = floats();
    const MatrixView x{in.data(), DType::f32, sizes_.m, sizes_.k, sizes_.k};
    expect_ok(linear(x, up_run_.weight(), float_up_bias_.data(),
                     sizes_.gated ? Activation::none : activation_, out));
    if (sizes_.gated) {
      gates_.resize(hidden_.size());
      expect_ok(linear(x, gate_run_.weight(), float_gate_bias_.data(), activation_,
                       {gates_.data(), DType::f32, sizes_.m, hidden, hidden}));
      for (std::size_t i = 0; i < hidden_.size(); ++i) hidden_[i] *= gates_[i];
    }
    std::vector<float> result(static_cast<std::size_t>(sizes_.m * sizes_.n));
    expect_ok(linear({hidden_.data(), DType::f32, sizes_.m, hidden, hidden}, down_run_.weight(),
                     float_down_bias_.data(), Activation::none,
                     {result.data(), DType::f32, sizes_.m, sizes_.n, sizes_.n}));
    return decode(encode(std::vector<double>(result.begin(), result.end()), sizes_.dtype), sizes_.dtype);
  }
  std::vector<double> result() const { return decode(y_.download(), sizes_.dtype); }
  std::int64_t y_stride() const { return down_.y_stride(); }
  // What one level more or less of each hidden feature of a token makes of output n, at most.
  double level(std::int64_t m, std::int64_t n) const {
    float most = 0;
    for (std::int64_t h = 0; h < sizes_.hidden; ++h)
      most = std::max(most, std::abs(hidden_[static_cast<std::size_t>(m * sizes_.hidden + h)]));
    const BsrShape& shape = down_.pattern.shape();
    const PlanView plan = down_.pattern.view();
    const std::int64_t i = n / shape.block_rows;
    double sum = 0;
    for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      for (std::int64_t c = 0; c < shape.block_cols; ++c) {
        sum += std::abs(static_cast<double>(down_.values[static_cast<std::size_t>(
            e * shape.block_size() + n % shape.block_rows * shape.block_cols + c)]));
      }
    }
    return sum * static_cast<double>(down_.scales[static_cast<std::size_t>(n)] * most) / 127;
  }

 private:
  MatrixView x() const { return {x_.data(), sizes_.dtype, sizes_.m, sizes_.k, up_.x_stride()}; }
  MutableMatrixView y() { return {y_.data(), sizes_.dtype, sizes_.m, sizes_.n, down_.y_stride()}; }
  std::vector<float> floats() const {
    std::vector<float> in;
    for (std::int64_t m = 0; m < sizes_.m; ++m) {
      for (std::int64_t k = 0; k < sizes_.k; ++k)
        in.push_back(static_cast<float>(up_.x[static_cast<std::size_t>(m * up_.x_stride() + k)]));
    }
    return in;
  }

  Sizes sizes_;
  Activation activation_;
  Layer up_, gate_, down_;
  LinearRun up_run_, gate_run_, down_run_;
  HostBuffer x_, up_bias_, gate_bias_, down_bias_, float_up_bias_, float_gate_bias_, float_down_bias_;
  Guarded<HostBuffer> y_;
  std::vector<float> hidden_, gates_;
};

const std::vector<Sizes>& all_sizes() {
  static const std::vector<Sizes> sizes = {{64, 48, 96, 64, {32, 1}, {32, 1}},
                                           {130, 40, 100, 37, {16, 1}, {8, 8}},
                                           {37, 33, 70, 50, {4, 1}, {16, 16}},
                                           {20, 64, 130, 16, {3, 5}, {1, 1}},
                                           {1, 32, 64, 32, {32, 1}, {32, 1}},
                                           {3, 32, 64, 32, {32, 1}, {16, 4}},
                                           {65, 300, 64, 200, {64, 64}, {32, 32}},
                                           {16, 24, 48, 40, {2, 2}, {48, 1}},
                                           {33, 16, 17, 5, {16, 1}, {5, 1}, 0.0},
                                           {70, 96, 160, 64, {32, 1}, {32, 1}, 0.4, true},
                                           {50, 40, 64, 33, {8, 1}, {16, 2}, 0.5, true},
                                           // More hidden features than are computed at a time.
                                           {70, 48, 1100, 40, {32, 1}, {32, 1}},
                                           {66, 40, 1030, 24, {4, 1}, {8, 8}, 0.3},
                                           {40, 32, 1300, 24, {64, 1}, {16, 16}, 0.3}};
  return sizes;
}

std::vector<Sizes> with_gates() {
  std::vector<Sizes> sizes = all_sizes();
  for (Sizes s : all_sizes()) {
    s.gated = true;
    sizes.push_back(s);
    if (s.hidden < 1000) continue;
    s.gate = {48, 1};
    sizes.push_back(s);
  }
  return sizes;
}

// Families of int8 alone have no row that runs layers apart: packed weights, and 16 tokens a thread. AMX has
// blocks of 4, 8 and multiples of 16 rows.
bool takes(const std::string& family, const Sizes& s, bool derived = true) {
  const auto whole = [](std::int64_t rows) { return rows == 4 || rows == 8 || rows % 16 == 0; };
  if (family == "amx" && !(whole(s.up.first) && whole(s.down.first))) return false;
  return (family != "amx" && family != "avx_vnni") || (derived && s.m >= 32);
}

class FeedForwardInt8Test : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Cpu, FeedForwardInt8Test, ::testing::ValuesIn(families_of(Scaling::dynamic)),
                         [](const auto& tested) { return tested.param; });

TEST_P(FeedForwardInt8Test, LayersOneByOne) {
  if (GetParam() == "ref") GTEST_SKIP() << "sums networks in double, layers in float";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Sizes s : with_gates()) {
      s.dtype = dtype;
      for (const bool derived : {true, false}) {
        if (!takes(GetParam(), s, derived)) continue;
        for (const Activation activation : {Activation::none, Activation::relu}) {
          SCOPED_TRACE(::testing::Message()
                       << s.m << ' ' << s.k << ' ' << s.hidden << ' ' << s.up.first << ' ' << s.down.first
                       << ' ' << name(dtype) << ' ' << derived << ' ' << s.gated);
          const Force force(GetParam());
          Network network(s, activation, derived);
          expect_ok(network.run());
          const std::vector<double> together = network.result();
          ThreadPool pool(2);
          expect_ok(network.run(pool.executor()));
          const std::vector<double> on_two = network.result();
          const std::vector<double> apart = network.one_by_one();
          for (std::int64_t m = 0; m < s.m; ++m) {
            for (std::int64_t n = 0; n < network.y_stride(); ++n) {
              const auto at = static_cast<std::size_t>(m * network.y_stride() + n);
              if (n >= s.n) {
                ASSERT_TRUE(std::isnan(together[at])) << m << ' ' << n;
                continue;
              }
              const double expected = apart[static_cast<std::size_t>(m * s.n + n)];
              ASSERT_EQ(together[at], expected) << m << ' ' << n;
              ASSERT_EQ(on_two[at], expected) << m << ' ' << n;
            }
          }
        }
      }
    }
  }
}

TEST_P(FeedForwardInt8Test, Reference) {
  for (const Sizes& s : with_gates()) {
    if (!takes(GetParam(), s)) continue;
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      std::optional<Network> made;
      std::vector<double> got, exact;
      {
        const Force force(GetParam());
        made.emplace(s, activation, true);
        expect_ok(made->run());
        got = made->result();
      }
      Network& network = *made;
      {
        const Force force("ref");
        expect_ok(network.run());
        exact = network.result();
        network.one_by_one();  // for its hidden features
      }
      for (std::int64_t m = 0; m < s.m; ++m) {
        for (std::int64_t n = 0; n < s.n; ++n) {
          const auto at = static_cast<std::size_t>(m * network.y_stride() + n);
          // Integers through ReLU are the same in double: levels are, too.
          const bool same = s.integers && activation == Activation::relu;
          const double unit = same ? 8 * accumulator(DType::f32) : 0x1p-11;  // the scale of a token moves
          const double bound = unit * std::abs(exact[at]) + 1e-5;
          ASSERT_LE(std::abs(got[at] - exact[at]), bound + (same ? 0 : network.level(m, n)))
              << m << ' ' << n << ' ' << s.m;
        }
      }
    }
  }
}

// Sums before the activation go where the caller wants them.
TEST_P(FeedForwardInt8Test, SavesWhatTheActivationTakes) {
  for (const Sizes& s : with_gates()) {
    if (s.density == 0 || !takes(GetParam(), s)) continue;
    const Force force(GetParam());
    Sizes apart = s;
    apart.gated = false;
    Network network(s, Activation::relu, true), plain(apart, Activation::none, true),
        gates(s, Activation::none, true);
    std::vector<float> saved(static_cast<std::size_t>(s.m * s.hidden), -1.0F), gate = saved;
    HiddenViews views{{saved.data(), DType::f32, s.m, s.hidden, s.hidden}, {}};
    if (s.gated) views.gate = {gate.data(), DType::f32, s.m, s.hidden, s.hidden};
    expect_ok(network.run({}, views));
    plain.one_by_one();
    gates.one_by_one();
    for (std::size_t i = 0; i < saved.size(); ++i) {
      const auto bound = [](float value) { return 4 * 0x1p-24F * (std::abs(value) + 4); };
      ASSERT_NEAR(saved[i], plain.hidden()[i], bound(plain.hidden()[i])) << i;
      if (!s.gated) continue;
      ASSERT_NEAR(gate[i], gates.gates()[i], bound(gates.gates()[i])) << i;
    }
  }
}

// What a caller of the core may get wrong.
TEST(FeedForwardInt8ArgumentsTest, BadLayers) {
  const Layer up({4, 32, 16, 16, 1}, 1), down({4, 16, 32, 16, 1}, 2);
  LinearRun up_run(up, Scaling::dynamic), down_run(down, Scaling::dynamic);
  std::vector<float> x(64), y(64);
  const auto expect_error = [](const Status& status, std::string_view text) {
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  const auto run = [&](const BsrView& first, const BsrView& second) {
    return feed_forward({x.data(), DType::f32, 4, 16, 16}, {{first}, {second}, Activation::relu, {}},
                        {y.data(), DType::f32, 4, 16, 16});
  };
  expect_ok(run(up_run.weight(), down_run.weight()));
  BsrView without = down_run.weight();
  without.scales = nullptr;
  expect_error(run(up_run.weight(), without), "scales must point to their elements");
  BsrView stray = down_run.weight();
  stray.scaling = Scaling::none;
  expect_error(run(up_run.weight(), stray), "scales must come with a scaling");
  BsrView small = up_run.weight();
  if (small.derived.key != 0) {
    small.derived.packed_bytes = 1;
    expect_error(run(small, down_run.weight()), "must have at least");
  }
}

}  // namespace
}  // namespace rarefy::test::int8
