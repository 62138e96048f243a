// What linear in int8 knows of a product and of what is derived from its weight; a sibling of pairs_weight.h,
// with four features to a line and 64 to a group. Sizes are in units of 16 bits, as the kernels of pairs
// count.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/drivers.h"
#include "cpu/pairs_weight.h"
#include "cpu/quads.h"

namespace rarefy::cpu {

// Block rows of 4 and 8 outputs are joined to 16, with all columns that any of them stores: where a row does
// not, its zero adds nothing, as x has no NaN once it is rounded.
struct QuadsShape : GroupedShape {
  explicit QuadsShape(const BsrShape& s) : GroupedShape(s, kQuad, kTileRows, false) {
    source = join > 1                      ? PairSource::columns
             : red_block % kQuadGroup == 0 ? PairSource::whole
             : red_block % kQuad == 0      ? PairSource::lines
                                           : PairSource::columns;
  }

  // Output blocks that are finished at a time (their rows of Y are 256 bytes in f32), panels that share
  // weights in L1, and the sums of one.
  std::int64_t finished() const { return std::max<std::int64_t>(1, kStored / out_block); }
  std::int64_t near() const { return finished() == 1 ? kNear : kNearSums; }
  std::int64_t sums_size() const { return finished() * out_block * kPanelTokens; }
};

// Tier 3: tiles, and the total of each output's values.
struct QuadsPacked {
  std::int8_t* tiles;
  std::int32_t* totals;
  std::int64_t bytes;

  QuadsPacked(const QuadsShape& s, const void* data) {
    Room room(const_cast<void*>(data));
    tiles = room.take<std::int8_t>(s.tiles_bytes());
    totals = room.take<std::int32_t>(s.out_features());
    bytes = room.bytes();
  }
};

// A weight as kernels multiply it.
struct QuadsWeight {
  const QuadKernels& kernels;
  QuadsShape shape;
  const std::int32_t* begin;  // the entries of each block row
  Prepared prepared;
  QuadsPacked packed;

  QuadsWeight(const QuadKernels& k, const QuadsShape& s, const std::int32_t* entries, const Derived& derived)
      : kernels(k), shape(s), begin(entries), prepared(s, derived.prepared), packed(s, derived.packed) {}

  // As PairsWeight::multiply: finish(token, rows, output, count, sums) as soon as sums are there.
  template <class Finish>
  void multiply(const std::uint16_t* panels, std::int64_t tokens, std::int64_t first, std::int64_t last,
                std::uint16_t* gathered, float* sums, Finish&& finish) const {
    const auto* tiles = reinterpret_cast<const std::uint16_t*>(packed.tiles);
    for (std::int64_t o = first; o < last; o += shape.finished()) {
      const std::int64_t end = std::min(o + shape.finished(), last);
      for (std::int64_t m = 0; m < tokens;) {
        const std::int64_t whole = (tokens - m + kPanelTokens / 2 - 1) / kPanelTokens;
        const std::int64_t near = std::clamp<std::int64_t>(whole, 1, shape.near());
        auto finish_panel = [&](std::int32_t p, std::int64_t row, std::int64_t rows, float* to) {
          const std::int64_t token = m + p * kPanelTokens;
          finish(token, panel_rows(tokens, token), o * shape.out_block + row, rows, to);
        };
        for (std::int64_t block = o; block < end; ++block) {
          const std::int32_t from = prepared.first[block];
          kernels.multiply({tiles + from * shape.tiles_size(), prepared.offsets + from * shape.offsets(),
                            shape.source, prepared.first[block + 1] - from, prepared.lines[block],
                            static_cast<std::int32_t>(shape.out_block),
                            panel_rows(tokens, m) > kPanelTokens / 2 ? 2 : 1, static_cast<std::int32_t>(near),
                            panels + m / kPanelTokens * shape.panel_size(), shape.panel_size(), gathered,
                            sums + (block - o) * shape.out_block * kPanelTokens, shape.sums_size(),
                            shape.finished() == 1 ? done_by(finish_panel) : PairDone{}});
        }
        for (std::int32_t p = 0; shape.finished() > 1 && p < near; ++p) {
          finish_panel(p, 0, (end - o) * shape.out_block, sums + p * shape.sums_size());
        }
        m += near * kPanelTokens;
      }
    }
  }
};

}  // namespace rarefy::cpu
