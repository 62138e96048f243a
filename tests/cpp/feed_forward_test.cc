// feed_forward on the CPU: every family forced, against its layers one after the other in double; the bits
// of linear; every configuration; bad input. bf16 in pairs: feed_forward_pairs_test.cc.
#include "feed_forward_problem.h"

namespace rarefy::test {
namespace {

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
  const BsrShape large{4096, 2048, 32, 1, 150000};  // 19 MB
  EXPECT_EQ(chosen(large, 127), GetParam() + "_feed_forward");
  EXPECT_EQ(chosen(large, 128), GetParam() + "_feed_forward_apart");
  EXPECT_EQ(chosen({4096, 2048, 32, 1, 120000}, 128), GetParam() + "_feed_forward");
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
}

// Layers whose kernels want more than the config gives them find it on the heap.
TEST(FeedForwardConfigTest, TooLittleWorkspaceForLayersApartIsNoError) {
  const Layers layers({33, 20, 100, 30, all_of(1, 4)});
  const auto results = [&](const char* impl) {
    const Force force(impl);
    const Chain run(layers);
    expect_ok(run.feed_forward(false));
    return run.y.download();
  };
  const std::vector<std::byte> want = results("cpu:scalar");
  EXPECT_EQ(results("cpu:scalar,scalar_feed_forward_apart(workspace=7)"), want);
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
