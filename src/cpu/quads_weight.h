// What linear in int8 knows of a product and of what is derived from its weight; a sibling of pairs_weight.h,
// with four features to a line and 64 to a group. Sizes are in units of 16 bits, as the kernels of pairs
// count.
#pragma once

#include <algorithm>

#include "cpu/drivers.h"
#include "cpu/pairs_weight.h"
#include "cpu/quads.h"

namespace rarefy::cpu {

// Of panels of 64 tokens: block rows finished at a time, at most; features of a part of a panel, 48
// KB, and the lines that a block row should have in it, as its sums go in and out.
inline constexpr std::int64_t kFinishedRows = kRowsWide / 4;
inline constexpr std::int64_t kNearFeatures = 768, kLinesOfPart = 64;
// The part of all columns from which output blocks of several block rows are multiplied as if they stored
// all: nothing is put together then.
inline constexpr double kNearlyAll = 0.65;

// Outputs of an output block: a block row's, or those of a product where these are none, or less.
inline std::int64_t of_product(const QuadKernels& kernels, const BsrShape& s) {
  const std::int64_t rows = s.block_rows;
  if (kernels.by_token) return rows % kGroup == 0 ? rows : kGroup;
  if (rows == kernels.rows && s.block_cols % kQuad == 0) return rows;  // whose lines are read as they are
  const bool less = rows < kernels.join && kernels.join % rows == 0;
  return less || rows % kernels.rows != 0 ? kernels.join : rows;
}

// An output block has all columns that any of the block rows stores which it meets: where one does not, its
// zero adds nothing, as x has no NaN once it is rounded.
struct QuadsShape : GroupedShape {
  std::int64_t tokens;  // of a panel
  bool by_rows;         // QuadKernels::few_rows

  QuadsShape(const QuadKernels& kernels, const BsrShape& s)
      : GroupedShape(s, kQuad, false), tokens(kernels.tokens), by_rows(kernels.few_rows != nullptr) {
    cut_outputs(of_product(kernels, s));
    const bool joined = out_block != row_block;
    dense = kernels.by_token ? joined || red_block % (kQuadGroup / 2) != 0 : joined && stored() > kNearlyAll;
    if (dense || kernels.by_token) {  // whole groups
      padded = std::max<std::int64_t>(1, ceil_div(red_blocks * red_block, kQuadGroup)) * kQuadGroup;
    }
    if (kernels.by_token) {
      source = dense || red_block % kQuadGroup == 0 ? PairSource::tokens : PairSource::halves;
      return;
    }
    const bool apart = joined && kernels.few_rows == nullptr;  // others read lines of one block row alone
    source = dense                         ? PairSource::whole
             : apart                       ? PairSource::columns
             : red_block % kQuadGroup == 0 ? PairSource::whole
             : red_block % kQuad == 0      ? PairSource::lines
                                           : PairSource::columns;
  }

  // Output blocks that are finished at a time (their rows of Y are 256 bytes in f32), panels that share
  // weights in L1, and the sums of one.
  std::int64_t finished() const {
    return std::max<std::int64_t>(1, (by_rows ? kRowsWide : kStored) / out_block);
  }
  std::int64_t near() const { return finished() == 1 ? kNear : kNearSums; }
  // Stored by whole tiles of outputs: with blocks of 12, 20 and 24 more than are finished together.
  std::int64_t sums_size() const {
    if (is_by_token(source)) return kTokensWide * tokens;
    return ceil_div(finished() * out_block, kTileRows) * kTileRows * tokens;
  }
  // Whole tiles of outputs are stored, from any block row on.
  std::int64_t read_features() const { return out_features() + (out_block % kTileRows == 0 ? 0 : kTileRows); }
  // Of a panel of as many tokens, where GroupedShape counts 32; offsets are of those.
  std::int64_t panel_size() const { return GroupedShape::panel_size() * tokens / kPanelTokens; }
  std::int32_t rows_of(std::int64_t all, std::int64_t from) const {
    return static_cast<std::int32_t>(std::min(tokens, all - from));
  }
};

// Tier 3: tiles, and the total of each output's values (or as QuadKernels::complements says).
struct QuadsPacked {
  std::int8_t* tiles;
  std::int32_t* totals;
  std::int64_t bytes;

  QuadsPacked(const QuadsShape& s, const void* data) {
    Room room(const_cast<void*>(data));
    tiles = room.take<std::int8_t>(s.tiles_bytes());
    totals = room.take<std::int32_t>(s.read_features());
    bytes = room.bytes();
  }
};

// What is derived of a weight for one set of kernels; two sets, for few and for many tokens, share a buffer
// of each tier, as a layer holds one.
struct QuadsSection {
  const QuadKernels& kernels;
  std::int64_t prepared, packed;  // bytes before it

  Derived of(const Derived& all) const {
    return {all.key, offset(all.prepared, prepared), offset(all.packed, packed)};
  }
  static void* offset(const void* data, std::int64_t bytes) {
    return data == nullptr ? nullptr : static_cast<char*>(const_cast<void*>(data)) + bytes;
  }
};

// Tokens from which these kernels take such a weight, by one thread `alone` or by several, where one product
// starts in a cycle or `two`; 0: never.
inline std::int32_t fewest_tokens(const QuadKernels& kernels, const BsrShape& s, bool two, bool alone) {
  if (kernels.fewest == nullptr) return 1;
  const double more = QuadsShape(*kernels.few_tokens, s).tiles() / QuadsShape(kernels, s).tiles();
  const auto blocks = static_cast<double>(std::max<std::int64_t>(1, s.row_count() * s.col_count()));
  return kernels.fewest({s.block_rows, s.block_cols, s.cols, two, alone, static_cast<double>(s.nnzb) / blocks,
                         s.nnzb == 0 ? 1 : more});
}

// Calls visit(section) for those of a weight of this shape; returns the bytes of all, prepared and packed.
template <class Visit>
std::pair<std::int64_t, std::int64_t> for_quad_sections(const QuadKernels& kernels, const BsrShape& shape,
                                                        Visit&& visit) {
  const QuadKernels& few = kernels.few_tokens != nullptr ? *kernels.few_tokens : kernels;
  const QuadKernels& many = few.many_tokens != nullptr ? *few.many_tokens : few;
  std::int64_t prepared = 0, packed = 0;
  const auto section = [&](const QuadKernels& of) {
    visit(QuadsSection{of, prepared, packed});
    const QuadsShape s(of, shape);
    prepared += Prepared(s, nullptr).bytes;
    packed += QuadsPacked(s, nullptr).bytes;
  };
  if (&many != &few && fewest_tokens(many, shape, true, true) > 0) section(many);
  section(few);
  return {prepared, packed};
}

inline QuadsSection quad_section(const QuadKernels& kernels, const BsrShape& shape) {
  QuadsSection own{kernels, 0, 0};
  for_quad_sections(kernels, shape, [&](const QuadsSection& s) {
    if (&s.kernels == &kernels) own.prepared = s.prepared, own.packed = s.packed;
  });
  return own;
}

// A weight as kernels multiply it.
struct QuadsWeight {
  const QuadKernels& kernels;
  QuadsShape shape;
  const std::int32_t* begin;  // the entries of each block row
  Prepared prepared;
  QuadsPacked packed;
  bool again = false;  // as of PanelTasks::Task

  QuadsWeight(const QuadKernels& k, const QuadsShape& s, const std::int32_t* entries, const Derived& derived)
      : kernels(k), shape(s), begin(entries), prepared(s, derived.prepared), packed(s, derived.packed) {}

  // The first output block of a part, by the groups that they have, as PairsWeight::begin_of.
  std::int64_t begin_of(std::int64_t part, std::int64_t parts) const {
    return begin_of_part(prepared.first, shape.out_blocks, kQuadGroup, 12, part, parts);
  }

  // As PairsWeight::multiply: finish(token, rows, output, count, sums) as soon as sums are there.
  template <class Finish>
  void multiply(const std::uint16_t* panels, std::int64_t tokens, std::int64_t first, std::int64_t last,
                std::uint16_t* gathered, float* sums, Finish&& finish) const {
    const auto* tiles = reinterpret_cast<const std::uint16_t*>(packed.tiles);
    if (kernels.range != nullptr) {
      return multiply_range(kernels.range, shape, prepared, tiles,
                            {panels, shape.panel_size(), gathered, sums}, first, last, tokens, again, finish);
    }
    for (std::int64_t o = first; o < last; o += shape.finished()) {
      const std::int64_t end = std::min(o + shape.finished(), last);
      for (std::int64_t m = 0; m < tokens;) {
        const std::int64_t near = near_panels(tokens - m, shape.near());
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

  // The same by `few_rows`: a panel at a time, and of it a part that stays in L1 while all block
  // rows meet it that are finished together. Sums leave while the next ones are made; out(token, rows,
  // output, count) says where to.
  template <class Out>
  void multiply_rows(const std::uint16_t* panels, std::int64_t tokens, std::int64_t first, std::int64_t last,
                     std::int32_t* sums, Out&& out) const {
    std::int32_t next[kFinishedRows];
    std::int32_t* before = sums + kRowsSums;
    QuadLeaving leaving{};
    QuadRows t{};
    t.w = packed.tiles;
    t.offsets = prepared.offsets;
    t.source = shape.source;
    t.next = next;
    t.rows = static_cast<std::int32_t>(shape.out_block);
    t.leaving = &leaving;
    for (std::int64_t o = first; o < last; o += shape.finished()) {
      const std::int64_t end = std::min(o + shape.finished(), last);
      const std::int64_t parts = std::clamp<std::int64_t>(
          prepared.lines[o] / kLinesOfPart, 1, std::max<std::int64_t>(1, shape.padded / kNearFeatures));
      const std::int64_t together =
          parts > 1 ? end - o : std::max<std::int64_t>(1, kRowsNear / shape.tokens / shape.out_block);
      for (std::int64_t m = 0; m < tokens; m += shape.tokens) {
        const std::int32_t rows = shape.rows_of(tokens, m);
        t.vectors = (rows + 15) / 16;
        t.panel = reinterpret_cast<const std::uint8_t*>(panels + m / shape.tokens * shape.panel_size());
        for (std::int64_t n = o; n < end; n += together) {
          t.groups = prepared.first + n;
          t.lines = prepared.lines + n;
          t.blocks = static_cast<std::int32_t>(std::min(together, end - n));
          t.totals = packed.totals + n * shape.out_block;
          t.sums = sums;
          std::fill_n(next, t.blocks, 0);
          for (std::int64_t part = 1; part <= parts; ++part) {
            t.end = static_cast<std::uint32_t>(shape.place(shape.padded * part / parts));
            t.first = part == 1;
            t.last = part == parts;
            kernels.few_rows(t);
          }
          leaving.out = out(m, rows, n * shape.out_block, t.blocks * shape.out_block);
          leaving.out.sums = sums;
          leaving.left = static_cast<std::int32_t>(4 * t.vectors * ceil_div(leaving.out.cols, 16));
          leaving.turn = leaving.done = 0;
          std::swap(sums, before);
        }
      }
    }
    t.blocks = 0;
    kernels.few_rows(t);
  }
};

}  // namespace rarefy::cpu
