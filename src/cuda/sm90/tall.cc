// What the tall kernel runs and how: supported problems, the tile, where things are in what is prepared.
#include "cuda/sm90/tall.h"

#include <algorithm>
#include <cmath>

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
constexpr std::int64_t kFewTokens = 2048;              // up to here a tile may be smaller

// Block rows may reach past W by more than a tile.
std::int64_t group_count(const TallProblem& p, int rows) { return ceil_div(p.rows, rows); }

double columns_of(const TallProblem& p) {  // of a block row
  return static_cast<double>(p.blocks) /
         static_cast<double>(std::max<std::int64_t>(1, ceil_div(p.rows, p.block_rows)));
}

std::int64_t tiles_of(const TallProblem& p, const TallConfig& c) {
  return group_count(p, c.tile.rows) * ceil_div(p.tokens, std::int64_t{c.tile.tokens});
}

// Thread blocks of an SM: two where one of them has no room for steps of more columns.
int blocks_of_sm(const TallTile& tile) { return tile.warpgroups() == 1 && tile.columns == 64 ? 2 : 1; }

double lists_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  const ListChoice rounds({static_cast<int>(group_count(p, c.rows)), 1, sms},
                          static_cast<int>(ceil_div(p.tokens, std::int64_t{c.tile.tokens})));
  return rounds.whole * tall_clocks(c.rows, static_cast<int>(columns_of(p))) / kClock + 9;
}

// Tiles with a thread block or a cluster each (docs/design/hopper/batches.md): an SM gathers 51 bytes a
// clock, a step takes 224 more, and W comes from memory at 13 bytes a clock and SM, at 15 in lines of 256
// bytes. A further round takes 4000 clocks more, and all besides 5.8 us (fitted).
double single_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  constexpr double kStep = 224, kNextRound = 4000, kAlone = 5.8;
  const TallTile& tile = c.tile;
  const auto tokens = static_cast<double>(std::min<std::int64_t>(tile.tokens, turned_stride(p.tokens)));
  const int together = blocks_of_sm(tile);
  const std::int64_t rounds = ceil_div(tiles_of(p, c) * c.split, std::int64_t{sms} * together);
  const double columns = columns_of(p) / c.split;
  const double round = columns * 2 * (tile.rows + tokens) / 51 * together +
                       std::ceil(columns / tile.columns) * kStep + 10 * tokens;
  const double bytes = 2. * static_cast<double>(p.blocks * p.block_rows + p.rows * p.tokens);
  const double reading = bytes / (sms * (tile.rows == 128 ? 15 : 13));
  const Exchange exchange{1500, 8, 1200};
  return (std::max(static_cast<double>(rounds) * round, reading) +
          static_cast<double>(rounds - 1) * kNextRound +
          (c.split > 1 ? exchange(static_cast<std::int64_t>(tokens), tile.rows / 64, c.split) : 0)) /
             kClock +
         kAlone;
}

double multiply_microseconds(const TallProblem& p, const TallConfig& c, int sms) {
  return c.single() ? single_microseconds(p, c, sms) : lists_microseconds(p, c, sms);
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
    return ceil_div(groups * ceil_div(tokens, std::int64_t{c.tile.tokens}), std::int64_t{sms});
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

// Slots for as many steps as there is room for.
int slots_of(TallConfig c, int shared_bytes) {
  c.slots = 0;
  const int room = blocks_of_sm(c.tile) == 1 ? shared_bytes - 512 : shared_bytes / 2 - 1536;
  return std::min(8, (room - c.shared_bytes()) / c.tile.slot_bytes());
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
  TallConfig c;
  c.rows = p.block_rows % 128 == 0 ? 128 : 64;
  c.tile = *std::ranges::find(kListedTallTiles, c.rows, &TallTile::rows);
  c.slots = slots_of(c, shared_bytes);
  c.chunk = chunk_of(p, c, sms);
  return with_tile(p, c, sms, shared_bytes);
}

TallConfig with_tile(const TallProblem& p, const TallConfig& config, int sms, int shared_bytes) {
  TallConfig best = config;
  if (p.tokens > kFewTokens) return best;
  double least = multiply_microseconds(p, best, sms);
  for (const TallTile& tile : kSingleTallTiles) {
    if (tile.rows > config.rows) continue;
    TallConfig c = config;
    c.tile = tile;
    c.slots = slots_of(c, shared_bytes);
    c.split = best_parts_of(c, tiles_of(p, c), sms,
                            [&](const TallConfig& its) { return single_microseconds(p, its, sms); });
    while (!parts_fit(c.split, tile.mine(), tile.warpgroups(), c.slots * tile.slot_bytes())) --c.split;
    if (!c.is_compiled()) continue;
    if (const double its = single_microseconds(p, c, sms); its < least) best = c, least = its;
  }
  return best;
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
