// Where products in bf16 pairs meet floats: inputs in f32 that may be rounded, and activations of the sums.
#include <bit>
#include <cmath>

#include "cpu/linear_pairs.h"
#include "pairs_checks.h"

namespace rarefy::test {
namespace {

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
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {4, 1},  {8, 1},   {8, 8},   {16, 4},  {48, 8}, {16, 1}, {32, 1},  {128, 1},
      {32, 3}, {16, 16}, {32, 32}, {64, 64}, {12, 1}, {24, 8}, {10, 10}, {5, 1}};
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
  for (const auto& [rows, cols] :
       {Block{16, 1}, {32, 2}, {32, 32}, {4, 1}, {8, 16}, {24, 1}, {12, 20}, {10, 3}, {6, 1}, {7, 2}}) {
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

const cpu::PairKernels& table_of([[maybe_unused]] const std::string& family) {
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
          {sums.data(), false, bias.data(), activation, y.data(), false, kSide, cpu::kPanelTokens, kSide});
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

}  // namespace
}  // namespace rarefy::test
