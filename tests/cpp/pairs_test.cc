// Products in bf16 pairs, by every family that this machine has and by its portable twin: against the
// reference, on weights that are packed anew for each call. Their accumulation is docs/numerics.md's.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "core/registry.h"
#include "cpu/linear_pairs.h"
#include "cpu/pairs_blocking.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// act(x) in double.
double activated(Activation activation, double x) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return std::isnan(x) ? x : std::max(x, 0.0);
    case Activation::gelu_erf: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::gelu_tanh: return x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return x;
}

// The families whose rows take bf16 in pairs, of those that this machine can run.
std::vector<std::string> pair_families() {
  rarefy::Problem asked = make_problem(Op::linear, {16, 2, 16, 2, 1}, 8, DType::bf16);
  asked.derived = kAnyDerived;
  std::vector<std::string> families;
  for (const Candidate& candidate : explain(asked).candidates) {
    const bool pairs = candidate.kernel.family == "amx" || candidate.kernel.family == "avx512_bf16" ||
                       candidate.kernel.family == "pairs";
    if (pairs && candidate.why_not.empty()) families.push_back(candidate.kernel.family);
  }
  return families;
}

class PairsTest : public ::testing::TestWithParam<std::string> {
 protected:
  static void run_all(ProblemIn<HostBuffer>& run) {
    const Force force(GetParam());
    run.hold_derived();
    expect_ok(run.linear(Activation::none));
  }
  static void check_grad_weight(const Problem& problem, ProblemIn<HostBuffer>& run) {
    const ProblemSpec& spec = problem.spec;
    const bool columns = spec.block_cols == 1 && spec.block_rows % 16 == 0;
    if (!columns && (spec.block_cols % 16 != 0 || spec.block_rows < 8)) return;
    if (spec.m < 32) return;
    const Force force(GetParam());
    expect_ok(run.grad_weight());
    expect_grad_weight(problem, run);
  }
  void check(ProblemSpec spec, Executor executor = {}) {
    spec.dtype = DType::bf16;
    const Problem problem = make_problem(spec);
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k << " block "
                 << spec.block_rows << 'x' << spec.block_cols << " density " << spec.density);
    ProblemIn<HostBuffer> run(problem, executor);
    run_all(run);
    expect_linear(problem, run);
    check_grad_weight(problem, run);
    const bool columns = spec.block_cols == 1 && spec.block_rows % 16 == 0;
    if (spec.block_cols % 16 != 0 && spec.block_cols != 4 && spec.block_cols != 8 && !columns) return;
    const Force force(GetParam());
    expect_ok(run.grad_input());
    expect_grad_input(problem, run);
  }
};

INSTANTIATE_TEST_SUITE_P(Cpu, PairsTest, ::testing::ValuesIn(pair_families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(PairsTest, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {4, 1},   {8, 1},  {4, 2},   {8, 3},   {4, 4},   {8, 8},   {4, 16},  {8, 32},  {4, 33},
      {16, 4},  {48, 8}, {16, 1},  {32, 1},  {48, 1},  {64, 1},  {128, 1}, {16, 2},  {32, 3},
      {16, 16}, {32, 8}, {48, 16}, {32, 32}, {64, 64}, {16, 96}, {16, 31}, {160, 33}};
  for (const auto& [rows, cols] : blocks) {
    for (const bool integers : {true, false}) {
      check({37, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, {}, integers, 3});
      check({64, 3 * rows, 7 * cols, rows, cols, 0.2, {}, integers, 0});
    }
  }
}

// Both halves of a panel, part of one, several panels; one row of x for all tokens.
TEST_P(PairsTest, EveryNumberOfTokens) {
  for (const std::int64_t tokens : {5, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 128, 130, 300}) {
    check({tokens, 70, 90, 32, 1, 0.5, {}, true, tokens % 2 == 0 ? 0 : -1});
    check({tokens, 90, 70, 16, 4, 0.5, {}, false, 1});
    check({tokens, 90, 130, 32, 32, 0.5, {}, false, 1});
    check({tokens, 70, 90, 4, 1, 0.3, {}, true, 0});
    check({tokens, 90, 70, 8, 8, 0.3, {}, false, 1});
  }
}

// Blocks of whole groups go by token where there are tiles, from two tokens on.
TEST_P(PairsTest, FewTokensInBlocksOfWholeGroups) {
  if (GetParam() == "avx512_bf16") GTEST_SKIP() << "has no tiles";
  for (const std::int64_t tokens : {2, 3, 4}) {
    check({tokens, 90, 130, 32, 32, 0.5, {}, true, 1});
    check({tokens, 130, 200, 64, 64, 0.5, {}, false, 0});
  }
}

// Up to 4 tokens read W where it lies: pairs of columns, blocks that fill no vector, more slices than
// registers, columns two at a time and a last one, sums of several parts.
TEST_P(PairsTest, FewTokens) {
  if (GetParam() != "avx512_bf16") GTEST_SKIP() << "has no kernel for them";
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {1, 2},  {2, 2},  {4, 2},   {1, 4},   {4, 4},  {8, 4},  {16, 2}, {8, 8},  {4, 16},  {16, 16}, {2, 32},
      {1, 64}, {32, 8}, {32, 32}, {64, 64}, {32, 1}, {48, 1}, {64, 1}, {96, 1}, {128, 1}, {160, 1}};
  const Force force(GetParam());
  for (const auto& [rows, cols] : blocks) {
    for (const std::int64_t tokens : {1, 2, 3, 4}) {
      for (const bool integers : {true, false}) {
        for (const double density : {0.0, 0.3, 1.0}) {
          ProblemSpec spec{
              tokens,    3 * rows + rows / 2 + 1, 5 * cols + cols / 2 + 1, rows, cols, density, {}, integers,
              tokens % 2};
          if (cols == 1) spec.k = density == 0.3 ? 333 : 41;
          spec.dtype = DType::bf16;
          const Problem problem = make_problem(spec);
          SCOPED_TRACE(::testing::Message()
                       << "M=" << tokens << " block " << rows << 'x' << cols << " density " << density);
          ProblemIn<HostBuffer> run(problem);
          expect_ok(run.linear(Activation::none));
          expect_linear(problem, run);
        }
      }
    }
  }
}

// A token with NaN or infinity changes no other, and nothing that does not store its column.
TEST_P(PairsTest, FewTokensPassNan) {
  if (GetParam() != "avx512_bf16") GTEST_SKIP() << "has no kernel for them";
  const Force force(GetParam());
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{16, 16}, {32, 1}}) {
    const std::int64_t n = 2 * rows, k = 4 * cols;
    const std::vector<std::int32_t> crow{0, 1, 2}, col{0, 2};
    const auto pattern = Pattern::create({n, k, rows, cols, 2}, crow, col);
    ASSERT_TRUE(pattern.ok());
    const std::vector<bfloat16> values(static_cast<std::size_t>(2 * rows * cols), to_bfloat16(1.0F));
    std::vector<bfloat16> x(static_cast<std::size_t>(2 * k), to_bfloat16(1.0F));
    x[0] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());                              // stored once
    x[static_cast<std::size_t>(cols)] = to_bfloat16(std::numeric_limits<float>::infinity());  // nowhere
    std::vector<bfloat16> y(static_cast<std::size_t>(2 * n));
    expect_ok(linear({x.data(), DType::bf16, 2, k, k}, {pattern->view(), values.data(), DType::bf16}, nullptr,
                     Activation::none, {y.data(), DType::bf16, 2, n, n}));
    for (std::int64_t i = 0; i < 2 * n; ++i) {
      const float got = to_float(y[static_cast<std::size_t>(i)]);
      if (i < rows) {
        EXPECT_TRUE(std::isnan(got)) << rows << 'x' << cols << " at " << i;
      } else {
        EXPECT_EQ(got, static_cast<float>(cols)) << rows << 'x' << cols << " at " << i;
      }
    }
  }
}

// More groups than a chunk has, last groups of every number of pairs, and patterns without any.
TEST_P(PairsTest, GroupsAndChunks) {
  for (std::int64_t columns = 1; columns <= 70; ++columns) {
    check({33, 32, columns, 32, 1, 1.0, {}, true, 0});
    check({20, 16, 2 * columns, 16, 2, 1.0, {}, true, 0});
    check({20, 36, columns, 4, 1, 0.4, {}, true, 0});
    check({20, 24, 2 * columns, 8, 2, 0.4, {}, true, 0});
  }
  for (const std::int64_t columns : {255, 256, 257, 289, 511, 512, 513, 1100}) {
    check({40, 80, columns, 32, 1, 0.9, {}, true, 0});
    check({40, 80, columns, 64, 1, 1.0, {}, false, 0});
    check({40, 80, columns, 32, 32, 0.9, {}, true, 0});
    check({40, 80, 4 * columns, 4, 1, 0.9, {}, true, 0});
    check({40, 80, columns, 8, 32, 0.9, {}, false, 0});
  }
  for (const double density : {0.0, 0.02, 1.0}) {
    check({70, 90, 80, 32, 1, density, {}, true, 2});
    check({70, 90, 80, 16, 16, density, {}, true, 2});
    check({70, 90, 80, 4, 1, density, {}, true, 2});
    check({70, 90, 80, 8, 4, density, {}, true, 2});
  }
  check({5, 70, 0, 16, 1, 0.0, {}, true, 2});  // no input features
  check({5, 0, 90, 16, 1, 0.0, {}, true, 2});  // no output features
}

// Chunks of tokens, their sums kept between them; ranges of rows and columns; what is no line and no lane.
TEST_P(PairsTest, GradWeightOfManyTokens) {
  ThreadPool pool(3);
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{32, 1}, {48, 1}, {128, 1}, {16, 1}, {8, 16}, {32, 32}, {20, 48}}) {
    for (const bool integers : {true, false}) {
      for (const std::int64_t tokens : {32, 511, 512, 513, 1100}) {
        const Problem problem = make_problem(
            {tokens, 3 * rows + 5, 4 * cols + 37, rows, cols, 0.4, DType::bf16, integers, tokens % 2});
        ProblemIn<HostBuffer> run(problem, pool.executor());
        check_grad_weight(problem, run);
      }
    }
  }
}

// Equal bits on any number of threads; NaN and infinity in what a block meets, and zeros in padding whatever
// x and dy hold.
TEST_P(PairsTest, GradWeightOfNanAndOnThreads) {
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{32, 1}, {16, 16}, {16, 32}}) {
    Problem problem = make_problem({600, 3 * rows + 5, 4 * cols + 37, rows, cols, 0.4, DType::bf16, true, 0});
    problem.x[7] = kNan;
    problem.dy[3] = kInfinity;
    std::set<std::vector<std::byte>> results;
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.grad_weight());
      results.insert(run.dvalues().download());
    }
    ASSERT_EQ(results.size(), 1U);
    const std::vector<double> got = decode(*results.begin(), DType::bf16);
    const std::vector<double> expected = Host{problem}.grad_weight(problem.dy, problem.x);
    const std::vector<double> rounded = decode(encode(expected, DType::bf16), DType::bf16);
    bool some = false;
    for (std::size_t i = 0; i < rounded.size(); ++i) {
      ASSERT_TRUE(same(got[i], rounded[i])) << i << ": " << got[i] << " for " << rounded[i];
      some = some || std::isnan(got[i]);
    }
    EXPECT_TRUE(some);
  }
}

// Inputs in f32 that may be rounded: what comes out is the product of x rounded to nearest even, in f32.
TEST_P(PairsTest, RoundsFloatsWhereItMay) {
  ThreadPool pool(3);
  const auto check_rounded = [&](ProblemSpec spec, Activation activation = Activation::none) {
    spec.dtype = DType::f32;
    spec.rounds_x = true;
    SCOPED_TRACE(::testing::Message() << "M=" << spec.m << " N=" << spec.n << " K=" << spec.k << " block "
                                      << spec.block_rows << 'x' << spec.block_cols);
    const Problem problem = make_problem(spec);
    Problem rounded = problem;
    rounded.x = decode(encode(problem.x, DType::bf16), DType::bf16);
    ProblemIn<HostBuffer> run(problem, pool.executor());
    const Force force(GetParam());
    run.hold_derived();
    expect_ok(run.linear(activation));
    if (activation != Activation::none) return expect_activation(rounded, run, activation);
    expect_linear(rounded, run);
  };
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{4, 1},  {8, 1},   {8, 8},   {16, 4},
                                                          {48, 8}, {16, 1},  {32, 1},  {128, 1},
                                                          {32, 3}, {16, 16}, {32, 32}, {64, 64}};
  for (const auto& [rows, cols] : blocks) {
    for (const bool integers : {true, false}) {
      check_rounded({37, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, {}, integers, 3});
      check_rounded({64, 3 * rows, 7 * cols, rows, cols, 0.2, {}, integers, 0});
      check_rounded({130, 6 * rows, 128, rows, cols, 0.5, {}, integers, -1});
    }
    for (const Activation activation : {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh})
      check_rounded({65, 3 * rows + 1, 7 * cols, rows, cols, 0.4, {}, false, 1}, activation);
  }
  for (const std::int64_t tokens : {5, 15, 16, 17, 33, 48, 65})
    check_rounded({tokens, 70, 90, 32, 1, 0.5, {}, false, tokens % 2});
}

// NaN and infinity pass, and what bf16 cannot hold becomes infinite; nothing reaches what meets no block.
TEST_P(PairsTest, FloatsBeyondBf16AreInfinite) {
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{16, 1}, {32, 2}, {32, 32}, {4, 1}, {8, 16}}) {
    ProblemSpec spec{40, 7 * rows + 1, 9 * cols, rows, cols, 0.4, DType::f32, true, 0};
    spec.rounds_x = true;
    Problem problem = make_problem(spec);
    for (std::int64_t m = 0; m < 40; m += 2) {
      problem.x[static_cast<std::size_t>(m * problem.x_stride() + m % spec.k)] = m % 8 == 0   ? kNan
                                                                                 : m % 8 == 2 ? -kInfinity
                                                                                              : 0x1.ffffp127;
    }
    Problem rounded = problem;
    rounded.x = decode(encode(problem.x, DType::bf16), DType::bf16);
    ASSERT_EQ(rounded.x[static_cast<std::size_t>(4 * problem.x_stride() + 4 % spec.k)], kInfinity);
    ProblemIn<HostBuffer> run(problem);
    run_all(run);
    expect_same_or_nan(rounded, run, {true, false, false});
  }
}

// Without leave x is exact, and so are gradients with it; up to four tokens of 32x1 nothing is rounded
// either.
TEST_P(PairsTest, RoundsNothingElse) {
  ProblemSpec spec{64, 64, 64, 32, 1, 0.5, DType::f32, false, 0};
  spec.rounds_x = true;
  const Problem problem = make_problem(spec);
  ProblemIn<HostBuffer> run(problem);
  run.hold_derived();
  rarefy::Problem asked = run.problem(Op::linear);
  asked.derived = kAnyDerived;
  const std::string row = GetParam() + "_linear";
  const auto why_not = [&] {
    for (const Candidate& candidate : explain(asked).candidates)
      if (candidate.kernel.name == row) return candidate.why_not;
    return std::string("no such row");
  };
  EXPECT_EQ(why_not(), "");
  EXPECT_NE(to_string(asked).find("bf16 rounding x, 64 tokens, f32 -> f32"), std::string::npos);
  asked.weight.rounds_x = false;
  EXPECT_EQ(why_not(), "takes bf16 inputs and values, to bf16; f32, to f32, for inputs that may be rounded");
  expect_ok(run.grad_input());
  expect_grad_input(problem, run);
  spec.m = 4;
  const Problem few = make_problem(spec);
  ProblemIn<HostBuffer> exact(few);
  exact.hold_derived();
  expect_ok(exact.linear(Activation::none));
  expect_linear(few, exact);
}

TEST_P(PairsTest, OnSeveralThreads) {
  ThreadPool pool(3);
  for (const bool integers : {true, false}) {
    check({400, 700, 500, 32, 1, 0.3, {}, integers, 0}, pool.executor());
    check({70, 1000, 777, 64, 1, 0.3, {}, integers, 1}, pool.executor());
    check({33, 2048, 512, 16, 16, 0.4, {}, integers, 0}, pool.executor());
    check({400, 700, 500, 4, 1, 0.3, {}, integers, 0}, pool.executor());
  }
}

TEST_P(PairsTest, Activations) {
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    SCOPED_TRACE(name(activation));
    const Problem problem = make_problem({65, 100, 50, 16, 1, 0.4, DType::bf16, false, 1});
    ProblemIn<HostBuffer> run(problem);
    run.hold_derived();
    {
      const Force force(GetParam());
      expect_ok(run.linear(activation));
    }
    expect_activation(problem, run, activation, true);
  }
}

const cpu::PairKernels& table_of(const std::string& family) {
#if defined(__x86_64__)
  if (family == "amx") return cpu::kAmx;
  if (family == "avx512_bf16") return cpu::kAvx512Bf16;
#endif
  return cpu::kPairsPortable;
}

// On floats of every size: a rounding to bf16 and a sixteenth of its last place, in both tails; NaN,
// infinities and the signs of zeros as the formulas have them; the same bits in a panel.
TEST_P(PairsTest, ActivationsOfEveryFloat) {
  constexpr std::int32_t kSide = 32;
  constexpr double kLargest = 0x1.fep127;
  const cpu::PairKernels& kernels = table_of(GetParam());
  const std::vector<float> bias(kSide);
  std::vector<float> sums(kSide * cpu::kPanelTokens);
  std::vector<std::uint16_t> y(sums.size()), panel(sums.size());
  const float special[] = {0.0F,
                           -0.0F,
                           1.0F,
                           -1.0F,
                           0x1p127F,
                           -0x1p127F,
                           -0x1p-126F,
                           -12.8F,
                           -87.0F,
                           static_cast<float>(kInfinity),
                           -static_cast<float>(kInfinity),
                           static_cast<float>(kNan)};
  const auto expect = [&](Activation activation, float x, double got) {
    const double exact = activated(activation, x);
    if (std::isnan(exact)) {
      EXPECT_TRUE(std::isnan(got)) << x;
    } else if (std::abs(exact) > kLargest) {
      EXPECT_GE(got, kLargest) << x;
    } else if (std::abs(exact) < kTail) {
      EXPECT_LE(std::abs(got), 2 * kTail) << x;
    } else {
      const double place = std::ldexp(1.0, std::ilogb(exact) - 7);
      EXPECT_LE(std::abs(got - exact), 0.5625 * place) << x << ": " << got << " for " << exact;
      EXPECT_EQ(std::signbit(got), std::signbit(exact)) << x;
    }
  };
  for (const Activation activation :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    SCOPED_TRACE(name(activation));
    std::uint32_t bits = 0;
    for (int round = 0; round < 512; ++round) {
      for (float& x : sums) x = std::bit_cast<float>(bits += 8191);  // 2²⁰ / 2 of them, by odd steps
      if (round == 0) std::copy(std::begin(special), std::end(special), sums.begin());
      kernels.store(
          {sums.data(), false, bias.data(), activation, y.data(), false, kSide, cpu::kPanelTokens, kSide, 0});
      kernels.keep(
          {sums.data(), false, bias.data(), activation, kSide, cpu::PairOrder::paired, 0, panel.data()});
      for (std::size_t o = 0; o < kSide; ++o) {
        for (std::size_t m = 0; m < cpu::kPanelTokens; ++m) {
          const std::uint16_t got = y[m * kSide + o];
          ASSERT_EQ(panel[o / 2 * cpu::kPairLine + 2 * m + o % 2], got);
          expect(activation, sums[o * cpu::kPanelTokens + m] + bias[o], to_float(bfloat16{got}));
        }
      }
      if (HasFailure()) return;
    }
  }
}

// Bits do not depend on threads, nor on the batch that a token is in.
TEST_P(PairsTest, TheSameBitsInEveryBatchAndOnEveryThread) {
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{32, 1}, {32, 4}, {32, 32}, {4, 1}, {16, 1}, {8, 8}}) {
    Problem problem = make_problem({200, 130, 600, rows, cols, 0.4, DType::bf16, false, 0});
    problem.x[static_cast<std::size_t>(70 * problem.x_stride() + 5)] = kInfinity;  // of one token
    const auto run = [&](std::int64_t first, std::int64_t count, int threads) {
      Problem some = problem;
      some.spec.m = count;
      some.x.assign(problem.x.begin() + first * problem.x_stride(),
                    problem.x.begin() + (first + count) * problem.x_stride());
      ThreadPool pool(threads);
      ProblemIn<HostBuffer> one(some, pool.executor());
      one.hold_derived();
      expect_ok(one.linear(Activation::none));
      return one.y().download();
    };
    const std::vector<std::byte> all = run(0, 200, 1);
    for (const int threads : {2, 5}) EXPECT_EQ(run(0, 200, threads), all);
    const auto row = static_cast<std::ptrdiff_t>(all.size()) / 200;
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {17, 16}, {63, 40}}) {
      const std::vector<std::byte> part = run(first, count, 2);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first * row)) << first << ' ' << count;
    }
  }
}

// Up to a panel of tokens may have a kernel of its own (lanes of outputs): any number of them, rows of
// several chunks, activated sums and the last columns of Y have the bits that they have among many.
TEST_P(PairsTest, FewTokensHaveTheBitsOfMany) {
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const bool rounds_x : {false, true}) {
    for (const auto& [rows, cols] :
         {Block{16, 1}, {32, 1}, {48, 1}, {128, 1}, {32, 3}, {32, 2}, {16, 16}, {32, 32}, {64, 64}}) {
      ProblemSpec spec{100, 2 * rows + rows / 2 + 1, 330, rows, cols, 0.9, DType::bf16, false, 0};
      if (rounds_x) spec.dtype = DType::f32;
      spec.rounds_x = rounds_x;
      const Problem problem = make_problem(spec);
      const auto run = [&](std::int64_t first, std::int64_t count, Activation activation) {
        Problem some = problem;
        some.spec.m = count;
        some.x.assign(problem.x.begin() + first * problem.x_stride(),
                      problem.x.begin() + (first + count) * problem.x_stride());
        ThreadPool pool(2);
        ProblemIn<HostBuffer> one(some, pool.executor());
        one.hold_derived();
        expect_ok(one.linear(activation));
        return one.y().download();
      };
      for (const Activation activation : {Activation::none, Activation::gelu_erf}) {
        const std::vector<std::byte> all = run(0, 100, activation);
        const auto row = static_cast<std::ptrdiff_t>(all.size()) / 100;
        for (std::int64_t count = 5; count < 34; count += GetParam() == "pairs" ? 9 : 1) {
          const std::vector<std::byte> part = run(count, count, activation);
          EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + count * row))
              << count << " tokens, block " << rows << 'x' << cols << (rounds_x ? " rounding x" : "");
        }
      }
    }
  }
}

// Columns without stored blocks may hold anything, beside the padding of groups too; what meets a stored
// block passes through, stored zeros included.
TEST_P(PairsTest, NanAndInfinityPassWhereBlocksAreStored) {
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] :
       {Block{16, 1}, {32, 2}, {16, 32}, {4, 1}, {8, 1}, {4, 4}, {8, 16}, {16, 16}}) {
    Problem problem = make_problem({40, 7 * rows + 1, 9 * cols, rows, cols, 0.4, DType::bf16, true, 0});
    for (std::int64_t m = 0; m < 40; ++m) {
      problem.x[static_cast<std::size_t>(m * problem.x_stride() + m % problem.spec.k)] = m % 3 == 0 ? kNan
                                                                                         : m % 3 == 1
                                                                                             ? kInfinity
                                                                                             : -kInfinity;
    }
    problem.values[3] = kNan;
    problem.bias[1] = kInfinity;
    ProblemIn<HostBuffer> run(problem);
    run_all(run);
    const std::vector<double> expected =
        Host{problem}.linear(problem.x, problem.values, &problem.bias, Activation::none);
    const std::vector<double> got = decode(run.y().download(), DType::bf16);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::size_t n = static_cast<std::size_t>(problem.spec.n);
      ASSERT_TRUE(same(got[i / n * static_cast<std::size_t>(problem.y_stride()) + i % n], expected[i])) << i;
    }
  }
}

// Subnormal numbers may count as 0, in x, in the weight and as a result: each changes a result by less than
// 2⁻¹²⁶ times the other factor.
TEST_P(PairsTest, SubnormalNumbersMayBeZero) {
  Problem problem = make_problem({40, 32, 64, 16, 1, 1.0, DType::bf16, true, 0});
  for (std::size_t i = 0; i < problem.x.size(); i += 3) problem.x[i] = 0x1p-130;
  for (std::size_t i = 0; i < problem.values.size(); i += 5) problem.values[i] = -0x1p-127;
  for (double& bias : problem.bias) bias = 0;
  ProblemIn<HostBuffer> run(problem);
  run_all(run);
  const std::vector<double> expected =
      Host{problem}.linear(problem.x, problem.values, &problem.bias, Activation::none);
  const std::vector<double> got = decode(run.y().download(), DType::bf16);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - expected[i]), 64 * 2 * 0x1p-126 + 0x1p-9 * std::abs(expected[i])) << i;
  }
}

// Weights that nobody holds packed are packed in the call: by the driver, or ahead of it for who holds the
// rest.
TEST_P(PairsTest, PackedInTheCall) {
  ThreadPool pool(3);
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] : {Block{32, 1}, {16, 16}, {16, 32}, {4, 1}, {8, 8}}) {
    for (const bool integers : {true, false}) {
      for (const std::int64_t tokens : {20, 100}) {  // without anything at hand, 20 are another kernel's
        const Problem problem = make_problem({tokens, 170, 200, rows, cols, 0.4, DType::bf16, integers, 1});
        ProblemIn<HostBuffer> run(problem, pool.executor());
        run.hold_prepared_alone();
        expect_ok(run.linear(Activation::none));
        expect_linear(problem, run);
      }
      const Problem problem = make_problem({100, 170, 200, rows, cols, 0.4, DType::bf16, integers, 1});
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.linear(Activation::none));
      expect_linear(problem, run);
      if (cols == 1) continue;
      expect_ok(run.grad_input());
      expect_grad_input(problem, run);
    }
  }
}

// What a caller holds for another kernel, or of another version, is no kernel's: it is not read, and what is
// lacking is made. Also for f32, whose kernels derive nothing.
TEST_P(PairsTest, DerivedDataOfOthersIsNotRead) {
  const std::vector<std::byte> garbage(1 << 20, std::byte{0x7f});
  const auto bytes = static_cast<std::int64_t>(garbage.size());
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const Force force(dtype == DType::bf16 ? GetParam() : std::string());
    for (const std::int64_t tokens : {3, 100}) {
      if (dtype == DType::bf16 && tokens == 3) continue;  // another family's
      const Problem problem = make_problem({tokens, 170, 200, 32, 1, 0.4, dtype, false, 1});
      ProblemIn<HostBuffer> run(problem);
      BsrView w = run.weight();
      const auto product = [&] {
        std::vector<std::byte> y(static_cast<std::size_t>(tokens) * 170 * size_of(dtype));
        expect_ok(linear(run.x_view(), w, run.bias(), Activation::none, {y.data(), dtype, tokens, 170, 170}));
        return y;
      };
      const std::vector<std::byte> want = product();
      for (const std::uint64_t key : {std::uint64_t{12345}, kAnyDerived}) {
        w.derived = {key, garbage.data(), garbage.data(), bytes, bytes};
        EXPECT_EQ(product(), want) << tokens << " tokens, " << name(dtype) << ", key " << key;
      }
    }
  }
}

TEST_P(PairsTest, DerivedDataThatIsTooSmallIsRefused) {
  const Force force(GetParam());
  const Problem problem = make_problem({100, 170, 200, 32, 1, 0.4, DType::bf16, false, 1});
  ProblemIn<HostBuffer> run(problem);
  run.hold_derived();
  std::vector<std::byte> y(100 * 170 * 2);
  for (const bool packed : {false, true}) {
    BsrView w = run.weight();
    (packed ? w.derived.packed_bytes : w.derived.prepared_bytes) -= 1;
    const Status status =
        linear(run.x_view(), w, run.bias(), Activation::none, {y.data(), DType::bf16, 100, 170, 170});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find(packed ? "derived.packed must have" : "derived.prepared must have"),
              std::string::npos)
        << status.message();
  }
}

TEST_P(PairsTest, EveryConfigurationComputesTheSame) {
  ThreadPool pool(3);  // each of which takes a part of `rest`
  for (const char* config : {"panels=1 splits=1", "panels=3 splits=2", "panels=2 splits=7"}) {
    const Force force(GetParam() + "," + GetParam() + "_grad_input_columns(" + config + ")");
    const Problem problem = make_problem({150, 170, 200, 32, 1, 0.4, DType::bf16, true, 0});
    ProblemIn<HostBuffer> run(problem, pool.executor());
    expect_ok(run.grad_input());
    expect_grad_input(problem, run);
  }
  for (const char* config : {"rows=1 columns=1", "rows=7 columns=3", "rows=100 columns=500"}) {
    const Force force(GetParam() + "," + GetParam() + "_grad_weight(" + config + ")");
    for (const std::int64_t cols : {1, 16}) {
      const Problem problem = make_problem({150, 170, 200, 32, cols, 0.4, DType::bf16, true, 0});
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.grad_weight());
      expect_grad_weight(problem, run);
    }
  }
  for (const char* config :
       {"panels=1 splits=1 rest=0", "panels=3 splits=2 rest=0", "panels=16 splits=5 rest=0",
        "panels=2 splits=1 rest=1", "panels=4 splits=3 rest=2", "panels=9 splits=1 rest=9"}) {
    const Force force(GetParam() + "," + GetParam() + "_linear(" + config + ")");
    const Problem problem = make_problem({150, 170, 200, 32, 1, 0.4, DType::bf16, true, 0});
    ProblemIn<HostBuffer> run(problem, pool.executor());
    run.hold_derived();
    expect_ok(run.linear(Activation::none));
    expect_linear(problem, run);
  }
}

TEST(PairsSelectionTest, SaysWhatItDoesNotTake) {
  const auto why_not = [](rarefy::Problem problem, const std::string& kernel = "") {
    problem.derived = kAnyDerived;
    for (const Candidate& candidate : explain(problem).candidates) {
      if (kernel.empty() ? candidate.kernel.family == "pairs" : candidate.kernel.name == kernel)
        return candidate.why_not;
    }
    return std::string("no such row");
  };
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 16, 1, 9}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 4, 1, 9}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 32, 32, 3}, 2, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 32, 32, 3}, 1, DType::bf16)),
            "takes at least 2 tokens; got 1");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 12, 1, 9}, 5, DType::bf16)),
            "takes blocks of 4, 8 or a multiple of 16 outputs; got 12");
  EXPECT_EQ(why_not(make_problem(Op::grad_input, {64, 64, 16, 1, 9}, 5, DType::bf16)),
            "takes blocks of 4, 8 or a multiple of 16 outputs; got 1");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_input, {64, 64, 8, 1, 9}, 5, DType::bf16), "pairs_grad_input_columns"),
      "takes blocks of a multiple of 16 rows and one column; got 8x1");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_input, {64, 64, 16, 2, 9}, 5, DType::bf16), "pairs_grad_input_columns"),
      "takes blocks of a multiple of 16 rows and one column; got 16x2");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_input, {64, 64, 16, 1, 9}, 5, DType::bf16), "pairs_grad_input_columns"),
      "");
  EXPECT_EQ(why_not(make_problem(Op::grad_weight, {64, 64, 16, 1, 9}, 32, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::grad_weight, {64, 64, 32, 32, 4}, 31, DType::bf16)),
            "takes at least 32 tokens; got 31");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_weight, {64, 64, 4, 4, 9}, 32, DType::bf16)),
      "takes blocks of one column and a multiple of 16 rows, or of as many columns and 8 rows or more; got "
      "4x4");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 16, 1, 9}, 4, DType::bf16)),
            "takes at least 5 tokens; got 4");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 16, 1, 9}, 5, DType::f32)),
            "takes bf16 inputs and values, to bf16; f32, to f32, for inputs that may be rounded");
  // The portable twin is never chosen by itself.
  for (const std::int64_t tokens : {63, 64}) {
    const rarefy::Problem plain = make_problem(Op::linear, {64, 64, 16, 1, 9}, tokens, DType::bf16);
    for (const Candidate& candidate : explain(plain).candidates) {
      if (candidate.chosen) {
        EXPECT_NE(candidate.kernel.family, "pairs");
      }
      if (candidate.kernel.family == "pairs") {
        EXPECT_EQ(candidate.why_not,
                  tokens < 64 ? "without its packed weight, takes at least 64 tokens; got 63" : "");
      }
    }
  }
}

// Each panel's outputs once, whatever the cut; with a rest, each range of tasks (task_queue.h) has as many
// panels of its own and one part of the rest.
TEST(PanelTasksTest, CoverEveryPanelAndShareTheRest) {
  for (const std::int64_t tokens : {5, 32, 33, 544, 1000}) {
    for (const std::int64_t threads : {1, 2, 3, 16}) {
      for (const cpu::PairsBlocking& b : {cpu::PairsBlocking{1, 1, 0}, {3, 1, 1}, {4, 5, 0}, {2, 3, 2}}) {
        const std::int64_t panels = (tokens + 31) / 32, rest = std::min(b.rest, panels);
        const cpu::PanelTasks tasks(tokens, b, threads);
        std::map<std::int64_t, std::int64_t> seen;  // parts of a panel
        std::vector<std::int64_t> own(static_cast<std::size_t>(threads)), shared(own);
        for (std::int64_t t = 0; t < tasks.count(); ++t) {
          for (const bool by_part : {false, true}) {
            const cpu::PanelTasks::Task task = tasks.task(t, by_part);
            EXPECT_EQ(task.parts, task.shared ? threads : b.splits);
            EXPECT_EQ(task.first % 32, 0);
            EXPECT_LE(task.tokens, b.panels * 32);
            EXPECT_LE(task.first + task.tokens, tokens);
            EXPECT_TRUE(task.tokens % 32 == 0 || task.first + task.tokens == tokens);
            for (std::int64_t m = task.first; m < task.first + task.tokens; m += 32) {
              EXPECT_EQ(task.shared, m / 32 >= panels - rest);
              seen[(m / 32 * 100 + task.part) * 2 + (by_part ? 1 : 0)] += 1;
            }
            if (by_part) continue;
            const auto worker = static_cast<std::size_t>(t * threads / tasks.count());
            (task.shared ? shared : own)[worker] += task.shared ? 1 : (task.tokens + 31) / 32;
          }
        }
        EXPECT_EQ(seen.size(), 2 * static_cast<std::size_t>((panels - rest) * b.splits + rest * threads));
        for (const auto& [place, times] : seen) EXPECT_EQ(times, 1) << place;
        if (rest == 0 || (panels - rest) % threads != 0) continue;
        for (std::size_t w = 0; w < own.size(); ++w) {
          EXPECT_EQ(own[w], own[0]) << tokens << ' ' << threads;
          EXPECT_EQ(shared[w], 1);
        }
      }
    }
  }
}

// The model of the work, on a machine that is not this one: weights beyond L2 meet several panels, a few
// tokens are shared out by outputs.
TEST(PairsSelectionTest, ConfigurationsFollowTheProblem) {
  const auto config = [](std::int64_t tokens, int threads, std::string_view name = "amx_linear") {
    Machine machine;
    machine.l2 = 2 << 20;
    const Kernel* row = nullptr;
    for (const Kernel& kernel : registry()) {
      if (kernel.name == name) row = &kernel;
    }
    if (row == nullptr) return cpu::PairsBlocking{0, 0};  // not built for x86-64
    rarefy::Problem problem = make_problem(Op::linear, {3072, 768, 32, 1, 3072 * 768 / 64}, tokens,
                                           DType::bf16, Device::cpu, threads);
    return from_config<cpu::PairsBlocking>(row->configure(problem, machine));
  };
#if defined(__x86_64__)
  EXPECT_EQ(config(32, 1), (cpu::PairsBlocking{1, 1}));
  EXPECT_GE(config(2048, 1).panels, 4);
  EXPECT_EQ(config(32, 16).panels, 1);
  EXPECT_GE(config(32, 16).splits, 16);
  EXPECT_GE(config(512, 16).panels, 2);
  EXPECT_EQ(config(544, 2, "avx512_bf16_linear").rest, 1);
  EXPECT_EQ(config(512, 2, "avx512_bf16_linear").rest, 0);
#else
  EXPECT_EQ(config(32, 1).panels, 0);
#endif
}

}  // namespace
}  // namespace rarefy::test
