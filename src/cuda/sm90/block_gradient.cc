// Which weight gradients the kernel takes, and how it cuts them.
#include "cuda/sm90/block_gradient.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace rarefy::sm90 {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Panels of X that one tile holds.
std::int64_t tile_columns(const GradientConfig& c) { return c.two ? 4 : 8; }

}  // namespace

std::string unsupported(const GradientProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 64 != 0 || p.block_cols % 64 != 0) return "block sides must be multiples of 64";
  if (p.x_stride % 8 != 0 || p.dy_stride % 8 != 0) return "TMA needs rows of X and dY 16 bytes apart";
  if (p.x_stride < p.cols || p.dy_stride < p.rows) return "TMA needs rows that do not overlap";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX - 64 || p.blocks * p.block_rows > INT32_MAX)
    return "coordinates of TMA are 32-bit";
  return {};
}

std::vector<GradientCandidate> gradient_candidates(const GradientProblem& p, const Machine& machine) {
  const double block_row_count = static_cast<double>(ceil_div(p.rows, p.block_rows));
  const double columns =
      static_cast<double>(p.blocks) / block_row_count * static_cast<double>(p.block_cols / 64);  // a row
  std::vector<GradientCandidate> list;
  for (const bool two : {true, false}) {
    for (const int split : {1, 2, 4}) {
      GradientCandidate& candidate = list.emplace_back();
      const GradientConfig& c = candidate.config = {split, two};
      const auto per_tile = static_cast<double>(tile_columns(c));
      const double strips = block_row_count * static_cast<double>(p.block_rows / 64) / (two ? 2 : 1);
      // In halves of a whole tile: what is left of a row takes one of them on average.
      const double tiles = strips * std::max(0.5, columns / per_tile + 0.1);
      const double rounds = std::max(1.0, std::ceil(2 * tiles / std::floor(machine.sms / split)) / 2);
      const double steps = static_cast<double>(ceil_div(p.tokens, 64)) / split;
      // Thread blocks walk the tokens together and find each other's panels in L2: a step takes little more
      // than its products. Sums of each further share are collected one after another.
      candidate.microseconds = 6 + rounds * (steps * 1150 / 1750 + 2 + 9 * (split - 1));
      if (two && p.block_rows % 128 != 0) candidate.reason = "block rows do not come in pairs of 64";
      if (split > ceil_div(p.tokens, 64)) candidate.reason = "fewer than 64 tokens for each share";
    }
  }
  return list;
}

GradientConfig configure(const GradientProblem& p, const Machine& machine) {
  const std::vector<GradientCandidate> list = gradient_candidates(p, machine);
  const GradientCandidate* best = nullptr;
  for (const GradientCandidate& candidate : list) {
    if (!candidate.reason.empty()) continue;
    if (best == nullptr || candidate.microseconds < best->microseconds) best = &candidate;
  }
  return best->config;
}

GradientPlan prepare(const GradientProblem& p, const GradientConfig& config, const std::int32_t* crow,
                     const std::int32_t* col) {
  const std::int64_t high = p.block_rows / 64, wide = p.block_cols / 64, strips = config.two ? 2 : 1;
  const std::int64_t most = tile_columns(config);
  // Whole tiles first and what is left of each row last: it costs less and fills the last round.
  struct Tile {
    std::int64_t count;
    std::array<std::int32_t, 20> words;
  };
  std::vector<Tile> tiles;
  for (std::int64_t i = 0; i < ceil_div(p.rows, p.block_rows); ++i) {
    const std::int64_t columns = (crow[i + 1] - crow[i]) * wide;
    for (std::int64_t strip = 0; strip < high; strip += strips) {
      for (std::int64_t begin = 0; begin < columns; begin += most) {
        const std::int64_t count = std::min(most, columns - begin);
        auto& [width, words] = tiles.emplace_back();
        width = count;
        words.fill(-1);
        words[0] = static_cast<std::int32_t>(i * high + strip);
        words[1] = static_cast<std::int32_t>(strips);
        words[2] = static_cast<std::int32_t>(count);
        for (std::int64_t c = 0; c < count; ++c) {
          const std::int64_t entry = crow[i] + (begin + c) / wide, inside = (begin + c) % wide;
          const std::int64_t half = (count + 1) / 2;  // of warpgroup 0, unless both have all columns
          const auto at = static_cast<std::size_t>(config.two || c < half ? c : 4 + c - half);
          words[4 + at] = static_cast<std::int32_t>(col[entry] * wide + inside);
          for (std::int64_t s = 0; s < strips; ++s) {
            words[12 + 4 * static_cast<std::size_t>(s) + at] =
                static_cast<std::int32_t>((entry * high + strip + s) * wide + inside);
          }
        }
      }
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.count > b.count; });
  GradientPlan plan;
  plan.tiles = std::ssize(tiles);
  for (const Tile& tile : tiles) plan.words.insert(plan.words.end(), tile.words.begin(), tile.words.end());
  return plan;
}

}  // namespace rarefy::sm90
