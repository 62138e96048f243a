// The host side of the Hopper kernels: what they refuse, what they choose, and that a plan covers each stored
// block and each output once. Runs without a GPU; tests/gpu and rarefy_hopper_bench run the kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/strips.h"
#include "cuda/sm90/tall.h"

namespace rarefy::sm90 {
namespace {

constexpr Machine kMachine{132, 227 * 1024};

struct Pattern {
  std::vector<std::int32_t> crow{0}, col, ccol{0}, row, perm;
};

// Block row i stores each column with probability density · (1 + i % 3) / 2.
Pattern random_pattern(std::int64_t rows, std::int64_t cols, double density, unsigned seed) {
  std::mt19937 random(seed);
  Pattern p;
  std::vector<std::vector<std::pair<int, int>>> columns(static_cast<std::size_t>(cols));
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) {
      if (std::uniform_real_distribution<>(0, 1)(random) >= density * (1 + i % 3) / 2) continue;
      columns[static_cast<std::size_t>(j)].emplace_back(i, static_cast<int>(p.col.size()));
      p.col.push_back(j);
    }
    p.crow.push_back(static_cast<std::int32_t>(p.col.size()));
  }
  for (const auto& column : columns) {
    for (const auto& [i, entry] : column) {
      p.row.push_back(i);
      p.perm.push_back(entry);
    }
    p.ccol.push_back(static_cast<std::int32_t>(p.row.size()));
  }
  return p;
}

StripProblem strip_problem(bool transposed, std::int64_t tokens, std::int64_t rows, std::int64_t cols,
                           std::int64_t r, std::int64_t c, std::int64_t blocks) {
  StripProblem p;
  p.transposed = transposed;
  p.tokens = tokens;
  p.rows = rows;
  p.cols = cols;
  p.block_rows = r;
  p.block_cols = c;
  p.blocks = blocks;
  p.x_stride = (p.in_features() + 7) / 8 * 8;
  p.y_stride = (p.out_features() + 7) / 8 * 8;
  return p;
}

TEST(StripPlan, CoversEachStoredBlockAndEachOutputOnce) {
  for (const bool transposed : {false, true}) {
    for (const auto& [r, c] : {std::pair{64, 64}, {128, 128}, {192, 64}, {64, 256}}) {
      for (const double density : {0.0, 0.1, 0.5, 1.0}) {
        const std::int64_t rows = 1000, cols = 1300, tokens = 700;
        const Pattern pattern = random_pattern((rows + r - 1) / r, (cols + c - 1) / c, density, 1);
        const StripProblem p = strip_problem(transposed, tokens, rows, cols, r, c, std::ssize(pattern.col));
        ASSERT_EQ(unsupported(p), "");
        // Of each 64 × 64 part of a stored block inside W: its strip and column.
        std::map<std::int32_t, std::pair<std::int64_t, std::int64_t>> parts;
        for (std::size_t i = 0; i + 1 < pattern.crow.size(); ++i) {
          for (std::int32_t e = pattern.crow[i]; e < pattern.crow[i + 1]; ++e) {
            for (std::int64_t a = 0; a < r / 64; ++a) {
              for (std::int64_t b = 0; b < c / 64; ++b) {
                const std::int64_t y = static_cast<std::int64_t>(i) * (r / 64) + a;
                const std::int64_t x = pattern.col[static_cast<std::size_t>(e)] * (c / 64) + b;
                if (y * 64 >= rows || x * 64 >= cols) continue;
                parts[static_cast<std::int32_t>((e * (r / 64) + a) * (c / 64) + b)] =
                    transposed ? std::pair{x, y} : std::pair{y, x};
              }
            }
          }
        }
        for (const StripCandidate& candidate : strip_candidates(p, kMachine)) {
          if (!candidate.reason.empty()) continue;
          const StripConfig& config = candidate.config;
          const HostIndex index =
              transposed ? HostIndex{pattern.ccol.data(), pattern.row.data(), pattern.perm.data()}
                         : HostIndex{pattern.crow.data(), pattern.col.data(), nullptr};
          const StripPlan plan = prepare(p, config, kMachine, index);
          const std::int32_t* w = plan.words.data();
          std::map<std::pair<int, int>, std::set<std::int32_t>> of_tile;  // strip, token tile → blocks
          ASSERT_LE(plan.clusters * config.cluster, kMachine.sms);
          for (int t = w[0]; t < w[plan.clusters]; ++t) {
            const std::int32_t* tile = w + plan.tiles_at + 8 * t;
            for (int s = 0; s < 4; ++s) {
              if (tile[4 + s] < 0) continue;
              ASSERT_LT(s, config.strips);
              auto [at, fresh] = of_tile.try_emplace({tile[4 + s], tile[2]});
              ASSERT_TRUE(fresh) << "strip " << tile[4 + s] << " of token tile " << tile[2] << " twice";
              for (int step = tile[0]; step < tile[0] + tile[1]; ++step) {
                const std::int32_t* words = w + plan.steps_at + 4 * step;
                if (step > tile[0]) {
                  ASSERT_GT(words[0], words[-4]) << "columns ascend";
                }
                if (words[1 + s] < 0) continue;
                ASSERT_EQ(parts.at(words[1 + s]),
                          (std::pair<std::int64_t, std::int64_t>{tile[4 + s], words[0]}));
                ASSERT_TRUE(at->second.insert(words[1 + s]).second);
              }
            }
          }
          const std::int64_t strips = (p.out_features() + 63) / 64;
          const std::int64_t tiles =
              (tokens + config.tokens * config.cluster - 1) / (config.tokens * config.cluster);
          ASSERT_EQ(std::ssize(of_tile), strips * tiles) << config.text();
          std::size_t blocks = 0;
          for (const auto& [key, list] : of_tile) blocks += list.size();
          EXPECT_EQ(blocks, parts.size() * static_cast<std::size_t>(tiles)) << config.text();
        }
      }
    }
  }
}

TEST(StripPlan, StripsOfOneBlockRowShareATile) {
  const Pattern pattern = random_pattern(8, 16, 0.3, 2);
  const StripProblem p = strip_problem(false, 512, 1024, 2048, 128, 128, std::ssize(pattern.col));
  const StripConfig config{2, 256, 1, 4, 8};
  const StripPlan plan = prepare(p, config, kMachine, {pattern.crow.data(), pattern.col.data(), nullptr});
  for (std::int64_t t = 0; t < plan.tiles; ++t) {
    const std::int32_t* tile = plan.words.data() + plan.tiles_at + 8 * t;
    if (tile[4] >= 0 && tile[5] >= 0) {
      EXPECT_EQ(tile[4] / 2, tile[5] / 2);
    }
  }
}

TEST(StripConfig, FitsSharedMemoryAndFollowsTheProblem) {
  for (const std::int64_t tokens : {1, 512, 8192}) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      const auto blocks = static_cast<std::int64_t>(4096 * density);
      const StripProblem p = strip_problem(false, tokens, 4096, 4096, 64, 64, blocks);
      for (const StripCandidate& c : strip_candidates(p, kMachine)) {
        EXPECT_LE(c.config.shared_bytes() + 512, kMachine.shared_bytes) << c.config.text();
        EXPECT_GE(c.config.w_slots, c.config.strips) << c.config.text();
        EXPECT_GE(c.config.slots, 2) << c.config.text();
      }
    }
  }
  // Few tokens fill the SMs with small tiles only; a cluster needs two token tiles.
  const StripProblem few = strip_problem(false, 128, 4096, 4096, 64, 64, 400);
  EXPECT_EQ(configure(few, kMachine).tokens, 128);
  for (const StripCandidate& c : strip_candidates(few, kMachine)) {
    if (c.config.cluster == 2) {
      EXPECT_NE(c.reason, "");
    }
  }
  const StripProblem many = strip_problem(false, 8192, 4096, 4096, 128, 128, 512);
  EXPECT_EQ(configure(many, kMachine).tokens, 256);
  EXPECT_EQ(configure(many, kMachine).strips, 2);
}

TEST(Unsupported, SaysWhy) {
  StripProblem strips = strip_problem(false, 8, 256, 256, 64, 64, 4);
  EXPECT_EQ(unsupported(strips), "");
  strips.block_cols = 32;
  EXPECT_EQ(unsupported(strips), "block sides must be multiples of 64");
  strips.block_cols = 64;
  strips.x_stride = 260;
  EXPECT_EQ(unsupported(strips), "TMA needs rows of X and Y 16 bytes apart");
  strips.x_stride = 256;
  strips.dtype = DType::f32;
  EXPECT_NE(unsupported(strips), "");

  DecodeProblem decode{DType::bf16, 16, 256, 256, 16, 16, 4, 256, 256};
  EXPECT_EQ(unsupported(decode), "");
  decode.tokens = 17;
  EXPECT_EQ(unsupported(decode), "made for 1 to 16 tokens");
  EXPECT_EQ((DecodeProblem{DType::bf16, 1, 256, 256, 96, 16, 4, 256, 256}.strip_rows()), 32);

  TallProblem tall{DType::f16, 100, 256, 333, 128, 40, 104, 256};
  EXPECT_EQ(unsupported(tall), "");
  tall.block_rows = 32;
  EXPECT_NE(unsupported(tall), "");
}

TEST(TallPlan, CoversEachOutputOnce) {
  const Pattern pattern = random_pattern(4, 333, 0.2, 3);
  const TallProblem p{DType::bf16, 1000, 1000, 333, 256, std::ssize(pattern.col), 1000, 1000};
  for (const TallCandidate& candidate : tall_candidates(p, 132, 227 * 1024)) {
    ASSERT_EQ(candidate.reason, "");
    EXPECT_LE(candidate.config.shared_bytes() + 512, 227 * 1024);
    const TallPlan plan = prepare(p, candidate.config, 132, pattern.crow.data());
    std::set<std::pair<int, int>> seen;
    for (int t = 0; t < plan.words[static_cast<std::size_t>(plan.workers)]; ++t) {
      const std::int32_t* tile = plan.words.data() + plan.tiles_at + 4 * t;
      EXPECT_TRUE(seen.insert({tile[0], tile[1]}).second);
      const auto block_row = static_cast<std::size_t>(tile[0] * candidate.config.rows / 256);
      EXPECT_EQ(tile[2], pattern.crow[block_row]);
      EXPECT_EQ(tile[3], pattern.crow[block_row + 1]);
    }
    const std::int64_t groups = (1000 + candidate.config.rows - 1) / candidate.config.rows;
    const std::int64_t token_tiles = (1000 + candidate.config.tokens() - 1) / candidate.config.tokens();
    EXPECT_EQ(std::ssize(seen), groups * token_tiles);
  }
}

TEST(GradientPlan, CoversEachPartOfEachStoredBlockOnce) {
  for (const auto& [r, c] : {std::pair{64, 64}, {128, 128}, {192, 64}, {64, 256}, {256, 128}}) {
    for (const double density : {0.0, 0.1, 0.5, 1.0}) {
      const std::int64_t rows = 1000, cols = 1300;
      const Pattern pattern = random_pattern((rows + r - 1) / r, (cols + c - 1) / c, density, 4);
      const GradientProblem p{DType::bf16, 500, rows, cols, r, c, std::ssize(pattern.col), 1000, 1304};
      ASSERT_EQ(unsupported(p), "");
      for (const GradientCandidate& candidate : gradient_candidates(p, kMachine)) {
        if (!candidate.reason.empty()) continue;
        const GradientPlan plan = prepare(p, candidate.config, pattern.crow.data(), pattern.col.data());
        std::set<int> seen;
        for (std::int64_t t = 0; t < plan.tiles; ++t) {
          const std::int32_t* tile = plan.words.data() + 20 * t;
          int columns = 0;
          for (int i = 0; i < 8; ++i) columns += tile[4 + i] >= 0;
          EXPECT_EQ(columns, tile[2]);
          for (int i = 0; i < 8; ++i) {
            const int part = tile[12 + i], column = tile[4 + (candidate.config.two ? i % 4 : i)];
            ASSERT_EQ(part >= 0, column >= 0);
            if (part < 0) continue;
            EXPECT_TRUE(seen.insert(part).second);
            const std::int64_t row = part / (c / 64), entry = row / (r / 64);  // in values
            const auto above = std::upper_bound(pattern.crow.begin(), pattern.crow.end(), entry);
            const std::int64_t block_row = above - pattern.crow.begin() - 1;
            EXPECT_EQ(tile[0] + (candidate.config.two ? i / 4 : 0), block_row * (r / 64) + row % (r / 64));
            EXPECT_EQ(column, pattern.col[static_cast<std::size_t>(entry)] * (c / 64) + part % (c / 64));
          }
        }
        EXPECT_EQ(std::ssize(seen), std::ssize(pattern.col) * (r / 64) * (c / 64)) << candidate.config.text();
      }
    }
  }
}

}  // namespace
}  // namespace rarefy::sm90
