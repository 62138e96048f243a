// feed_forward on the CPU: every family forced, against its layers one after the other in double; the bits
// of linear; bf16 in pairs; every configuration; bad input.
#include "rarefy/feed_forward.h"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <set>

#include "core/registry.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using BlockShapes = std::array<std::pair<std::int64_t, std::int64_t>, 3>;  // of up, gate, down

struct Spec {
  std::int64_t m, k, hidden, n;
  BlockShapes blocks;
  double density = 0.4;
  DType dtype = DType::f32;
  bool integers = false;
  std::int64_t stride = 1;
  bool gated = false;
  Activation activation = Activation::relu;
  std::optional<DType> stored = {};  // the dtype of the values, if not `dtype`
};

constexpr BlockShapes all_of(std::int64_t rows, std::int64_t cols) {
  return {{{rows, cols}, {rows, cols}, {rows, cols}}};
}

// The layers as three problems, whose x is that of the first.
struct Layers {
  Spec spec;
  Problem up, gate, down;

  explicit Layers(const Spec& s)
      : spec(s),
        up(layer(s, 0, s.hidden, s.k, 1)),
        gate(layer(s, 1, s.hidden, s.k, 2)),
        down(layer(s, 2, s.n, s.hidden, 3)) {}

 private:
  static Problem layer(const Spec& s, std::size_t which, std::int64_t n, std::int64_t k, unsigned seed) {
    const auto& [rows, cols] = s.blocks[which];
    Problem problem = make_problem({s.m, n, k, rows, cols, s.density, s.dtype, s.integers, s.stride}, seed);
    if (s.stored) problem.values = decode(encode(problem.values, *s.stored), *s.stored);
    return problem;
  }
};

// The layers in the memory and dtypes of a call.
struct Chain {
  explicit Chain(const Layers& l, Executor on = {})
      : spec(l.spec),
        executor(on),
        x(upload(l.up.x, spec.dtype)),
        plans{upload(l.up), upload(l.gate), upload(l.down)},
        values{upload(l.up.values, stored()), upload(l.gate.values, stored()),
               upload(l.down.values, stored())},
        biases{upload(l.up.bias, spec.dtype), upload(l.gate.bias, spec.dtype),
               upload(l.down.bias, spec.dtype)},
        y(size(spec.n)),
        up(size(spec.hidden)),
        gate(size(spec.hidden)),
        shapes{l.up.pattern.shape(), l.gate.pattern.shape(), l.down.pattern.shape()},
        x_stride(l.up.x_stride()) {}

  FeedForward layers() const {
    FeedForward layers{layer(0), layer(2), spec.activation, {}};
    if (spec.gated) layers.gate = layer(1);
    return layers;
  }
  LayerView layer(std::size_t which) const {
    const auto words = static_cast<std::int64_t>(plans[which].bytes() / 4);
    const auto* data = static_cast<const std::int32_t*>(plans[which].data());
    return {{*view_device_plan("test", shapes[which], data, words), values[which].data(), stored(),
             Device::cpu, derived[which]},
            biases[which].data()};
  }
  // From now on layers come with what the best kernel of linear derives.
  void hold_derived() {
    for (const std::size_t which : {0, 1, 2}) {
      const rarefy::Problem asked = rarefy::make_problem(Op::linear, shapes[which], 4096, stored());
      const BsrView w = layer(which).weight;
      const DerivedSizes sizes = *derived_sizes(asked);
      prepared[which].emplace(static_cast<std::size_t>(sizes.prepared));
      packed[which].emplace(static_cast<std::size_t>(sizes.packed));
      expect_ok(prepare(asked, w.plan, prepared[which]->data()));
      expect_ok(pack(asked, w, prepared[which]->data(), packed[which]->data()));
      derived[which] = {sizes.key, prepared[which]->data(), packed[which]->data(), sizes.prepared,
                        sizes.packed};
    }
  }
  MatrixView x_view() const { return {x.data(), spec.dtype, spec.m, spec.k, x_stride}; }
  MutableMatrixView view(const Guarded<HostBuffer>& out, std::int64_t cols) const {
    return {out.data(), spec.dtype, spec.m, cols, cols + std::abs(spec.stride)};
  }
  Status feed_forward(bool save, Workspace workspace = {}) const {
    HiddenViews saved;
    if (save) saved.up = view(up, spec.hidden);
    if (save && spec.gated) saved.gate = view(gate, spec.hidden);
    Context context{executor, nullptr, workspace};
    return rarefy::feed_forward(x_view(), layers(), view(y, spec.n), context, saved);
  }

  Spec spec;
  Executor executor;
  HostBuffer x;
  std::array<HostBuffer, 3> plans, values, biases;
  Guarded<HostBuffer> y, up, gate;
  std::array<BsrShape, 3> shapes;
  std::int64_t x_stride;
  std::array<std::optional<HostBuffer>, 3> prepared, packed;
  std::array<Derived, 3> derived;

 private:
  DType stored() const { return spec.stored.value_or(spec.dtype); }
  std::size_t size(std::int64_t cols) const {
    return static_cast<std::size_t>(spec.m * (cols + std::abs(spec.stride))) * size_of(spec.dtype);
  }
  static HostBuffer upload(const std::vector<double>& numbers, DType dtype) {
    return HostBuffer::upload<std::byte>(encode(numbers, dtype));
  }
  static HostBuffer upload(const Problem& problem) {
    return HostBuffer::upload<std::int32_t>(problem.pattern.plan());
  }
};

std::vector<double> linear_of(const Problem& layer, const std::vector<double>& x, std::int64_t x_stride,
                              const std::vector<double>& values, const std::vector<double>* bias,
                              Activation activation = Activation::none) {
  const ProblemSpec& s = layer.spec;
  std::vector<double> y(static_cast<std::size_t>(s.m * s.n));
  const Force reference("ref");
  expect_ok(rarefy::linear({x.data(), DType::f64, s.m, s.k, x_stride},
                           {layer.pattern.view(), values.data(), DType::f64},
                           bias == nullptr ? nullptr : bias->data(), activation,
                           {y.data(), DType::f64, s.m, s.n, s.n}, oracle_context()));
  return y;
}

// act(h) in double: linear with no stored block and h as its bias, a token at a time.
std::vector<double> activated(const std::vector<double>& h, Activation activation) {
  const auto count = static_cast<std::int64_t>(h.size());
  const Pattern none = *Pattern::create({count, 0, 1, 1, 0}, std::vector<std::int32_t>(h.size() + 1), {});
  std::vector<double> y(h.size());
  const Force reference("ref");
  expect_ok(rarefy::linear({nullptr, DType::f64, 1, 0, 0}, {none.view(), nullptr, DType::f64}, h.data(),
                           activation, {y.data(), DType::f64, 1, count, count}));
  return y;
}

// A layer's sums and how far off they may be.
struct Sums {
  std::vector<double> value, error;

  Sums(const Problem& layer, const Layers& l) {
    const std::int64_t stride = l.up.x_stride();
    const auto bias = absolute(layer.bias);
    value = linear_of(layer, l.up.x, stride, layer.values, &layer.bias);
    error = linear_of(layer, absolute(l.up.x), stride, absolute(layer.values), &bias);
    const std::vector<double> terms = layer.stored_per_row();
    for (std::size_t e = 0; e < error.size(); ++e)
      error[e] *= gamma(terms[e % terms.size()] + 1, accumulator(l.spec.dtype));
  }
};

void expect_within(const char* what, const Guarded<HostBuffer>& output, const Spec& spec, std::int64_t cols,
                   const Sums& expected) {
  SCOPED_TRACE(what);
  const std::vector<double> got = decode(output.download(), spec.dtype);
  const std::vector<double> rounded = decode(encode(expected.value, spec.dtype), spec.dtype);
  const std::int64_t stride = cols + std::abs(spec.stride);
  for (std::int64_t m = 0; m < spec.m; ++m) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const double number = got[static_cast<std::size_t>(m * stride + c)];
      const auto e = static_cast<std::size_t>(m * cols + c);
      if (spec.integers) {
        ASSERT_EQ(number, rounded[e]) << '(' << m << ", " << c << ')';
        continue;
      }
      const double bound = expected.error[e] * (1 + storing(spec.dtype)) +
                           storing(spec.dtype) * std::abs(expected.value[e]) +
                           (spec.dtype == DType::f16 ? 0x1p-25 : 0);
      ASSERT_LE(std::abs(number - expected.value[e]), bound) << '(' << m << ", " << c << ')';
    }
  }
}

// y = act(h) W2ᵀ + b2 with the errors of h passed on, as far as slopes (below 1.2) and weights do. In pairs,
// the second product takes act(h) as it is stored.
void expect_feed_forward(const Layers& l, const Chain& run, bool saved, bool pairs = false) {
  const Spec& s = l.spec;
  const double unit = accumulator(s.dtype);
  const Sums up(l.up, l), gate(l.gate, l);
  const std::vector<double>& argument = s.gated ? gate.value : up.value;
  std::vector<double> hidden = activated(argument, s.activation);
  std::vector<double> off(hidden.size());
  for (std::size_t e = 0; e < hidden.size(); ++e) {
    off[e] =
        1.2 * (s.gated ? gate : up).error[e] + activation_error(s.activation, argument[e], hidden[e], unit);
    if (!s.gated) continue;
    off[e] = off[e] * (std::abs(up.value[e]) + up.error[e]) + std::abs(hidden[e]) * up.error[e];
    hidden[e] *= up.value[e];
    off[e] += unit * std::abs(hidden[e]);
  }
  if (pairs) {
    const double half = storing(s.dtype);
    for (std::size_t e = 0; e < hidden.size(); ++e) off[e] = off[e] * (1 + half) + half * std::abs(hidden[e]);
    if (s.integers) hidden = decode(encode(hidden, s.dtype), s.dtype);  // exact before, so exact after
  }
  Sums y = up;  // the same shape of result
  const auto weights = absolute(l.down.values), bias = absolute(l.down.bias);
  y.value = linear_of(l.down, hidden, s.hidden, l.down.values, &l.down.bias);
  y.error = linear_of(l.down, absolute(hidden), s.hidden, weights, &bias);
  const std::vector<double> passed = linear_of(l.down, off, s.hidden, weights, nullptr);
  const std::vector<double> terms = l.down.stored_per_row();
  for (std::size_t e = 0; e < y.error.size(); ++e)
    y.error[e] = y.error[e] * gamma(terms[e % terms.size()] + 1, unit) + passed[e] * (1 + 1e-3);
  expect_within("y", run.y, s, s.n, y);
  if (saved) expect_within("up", run.up, s, s.hidden, up);
  if (saved && s.gated) expect_within("gate", run.gate, s, s.hidden, gate);
}

std::vector<std::string> cpu_impls() {
  std::vector<std::string> families;
  for (const Candidate& candidate :
       explain(make_problem(Op::grad_input, {4, 4, 4, 4, 1}, 8, DType::f32)).candidates) {
    if (candidate.why_not.empty()) families.push_back(candidate.kernel.family);
  }
  return families;
}

class FeedForwardTest : public ::testing::TestWithParam<std::string> {
 protected:
  void check(const Spec& spec, Executor executor = {}) {
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << ' ' << name(spec.dtype) << " M=" << spec.m << ' ' << spec.k << " -> "
                 << spec.hidden << " -> " << spec.n << " blocks " << spec.blocks[0].first << 'x'
                 << spec.blocks[0].second << (spec.gated ? " gated " : " ") << name(spec.activation));
    const Layers layers(spec);
    for (const bool save : {false, true}) {
      const Chain run(layers, executor);
      {
        const Force force(GetParam());
        expect_ok(run.feed_forward(save));
      }
      expect_feed_forward(layers, run, save);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Cpu, FeedForwardTest, ::testing::ValuesIn(cpu_impls()),
                         [](const auto& tested) { return tested.param; });

// Blocks of every kind, the same for all layers and different ones; edges that are padded; exact integers.
TEST_P(FeedForwardTest, EveryBlockShape) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                   {1, 16},
                                   {2, 2},
                                   {4, 1},
                                   {4, 4},
                                   {5, 3},
                                   {16, 1},
                                   {16, 16},
                                   {32, 1},
                                   {17, 9}}) {
    for (const bool gated : {false, true}) {
      check({37, 3 * cols + 20, 70, 45, all_of(rows, cols), 0.4, DType::f32, true, 3, gated});
      check({21, 33, 90, 50, all_of(rows, cols), 0.3, DType::bf16, false, 0, gated, Activation::gelu_erf});
    }
  }
  const BlockShapes mixed{{{4, 1}, {16, 16}, {8, 5}}};
  for (const bool gated : {false, true}) {
    check({40, 50, 100, 60, mixed, 0.5, DType::f32, true, 1, gated});
    check({40, 50, 100, 60, mixed, 0.5, DType::f16, false, 1, gated, Activation::silu});
    check({40, 50, 100, 60, mixed, 0.5, DType::f32, false, 1, gated, Activation::silu, DType::bf16});
  }
}

TEST_P(FeedForwardTest, EveryNumberOfTokens) {
  ThreadPool pool(3);
  for (const std::int64_t tokens : {0, 1, 2, 3, 4, 5, 15, 16, 17, 33, 64, 65, 130, 513, 515}) {
    check({tokens, 24, 40, 20, all_of(4, 1), 0.5, DType::f32, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 24, 40, 20, all_of(4, 4), 0.5, DType::bf16, true, 1, true}, pool.executor());
    check({tokens, 24, 40, 20, all_of(1, 1), 0.5, DType::f32, true, 1, true}, pool.executor());
  }
}

TEST_P(FeedForwardTest, EmptyFullAndNothing) {
  for (const double density : {0.0, 1.0}) {
    for (const std::int64_t tokens : {3, 20}) {
      check({tokens, 30, 41, 25, all_of(4, 1), density, DType::f32, true, 2});
      check({tokens, 30, 41, 25, all_of(8, 8), density, DType::bf16, true, 2, true});
    }
  }
  check({9, 0, 12, 7, all_of(4, 1), 0.0, DType::f32, true, 2});   // no input features
  check({9, 8, 0, 7, all_of(4, 1), 0.0, DType::f32, true, 2});    // no hidden ones: y is the bias
  check({9, 8, 12, 0, all_of(4, 1), 0.5, DType::f32, true, 2});   // no outputs, but what is saved
  check({9, 3, 5, 7, all_of(40, 50), 1.0, DType::f32, true, 2});  // one block larger than each matrix
}

TEST_P(FeedForwardTest, Activations) {
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    for (const bool gated : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        check({35, 40, 64, 30, all_of(4, 1), 0.4, dtype, false, 1, gated, activation});
      }
    }
  }
}

// Several slices of hidden features in L2, their sums of thousands of terms.
TEST_P(FeedForwardTest, LargeLayers) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no slices, and is slow";
  ThreadPool pool(2);
  check({70, 40, 12'000, 36, all_of(4, 1), 0.1, DType::f32, true, 0}, pool.executor());
  check({130, 3000, 900, 64, all_of(16, 16), 0.1, DType::f32, false, 0, true, Activation::silu});
}

// x is NaN where nothing is stored; a row of NaN elsewhere stays in its row. Hidden features past the edge
// meet the padding of `down` and must not be NaN.
TEST_P(FeedForwardTest, NanStaysWhereItIs) {
  for (const std::int64_t tokens : {3, 20}) {
    Layers layers({tokens, 17, 21, 13, all_of(4, 4), 0.9, DType::f32, true, 0});
    for (std::int64_t k = 0; k < 17; ++k) layers.up.x[static_cast<std::size_t>(17 + k)] = kNan;
    const Chain run(layers);
    {
      const Force force(GetParam());
      expect_ok(run.feed_forward(false));
    }
    const std::vector<double> y = decode(run.y.download(), DType::f32);
    const std::vector<double> hidden =
        linear_of(layers.up, layers.up.x, 17, layers.up.values, &layers.up.bias, Activation::relu);
    const std::vector<double> want =
        linear_of(layers.down, hidden, 21, layers.down.values, &layers.down.bias);
    bool some = false;
    for (std::size_t e = 0; e < want.size(); ++e) {
      ASSERT_TRUE(want[e] == y[e] || (std::isnan(want[e]) && std::isnan(y[e]))) << e;
      some = some || std::isnan(y[e]);
    }
    EXPECT_TRUE(some);
  }
}

TEST_P(FeedForwardTest, IsTheOneForced) {
  const Force force(GetParam());
  const auto chosen = [](const BsrShape& shape, std::int64_t tokens) {
    return explain(make_problem(Op::feed_forward, shape, tokens, DType::f32)).kernel;
  };
  EXPECT_EQ(chosen({64, 16, 4, 1, 100}, 64), GetParam() + "_feed_forward");
  if (GetParam() == "ref") return;
  EXPECT_EQ(chosen({64, 16, 1, 16, 20}, 64), GetParam() + "_feed_forward_apart");
  if (GetParam() == "avx512" || GetParam() == "avx2") {  // which have kernels for few tokens
    EXPECT_EQ(chosen({64, 16, 4, 1, 100}, 4), GetParam() + "_feed_forward_apart");
  }
}

// In float32 the chain has the bits of its layers one after the other, on any number of threads.
TEST_P(FeedForwardTest, HasTheBitsOfItsLayers) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference keeps hidden features in double";
  const Force force(GetParam());
  const Layers layers({150, 70, 200, 60, all_of(4, 1), 0.4, DType::f32, false, 0, false, Activation::silu});
  std::vector<float> hidden(150 * 200), y(150 * 60);
  const Chain apart(layers);
  const FeedForward l = apart.layers();
  expect_ok(linear(apart.x_view(), l.up.weight, l.up.bias, Activation::silu,
                   {hidden.data(), DType::f32, 150, 200, 200}));
  expect_ok(linear({hidden.data(), DType::f32, 150, 200, 200}, l.down.weight, l.down.bias, Activation::none,
                   {y.data(), DType::f32, 150, 60, 60}));
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    const Chain run(layers, pool.executor());
    expect_ok(run.feed_forward(threads == 2));
    const std::vector<std::byte> got = run.y.download();
    EXPECT_EQ(std::memcmp(got.data(), y.data(), got.size()), 0) << threads;
  }
}

// The same where sums are long enough for several parts, and slices cut them elsewhere.
TEST_P(FeedForwardTest, HasTheBitsOfItsLayersInLongSums) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference keeps hidden features in double";
  const Layers layers({40, 900, 1300, 24, all_of(4, 1), 0.8, DType::f32, false, 0, false, Activation::relu});
  std::vector<float> hidden(40 * 1300), y(40 * 24);
  const Chain run(layers);
  const FeedForward l = run.layers();
  {
    const Force force(GetParam());
    expect_ok(linear(run.x_view(), l.up.weight, l.up.bias, Activation::relu,
                     {hidden.data(), DType::f32, 40, 1300, 1300}));
    expect_ok(linear({hidden.data(), DType::f32, 40, 1300, 1300}, l.down.weight, l.down.bias,
                     Activation::none, {y.data(), DType::f32, 40, 24, 24}));
  }
  for (const char* config : {"features=1300 splits=1", "features=100 splits=1", "features=700 splits=2"}) {
    const Force force("cpu:" + GetParam() + "," + GetParam() + "_feed_forward(" + config + ")");
    expect_ok(run.feed_forward(false));
    const std::vector<std::byte> got = run.y.download();
    EXPECT_EQ(std::memcmp(got.data(), y.data(), got.size()), 0) << config;
  }
}

const Kernel& kernel_named(std::string_view name) {
  for (const Kernel& kernel : registry()) {
    if (kernel.name == name) return kernel;
  }
  throw std::runtime_error("no such kernel");
}

// The families that take bf16 in pairs, of those that this machine can run, on layers that linear packed.
class FeedForwardPairsTest : public ::testing::TestWithParam<std::string> {
 public:
  static std::vector<std::string> families() {
    rarefy::Problem asked = make_problem(Op::feed_forward, {16, 16, 16, 2, 1}, 8, DType::bf16);
    asked.derived = kAnyDerived;
    std::vector<std::string> families;
    for (const Candidate& candidate : explain(asked).candidates) {
      const KernelInfo& kernel = candidate.kernel;
      const bool pairs =
          kernel.name == kernel.family + "_feed_forward" &&
          (kernel.family == "amx" || kernel.family == "avx512_bf16" || kernel.family == "pairs");
      if (pairs && candidate.why_not.empty()) families.push_back(std::string(kernel.family));
    }
    return families;
  }

 protected:
  void check(Spec spec, Executor executor = {}) {
    spec.dtype = DType::bf16;
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << " M=" << spec.m << ' ' << spec.k << " -> " << spec.hidden << " -> "
                 << spec.n << " blocks " << spec.blocks[0].first << 'x' << spec.blocks[0].second << ' '
                 << spec.blocks[2].first << 'x' << spec.blocks[2].second << ' ' << name(spec.activation));
    const Layers layers(spec);
    for (const bool save : {false, true}) {
      Chain run(layers, executor);
      const Force force(GetParam());
      run.hold_derived();
      expect_ok(run.feed_forward(save));
      expect_feed_forward(layers, run, save, true);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Cpu, FeedForwardPairsTest, ::testing::ValuesIn(FeedForwardPairsTest::families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(FeedForwardPairsTest, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{16, 1}, {32, 1}, {48, 5},  {64, 1},
                                                          {16, 2}, {32, 3}, {16, 16}, {32, 32}};
  for (const auto& [rows, cols] : blocks) {
    for (const auto& [down_rows, down_cols] : blocks) {
      const BlockShapes mixed{{{rows, cols}, {rows, cols}, {down_rows, down_cols}}};
      check({37, 2 * cols + 20, 3 * rows + 5, 70, mixed, 0.4, DType::bf16, true, 3});
      check({64, 33, 2 * rows, 90, mixed, 0.3, DType::bf16, false, 0, false, Activation::gelu_erf});
    }
  }
}

TEST_P(FeedForwardPairsTest, EveryNumberOfTokens) {
  ThreadPool pool(3);
  for (const std::int64_t tokens : {5, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130, 300, 513}) {
    check({tokens, 50, 130, 70, all_of(32, 1), 0.5, DType::bf16, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 50, 130, 70, all_of(16, 4), 0.5, DType::bf16, true, 1}, pool.executor());
  }
}

TEST_P(FeedForwardPairsTest, EmptyFullAndNothing) {
  for (const double density : {0.0, 0.03, 1.0}) {
    check({37, 30, 141, 125, all_of(32, 1), density, DType::bf16, true, 2});
    check({37, 30, 141, 125, all_of(16, 16), density, DType::bf16, true, 2});
  }
  check({9, 0, 40, 17, all_of(16, 1), 0.0, DType::bf16, true, 2});  // no input features
  check({9, 8, 0, 17, all_of(16, 1), 0.0, DType::bf16, true, 2});   // no hidden ones: y is the bias
  check({9, 8, 40, 0, all_of(16, 1), 0.5, DType::bf16, true, 2});   // no outputs, but what is saved
  check({9, 3, 5, 7, all_of(48, 50), 1.0, DType::bf16, true, 2});   // one block larger than each matrix
}

// The bits of two calls of linear by the same family, on any number of threads, whatever the activation.
TEST_P(FeedForwardPairsTest, HasTheBitsOfItsLayers) {
  const Force force(GetParam());
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    for (const BlockShapes& blocks : {all_of(32, 1), all_of(16, 16), all_of(32, 32)}) {
      const Layers layers({150, 200, 300, 130, blocks, 0.4, DType::bf16, false, 0, false, activation});
      Chain apart(layers);
      apart.hold_derived();
      const FeedForward l = apart.layers();
      const Guarded<HostBuffer> hidden(150 * 300 * 2), y(150 * 130 * 2);
      const MutableMatrixView between{hidden.data(), DType::bf16, 150, 300, 300};
      expect_ok(linear(apart.x_view(), l.up.weight, l.up.bias, activation, between));
      expect_ok(linear(between, l.down.weight, l.down.bias, Activation::none,
                       {y.data(), DType::bf16, 150, 130, 130}));
      for (const int threads : {1, 2, 3, 7}) {
        ThreadPool pool(threads);
        Chain run(layers, pool.executor());
        run.hold_derived();
        expect_ok(run.feed_forward(threads == 2));
        EXPECT_EQ(run.y.download(), y.download()) << name(activation) << ' ' << threads;
      }
    }
  }
}

// x is NaN where nothing is stored; a row of NaN elsewhere stays in its row, hidden features past the edge
// are none.
TEST_P(FeedForwardPairsTest, NanStaysWhereItIs) {
  for (const BlockShapes& blocks : {all_of(16, 1), all_of(16, 2), all_of(32, 32)}) {
    Layers layers({40, 50, 75, 39, blocks, 0.5, DType::bf16, true, 0});
    for (std::int64_t k = 0; k < 50; k += 2) layers.up.x[static_cast<std::size_t>(50 + k)] = kNan;
    Chain run(layers);
    {
      const Force force(GetParam());
      run.hold_derived();
      expect_ok(run.feed_forward(false));
    }
    const std::vector<double> y = decode(run.y.download(), DType::bf16);
    std::vector<double> hidden =
        linear_of(layers.up, layers.up.x, 50, layers.up.values, &layers.up.bias, Activation::relu);
    hidden = decode(encode(hidden, DType::bf16), DType::bf16);
    std::vector<double> want = linear_of(layers.down, hidden, 75, layers.down.values, &layers.down.bias);
    want = decode(encode(want, DType::bf16), DType::bf16);
    bool some = false;
    for (std::size_t e = 0; e < want.size(); ++e) {
      ASSERT_TRUE(want[e] == y[e] || (std::isnan(want[e]) && std::isnan(y[e]))) << e;
      some = some || std::isnan(y[e]);
    }
    EXPECT_TRUE(some);
  }
}

// Every candidate, and some that nobody would choose: the same bits, within exactly the workspace asked for.
TEST_P(FeedForwardPairsTest, EveryConfigurationComputesTheSame) {
  ThreadPool pool(2);
  const Layers layers({200, 40, 150, 70, all_of(32, 1), 0.5, DType::bf16, false, 0, false, Activation::silu});
  Chain run(layers, pool.executor());
  rarefy::Problem asked =
      make_problem(Op::feed_forward, layers.up.pattern.shape(), 200, DType::bf16, Device::cpu, 2);
  asked.down.shape = layers.down.pattern.shape();
  asked.derived = kAnyDerived;
  const Kernel& kernel = kernel_named(GetParam() + "_feed_forward");
  std::vector<std::string> configs{"panels=1 splits=1", "panels=3 splits=2", "panels=7 splits=5",
                                   "panels=16 splits=1", "panels=2 splits=4"};
  for (const Config& config : kernel.candidates(asked, cpu_machine()))
    configs.push_back(to_string(kernel, config));
  std::set<std::vector<std::byte>> results;
  for (const std::string& config : configs) {
    const Force one("cpu:" + GetParam() + "," + std::string(kernel.name) + "(" + config + ")");
    if (run.derived[0].key == 0) run.hold_derived();
    const Explanation e = explain(asked);
    ASSERT_EQ(e.kernel, kernel.name) << to_string(e);
    const Guarded<HostBuffer> memory(static_cast<std::size_t>(e.workspace + 64));
    auto* base = static_cast<std::byte*>(memory.data());
    while (reinterpret_cast<std::uintptr_t>(base) % 64 != 0) ++base;
    run.y.poison();
    run.up.poison();
    expect_ok(run.feed_forward(true, {base, e.workspace}));
    std::vector<std::byte> all = run.y.download();
    const std::vector<std::byte> up = run.up.download();
    all.insert(all.end(), up.begin(), up.end());
    results.insert(std::move(all));
    (void)memory.download();  // checks its guards
  }
  EXPECT_EQ(results.size(), 1U);
  for (const char* config : {"panels=0", "panels=5000", "splits=0", "splits=6"}) {
    const Force one("cpu:" + GetParam() + "," + std::string(kernel.name) + "(" + config + ")");
    const Status status = run.feed_forward(false);
    EXPECT_NE(status.message().find("panels and splits of the config must be in [1, 4096] and [1, 5]; got "),
              std::string::npos)
        << status.message();
  }
}

// Only for who holds what linear's row of the family derives, for each layer, in full.
TEST_P(FeedForwardPairsTest, TakesWhatLinearDerives) {
  const Layers layers({40, 50, 75, 39, all_of(32, 1), 0.5, DType::bf16, true, 0});
  Chain run(layers);
  const Force force(GetParam());
  const Status without = run.feed_forward(false);
  EXPECT_NE(without.message().find("its prepared or packed weight is not at hand"), std::string::npos)
      << without.message();
  run.hold_derived();
  expect_ok(run.feed_forward(false));
  const Derived down = run.derived[2];
  run.derived[2].key ^= 2;
  EXPECT_EQ(run.feed_forward(false).message(), without.message());
  run.derived[2] = down;
  run.derived[2].packed_bytes -= 64;
  EXPECT_NE(run.feed_forward(false).message().find("[feed_forward] down derived.packed must have"),
            std::string::npos)
      << run.feed_forward(false).message();
  run.derived[2] = down;
  run.derived[0].prepared_bytes -= 64;
  EXPECT_NE(run.feed_forward(false).message().find("[feed_forward] up derived.prepared must have"),
            std::string::npos)
      << run.feed_forward(false).message();
  rarefy::Problem p = make_problem(Op::feed_forward, {64, 32, 16, 1, 50}, 40, DType::bf16);
  p.derived = kAnyDerived;
  const auto reason = [](const rarefy::Problem& problem) {
    for (const Candidate& candidate : explain(problem).candidates) {
      if (candidate.kernel.name == GetParam() + "_feed_forward") return candidate.why_not;
    }
    return std::string("no such kernel");
  };
  EXPECT_EQ(reason(p), "");
  rarefy::Problem other = p;
  other.gate = other.weight;
  EXPECT_EQ(reason(other), "takes networks without a gate");
  other = p;
  other.in = DType::f32;
  EXPECT_EQ(reason(other), "takes bf16 inputs and values alone, to bf16");
  other = p;
  other.tokens = 4;
  EXPECT_EQ(reason(other), "takes more than 4 tokens; got 4");
  other = p;
  other.down.shape.block_rows = 8;
  EXPECT_EQ(reason(other), "takes blocks of a multiple of 16 outputs; got 8");
}

// Every candidate, and some that nobody would choose: the same bits, within exactly the workspace asked for.
TEST(FeedForwardConfigTest, EveryConfigurationComputesTheSame) {
  const Force force("scalar");
  ThreadPool pool(2);
  for (const bool gated : {false, true}) {
    const Layers layers(
        {33, 20, 100, 30, {{{4, 1}, {8, 2}, {4, 5}}}, 0.5, DType::bf16, false, 0, gated, Activation::silu});
    rarefy::Problem asked =
        make_problem(Op::feed_forward, layers.up.pattern.shape(), 33, DType::bf16, Device::cpu, 2);
    asked.down.shape = layers.down.pattern.shape();
    if (gated) asked.gate = {Format::bsr, layers.gate.pattern.shape(), DType::bf16};
    const Kernel& kernel = kernel_named("scalar_feed_forward");
    std::vector<std::string> configs{"vectors=1 features=40 splits=1", "vectors=2 features=40 splits=3",
                                     "vectors=2 features=120 splits=1", "vectors=1 features=120 splits=7",
                                     "vectors=1 features=80 splits=1"};
    for (const Config& config : kernel.candidates(asked, cpu_machine()))
      configs.push_back(to_string(kernel, config));
    std::set<std::vector<std::byte>> results;
    for (const std::string& config : configs) {
      const Force one("cpu:scalar,scalar_feed_forward(" + config + ")");
      const Explanation e = explain(asked);
      ASSERT_EQ(e.kernel, "scalar_feed_forward") << to_string(e);
      const Guarded<HostBuffer> memory(static_cast<std::size_t>(e.workspace + 64));
      auto* base = static_cast<std::byte*>(memory.data());
      while (reinterpret_cast<std::uintptr_t>(base) % 64 != 0) ++base;
      const Chain run(layers, pool.executor());
      expect_ok(run.feed_forward(true, {base, e.workspace}));
      std::vector<std::byte> all = run.y.download();
      const std::vector<std::byte> up = run.up.download(), gate = run.gate.download();
      all.insert(all.end(), up.begin(), up.end());
      all.insert(all.end(), gate.begin(), gate.end());
      results.insert(std::move(all));
      (void)memory.download();  // checks its guards
    }
    EXPECT_EQ(results.size(), 1U);
    expect_feed_forward(
        layers,
        [&] {
          Chain run(layers);
          expect_ok(run.feed_forward(false));
          return run;
        }(),
        false);
  }
}

TEST(FeedForwardConfigTest, ConfigurationsOutOfRangeAreRefused) {
  const Layers layers({33, 20, 100, 30, all_of(4, 1)});
  const Chain run(layers);
  for (const auto& [config, text] :
       {std::pair{"vectors=0", "vectors of the config must be in [1, 2]; got 0"},
        {"vectors=9", "vectors of the config must be in [1, 2]; got 9"},
        {"features=0", "features of the config must be a multiple of 4; got 0"},
        {"features=6", "features of the config must be a multiple of 4; got 6"},
        {"splits=0", "splits of the config must be in [1, 100]; got 0"},
        {"splits=200", "splits of the config must be in [1, 100]; got 200"},
        {"features=4 splits=2", "features of the config must be at least hidden features / splits; got 4"}}) {
    const Force force(std::string("cpu:scalar,scalar_feed_forward(") + config + ")");
    const Status status = run.feed_forward(false);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  }
  const Layers flat({33, 20, 100, 30, all_of(1, 4)});
  const Force force("cpu:scalar,scalar_feed_forward_apart(workspace=7)");
  const Status status = Chain(flat).feed_forward(false);
  EXPECT_EQ(status.message().find("[feed_forward] workspace of the config must be at least "), 0U)
      << status.message();
}

#if defined(__x86_64__)  // whose rows these are
// Threads that few panels cannot keep busy get parts of each product.
TEST(FeedForwardConfigTest, FollowsTheProblem) {
  Machine machine;
  machine.features = {"avx2", "avx512"};
  machine.l2 = 2 << 20;
  const auto config = [&](std::int64_t tokens, int threads) {
    const rarefy::Problem p =
        make_problem(Op::feed_forward, {3072, 768, 4, 1, 294912}, tokens, DType::f32, Device::cpu, threads);
    const Choice choice = *choose_from(registry(), p, machine, "avx512");
    EXPECT_EQ(choice.kernel->name, "avx512_feed_forward");
    return to_string(*choice.kernel, choice.config);
  };
  EXPECT_EQ(config(4096, 1), "vectors=4 features=3072 splits=1");
  EXPECT_EQ(config(4096, 16), "vectors=4 features=3072 splits=1");
  EXPECT_NE(config(16, 16).find("splits=16"), std::string::npos) << config(16, 16);
}

// In pairs as well; hidden panels go through shared memory only where sets of them leave threads idle.
TEST(FeedForwardConfigTest, PairsFollowTheProblem) {
  Machine machine;
  machine.features = {"avx2", "avx512", "amx_bf16"};
  machine.l2 = 2 << 20;
  const auto config = [&](std::int64_t tokens, int threads) {
    rarefy::Problem p =
        make_problem(Op::feed_forward, {1536, 384, 32, 1, 9216}, tokens, DType::bf16, Device::cpu, threads);
    p.down.shape = {384, 1536, 32, 1, 9216};
    p.derived = kAnyDerived;
    const Choice choice = *choose_from(registry(), p, machine, "amx");
    EXPECT_EQ(choice.kernel->name, "amx_feed_forward");
    return to_string(*choice.kernel, choice.config);
  };
  EXPECT_EQ(config(544, 1), "panels=6 splits=1");
  EXPECT_EQ(config(544, 2), "panels=3 splits=1");
  EXPECT_NE(config(32, 16).find("splits=16"), std::string::npos) << config(32, 16);
}

#endif

TEST(FeedForwardProblemTest, PrintsAllLayers) {
  rarefy::Problem p = make_problem(Op::feed_forward, {64, 16, 4, 1, 100}, 7, DType::f32);
  EXPECT_EQ(to_string(p),
            "feed_forward bsr 64x16 block 4x1 nnzb 100 f32, down bsr 16x64 block 4x1 nnzb 100 f32, 7 tokens, "
            "f32 -> f32, cpu, 1 thread");
  p.gate = {Format::bsr, {64, 16, 8, 8, 5}, DType::bf16};
  p.activation = Activation::silu;
  p.bias = true;
  EXPECT_EQ(to_string(p),
            "feed_forward bsr 64x16 block 4x1 nnzb 100 f32, gate bsr 64x16 block 8x8 nnzb 5 bf16, down bsr "
            "16x64 block 4x1 nnzb 100 f32, 7 tokens, f32 -> f32, bias, silu, cpu, 1 thread");
  EXPECT_TRUE(workspace_size(p).ok());
  p.down.shape.cols = 60;
  EXPECT_EQ(workspace_size(p).status().message(),
            "[workspace_size] down must have 64 columns (hidden features); got 60");
}

// Bad input, case by case: the words, and nothing written.
TEST(FeedForwardErrorTest, SaysWhatDoesNotFit) {
  const Layers layers({6, 8, 12, 4, all_of(4, 1), 0.5, DType::f32, true, 0, true});
  struct Arguments {
    MatrixView x;
    FeedForward layers;
    MutableMatrixView y;
    HiddenViews save;
  };
  const std::pair<const char*, void (*)(Arguments&)> cases[] = {
      {"[feed_forward] x must have 8 columns (in_features); got 7", [](Arguments& a) { a.x.cols = 7; }},
      {"[feed_forward] y must have 4 columns (out_features); got 3", [](Arguments& a) { a.y.cols = 3; }},
      {"[feed_forward] y must have 6 rows, like x; got 5", [](Arguments& a) { a.y.rows = 5; }},
      {"[feed_forward] y must be f32 for f32 x; got bf16", [](Arguments& a) { a.y.dtype = DType::bf16; }},
      {"[feed_forward] x must point to its elements; got a null pointer",
       [](Arguments& a) { a.x.data = nullptr; }},
      {"[feed_forward] up values must point to its elements; got a null pointer",
       [](Arguments& a) { a.layers.up.weight.values = nullptr; }},
      {"[feed_forward] gate values must point to its elements; got a null pointer",
       [](Arguments& a) { a.layers.gate->weight.values = nullptr; }},
      {"[feed_forward] plan must point to its index arrays; got a null pointer",
       [](Arguments& a) { a.layers.down.weight.plan.crow = nullptr; }},
      {"[feed_forward] down must have 12 columns (hidden features); got 8",
       [](Arguments& a) { a.layers.down = a.layers.up; }},
      {"[feed_forward] gate must have 12 rows (hidden features); got 4",
       [](Arguments& a) { a.layers.gate = a.layers.down; }},
      {"[feed_forward] down values must be on device cpu; got cuda",
       [](Arguments& a) { a.layers.down.weight.device = Device::cuda; }},
      {"[feed_forward] activation must be one of the 5 of rarefy/activation.h; got 9",
       [](Arguments& a) { a.layers.activation = static_cast<Activation>(9); }},
      {"[feed_forward] y must not share memory with the inputs; got an overlap with x",
       [](Arguments& a) { a.y.data = const_cast<void*>(a.x.data); }},
      {"[feed_forward] y must not share memory with the inputs; got an overlap with down bias",
       [](Arguments& a) { a.y.data = const_cast<void*>(a.layers.down.bias); }},
      {"[feed_forward] y must not share memory with the inputs; got an overlap with saved up",
       [](Arguments& a) { a.save.up.data = a.y.data; }},
      {"[feed_forward] saved up must have 12 columns (hidden features); got 11",
       [](Arguments& a) { a.save.up.cols = 11; }},
      {"[feed_forward] saved gate must have 6 rows, like y; got 7",
       [](Arguments& a) { a.save.gate.rows = 7; }},
      {"[feed_forward] saved up must be of y's dtype, f32; got f16",
       [](Arguments& a) { a.save.up.dtype = DType::f16; }},
      {"[feed_forward] saved gate must go with a gate; got none",
       [](Arguments& a) { a.layers.gate.reset(); }},
  };
  for (const auto& [text, spoil] : cases) {
    const Chain run(layers);
    Arguments a{
        run.x_view(), run.layers(), run.view(run.y, 4), {run.view(run.up, 12), run.view(run.gate, 12)}};
    spoil(a);
    EXPECT_EQ(rarefy::feed_forward(a.x, a.layers, a.y, {}, a.save).message(), text);
    for (const auto* out : {&run.y, &run.up, &run.gate}) {
      for (const std::byte byte : out->download()) ASSERT_EQ(byte, kPoison) << text;
    }
  }
}

}  // namespace
}  // namespace rarefy::test
