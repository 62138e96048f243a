// Which weight gradients the kernel takes, and how it cuts them.
#include "cuda/sm90/block_gradient.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"

namespace rarefy::sm90 {
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
      const auto per_tile = static_cast<double>(c.columns());
      const double strips = block_row_count * static_cast<double>(p.block_rows / 64) / (two ? 2 : 1);
      // In halves of a whole tile: what is left of a row takes one of them on average.
      const double tiles = strips * std::max(0.5, columns / per_tile + 0.1);
      const double rounds = std::max(1.0, std::ceil(2 * tiles / std::floor(machine.sms / split)) / 2);
      const double steps = static_cast<double>(ceil_div(p.tokens, 64)) / split;
      // Thread blocks walk the tokens together and find each other's panels in L2: a step takes little more
      // than its products. Sums of each further share are collected one after another.
      candidate.microseconds = 6 + rounds * (steps * 1150 / 1750 + 2 + 9 * (split - 1));
      if (two != (p.block_rows % 128 == 0)) {  // the weight alone decides
        candidate.reason = two ? "block rows do not come in pairs of 64" : "block rows come in pairs of 64";
      }
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

std::int64_t tiles_at_most(const GradientProblem& p, const GradientConfig& config) {
  const std::int64_t rows = ceil_div(p.rows, p.block_rows), high = p.block_rows / 64,
                     wide = p.block_cols / 64;
  // Whole tiles, and one for what is left of each row.
  return (p.blocks * wide / config.columns() + std::min(rows, p.blocks)) * (high / (config.two ? 2 : 1));
}

}  // namespace rarefy::sm90
