// Which thread blocks of a cluster add a tile's sums up, where each has a part of its steps: host and device.
#pragma once

#include "cuda/sm90/host_device.h"

namespace rarefy::sm90 {

// How many of `split`, 2 to 4, have a share of the tokens: whole 64s, all of them or the first.
RAREFY_HOST_DEVICE constexpr int owners_of(int tokens, int split) {
  return tokens < 128 ? 1 : split == 4 && tokens >= 256 ? 4 : 2;
}

}  // namespace rarefy::sm90
