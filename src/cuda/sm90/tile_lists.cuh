// Lists of tiles (strip_walk.h) on the device: how one is made, and how a thread block walks its own.
#pragma once

#include <cstdint>

#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

// How many groups cost more than twice the mean; they lie by falling cost. More than an eighth of all groups
// is no exception (half of the rows are empty, say), and X would be read twice for it: none. By one warp.
template <class Clocks>
__device__ inline int heavy_groups(int groups, Clocks clocks_of_group) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t sum = 0;
  for (int g = lane; g < groups; g += 32) sum += clocks_of_group(g);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  int heavy = 0;
  for (int g = lane; g < groups; g += 32)
    heavy += std::int64_t{clocks_of_group(g)} * groups > 2 * sum ? 1 : 0;
  heavy = __reduce_add_sync(~0u, heavy);
  return 8 * heavy > groups ? 0 : heavy;
}

// Makes the list of a level's items in their order; called by one warp. clocks_of(StripTile): what it costs.
template <class Order, class Clocks>
__device__ inline void make_list(const StripLists& lists, const Order& order, int2* items,
                                 Clocks clocks_of_tile) {
  using u32 = std::uint32_t;
  constexpr int kMine = kMostClusters / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto clocks_of = [&](int item) { return item >= order.items ? 0 : clocks_of_tile(order.tile(item)); };
  u32 load[kMine];  // of cluster lane + 32i: clocks / 16, and its number in the last 8 bits
  int last[kMine];  // its latest item
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int c = lane + 32 * i;
    load[i] = c < lists.clusters ? static_cast<u32>(clocks_of(c) / 16) << 8 | static_cast<u32>(c) : ~0u;
    last[i] = c < lists.clusters && c < order.items ? c : -1;
  }
  for (int item = lane; item < order.items; item += 32) items[item].x = pack_tile(order.tile(item));
  int clocks = clocks_of(lists.clusters + lane);
#pragma unroll 1
  for (int item = lists.clusters; item < order.items; item += 32) {
    const u32 adds = static_cast<u32>(clocks / 16) << 8;
    clocks = clocks_of(item + 32 + lane);
#pragma unroll 1
    for (int j = 0; j < 32 && item + j < order.items; ++j) {
      const u32 add = __shfl_sync(~0u, adds, j);
      u32 least = load[0];
#pragma unroll
      for (int i = 1; i < kMine; ++i) least = min(least, load[i]);
      least = __reduce_min_sync(~0u, least);
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (load[i] != least) continue;
        load[i] += add;
        items[last[i]].y = item + j;
        last[i] = item + j;
      }
    }
    u32 least = load[0];
#pragma unroll
    for (int i = 1; i < kMine; ++i) least = min(least, load[i]);
    least = __reduce_min_sync(~0u, least) & ~0xFFu;
#pragma unroll
    for (int i = 0; i < kMine; ++i) load[i] -= load[i] == ~0u ? 0 : least;  // differences count
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (last[i] >= 0) items[last[i]].y = -1;
  }
}

// The lists that a launch walks.
struct TileLists {
  const int2* items;  // of all
  int clusters, levels, token_tiles;
  int begin[StripLists::kMostLevels], count[StripLists::kMostLevels];  // items of a level
  int rest[StripLists::kMostLevels];                                   // count modulo clusters

  TileLists() = default;
  TileLists(const StripLists& lists, const std::int32_t* words, int tiles)
      : items(reinterpret_cast<const int2*>(words)),
        clusters(lists.clusters),
        levels(lists.levels()),
        token_tiles(tiles) {
    for (int level = 0; level < levels; ++level) {
      begin[level] = lists.begin(level);
      count[level] = StripOrder(lists.groups, 0, lists.size, 1 << level, clusters).items;
      rest[level] = count[level] % clusters;
    }
  }
};

// Loads whose results the compiler takes for different in each lane: it would move what is the same in all to
// uniform registers at once, and wait for it there, long before it is wanted.
__device__ inline int2 load_ahead(const int2* p) {
  int2 v;
  asm volatile("ld.global.nc.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ inline int4 load_ahead(const int4* p) {
  int4 v;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// A cluster's items: those of a list, then those of the next. Where a list begins, clusters change places, so
// that small lists do not all go to the first ones.
struct TileCursor {
  int level = 0, first_token_tile = 0, token_tiles = 0, turn = 0;  // of the list, and behind it
  int2 item{0, -1}, ahead{0, -1};

  __device__ bool next(const TileLists& p, int cluster) {  // false: there is none
    int at = item.y;
    if (at >= 0) {
      item = ahead;
    } else {
      while (at < 0) {
        first_token_tile = token_tiles;
        if (first_token_tile == p.token_tiles) return false;
        level = min(p.levels, 32 - __clz(p.token_tiles - first_token_tile)) - 1;
        token_tiles += 1 << level;
        const int place = cluster - turn + (cluster < turn ? p.clusters : 0);
        turn += p.rest[level];
        if (turn >= p.clusters) turn -= p.clusters;
        if (place < p.count[level]) at = place;
      }
      item = load_ahead(p.items + p.begin[level] + at);
    }
    if (item.y >= 0) ahead = load_ahead(p.items + p.begin[level] + item.y);
    return true;
  }
};

}  // namespace rarefy::sm90
