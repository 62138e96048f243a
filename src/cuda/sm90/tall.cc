// What the tall kernel runs and how: supported problems, the tile, where things are in what is prepared.
#include "cuda/sm90/tall.h"

#include <algorithm>

#include "core/checked.h"
#include "cuda/sm90/tall_walk.h"

namespace rarefy::sm90 {
namespace {

constexpr int kMostGroups = 1 << 16;  // 16 bits in the lists

// Bytes of a transposed chunk: so many stay in L2 until they are multiplied, and the next one is transposed
// as that ends. Where multiplying takes less than so many microseconds, launches cost more than that saves.
constexpr std::int64_t kChunkBytes = 36 << 20;
constexpr double kLeastChunk = 45;
constexpr int kSms = 132;  // of an H100 and an H200

// Block rows may reach past W by more than a tile.
std::int64_t group_count(const TallProblem& p, int rows) { return ceil_div(p.rows, rows); }

double multiply_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  const auto groups = static_cast<double>(group_count(p, c.rows));
  const double columns = static_cast<double>(p.blocks) / static_cast<double>(ceil_div(p.rows, p.block_rows));
  const double tiles = groups * static_cast<double>(ceil_div(p.tokens, c.tokens()));
  return std::max(1.0, tiles / sms) * tall_clocks(c.rows, static_cast<int>(columns)) / 1750 + 9;
}

}  // namespace

std::string unsupported(const TallProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 64 != 0) return "a warpgroup's product has 64 rows, of one block row";
  if (p.tokens < 1) return "there are no tokens";
  if (p.x_stride % 8 != 0 || p.y_stride % 8 != 0)
    return "copies of 16 bytes need rows of X and Y 16 bytes apart";
  const bool by_token = p.y_layout == Layout::by_token;
  if (p.y_stride < (by_token ? p.rows : p.tokens)) return "TMA needs rows that do not overlap";
  if (p.x_layout == Layout::by_feature && p.x_stride > INT32_MAX / 2)
    return "distances of features are 32-bit";
  if (p.tokens > INT32_MAX - 1024 || p.blocks > INT32_MAX) return "coordinates of TMA are 32-bit";
  if ((by_token ? p.rows : p.tokens) % 8 != 0) return "TMA writes rows of Y in pieces of 16 bytes";
  if (group_count(p, 64) >= kMostGroups) return "lists of tiles take less than 2^22 features";
  return {};
}

TallConfig configure(const TallProblem& p, int shared_bytes) {
  TallConfig c{p.block_rows % 128 == 0 ? 128 : 64, 0};
  c.slots = std::min(8, (shared_bytes - 512 - c.shared_bytes()) / c.slot_bytes());
  std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(p.tokens * p.cols * 2, kChunkBytes));
  if (multiply_microseconds(p, c, kSms) < kLeastChunk * static_cast<double>(chunks))
    chunks = ceil_div(chunks, 2);
  c.chunk = std::max<std::int64_t>(512, ceil_div(ceil_div(p.tokens, chunks), 512) * 512);
  return c;
}

double predicted_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  const double transpose = p.x_layout == Layout::by_token ? transpose_microseconds(p.tokens * p.cols * 2) : 0;
  return multiply_microseconds(p, c, sms) + transpose;
}

TallPlan::TallPlan(const TallProblem& p, const TallConfig& config, int thread_blocks)
    : groups(static_cast<int>(group_count(p, config.rows))), sms(std::min(thread_blocks, kMostClusters)) {
  items_at = (4 * std::int64_t{groups} + 31) / 32 * 32;
  const StripLists l = lists();
  words = items_at + 2 * std::int64_t{l.begin(l.levels())};
}

}  // namespace rarefy::sm90
