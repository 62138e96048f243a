// 1,000 calls of each Hopper kernel in each of its configurations have the bits of the first: what is added
// up has one order, whichever thread block comes first. Of random numbers, whose sums show another order.
#include <gtest/gtest.h>

#include "core/aligned_rows.h"
#include "core/registry.h"
#include "sm90_checks.h"

namespace rarefy::test {
namespace {

struct Case {
  std::int64_t r, c, m = 400;
  DType dtype = DType::bf16;
  std::int64_t cols = 512;  // no multiple of 8: copies with aligned rows
};

class Sm90RepeatsTest : public Sm90Test, public ::testing::WithParamInterface<Case> {};

TEST_P(Sm90RepeatsTest, AreEqualInEachConfiguration) {
  const Case& its = GetParam();
  ProblemSpec spec{its.m, 544, its.cols, its.r, its.c, 0.3, its.dtype, false, 0};
  spec.tf32 = its.dtype == DType::f32;
  const Problem problem = make_problem(spec);
  int configurations = 0;
  for (const Kernel& kernel : registry()) {
    if (kernel.family != "sm90" || kernel.op == Op::feed_forward) continue;
    rarefy::Problem asked = ProblemIn<DeviceBuffer>(problem).problem(kernel.op);
    if (wants_aligned_rows(asked) && kernel.aligns_rows) asked = with_aligned_rows(asked);
    const Machine machine = machine_of(asked);
    if (kernel.format != asked.weight.format || !kernel.supports(asked, machine).empty()) continue;
    std::vector<std::string> choices = {""};  // the kernel's own, where it has nothing to choose from
    if (kernel.candidates != nullptr) {
      choices.clear();
      for (const Config& config : kernel.candidates(asked, machine))
        choices.push_back(to_string(kernel, config));
    }
    for (const std::string& choice : choices) {
      const std::string text = std::string(kernel.name) + '(' + choice + ')';
      SCOPED_TRACE(text);
      const Force force("cuda:sm90," + text);
      ProblemIn<DeviceBuffer> gpu(problem);
      gpu.hold_derived(its.m <= 16 ? 0 : 4096);
      ASSERT_EQ(kernel_of(gpu, kernel.op), kernel.name);
      expect_equal_repeats(gpu, kernel.op);
      if (HasFailure()) return;
      ++configurations;
    }
  }
  EXPECT_GE(configurations, 3);
  RecordProperty("configurations", configurations);
}

// The weight gradient of tall vectors has configs, but no list of them.
TEST_F(Sm90Test, TallGradientsRepeat) {
  const Problem problem = make_problem({1000, 544, 512, 64, 1, 0.3, DType::bf16, false, 0});
  for (const char* config : {"slots=4 split=1 pairs=0 columns=288 turns=2 long_steps=0",
                             "slots=4 split=1 pairs=2 columns=288 turns=2 long_steps=0",
                             "slots=3 pairs=0 split=2 columns=480 turns=0 long_steps=1",
                             "slots=3 pairs=0 split=2 columns=480 turns=2 long_steps=1 turners=2 last=40",
                             "slots=3 pairs=0 split=4 columns=96 turns=2 long_steps=1 turners=8 last=10"}) {
    SCOPED_TRACE(config);
    const Force force("cuda:sm90,sm90_tall_gradient(" + std::string(config) + ')');
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    ASSERT_EQ(kernel_of(gpu, Op::grad_weight), "sm90_tall_gradient");
    expect_equal_repeats(gpu, Op::grad_weight);
  }
}

INSTANTIATE_TEST_SUITE_P(Sm90, Sm90RepeatsTest,
                         ::testing::Values(Case{128, 128}, Case{64, 64}, Case{32, 32}, Case{16, 16},
                                           Case{8, 8}, Case{128, 1}, Case{64, 1}, Case{32, 1}, Case{16, 1},
                                           Case{64, 64, 8}, Case{16, 16, 16}, Case{8, 8, 4}, Case{128, 1, 2},
                                           Case{64, 1, 12}, Case{128, 1, 24}, Case{64, 64, 300, DType::f32},
                                           Case{16, 16, 300, DType::f32}, Case{64, 64, 400, DType::bf16, 515},
                                           Case{16, 16, 400, DType::bf16, 515},
                                           Case{64, 1, 400, DType::bf16, 515}),
                         [](const auto& tested) {
                           const Case& its = tested.param;
                           return std::to_string(its.r) + 'x' + std::to_string(its.c) + '_' +
                                  std::to_string(its.m) + "_tokens_" + std::to_string(its.cols) + '_' +
                                  std::string(name(its.dtype));
                         });

}  // namespace
}  // namespace rarefy::test
