// linear for up to 4 tokens, and for more by fours and eights, on rows longer than one part, chunk or pass:
// exact sums, and bits that do not depend on the batch.
#include <gtest/gtest.h>

#include "held_checks.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

struct Case {
  std::int64_t block_rows, block_cols, cols;
};

// Lanes as tokens (4×1; AVX2: 2×1; pairs: 4×2), several sets of sums and what is left over, rows of blocks in
// one pass and in several, with chunks of blocks and an odd number of rows.
constexpr Case kFloats[] = {
    {4, 1, 5003},   {2, 1, 4999},  {8, 1, 701},    {2, 2, 3001},  {1, 4, 1603},   {16, 1, 1601},
    {32, 1, 901},   {64, 1, 401},  {8, 8, 2005},   {16, 4, 1203}, {1, 16, 4000},  {2, 16, 3001},
    {3, 16, 2005},  {5, 32, 2005}, {6, 16, 2005},  {16, 16, 999}, {32, 32, 1003}, {7, 48, 901},
    {20, 64, 2100}, {1, 1, 3001},  {16, 16, 2500}, {4, 16, 2001}, {8, 16, 901},   {12, 32, 905},
    {80, 16, 2001}, {24, 8, 1201}, {136, 8, 903},  {24, 1, 1201}, {8, 2, 3001},   {4, 4, 2003},
    {3, 1, 3001},   {5, 1, 2003},  {12, 1, 1601},  {40, 1, 1003}, {72, 1, 701},   {200, 1, 301},
    {3, 4, 2003},   {6, 2, 1201},  {9, 4, 901},    {5, 3, 1402},  {10, 3, 1003},  {7, 3, 1201}};
// Rows that are no whole vectors: one, several, as many as go together and more; up to half a vector, a whole
// one and more, as many of them as end a part.
constexpr Case kRagged[] = {{1, 3, 2003},  {2, 3, 1203},  {1, 5, 1603},   {3, 5, 2003},  {7, 7, 901},
                            {6, 6, 1201},  {1, 12, 3001}, {10, 10, 1005}, {8, 12, 1210}, {13, 9, 1003},
                            {20, 15, 990}, {33, 2, 701},  {17, 33, 3310}, {1, 100, 903}, {50, 50, 1010}};
constexpr Case kPairs[] = {{4, 2, 5003},   {2, 2, 3001},   {8, 4, 1203},   {16, 2, 1601},  {8, 8, 2005},
                           {3, 32, 901},   {16, 16, 999},  {32, 32, 2005}, {32, 1, 901},   {48, 1, 701},
                           {64, 1, 401},   {80, 1, 301},   {128, 1, 301},  {16, 16, 4500}, {8, 32, 2005},
                           {12, 64, 1201}, {80, 32, 1801}, {24, 16, 1201}};

void check(const std::string& family, DType dtype, const Case& c) {
  SCOPED_TRACE(::testing::Message() << family << ' ' << name(dtype) << ' ' << c.block_rows << 'x'
                                    << c.block_cols);
  const Force force(family);
  const std::int64_t rows = 2 * c.block_rows + c.block_rows / 2;
  for (const bool integers : {true, false}) {
    const Problem problem =
        make_problem({4, rows, c.cols, c.block_rows, c.block_cols, 0.9, dtype, integers, 0});
    const auto run = [&](std::int64_t first, std::int64_t count) {
      const Problem some = of_tokens(problem, first, count);
      ProblemIn<HostBuffer> one(some);
      expect_ok(one.linear(Activation::none));
      expect_linear(some, one);
      return one.y().download();
    };
    for (const std::string turned : {"0", "1"}) {  // as on processors of both kinds
      const auto with = [&](const std::string& fours, const char* ask) {
        return family + ',' + family + "_linear_few(fours=" + fours + " turned=" + turned + " ask=" + ask +
               ')';
      };
      const Force kind(with(turned, "0"));
      const std::vector<std::byte> four = run(0, 4);
      for (const char* ask : {"1", "2", "3"}) {
        const Force other(with(turned == "0" ? "1" : "0", ask));
        EXPECT_EQ(run(0, 4), four) << "turned=" << turned << " ask=" << ask;
      }
      const auto row = static_cast<std::ptrdiff_t>(four.size()) / 4;
      for (const std::int64_t count : {1, 2, 3}) {
        for (std::int64_t first = 0; first + count <= 4; ++first) {
          const std::vector<std::byte> part = run(first, count);
          EXPECT_TRUE(std::equal(part.begin(), part.end(), four.begin() + first * row))
              << count << " from token " << first << ", turned=" << turned;
        }
      }
    }
  }
}

// Five tokens to sixteen by fours, over one block row at a time, several or all, and by eights: the bits that
// a call of four gives each of them.
void check_fours(const std::string& family, DType dtype, const Case& c) {
  const std::int64_t rows = 4 * c.block_rows + c.block_rows / 2;
  for (const std::int64_t tokens : {5, 6, 8, 11, 16}) {
    const Problem problem =
        make_problem({tokens, rows, c.cols, c.block_rows, c.block_cols, 0.4, dtype, tokens % 2 == 0, 3});
    for (const std::string turned : {"0", "1"}) {
      const auto run = [&](const Problem& some, const std::string& piece, const char* eight = "0") {
        const Force force(family + ',' + family + "_linear_few(fours=" + turned + " turned=" + turned +
                          " again=" + piece + " piece=" + piece + " eight=" + eight + ')');
        ProblemIn<HostBuffer> one(some);
        EXPECT_EQ(kernel_of(one), family + "_linear_few");
        one.poison();
        expect_ok(one.linear(Activation::gelu_erf));
        return one.y().download();
      };
      SCOPED_TRACE(::testing::Message() << family << " " << name(dtype) << " " << c.block_rows << "x"
                                        << c.block_cols << " M=" << tokens << " turned=" << turned);
      const std::vector<std::byte> all = run(problem, "1");
      EXPECT_EQ(run(problem, "3"), all);
      for (const char* eight : {"5", "7"}) EXPECT_EQ(run(problem, "2", eight), all) << eight;
      const auto row = std::ssize(all) / tokens;
      for (std::int64_t first = 0; first < tokens; first += 4) {
        const std::vector<std::byte> part =
            run(of_tokens(problem, first, std::min<std::int64_t>(4, tokens - first)), "1");
        EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first * row))
            << "from token " << first;
      }
    }
  }
}

TEST(FewTest, MoreThanFourTokensGoByFoursAndEights) {
  for (const char* family : {"avx512", "avx2"}) {
    if (!backend_info().machine.has(family)) continue;
    // Long rows where eight have sums of their own: of 64×1, 8×16, 16×16, 20×64, 32×32, 80×16 and 136×8.
    for (const std::size_t i : {0, 3, 5, 7, 8, 10, 15, 16, 18, 22, 24, 26, 29}) {
      Case c = kFloats[i];
      if (c.block_rows * c.block_cols < 64 || i == 8) c.cols = std::min<std::int64_t>(c.cols, 333);
      for (const DType dtype : {DType::f32, DType::bf16}) check_fours(family, dtype, c);
    }
  }
  if (!backend_info().machine.has("avx512_bf16_fast")) return;
  for (const std::size_t i : {0, 4, 6, 7, 10, 14}) {
    Case c = kPairs[i];
    c.cols = std::min<std::int64_t>(c.cols, 333);
    check_fours("avx512_bf16", DType::bf16, c);
  }
}

TEST(FewTest, ConfigsThatNameNothingAreRefused) {
  if (!backend_info().machine.has("avx2")) GTEST_SKIP() << "has no kernel for them";
  const Problem problem = make_problem({1, 64, 64, 16, 16, 0.5, DType::f32});
  for (const auto& [config, why] :
       {std::pair<std::string, std::string>{"ask=4", "ask of the config must be in [0, 3]; got 4"},
        {"ask=-1", "ask of the config must be in [0, 3]; got -1"},
        {"again=4", "ask of the config must be in [0, 3]; got 4"},
        {"tasks=0", "tasks and piece of the config must be at least 1; got 0 and 1"},
        {"piece=0", "tasks and piece of the config must be at least 1; got 4 and 0"},
        {"eight=4", "eight of the config must be 0 or 5 to 8; got 4"},
        {"eight=9", "eight of the config must be 0 or 5 to 8; got 9"}}) {
    const Force force("avx2,avx2_linear_few(" + config + ')');
    ProblemIn<HostBuffer> run(problem);
    const Status status = run.linear(Activation::none);
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  }
}

TEST(FewTest, LongRowsOfFloatsHaveTheSameBitsInEveryBatch) {
  for (const char* family : {"avx512", "avx2"}) {
    if (!backend_info().machine.has(family)) continue;
    for (const Case& c : kFloats) check(family, DType::f32, c);
    for (const std::size_t i : {0, 1, 10, 16, 32, 36}) check(family, DType::bf16, kFloats[i]);
    for (const Case& c : kRagged) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) check(family, dtype, c);
    }
  }
}

TEST(FewTest, LongRowsOfPairsHaveTheSameBitsInEveryBatch) {
  if (!backend_info().machine.has("avx512_bf16_fast")) GTEST_SKIP() << "has no kernel for them";
  for (const Case& c : kPairs) check("avx512_bf16", DType::bf16, c);
}

// What is held of single elements in up to 65,536 columns is read instead of the plan's columns, to the same
// bits; row ends of any length, the last one at the end of what is held.
TEST(FewTest, ColumnsIn16BitsGiveTheBitsOfThoseIn32) {
  struct Single {
    std::int64_t rows, cols;
    double density;
  };
  for (const char* family : {"avx512", "avx2"}) {
    if (!backend_info().machine.has(family)) continue;
    for (const auto& [rows, cols, density] :
         {Single{71, 37, 0.5}, {8, 5003, 0.5}, {6, 65'536, 0.01}, {6, 65'537, 0.01}}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const std::int64_t tokens : {1, 2, 3, 4}) {
          SCOPED_TRACE(::testing::Message()
                       << family << ' ' << name(dtype) << ' ' << tokens << " x " << cols);
          const Problem problem = make_problem({tokens, rows, cols, 1, 1, density, dtype});
          for (const char* stream : {"0", "1"}) {
            const Force force(std::string(family) + "," + family + "_linear_few(stream=" + stream + ")");
            ProblemIn<HostBuffer> run(problem);
            expect_ok(run.linear(Activation::none));
            const std::vector<std::byte> want = run.y().download();
            run.poison();
            run.hold_of_the_pattern();
            const Derived held = run.weight().derived;
            expect_ok(run.linear(Activation::none));
            expect_linear(problem, run);
            EXPECT_EQ(run.y().download(), want);
            ASSERT_EQ(held.prepared_bytes > 0, cols <= 65'536);
            if (held.prepared_bytes == 0) continue;
            auto* columns = static_cast<std::uint16_t*>(const_cast<void*>(held.prepared));
            std::swap(columns[0], columns[1]);
            expect_ok(run.linear(Activation::none));
            EXPECT_NE(run.y().download(), want) << "what is held was not read";
          }
        }
      }
    }
  }
}

TEST(FewTest, ColumnsOutOfRangeAreNotMadeNarrow) {
  const Problem problem = make_problem({1, 40, 50, 1, 1, 0.5});
  ProblemIn<HostBuffer> run(problem);
  const rarefy::Problem asked = run.problem(Op::linear);
  const auto sizes = derived_sizes(asked);
  ASSERT_TRUE(sizes.ok());
  if (sizes->prepared == 0) GTEST_SKIP() << "no kernel of this machine holds columns";
  std::vector<std::byte> prepared(static_cast<std::size_t>(sizes->prepared));
  PlanView plan = problem.pattern.view();
  std::vector<std::int32_t> columns(plan.col, plan.col + plan.shape.nnzb);
  plan.col = columns.data();
  expect_ok(prepare(asked, plan, prepared.data()));
  for (const std::int32_t wrong : {-1, 50, 65'536}) {
    columns[7] = wrong;
    const Status status = prepare(asked, plan, prepared.data());
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << wrong;
    EXPECT_NE(status.message().find("columns"), std::string::npos) << status.message();
  }
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

}  // namespace
}  // namespace rarefy::test
