// The tall vectors' input gradient in every configuration, with the zeros and without: against the host's
// products in double, through the registry; that what a column does not store is skipped, whatever dY holds;
// and the same bits in each run. What is chosen, and what is refused, without a GPU.
#include "cuda/sm90/tall_grad_input.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/registry.h"
#include "sm90_checks.h"

namespace rarefy::test {
namespace {

using sm90::TallInputCandidate;
using sm90::TallInputConfig;

constexpr int kSms = 132, kShared = 227 * 1024;

sm90::Product product_of(const ProblemSpec& spec, std::int64_t blocks) {
  sm90::Product p;
  p.transposed = true;
  p.dtype = spec.dtype;
  p.tokens = spec.m;
  p.rows = spec.n;
  p.cols = spec.k;
  p.block_rows = spec.block_rows;
  p.block_cols = 1;
  p.blocks = blocks;
  p.x_stride = spec.n;
  p.y_stride = spec.k;
  return p;
}

std::string forced(const TallInputConfig& config) {
  return "cuda:sm90,sm90_tall_grad_input(" + config.text() + ')';
}

class Sm90TallInputTest : public Sm90Test {
 protected:
  template <class Check>
  static void in_each_config(const Problem& problem, ProblemIn<DeviceBuffer>& gpu, Check&& check) {
    for (const TallInputCandidate& candidate :
         tall_input_candidates(product_of(problem.spec, problem.pattern.shape().nnzb), kSms, kShared)) {
      if (!candidate.reason.empty()) continue;
      SCOPED_TRACE(candidate.config.text());
      const Force force(forced(candidate.config));
      ASSERT_EQ(kernel_of(gpu, Op::grad_input), "sm90_tall_grad_input");
      gpu.poison();
      expect_ok(gpu.grad_input());
      check();
    }
  }
};

// Edges of tokens, rows and columns; block rows that store nothing, little, and more columns than a turn has.
TEST_F(Sm90TallInputTest, MatchesHost) {
  for (const std::int64_t r : {32, 64, 96, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const ProblemSpec& spec : {ProblemSpec{300, 3 * r - 24, 200, r, 1, 0.3, dtype, true, 8},
                                      ProblemSpec{1, 2 * r, 40, r, 1, 1.0, dtype, true, 8},
                                      ProblemSpec{77, 2 * r - 8, 1096, r, 1, 1.0, dtype, true, 8},
                                      ProblemSpec{600, 4 * r, 328, r, 1, 0.5, dtype, false, 16},
                                      ProblemSpec{40, 150 * r, 72, r, 1, 0.02, dtype, true, 0}}) {
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu(problem);
        gpu.hold_derived(4096);
        in_each_config(problem, gpu, [&] { expect_grad_input(problem, gpu); });
      }
    }
  }
}

TEST_F(Sm90TallInputTest, AbsentVectorsAreSkippedWhateverDyHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const std::int64_t r : {32, 64, 128}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      const ProblemSpec spec{304, 5 * r, 336, r, 1, 0.3, dtype, true, 0};
      SCOPED_TRACE(text_of(spec));
      Problem problem = make_problem(spec);
      add_specials(problem);
      std::fill_n(problem.dy.begin() + 7 * spec.n, spec.n, nan);  // a token of nothing else
      ProblemIn<DeviceBuffer> gpu(problem);
      in_each_config(problem, gpu, [&] { expect_same_or_nan(problem, gpu, {false, true, false}); });
    }
  }
}

TEST(TallInput, ChoosesWhatItCanRun) {
  for (const std::int64_t r : {32, 64, 96, 128, 256}) {
    for (const double density : {0.0, 0.02, 0.1, 0.25, 0.5, 1.0}) {
      for (const std::int64_t tokens : {1, 100, 512, 8192}) {
        const ProblemSpec spec{tokens, 4096, 4096, r, 1, density, DType::bf16, false, 0};
        const auto p = product_of(spec, static_cast<std::int64_t>(density * 4096 * (4096 / r)));
        ASSERT_EQ(tall_input_unsupported(p), "");
        const TallInputConfig c = tall_input_best(p, kSms, kShared).config;
        EXPECT_TRUE(valid(p, c)) << c.text();
        EXPECT_FALSE(c.scatter && (density > 0.4 || r % 128 > 64)) << c.text();
        for (const TallInputCandidate& other : tall_input_candidates(p, kSms, kShared)) {
          EXPECT_EQ(valid(p, other.config), other.reason.empty()) << other.config.text();
          EXPECT_GT(other.microseconds, 0);
        }
      }
    }
  }
}

// Forced configurations may hold anything: they are refused before anything is queued.
TEST(TallInput, RefusesForcedConfigurations) {
  const auto kernel = std::find_if(registry().begin(), registry().end(),
                                   [](const Kernel& k) { return k.name == "sm90_tall_grad_input"; });
  ASSERT_NE(kernel, registry().end());
  Machine h200;
  h200.gpu.arch = 90, h200.gpu.sms = kSms, h200.gpu.shared_memory = kShared;
  Call call;
  call.problem = rarefy::make_problem(Op::grad_input, {256, 64, 64, 1, 100}, 80, DType::bf16, Device::cuda);
  ASSERT_EQ(kernel->supports(call.problem, h200), "");
  const Config own = kernel->configure(call.problem, h200);
  for (const char* config : {"scatter=0 tokens=64", "scatter=1 tokens=64 columns=0", "slots=1", "sms=0"}) {
    call.config = *parse_config(*kernel, own, config);
    const Status status = kernel->run(call);
    EXPECT_NE(status.message().find("the config must be one that the blocks allow"), std::string::npos)
        << config << ' ' << status.message();
  }
  EXPECT_GE(kernel->candidates(call.problem, h200).size(), 10U);
}

TEST(TallInput, SaysWhyNot) {
  sm90::Product p = product_of({8, 256, 256, 64, 1, 1.0, DType::bf16, false, 0}, 1024);
  EXPECT_EQ(tall_input_unsupported(p), "");
  for (const TallInputConfig& c :
       {TallInputConfig{false, 64, 128, 4}, TallInputConfig{false, 256, 64, 4},
        TallInputConfig{false, 256, 128, 5}, TallInputConfig{false, 256, 128, 1},
        TallInputConfig{true, 64, 520, 4}, TallInputConfig{true, 96, 64, 4}, TallInputConfig{true, 64, 44, 4},
        TallInputConfig{true, 64, 64, 1}, TallInputConfig{true, 64, 64, 7}})
    EXPECT_FALSE(valid(p, c)) << c.text();
  p.block_rows = 16;
  EXPECT_EQ(tall_input_unsupported(p), "blocks must have a multiple of 32 rows");
  p.block_rows = 64;
  p.x_stride = 260;
  EXPECT_EQ(tall_input_unsupported(p), "TMA needs rows of dY and dX 16 bytes apart");
  p.x_stride = 248;
  EXPECT_EQ(tall_input_unsupported(p), "TMA needs rows that do not overlap");
}

}  // namespace
}  // namespace rarefy::test
