// What a tile of the tall kernel costs, for the host's prediction and for the lists that the device makes.
#pragma once

#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

// Clocks of a tile with this many stored columns: gathered bytes arrive slower than boxes, 36 a clock
// (docs/design/hopper/tall.md). A step of 64 columns of 128 rows and 256 tokens is 48 KB, one of 32 columns
// of 64 rows and 512 tokens 36 KB.
RAREFY_HOST_DEVICE inline int tall_clocks(int rows, int columns) {
  const int bytes = rows == 128 ? 768 : 1152;  // of a column
  return 1500 + (columns + (rows == 128 ? 32 : 16)) * bytes / 36;
}

// The items of some token tiles in the order in which they should start. Groups lie by falling cost. Token
// tile by token tile up to the end: columns of X are gathered, and want to be in L2. Heavy groups first, as
// in StripOrder.
struct TallOrder {
  int groups, heavy, token_tiles, items;

  RAREFY_HOST_DEVICE TallOrder(int group_count, int heavy_groups, int tiles_of_tokens)
      : groups(group_count),
        heavy(heavy_groups),
        token_tiles(tiles_of_tokens),
        items(group_count * tiles_of_tokens) {}

  RAREFY_HOST_DEVICE StripTile tile(int item) const {
    if (item < heavy * token_tiles) return {item / token_tiles, item % token_tiles, -1};
    item -= heavy * token_tiles;
    const int others = groups - heavy;
    return {heavy + item % others, item / others, -1};
  }
};

}  // namespace rarefy::sm90
