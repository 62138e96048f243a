// Lists of tiles (strip_walk.h) on the device: how one is made, and how a thread block walks its own.
#pragma once

#include <cstdint>

#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

inline constexpr int kListThreads = 1024;

// Writes a level's items in the order in which they should start (TilePace), but the last `falling` tiles by
// falling cost, so that what is left at the end is small. Says how many there are. By kListThreads threads.
template <class Clocks>
__device__ inline int order_tiles(const StripLists& lists, int level, int2* items, int falling,
                                  Clocks clocks_of_group) {
  __shared__ int pace[4 * kMostClusters];  // with more groups there is the list of one token tile alone
  __shared__ int last[kMostClusters];
  __shared__ double sums[kListThreads / 32];
  const int self = static_cast<int>(threadIdx.x), token_tiles = 1 << level;
  const TileItems its(lists.groups, lists.size, token_tiles, lists.clusters);
  const auto tile_of = [&](int index) { return StripTile{index / token_tiles, index % token_tiles, -1}; };
  const auto put = [&](int place, StripTile tile) {
    if (place < its.cut_from) {
      items[place].x = pack_tile(tile);
      return;
    }
    const int at = its.cut_from + (place - its.cut_from) * its.size;
    for (tile.part = 0; tile.part < its.size; ++tile.part) items[at + tile.part].x = pack_tile(tile);
  };
  if (level == 0) {
    for (int i = self; i < its.tiles; i += kListThreads) put(i, tile_of(i));
    __syncthreads();
    return its.items;
  }
  double total = 0;
  for (int g = self; g < lists.groups; g += kListThreads) total += clocks_of_group(g);
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
  if (self % 32 == 0) sums[self / 32] = total;
  __syncthreads();
  total = 0;
  for (const double sum : sums) total += sum * token_tiles / lists.clusters;
  for (int g = self; g < lists.groups; g += kListThreads) pace[g] = TilePace::pace(total, clocks_of_group(g));
  __syncthreads();
  const TilePace order{lists.groups, token_tiles};
  const int falling_from = max(0, its.tiles - falling);
  for (int i = self; i < its.tiles; i += kListThreads) {
    const StripTile tile = tile_of(i);
    const int place = order.place(tile.group, tile.token_tile, [&](int g) { return pace[g]; });
    if (place < falling_from) {
      put(place, tile);
    } else {
      last[place - falling_from] = i;
    }
  }
  __syncthreads();
  for (int i = self; i < its.tiles - falling_from; i += kListThreads) {
    int before = 0;
    for (int j = 0; j < its.tiles - falling_from; ++j) before += last[j] < last[i] ? 1 : 0;
    put(falling_from + before, tile_of(last[i]));
  }
  __syncthreads();
  return its.items;
}

// Makes a list of items, which lie in their order; by one warp. clocks_of(StripTile): what it costs.
template <class Clocks>
__device__ inline void make_list(int2* items, int count, int clusters, Clocks clocks_of_tile) {
  using u32 = std::uint32_t;
  constexpr int kMine = kMostClusters / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto clocks_of = [&](int item) {
    return item >= count ? 0 : clocks_of_tile(unpack_tile(items[item].x));
  };
  u32 load[kMine];  // of cluster lane + 32i: clocks / 16, and its number in the last 8 bits
  int last[kMine];  // its latest item
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int c = lane + 32 * i;
    load[i] = c < clusters ? static_cast<u32>(clocks_of(c) / 16) << 8 | static_cast<u32>(c) : ~0u;
    last[i] = c < clusters && c < count ? c : -1;
  }
  int clocks = clocks_of(clusters + lane);
#pragma unroll 1
  for (int item = clusters; item < count; item += 32) {
    const u32 adds = static_cast<u32>(clocks / 16) << 8;
    clocks = clocks_of(item + 32 + lane);
#pragma unroll 1
    for (int j = 0; j < 32 && item + j < count; ++j) {
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
  std::uint32_t all;                                                   // ListChoice
  bool from_last = false;                                              // token_order.h
  int begin[StripLists::kMostLevels], count[StripLists::kMostLevels];  // items of a level
  int rest[StripLists::kMostLevels];                                   // count modulo clusters

  TileLists() = default;
  TileLists(const StripLists& lists, const std::int32_t* words, int tiles)
      : items(reinterpret_cast<const int2*>(words)),
        clusters(lists.clusters),
        levels(lists.levels()),
        token_tiles(tiles),
        all(ListChoice(lists, tiles).all) {
    for (int level = 0; level < levels; ++level) {
      begin[level] = lists.begin(level);
      count[level] = TileItems(lists.groups, lists.size, 1 << level, clusters).items;
      rest[level] = count[level] % clusters;
    }
  }
  // The token tile of X that is nth.
  __device__ int token_tile(int nth) const { return from_last ? token_tiles - 1 - nth : nth; }
  // The list for so many that are left.
  __device__ int level_for(int left) const {
    const int longest = min(levels, 32 - __clz(left)) - 1;
    return left < ListChoice::kFew && (all >> left & 1) != 0 ? longest + 1 : longest;
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

  // The next tile of those that there are; false: there is none.
  __device__ bool next(const TileLists& p, int cluster) {
    bool more = next_item(p, cluster);
    while (more && nth() >= p.token_tiles) more = next_item(p, cluster);
    return more;
  }
  __device__ int nth() const { return first_token_tile + unpack_tile(item.x).token_tile; }

  __device__ bool next_item(const TileLists& p, int cluster) {  // false: there is none
    int at = item.y;
    if (at >= 0) {
      item = ahead;
    } else {
      while (at < 0) {
        first_token_tile = token_tiles;
        if (first_token_tile >= p.token_tiles) return false;
        level = p.level_for(p.token_tiles - first_token_tile);
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
