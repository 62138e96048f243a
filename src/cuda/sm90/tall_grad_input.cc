// What the input gradient of tall vectors runs and how.
#include "cuda/sm90/tall_grad_input.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checked.h"

namespace rarefy::sm90 {
namespace {

constexpr double kClock = 1750;          // per microsecond
constexpr double kLaunchClocks = 16000;  // launch, first loads from device memory, last stores
constexpr int kStateBytes = 2048;        // barriers and turns, and what the system takes
constexpr int kMostSlots = 6;
constexpr int kMostSums = 32768;  // in shared memory

// Clocks of a tile with zeros: products, or the copies of W, whose addresses serve a block.
double spread_clocks(const Product& p, const TallInputConfig& c) {
  const auto steps = static_cast<double>(ceil_div(p.rows, std::int64_t{64}));
  const bool long_blocks = p.block_rows % 128 == 0;
  return steps * (c.tokens == 256 ? (long_blocks ? 1200 : 1230) : long_blocks ? 730 : 850) + 1500;
}

// Without. Of each block row a tile's columns are about normally distributed; each 64 of them are a turn,
// which takes what shared memory does (operands arrive and are read, sums are read and written), or waits for
// its slots.
double scatter_clocks(const Product& p, const TallInputConfig& c) {
  const double density = p.density(), mean = density * c.columns,
               deviation = std::sqrt(mean * std::max(0., 1 - density));
  double turns = mean > 0 ? 1 : 0;
  for (int more = 64; more < c.columns; more += 64) {
    const double above = deviation > 0 ? (more - mean) / deviation : mean > more ? -9 : 9;
    turns += 0.5 * std::erfc(above * std::sqrt(0.5));
  }
  const auto rows = static_cast<double>(p.block_rows),
             row_blocks = static_cast<double>(ceil_div(p.rows, p.block_rows));
  const double panels = rows / 64, slots = std::max(1, c.slots);
  const double bytes = turns * 4 * rows * (64 + c.tokens) + 8. * c.tokens * mean;
  const double works = 0.86 * bytes / 128 + 230 * turns,
               waits = turns * (940 + 690 * panels) * panels / slots;
  return row_blocks * std::max(works, waits) + 3500;
}

}  // namespace

std::string tall_input_unsupported(const Product& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 32 != 0) return "blocks must have a multiple of 32 rows";
  if (p.x_stride % 8 != 0 || p.y_stride % 8 != 0) return "TMA needs rows of dY and dX 16 bytes apart";
  if (p.x_stride < p.rows || p.y_stride < p.cols) return "TMA needs rows that do not overlap";
  if (!p.pieces_fit(8)) return "TMA writes rows of dX in pieces of 16 bytes";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX - 1024 || p.blocks > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (tall_input_words(p) > INT32_MAX) return "words of the pattern are counted in 32 bits";
  if (ceil_div(p.cols, std::int64_t{128}) * ceil_div(p.tokens, std::int64_t{64}) > INT32_MAX)
    return "tiles are counted in 32 bits";
  return {};
}

bool valid(const Product& p, const TallInputConfig& c, int shared_bytes) {
  const bool shape = c.scatter ? (c.tokens == 64 || c.tokens == 128) && c.columns >= 8 &&
                                     c.columns * c.tokens <= kMostSums && c.columns % 8 == 0 &&
                                     (p.block_rows == 64 || p.block_rows == 128)
                               : (c.tokens == 256 || c.tokens == 128) && c.columns == 128;
  return shape && c.slots >= 2 && c.slots <= kMostSlots && c.shared_bytes() + kStateBytes <= shared_bytes;
}

std::vector<TallInputCandidate> tall_input_candidates(const Product& p, int sms, int shared_bytes) {
  std::vector<TallInputCandidate> list;
  const auto add = [&](bool scatter, int tokens, int columns) {
    TallInputCandidate& candidate = list.emplace_back();
    TallInputConfig& c = candidate.config = {scatter, tokens, columns, 0};
    c.slots = std::min(kMostSlots, (shared_bytes - kStateBytes - c.other_bytes()) / c.slot_bytes());
    if (c.slots < 2) {
      candidate.reason = "two slots do not fit into shared memory";
    } else if (!valid(p, c, shared_bytes)) {
      candidate.reason = "blocks must have 64 or 128 rows";
    }
    const auto tiles = static_cast<double>(ceil_div(p.tokens, std::int64_t{tokens}) *
                                           ceil_div(p.cols, std::int64_t{columns}));
    const double rounds = std::ceil(tiles / sms);
    candidate.microseconds =
        (rounds * (scatter ? scatter_clocks(p, c) : spread_clocks(p, c)) + kLaunchClocks) / kClock;
  };
  add(false, 256, 128);
  add(false, 128, 128);
  // As few tiles as hold all columns in shared memory, and a few more: narrower ones may fill rounds better.
  for (const int tokens : {64, 128}) {
    const std::int64_t fewest = ceil_div(p.cols, std::int64_t{kMostSums / tokens});
    for (std::int64_t tiles = fewest; tiles < fewest + 8; ++tiles) {
      const auto columns = static_cast<int>(ceil_div(ceil_div(p.cols, tiles), std::int64_t{8}) * 8);
      if (list.size() < 3 || list.back().config.columns != columns) add(true, tokens, columns);
    }
  }
  return list;
}

TallInputCandidate tall_input_best(const Product& p, int sms, int shared_bytes) {
  const std::vector<TallInputCandidate> list = tall_input_candidates(p, sms, shared_bytes);
  const TallInputCandidate* best = &list.front();  // nothing speaks against it
  for (const TallInputCandidate& candidate : list) {
    if (candidate.reason.empty() && candidate.microseconds < best->microseconds) best = &candidate;
  }
  return *best;
}

}  // namespace rarefy::sm90
