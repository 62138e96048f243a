// What a tile of the tall kernel costs, for the host's prediction and for the lists that the device makes.
#pragma once

#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

// Clocks of a tile with this many stored columns (docs/design/hopper/tall.md): gathered bytes, of 128 rows
// and 256 tokens 768 a column at 36 a clock, of 64 rows and 512 tokens 1152 at 40; 16 columns are multiplied
// at a time. One without columns waits for its own way out.
RAREFY_HOST_DEVICE inline int tall_clocks(int rows, int columns) {
  const int clocks = 2400 + (rows == 128 ? (columns + 8) * 64 / 3 : (columns + 8) * 57 / 2);
  return clocks > kEmptyClocks ? clocks : kEmptyClocks;
}

}  // namespace rarefy::sm90
