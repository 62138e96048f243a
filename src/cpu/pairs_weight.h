// What drivers of products in bf16 pairs share (linear_pairs.cc, feed_forward_pairs.cc): the shape of a
// product, what is derived from its weight, and the walk over output blocks and panels that meet.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/pairs.h"

namespace rarefy::cpu {

inline constexpr std::int64_t kStored = 64;  // outputs finished at a time, of blocks that have less than 32
// Panels that share weights in L1: more, where their sums do not wait there for each other.
inline constexpr std::int64_t kNear = 8, kNearSums = 4;

// The product seen as out = W · in, for which the problem is enough, in groups of 16 lines: pairs of
// features, or fours of int8. Where block rows are no tiles, an output block has all columns that any of
// those stores which it meets: several whole ones, part of one, or parts of several. Sizes are in units of
// 16 bits.
struct GroupedShape {
  std::int64_t line;  // features of a line
  std::int64_t out_blocks, red_blocks, out_block, red_block;
  std::int64_t entries;
  std::int64_t outputs, rows, row_block;  // outputs that there are; block rows, and outputs of each
  std::int64_t padded;  // features of a panel: those of the last line are 0, for groups that are not full
  PairSource source;
  bool dense = false;  // an output block that stores anything has all groups

  // Each block row alone.
  GroupedShape(const BsrShape& s, std::int64_t features, bool transposed)
      : line(features),
        red_blocks(s.col_count()),
        red_block(s.block_cols),
        entries(s.nnzb),
        outputs(transposed ? s.cols : s.rows),
        rows(s.row_count()),
        row_block(s.block_rows) {
    if (transposed) {
      std::swap(rows, red_blocks);
      std::swap(row_block, red_block);
    }
    cut_outputs(row_block);
    padded = ceil_div(red_blocks * red_block, line) * line + line;
  }
  // Output blocks of so many, wherever block rows begin and end.
  void cut_outputs(std::int64_t count) {
    out_block = count;
    out_blocks = ceil_div(outputs, count);
  }
  // The block rows that an output block meets.
  std::int64_t first_row(std::int64_t o) const { return o * out_block / row_block; }
  std::int64_t stop_row(std::int64_t o) const {
    return std::min(ceil_div((o + 1) * out_block, row_block), rows);
  }
  // Whether it may have columns that not all of its outputs store.
  bool mixed() const { return row_block % out_block != 0; }

  std::int64_t group() const { return kGroup / 2 * line; }
  std::int64_t out_features() const { return out_blocks * out_block; }
  // At most: each output block's last group may hold a single column; joined rows may have none in common.
  std::int64_t groups() const {
    if (dense) return out_blocks * (padded / group());
    const std::int64_t met = out_block % row_block == 0 ? 1  // output blocks by a block row
                             : mixed()                  ? ceil_div(row_block - 1, out_block) + 1
                                                        : row_block / out_block;
    const std::int64_t listed = entries * met;
    const std::int64_t apart = (listed * red_block + (group() - 1) * std::min(out_blocks, listed)) / group();
    return std::min(apart, out_blocks * ceil_div(red_blocks * red_block, group()));
  }
  double density() const {
    return static_cast<double>(entries) / static_cast<double>(std::max<std::int64_t>(1, rows * red_blocks));
  }
  // The part of all columns that an output block has, if blocks lie at random.
  double stored() const {
    const auto met = static_cast<double>(out_block + row_block - std::gcd(out_block, row_block)) /
                     static_cast<double>(row_block);  // block rows by an output block, on average
    return 1 - std::pow(1 - density(), met);
  }
  // Tiles of 16 outputs × a group to multiply.
  double tiles() const {
    return (dense ? 1 : stored()) * static_cast<double>(out_features() * red_blocks * red_block) /
           static_cast<double>(kTileRows * group());
  }
  std::int64_t offsets() const { return offsets_of(source, static_cast<std::int32_t>(line)); }  // of a group
  std::int64_t step() const { return group() / offsets(); }  // features between two of them
  // Where a feature lies in a panel, and a panel's size.
  std::int64_t place(std::int64_t feature) const { return feature * 2 * kPanelTokens / line; }
  std::int64_t panel_size() const { return place(padded); }
  std::int64_t tiles_size() const { return out_block * kGroup; }  // of one group
  std::int64_t tiles_bytes() const { return groups() * tiles_size() * std::int64_t{sizeof(std::uint16_t)}; }
};

struct PairsShape : GroupedShape {
  bool by_line;  // as PairKernels has it

  PairsShape(const PairKernels& kernels, const BsrShape& s, bool transposed = false)
      : GroupedShape(s, 2, transposed), by_line(kernels.by_line) {
    if (row_block % kTileRows != 0) {
      cut_outputs(kernels.rows >= kTileRows ? kernels.rows : row_block % 8 == 0 ? 8 : 4);
    }
    const bool by_token = kernels.by_token && !mixed() && out_block % kGroup == 0;
    source = red_block % kGroup == 0 ? by_token ? PairSource::tokens : PairSource::whole
             : red_block % 2 == 0    ? PairSource::lines
                                     : PairSource::columns;
  }
  PairsShape(const PairKernels& kernels, const Problem& p)
      : PairsShape(kernels, p.weight.shape, p.op == Op::grad_input) {}

  // Output blocks that are finished at a time; panels that share weights; the floats of the sums of one.
  std::int64_t finished() const { return out_block < 32 ? kStored / out_block : 1; }
  std::int64_t near() const { return finished() == 1 ? kNear : kNearSums; }
  bool by_token() const { return source == PairSource::tokens; }
  std::int64_t sums_size() const { return finished() * out_block * kPanelTokens; }
};

// Inputs and values that are bf16, or may be rounded to it on their way into a panel.
inline Reason takes_pairs(const Problem& p, const WeightSpec& w) {
  const DType wanted = w.rounds_x && p.op != Op::grad_input && p.in == DType::f32 ? DType::f32 : DType::bf16;
  if (w.dtype == DType::bf16 && p.in == wanted && p.out == wanted) return {};
  return "takes bf16 inputs and values, to bf16; f32, to f32, for inputs that may be rounded";
}

// Blocks of few rows have products of nearly all columns, which take half as long each as those of floats, a
// fifth on tiles: so they gain where much is stored (768→3072, 512 tokens, CSR, a Zen 4 at .5 17.4 → 10.8 ms,
// at .25 9.7 → 8.2, at .1 4.4 → 4.3; AMX at .5 12.4 → 2.7, at .3 8.3 → 2.5). grad_input packs values in each
// call, which fewer than four columns pay for on tiles alone, with many tokens and rows (AMX, 8×1 at .5 and
// .25 17.8 and 11.9 → 10.7 and 7.1 ms, 4×1 17.2 and 8.8 → 16.2 and 9.5, CSR 20 → 37; a Zen 4, 2×2 13.8
// → 16.8).
inline Reason takes_rows(const PairKernels& kernels, const GroupedShape& s, Op op, std::int64_t tokens) {
  constexpr std::int64_t kManyTokens = 256, kManyRows = 8;
  const bool tiles = kernels.rows >= kTileRows;
  const bool tall = s.row_block == 1 && s.red_block % kTileRows == 0;  // grad_input_pairs.cc has these
  const bool many = tiles && !tall && s.red_block >= kManyRows && tokens >= kManyTokens;
  if (op == Op::grad_input && s.row_block < 4 && !many) {
    return cat(
        "takes blocks of at least 4 columns",
        tiles ? cat(", or ", kManyRows, " rows and ", kManyTokens, " tokens, no multiple of 16 in a column")
              : "",
        "; got ", s.red_block, 'x', s.row_block, " and ", tokens);
  }
  const std::int64_t least = tiles ? 4 : 2, all = s.rows * s.red_blocks;
  if (s.row_block >= least || 5 * s.entries >= all) return {};
  return cat("takes blocks of at least ", least, " outputs, or a fifth of all; got ", s.row_block, " and ",
             s.entries, " of ", all);
}

// Tier 2: groups before each output block, the lines that its columns fill, and the offsets of every group.
struct Prepared {
  std::int32_t* first;
  std::int32_t* lines;
  std::uint32_t* offsets;
  std::int64_t bytes;

  Prepared(const GroupedShape& s, const void* data) {
    Room room(const_cast<void*>(data));
    first = room.take<std::int32_t>(s.out_blocks + 1);
    lines = room.take<std::int32_t>(s.out_blocks);
    offsets = room.take<std::uint32_t>(s.groups() * s.offsets());
    bytes = room.bytes();
  }
};

inline std::int32_t panel_rows(std::int64_t tokens, std::int64_t from) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(kPanelTokens, tokens - from));
}

// Bytes after which W is asked for where it comes from memory: between the lines of x the hardware loses its
// stream. One thread of a Zen 5, 4096² at .5, ms of 5 and 512 tokens: 4×1 1.9 → 1.3, 29
// → 20.6, 8×8 1.0 → .85, 22 → 18; out of L3 or L2 it would cost 4×1 10 %.
inline constexpr std::int32_t kAskedAhead = 6144;

// What is stored, by block rows of `out`.
struct PairsStored {
  SparseOperand w;
  const std::int32_t* begin;  // the entries of each block row
};

inline constexpr std::int64_t kMostJoined = 32;  // block rows

// Calls visit(column) for the block columns that block rows first … last store, ascending; `begin` says where
// the columns of each are listed.
template <class F>
void for_each_column(const std::int32_t* begin, const std::int32_t* columns, std::int64_t first,
                     std::int64_t last, F&& visit) {
  std::int32_t next[kMostJoined];
  std::copy(begin + first, begin + last, next);
  constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
  const auto column = [&](std::int64_t row) {
    const std::int32_t entry = next[row - first];
    return entry < begin[row + 1] ? columns[entry] : kNone;
  };
  for (;;) {
    std::int32_t least = kNone;
    for (std::int64_t row = first; row < last; ++row) least = std::min(least, column(row));
    if (least == kNone) return;
    visit(std::int64_t{least});
    for (std::int64_t row = first; row < last; ++row) next[row - first] += column(row) == least ? 1 : 0;
  }
}

// The outputs that a block row and an output block have in common: `count`, from one of the row's on, which
// is the output block's `top`.
struct RowPart {
  std::int64_t from, top, count;

  RowPart(const GroupedShape& s, std::int64_t o, std::int64_t row) {
    const std::int64_t first = std::max(o * s.out_block, row * s.row_block);
    const std::int64_t stop = std::min((o + 1) * s.out_block, (row + 1) * s.row_block);
    from = first - row * s.row_block;
    top = first - o * s.out_block;
    count = stop - first;
  }
};

// `begin` says where the columns of each block row are listed.
void prepare_groups(const GroupedShape& s, const std::int32_t* begin, const std::int32_t* columns,
                    void* data);
void pack_pairs(const PairsShape& s, const PairsStored& stored, const Executor& executor, const void* data,
                void* packed);

// Tokens of panels that hold NaN or infinity, a bit each. Where rows are joined, a tile multiplies a column
// by zeros for the rows that do not store it, which such a token must not reach.
void find_unfinished(const PairKernels& kernels, const PairsShape& shape, const std::uint16_t* panels,
                     std::int64_t panel_stride, std::int64_t tokens, std::uint32_t* unfinished);

// Calls f, which must outlive it.
template <class F>
PairDone done_by(F& f) {
  return {[](void* context, std::int32_t panel, std::int32_t row, std::int32_t rows, float* sums) {
            (*static_cast<F*>(context))(panel, row, rows, sums);
          },
          &f};
}

// Panels of so many tokens that share a block row's weights in L1; one that is half empty, alone.
inline std::int64_t near_panels(std::int64_t tokens, std::int64_t most) {
  return std::clamp<std::int64_t>((tokens + kPanelTokens / 2 - 1) / kPanelTokens, 1, most);
}

// Where the panels of a product lie, and what a task has beside them.
struct PairsRoom {
  const std::uint16_t* panels;
  std::int64_t panel_stride;
  std::uint16_t* gathered;
  float* sums;
};

// Bytes of W that half of an L2 with AMX beside it keeps from one set of panels to the next, so that they are
// asked for ahead in the first set alone. Asked for again they cost 32×32 at .1 7 % (768→3072 .48 → .45 ms).
inline constexpr std::int64_t kKeptNear = std::int64_t{1} << 20;

// Output blocks first … last, for `tokens`, by a kernel that takes them all. As soon as sums are there of
// some outputs for one panel, finish(token, rows, output, count, sums); outputs are those of one block where
// block rows are joined. `again`: this thread had other tokens of them just before.
template <class Finish>
void multiply_range(void (*range)(const PairRange&), const GroupedShape& shape, const Prepared& prepared,
                    const std::uint16_t* tiles, const PairsRoom& room, std::int64_t first, std::int64_t last,
                    std::int64_t tokens, bool again, Finish&& finish) {
  if (first == last) return;
  const std::int32_t from = prepared.first[first];
  std::int64_t m = 0;
  auto done = [&](std::int32_t p, std::int32_t row, std::int32_t count, float* sums) {
    const std::int64_t token = m + p * kPanelTokens;
    finish(token, panel_rows(tokens, token), first * shape.out_block + row, count, sums);
  };
  while (m < tokens) {
    const std::int64_t near = near_panels(tokens - m, kNear);
    range({tiles + from * shape.tiles_size(), prepared.offsets + from * shape.offsets(),
           prepared.first + first, static_cast<std::int32_t>(last - first),
           static_cast<std::int32_t>(shape.out_block), shape.source,
           panel_rows(tokens, m) > kPanelTokens / 2 ? 2 : 1, static_cast<std::int32_t>(near),
           room.panels + m / kPanelTokens * room.panel_stride, room.panel_stride, room.gathered, room.sums,
           done_by(done), !again || shape.tiles_bytes() > kKeptNear});
    again = true;
    m += near * kPanelTokens;
  }
}

// A weight as kernels multiply it.
struct PairsWeight {
  const PairKernels& kernels;
  PairsShape shape;
  PairsStored stored;
  Prepared prepared;
  const std::uint16_t* packed;
  bool again = false;  // as of PanelTasks::Task

  PairsWeight(const PairKernels& k, const PairsShape& s, const PairsStored& what, const Derived& derived)
      : kernels(k),
        shape(s),
        stored(what),
        prepared(s, derived.prepared),
        packed(static_cast<const std::uint16_t*>(derived.packed)) {}

  // The first output block of a part of them. Writing a feature costs as much as some 12 stored elements.
  std::int32_t begin_of(std::int64_t part, std::int64_t parts) const {
    return begin_of_part(prepared.first, shape.out_blocks, kGroup, 12, part, parts);
  }

  // For `multiply` to finish with: rows of `out` from token `first` on.
  auto storing(const MutableMatrixView& out, std::int64_t first, const float* bias,
               Activation activation) const {
    return [=, this](std::int64_t m, std::int32_t rows, std::int64_t from, std::int64_t count,
                     const float* sums) {
      kernels.store({sums, shape.by_token(), bias + from, activation, at(out, first + m, from),
                     out.dtype == DType::f32, out.row_stride, rows,
                     static_cast<std::int32_t>(std::min(count, out.cols - from))});
    };
  }

  // Sums of some tokens of a panel anew, over what is stored alone.
  void sum_stored(std::int64_t block, const std::uint16_t* panel, std::uint32_t tokens, float* sums) const;
  // The same of those that find_unfinished found, where rows are joined.
  void sum_unfinished(std::int64_t block, const std::uint16_t* panel, std::uint32_t tokens,
                      float* sums) const {
    if (shape.mixed() && tokens != 0) sum_stored(block, panel, tokens, sums);
  }

  // Output blocks first … last for some tokens, whose panels lie `panel_stride` apart. As soon as sums are
  // there, finish(token, rows, output, count, sums) gets those of some outputs for one panel. `sums` has room
  // for sums_size of near() panels, or of all.
  template <class Finish>
  void multiply(const std::uint16_t* panels, std::int64_t panel_stride, std::int64_t tokens,
                const std::uint32_t* unfinished, std::int64_t first, std::int64_t last,
                std::uint16_t* gathered, float* sums, Finish&& finish) const {
    if (kernels.range != nullptr) {
      return multiply_range(
          kernels.range, shape, prepared, packed, {panels, panel_stride, gathered, sums}, first, last, tokens,
          again,
          [&](std::int64_t token, std::int32_t rows, std::int64_t output, std::int64_t count, float* to) {
            const std::int64_t p = token / kPanelTokens;
            sum_unfinished(output / shape.out_block, panels + p * panel_stride, unfinished[p], to);
            finish(token, rows, output, count, to);
          });
    }
    for (std::int64_t o = first; o < last; o += shape.finished()) {
      const std::int64_t end = std::min(o + shape.finished(), last);
      for (std::int64_t m = 0; m < tokens;) {
        const std::int64_t near = near_panels(tokens - m, shape.near());
        const std::uint16_t* x = panels + m / kPanelTokens * panel_stride;
        const auto fix = [&](std::int64_t block, std::int64_t p, float* to) {
          sum_unfinished(block, x + p * panel_stride, unfinished[m / kPanelTokens + p], to);
        };
        const std::int64_t outputs = (end - o) * shape.out_block;
        const auto finish_panel = [&](std::int64_t p, std::int64_t row, std::int64_t rows, float* to) {
          const std::int64_t token = m + p * kPanelTokens, output = o * shape.out_block + row;
          finish(token, panel_rows(tokens, token), output, rows, to);
        };
        auto at_once = [&](std::int32_t p, std::int32_t row, std::int32_t rows, float* to) {
          fix(o, p, to);
          finish_panel(p, row, rows, to);
        };
        for (std::int64_t block = o; block < end; ++block) {
          const std::int32_t from = prepared.first[block];
          float* to = sums + (block - o) * shape.out_block * kPanelTokens;
          kernels.multiply({packed + from * shape.tiles_size(), prepared.offsets + from * shape.offsets(),
                            shape.source, prepared.first[block + 1] - from, prepared.lines[block],
                            static_cast<std::int32_t>(shape.out_block),
                            panel_rows(tokens, m) > kPanelTokens / 2 ? 2 : 1, static_cast<std::int32_t>(near),
                            x, panel_stride, gathered, to, shape.sums_size(),
                            shape.finished() == 1 ? done_by(at_once) : PairDone{},
                            static_cast<double>(shape.tiles_bytes()) > kFromMemory ? kAskedAhead : 0});
          for (std::int64_t p = 0; shape.finished() > 1 && p < near; ++p) {
            fix(block, p, to + p * shape.sums_size());
          }
        }
        for (std::int64_t p = 0; shape.finished() > 1 && p < near; ++p) {
          finish_panel(p, 0, outputs, sums + p * shape.sums_size());
        }
        m += near * kPanelTokens;
      }
    }
  }
};

// A bias as floats, 0 where there is none; −0 becomes +0, as if it were added to sums that start at 0.
inline void unpack_pairs_bias(const void* bias, DType dtype, std::int64_t count, std::int64_t padded,
                              float* to) {
  std::fill_n(to, padded, 0.0F);
  for (std::int64_t n = 0; bias != nullptr && n < count; ++n) {
    to[n] += dtype == DType::f32 ? static_cast<const float*>(bias)[n]
                                 : to_float(static_cast<const bfloat16*>(bias)[n]);
  }
}

// Row-major X, rounded if it is f32, to the panels of its tokens first … first + tokens.
inline void pack_panels(const PairKernels& kernels, const PairsShape& shape, const MatrixView& x,
                        std::int64_t first, std::int64_t tokens, std::uint16_t* panels,
                        std::int64_t panel_stride) {
  for (std::int64_t m = 0; m < tokens; m += kPanelTokens) {
    kernels.pack({at(x, first + m, 0), x.dtype == DType::f32, x.row_stride, panel_rows(tokens, m),
                  static_cast<std::int32_t>(x.cols), static_cast<std::int32_t>(shape.padded),
                  order_of(shape.source), panels + m / kPanelTokens * panel_stride});
  }
}

}  // namespace rarefy::cpu
