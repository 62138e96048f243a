// What the tall kernel runs and how: supported problems, the tile, where things are in what is prepared.
#include "cuda/sm90/tall.h"

#include <algorithm>

#include "core/checked.h"
#include "cuda/sm90/parts.h"
#include "cuda/sm90/tall_walk.h"

namespace rarefy::sm90 {
namespace {

constexpr int kMostGroups = 1 << 16;  // 16 bits in the lists

// Bytes of a transposed chunk: so many stay in L2 until they are multiplied, and the next one is transposed
// as that ends. Where multiplying takes less than so many microseconds, chunks are larger; launches take
// another part of the time.
constexpr std::int64_t kChunkBytes = 36 << 20;
constexpr double kLeastChunk = 45, kChunkLaunch = 4;
constexpr double kBackMicroseconds = 9. / (64 << 20);  // of a byte that comes back from memory
constexpr double kClock = 1750;                        // per microsecond
constexpr double kFewShare = 1.3;  // of few thread blocks: so much faster than when all SMs are at work

// Block rows may reach past W by more than a tile.
std::int64_t group_count(const TallProblem& p, int rows) { return ceil_div(p.rows, rows); }

double columns_of(const TallProblem& p) {  // of a block row
  return static_cast<double>(p.blocks) /
         static_cast<double>(std::max<std::int64_t>(1, ceil_div(p.rows, p.block_rows)));
}

double multiply_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  const ListChoice rounds({static_cast<int>(group_count(p, c.rows)), 1, sms},
                          static_cast<int>(ceil_div(p.tokens, std::int64_t{c.tokens})));
  // Tiles of 64 rows have steps of twice as many columns with 256 tokens, and take two thirds as long as with
  // 512 (docs/design/hopper/batches.md).
  const double few = c.rows == 64 && c.tokens == 256 ? 0.63 : 1;
  return rounds.whole * few * tall_clocks(c.rows, static_cast<int>(columns_of(p) / c.split)) / kClock + 9;
}

// Tokens of a chunk that leave few SMs without a tile in its last round: 3 token tiles of 64 groups would be
// two rounds of 132, as 4 are.
std::int64_t chunk_of(const TallProblem& p, const TallConfig& c, int sms) {
  constexpr std::int64_t kStep = 512;
  std::int64_t most =
      std::max<std::int64_t>(1, kChunkBytes / (2 * std::max<std::int64_t>(1, p.cols)) / kStep) * kStep;
  const double all = multiply_microseconds(p, c, sms);
  if (all * static_cast<double>(most) < kLeastChunk * static_cast<double>(p.tokens)) most *= 2;
  if (p.tokens <= most) return ceil_div(std::max<std::int64_t>(1, p.tokens), kStep) * kStep;
  const std::int64_t groups = group_count(p, c.rows);
  const auto rounds = [&](std::int64_t tokens) {
    return ceil_div(groups * ceil_div(tokens, std::int64_t{c.tokens}), std::int64_t{sms});
  };
  const double round = tall_clocks(c.rows, static_cast<int>(columns_of(p))) / kClock;
  // All at once: X leaves L2 before it is multiplied.
  std::int64_t best = ceil_div(p.tokens, kStep) * kStep;
  double least = static_cast<double>(rounds(p.tokens)) * round + kChunkLaunch +
                 static_cast<double>(p.tokens * p.cols * 2) * kBackMicroseconds;
  for (std::int64_t chunk = most; chunk > 0; chunk -= kStep) {
    const std::int64_t whole = p.tokens / chunk, rest = p.tokens % chunk;
    const double cost = static_cast<double>(whole * rounds(chunk) + (rest > 0 ? rounds(rest) : 0)) * round +
                        static_cast<double>(whole + (rest > 0 ? 1 : 0)) * kChunkLaunch;
    if (cost < least) best = chunk, least = cost;
  }
  return best;
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
  if (!p.y_padded && (by_token ? p.rows : p.tokens) % 8 != 0)
    return "TMA writes rows of Y in pieces of 16 bytes";
  if (group_count(p, 64) >= kMostGroups) return "lists of tiles take less than 2^22 features";
  return {};
}

TallConfig configure(const TallProblem& p, int sms, int shared_bytes) {
  TallConfig c{p.block_rows % 128 == 0 ? 128 : 64, 0};
  c.tokens = c.rows == 128 || p.tokens <= 256 ? 256 : 512;
  c.slots = std::min(8, (shared_bytes - 512 - c.shared_bytes()) / c.slot_bytes());
  c.chunk = chunk_of(p, c, sms);
  c.split = split_of(p, c, sms);
  return c;
}

int split_of(const TallProblem& p, const TallConfig& c, int sms) {
  const std::int64_t tiles = group_count(p, c.rows) * ceil_div(p.tokens, std::int64_t{c.tokens});
  return best_parts(tiles, sms, [&](int parts) {
    const double share =
        std::min(kFewShare, std::max(1.0, static_cast<double>(sms) / static_cast<double>(tiles * parts)));
    return tall_clocks(c.rows, static_cast<int>(columns_of(p) / parts)) / share +
           (parts > 1 ? Exchange{}(p.tokens, 2) : 0);
  });
}

double predicted_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  return multiply_microseconds(p, c, sms) +
         (p.copies_x() ? transpose_microseconds(p.tokens * p.cols * 2) : 0);
}

TallPlan::TallPlan(const TallProblem& p, const TallConfig& config, int thread_blocks)
    : groups(static_cast<int>(group_count(p, config.rows))), sms(std::min(thread_blocks, kMostClusters)) {
  items_at = (4 * std::int64_t{groups} + 31) / 32 * 32;
  const StripLists l = lists();
  words = items_at + 2 * std::int64_t{l.begin(l.levels())};
}

}  // namespace rarefy::sm90
