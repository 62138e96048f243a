// feed_forward in bf16 pairs, by every family that this machine runs: exact integers, the bits of its layers,
// what is packed, every configuration.
#include "feed_forward_problem.h"

namespace rarefy::test {
namespace {

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

  void expect_bits_of_layers(const BlockShapes& blocks, Activation activation, bool gated) {
    const Layers layers({150, 200, 300, 130, blocks, 0.4, DType::bf16, false, 0, gated, activation});
    Chain apart(layers);
    apart.hold_derived();
    const FeedForward l = apart.layers();
    const Guarded<HostBuffer> hidden(150 * 300 * 2), gate(150 * 300 * 2), y(150 * 130 * 2);
    const MutableMatrixView between{hidden.data(), DType::bf16, 150, 300, 300};
    expect_ok(linear(apart.x_view(), l.up.weight, l.up.bias, gated ? Activation::none : activation, between));
    if (gated) {
      expect_ok(linear(apart.x_view(), l.gate->weight, l.gate->bias, activation,
                       {gate.data(), DType::bf16, 150, 300, 300}));
      const std::vector<double> up = decode(hidden.download(), DType::bf16);
      std::vector<double> product = decode(gate.download(), DType::bf16);
      for (std::size_t e = 0; e < product.size(); ++e) product[e] *= up[e];
      const std::vector<std::byte> rounded = encode(product, DType::bf16);
      std::copy(rounded.begin(), rounded.end(), static_cast<std::byte*>(hidden.data()));
    }
    expect_ok(linear(between, l.down.weight, l.down.bias, Activation::none,
                     {y.data(), DType::bf16, 150, 130, 130}));
    for (const int threads : {1, 2, 3, 7}) {
      ThreadPool pool(threads);
      Chain run(layers, pool.executor());
      run.hold_derived();
      expect_ok(run.feed_forward(threads == 2));
      EXPECT_EQ(run.y.download(), y.download()) << name(activation) << ' ' << threads << ' ' << gated;
    }
  }

  void expect_same_of_every_configuration(bool gated);
};

INSTANTIATE_TEST_SUITE_P(Cpu, FeedForwardPairsTest, ::testing::ValuesIn(FeedForwardPairsTest::families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(FeedForwardPairsTest, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{4, 1},  {8, 8},  {16, 1},  {32, 1},
                                                          {48, 5}, {24, 1}, {10, 3},  {64, 1},
                                                          {16, 2}, {32, 3}, {16, 16}, {32, 32}};
  for (const auto& [rows, cols] : blocks) {
    for (const auto& [down_rows, down_cols] : blocks) {
      const BlockShapes mixed{{{rows, cols}, {rows, cols}, {down_rows, down_cols}}};
      check({37, 2 * cols + 20, 3 * rows + 5, 70, mixed, 0.4, DType::bf16, true, 3});
      check({64, 33, 2 * rows, 90, mixed, 0.3, DType::bf16, false, 0, false, Activation::gelu_erf});
      check({37, 2 * cols + 20, 3 * rows + 5, 70, mixed, 0.4, DType::bf16, true, 3, true});
      check({64, 33, 2 * rows, 90, mixed, 0.3, DType::bf16, false, 0, true, Activation::silu});
    }
  }
}

TEST_P(FeedForwardPairsTest, EveryNumberOfTokens) {
  ThreadPool pool(3);
  for (const std::int64_t tokens : {5, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130, 300, 513}) {
    check({tokens, 50, 130, 70, all_of(32, 1), 0.5, DType::bf16, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 50, 130, 70, all_of(16, 4), 0.5, DType::bf16, true, 1}, pool.executor());
    check({tokens, 50, 130, 70, all_of(32, 32), 0.5, DType::bf16, true, 1}, pool.executor());
    check({tokens, 50, 130, 70, all_of(4, 1), 0.5, DType::bf16, true, 1}, pool.executor());
    check({tokens, 50, 130, 70, all_of(32, 1), 0.5, DType::bf16, true, 0, true}, pool.executor());
  }
}

TEST_P(FeedForwardPairsTest, EmptyFullAndNothing) {
  for (const double density : {0.0, 0.03, 1.0}) {
    for (const std::int64_t side : {1, 32})
      check({37, 30, 141, 125, all_of(32, side), density, DType::bf16, true, 2, true});
    check({37, 30, 141, 125, all_of(32, 1), density, DType::bf16, true, 2});
    check({37, 30, 141, 125, all_of(16, 16), density, DType::bf16, true, 2});
    check({37, 30, 141, 125, all_of(4, 1), density, DType::bf16, true, 2});
    check({37, 30, 141, 125, all_of(32, 32), density, DType::bf16, true, 2});
    check({37, 30, 101, 125, {{{48, 5}, {48, 5}, {32, 32}}}, density, DType::bf16, true, 2});  // hidden: 144
  }
  check({9, 0, 40, 17, all_of(16, 1), 0.0, DType::bf16, true, 2});  // no input features
  check({9, 8, 0, 17, all_of(16, 1), 0.0, DType::bf16, true, 2});   // no hidden ones: y is the bias
  check({9, 8, 40, 0, all_of(16, 1), 0.5, DType::bf16, true, 2});   // no outputs, but what is saved
  check({9, 3, 5, 7, all_of(48, 50), 1.0, DType::bf16, true, 2});   // one block larger than each matrix
}

// A model in f32 that lets x be rounded: the bounds of what is rounded, f32 results and saved features.
TEST_P(FeedForwardPairsTest, RoundsFloatsWhereItMay) {
  ThreadPool pool(3);
  for (const Activation activation : {Activation::relu, Activation::gelu_erf, Activation::silu}) {
    for (const BlockShapes& blocks : {all_of(32, 1), all_of(16, 4), all_of(32, 32), all_of(4, 1)}) {
      for (const auto& [integers, gated] :
           {std::pair{true, false}, {false, false}, {true, true}, {false, true}}) {
        if (integers && activation != Activation::relu) continue;
        Layers layers({150, 50, 135, 70, blocks, 0.4, DType::f32, integers, integers ? 1 : 0, gated,
                       activation, DType::bf16, true});
        const Force force(GetParam());
        for (const bool save : {false, true}) {
          Chain run(layers, pool.executor());
          run.hold_derived();
          expect_ok(run.feed_forward(save));
          Layers rounded = layers;
          rounded.up.x = decode(encode(layers.up.x, DType::bf16), DType::bf16);
          expect_feed_forward(rounded, run, save, true);
        }
      }
    }
  }
}

// The bits of two calls of linear by the same family, on any number of threads, whatever the activation.
TEST_P(FeedForwardPairsTest, HasTheBitsOfItsLayers) {
  const Force force(GetParam());
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    for (const BlockShapes& blocks : {all_of(32, 1), all_of(16, 16), all_of(32, 32), all_of(4, 1)}) {
      for (const bool gated : {false, true}) expect_bits_of_layers(blocks, activation, gated);
    }
  }
}

// x is NaN where nothing is stored; a row of NaN elsewhere stays in its row, hidden features past the edge
// are none.
TEST_P(FeedForwardPairsTest, NanStaysWhereItIs) {
  for (const BlockShapes& blocks :
       {all_of(16, 1), all_of(16, 2), all_of(32, 32), all_of(4, 1), all_of(8, 4)}) {
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

// A gate that is infinite where `up` is 0, and the other way round, makes hidden features of that token NaN.
TEST_P(FeedForwardPairsTest, GatesMultiplyWhateverTheyAre) {
  for (const BlockShapes& blocks : {all_of(16, 1), all_of(32, 32), all_of(4, 1)}) {
    Layers layers({40, 50, 75, 39, blocks, 0.5, DType::bf16, true, 0, true});
    for (std::int64_t k = 0; k < 50; k += 2) layers.up.x[static_cast<std::size_t>(50 + k)] = kNan;
    layers.up.x[3 * 50 + 7] = std::numeric_limits<double>::infinity();
    Chain run(layers);
    {
      const Force force(GetParam());
      run.hold_derived();
      expect_ok(run.feed_forward(false));
    }
    const std::vector<double> y = decode(run.y.download(), DType::bf16);
    const auto rounded = [](std::vector<double> v) { return decode(encode(v, DType::bf16), DType::bf16); };
    std::vector<double> hidden = rounded(
        linear_of(layers.gate, layers.up.x, 50, layers.gate.values, &layers.gate.bias, Activation::relu));
    const std::vector<double> up =
        rounded(linear_of(layers.up, layers.up.x, 50, layers.up.values, &layers.up.bias));
    for (std::size_t e = 0; e < hidden.size(); ++e) hidden[e] *= up[e];
    const std::vector<double> want =
        rounded(linear_of(layers.down, rounded(hidden), 75, layers.down.values, &layers.down.bias));
    for (std::size_t e = 0; e < want.size(); ++e)
      ASSERT_TRUE(want[e] == y[e] || (std::isnan(want[e]) && std::isnan(y[e]))) << e;
  }
}

// Every candidate, and some that nobody would choose: the same bits, within exactly the workspace asked for.
TEST_P(FeedForwardPairsTest, EveryConfigurationComputesTheSame) {
  for (const bool gated : {false, true}) expect_same_of_every_configuration(gated);
}

void FeedForwardPairsTest::expect_same_of_every_configuration(bool gated) {
  ThreadPool pool(2);
  const Layers layers({200, 40, 150, 70, all_of(32, 1), 0.5, DType::bf16, false, 0, gated, Activation::silu});
  Chain run(layers, pool.executor());
  rarefy::Problem asked =
      make_problem(Op::feed_forward, layers.up.pattern.shape(), 200, DType::bf16, Device::cpu, 2);
  asked.down.shape = layers.down.pattern.shape();
  if (gated) asked.gate = {Format::bsr, layers.gate.pattern.shape(), DType::bf16};
  asked.derived = kAnyDerived;
  const Kernel& kernel = kernel_named(GetParam() + "_feed_forward");
  std::vector<std::string> configs{
      "panels=1 splits=1",        "panels=3 splits=2",         "panels=7 splits=5",
      "panels=16 splits=1",       "panels=2 splits=4",         "panels=2 splits=1 rest=1",
      "panels=3 splits=1 rest=3", "panels=5 splits=1 after=2", "panels=2 splits=3 after=7"};
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
    if (gated) {
      const std::vector<std::byte> gate = run.gate.download();
      all.insert(all.end(), gate.begin(), gate.end());
    }
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
  {
    const Force one("cpu:" + GetParam() + "," + std::string(kernel.name) + "(after=5000)");
    EXPECT_NE(run.feed_forward(false).message().find("after of the config must be in [0, 4096]; got 5000"),
              std::string::npos);
  }
  const Force one("cpu:" + GetParam() + "," + std::string(kernel.name) + "(panels=2 rest=3)");
  EXPECT_NE(run.feed_forward(false).message().find("rest of the config must be in [0, 2], its panels; got 3"),
            std::string::npos);
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
  EXPECT_EQ(reason(other), "");
  other.gate.shape.block_cols = 2;
  EXPECT_EQ(reason(other), "takes gates with blocks as those of up");
  other = p;
  other.in = DType::f32;
  EXPECT_EQ(reason(other),
            "takes bf16 inputs and values, to bf16; f32, to f32, for inputs that may be rounded");
  other.out = DType::f32;
  EXPECT_NE(reason(other), "");
  other.weight.rounds_x = true;
  EXPECT_NE(reason(other), "");  // as long as one layer's may not
  other.down.rounds_x = true;
  EXPECT_EQ(reason(other), "");
  other = p;
  other.tokens = 4;
  EXPECT_EQ(reason(other), "takes more than 4 tokens; got 4");
  other = p;
  other.down.shape.block_rows = 1;
  EXPECT_EQ(reason(other).find("takes blocks of at least "), 0U) << reason(other);
}

#if defined(__x86_64__)

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
  EXPECT_EQ(config(544, 1), "panels=6 splits=1 rest=0 after=0");
  EXPECT_EQ(config(544, 2), "panels=8 splits=1 rest=1 after=0")
      << "17 panels: 8 for each thread, and half of one";
  EXPECT_EQ(config(512, 2), "panels=8 splits=1 rest=0 after=0");
  EXPECT_NE(config(32, 16).find("splits=16"), std::string::npos) << config(32, 16);
}

#endif

}  // namespace
}  // namespace rarefy::test
