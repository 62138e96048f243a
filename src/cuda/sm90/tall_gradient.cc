// What the weight gradient of tall vectors runs and how.
#include "cuda/sm90/tall_gradient.h"

#include <algorithm>

#include "core/checked.h"

namespace rarefy::sm90 {

std::string unsupported(const TallGradientProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 32 != 0) return "blocks must have a multiple of 32 rows";
  if (p.tokens < 1) return "there are no tokens";
  if (p.x_stride % 8 != 0 || p.dy_stride % 8 != 0)
    return "copies of 16 bytes need rows of X and dY 16 bytes apart";
  if (p.dy_stride < p.rows) return "TMA needs rows that do not overlap";
  if (p.tokens > INT32_MAX - 1024 || p.blocks > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (p.workspace() / 16 > UINT32_MAX) return "distances in X are 32-bit";
  if (TallGradientPlan(p, {p.block_rows % 128 == 0 ? 128 : 64}).most > 0xFFFF)
    return "lists have less than 2^16 tiles";
  return {};
}

bool valid(const TallGradientProblem& p, const TallGradientConfig& c) {
  return (c.rows == 64 || (c.rows == 128 && p.block_rows % 128 == 0)) &&
         (c.split == 1 || c.split == 2 || c.split == 4) && c.slots >= 2 && c.slots <= 8 && c.sms >= 4 &&
         c.sms <= kMostClusters;
}

TallGradientConfig configure(const TallGradientProblem& p, int sms, int shared_bytes) {
  TallGradientConfig c{p.block_rows % 128 == 0 ? 128 : 64, 1, 0, std::min(sms, kMostClusters)};
  c.slots = std::min(8, (shared_bytes - 512 - c.shared_bytes()) / c.slot_bytes());
  // Tiles, if rows store alike: as many shares of the tokens as there are thread blocks for.
  const std::int64_t rows = ceil_div(p.rows, p.block_rows), per_block = ceil_div(p.block_rows, c.rows);
  const std::int64_t tiles =
      rows * per_block *
      ceil_div(ceil_div(p.blocks, std::max<std::int64_t>(1, rows)), std::int64_t{c.columns()});
  while (c.split < 4 && tiles * c.split * 2 <= sms) c.split *= 2;
  return c;
}

TallGradientPlan::TallGradientPlan(const TallGradientProblem& p, const TallGradientConfig& c) {
  const std::int64_t per_block = ceil_div(p.block_rows, c.rows);
  const std::int64_t tiles = (p.blocks / c.columns() + ceil_div(p.rows, p.block_rows)) * per_block;
  most = static_cast<int>(std::min<std::int64_t>(tiles, INT32_MAX));
  items_at = 4 * std::int64_t{most};
  words = items_at + 2 * std::int64_t{most};
}

}  // namespace rarefy::sm90
