// Which thread block (or cluster) works on which tiles: a list for each, made once per pattern and number of
// tokens. A static list costs no atomics and gives the same order in every run.
#pragma once

#include <cstdint>
#include <vector>

namespace rarefy::sm90 {

struct Tile {
  int group, token_tile;  // of rows, of tokens
};

struct Schedule {
  std::vector<std::vector<Tile>> lists;
  double clocks = 0;  // of the longest
};

// Gives each tile to the worker that would be free first, in the order given, but the last two rounds by
// falling cost, so that all end together. `clocks` is the cost of a tile of each group.
Schedule assign(std::vector<Tile> tiles, const std::vector<double>& clocks, std::int64_t workers);

// All tiles in the order in which they should start: token tiles outermost, so that those running at one time
// share X, within chunks of groups whose part of W, of w_bytes in all, stays in L2. Groups are sorted by
// falling cost.
std::vector<Tile> tile_order(std::int64_t groups, std::int64_t token_tiles, std::int64_t w_bytes);

// The lists' lengths as prefix sums, padded to a multiple of 32 words.
void append_ranges(const Schedule& schedule, std::vector<std::int32_t>& words);
void pad_to_line(std::vector<std::int32_t>& words);

}  // namespace rarefy::sm90
