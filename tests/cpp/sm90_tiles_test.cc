// Every tile shape of the strip and the union kernel, whether it would be chosen or not: linear and
// grad_input against the host's in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/registry.h"
#include "sm90_checks.h"

namespace rarefy::test {
namespace {

struct Case {
  std::string_view linear, grad_input;
  std::int64_t r, c;
  double density;
};

class Sm90TilesTest : public Sm90Test, public ::testing::WithParamInterface<Case> {
 protected:
  static const Kernel& kernel_named(std::string_view name) {
    return *std::ranges::find(registry(), name, &Kernel::name);
  }
};

// Three token tiles and a bit of the widest, whatever the tile; groups of strips that are not full.
TEST_P(Sm90TilesTest, MatchHost) {
  const Case& its = GetParam();
  std::set<std::string> tokens;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const ProblemSpec spec{795, 7 * 64 + 32, 9 * 64 - 32, its.r, its.c, its.density, dtype, true, 8};
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(spec);
    for (const bool transposed : {false, true}) {
      const Kernel& kernel = kernel_named(transposed ? its.grad_input : its.linear);
      const rarefy::Problem asked = ProblemIn<DeviceBuffer>(problem).problem(kernel.op);
      for (const Config& config : kernel.candidates(asked, machine_of(asked))) {
        const std::string text = to_string(kernel, config);
        SCOPED_TRACE(text);
        const Force force("cuda:sm90," + std::string(kernel.name) + '(' + text + ')');
        ProblemIn<DeviceBuffer> gpu(problem);
        gpu.hold_derived(4096);
        ASSERT_EQ(kernel_of(gpu, kernel.op), kernel.name);
        expect_ok(transposed ? gpu.grad_input() : gpu.linear(Activation::none));
        transposed ? expect_grad_input(problem, gpu) : expect_linear(problem, gpu);
        const std::size_t at = text.find("tokens=");
        tokens.insert(text.substr(at, text.find(' ', at) - at));
      }
    }
  }
  EXPECT_EQ(tokens, (std::set<std::string>{"tokens=128", "tokens=192", "tokens=256", "tokens=64"}));
}

INSTANTIATE_TEST_SUITE_P(Sm90, Sm90TilesTest,
                         ::testing::Values(Case{"sm90_strips_linear", "sm90_strips_grad_input", 64, 64, 0.5},
                                           Case{"sm90_strips_linear", "sm90_strips_grad_input", 64, 64, 0.05},
                                           Case{"sm90_strips_linear", "sm90_strips_grad_input", 128, 128,
                                                0.3},
                                           Case{"sm90_unions_linear", "sm90_unions_grad_input", 32, 32, 0.3},
                                           Case{"sm90_unions_linear", "sm90_unions_grad_input", 16, 16, 0.05},
                                           Case{"sm90_unions_linear", "sm90_unions_grad_input", 8, 8, 0.2}),
                         [](const auto& tested) {
                           const Case& its = tested.param;
                           return std::string(its.linear) + '_' + std::to_string(its.r) + '_' +
                                  std::to_string(static_cast<int>(100 * its.density));
                         });

}  // namespace
}  // namespace rarefy::test
