// The host side of the Hopper kernels: what they refuse, their configurations, and that a plan covers each
// stored block and each output once. Gradients' tiles: sm90_gradient_plan_test.cc. Runs without a GPU;
// tests/gpu and rarefy_hopper_bench run the kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/registry.h"
#include "cuda/sm90/block_gradient.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/strips.h"
#include "cuda/sm90/tall.h"
#include "cuda/sm90/tall_columns.h"
#include "cuda/sm90/tall_decode.h"
#include "cuda/sm90/tall_gradient.h"
#include "cuda/sm90/tall_walk.h"
#include "cuda/sm90/unions.h"
#include "sm90_patterns.h"

namespace rarefy::sm90 {
namespace {

// Tiles in the order of their places, {group, token tile}; each is there once.
std::vector<std::pair<int, int>> in_order(const std::vector<double>& clocks, int token_tiles,
                                          double clusters) {
  const double total = std::accumulate(clocks.begin(), clocks.end(), 0.) * token_tiles / clusters;
  const auto pace_of = [&](int g) { return TilePace::pace(total, clocks[static_cast<std::size_t>(g)]); };
  const int groups = static_cast<int>(clocks.size());
  std::vector<std::pair<int, int>> tiles(clocks.size() * static_cast<std::size_t>(token_tiles), {-1, -1});
  for (int g = 0; g < groups; ++g) {
    for (int t = 0; t < token_tiles; ++t) {
      const int place = TilePace{groups, token_tiles}.place(g, t, pace_of);
      if (place < 0 || place >= std::ssize(tiles)) throw std::out_of_range("place");
      std::pair<int, int>& tile = tiles[static_cast<std::size_t>(place)];
      EXPECT_EQ(tile.first, -1) << g << ' ' << t;
      tile = {g, t};
    }
  }
  return tiles;
}

TEST(TilePace, GroupsThatCostAlikeGoTokenTileByTokenTile) {
  const auto tiles = in_order(std::vector<double>(22, 9e3), 32, 132);
  for (int i = 0; i < std::ssize(tiles); ++i)
    ASSERT_EQ(tiles[static_cast<std::size_t>(i)], (std::pair{i % 22, i / 22})) << i;
}

// One dense row: its tiles take two fifths of the time. They are ahead of the others', the last ones by most,
// but begin with them and stay in the order of tokens.
TEST(TilePace, AGroupThatCostsMuchMoreIsAheadByItsOwnTime) {
  std::vector<double> clocks(32, 16e3);
  clocks[0] = 68e3;
  const auto tiles = in_order(clocks, 32, 132);
  int heavy = 0, lead = 0;
  for (const auto& [group, token_tile] : tiles) {
    if (group == 0) {
      EXPECT_EQ(token_tile, heavy++);
    } else {
      const int now = heavy - 1 - token_tile;
      EXPECT_GE(now, 0);
      EXPECT_LE(now, 19);  // of 32 token tiles, not all: 1.2 · 68 of 136 thousand clocks
      lead = std::max(lead, now);
    }
  }
  EXPECT_GE(lead, 14);
  EXPECT_EQ(tiles.front(), (std::pair{0, 0}));
}

TEST(TilePace, WhatTakesLongerThanAllHasComesFirst) {
  std::vector<double> clocks(40, 1e3);
  clocks[0] = 500e3;
  clocks[1] = 400e3;
  const auto tiles = in_order(clocks, 4, 132);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(tiles[static_cast<std::size_t>(i)], (std::pair{i / 4, i % 4})) << i;
}

TEST(TilePace, HasAPlaceForEachTile) {
  std::mt19937 random(5);
  for (const int groups : {1, 7, 22, 112, 600}) {
    for (const int token_tiles : {1, 2, 16, 64}) {
      std::vector<double> clocks(static_cast<std::size_t>(groups));
      for (double& c : clocks) c = 700. * static_cast<double>(random() % 100 + 1);
      std::sort(clocks.begin(), clocks.end(), std::greater<>());
      in_order(clocks, token_tiles, 132);
    }
  }
}

// Cut tiles fill no round that whole ones would not.
TEST(TileItems, CutsTilesWhereTheirStripsFitTheLastRound) {
  for (const int groups : {1, 7, 22, 112}) {
    for (const int size : {1, 2, 3}) {
      for (const int token_tiles : {1, 2, 16, 64}) {
        for (const int clusters : {66, 132}) {
          const TileItems its(groups, size, token_tiles, clusters);
          const int tiles = groups * token_tiles, cut = tiles - its.cut_from;
          EXPECT_EQ(its.items, its.cut_from + cut * size);
          EXPECT_TRUE(cut == 0 || (cut == tiles % clusters && cut * size <= clusters));
          EXPECT_LE((its.items + clusters - 1) / clusters, (tiles + clusters - 1) / clusters);
        }
      }
    }
  }
}

TEST(StripTile, IsAWordOfAList) {
  for (const StripTile t : {StripTile{0, 0, -1}, {65535, 63, 2}, {7, 31, 0}}) {
    const StripTile back = unpack_tile(pack_tile(t));
    EXPECT_EQ(back.group, t.group);
    EXPECT_EQ(back.token_tile, t.token_tile);
    EXPECT_EQ(back.part, t.part);
  }
}

TEST(StripLists, HaveRoomForTheirItems) {
  for (const int groups : {1, 5, 22, 32, 112, 700}) {
    const StripLists lists{groups, 3, 132};
    ASSERT_GE(lists.levels(), 1);
    ASSERT_LE(lists.levels(), StripLists::kMostLevels);
    for (int level = 0; level < lists.levels(); ++level) {
      const int items = TileItems(groups, 3, 1 << level, 132).items;
      EXPECT_LE(lists.begin(level) + items, lists.begin(level + 1)) << groups << ' ' << level;
    }
  }
}

// As a launch goes through them: each list has what is left, or is the longest that has no more. No number of
// token tiles takes more rounds than the next power of two.
TEST(ListChoice, ListsHoldAllTokenTilesInFewRounds) {
  for (const int size : {1, 2, 3}) {
    for (const int groups : {1, 7, 22, 32, 43, 64, 112, 700}) {
      const StripLists lists{groups, size, 132};
      const auto rounds = [&](int tiles) {
        const ListChoice its(lists, tiles);
        return its.whole + its.cut;
      };
      for (int tiles = 1; tiles <= 70; ++tiles) {
        const ListChoice choice(lists, tiles);
        EXPECT_GE(choice.whole + choice.cut, 1);
        EXPECT_GE(132 * (choice.whole + choice.cut) + 1e-6, groups * tiles) << groups << ' ' << tiles;
        int power = 1;
        while (power < tiles) power *= 2;
        if (power < ListChoice::kFew && power <= 1 << (lists.levels() - 1)) {
          EXPECT_LE(rounds(tiles), rounds(power) + 1) << groups << ' ' << tiles << ' ' << size;
        }
        for (int left = 1; left < ListChoice::kFew; ++left) {
          if ((choice.all >> left & 1) == 0) continue;
          EXPECT_LE(left, tiles);
          EXPECT_NE(left & (left - 1), 0) << "a list of its own";
          int level = 0;
          while (1 << level < left) ++level;
          EXPECT_LT(level, lists.levels());
        }
      }
    }
  }
  // 96 tiles are one round as part of 128; as 64 and 32 they are two.
  EXPECT_EQ(ListChoice({32, 2, 132}, 3).all, 1U << 3);
  EXPECT_EQ(ListChoice({32, 2, 132}, 3).whole, 1);
  EXPECT_EQ(ListChoice({32, 2, 132}, 4).all & 1U << 4, 0U);
  EXPECT_EQ(ListChoice({64, 2, 132}, 3).all, 0U);
}

TEST(StripPlan, FollowsTheWeightAlone) {
  const StripProblem p = product_problem<StripProblem>(false, 512, 1024, 2048, 64, 64, 400);
  StripProblem other = p;
  other.tokens = 7;
  other.x_stride = 4096;
  other.activation = Activation::silu;
  EXPECT_EQ(StripPlan(p, 132).words, StripPlan(other, 132).words);
  EXPECT_EQ(StripPlan(p, 132).items_at[0], StripPlan(other, 132).items_at[0]);
  EXPECT_EQ(configure(p, kMachine).strips, configure(other, kMachine).strips);
  EXPECT_EQ(configure(p, kMachine).strips, p.group_size());
  // Strips of one block row are alike.
  EXPECT_EQ(product_problem<StripProblem>(false, 512, 1024, 2048, 128, 64, 400).group_size(), 2);
  EXPECT_EQ(product_problem<StripProblem>(true, 512, 1024, 2048, 128, 64, 400).group_size(), 3);
}

TEST(StripConfig, FitsSharedMemoryAndFollowsTheProblem) {
  for (const std::int64_t tokens : {1, 512, 8192}) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      const auto blocks = static_cast<std::int64_t>(4096 * density);
      const StripProblem p = product_problem<StripProblem>(false, tokens, 4096, 4096, 64, 64, blocks);
      for (const StripCandidate& c : strip_candidates(p, kMachine)) {
        EXPECT_LE(c.config.shared_bytes() + 2048, kMachine.shared_bytes) << c.config.text();
        EXPECT_GE(c.config.w_slots, c.config.strips) << c.config.text();
        EXPECT_GE(c.config.slots, 2) << c.config.text();
      }
    }
  }
  // Few tokens fill the SMs with small tiles only; a cluster needs two token tiles.
  const StripProblem few = product_problem<StripProblem>(false, 128, 4096, 4096, 128, 128, 100);
  EXPECT_LE(configure(few, kMachine).tokens, 128);
  for (const StripCandidate& c : strip_candidates(few, kMachine)) {
    if (c.config.cluster == 2) {
      EXPECT_NE(c.reason, "");
    }
  }
  // 8 of 24 blocks: divided and multiplied again, two blocks of a step are a little more than two.
  for (const StripCandidate& c :
       strip_candidates(product_problem<StripProblem>(false, 100, 320, 1024, 128, 128, 8), kMachine))
    EXPECT_GE(c.config.slots, 4) << c.config.text();
  const StripProblem many = product_problem<StripProblem>(false, 8192, 4096, 4096, 128, 128, 512);
  EXPECT_EQ(configure(many, kMachine).tokens, 256);
  EXPECT_EQ(configure(many, kMachine).strips, 2);
  // 64 tiles of 256 tokens for 132 SMs took 24 us, 128 of 128 tokens 17.
  EXPECT_EQ(configure(product_problem<StripProblem>(false, 4096, 768, 3072, 64, 64, 144), kMachine).tokens,
            128);
}

TEST(UnionPlan, FollowsTheWeightAlone) {
  const UnionProblem p = product_problem<UnionProblem>(false, 512, 1024, 2048, 32, 32, 400);
  UnionProblem other = p;
  other.tokens = 7;
  other.x_stride = 4096;
  other.activation = Activation::silu;
  const UnionLayouts layouts = layouts_of(p), same = layouts_of(other);
  for (const std::size_t i : {0, 1, 2}) {
    EXPECT_EQ(layouts[i].strips, kGroupSizes[i]);
    EXPECT_EQ(layouts[i].strips, same[i].strips);
    EXPECT_EQ(layouts[i].width, same[i].width);
  }
  EXPECT_EQ(UnionPlan(p, 132).words, UnionPlan(other, 132).words);
  EXPECT_EQ(UnionPlan(p, 132).packed_bytes(), UnionPlan(other, 132).packed_bytes());
  const UnionConfig config = configure(other, kMachine);
  EXPECT_EQ(config.width, layout_of(p, config.group()).width);
}

// One prepared buffer has groups of all sizes: two strips where those of three leave SMs without a tile.
TEST(UnionConfig, TakesTwoStripsWhereTilesAreFew) {
  for (const int b : {16, 32}) {
    for (const double density : {0.5, 0.25}) {
      const auto blocks = static_cast<std::int64_t>(4096 / b * 4096 / b * density);
      for (const std::int64_t tokens : {512, 1024})
        EXPECT_EQ(configure(product_problem<UnionProblem>(false, tokens, 4096, 4096, b, b, blocks), kMachine)
                      .strips,
                  2);
      EXPECT_EQ(
          configure(product_problem<UnionProblem>(false, 8192, 4096, 4096, b, b, blocks), kMachine).strips,
          3);
    }
  }
}

// Where a group of three wants nearly all of X and little is multiplied: 16x16 at .1 took 195 us so, 207
// alone, 32x32 122 and 99, and with few tokens there are too few tiles for pairs of thread blocks.
TEST(UnionConfig, SharesXWhereThatIsMostOfTheBytes) {
  const auto pair = [](std::int64_t tokens, std::int64_t cols, int b, double density) {
    const auto blocks = static_cast<std::int64_t>(4096.0 / b * static_cast<double>(cols) / b * density);
    const UnionConfig c =
        configure(product_problem<UnionProblem>(false, tokens, 4096, cols, b, b, blocks), kMachine);
    EXPECT_TRUE(c.pair == 1 || c.group() == 6) << c.text();
    return c.pair;
  };
  EXPECT_EQ(pair(8192, 4096, 16, .1), 2);
  EXPECT_EQ(pair(8192, 14336, 16, .1), 2);
  EXPECT_EQ(pair(512, 4096, 16, .1), 1);
  for (const double density : {.5, .25, .1}) EXPECT_EQ(pair(8192, 4096, 32, density), 1);
}

// Unit rows are what has one pattern; no pattern has more pieces than there is room for.
TEST(UnionPlan, HasRoomForAllPieces) {
  EXPECT_EQ(product_problem<UnionProblem>(false, 1, 96, 64, 48, 32, 2).unit(), 16);
  EXPECT_EQ(product_problem<UnionProblem>(true, 1, 96, 64, 48, 32, 2).unit(), 32);
  EXPECT_EQ(product_problem<UnionProblem>(false, 1, 1000, 64, 16, 16, 2).units(), 63);
  EXPECT_EQ(product_problem<UnionProblem>(false, 1, 1000, 64, 16, 16, 2).strips(), 16);
  for (const auto& [r, c] : {std::pair{16, 16}, {32, 32}, {16, 64}, {64, 16}, {48, 32}}) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      const std::int64_t rows = 1000, cols = 1300;
      const Pattern pattern = random_pattern((rows + r - 1) / r, (cols + c - 1) / c, density, 4);
      const UnionProblem p =
          product_problem<UnionProblem>(false, 64, rows, cols, r, c, std::ssize(pattern.col));
      ASSERT_EQ(unsupported(p), "");
      // Unit rows in order, the worst that similarity can do.
      std::set<std::pair<std::int64_t, int>> pieces;
      for (std::size_t i = 0; i + 1 < pattern.crow.size(); ++i) {
        for (int e = pattern.crow[i]; e < pattern.crow[i + 1]; ++e) {
          for (int row = 0; row < r; row += 16) {
            for (int k = 0; k < c / 16; ++k) {
              const int column = pattern.col[static_cast<std::size_t>(e)] * (c / 16) + k;
              if (column < (cols + 15) / 16)
                pieces.emplace((static_cast<std::int64_t>(i) * r + row) / 64, column);
            }
          }
        }
      }
      EXPECT_GE(UnionPlan(p, 132).pieces, std::ssize(pieces)) << r << 'x' << c;
    }
  }
}

TEST(UnionConfig, FitsSharedMemory) {
  for (const std::int64_t tokens : {1, 512, 8192}) {
    for (const double density : {0.0, 0.05, 0.5, 1.0}) {
      for (const int b : {16, 32}) {
        const auto blocks = static_cast<std::int64_t>(4096 / b * 4096 / b * density);
        const UnionProblem p = product_problem<UnionProblem>(false, tokens, 4096, 4096, b, b, blocks);
        for (const UnionLayouts& layouts : all_union_layouts(p)) {
          for (const UnionCandidate& c : union_candidates(p, layouts, kMachine)) {
            EXPECT_LE(c.config.shared_bytes() + 2048, kMachine.shared_bytes) << c.config.text();
            EXPECT_GE(c.config.pieces, 4 * c.config.strips) << c.config.text();
            EXPECT_GE(c.config.slots, 2) << c.config.text();
          }
        }
      }
    }
  }
}

// Strips divide blocks; warps are about one round of what an SM holds, in one thread block a strip where they
// are enough.
TEST(DecodeConfig, CutsWForTheGpu) {
  for (const std::int64_t tokens : {1, 8, 9, 16}) {
    for (const std::int64_t block : {16, 32, 48, 64, 96, 128}) {
      for (const auto& [n, k] :
           {std::pair{14336, 4096}, {4096, 14336}, {64, 8192}, {128256, 4096}, {256, 256}}) {
        DecodeProblem p{DType::bf16, tokens, n, k, block, block};
        p.blocks = p.block_row_count() * ((k + block - 1) / block) / 4;
        const DecodeConfig c = configure(p, 132);
        SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(block) + ": " + c.text());
        EXPECT_TRUE(valid(p, c));
        EXPECT_EQ(block % c.rows, 0);
        const std::int64_t warps = c.strips(p) * c.warps * c.split, places = 132 * (tokens > 8 ? 20 : 32);
        EXPECT_TRUE(c.split == 1 || warps <= places) << warps;
        if (n == 14336 && block >= 32) {
          EXPECT_EQ(c.split, 1);
          // Eight warps a strip are more than registers allow for.
          if (tokens > 8 || tokens == 1) {
            EXPECT_EQ(c.shared, tokens > 8 && block != 48);
          }
        }
        if (n == 128256) {  // many rounds
          EXPECT_EQ(c.rows, block % 32 == 0 ? 32 : 16);
        }
        if (n == 64 && block == 64) {
          EXPECT_GT(c.split, 1);
        }
      }
    }
  }
  const DecodeProblem p{DType::bf16, 4, 256, 256, 32, 32, 16};
  for (const DecodeConfig& c :
       {DecodeConfig{0, 8, 1}, {48, 8, 1}, {64, 8, 1}, {32, 5, 1}, {32, 8, 0}, {32, 8, 9}})
    EXPECT_FALSE(valid(p, c)) << c.text();
}

// Forced configurations may hold anything: sizes are asked for, nothing is divided by what they say, and they
// are refused before anything is queued.
TEST(Sm90Rows, ForcedConfigurationsAreChecked) {
  struct Refused {
    std::int64_t tokens, block_rows, block_cols;
    const char *kernel, *config, *error;
  };
  const char *kRows = "rows of the config must be 64, or 128 where a block has a multiple of 128; got ",
             *kDecode = "the config must be one that the blocks and tokens allow; got ";
  for (const auto& [tokens, rows, cols, name, config, error] :
       {Refused{80, 64, 1, "sm90_tall", "rows=0", kRows},
        Refused{80, 64, 1, "sm90_tall", "rows=128", kRows},
        Refused{80, 128, 1, "sm90_tall", "rows=96", kRows},
        Refused{80, 32, 1, "sm90_tall_packed", "rows=128", kRows},
        Refused{80, 64, 1, "sm90_tall", "slots=1", "slots of the config must be in [2, 8]; got 1"},
        Refused{80, 64, 1, "sm90_tall", "chunk=100",
                "chunk of the config must be a multiple of 512; got 100"},
        Refused{80, 64, 1, "sm90_tall", "split=5", "split of the config must be in [1, 4]; got 5"},
        Refused{80, 64, 1, "sm90_tall", "slots=2 split=4 tokens=256 columns=64",
                "slots of the config must have room for the sums of its parts; got 2"},
        Refused{80, 64, 1, "sm90_tall", "tokens=96 columns=64",
                "tile_rows, tokens and columns of the config must be a tile that there is; got 64, 96, 64"},
        Refused{80, 64, 1, "sm90_tall", "tokens=512 columns=32 split=2", "that there is; got 64, 512, 32"},
        Refused{80, 128, 1, "sm90_tall", "tile_rows=128 tokens=512", "that there is; got 128, 512"},
        Refused{80, 64, 1, "sm90_tall", "tile_rows=128",
                "tile_rows of the config must be 64, or its rows; got 128"},
        Refused{80, 64, 1, "sm90_tall", "sms=0", "sms of the config must be in [1, 160]; got 0"},
        Refused{80, 64, 64, "sm90_strips_linear", "sms=0", "sms of the config must be in [1, 160]; got 0"},
        Refused{80, 64, 64, "sm90_strips_linear", "alone=1 split=1",
                "alone of the config must be 0 where tiles have no parts; got 1"},
        Refused{80, 32, 32, "sm90_unions_linear", "strips=4", "strips of the config must be 2 or 3; got 4"},
        Refused{80, 32, 32, "sm90_unions_linear", "alone=1 split=1",
                "alone of the config must be 0 where tiles have no parts; got 1"},
        Refused{80, 32, 32, "sm90_unions_linear", "width=48",
                "width of the config must be what is prepared, 64; got 48"},
        Refused{80, 32, 32, "sm90_unions_linear", "sms=0", "sms of the config must be in [1, 160]; got 0"},
        Refused{80, 8, 8, "sm90_whole_linear", "tokens=64 features=128",
                "tokens of the config must be 256, 208, 192, 160 or 128; got tokens=64 split=1 more=0"},
        Refused{80, 8, 8, "sm90_whole_linear", "tokens=256 features=64",
                "tokens of the config must be 128 or 64 where a tile has 64 features; got tokens=256"},
        Refused{80, 8, 8, "sm90_whole_linear", "features=32", "must be 128 or 64; got tokens=64"},
        Refused{80, 8, 8, "sm90_whole_linear", "split=2",
                "split of the config must be 1 to 4, and no more than there are steps; got tokens=64"},
        Refused{80, 8, 8, "sm90_whole_linear", "sms=0", "sms of the config must be positive; got 0"},
        Refused{3, 32, 32, "sm90_decode", "rows=0", kDecode},
        Refused{3, 32, 32, "sm90_decode", "rows=64", kDecode},
        Refused{3, 32, 32, "sm90_decode", "warps=3", kDecode},
        Refused{3, 32, 32, "sm90_decode", "loads=12", kDecode},
        Refused{9, 32, 32, "sm90_decode", "loads=16", kDecode},
        Refused{3, 32, 32, "sm90_decode", "split=0", kDecode},
        Refused{3, 32, 32, "sm90_decode", "shared=1", kDecode},
        Refused{9, 16, 16, "sm90_decode", "shared=1", kDecode},
        Refused{9, 32, 32, "sm90_decode", "shared=1 split=2", kDecode},
        Refused{9, 64, 64, "sm90_decode", "shared=1 rows=16", kDecode},
        Refused{3, 64, 1, "sm90_tall_decode", "rows=0", kDecode},
        Refused{3, 32, 1, "sm90_tall_decode", "rows=64", kDecode},
        Refused{3, 64, 1, "sm90_tall_decode", "warps=2", kDecode},
        Refused{3, 64, 1, "sm90_tall_decode", "split=9", kDecode},
        Refused{3, 64, 1, "sm90_tall_decode", "split=0", kDecode}}) {
    SCOPED_TRACE(std::string(name) + ' ' + config);
    const auto kernel = std::find_if(registry().begin(), registry().end(),
                                     [wanted = name](const Kernel& k) { return k.name == wanted; });
    ASSERT_NE(kernel, registry().end());
    rarefy::Machine h200;
    h200.gpu.arch = 90, h200.gpu.sms = 132, h200.gpu.shared_memory = 227 << 10;
    Call call;
    call.problem = make_problem(Op::linear, {256, 64, rows, cols, 256 / rows * 64 / cols / 2}, tokens,
                                DType::bf16, Device::cuda);
    ASSERT_EQ(kernel->supports(call.problem, h200), "");
    const Config own = kernel->configure(call.problem, h200);
    call.config = *parse_config(*kernel, own, config);
    const Choice choice = configured(*kernel, call.problem, call.config);
    EXPECT_GE(choice.workspace, 0);
    EXPECT_NE(kernel->run(call).message().find(error), std::string::npos) << kernel->run(call).message();
    if (kernel->prepare == nullptr) continue;
    EXPECT_GT(choice.derived.prepared, 0);  // else nobody asks for it
    EXPECT_NE(kernel->prepare(call, nullptr).message().find(error), std::string::npos);
    if (kernel->pack != nullptr) {
      EXPECT_NE(kernel->pack(call, nullptr).message().find(error), std::string::npos);
    }
  }
}

TEST(Unsupported, SaysWhy) {
  StripProblem strips = product_problem<StripProblem>(false, 8, 256, 256, 64, 64, 4);
  EXPECT_EQ(unsupported(strips), "");
  strips.block_cols = 32;
  EXPECT_EQ(unsupported(strips), "block sides must be multiples of 64");
  strips.block_cols = 64;
  strips.x_stride = 260;
  EXPECT_EQ(unsupported(strips), "TMA needs rows of X and Y 16 bytes apart");
  strips.x_stride = 256;
  strips.rows = 255;
  EXPECT_EQ(unsupported(strips), "TMA writes rows of Y in pieces of 16 bytes");
  strips.rows = 256;
  strips.dtype = DType::f32;
  EXPECT_NE(unsupported(strips), "");

  UnionProblem unions = product_problem<UnionProblem>(true, 8, 256, 256, 32, 16, 4);
  EXPECT_EQ(unsupported(unions), "");
  unions.activation = Activation::relu;
  EXPECT_EQ(unsupported(unions), "grad_input has no activation");
  EXPECT_EQ(unsupported(product_problem<UnionProblem>(false, 8, 256, 256, 64, 64, 4)),
            "blocks of 64 are strips already");
  EXPECT_EQ(unsupported(product_problem<UnionProblem>(false, 8, 256, 256, 8, 3, 4)), "");  // any other block
  EXPECT_EQ(unsupported(product_problem<UnionProblem>(false, 8, 1 << 19, 1 << 19, 1 << 19, 1, 4)),
            "values of a block row are counted in 32 bits");

  DecodeProblem decode{DType::bf16, 16, 256, 256, 16, 16, 4, 256, 256};
  EXPECT_EQ(unsupported(decode), "");
  decode.tokens = 17;
  EXPECT_EQ(unsupported(decode), "made for 1 to 16 tokens");

  TallDecodeProblem tall_decode{DType::f16, 32, 256, 333, 48, 40};
  EXPECT_EQ(unsupported(tall_decode), "");
  tall_decode.block_rows = 40;
  EXPECT_EQ(unsupported(tall_decode), "blocks must have a multiple of 16 rows");
  tall_decode.tokens = 33;
  EXPECT_EQ(unsupported(tall_decode), "made for 1 to 32 tokens");
  tall_decode.dtype = DType::f32;
  EXPECT_EQ(unsupported(tall_decode), "tensor cores of this kernel take bf16 and f16");

  TallProblem tall{DType::f16, 100, 256, 333, 128, 40};
  tall.x_stride = 104;
  tall.y_stride = 256;
  EXPECT_EQ(unsupported(tall), "");
  tall.y_layout = Layout::by_feature;
  EXPECT_EQ(unsupported(tall), "TMA writes rows of Y in pieces of 16 bytes");
  tall.tokens = 104;
  EXPECT_EQ(unsupported(tall), "");
  tall.y_stride = 96;
  EXPECT_EQ(unsupported(tall), "TMA needs rows that do not overlap");
  tall.y_stride = 104;
  tall.x_layout = Layout::by_token;
  tall.x_stride = 333;
  EXPECT_EQ(unsupported(tall), "copies of 16 bytes need rows of X and Y 16 bytes apart");
  tall.x_stride = 336;
  EXPECT_EQ(unsupported(tall), "");
  tall.block_rows = 32;
  EXPECT_EQ(unsupported(tall), "a warpgroup's product has 64 rows, of one block row");
}

TEST(TallColumns, AreWhatGroupsMayTouch) {
  const auto of = [](bool transposed, std::int64_t r, std::int64_t c, std::int64_t blocks) {
    return TallColumns({transposed, DType::bf16, 512, 1024, 768, r, c, blocks});
  };
  EXPECT_EQ(of(false, 16, 1, 5).most, 5);
  EXPECT_EQ(of(false, 16, 1, 5).bytes(), 5 * 128);
  EXPECT_EQ(of(false, 8, 8, 5).most, 40);
  EXPECT_EQ(of(false, 128, 4, 5).bytes(), 20 * 256);
  EXPECT_EQ(of(false, 24, 1, 5).most, 10);  // a block may lie in two groups of 64
  EXPECT_EQ(of(true, 16, 1, 5).most, 80);   // 16 features of dY each
  EXPECT_EQ(of(false, 1, 1, 1 << 19).most, 16 * 768);
  EXPECT_EQ(of(false, 32, 1, 32 * 384).expected(), 16 * 768 * 3 / 4);
  EXPECT_EQ(unsupported(of(false, 64, 128, 2)), "blocks of 64 are strips already");
  EXPECT_EQ(unsupported(TallColumns({false, DType::bf16, 8, 64, (1 << 16) + 8, 8, 1, 5})),
            "columns are found among up to 2^16 features of X");
}

// Lines of X by feature that begin anywhere in those of memory: copied where much is gathered from them.
TEST(TallPlan, CopiesXWhereThatCostsLess) {
  TallProblem p{DType::bf16, 1000, 10240, 2560, 128, 80 * 1280};
  p.x_stride = 1000;
  EXPECT_TRUE(p.copies_x());
  EXPECT_EQ(configure(p, kMachine.sms, kMachine.shared_bytes).workspace(p), 2560 * 1024 * 2);
  p.x_stride = 1024;
  EXPECT_FALSE(p.copies_x());
  EXPECT_EQ(configure(p, kMachine.sms, kMachine.shared_bytes).workspace(p), 0);
  p.x_stride = 1000;
  p.blocks = 80 * 64;  // .025 of the columns
  EXPECT_FALSE(p.copies_x());
  p.x_layout = Layout::by_token;
  EXPECT_TRUE(p.copies_x());
}

TEST(TallPlan, FollowsTheWeightAlone) {
  TallProblem p{DType::bf16, 1000, 1000, 333, 256, 200};
  p.x_stride = p.y_stride = 1000;
  const TallConfig config = configure(p, kMachine.sms, kMachine.shared_bytes);
  EXPECT_EQ(config.rows, 128);
  EXPECT_LE(config.shared_bytes() + 512, kMachine.shared_bytes);
  EXPECT_GE(config.slots, 4);
  TallProblem other = p;
  other.tokens = 3;
  other.x_layout = Layout::by_token;
  other.y_layout = Layout::by_feature;
  other.x_stride = 336;
  other.activation = Activation::silu;
  EXPECT_EQ(configure(other, kMachine.sms, kMachine.shared_bytes).rows, 128);
  const TallPlan plan(p, config, 132), same(other, config, 132);
  EXPECT_EQ(plan.words, same.words);
  EXPECT_EQ(plan.items_at, same.items_at);
  EXPECT_EQ(plan.groups, 8);
  EXPECT_EQ(config.workspace(p), 0);
  EXPECT_EQ(configure(other, kMachine.sms, kMachine.shared_bytes).workspace(other), 333 * 64 * 2);
  // X that is transposed in parts, as large as each other.
  other.tokens = 8192;
  other.cols = 14336;
  const TallConfig parts = configure(other, kMachine.sms, kMachine.shared_bytes);
  EXPECT_EQ(parts.chunk, 2048);
  EXPECT_EQ(parts.workspace(other), 2 * 2048 * 14336 * 2);  // one is made while the other is read
  // 1536 tokens would be 192 tiles, two rounds for 1.45.
  const TallProblem wide{DType::bf16,      8192,  4096, 14336, 64, 64 * 7168, Layout::by_token,
                         Layout::by_token, 14336, 4096};
  EXPECT_EQ(configure(wide, kMachine.sms, kMachine.shared_bytes).chunk, 1024);
  p.block_rows = 192;  // no multiple of 128
  const TallConfig narrow = configure(p, kMachine.sms, kMachine.shared_bytes);
  EXPECT_EQ(narrow.rows, 64);
  EXPECT_LE(narrow.shared_bytes() + 512, kMachine.shared_bytes);
  EXPECT_EQ(TallPlan(p, narrow, 132).groups, 16);
}

// Few tokens: tiles as large as what is there, of as many thread blocks as there are SMs; what is prepared is
// the same (docs/design/hopper/batches.md).
TEST(TallPlan, HasTilesForFewTokens) {
  const auto tile = [](std::int64_t tokens, std::int64_t cols, std::int64_t rows, std::int64_t block_rows,
                       std::int64_t stored) {
    const TallProblem p{
        DType::bf16,      tokens,           rows, cols, block_rows, rows / block_rows * stored,
        Layout::by_token, Layout::by_token, cols, rows};
    const TallConfig c = configure(p, kMachine.sms, kMachine.shared_bytes);
    EXPECT_TRUE(c.is_compiled());
    EXPECT_LE(c.shared_bytes() + 512, kMachine.shared_bytes);
    EXPECT_EQ(c.rows, block_rows);
    return std::array{c.tile.rows, c.tile.tokens, c.tile.columns, c.split};
  };
  using Tile = std::array<int, 4>;
  EXPECT_EQ(tile(48, 4096, 4096, 128, 2048), (Tile{64, 64, 128, 2}));
  EXPECT_EQ(tile(64, 4096, 4096, 128, 410), (Tile{64, 64, 128, 1}));
  EXPECT_EQ(tile(128, 4096, 4096, 64, 2048), (Tile{64, 128, 128, 2}));
  EXPECT_EQ(tile(64, 4096, 14336, 128, 2048), (Tile{128, 64, 128, 1}));
  EXPECT_EQ(tile(64, 4096, 14336, 64, 2048), (Tile{64, 64, 64, 1}));
  EXPECT_EQ(tile(128, 4096, 14336, 64, 2048), (Tile{64, 128, 64, 1}));
  EXPECT_EQ(tile(256, 4096, 14336, 128, 2048), (Tile{128, 256, 64, 1}));
  EXPECT_EQ(tile(8192, 4096, 14336, 128, 2048), (Tile{128, 256, 64, 1}));
  EXPECT_EQ(tile(8192, 4096, 14336, 64, 2048), (Tile{64, 512, 32, 1}));
}

}  // namespace
}  // namespace rarefy::sm90
