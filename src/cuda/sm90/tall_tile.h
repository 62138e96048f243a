// Tiles of the tall kernel: what host and device say of one, and which there are.
#pragma once

#include <span>

#include "cuda/sm90/host_device.h"

namespace rarefy::sm90 {

// Features × tokens, and the stored columns of a step: more of them are fewer barriers, as many as leave room
// for three steps or more. Two warpgroups share a tile by features or by tokens; one has a tile of 64
// features and up to 128 tokens, so that an SM may have two of these.
struct TallTile {
  int rows = 128, tokens = 256, columns = 64;

  RAREFY_HOST_DEVICE constexpr int warpgroups() const { return rows == 128 || tokens > 128 ? 2 : 1; }
  RAREFY_HOST_DEVICE constexpr bool shares_tokens() const { return rows == 64 && warpgroups() == 2; }
  RAREFY_HOST_DEVICE constexpr int mine() const { return shares_tokens() ? tokens / 2 : tokens; }
  RAREFY_HOST_DEVICE constexpr int threads() const { return 128 * (warpgroups() + 1); }
  RAREFY_HOST_DEVICE constexpr int slot_bytes() const { return (rows + tokens) * columns * 2; }
  constexpr bool operator==(const TallTile&) const = default;
};

// Those with lists of tiles, for as many thread blocks as run at one time, and those with a thread block, or
// a cluster, for each tile.
inline constexpr TallTile kListedTallTiles[] = {{128, 256, 64}, {64, 512, 32}};
// The smallest comes first: of those that are predicted to take as long it is chosen.
inline constexpr TallTile kSingleTallTiles[] = {{64, 64, 128},  {64, 64, 64},  {64, 128, 128},
                                                {64, 128, 64},  {64, 256, 64}, {128, 64, 128},
                                                {128, 128, 64}, {128, 256, 64}};
constexpr std::span<const TallTile> tall_tiles(bool single) {
  if (single) return kSingleTallTiles;
  return kListedTallTiles;
}

}  // namespace rarefy::sm90
