// Which way launches go through their tokens, and how many are in the last tile.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#include "cuda/sm90/host_device.h"

namespace rarefy::sm90 {

// The last token tile, which has a box of its own for X: rows that TMA finds outside of X take it longer than
// others (300 tokens took longer than 384 with tiles of 256). What is multiplied in their place is what was
// there before; those sums are stored nowhere.
struct LastTokens {
  int first = INT_MAX;
  std::uint32_t count = 0;

  LastTokens() = default;
  LastTokens(std::int64_t tokens, std::int64_t its_first)
      : first(static_cast<int>(its_first)), count(static_cast<std::uint32_t>(tokens - its_first)) {}
  static LastTokens of_tiles(std::int64_t tokens, std::int64_t tile) {
    return {tokens, (tokens - 1) / tile * tile};
  }
  RAREFY_HOST_DEVICE bool is(int token) const { return token >= first; }
};

// Whether a launch begins with the last tokens: where the one before began with the first ones, as what that
// read or wrote last is in L2 still. 8192×4096×4096 at .1 takes 3 to 9 % less so with the same X again and
// again, in networks, where Y becomes X, 1 to 2 %. `can`: where it cannot, it says so all the same.
inline bool begins_with_last_tokens(bool can = true) {
  static std::atomic<bool> before{false};
  const bool its = can && !before.load(std::memory_order_relaxed);
  before.store(its, std::memory_order_relaxed);
  return its;
}

}  // namespace rarefy::sm90
