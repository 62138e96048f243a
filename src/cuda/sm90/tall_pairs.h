// Tiles of two block rows of 64 in the weight gradient of tall vectors: rows that store equally much. W's
// columns are cut into windows; of what a window's two rows store, columns of the first row alone lie first,
// then those of both, then those of the second: each row's are side by side, and those of both are gathered
// from X once.
#pragma once

#include <cstdint>

#include "cuda/sm90/host_device.h"

namespace rarefy::sm90 {

// Where the plan has things, in words: the block rows by falling number of columns, and how many columns all
// rows before one have; of each two of them how many clusters' tiles there are and what one gathers; of each
// window where its columns begin and which they are (PairColumns); the columns; and for each of them where
// the results of the first row go in the values, and those of the second.
struct TallPairs {
  static constexpr int kMostGathered = 512;  // by a tile
  static constexpr int kLeastColumns = 128;  // of a row's part of a tile, at most so many or more
  static constexpr int kMostCols = 1 << 16;  // of W: bits of two rows and sums before them, 40 KB
  static constexpr std::int64_t kMostRows = (1 << 15) - 1, kMostBlocks = 1 << 30;
  std::int64_t count = 0;  // pairs
  std::int64_t rows_at = 0, pairs_at = 0, windows_at = 0, columns_at = 0, targets_at = 0, room = 0, words = 0;

  TallPairs() = default;
  TallPairs(std::int64_t block_rows, std::int64_t blocks, std::int64_t begin)
      : count((block_rows + 1) / 2),
        rows_at((begin + 3) / 4 * 4),
        pairs_at(rows_at + 4 * count),
        windows_at(pairs_at + 2 * count),
        columns_at(windows_at + 2 * first_window(blocks, count)),
        targets_at(columns_at + first_column(blocks, count)),
        room(first_column(blocks, count)),
        words(targets_at + 2 * room) {}

  // A pair's first window and place in the columns, from what the rows before it store. A window whose rows
  // may have `columns` holds columns - 71 entries or more, as it begins at multiples of 32 columns and the
  // first row's end in eights; so a pair has no more than entries / 57 + 3 windows.
  RAREFY_HOST_DEVICE static std::int64_t first_window(std::int64_t entries, std::int64_t pair) {
    return entries / 32 + 8 * pair;
  }
  RAREFY_HOST_DEVICE static std::int64_t first_column(std::int64_t entries, std::int64_t pair) {
    return entries + entries / 4 + 64 * pair;
  }
  // Tiles of clusters, at most.
  static std::int64_t most(std::int64_t block_rows, std::int64_t blocks, int columns, int cluster) {
    return blocks / ((columns - 71) * cluster) + 3 * ((block_rows + 1) / 2);
  }
};

// The two block rows of a pair, as a tile's first word has them.
struct PairRows {
  RAREFY_HOST_DEVICE static int word(int first, int second) { return first | second << 16; }
  RAREFY_HOST_DEVICE static int row(int word, int which) { return word >> 16 * which & 0xFFFF; }
};

// A window's columns: of the first row alone (in eights, the last one filled up), of both, of the second.
struct PairColumns {
  int first, both, second;
  RAREFY_HOST_DEVICE PairColumns(int of_first, int of_both, int of_second)
      : first(of_first), both(of_both), second(of_second) {}
  RAREFY_HOST_DEVICE explicit PairColumns(int word)
      : first(word & 0x3FF), both(word >> 10 & 0x3FF), second(word >> 20) {}
  RAREFY_HOST_DEVICE int word() const { return first | both << 10 | second << 20; }
  RAREFY_HOST_DEVICE int all() const { return first + both + second; }
};

}  // namespace rarefy::sm90
