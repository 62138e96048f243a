// Pattern: what it says of itself, and that its copies share one plan.
#include "rarefy/pattern.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "product_checks.h"

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

// A row plan is the first part of the plan, on any number of threads, of either width of indices.
TEST(PatternTest, RowPlansAreTheFirstPart) {
  ThreadPool pool(3);
  const Pattern pattern = test::make_problem({1, 900, 700, 1, 1, 0.3}).pattern;
  const std::vector<std::int64_t> wide(pattern.col_indices().begin(), pattern.col_indices().end());
  std::vector<std::int32_t> words(static_cast<std::size_t>(row_plan_size(pattern.shape())));
  const std::span<const std::int32_t> want = pattern.plan().first(words.size());
  for (const Executor& executor : {Executor{}, pool.executor()}) {
    for (const bool of_wide : {false, true}) {
      std::fill(words.begin(), words.end(), -7);
      const std::span<const std::int32_t> crow = pattern.crow_indices();
      test::expect_ok(
          of_wide ? build_row_plan("test", pattern.shape(), crow, wide, words, executor)
                  : build_row_plan("test", pattern.shape(), crow, pattern.col_indices(), words, executor));
      EXPECT_TRUE(std::equal(words.begin(), words.end(), want.begin()));
    }
  }
  const auto view = view_row_plan("test", pattern.shape(), words);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->crow[900], pattern.shape().nnzb);
  EXPECT_EQ(view->perm, nullptr);
  EXPECT_NE(view_row_plan("test", pattern.shape(), pattern.plan())->perm, nullptr);
  EXPECT_FALSE(view_plan("test", pattern.shape(), words).ok());
  words[0] = 1;
  EXPECT_FALSE(view_row_plan("test", pattern.shape(), words).ok());
}

// Every kind of damage, at every place of a few tasks' worth of indices, with the message of check_indices.
TEST(PatternTest, RowPlansAreCheckedAsPlans) {
  const Pattern pattern = test::make_problem({1, 900, 700, 1, 1, 0.3}).pattern;
  const BsrShape& shape = pattern.shape();
  const std::span<const std::int32_t> crow = pattern.crow_indices();
  std::vector<std::int32_t> col(pattern.col_indices().begin(), pattern.col_indices().end());
  std::vector<std::int32_t> rows(static_cast<std::size_t>(row_plan_size(shape)));
  std::vector<std::int32_t> whole(static_cast<std::size_t>(plan_size(shape)));
  std::size_t refused = 0;
  for (std::size_t e = 0; e < col.size(); e += e % 7 == 0 ? 1 : 997) {
    for (const std::int32_t wrong : {-1, 700, e > 0 ? col[e - 1] : 0, col[e] + 1}) {
      const std::int32_t right = std::exchange(col[e], wrong);
      const Status got = build_row_plan("test", shape, crow, col, rows);
      EXPECT_EQ(got.message(), check_indices("test", shape, crow, col).message()) << e << ' ' << wrong;
      EXPECT_EQ(got.message(), build_plan("test", shape, crow, col, whole).message()) << e << ' ' << wrong;
      refused += got.ok() ? 0 : 1;
      col[e] = right;
    }
  }
  EXPECT_GT(refused, 400U);
  std::vector<std::int64_t> wide(col.begin(), col.end());
  wide[5] += std::int64_t{1} << 32;
  EXPECT_FALSE(build_row_plan("test", shape, crow, wide, rows).ok());
  EXPECT_FALSE(build_row_plan("test", shape, crow.first(900), col, rows).ok());
  EXPECT_FALSE(build_row_plan("test", shape, crow, col, whole).ok());
  for (const std::size_t i : {std::size_t{0}, std::size_t{450}, std::size_t{900}}) {
    std::vector<std::int32_t> starts(crow.begin(), crow.end());
    starts[i] += 1000;
    EXPECT_EQ(build_row_plan("test", shape, starts, col, rows).message(),
              check_indices("test", shape, starts, col).message());
  }
}

TEST(PatternTest, IndicesAreComparedElementByElement) {
  ThreadPool pool(3);
  const Executor executor = pool.executor();
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{2049}, std::size_t{200'000}}) {
    std::vector<std::int32_t> held(count);
    for (std::size_t i = 0; i < count; ++i) held[i] = static_cast<std::int32_t>(i * 7 % 1000);
    std::vector<std::int32_t> narrow = held;
    std::vector<std::int64_t> wide(held.begin(), held.end());
    EXPECT_TRUE(equal_indices(held, narrow, executor));
    EXPECT_TRUE(equal_indices(held, wide, executor));
    for (const std::size_t at : {std::size_t{0}, count / 2, count - 1}) {
      if (count == 0) break;
      narrow[at] ^= 1;
      EXPECT_FALSE(equal_indices(held, narrow, executor)) << at;
      narrow[at] ^= 1;
      for (const std::int64_t bit : {std::int64_t{1}, std::int64_t{1} << 31, std::int64_t{1} << 32}) {
        wide[at] ^= bit;
        EXPECT_FALSE(equal_indices(held, wide, executor)) << at << ' ' << bit;
        wide[at] ^= bit;
      }
    }
    narrow.push_back(0);
    wide.push_back(0);
    EXPECT_FALSE(equal_indices(held, narrow, executor));
    EXPECT_FALSE(equal_indices(held, wide, executor));
  }
}

TEST(PatternTest, AnEmptyMatrixHasDensityZero) {
  const std::vector<std::int32_t> one{0}, none;
  EXPECT_EQ(Pattern::create({0, 5, 2, 2, 0}, one, none)->density(), 0);
  EXPECT_EQ(Pattern::create({0, 0, 2, 2, 0}, one, none)->density(), 0);
}

}  // namespace
}  // namespace rarefy
