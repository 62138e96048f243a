// Few tiles in parts, host side: where a launch has fewer tiles than SMs, the thread blocks of a cluster have
// a part of a tile's steps each and add their sums (tile/exchange.cuh, docs/design/hopper/batches.md).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/owners.h"

namespace rarefy::sm90 {

// What adding the sums of a tile's parts takes, of so many times 64 rows; by default 4 us with 64 tokens, 9
// to 12 with 256.
struct Exchange {
  double clocks = 5000, each = 20;  // in any case, and for each token and 64 rows
  double more = 0;                  // for each part beyond two
  double operator()(std::int64_t tokens, int strips, int parts = 2) const {
    return clocks + each * strips * static_cast<double>(std::min<std::int64_t>(tokens, 256)) +
           more * (parts - 2);
  }
};

// Clusters of so many thread blocks that run at one time: each lies in one GPC, which has 16 to 18 SMs, so
// that four times 32 do not on 132, nor three times 40 (three times 33 do).
constexpr int clusters_at_once(int sms, int size) { return size > 2 ? sms * 9 / (11 * size) : sms / size; }

// Thread blocks of a cluster that had better have a part of each tile, so that few tiles keep more SMs at
// work: 1 to 4, by clocks(parts) of a part and of adding the sums.
template <class Clocks>
int best_parts(std::int64_t tiles, int sms, Clocks&& clocks) {
  int best = 1;
  double least = clocks(1);
  for (int parts = 2; parts <= 4 && tiles <= clusters_at_once(sms, parts); ++parts) {
    if (const double its = clocks(parts); its < least) best = parts, least = its;
  }
  return best;
}

// The same of a configuration, by clocks(its), whatever the unit.
template <class Config, class Clocks>
int best_parts_of(Config config, std::int64_t tiles, int sms, Clocks&& clocks) {
  return best_parts(tiles, sms, [&](int parts) {
    config.split = parts;
    return clocks(config);
  });
}

// Whether there may be so many parts, whose sums go where steps were in flight. To add them each of two or
// four owners has the others' of a share of the tokens for a thread block of `strips` times 64 rows: tiles of
// 192 tokens have no parts.
inline bool parts_fit(int split, int tokens, int strips, int ring_bytes) {
  if (split == 1) return true;
  if (split < 1 || split > 4) return false;
  const int share = tokens / owners_of(tokens, split);
  return share % 64 == 0 && (split - 1) * share * strips * 64 * 4 <= ring_bytes;
}

}  // namespace rarefy::sm90
