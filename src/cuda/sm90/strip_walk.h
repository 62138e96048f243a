// The order in which the strip kernel works on tiles, and what it reads of a pattern: shared by the kernels
// that make it, the one that walks it, and tests on the host.
#pragma once

#ifdef __CUDACC__
#define RAREFY_HOST_DEVICE __host__ __device__
#else
#define RAREFY_HOST_DEVICE
#endif

namespace rarefy::sm90 {

inline constexpr int kMostGroup = 3;
inline constexpr int kMostClusters = 160;  // that share the work: a multiple of 32, no more than 256

// 32 bytes of the plan. The steps of group g begin at step g · columns; each is four words. For the strip
// kernel: a 64-wide column that one of the strips stores, and the 64 × 64 block of each strip there, or -1.
struct alignas(16) StripGroup {
  int steps;
  int strip[kMostGroup];   // -1: none
  int blocks[kMostGroup];  // steps in which the strip stores one
  int clocks;              // what a tile costs
};

// What a tile costs, in clocks of an SM: products of 64 × 64 × 256, or bytes of X and W from L2, and some
// 4,000 around them, as far as those of several tiles do not overlap: 4096² with b=128 takes 41.8, 23.5 and
// 11.1 thousand a tile at .5, .25 and .1.
RAREFY_HOST_DEVICE inline int strip_clocks(int steps, int blocks) {
  const int multiply = blocks * 512 + steps * 60, copy = steps * 780 + blocks * 195;
  return 4000 + (multiply > copy ? multiply : copy);
}

struct StripTile {
  int group, token_tile;
  int part;  // of the group's strips this one alone; -1: all
};

// The items of some token tiles, in the order in which they should start: tiles, the last ones cut into
// strips if these fill no more than a round of all clusters. Groups lie by falling cost. Token tile by token
// tile, so that those running at one time share X; but those of the last round by falling cost, so that what
// is left at the end is small. (Of the last three rounds X was read three times: up to 1.5 times as long.)
// Groups that cost much more than the others, `heavy` ones, come first with all of their tokens: begun later,
// they would end alone; two rounds then even out what they leave.
struct StripOrder {
  int groups, heavy, size;  // size: strips of a group
  int token_tiles, falling, cut_from, items;

  RAREFY_HOST_DEVICE StripOrder(int group_count, int heavy_groups, int group_size, int tiles_of_tokens,
                                int clusters)
      : groups(group_count), heavy(heavy_groups), size(group_size), token_tiles(tiles_of_tokens) {
    const int tiles = groups * token_tiles, rest = tiles % clusters,
              round = ((heavy > 0 ? 2 : 1) * clusters + groups - 1) / groups;
    const bool cut = rest * size <= clusters;
    falling = round < token_tiles ? round : token_tiles;
    cut_from = cut ? tiles - rest : tiles;
    items = cut_from + (cut ? rest * size : 0);
  }

  RAREFY_HOST_DEVICE StripTile tile(int item) const {
    int part = -1;
    if (item >= cut_from) {
      part = (item - cut_from) % size;
      item = cut_from + (item - cut_from) / size;
    }
    if (item < heavy * token_tiles) return {item / token_tiles, item % token_tiles, part};
    item -= heavy * token_tiles;
    const int first = token_tiles - falling, others = groups - heavy;
    if (item < first * others) return {heavy + item % others, item / others, part};
    item -= first * others;
    return {heavy + item / falling, first + item % falling, part};
  }
};

// Which cluster works on which items, for 1, 2, 4 … token tiles: any number is a sum of them. Each item goes
// to the cluster that would be free first, item c < clusters to cluster c; a list says for each which is its
// cluster's next one. A list has room for the items of its token tiles, cut or not.
struct StripLists {
  static constexpr int kMostLevels = 7;
  int groups, size, clusters;
  RAREFY_HOST_DEVICE int levels() const {  // up to four rounds of items, or a little more
    int n = 1;
    while (n < kMostLevels && static_cast<long long>(groups) << (n - 1) < 4 * clusters) ++n;
    return n;
  }
  RAREFY_HOST_DEVICE int begin(int level) const {
    return groups * ((1 << level) - 1) + level * (size - 1) * clusters;
  }
};

// An item of a list: group | token tile << 16 | (part + 1) << 24, and the next one or -1.
RAREFY_HOST_DEVICE inline int pack_tile(const StripTile& t) {
  return t.group | t.token_tile << 16 | (t.part + 1) << 24;
}
RAREFY_HOST_DEVICE inline StripTile unpack_tile(int word) {
  return {word & 0xFFFF, word >> 16 & 0xFF, (word >> 24) - 1};
}

}  // namespace rarefy::sm90
