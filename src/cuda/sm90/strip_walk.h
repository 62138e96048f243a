// The order in which the strip kernel works on tiles, and what it reads of a pattern: shared by the kernels
// that make it, the one that walks it, and tests on the host.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/sm90/host_device.h"

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

// A tile's zeros on their way out, with nothing beside them.
inline constexpr int kEmptyClocks = 4000;

// What a tile costs, in clocks of an SM: products of 64 × 64 × 256, or bytes of X and W from L2, and some
// 4,000 around them, as far as those of several tiles do not overlap: 4096² with b=128 takes 41.8, 23.5 and
// 11.1 thousand a tile at .5, .25 and .1.
RAREFY_HOST_DEVICE inline int strip_clocks(int steps, int blocks) {
  const int multiply = blocks * 512 + steps * 60, copy = steps * 780 + blocks * 195;
  return kEmptyClocks + (multiply > copy ? multiply : copy);
}

// The items of some token tiles: tiles, the last ones cut into strips if these fill no more than a round of
// all clusters.
struct TileItems {
  int tiles, size, cut_from, items;  // size: strips of a group

  RAREFY_HOST_DEVICE TileItems(int groups, int group_size, int token_tiles, int clusters)
      : tiles(groups * token_tiles), size(group_size) {
    const int rest = tiles % clusters;
    const bool cut = rest * size <= clusters;
    cut_from = cut ? tiles - rest : tiles;
    items = cut_from + (cut ? rest * size : 0);
  }
};

// The order in which tiles should start: each group's evenly over the time that it has, which ends a tile
// before the end, and a fifth more for what was predicted too short. So groups that cost alike go token tile
// by token tile, and those running at one time share X; one that costs more is ahead of the others by its own
// time. (All of its tokens first, and X is read twice: .7 of the speed with one dense row at .1.) Groups lie
// by falling cost.
struct TilePace {
  int groups, token_tiles;

  // Of a group's tiles, in parts of what they would start apart if they cost nothing.
  static constexpr int kOne = 1 << 20;
  RAREFY_HOST_DEVICE static int pace(double total, double clocks) {
    const double left = total - 1.2 * clocks;
    return left > 0 ? static_cast<int>(left / total * kOne) : 0;
  }

  // How many tiles start before this one: of those that start together, the dearest first.
  template <class PaceOf>
  RAREFY_HOST_DEVICE int place(int group, int token_tile, PaceOf pace_of) const {
    const int start = token_tile * pace_of(group);
    int before = token_tile;  // of its own group
    for (int g = 0; g < groups; ++g) {
      if (g == group) continue;
      const int until = g < group ? start + 1 : start, its = pace_of(g);
      const int count = its > 0 ? (until + its - 1) / its : until > 0 ? token_tiles : 0;
      before += count < token_tiles ? count : token_tiles;
    }
    return before;
  }
};

struct StripTile {
  int group, token_tile;
  int part;  // of the group's strips this one alone; -1: all
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

// Which list comes where so many token tiles are left: the longest that has no more, or, of few, the shortest
// that has them all, whose other tiles are left out. Three token tiles of 32 groups are one round of 132
// clusters as part of four, and two as two and one.
struct ListChoice {
  static constexpr int kFew = 32;
  std::uint32_t all = 0;      // bit n: of n that are left, n < kFew
  double whole = 0, cut = 0;  // rounds of a launch: of tiles, and of the last ones cut into strips

  ListChoice() = default;
  ListChoice(const StripLists& lists, int token_tiles) {
    struct Rounds {
      double whole = 0, cut = 0;
      // A strip alone multiplies half or a third, but brings all of X.
      double cost() const { return whole + 0.75 * cut; }
      Rounds operator+(const Rounds& b) const { return {whole + b.whole, cut + b.cut}; }
    };
    const auto of_list = [&](int level) {
      const TileItems its(lists.groups, lists.size, 1 << level, lists.clusters);
      const double rounds = static_cast<double>(its.tiles) / lists.clusters;
      if (lists.size > 1 && its.cut_from < its.tiles) return Rounds{std::floor(rounds), 1};
      return Rounds{rounds > 1 ? (rounds + std::ceil(rounds)) / 2 : 1, 0};  // ends even out, in part
    };
    const int levels = lists.levels();
    const auto longest = [&](int left) {
      int level = 0;
      while (level + 1 < levels && 2 << level <= left) ++level;
      return level;
    };
    Rounds sum, best[kFew];
    int left = token_tiles;
    for (; left >= kFew; left -= 1 << longest(left)) sum = sum + of_list(longest(left));
    for (int n = 1; n <= left; ++n) {
      const int level = longest(n);
      best[n] = of_list(level) + best[n - (1 << level)];
      if (n == 1 << level || level + 1 == levels) continue;
      if (const Rounds one = of_list(level + 1); one.cost() < best[n].cost()) best[n] = one, all |= 1U << n;
    }
    sum = sum + best[left];
    whole = sum.whole, cut = sum.cut;
  }
};

// Words for the columns of members that are put into groups: rows of 16 bytes, aligned.
constexpr std::int64_t group_words(std::int64_t members, std::int64_t words) {
  return members * ((words + 3) / 4 * 4) + 3;
}

// An item of a list: group | token tile << 16 | (part + 1) << 24, and the next one or -1.
RAREFY_HOST_DEVICE inline int pack_tile(const StripTile& t) {
  return t.group | t.token_tile << 16 | (t.part + 1) << 24;
}
RAREFY_HOST_DEVICE inline StripTile unpack_tile(int word) {
  return {word & 0xFFFF, word >> 16 & 0xFF, (word >> 24) - 1};
}

}  // namespace rarefy::sm90
