// What a tile of the tall kernel costs, for the host's prediction and for the lists that the device makes.
#pragma once

#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

// Clocks of a tile with this many stored columns: gathered bytes arrive slower than boxes, 36 a clock
// (docs/design/hopper/tall.md). A step of 64 columns of 128 rows and 256 tokens is 48 KB, one of 32 columns
// of 64 rows and 512 tokens 36 KB. One without columns waits for its own way out.
RAREFY_HOST_DEVICE inline int tall_clocks(int rows, int columns) {
  const int bytes = rows == 128 ? 768 : 1152;  // of a column
  const int clocks = 1500 + (columns + (rows == 128 ? 32 : 16)) * bytes / 36;
  return clocks > kEmptyClocks ? clocks : kEmptyClocks;
}

}  // namespace rarefy::sm90
