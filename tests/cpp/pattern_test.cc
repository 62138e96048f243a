// Pattern: what it says of itself, and that its copies share one plan.
#include "rarefy/pattern.h"

#include <gtest/gtest.h>

namespace rarefy {
namespace {

TEST(PatternTest, SaysWhatItStores) {
  const std::vector<std::int32_t> crow{0, 2, 3, 4}, col{0, 1, 1, 0};
  const Pattern pattern = *Pattern::create({6, 8, 2, 4, 99}, crow, col);  // nnzb comes from col_indices
  EXPECT_EQ(pattern.shape(), (BsrShape{6, 8, 2, 4, 4}));
  EXPECT_EQ(pattern.density(), 4.0 / 6.0);
  const auto to_vector = [](std::span<const std::int32_t> words) {
    return std::vector<std::int32_t>(words.begin(), words.end());
  };
  EXPECT_EQ(to_vector(pattern.crow_indices()), crow);
  EXPECT_EQ(to_vector(pattern.col_indices()), col);
  EXPECT_EQ(std::ssize(pattern.plan()), plan_size(pattern.shape()));
  const Pattern copy = pattern;
  EXPECT_EQ(copy.plan().data(), pattern.plan().data());
  EXPECT_EQ(copy.view().crow, pattern.view().crow);
}

TEST(PatternTest, ListsItsBlocksByColumnToo) {
  const std::vector<std::int32_t> crow{0, 2, 3, 4}, col{0, 2, 2, 0};
  const Pattern pattern = *Pattern::create({3, 3, 1, 1, 0}, crow, col);
  const PlanView& plan = pattern.view();
  EXPECT_EQ(std::vector(plan.ccol, plan.ccol + 4), (std::vector<std::int32_t>{0, 2, 2, 4}));
  EXPECT_EQ(std::vector(plan.row, plan.row + 4), (std::vector<std::int32_t>{0, 2, 0, 1}));
  EXPECT_EQ(std::vector(plan.perm, plan.perm + 4), (std::vector<std::int32_t>{0, 3, 1, 2}));
}

TEST(PatternTest, AnEmptyMatrixHasDensityZero) {
  const std::vector<std::int32_t> one{0}, none;
  EXPECT_EQ(Pattern::create({0, 5, 2, 2, 0}, one, none)->density(), 0);
  EXPECT_EQ(Pattern::create({0, 0, 2, 2, 0}, one, none)->density(), 0);
}

}  // namespace
}  // namespace rarefy
