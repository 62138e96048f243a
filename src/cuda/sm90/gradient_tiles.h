// How stored panels of rows become tiles of the weight gradient: shared by the kernels that find them, the
// host's prediction, and tests.
#pragma once

#include "cuda/sm90/host_device.h"

namespace rarefy::sm90 {

// A tile has four quarters: 64 rows × 128 features of X each, two of a warpgroup. A row is what tiles are cut
// from: one strip of 64 rows of W, or two (`two`) that store the same columns; a column is a panel of `wide`
// features of X that is stored there. With panels narrower than 64 a strip is two units (RowUnits).
struct TileShape {
  int wide;           // 64, 32 or 16
  bool two, pairs;    // pairs: what is left of two rows may be one tile
  bool even = false;  // each row's tiles are of one width, and nothing is left
  int most = 0;       // columns of a tile; 0: as many as it has room for

  RAREFY_HOST_DEVICE int strips() const { return two ? 2 : 1; }
  RAREFY_HOST_DEVICE int units() const { return 2 * strips(); }  // RowUnits
  RAREFY_HOST_DEVICE int per_quarter() const { return 128 / wide; }
  RAREFY_HOST_DEVICE int columns() const {  // of a whole tile
    return most > 0 ? most : 4 / strips() * per_quarter();
  }
  RAREFY_HOST_DEVICE int quarters(int count) const {
    return (count + per_quarter() - 1) / per_quarter() * strips();
  }
  // A step has no more bytes than that of a whole tile of one strip: its panels and one of dY.
  RAREFY_HOST_DEVICE bool fit(int a, int b) const {
    return pairs && quarters(a) + quarters(b) <= 4 && a + b <= columns() - (two ? 0 : 64 / wide);
  }
};

inline constexpr int kMostColumns = 32;  // of a tile

// Units of 32 rows of W. Strips are made of those that store anything, two each, in their order, so that rows
// that store nothing cost nothing; a strip's units may lie apart. Behind the last one come others, beyond W.
struct RowUnits {
  static constexpr int kHigh = 32;
  int block_rows, block_row_count;

  RAREFY_HOST_DEVICE int count() const { return (block_row_count * block_rows + kHigh - 1) / kHigh; }
  // Block rows that share rows with a unit: from first on, before end. Beyond W: none.
  RAREFY_HOST_DEVICE int first(int unit) const { return least(unit * kHigh / block_rows); }
  RAREFY_HOST_DEVICE int end(int unit) const { return least((unit * kHigh + kHigh - 1) / block_rows + 1); }

 private:
  RAREFY_HOST_DEVICE int least(int block_row) const {
    return block_row < block_row_count ? block_row : block_row_count;
  }
};

// What is left of rows after whole tiles, left[w] times w columns, as tiles: emit(w, v, n) stands for n tiles
// of w columns of one row and v ≤ w of another (0: of none), until it returns true. Widest first, each with
// the widest that fits. Counts go down.
template <class Emit>
RAREFY_HOST_DEVICE inline void pair_rests(const TileShape& shape, int (&left)[kMostColumns], Emit&& emit) {
  for (int w = shape.columns() - 1; w > 0; --w) {
    while (left[w] > 0) {
      int v = w;
      while (v > 0 && !(shape.fit(w, v) && left[v] > (v == w ? 1 : 0))) --v;
      int n = left[w];
      if (v == w) n /= 2;
      if (v > 0 && v < w && left[v] < n) n = left[v];
      if (emit(w, v, n)) return;
      left[w] -= n;
      if (v > 0) left[v] -= n;
    }
  }
}

}  // namespace rarefy::sm90
