// The contract between the ISA-independent drivers (linear.cc, grad_weight.cc) and the kernels that
// are compiled once per instruction set. Plain structs only: a translation unit built with -mavx512f
// includes nothing that could leave an AVX-512 copy of a shared inline function in the program.
//
// Kernels work on packed panels: `lanes` = vectors · width tokens, feature-major, float:
// element (feature f, token m) of a panel is at panel[f * lanes + m]. 16-bit storage is converted
// when a panel is packed and when it is stored, so every product accumulates in float.
#pragma once

#include <cstdint>

#include "core/stored_row.h"
#include "rarefy/activation.h"

namespace rarefy::cpu {

enum class Storage : std::uint8_t { f32, bf16, f16, i8 };  // i8: W for a few tokens (few.h)

// Rows of a matrix: `rows` × `cols` elements from `data`.
struct RowBlock {
  const void* data;
  std::int64_t row_stride;  // elements; by feature, from one column to the next
  std::int32_t rows;
  std::int32_t cols;
  Storage storage;
  bool by_feature = false;  // a column's elements are neighbours, not a row's
};

// Writes `cols` features of `lanes` tokens; tokens past `rows` are 0.
struct PackTask {
  RowBlock from;
  float* panel;
  std::int32_t lanes;
};

// Writes a panel back: y[m][n] = act(panel[n][m]). The panel is working memory.
struct StoreTask {
  float* panel;
  std::int32_t lanes;
  Activation activation;
  void* data;
  std::int64_t row_stride;  // as in RowBlock
  std::int32_t rows;
  std::int32_t cols;
  Storage storage;
  bool by_feature = false;
};

// The sparse operand as one product sees it: W for linear, Wᵀ for grad_input. Entry e multiplies
// reduction block index[e] by the stored block at `position(e)`, whose element (o, i), o along the
// output, is at o * out_stride + i * red_stride.
struct SparseOperand {
  const std::int32_t* index;
  const std::int32_t* perm;  // position of entry e; null: e itself
  const void* values;
  Storage storage;
  std::int64_t block_size;
  std::int64_t out_stride, red_stride;
  std::int32_t out_block, red_block;
  bool asks_x = true;  // gather, blocks of one reduction feature: for lines of x that it reads soon
};

// Long sums are kept in parts, each added to a total when it is full: their error grows with the length of a
// part. A part is so many entries of its output block, counted from the first one, and the last part up to
// half as many more: the same in every kernel, however the work is cut. 288 leaves the rows of 768 inputs at
// a density of 0.5 whole; beyond, parts cost 2–3 % of a product (128 terms: 5 %), in scatter up to 6 %.
inline constexpr std::int32_t kPartTerms = 288;
// Up to kFewTokens tokens a dense product (MKL's on Intel) adds up in 16 lanes and more: there parts are
// short.
inline constexpr std::int32_t kFewPartTerms = 24;
static constexpr std::int32_t part_entries(std::int32_t red_block, std::int32_t terms = kPartTerms) {
  return red_block < terms ? terms / red_block : 1;
}
// What must be left of a row for another part to begin.
static constexpr std::int32_t least_entries(std::int32_t part) { return (part + 1) / 2; }

// y[o] = start[o] + Σ over entries of W[o, i] · x[i], for output blocks begin … end: accumulators of a
// few output features stay in registers while the entries stream by ("output stationary").
struct GatherTask {
  SparseOperand w;
  const std::int32_t* entry_begin;  // indexed by output block
  const std::int32_t* entry_end;
  std::int32_t begin, end;
  const float* x;  // panel of reduction features, from block x_first on
  std::int32_t x_first;
  float* y;            // panel of output features, from block `begin` on
  const float* start;  // of the output features from block `begin` on; null: y itself is the start
  std::int32_t vectors;
  float* unpacked;          // room for max(kUnpacked, block_size) floats, if storage is 16-bit
  std::int32_t part;        // entries of a part of a sum
  const std::int32_t* row;  // where the entries of each output block begin; the next one's is the end
  float* total;             // full parts of the sums of block `begin`; the next one's are total_step further
  std::int64_t total_step;  // 0 where rows are complete: there the place serves one after the other
};

inline constexpr std::int64_t kUnpacked = 4096;  // floats: with x and y slices it still fits in L1

// A part of the sums of one output block that is full before a certain reduction block.
struct FullPart {
  std::int32_t out;
  std::int32_t first;  // 1: of its output block
};

// gather of whole rows in floats, blocks of a multiple of 4 outputs, whose sums go to rows of Y along the way
// (woven.h), a group of outputs at a time: a cache line of each row.
inline constexpr int kWovenGroup = 16;
struct WovenTask {
  SparseOperand w;
  const std::int32_t* row;  // where the entries of each output block begin; the next one's is the end
  std::int32_t begin, end;
  const float* x;      // panel of all reduction features
  const float* start;  // of the output features from block `begin` on
  std::int32_t vectors;
  std::int32_t part;  // entries of a part of a sum
  float* sums;        // room for two groups of outputs
  Activation activation;
  float* y;  // the first token's, from block `begin` on
  std::int64_t row_stride;
  std::int32_t tokens;
  std::int32_t cols;  // outputs that exist
  bool streams;       // W comes from memory
};

// Rows of whole cache lines, of which somebody will read each one soon.
struct Lines {
  const char* first = nullptr;
  std::int64_t row_bytes = 0;  // from one row to the next
  std::int32_t rows = 0;
  std::int32_t lines = 0;  // of a row
};

// The transposed order, for blocks flatter than a register tile: a few reduction features stay in
// registers and y is updated in place ("input stationary"). Entries are listed by reduction block.
struct ScatterTask {
  SparseOperand w;                  // index[e] is the output block here
  const std::int32_t* entry_begin;  // indexed by reduction block
  const std::int32_t* entry_end;
  std::int32_t begin, end;  // reduction blocks
  const float* x;           // panel of reduction features, from block `begin` on
  float* y;                 // panel of output features, from block y_first on
  std::int32_t y_first;
  std::int32_t vectors;
  float* unpacked;    // as in GatherTask
  std::int32_t part;  // entries of a part of a sum
  // Into `parts`, indexed by reduction block; null if no row has several.
  const std::int32_t* full_begin = nullptr;
  const std::int32_t* full_end = nullptr;
  const FullPart* parts = nullptr;
  float* total = nullptr;  // like y
  Lines next = {};  // what will be packed for the next reduction blocks: L2 is asked for it, a few at a time
  // With the last reduction blocks: output blocks from y_first on, now complete, and where their rows begin.
  std::int32_t complete = 0;
  const std::int32_t* row = nullptr;
};

// What one row of blocks stores in one tile of X, or a part of that (pieces.h).
struct Piece {
  std::int32_t begin;  // entry
  std::uint16_t row;   // of its range
  std::uint16_t count : 15;
  std::uint16_t second : 1;  // behind the first full part of its sum
};
// What it takes of the columns: they begin at multiples of four.
inline constexpr std::int64_t padded_columns(Piece piece) { return (piece.count + 3) / 4 * 4; }

// y[o] += Σ over entries of pieces of W[o, i] · x[i], for blocks of 1 or 2 outputs × 1 or 2. Before pieces
// from `after` on, a part of their rows' sums is full and goes to the total.
struct PiecesTask {
  const std::uint16_t* columns;  // reduction blocks of the tile, piece by piece, each padded
  const float* values;           // [entry][output][reduction]
  std::int32_t out_block, red_block;
  const Piece *piece, *after, *end;  // both lists with the longest first; kPiecesAhead more can be read
  const float* x;                    // panel of the tile
  float* y;                          // panel of the range
  float* total;
  int vectors;
};
inline constexpr int kPiecesAhead = 8;

// Lists the pieces of some rows of W at each tile of X, and returns where they end (piece_lists.h). Of a
// tile: two lists, each sorted by length, the longest first, and their columns.
struct PieceListTask {
  const std::int32_t* begin;  // of each row, and the end
  const std::int32_t* index;  // of all of W
  std::int64_t rows, entries;
  std::int64_t tiles;
  std::int32_t columns, part;   // of a tile; entries of a part of a sum
  std::int32_t at, columns_at;  // where pieces go, and their columns, in fours
  std::int32_t* lists;          // of each tile: begin, after, end, where columns begin
  Piece* pieces;
  std::uint16_t* to;  // 12 behind a piece's padded columns can be written
};
inline constexpr std::int64_t kPieceLists = 4;
inline constexpr std::int64_t kMostPieceRows = 1024;           // bounds scratch on the stack
inline constexpr std::int64_t kMostPieceColumns = kPartTerms;  // so that a piece meets one part's end at most

// Which lines of W a kernel for a few tokens asks for, beside those that the processor's prefetchers find.
enum class Ask : std::uint8_t {
  far,   // into L1, long before they are read
  near,  // into L1, shortly before
  l2,    // into L2, long before
  nothing,
};

// y[m][o] += Σ over entries of W[o, i] · x[m][i] for 1, 2 or 4 tokens, row-major in and out, and for the
// block shapes that few_takes names (few.h); for 8 where FewKernels::takes_eight says so.
template <class T>
struct FewTaskOf {
  SparseOperand w;                  // in canonical order
  std::int32_t entries;             // of all of W
  const std::int32_t* entry_begin;  // indexed by output block; the next one's is the end
  std::int32_t begin, end;
  const T* x;  // padded to whole blocks; of four tokens by column (few.h) [column][token]
  std::int64_t x_stride;
  std::int32_t tokens;
  T* y;  // from block `begin` on, padded to whole blocks
  std::int64_t y_stride;
  bool stream;  // W comes from memory: single elements then take x otherwise (few_singles.h)
  const std::uint16_t* columns = nullptr;  // of single elements, with room for kColumnsAhead more; or null
  bool by_column = false;                  // x of four tokens, of R×1 blocks and single elements
  Ask ask = Ask::far;
  bool turned = false;  // few_turned.h; x of four tokens as its `turn` has it, of eight twice x_stride apart
};
using FewTask = FewTaskOf<float>;

// Bytes of W that a last level keeps between calls, as processors tell that of all their cores.
inline constexpr std::int64_t kCached = 16 << 20;

inline constexpr std::int64_t kFewTokens = 4, kFewEight = 8;
inline constexpr std::int64_t kFewByFours = 16;  // in groups of these
inline constexpr std::int32_t kColumnsAhead = 16;

// Whether four tokens of R×1 blocks go by few_quads (few_fours.h): of four blocks to a vector, or eight of
// two rows; of two, where 16 registers hold no more.
constexpr bool few_quads_takes(std::int64_t rows, int width, int registers) {
  return 4 * rows == width || (rows == 2 && width == 16) || (2 * rows == width && registers < 32);
}

// Whether vectors of so many elements are filled by blocks, alone or several together, in whole rows or whole
// columns of them.
constexpr bool few_fills(std::int64_t width, std::int64_t block_rows, std::int64_t block_cols) {
  const std::int64_t size = block_rows * block_cols;
  if (size < width) return width % size == 0;
  return size % width == 0 && (block_cols % width == 0 || width % block_cols == 0);
}

// Of others those whose last vector is not full (Spread::edge): blocks of one column, and small ones of few
// columns, whose x is put in order for each vector and token. Zen 4, 768→3072 at .5, µs of one / four tokens
// so and row by row (few_ragged.h), as all others go: 6×2 181 / 431 and 571 / 992, 12×3 in bf16 121 / 380 and
// 199 / 400; 6×6 204 / 900 and 210 / 429, 4×12 163 / 883 and 123 / 288.
inline constexpr std::int64_t kMostEdge = 1024;  // rows, or elements of what is put in order
constexpr bool few_has_edges(std::int64_t block_rows, std::int64_t block_cols) {
  if (block_cols == 1) return block_rows <= kMostEdge;
  return block_cols <= 4 && block_rows >= 3 && block_rows * block_cols <= 64;
}
constexpr bool few_is_ragged(std::int64_t width, std::int64_t block_rows, std::int64_t block_cols) {
  return block_cols > 1 && !few_fills(width, block_rows, block_cols) &&
         !few_has_edges(block_rows, block_cols);
}

// Single elements by a few tokens, 16 rows (a group) at a time (windows.h). A step: of which rows it takes
// the next element, and the window of columns that these lie in.
inline constexpr std::int32_t kWindowRows = 16, kWindowColumns = 64, kWindowGrain = 16;
inline constexpr std::int32_t kWindowLeast = 5;  // elements a step, on average, of groups that have steps
inline constexpr std::int64_t kWindowRoom = 16;  // values and columns that can be read past the last
struct WindowStep {
  std::uint16_t rows;
  std::uint16_t window;  // its first column / kWindowGrain
};
// The rows of a group in a pattern.
struct WindowGroup {
  std::int32_t begin[kWindowRows], end[kWindowRows];
  std::int32_t room;  // for steps
};

// y[m][o] += Σ of W[o, i] · x[m][i] for 1, 2 or 4 tokens and groups begin … end, all of which have steps.
struct WindowsTask {
  const float* values;          // in the order of the steps, as columns
  const std::uint8_t* columns;  // from the step's window on
  const WindowStep* steps;
  const std::int32_t* step_begin;  // of each group; the next one's is the end
  const std::int32_t* row_begin;
  std::int64_t begin, end;
  const float* x;  // kWindowColumns can be read from any grain's first on
  std::int64_t x_stride;
  std::int32_t tokens;
  float* y;  // from group `begin` on
  std::int64_t y_stride;
};

// y[m][row] += Σ over a tile's columns of W[row, k] · x[m][k], for rows of a bitmap and 1, 2, 4 or 8 tokens,
// or of one with two of each four and 1, 2 or 4 (bitmap.h). x is 0 past the last column.
struct BitmapTask {
  const void* values;
  Storage storage;
  std::int64_t count;        // of all values: nothing is read past them
  const std::uint8_t* bits;  // or positions; of the first row, from the tile's first column on
  std::int64_t row_bytes;
  std::int32_t rows;
  std::int32_t* at;         // where each row's values of this tile begin; then of the next tile
  const std::int32_t* end;  // where all of its values end
  const float* x;           // from the tile's first column on
  std::int64_t x_stride;
  std::int32_t columns;  // whole vectors; of two of four, of what is stored
  std::int64_t ahead;    // bytes of W from what is read to what is asked for
  Ask ask;
  std::int32_t tokens;
  float* y;
  std::int64_t y_stride;
};

// y[n][m] = act(Σ over entries of W[n, k] · x[k][m] + bias[n]), X and Y by feature.
template <class T>
struct InPlaceTaskOf {
  SparseOperand w;  // in canonical order
  const std::int32_t* entry_begin;
  std::int32_t begin, end;  // block rows
  const T* x;
  std::int64_t x_stride;
  std::int64_t rows, columns;  // of W: the last blocks may reach beyond
  std::int64_t tokens;
  T* y;  // from block row `begin` on
  std::int64_t y_stride;
  const T* bias;  // the same, or null
  Activation activation;
  std::int32_t part;  // entries of a part of a sum
};
using InPlaceTask = InPlaceTaskOf<float>;

// out[r][c] (+)= Σ_m dy[r][m] · x[c][m] for the stored blocks `begin` … `end` of one block row.
// Here panels are long: `lanes` tokens of one feature are contiguous. In strips.h dy is [tokens][R], at most
// kStripTokens of them, and x for each block column [lanes][C], but where C is 1.
template <class T>
struct DotTaskOf {
  const T* dy;              // panel rows of this block row
  const T* x;               // panel of all input features
  std::int64_t lanes;       // a multiple of the width
  std::int64_t tokens;      // of them, those that there are
  const std::int32_t* col;  // block column of each stored block
  std::int32_t begin, end;
  std::int32_t block_rows, block_cols;
  T* out;  // block `begin` on, canonical order
  bool accumulate;
  Lines next = {};  // strips.h: of dY, what is copied for the next task; L2 is asked for it, a few at a time
};
using DotTask = DotTaskOf<float>;

// Tokens of a sum of strips.h before it is added to the others: their part of dY stays in L1.
inline constexpr std::int64_t kStripTokens = 128;

// What one instruction set offers. A row of this table is all the drivers know of it.
struct Kernels {
  const char* family;
  std::int32_t width;               // floats in a vector
  std::int32_t max_vectors;         // widest panel of gather and scatter
  std::int32_t registers;           // vector registers
  std::int32_t tokens_of_lane = 1;  // in the panels of dot: 2 where bf16 is multiplied in pairs
  void (*pack)(const PackTask&);
  void (*store)(const StoreTask&);
  void (*gather)(const GatherTask&);
  void (*woven)(const WovenTask&);  // or null
  // The same for some panels of one vector, where `takes` says so; or null.
  void (*narrow)(const WovenTask&);
  bool (*narrow_takes)(const WovenTask&);
  void (*scatter)(const ScatterTask&);
  void (*pieces)(const PiecesTask&);
  std::int32_t (*list_pieces)(const PieceListTask&);
  void (*dot)(const DotTask&);
  void (*strips)(const DotTask&);  // or null
  // As FewKernels::takes, for feed_forward.cc, which has this table alone; or null.
  bool (*few_takes)(std::int64_t block_rows, std::int64_t block_cols);
  void (*in_place)(const InPlaceTask&);
  std::int32_t in_place_least;  // tokens
  void (*bitmap)(const BitmapTask&);
  void (*two_of_four)(const BitmapTask&);
  void (*activate)(Activation activation, float* values, std::int64_t count);  // whole vectors
  // values ← act(gate) · values, on whole vectors
  void (*apply_gate)(Activation activation, const float* gate, float* values, std::int64_t count);
  void (*unpack)(Storage from, const void* values, std::int64_t count, float* to);
  void (*round)(Storage to, const float* values, std::int64_t count, void* out);
  void (*softmax)(const StoredRow& row, const float* from, float* to);  // softmax.h
  // digits.h: a digit of whole numbers, 0 the lowest; and three rows of their sums and the bias as one, which
  // begins with those of the highest.
  void (*digit)(const float* x, std::int64_t count, float up, int digit, float* to);
  void (*join_digits)(const float* low, const float* middle, const float* bias, std::int64_t count, float* y);
};

// The same, and how what it reads is made (simd/avx512_windows.h).
struct WindowKernels {
  void (*multiply)(const WindowsTask&);
  std::int32_t (*make_steps)(const WindowGroup& group, const std::int32_t* col, std::int64_t cols,
                             WindowStep* steps, std::uint8_t* columns);
  void (*take_values)(const WindowGroup& group, const WindowStep* steps, std::int32_t count,
                      const float* values, float* to);
};

// linear for a few tokens. `pairs`: x and W in bf16 stay as they are. Of blocks with pairs of columns a task
// counts pairs then, as if those were floats; x_stride is in pairs anyway.
struct FewKernels {
  const char* family;
  const Kernels& rows;  // of floats: x, bias and y
  void (*multiply)(const FewTask&);
  bool (*takes)(std::int64_t block_rows, std::int64_t block_cols);
  bool pairs;
  void (*ragged)(const FewTask&) = nullptr;  // blocks that few_is_ragged names
  void (*turn)(const float* x, std::int64_t stride, std::int64_t columns, float* to) = nullptr;
  const WindowKernels* windows = nullptr;
  bool (*takes_eight)(std::int64_t block_size, std::int64_t columns, bool turned) = nullptr;
};

void few_ragged_avx2(const FewTask& task);
void few_ragged_avx512(const FewTask& task);

// Whether few_turned.h takes blocks of so many elements and columns, or pairs of them: vectors in fours. (Of
// four columns they are as fast in few.h, or up to a tenth faster.)
constexpr bool few_turns(std::int64_t block_size, std::int64_t columns) {
  if (columns % 16 == 0) return block_size / columns % 4 == 0;
  return columns == 8 && block_size % 64 == 0;
}

extern const Kernels kScalar;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kDotsBf16;  // dot alone
extern const FewKernels kFewAvx2;
extern const FewKernels kFewAvx512;
extern const FewKernels kFewBf16;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

}  // namespace rarefy::cpu
