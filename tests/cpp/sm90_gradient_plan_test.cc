// How the Hopper kernels of weight gradients cut them into tiles: room for every pattern, shares of the
// tokens, few rounds. Runs without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/tall_gradient.h"
#include "sm90_patterns.h"

namespace rarefy::sm90 {
namespace {

// Tiles of the tall vectors' gradient: room for all that rows may store, and shares of the tokens where there
// are few.
TEST(TallGradient, HasRoomForItsTiles) {
  for (const std::int64_t block_rows : {32, 64, 96, 128, 256}) {
    for (const std::int64_t blocks : {0, 1, 100, 5000, 60000}) {
      const TallGradientProblem p{DType::bf16, 300,    16 * block_rows, 4096,
                                  block_rows,  blocks, 16 * block_rows, 4096};
      const TallGradientConfig c = configure(p, 132, kMachine.shared_bytes);
      ASSERT_TRUE(valid(p, c)) << c.text();
      EXPECT_LE(c.shared_bytes(), kMachine.shared_bytes) << c.text();
      EXPECT_GE(c.slots, 3) << c.text();
      // One row that stores all it can, the others evenly what is left.
      const std::int64_t parts = (block_rows + c.rows - 1) / c.rows,
                         first = std::min<std::int64_t>(blocks, 4096);
      std::int64_t tiles = (first + c.columns - 1) / c.columns;
      for (int row = 1; row < 16; ++row) tiles += ((blocks - first) / 15 + c.columns) / c.columns;
      EXPECT_LE(tiles * parts, TallGradientPlan(p, c).most) << blocks << ' ' << c.text();
      EXPECT_TRUE(blocks > 100 || c.split >= 2) << c.text();
    }
  }
  TallGradientProblem p{DType::bf16, 300, 256, 64, 64, 100, 256, 64};
  EXPECT_EQ(unsupported(p), "");
  for (const TallGradientConfig& c :
       {TallGradientConfig{128, 1, 4}, TallGradientConfig{32, 1, 4}, TallGradientConfig{64, 3, 4},
        TallGradientConfig{64, 1, 1}, TallGradientConfig{64, 1, 4, 2}, TallGradientConfig{64, 1, 4, 132, 4},
        TallGradientConfig{64, 1, 4, 132, 580}, TallGradientConfig{64, 1, 4, 132, 288, 3},
        TallGradientConfig{64, 2, 4, 132, 288, 2}, TallGradientConfig{64, 1, 6, 132, 288, 2},
        TallGradientConfig{64, 1, 4, 132, 296, 2}, TallGradientConfig{64, 1, 4, 132, 120, 2},
        TallGradientConfig{64, 1, 3, 132, 488, 0, 0, true},
        TallGradientConfig{64, 1, 3, 132, 288, 1, 0, true},
        TallGradientConfig{64, 1, 3, 132, 288, 0, 0, true, -1, 6},
        TallGradientConfig{64, 1, 3, 132, 288, 0, 0, true, 67, 6},
        TallGradientConfig{64, 1, 3, 132, 288, 0, 0, true, 4, -1},
        TallGradientConfig{64, 1, 3, 132, 288, 0, 0, true, 4, 64},
        TallGradientConfig{64, 4, 3, 8, 288, 0, 0, true, 4, 6}})  // nobody left
    EXPECT_FALSE(valid(p, c)) << c.text();
  EXPECT_TRUE(valid(p, {64, 1, 3, 132, 480, 0, 0, true}));
  EXPECT_TRUE(valid(p, {64, 2, 3, 132, 480, 0, 2, true, 4, 6}));
  EXPECT_TRUE(valid(p, {64, 1, 5, 132, 288, 2}));
  p.block_rows = 128;
  EXPECT_FALSE(valid(p, {64, 1, 5, 132, 288, 2}));
  EXPECT_FALSE(valid(p, {128, 1, 3, 132, 288, 0, 0, true}));
  p.x_stride = 68;
  EXPECT_EQ(unsupported(p), "copies of 16 bytes need rows of X and dY 16 bytes apart");
  p.block_rows = 16;
  EXPECT_EQ(unsupported(p), "blocks must have a multiple of 32 rows");
}

// Few columns of 64 rows: a step of 64 tokens has room for them.
TEST(TallGradient, FewColumnsGoInLongSteps) {
  const auto chosen = [](std::int64_t block_rows, double density) {
    const auto blocks = static_cast<std::int64_t>(density * 4096 * 4096 / static_cast<double>(block_rows));
    const TallGradientProblem p{DType::bf16, 8192, 4096, 4096, block_rows, blocks, 4096, 4096};
    const TallGradientConfig c = configure(p, kMachine.sms, kMachine.shared_bytes);
    EXPECT_TRUE(valid(p, c)) << c.text();
    return c;
  };
  EXPECT_TRUE(chosen(64, .1).long_steps);
  EXPECT_FALSE(chosen(64, .5).long_steps);  // pairs of rows
  EXPECT_FALSE(chosen(128, .1).long_steps);
}

// Of 66 clusters 64 have a tile of 64 rows: the others turn the last tokens of X, where it has many.
TEST(TallGradient, ClustersWithoutTilesTurnTheLastTokens) {
  TallGradientProblem p{DType::bf16, 8192, 4096, 4096, 64, 410 * 64, 4096, 4096};
  TallGradientConfig c = configure(p, kMachine.sms, kMachine.shared_bytes);
  ASSERT_TRUE(valid(p, c)) << c.text();
  EXPECT_EQ(c.split, 2);
  EXPECT_EQ(c.turners, 4);
  EXPECT_EQ(c.clusters(), 66);
  EXPECT_GE(c.last, 4);
  EXPECT_TRUE(c.turns_last(p));
  p.tokens = 2048;
  EXPECT_FALSE(c.turns_last(p));
  c.turns = 2;
  EXPECT_TRUE(valid(p, c) && c.turns_last(p) && !c.turns_itself(p));
  p.x_stride = 8;  // rows that overlap
  EXPECT_FALSE(c.turns_last(p));
  EXPECT_EQ((TallGradientConfig{64, 2, 3, 132, 480, 0, 0, true, 3, 6}.turning()), 2);  // whole clusters
  EXPECT_EQ((TallGradientConfig{64, 1, 4, 132, 288, 0, 0, false, 4, 6}.turning()), 0);
  p = {DType::bf16, 8192, 66 * 64, 4096, 64, 66 * 410, 66 * 64, 4096};  // none is left
  EXPECT_EQ(configure(p, kMachine.sms, kMachine.shared_bytes).turners, 0);
  p = {DType::bf16, 4096, 768, 3072, 64, 12 * 307, 768, 3072};  // no pattern has more tiles than clusters
  c = configure(p, kMachine.sms, kMachine.shared_bytes);
  EXPECT_TRUE(c.long_steps) << c.text();
  EXPECT_FALSE(TallGradientPlan(p, c).has_parts) << c.text();
  EXPECT_EQ(TallGradientPlan(p, c).turns_last_at, TallGradientPlan(p, c).words - 1);
}

TEST(TallGradient, RowsOfAPairAreAWord) {
  const auto most = static_cast<int>(TallPairs::kMostRows);
  for (const auto& [first, second] :
       {std::pair{0, 1}, {0, 0}, {most - 1, most}, {7, most - 1}, {most - 1, 0}}) {
    const int word = PairRows::word(first, second);
    EXPECT_GE(word, 0);  // below: there are no more tiles
    EXPECT_EQ(PairRows::row(word, 0), first);
    EXPECT_EQ(PairRows::row(word, 1), second);
  }
}

// Windows of pairs of rows: the plan has room for as many as a pair may have, and for their columns with
// those that fill up eights.
TEST(TallGradient, HasRoomForPairs) {
  for (const std::int64_t before : {0, 1, 31, 1000, 123457}) {
    for (const std::int64_t entries : {1, 2, 100, 1000, 8192, 131072}) {
      const std::int64_t windows = entries / (TallPairs::kLeastColumns - 71) + 3, end = before + entries;
      EXPECT_GE(TallPairs::first_window(end, 6) - TallPairs::first_window(before, 5), windows);
      EXPECT_GE(TallPairs::first_column(end, 6) - TallPairs::first_column(before, 5), entries + 8 * windows);
    }
  }
  const TallGradientProblem p{DType::bf16, 300, 192, 4096, 64, 5000, 192, 4096};
  const TallGradientConfig c{64, 1, 5, 132, 288, 2};
  const TallGradientPlan plan(p, c);
  EXPECT_EQ(plan.pairs.count, 2);
  EXPECT_GE(plan.pairs.rows_at, plan.items_at + 2 * plan.most);
  EXPECT_EQ(plan.pairs.rows_at % 4, 0);
  EXPECT_EQ(plan.pairs.pairs_at, plan.pairs.rows_at + 2 * 4);  // two words a row, the last of which is none
  EXPECT_EQ(plan.words, plan.pairs.targets_at + 2 * plan.pairs.room);
  EXPECT_LE(c.shared_bytes(), kMachine.shared_bytes);
  EXPECT_EQ(PairColumns(PairColumns(288, 224, 64).word()).all(), 576);
}

// Thread blocks find their tiles themselves: no pattern has more than are launched.
TEST(GradientTiles, NoPatternHasMore) {
  for (const auto& [r, c] : {std::pair{64, 64}, {128, 128}, {192, 64}, {64, 256}, {256, 128}}) {
    for (const double density : {0.0, 0.02, 0.1, 0.5, 1.0}) {
      const std::int64_t rows = 1000, cols = 1300;
      const Pattern pattern = random_pattern((rows + r - 1) / r, (cols + c - 1) / c, density, 4);
      const GradientProblem p{DType::bf16, 500, rows, cols, r, c, std::ssize(pattern.col), 1000, 1304};
      ASSERT_EQ(unsupported(p), "");
      for (const GradientCandidate& candidate : gradient_candidates(p, kMachine)) {
        if (!candidate.reason.empty()) continue;
        const GradientConfig& config = candidate.config;
        std::int64_t tiles = 0;
        for (std::size_t i = 0; i + 1 < pattern.crow.size(); ++i) {
          const std::int64_t columns = (pattern.crow[i + 1] - pattern.crow[i]) * (c / 64);
          tiles += (columns + config.columns() - 1) / config.columns() * (r / 64) / (config.two ? 2 : 1);
        }
        EXPECT_LE(tiles, tiles_at_most(p, config)) << config.text();
      }
    }
  }
}

// Units of 32 rows that store anything, in their order.
std::vector<int> stored_units(const RowUnits& all, const Pattern& pattern) {
  std::vector<int> units;
  for (int unit = 0; unit < all.count(); ++unit) {
    const auto at = [&](int block_row) { return pattern.crow[static_cast<std::size_t>(block_row)]; };
    if (at(all.first(unit)) != at(all.end(unit))) units.push_back(unit);
  }
  return units;
}

// Every row of W is in a unit with all block rows that have a part of it; behind them are empty ones.
TEST(GradientTiles, UnitsHaveAllRows) {
  for (const int block_rows : {16, 32, 48, 64, 96, 112, 128}) {
    for (const int count : {1, 2, 3, 7}) {
      const RowUnits units{block_rows, count};
      EXPECT_GE(units.count() * RowUnits::kHigh, count * block_rows);
      EXPECT_LT((units.count() - 1) * RowUnits::kHigh, count * block_rows);
      for (int row = 0; row < count * block_rows; ++row) {
        EXPECT_LE(units.first(row / RowUnits::kHigh), row / block_rows);
        EXPECT_GT(units.end(row / RowUnits::kHigh), row / block_rows);
      }
      for (int unit = 0; unit < units.count(); ++unit) {
        EXPECT_LE(units.end(unit), count);
        EXPECT_LE((units.end(unit) - 1) * block_rows, unit * RowUnits::kHigh + RowUnits::kHigh - 1);
        EXPECT_GT((units.first(unit) + 1) * block_rows, unit * RowUnits::kHigh);
      }
      for (int unit = units.count(); unit < units.count() + 4; ++unit)
        EXPECT_EQ(units.first(unit), units.end(unit));
    }
  }
}

// The same with narrower panels, which the units of one or two strips store together. Half of the rows empty:
// half as many strips.
TEST(GradientTiles, NoUnionHasMore) {
  for (const auto& [r, c, half] : {std::tuple{32, 32, false},
                                   {32, 32, true},
                                   {16, 16, false},
                                   {16, 16, true},
                                   {16, 64, true},
                                   {48, 32, false},
                                   {48, 32, true},
                                   {64, 48, true},
                                   {128, 16, false},
                                   {32, 80, false},
                                   {96, 32, true}}) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      const std::int64_t rows = 1000, cols = 1300;
      const Pattern pattern =
          random_pattern((rows + r - 1) / r, (cols + c - 1) / c, density, 5, half ? 2 : 1);
      const RowUnits all{r, static_cast<int>((rows + r - 1) / r)};
      const std::vector<int> units = stored_units(all, pattern);
      if (half && r % 32 == 0) {
        EXPECT_LE(std::ssize(units), (all.block_row_count + 1) / 2 * (r / 32));
      }
      const GradientProblem p{DType::bf16, 500, rows, cols, r, c, std::ssize(pattern.col), 1000, 1304};
      ASSERT_EQ(unsupported(p), "");
      for (const auto& [two, wide, most] :
           {std::tuple{true, 32, 8}, {false, 32, 16}, {false, 32, 10}, {true, 16, 16}, {false, 16, 19}}) {
        const GradientConfig config{1, wide, two, false, most % 2 == 0, most};
        std::vector<std::set<std::int64_t>> stored(static_cast<std::size_t>(union_rows(p, config)));
        ASSERT_LE(std::ssize(units), std::ssize(stored) * config.shape().units());
        for (std::size_t i = 0; i < units.size(); ++i) {
          const auto at = [&](int block_row) { return pattern.crow[static_cast<std::size_t>(block_row)]; };
          for (int e = at(all.first(units[i])); e < at(all.end(units[i])); ++e) {
            const std::int64_t first = pattern.col[static_cast<std::size_t>(e)] * c;
            for (std::int64_t k = first; k < first + c; k += 16)
              stored[i / static_cast<std::size_t>(config.shape().units())].insert(k / wide);
          }
        }
        std::int64_t tiles = 0;
        for (const auto& columns : stored)
          tiles += (std::ssize(columns) + config.columns() - 1) / config.columns();
        EXPECT_LE(tiles, tiles_at_most(p, config)) << r << 'x' << c << ' ' << density << ' ' << config.text();
      }
    }
  }
}

// Every row's rest is in one tile, with one that fits or alone.
TEST(GradientTiles, RestsAreInOneTileEach) {
  for (const TileShape& shape :
       {TileShape{64, true, true}, TileShape{64, false, true}, TileShape{64, true, true, false, 2},
        TileShape{64, false, true, false, 4}, TileShape{32, false, true},
        TileShape{16, false, true, false, 27}, TileShape{64, false, false}}) {
    int left[kMostColumns] = {};
    for (int w = 1; w < shape.columns(); ++w) left[w] = 5 * w % 7 + (w == 2 ? 0 : 1);
    int seen[kMostColumns] = {}, counts[kMostColumns], tiles = 0, rests = 0;
    std::copy_n(left, kMostColumns, counts);
    pair_rests(shape, counts, [&](int w, int v, int n) {
      EXPECT_TRUE(n > 0 && v <= w && (v == 0 || shape.fit(w, v)));
      seen[w] += n;
      if (v > 0) seen[v] += n;
      tiles += n;
      return false;
    });
    for (int w = 1; w < kMostColumns; ++w) {
      EXPECT_EQ(seen[w], left[w]) << w;
      EXPECT_EQ(counts[w], 0);
      rests += left[w];
    }
    EXPECT_EQ(tiles < rests, shape.pairs);
  }
}

// What can be forced, and what cannot.
TEST(GradientConfig, IsChecked) {
  const GradientProblem small{DType::bf16, 500, 1024, 1024, 16, 16, 600, 1024, 1024};
  for (const GradientCandidate& c : gradient_candidates(small, kMachine)) EXPECT_TRUE(valid(small, c.config));
  EXPECT_FALSE(valid(small, {1, 64, false}));
  EXPECT_FALSE(valid(small, {3, 32, false}));
  EXPECT_FALSE(valid(small, {1, 32, false, true, false, 17}));
  EXPECT_FALSE(valid(small, {1, 32, true, true, false, 9}));
  EXPECT_FALSE(valid(small, {1, 16, false, true, false, -1}));
  EXPECT_TRUE(valid(small, {1, 16, false, true, false, 31}));
  const GradientProblem large{DType::bf16, 500, 1024, 1024, 64, 64, 100, 1024, 1024};
  for (const GradientCandidate& c : gradient_candidates(large, kMachine)) EXPECT_TRUE(valid(large, c.config));
  EXPECT_FALSE(valid(large, {1, 64, true}));
  EXPECT_TRUE(valid(large, {1, 64, false, true, false, 4}));
  EXPECT_FALSE(valid(large, {1, 64, false, true, false, 3}));
}

// 4096² at some densities: as few rounds as can be.
TEST(GradientTiles, PairsFillRounds) {
  const auto config = [](std::int64_t b, double density) {
    const auto blocks = static_cast<std::int64_t>(density * (4096 / b) * (4096 / b));
    return configure({DType::bf16, 8192, 4096, 4096, b, b, blocks, 4096, 4096}, kMachine);
  };
  EXPECT_EQ(config(128, .25).text(), "split=1 wide=64 strips=2 pairs=1 queues=132");
  EXPECT_EQ(config(128, .1).split, 1);
  EXPECT_EQ(config(128, .1).most, 2);  // half tiles: 102 of them, one for each block
  EXPECT_EQ(config(64, .1).split, 2);
  EXPECT_EQ(config(32, .5).two, true);  // two strips store nearly the same columns
  EXPECT_EQ(config(16, .25).two, true);
  EXPECT_EQ(config(32, .25).text(), "split=1 wide=32 strips=1 pairs=1 even=0 most=14");
  EXPECT_EQ(config(32, .1).text(), "split=1 wide=32 strips=1 pairs=1 even=0 most=13");
  EXPECT_EQ(config(16, .1).wide, 16);
}

// Few tiles are halved rather than shared; one preparation has the lists of both.
TEST(GradientTiles, HalvesFillARound) {
  const auto problem = [](std::int64_t b, std::int64_t tokens, double density) -> GradientProblem {
    const auto blocks = static_cast<std::int64_t>(density * (4096. / b) * (4096. / b));
    return {DType::bf16, tokens, 4096, 4096, b, b, blocks, 4096, 4096};
  };
  EXPECT_EQ(configure(problem(128, 512, .1), kMachine).most, 2);
  EXPECT_EQ(configure(problem(64, 512, .1), kMachine).most, 4);
  EXPECT_EQ(configure(problem(128, 512, .25), kMachine).most, 0);  // 128 whole ones
  for (const std::int64_t b : {64, 128}) {
    const GradientProblem p = problem(b, 512, .1);
    const GradientConfig half = configure(p, kMachine), whole = whole_tiles(half);
    EXPECT_EQ(half_tiles(whole).text(), half.text());
    EXPECT_EQ(list_at(p, whole), 0);
    EXPECT_EQ(list_at(p, half), tiles_at_most(p, whole) * tile_words(64));
    EXPECT_EQ(prepared_words(p, whole), prepared_words(p, half));
    EXPECT_EQ(prepared_words(p, whole), list_at(p, half) + tiles_at_most(p, half) * tile_words(64));
  }
  // A bias's gradient from the same pass, where thread blocks have one of them each.
  const GradientProblem once = problem(128, 8192, .1),
                        often{DType::bf16, 8192, 14336, 4096, 128, 128, 358, 4096, 14336};
  EXPECT_TRUE(sums_dy(once, configure(once, kMachine)));
  EXPECT_EQ(configure(often, kMachine).most, 2);
  EXPECT_FALSE(sums_dy(often, configure(often, kMachine)));
}

// Where whole rounds leave a few tiles, only these share their tokens.
TEST(GradientTiles, SharedOnesComeLast) {
  const auto candidates = [](std::int64_t rows, std::int64_t blocks) {
    return gradient_candidates({DType::bf16, 8192, rows, 4096, 128, 128, blocks, 4096, rows}, kMachine);
  };
  const auto alone = [&](std::int64_t rows, std::int64_t blocks) {
    std::set<int> found;
    for (const GradientCandidate& c : candidates(rows, blocks)) {
      if (c.config.alone > 0) {
        EXPECT_GT(c.config.split, 1);
        EXPECT_TRUE(valid({DType::bf16, 8192, rows, 4096, 128, 128, blocks, 4096, rows}, c.config));
      }
      found.insert(c.config.alone);
    }
    return found;
  };
  EXPECT_EQ(alone(4096, 102), (std::set{0}));             // less than a round
  EXPECT_EQ(alone(14336, 358), (std::set{0, 132, 264}));  // 1.4 rounds, 2.7 of half tiles
  EXPECT_EQ(alone(14336, 1792), (std::set{0}));           // 6.8
  const GradientProblem p{DType::bf16, 8192, 14336, 4096, 128, 128, 358, 4096, 14336};
  GradientConfig config{2, 64, true, true, false, 0, 132, 60, 132};
  EXPECT_TRUE(valid(p, config));
  config.split = 1;
  EXPECT_FALSE(valid(p, config));
  config.split = 2;
  EXPECT_TRUE(valid(p, config));
  config.shared = 0;
  EXPECT_FALSE(valid(p, config));
  config.alone = -1;
  EXPECT_FALSE(valid(p, config));
}

}  // namespace
}  // namespace rarefy::sm90
