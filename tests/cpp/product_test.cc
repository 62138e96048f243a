// The three products on the CPU: every implementation this machine can run, forced one by one,
// against the reference in double. cuda_products_test.cc checks the GPU's with the same problems and bounds.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <limits>
#include <numbers>
#include <set>

#include "product_checks.h"
#include "ref/sum.h"

namespace rarefy::test {
namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class ProductsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void check(const ProblemSpec& spec, Executor executor = {}) {
    const Problem problem = make_problem(spec);
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << ' ' << name(spec.dtype) << " M=" << spec.m << " N=" << spec.n
                 << " K=" << spec.k << " block " << spec.block_rows << 'x' << spec.block_cols << " density "
                 << spec.density << " stride " << spec.stride);
    ProblemIn<HostBuffer> run(problem, executor);
    run_all(run);
    expect_products(problem, run);
  }

  static void run_all(ProblemIn<HostBuffer>& run) {
    const Force force(GetParam());
    expect_ok(run.linear(Activation::none));
    expect_ok(run.grad_input());
    expect_ok(run.grad_weight());
  }
};

INSTANTIATE_TEST_SUITE_P(Cpu, ProductsTest, ::testing::ValuesIn(cpu_impls()),
                         [](const auto& tested) { return tested.param; });

TEST_P(ProductsTest, AreTheOnesForced) {
  const Force force(GetParam());
  for (const Op op : kAllOps) {
    const Explanation chosen = explain(make_problem(op, {4, 4, 4, 4, 1}, 1024, DType::f32));
    EXPECT_EQ(chosen.kernel, GetParam() + "_" + std::string(name(op))) << to_string(chosen);
  }
  if (GetParam() == "avx512" || GetParam() == "avx2") {
    const auto chosen = [](std::int64_t rows, std::int64_t cols, std::int64_t tokens) {
      return explain(make_problem(Op::linear, {rows, cols, rows, cols, 1}, tokens, DType::f32)).kernel;
    };
    EXPECT_EQ(chosen(16, 16, 4), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(16, 16, 5), GetParam() + (GetParam() == "avx512" ? "_linear_lanes" : "_linear"));
    EXPECT_EQ(chosen(16, 16, 12), GetParam() + "_linear");
    EXPECT_EQ(chosen(4, 1, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(4, 4, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(1, 1, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(2, 2, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(3, 5, 1), GetParam() + "_linear");
  }
}

// What /proc/cpuinfo says the machine has, not what the library found: every family is there, for every
// product, best first.
TEST(FamiliesTest, AreAllThatThisMachineRuns) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  bool amd = false;
  while (std::getline(cpuinfo, line) && line.rfind("flags", 0) != 0) {
    amd = amd || line.find("AuthenticAMD") != std::string::npos;
  }
  if (line.rfind("flags", 0) != 0) GTEST_SKIP() << "/proc/cpuinfo has no flags";
  const auto has = [&](std::initializer_list<const char*> flags) {
    return std::all_of(flags.begin(), flags.end(), [&](const char* flag) {
      return (line + ' ').find(std::string(" ") + flag + ' ') != std::string::npos;
    });
  };
#if defined(__aarch64__)  // where it is no option; under qemu-user, cpuinfo is the host's
  constexpr bool neon = true, avx2 = false;
#else
  constexpr bool neon = false;
  const bool avx2 = has({"avx2", "fma", "f16c", "bmi1"});
#endif
  const bool avx512 = avx2 && has({"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  const bool bf16 = avx512 && has({"avx512_bf16"}) && amd;
  const bool amx = avx512 && has({"amx_tile", "amx_bf16"});
  for (const Op op : kAllOps) {
    std::vector<std::string> expected, found;
    const bool pairs = op != Op::grad_weight;
    const bool chain = op == Op::feed_forward;
    const bool lanes = op == Op::linear || op == Op::grad_input;
    const auto expect = [&](const char* family, bool there, const char* suffix = "") {
      if (there) expected.push_back(std::string(family) + '_' + std::string(name(op)) + suffix);
    };
    expect("amx", amx && pairs);
    expect("avx512_bf16", bf16 && pairs);
    expect("avx512_bf16", bf16 && op == Op::linear, "_few");
    expect("avx512", avx512 && op == Op::linear, "_few");
    expect("avx512", avx512 && lanes, "_lanes");
    expect("avx512", avx512);
    expect("avx512", avx512 && chain, "_apart");
    expect("avx2", avx2 && op == Op::linear, "_few");
    expect("avx2", avx2 && lanes, "_lanes");
    expect("avx2", avx2);
    expect("avx2", avx2 && chain, "_apart");
    expect("neon", neon);
    expect("neon", neon && chain, "_apart");
    expect("scalar", true);
    expect("scalar", chain, "_apart");
    expect("pairs", pairs);
    expect("ref", true);
    std::set<std::string> fit;  // with few tokens or many, or enough to pack for
    for (const std::int64_t tokens : {1, 8, op == Op::linear ? 300 : 8}) {
      rarefy::Problem problem = make_problem(op, {16, 16, 16, 16, 1}, tokens, DType::bf16);
      problem.derived = kAnyDerived;
      for (const Candidate& candidate : explain(problem).candidates) {
        if (candidate.why_not.empty()) fit.insert(candidate.kernel.name);
      }
    }
    for (const KernelInfo& kernel : backend_info().kernels) {
      if (kernel.op == op && fit.count(kernel.name) != 0) found.push_back(kernel.name);
    }
    EXPECT_EQ(found, expected);
  }
}

// Block shapes of every kind: columns, rows, squares, odd ones; edges that are padded.
TEST_P(ProductsTest, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 1}, {1, 2}, {1, 16}, {2, 1},  {2, 64},  {3, 5},   {4, 1},   {4, 4}, {5, 3},
      {7, 1}, {8, 8}, {12, 6}, {16, 1}, {16, 16}, {17, 33}, {32, 32}, {64, 2}};
  for (const auto& [rows, cols] : blocks) {
    for (const DType dtype : kDTypes) {
      check({37, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, dtype, false, 3});
      check({65, 9 * rows, 7 * cols, rows, cols, 0.3, dtype, true, 0});
    }
  }
}

// Around every width of a panel, and with one row of x for all tokens.
TEST_P(ProductsTest, EveryNumberOfTokens) {
  for (const std::int64_t tokens :
       {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 128, 130, 255, 257, 300}) {
    check({tokens, 45, 50, 4, 1, 0.5, DType::f32, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 50, 45, 1, 4, 0.5, DType::bf16, false, 1});
  }
}

// Up to 4 tokens have kernels of their own, for the shapes whose vectors are whole rows, repeated ones, or
// groups of entries; the rest of a group, and several slices of a block, included.
TEST_P(ProductsTest, FewTokens) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 1},  {2, 1},  {1, 2}, {2, 2},   {1, 4},   {2, 4},  {1, 8},  {3, 5},
      {1, 16}, {2, 8},  {4, 1}, {8, 1},   {16, 1},  {32, 1}, {4, 2},  {8, 2},
      {4, 4},  {16, 4}, {8, 8}, {16, 16}, {12, 16}, {5, 32}, {64, 2}, {32, 32}};
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const DType dtype : kDTypes) {
        check({tokens, 6 * rows + rows / 2, 37 * cols + cols / 2, rows, cols, 0.4, dtype, dtype == DType::f32,
               1});
      }
    }
  }
  ThreadPool pool(3);
  check({1, 700, 900, 16, 16, 0.3, DType::bf16, false, 0}, pool.executor());
  check({4, 900, 700, 4, 1, 0.3, DType::f32, false, -1}, pool.executor());
  for (const bool integers : {false, true}) {  // several chunks of values
    check({2, 70, 9000, 4, 1, 0.9, DType::f16, integers, 0}, pool.executor());
    check({3, 40, 9001, 1, 1, 0.9, DType::f32, integers, 0}, pool.executor());
    check({1, 40, 9001, 2, 2, 0.9, DType::f32, integers, 0}, pool.executor());
    check({4, 64, 3001, 32, 1, 0.9, DType::f32, integers, 0}, pool.executor());
    check({2, 42, 3001, 3, 5, 0.9, DType::f32, integers, 0}, pool.executor());
    check({2, 43, 3001, 1, 3, 0.9, DType::f32, integers, 0}, pool.executor());
    check({4, 64, 9000, 16, 16, 0.9, DType::bf16, integers, 0}, pool.executor());
  }
}

TEST_P(ProductsTest, EmptyFullAndLopsidedPatterns) {
  for (const double density : {0.0, 0.02, 1.0}) {
    for (const DType dtype : kDTypes) {
      check({70, 90, 80, 4, 4, density, dtype, true, 2});
      check({70, 33, 200, 1, 8, density, dtype, true, 2});
    }
  }
  check({5, 7, 9, 40, 50, 1.0, DType::f32, true, 2});  // one block larger than the matrix
  check({5, 7, 0, 4, 4, 0.0, DType::f32, true, 2});    // no input features
  check({5, 0, 9, 4, 4, 0.0, DType::f32, true, 2});    // no output features
}

// Several tiles of X in L2, several windows of y, and sums of thousands of terms: as reals, within the bound
// of so many terms, and as integers, where one lost term shows.
TEST_P(ProductsTest, LargeMatrices) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no tiles, and is slow";
  ThreadPool pool(3);
  for (const bool integers : {false, true}) {
    check({70, 64, 9000, 4, 1, 0.5, DType::f32, integers, 0}, pool.executor());
    check({70, 9000, 64, 1, 4, 0.5, DType::f32, integers, 0}, pool.executor());
    check({70, 512, 4100, 16, 16, 0.5, DType::f32, integers, 0}, pool.executor());
    check({66, 300, 5000, 2, 3, 0.2, DType::bf16, integers, 0}, pool.executor());
    check({9001, 20, 24, 4, 4, 0.5, DType::f32, integers, 0}, pool.executor());
  }
  for (const std::int64_t rows : {4, 8, 12}) {  // sums in several parts, whose X is one tile
    for (const bool integers : {false, true}) check({70, 150, 1400, rows, 1, 0.9, DType::f32, integers, 5});
  }
  // Rows that are whole pages apart are stored another way.
  check({70, 1024, 2048, 4, 4, 0.3, DType::f32, true, 0}, pool.executor());
  check({70, 2048, 1024, 4, 4, 0.3, DType::bf16, true, 0}, pool.executor());
}

// X is far larger than L2: its tiles are summed up before the activation, which comes once.
TEST_P(ProductsTest, ActivationAfterSeveralTiles) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no tiles, and is slow";
  ThreadPool pool(2);
  const auto run_activated = [&](const Problem& problem, Activation activation) {
    SCOPED_TRACE(::testing::Message()
                 << name(activation) << ' ' << problem.spec.block_rows << 'x' << problem.spec.block_cols);
    ProblemIn<HostBuffer> run(problem, pool.executor());
    {
      const Force force(GetParam());
      expect_ok(run.linear(activation));
    }
    expect_activation(problem, run, activation);
  };
  const Problem wide = make_problem({17, 24, 200'000, 4, 1, 0.02, DType::f32, false, 0});
  for (const Activation activation : {Activation::relu, Activation::gelu_tanh})
    run_activated(wide, activation);
  run_activated(make_problem({20, 32, 100'000, 16, 16, 0.02, DType::bf16, false, 0}), Activation::relu);
}

// Every family writes what is added; the core adds it.
TEST_P(ProductsTest, AddToAGradient) {
  const Force force(GetParam());
  for (const DType dtype : kDTypes) {
    for (const bool integers : {true, false}) {
      SCOPED_TRACE(name(dtype));
      const Problem problem = make_problem({40, 37, 30, 8, 4, 0.5, dtype, integers, 3});
      ProblemIn<HostBuffer> run(problem);
      expect_accumulated(problem, run);
    }
  }
  // The caller's workspace is asked for that room, too.
  rarefy::Problem asked = make_problem(Op::grad_weight, {64, 64, 8, 8, 32}, 40, DType::f32);
  const std::int64_t written = *workspace_size(asked);
  asked.accumulate = true;
  EXPECT_EQ(*workspace_size(asked), written + 32 * 64 * 4);
}

// grad_weight sums chunks of 512 tokens over tiles of columns: every number of rows a tile of dot products
// has.
TEST_P(ProductsTest, SeveralChunksOfTokens) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no chunks, and is slow";
  ThreadPool pool(3);
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 16}, {4, 1}, {7, 3}, {16, 16}}) {
    check({1030, 9 * rows + 1, 700, rows, cols, 0.4, DType::f32, rows == 4, 1}, pool.executor());
    check({513, 300, 40, rows, cols, 0.4, DType::bf16, false, 0}, pool.executor());
  }
}

// 18 MB of values: a set of panels shares each group of weights.
TEST_P(ProductsTest, WeightsLargerThanCaches) {
  if (GetParam() == "ref" || GetParam() == "scalar") GTEST_SKIP() << "slow; one blocking serves every ISA";
  ThreadPool pool(2);
  check({70, 2100, 2100, 32, 32, 1.0, DType::f32, true, 0}, pool.executor());
}

TEST_P(ProductsTest, GiveTheSameBitsOnAnyNumberOfThreads) {
  const Force force(GetParam());
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{4, 1}, {1, 16}, {16, 16}}) {
    const Problem problem = make_problem({150, 200, 170, rows, cols, 0.4, DType::f32, false, 0});
    std::set<std::vector<std::byte>> results;
    for (const int threads : {1, 2, 3, 5, 1}) {
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.linear(Activation::gelu_tanh));
      expect_ok(run.grad_input());
      expect_ok(run.grad_weight());
      std::vector<std::byte> all = run.y().download();
      for (const Guarded<HostBuffer>* output : {&run.dx(), &run.dvalues()}) {
        const std::vector<std::byte> bytes = output->download();
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
      results.insert(std::move(all));
    }
    // Scatter and gather sum in the same order, so even another blocking gives the same bits.
    EXPECT_EQ(results.size(), 1U) << rows << 'x' << cols;
  }
}

// Whether sums wait for other tiles of X, or go to Y along the way of the next ones (woven.h); in panels of
// any width, alone or several at a time.
TEST_P(ProductsTest, GiveTheSameBitsInAnyBlocking) {
  if (GetParam() == "ref") GTEST_SKIP() << "the reference has no blocking";
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{4, 1}, {4, 4}, {8, 1}, {8, 8}, {12, 2}, {8, 64}, {24, 300}}) {
    // With few blocks a row, what leaves along the way does so within them.
    const double density = cols < 8 ? 0.6 : 0.05;
    const Problem problem = make_problem({150, 203, 900, rows, cols, density, DType::f32, false, 1});
    std::set<std::vector<std::byte>> results;
    for (const char* config : {"tile_blocks=2", "vectors=1", "vectors=2", "panels=3", "splits=2"}) {
      const Force force(GetParam() + "," + GetParam() + "_linear(" + config + ")");
      ProblemIn<HostBuffer> run(problem);
      expect_ok(run.linear(Activation::gelu_tanh));
      results.insert(run.y().download());
    }
    EXPECT_EQ(results.size(), 1U) << rows << 'x' << cols;
  }
}

// The result of a token depends neither on the batch it is in nor on its place there, among batches of at
// most 4 tokens and among larger ones: the two have kernels of their own, with another order of sums.
TEST_P(ProductsTest, TokensDoNotDependOnTheBatch) {
  const Force force(GetParam());
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{4, 1}, {1, 16}, {8, 8}, {16, 1}, {32, 32}, {3, 5}}) {
    const Problem problem = make_problem({200, 120, 130, rows, cols, 0.4, DType::f32, false, 0});
    // Y of tokens first … first + count, as bytes.
    const auto run = [&](std::int64_t first, std::int64_t count) {
      Problem some = problem;
      some.spec.m = count;
      some.x.assign(problem.x.begin() + first * problem.x_stride(),
                    problem.x.begin() + (first + count) * problem.x_stride());
      ProblemIn<HostBuffer> one(some);
      expect_ok(one.linear(Activation::silu));
      return one.y().download();
    };
    const auto expect_rows = [&](const std::vector<std::byte>& all, std::int64_t at,
                                 const std::vector<std::byte>& part, std::int64_t count) {
      const auto row = static_cast<std::ptrdiff_t>(part.size()) / count;
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + at * row))
          << problem.spec.block_rows << 'x' << problem.spec.block_cols << ", " << count << " from token "
          << at;
    };
    const std::vector<std::byte> all = run(0, 200);
    const std::vector<std::byte> few = run(40, 4);
    for (const std::int64_t token : {0, 63, 195}) expect_rows(all, token, run(token, 5), 5);
    for (const std::int64_t token : {0, 2}) expect_rows(few, token, run(40 + token, 2), 2);
    for (const std::int64_t token : {0, 1, 3}) expect_rows(few, token, run(40 + token, 1), 1);
    expect_rows(few, 1, run(41, 3), 3);
  }
}

TEST_P(ProductsTest, Activations) {
  for (const DType dtype : kDTypes) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      SCOPED_TRACE(::testing::Message() << name(activation) << ' ' << name(dtype));
      const Problem problem = make_problem({65, 40, 50, 4, 4, 0.4, dtype, false, 1});
      ProblemIn<HostBuffer> run(problem);
      {
        const Force force(GetParam());
        expect_ok(run.linear(activation));
      }
      expect_activation(problem, run, activation);
    }
  }
}

// What an activation is, in long double, without the cancellation of 1 + erf and 1 + tanh.
double exact_activation(Activation activation, double x) {
  const auto z = static_cast<long double>(x);
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 ? x : 0;
    case Activation::gelu_erf:
      return static_cast<double>(z / 2 * std::erfc(-z / std::numbers::sqrt2_v<long double>));
    case Activation::gelu_tanh: {
      const long double u = std::sqrt(2 / std::numbers::pi_v<long double>) * (z + 0.044715L * z * z * z);
      return static_cast<double>(z / (1 + std::exp(-2 * u)));
    }
    case Activation::silu: return static_cast<double>(z / (1 + std::exp(-z)));
  }
  return kNan;
}

constexpr Activation kActivations[] = {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh,
                                       Activation::silu};

// From far left, where only a relative bound means anything, to far right; many tokens of one feature, and
// one token of many features, which the kernels of few tokens take.
TEST_P(ProductsTest, ActivationsKeepTheirTails) {
  const DType dtype = GetParam() == "ref" ? DType::f64 : DType::f32;
  std::vector<double> numbers;
  for (int i = -4000; i <= 4000; ++i) numbers.push_back(i / 40.0);
  for (int exponent = -30; exponent <= 30; exponent += 3) {
    for (const double sign : {-1.0, 1.0}) numbers.push_back(std::ldexp(sign * 1.25, exponent));
  }
  numbers = decode(encode(numbers, dtype), dtype);
  const auto count = static_cast<std::int64_t>(numbers.size());
  for (const bool tokens : {true, false}) {
    Problem problem = make_problem({tokens ? count : 1, tokens ? 1 : count, 1, 1, 1, 1.0, dtype, true, 0});
    problem.bias.assign(problem.bias.size(), 0);
    problem.x.assign(problem.x.size(), 1);
    problem.values.assign(problem.values.size(), 1);
    (tokens ? problem.x : problem.values) = numbers;
    for (const Activation activation : kActivations) {
      ProblemIn<HostBuffer> run(problem);
      {
        const Force force(GetParam());
        expect_ok(run.linear(activation));
      }
      const std::vector<double> got = decode(run.y().download(), dtype);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const double exact = exact_activation(activation, numbers[i]);
        ASSERT_LE(std::abs(got[i] - exact),
                  activation_error(activation, numbers[i], exact, accumulator(dtype)))
            << name(activation) << '(' << numbers[i] << ") = " << exact << ", got " << got[i];
      }
    }
  }
}

// The kernels of 1 to 4 tokens, and a panel.
constexpr std::int64_t kTokenCounts[] = {1, 2, 3, 4, 40};
// Their shapes, padded edges, and a flat one.
constexpr std::pair<std::int64_t, std::int64_t> kSpecialBlocks[] = {{1, 1},   {4, 1}, {8, 1}, {2, 8}, {1, 16},
                                                                    {16, 16}, {4, 5}, {1, 6}, {6, 1}};

TEST_P(ProductsTest, ActivationsOfNanInfinityAndZero) {
  const double inputs[] = {kNan, kInfinity, -kInfinity, 0.0, -0.0};
  const auto expected = [](Activation activation, double x) {
    if (std::isnan(x) || x > 0) return x;
    if (x == 0 || activation == Activation::relu) return 0.0;
    return kNan;  // −∞ · 0, as in torch
  };
  for (const std::int64_t tokens : kTokenCounts) {
    for (const Activation activation : kActivations) {
      // One feature for each number, in its bias: no block is stored.
      Problem problem = make_problem({tokens, std::ssize(inputs), 3, 1, 1, 0.0, DType::f32, true, 0});
      problem.bias.assign(std::begin(inputs), std::end(inputs));
      ProblemIn<HostBuffer> run(problem);
      {
        const Force force(GetParam());
        expect_ok(run.linear(activation));
      }
      const std::vector<double> got = decode(run.y().download(), DType::f32);
      for (std::size_t e = 0; e < got.size(); ++e) {
        const double input = inputs[e % std::size(inputs)];
        EXPECT_TRUE(same(got[e], expected(activation, input)))
            << name(activation) << '(' << input << ") is " << got[e];
      }
    }
  }
}

// A NaN or an infinity reaches what a stored element carries it to, in every product, and nothing else:
// the padding of edge blocks stays zero, absent blocks are skipped.
TEST_P(ProductsTest, NanPassesThroughAndNotFurther) {
  for (const auto& [rows, cols] : kSpecialBlocks) {
    for (const std::int64_t tokens : kTokenCounts) {
      for (const DType dtype : kDTypes) {
        SCOPED_TRACE(::testing::Message()
                     << name(dtype) << " M=" << tokens << " block " << rows << 'x' << cols);
        const Problem clean = make_problem({tokens, 37, 38, rows, cols, 0.4, dtype, true, 1});
        const auto expect_spoiled = [&](auto spoil) {
          Problem problem = clean;
          spoil(problem);
          ProblemIn<HostBuffer> run(problem);
          run_all(run);
          expect_same_or_nan(problem, run);
        };
        const std::int64_t last = tokens - 1;
        expect_spoiled([&](Problem& p) {
          p.x[static_cast<std::size_t>(last * p.x_stride() + 37)] = kNan;  // in a padded block column
          p.x[3] = kInfinity;
        });
        expect_spoiled([&](Problem& p) {  // in every block row, the padded one among them
          for (std::int64_t n = 0; n < 37; n += 4)
            p.dy[static_cast<std::size_t>(last * p.y_stride() + n)] = kNan;
          p.dy[5] = -kInfinity;
        });
        expect_spoiled([&](Problem& p) {
          p.values[0] = kNan;
          p.values[p.values.size() / 2] = kInfinity;
          p.bias[7] = kNan;
          p.bias[8] = -kInfinity;
        });
      }
    }
  }
}

// Numbers below the normal ones are numbers: products of them with integers are exact, and not flushed.
TEST_P(ProductsTest, SubnormalNumbersAreExact) {
  for (const auto& [rows, cols] : kSpecialBlocks) {
    for (const std::int64_t tokens : kTokenCounts) {
      for (const DType dtype : kDTypes) {
        SCOPED_TRACE(::testing::Message()
                     << name(dtype) << " M=" << tokens << " block " << rows << 'x' << cols);
        const double tiny = dtype == DType::f32 ? 0x1p-145 : dtype == DType::bf16 ? 0x1p-132 : 0x1p-23;
        const auto scale = [&](std::vector<double>& numbers) {
          for (double& number : numbers) number *= tiny;
        };
        const Problem clean = make_problem({tokens, 37, 38, rows, cols, 0.2, dtype, true, 1});
        Problem weights = clean;
        scale(weights.values);
        scale(weights.bias);
        Problem gradients = clean;
        scale(gradients.dy);
        for (const Problem* problem : {&weights, &gradients}) {
          ProblemIn<HostBuffer> run(*problem);
          run_all(run);
          expect_products(*problem, run);
        }
      }
    }
  }
}

// A bias of −0, and products that are −0, give +0: a sum starts there.
TEST_P(ProductsTest, SumsStartFromPositiveZero) {
  for (const auto& [rows, cols] : kSpecialBlocks) {
    for (const std::int64_t tokens : kTokenCounts) {
      for (const double density : {0.0, 0.5, 1.0}) {
        Problem problem = make_problem({tokens, 37, 38, rows, cols, density, DType::f32, true, 1});
        for (std::vector<double>* numbers : {&problem.x, &problem.dy, &problem.bias}) {
          numbers->assign(numbers->size(), -0.0);
        }
        ProblemIn<HostBuffer> run(problem);
        run_all(run);
        SCOPED_TRACE(::testing::Message() << "M=" << tokens << " block " << rows << 'x' << cols);
        expect_products(problem, run);
      }
    }
  }
}

TEST_P(ProductsTest, EmptyBatch) {
  const Force force(GetParam());
  const Problem problem = make_problem({0, 20, 30, 4, 4, 0.5, DType::f32, true, 0});
  ProblemIn<HostBuffer> run(problem);
  expect_ok(run.linear(Activation::none));
  expect_ok(run.grad_input());
  expect_ok(run.grad_weight());
  for (const double number : decode(run.dvalues().download(), DType::f32)) EXPECT_EQ(number, 0);
}

// int8 is storage: the reference computes it, exactly, into floats.
TEST(ProductsOfInt8Test, AreExact) {
  const std::array<std::int32_t, 2> crow{0, 1};
  const std::array<std::int32_t, 1> col{0};
  const Pattern pattern = *Pattern::create({1, 3, 1, 3, 0}, crow, col);
  const std::array<std::int8_t, 3> w{-128, 127, 3};
  const std::array<std::int8_t, 3> x{-128, 127, -1};
  float y = 0;
  expect_ok(linear({x.data(), DType::i8, 1, 3, 3}, {pattern.view(), w.data(), DType::i8}, nullptr,
                   Activation::none, {&y, DType::f32, 1, 1, 1}));
  EXPECT_EQ(y, 128 * 128 + 127 * 127 - 3);
  double wide = 0;
  expect_ok(linear({x.data(), DType::i8, 1, 3, 3}, {pattern.view(), w.data(), DType::i8}, nullptr,
                   Activation::none, {&wide, DType::f64, 1, 1, 1}));
  EXPECT_EQ(wide, 128 * 128 + 127 * 127 - 3);
}

// In eight parts a sum is off by less: each part's roundings are those of an eighth of the terms.
TEST(ReferenceTest, SumsAreInParts) {
  ref::Sum parts;
  double one = 0;
  constexpr int kTerms = 1 << 16;
  for (int i = 0; i < kTerms; ++i) {
    parts.add(0.1);
    one += 0.1;
  }
  const long double exact = static_cast<long double>(0.1) * kTerms;
  EXPECT_LT(std::fabs(parts.total() - exact), 0.25 * std::fabs(one - exact));
}

// The reference itself, against sums over the dense matrix in long double.
TEST(ReferenceTest, EqualsTheDenseProducts) {
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 5}, {4, 1}, {40, 40}}) {
    const ProblemSpec spec{9, 23, 31, rows, cols, 0.5, DType::f64, false, 2};
    const Problem p = make_problem(spec);
    const PlanView& plan = p.pattern.view();
    std::vector<double> dense(static_cast<std::size_t>(spec.n * spec.k), 0.0);
    for (std::int64_t i = 0; i < plan.shape.row_count(); ++i) {
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t c = 0; c < cols; ++c) {
            const std::int64_t n = i * rows + r;
            const std::int64_t k = plan.col[e] * cols + c;
            if (n < spec.n && k < spec.k) {
              dense[static_cast<std::size_t>(n * spec.k + k)] =
                  p.values[static_cast<std::size_t>((e * rows + r) * cols + c)];
            }
          }
        }
      }
    }
    const Host host{p};
    const std::vector<double> y = host.linear(p.x, p.values, &p.bias, Activation::none);
    const std::vector<double> dx = host.grad_input(p.dy, p.values);
    for (std::int64_t m = 0; m < spec.m; ++m) {
      for (std::int64_t n = 0; n < spec.n; ++n) {
        long double sum = p.bias[static_cast<std::size_t>(n)];
        for (std::int64_t k = 0; k < spec.k; ++k) {
          sum += static_cast<long double>(p.x[static_cast<std::size_t>(m * p.x_stride() + k)]) *
                 dense[static_cast<std::size_t>(n * spec.k + k)];
        }
        EXPECT_NEAR(y[static_cast<std::size_t>(m * spec.n + n)], static_cast<double>(sum), 1e-13);
      }
      for (std::int64_t k = 0; k < spec.k; ++k) {
        long double sum = 0;
        for (std::int64_t n = 0; n < spec.n; ++n) {
          sum += static_cast<long double>(p.dy[static_cast<std::size_t>(m * p.y_stride() + n)]) *
                 dense[static_cast<std::size_t>(n * spec.k + k)];
        }
        EXPECT_NEAR(dx[static_cast<std::size_t>(m * spec.k + k)], static_cast<double>(sum), 1e-13);
      }
    }
  }
}

TEST(ForcedImplTest, AnUnknownOneIsAnError) {
  const std::string before = forced_impl();
  for (const char* text : {"abacus", "cpu:abacus", "gpu:ref", "cuda:ref", "cpu:ref,abacus", ":", "cpu:"}) {
    const Status status = force_impl(text);
    EXPECT_EQ(status.code(), StatusCode::unsupported) << text;
    EXPECT_NE(status.message().find("RAREFY_FORCE_IMPL"), std::string::npos) << status.message();
    EXPECT_EQ(forced_impl(), before);
  }
}

// Forcing one device's family leaves the other's choice alone; a family alone goes to its own device.
TEST(ForcedImplTest, IsPerDevice) {
  const auto chosen = [](Device device) {
    return explain(make_problem(Op::linear, {8, 8, 4, 4, 1}, 64, DType::f32, device)).kernel;
  };
  const std::string cuda = chosen(Device::cuda);
  for (const char* text : {"cpu:scalar", "scalar"}) {
    expect_ok(force_impl(text));
    EXPECT_EQ(chosen(Device::cpu), "scalar_linear");
    EXPECT_EQ(chosen(Device::cuda), cuda);
  }
  if (backend_info().cuda_built) {
    expect_ok(force_impl("cpu:ref,cuda:simt"));
    EXPECT_EQ(chosen(Device::cpu), "ref_linear");
    EXPECT_EQ(chosen(Device::cuda), "simt_linear");
  }
  expect_ok(force_impl(""));
  EXPECT_EQ(chosen(Device::cuda), cuda);
}

// Weights beyond the caches take x by another instruction: the same sums, row ends of any length.
TEST(FewTest, SinglesFromMemoryHaveTheBitsOfThoseFromCaches) {
  for (const char* family : {"avx512", "avx2"}) {
    if (!backend_info().machine.has(family)) continue;
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{70, 37}, {9, 5003}}) {
        const Problem problem = make_problem({tokens, rows, cols, 1, 1, 0.5, DType::f32, true, 0});
        std::vector<std::byte> results[2];
        for (const int stream : {0, 1}) {
          const Force force(std::string(family) + "," + family +
                            "_linear_few(stream=" + std::to_string(stream) + ")");
          ProblemIn<HostBuffer> run(problem, {});
          expect_ok(run.linear(Activation::none));
          expect_linear(problem, run);
          results[stream] = run.y().download();
        }
        EXPECT_EQ(results[0], results[1]) << family << ' ' << tokens << " x " << cols;
      }
    }
  }
}

// Tuning choices in parentheses: of that kernel alone, beside families, and refused when they cannot be.
TEST(ForcedImplTest, Configurations) {
  const auto asked = make_problem(Op::linear, {64, 64, 4, 4, 128}, 64, DType::f32);
  const std::string own = [&] {
    const Force force("scalar");
    return explain(asked).config;
  }();
  ASSERT_EQ(own.find("vectors=1 "), std::string::npos) << own;
  {
    const Force force("scalar,scalar_linear(vectors=1 splits=2)");
    EXPECT_NE(explain(asked).config.find("vectors=1 "), std::string::npos) << explain(asked).config;
    EXPECT_NE(explain(asked).config.find("splits=2 "), std::string::npos);
    const Problem problem = make_problem({64, 64, 64, 4, 4, 0.5, DType::f32, true, 0});
    ProblemIn<HostBuffer> run(problem);
    expect_ok(run.linear(Activation::none));
    expect_linear(problem, run);
  }
  {
    const Force force("scalar,scalar_linear(vectors=99)");
    const Problem problem = make_problem({64, 64, 64, 4, 4, 0.5, DType::f32, true, 0});
    ProblemIn<HostBuffer> run(problem);
    EXPECT_EQ(run.linear(Activation::none).code(), StatusCode::invalid_argument);
  }
  for (const char* text :
       {"scalar_linear(vector=1)", "scalar_linear(vectors=x)", "linear(vectors=1)", "scalar_linear("}) {
    EXPECT_EQ(force_impl(text).code(), StatusCode::unsupported) << text;
  }
  const Force force("scalar");
  EXPECT_EQ(explain(asked).config, own);
}

// A family that exists but cannot have the problem: the message says why, and nothing is written.
TEST(ForcedImplTest, OneThatDoesNotFitIsAnError) {
  const Problem problem = make_problem({3, 4, 4, 2, 2, 1.0, DType::f64, true, 0});
  ProblemIn<HostBuffer> run(problem);
  const Force force("scalar");
  const Status status = run.linear(Activation::silu);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(status.message().find("scalar_linear: takes inputs in f32, bf16 or f16; got f64"),
            std::string::npos)
      << status.message();
  const std::vector<std::byte> y = run.y().download();
  EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](std::byte b) { return b == kPoison; }));
}

}  // namespace
}  // namespace rarefy::test
