// What the tall kernel runs and how: supported problems, the choice of a tile, who works on which tiles.
#include "cuda/sm90/tall.h"

#include <algorithm>
#include <numeric>

#include "cuda/sm90/schedule.h"

namespace rarefy::sm90 {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Clocks of a tile with this many stored columns: gathered bytes arrive slower than boxes
// (docs/design/hopper.md).
double tile_clocks(const TallConfig& c, double columns) {
  const double steps = columns / c.columns() + 0.5;
  const double multiply = steps * c.rows * c.tokens() * c.columns() * 2 / 4096;
  const double copy = steps * c.slot_bytes() / 36;
  return std::max(multiply, copy) + 1500;
}

}  // namespace

std::string unsupported(const TallProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 64 != 0) return "a warpgroup's product has 64 rows: blocks must have a multiple of 64";
  if (p.x_stride % 8 != 0 || p.y_stride % 8 != 0)
    return "copies of 16 bytes need rows of X and Y 16 bytes apart";
  if (p.y_stride < p.rows) return "TMA needs rows that do not overlap";
  if (p.tokens < 1) return "there are no tokens";
  if (p.x_stride > INT32_MAX / 2) return "distances of features are 32-bit";
  if (p.tokens > INT32_MAX || p.blocks > INT32_MAX) return "coordinates of TMA are 32-bit";
  return {};
}

std::vector<TallCandidate> tall_candidates(const TallProblem& p, int sms, int shared_bytes) {
  std::vector<TallCandidate> list;
  for (const int rows : {128, 64}) {
    TallCandidate& candidate = list.emplace_back();
    TallConfig& c = candidate.config = {rows, 0};
    c.slots = std::min(8, (shared_bytes - 512 - c.shared_bytes()) / c.slot_bytes());
    const double groups = static_cast<double>(ceil_div(p.rows, rows));
    const double columns =
        static_cast<double>(p.blocks) / static_cast<double>(ceil_div(p.rows, p.block_rows));
    const double tiles = groups * static_cast<double>(ceil_div(p.tokens, c.tokens()));
    candidate.microseconds = std::max(1.0, tiles / sms) * tile_clocks(c, columns) / 1750 + 9;
    if (p.block_rows % rows != 0) candidate.reason = "blocks have fewer rows than the tile";
  }
  return list;
}

TallConfig configure(const TallProblem& p, int sms, int shared_bytes) {
  const std::vector<TallCandidate> list = tall_candidates(p, sms, shared_bytes);
  const TallCandidate* best = nullptr;
  for (const TallCandidate& candidate : list) {
    if (!candidate.reason.empty()) continue;
    if (best == nullptr || candidate.microseconds < best->microseconds) best = &candidate;
  }
  return best->config;
}

TallPlan prepare(const TallProblem& p, const TallConfig& config, int sms, const std::int32_t* crow) {
  const std::int64_t per_block = p.block_rows / config.rows;
  std::vector<int> group;  // by falling cost
  std::vector<double> clocks;
  const auto columns = [&](int g) { return crow[g / per_block + 1] - crow[g / per_block]; };
  group.resize(static_cast<std::size_t>(
      std::min(ceil_div(p.rows, config.rows), ceil_div(p.rows, p.block_rows) * per_block)));
  std::iota(group.begin(), group.end(), 0);
  std::stable_sort(group.begin(), group.end(), [&](int a, int b) { return columns(a) > columns(b); });
  for (const int g : group) clocks.push_back(tile_clocks(config, columns(g)));
  const std::vector<Tile> tiles =
      tile_order(std::ssize(group), ceil_div(p.tokens, config.tokens()), p.blocks * p.block_rows * 2);
  const Schedule schedule = assign(tiles, clocks, sms);
  TallPlan plan;
  plan.workers = static_cast<int>(std::ssize(schedule.lists));
  append_ranges(schedule, plan.words);
  plan.tiles_at = std::ssize(plan.words);
  for (const auto& list : schedule.lists) {
    for (const Tile& t : list) {
      const int g = group[static_cast<std::size_t>(t.group)];
      plan.words.insert(plan.words.end(), {g, t.token_tile, crow[g / per_block], crow[g / per_block + 1]});
    }
  }
  return plan;
}

}  // namespace rarefy::sm90
