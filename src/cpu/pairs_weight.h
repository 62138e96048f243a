// What drivers of products in bf16 pairs share (linear_pairs.cc, feed_forward_pairs.cc): the shape of a
// product, what is derived from its weight, and the walk over output blocks and panels that meet.
#pragma once

#include <algorithm>

#include "cpu/drivers.h"
#include "cpu/pairs.h"

namespace rarefy::cpu {

inline constexpr std::int64_t kStored = 64;  // outputs finished at a time: two cache lines of a token
inline constexpr std::int64_t kNear = 4;     // panels that share weights in L1: their sums take 32 KB

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The product seen as out = W · in, for which the problem is enough.
struct PairsShape {
  std::int64_t out_blocks, red_blocks, out_block, red_block;
  std::int64_t entries;
  std::int64_t padded;  // features of a panel: the last two are 0, for groups that are not full
  PairSource source;

  explicit PairsShape(const BsrShape& s, bool transposed = false)
      : out_blocks(s.row_count()),
        red_blocks(s.col_count()),
        out_block(s.block_rows),
        red_block(s.block_cols),
        entries(s.nnzb) {
    if (transposed) {
      std::swap(out_blocks, red_blocks);
      std::swap(out_block, red_block);
    }
    source = red_block % kGroup == 0 ? PairSource::whole
             : red_block % 2 == 0    ? PairSource::lines
                                     : PairSource::columns;
    padded = ceil_div(red_blocks * red_block, 2) * 2 + 2;
  }
  explicit PairsShape(const Problem& p) : PairsShape(p.weight.shape, p.op == Op::grad_input) {}

  std::int64_t out_features() const { return out_blocks * out_block; }
  // At most: each block row's last group may hold a single column.
  std::int64_t groups() const {
    return (entries * red_block + (kGroup - 1) * std::min(out_blocks, entries)) / kGroup;
  }
  std::int64_t groups_of(std::int64_t blocks) const { return ceil_div(blocks * red_block, kGroup); }
  std::int64_t panel_size() const { return padded * kPanelTokens; }
  std::int64_t tiles_size() const { return out_block * kGroup; }  // of one group
  std::int64_t tiles_bytes() const { return groups() * tiles_size() * std::int64_t{sizeof(std::uint16_t)}; }
  // Output blocks that are finished at a time, and the floats of their sums for one panel.
  std::int64_t finished() const { return std::max<std::int64_t>(1, kStored / out_block); }
  std::int64_t sums_size() const { return finished() * out_block * kPanelTokens; }
};

// Tier 2: groups before each block row, and the offsets of every group.
struct Prepared {
  std::int32_t* first;
  std::uint32_t* offsets;
  std::int64_t bytes;

  Prepared(const PairsShape& s, const void* data) {
    Room room(const_cast<void*>(data));
    first = room.take<std::int32_t>(s.out_blocks + 1);
    offsets = room.take<std::uint32_t>(s.groups() * offsets_of(s.source));
    bytes = room.bytes();
  }
};

inline std::int32_t panel_rows(std::int64_t tokens, std::int64_t from) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(kPanelTokens, tokens - from));
}

// A weight as kernels multiply it.
struct PairsWeight {
  const PairKernels& kernels;
  PairsShape shape;
  const std::int32_t* begin;  // the entries of each output block
  Prepared prepared;
  const std::uint16_t* packed;

  PairsWeight(const PairKernels& k, const PairsShape& s, const std::int32_t* entries, const Derived& derived)
      : kernels(k),
        shape(s),
        begin(entries),
        prepared(s, derived.prepared),
        packed(static_cast<const std::uint16_t*>(derived.packed)) {}

  // Output blocks first … last for some tokens, whose panels lie `panel_stride` apart. As soon as sums are
  // there, finish(token, rows, block, end, sums) gets those of blocks block … end for one panel. `sums` has
  // room for sums_size of kNear panels, or of all.
  template <class Finish>
  void multiply(const std::uint16_t* panels, std::int64_t panel_stride, std::int64_t tokens,
                std::int64_t first, std::int64_t last, std::uint16_t* gathered, float* sums,
                Finish&& finish) const {
    for (std::int64_t o = first; o < last; o += shape.finished()) {
      const std::int64_t end = std::min(o + shape.finished(), last);
      for (std::int64_t m = 0; m < tokens;) {
        // Panels that share chunks of a block row's weights in L1; one that is half empty, alone.
        const std::int64_t whole = (tokens - m + kPanelTokens / 2 - 1) / kPanelTokens;
        const std::int64_t near = std::clamp<std::int64_t>(whole, 1, kNear);
        for (std::int64_t block = o; block < end; ++block) {
          const std::int32_t from = prepared.first[block];
          const std::int64_t columns = (std::int64_t{begin[block + 1]} - begin[block]) * shape.red_block;
          kernels.multiply({packed + from * shape.tiles_size(),
                            prepared.offsets + std::int64_t{from} * offsets_of(shape.source), shape.source,
                            prepared.first[block + 1] - from, static_cast<std::int32_t>(ceil_div(columns, 2)),
                            static_cast<std::int32_t>(shape.out_block),
                            panel_rows(tokens, m) > kPanelTokens / 2 ? 2 : 1, static_cast<std::int32_t>(near),
                            panels + m / kPanelTokens * panel_stride, panel_stride, gathered,
                            sums + (block - o) * shape.out_block * kPanelTokens, shape.sums_size()});
        }
        for (std::int64_t p = 0; p < near; ++p, m += kPanelTokens) {
          finish(m, panel_rows(tokens, m), o, end, sums + p * shape.sums_size());
        }
      }
    }
  }
};

// A bias as floats, 0 where there is none; −0 becomes +0, as if it were added to sums that start at 0.
inline void unpack_pairs_bias(const void* bias, std::int64_t count, std::int64_t padded, float* to) {
  std::fill_n(to, padded, 0.0F);
  for (std::int64_t n = 0; bias != nullptr && n < count; ++n) {
    to[n] += to_float(static_cast<const bfloat16*>(bias)[n]);
  }
}

// Row-major X to the panels of its tokens first … first + tokens.
inline void pack_panels(const PairKernels& kernels, const PairsShape& shape, const MatrixView& x,
                        std::int64_t first, std::int64_t tokens, std::uint16_t* panels,
                        std::int64_t panel_stride) {
  for (std::int64_t m = 0; m < tokens; m += kPanelTokens) {
    kernels.pack({reinterpret_cast<const std::uint16_t*>(at(x, first + m, 0)), x.row_stride,
                  panel_rows(tokens, m), static_cast<std::int32_t>(x.cols),
                  static_cast<std::int32_t>(shape.padded), shape.source != PairSource::columns,
                  panels + m / kPanelTokens * panel_stride});
  }
}

}  // namespace rarefy::cpu
