// What the weight gradient of tall vectors runs and how.
#include "cuda/sm90/tall_gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checked.h"

namespace rarefy::sm90 {

namespace {

constexpr int kMostTiles = 0xFFFF;  // of a list
constexpr int kTokens = 4096;  // that tiles and shares are chosen for: what is prepared serves any number

// Clocks of a round of tiles whose steps take so many bytes from L2 and clocks of products, and what each
// step and tile takes beside them.
double round_clocks(const TallGradientConfig& c, double bytes, double products) {
  const double steps = static_cast<double>(kTokens) / c.tokens() / c.split;
  return steps * (150 + std::max(bytes / 41, products / .9)) + (c.split > 1 ? 12000 : 5000);
}

// Of tiles with so many columns.
double round_clocks(const TallGradientConfig& c, double columns) {
  return round_clocks(c, (c.rows + columns) * c.tokens() * 2, c.rows * columns * c.tokens() / 2048.);
}

// Of tiles of pairs with so many columns of each row, of which `stored` is the share of all: those of both
// rows are gathered once, dY comes once for a cluster. 1.5 µs of a tile are finding its columns and results.
double pair_clocks(const TallGradientConfig& c, double columns, double stored) {
  return 2500 + round_clocks(c, (128. / c.pairs + columns * (2 - stored)) * c.tokens() * 2,
                             128 * columns * c.tokens() / 2048.);
}

// Whether the kernel is to turn X itself: it has the time, as a box takes an SM 1,400 clocks, and few rounds,
// each of which is 1–3 % longer then. Where a panel's products take 1.4, 1.0, .76 and .59 of its turning
// (64×1 and 128×1 at .25, at .1), that saves 9, 10, 3 and 1 % of the time; with blocks of 32 rows 3 to -4.
bool turning_pays(const TallGradientProblem& p, const TallGradientConfig& c, double round_clocks,
                  double rounds) {
  const auto boxes = TurnedX(p.cols, 0).features_in_all / TurnedX::features(c.tokens());
  const double turning = static_cast<double>(boxes) * 1400 / c.sms;
  return p.block_rows >= 64 && rounds <= 2 && round_clocks / kTokens * c.tokens() >= .9 * turning;
}

// Clusters that a round of long steps leaves over turn the last of X by token, up to a quarter of it: a
// thread block has 13 bytes a clock while others want all of L2. Of several rounds in half of one: six SMs in
// a whole one, 245 µs, eleven 240 (4096→14336 at .1). Unless the pattern's tiles want those clusters, which
// `prepare` says.
void turn_last(const TallGradientProblem& p, TallGradientConfig& c, std::int64_t tiles, double round_clocks) {
  constexpr double kMost = 16;  // 64ths
  const std::int64_t rounds = ceil_div(tiles, std::int64_t{c.clusters()}),
                     left = c.clusters() - ceil_div(tiles, rounds);
  const double of_cluster =
      64 * c.split * 13 * round_clocks / (rounds > 1 ? 2 : 1) / static_cast<double>(p.cols * kTokens * 2);
  const double clusters = std::min(static_cast<double>(left), std::ceil(kMost / of_cluster));
  const auto last = static_cast<int>(std::min(kMost, clusters * of_cluster));
  if (last < 1) return;
  c.turners = static_cast<int>(clusters) * c.split, c.last = last;
}

// Tiles of each row, and shares of the tokens, that fill rounds of all SMs best, if rows store about alike:
// random ones within 2.5 times what they scatter by.
TallGradientConfig divided(const TallGradientProblem& p, int sms) {
  TallGradientConfig best;
  best.rows = p.block_rows % 128 == 0 ? 128 : 64;
  best.sms = sms;
  best.columns = best.most_columns();
  const std::int64_t rows = std::max<std::int64_t>(1, ceil_div(p.rows, p.block_rows)),
                     row_tiles = rows * ceil_div(p.block_rows, std::int64_t{best.rows});
  const double mean = static_cast<double>(p.blocks) / static_cast<double>(rows);
  const double absent = 1 - mean / static_cast<double>(std::max<std::int64_t>(1, p.cols));
  const double scatter = 2.5 * std::sqrt(mean * std::max(0., absent));
  double clocks = std::numeric_limits<double>::infinity(), of_round = 0;
  std::int64_t tiles = 0;  // of the best one, but for pairs
  const auto try_tiles = [&](int parts, bool long_steps) {
    TallGradientConfig c = best;
    c.long_steps = long_steps;
    const auto least = static_cast<int>(std::ceil((mean + scatter) / parts / 8)) * 8;
    if (least > c.most_columns() && mean / (parts + 1) >= 64) return;
    // As many as leave no row of those with fewer tiles.
    const double most = parts == 1 ? c.most_columns() : (mean - scatter) / (parts - 1);
    c.columns = std::clamp(static_cast<int>(most / 8) * 8, std::max(8, std::min(least, c.most_columns())),
                           c.most_columns());
    if (TallGradientPlan(p, c).most > kMostTiles) return;
    for (c.split = 1; c.split <= 4; c.split *= 2) {
      const auto rounds =
          static_cast<double>(ceil_div(row_tiles * parts, std::int64_t{std::max(1, c.clusters())}));
      const double round = round_clocks(c, mean / parts);
      if (rounds * round < clocks)
        best = c, clocks = rounds * round, of_round = round, tiles = row_tiles * parts;
    }
  };
  for (int parts = 1; parts == 1 || mean / parts >= 64; ++parts) {
    try_tiles(parts, false);
    if (best.rows == 64) try_tiles(parts, true);
  }
  TallGradientConfig c = best;
  c.rows = 64, c.split = 1, c.pairs = 2, c.long_steps = false;
  for (int windows = 2; mean / windows >= 64; windows += 2) {
    // A window ends where the first of its rows is full, at a multiple of 32 columns; eights are filled up.
    const auto most = static_cast<int>(std::ceil(((mean + scatter) / windows + 12) / 8)) * 8;
    const double columns = mean / windows;
    c.columns = std::max(most, TallPairs::kLeastColumns);
    if (columns * (1 + absent) + 32 > TallPairs::kMostGathered || !valid(p, c)) continue;
    const auto rounds = static_cast<double>(ceil_div(ceil_div(rows, std::int64_t{2}) * (windows / c.pairs),
                                                     std::int64_t{std::max(1, c.clusters())}));
    const double round = pair_clocks(c, columns, 1 - absent);
    // 2048 tokens of 4096→11008 at .25: 114.5 us, in long steps 120, though this says 1 % more.
    const double beside_long = best.long_steps ? .95 : 1;
    if (rounds * round * beside_long < clocks) best = c, clocks = rounds * round, of_round = round;
  }
  const bool turns = !best.long_steps && turning_pays(p, best, of_round, std::round(clocks / of_round));
  best.turns = turns ? 1 : 0;
  if (best.long_steps) turn_last(p, best, tiles, of_round);
  return best;
}

}  // namespace

std::string unsupported(const TallGradientProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 32 != 0) return "blocks must have a multiple of 32 rows";
  if (p.tokens < 1) return "there are no tokens";
  if (p.x_stride % 8 != 0 || p.dy_stride % 8 != 0)
    return "copies of 16 bytes need rows of X and dY 16 bytes apart";
  if (p.dy_stride < p.rows) return "TMA needs rows that do not overlap";
  if (p.tokens > INT32_MAX - 1024 || p.blocks > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (p.x_layout == Layout::by_feature && p.cols * p.x_stride / 8 > UINT32_MAX)
    return "distances in X are 32-bit";
  TallGradientConfig widest{p.block_rows % 128 == 0 ? 128 : 64};
  widest.columns = widest.most_columns();
  if (TallGradientPlan(p, widest).most > kMostTiles) return "lists have less than 2^16 tiles";
  return {};
}

bool valid(const TallGradientProblem& p, const TallGradientConfig& c) {
  if (c.pairs != 0 &&
      (p.block_rows != 64 || c.rows != 64 || c.split != 1 || c.pairs < 1 || c.pairs > 2 || c.slots > 5 ||
       c.columns < TallPairs::kLeastColumns || p.cols > TallPairs::kMostCols ||
       ceil_div(p.rows, p.block_rows) > TallPairs::kMostRows || p.blocks > TallPairs::kMostBlocks))
    return false;
  if (c.long_steps && (c.rows != 64 || c.pairs != 0)) return false;
  return (c.rows == 64 || (c.rows == 128 && p.block_rows % 128 == 0)) &&
         (c.split == 1 || c.split == 2 || c.split == 4) && c.slots >= 2 && c.slots <= 8 && c.sms >= 4 &&
         c.sms <= kMostClusters && c.turns >= 0 && c.turns <= 2 && c.turners >= 0 && c.turners <= c.sms / 2 &&
         c.last >= 0 && c.last < 64 && c.clusters() > c.turning() / c.cluster() && c.columns % 8 == 0 &&
         c.columns >= 8 && c.columns <= c.most_columns() && TallGradientPlan(p, c).most <= kMostTiles;
}

TallGradientConfig configure(const TallGradientProblem& p, int sms, int shared_bytes) {
  TallGradientConfig c = divided(p, std::min(sms, kMostClusters));
  c.slots = 0;
  c.slots = std::min(8, (shared_bytes - 512 - c.shared_bytes()) / c.slot_bytes());
  return c;
}

TallGradientPlan::TallGradientPlan(const TallGradientProblem& p, const TallGradientConfig& c) {
  const std::int64_t per_block = ceil_div(p.block_rows, c.rows), block_rows = ceil_div(p.rows, p.block_rows);
  std::int64_t tiles = c.pairs > 0 ? TallPairs::most(block_rows, p.blocks, c.columns, c.pairs)
                                   : (p.blocks / c.columns + block_rows) * per_block;
  has_parts = tiles > c.clusters();
  if (has_parts) tiles += c.clusters() + TileParts::kMost;  // narrower ones, and parts
  most = static_cast<int>(std::min<std::int64_t>(tiles, INT32_MAX));
  items_at = 4 * std::int64_t{most};
  turns_last_at = items_at + 2 * std::int64_t{most};
  words = turns_last_at + 1;
  if (c.pairs > 0) {
    pairs = TallPairs(block_rows, p.blocks, words);
    words = pairs.words;
  }
}

std::int64_t workspace(const TallGradientProblem& p, const TallGradientConfig& c) {
  return p.turned_bytes() + (TallGradientPlan(p, c).has_parts ? TileParts::kBytes : 0);
}

}  // namespace rarefy::sm90
