// The products of a task on lanes of outputs (lanes.h), with weights in groups (pairs_weight.h): which lines
// of x a product reads, and which it puts together for the next one. A line has two features in bf16, four in
// int8, and as many bytes in both.
#pragma once

#include <algorithm>

#include "cpu/cpuid.h"
#include "cpu/lanes.h"
#include "cpu/pairs_weight.h"

namespace rarefy::cpu {

inline constexpr std::int64_t kLaneChunk = 128;  // lines, 8 KB, as their weights are for 32 outputs
// Between the lines that are read and those that are written meanwhile: not the same place of a page, where a
// load would wait for a store.
inline constexpr std::int64_t kLaneRing = (kLaneChunk + 16) * kPairLine;

// For all products of which some things are the same.
class LaneTask {
 public:
  struct Stored {
    const std::int32_t *begin, *columns;  // of the entries of each block row
  };
  struct Memory {
    const std::uint16_t* panels;
    std::uint16_t* gathered;  // room for two rings
    void* sums;               // as LaneProduct has them, [token][output of a block row]
  };
  struct Tokens {
    std::int64_t first, count;
    std::int64_t left = 0;  // outputs before those that `out` begins with
  };
  // Of all outputs, but for those of tokens; null where the dtype has none.
  struct Scaling {
    const float* start;
    const std::int32_t* totals;
    const float *scales, *tokens;
  };

  LaneTask(const GroupedShape& shape, const Prepared& prepared, const std::uint16_t* tiles,
           const Stored& stored, const Memory& memory, const Tokens& tokens, const Scaling& scaling,
           const Call& call, void (*product)(const LaneProduct&))
      : s_(shape),
        prepared_(prepared),
        tiles_(tiles),
        stored_(stored),
        memory_(memory),
        first_(tokens.first),
        tokens_(tokens.count),
        left_(tokens.left),
        scaling_(scaling),
        out_(call.out),
        product_(product) {
    t_.rows = static_cast<std::int32_t>(s_.out_block);
    t_.activation = call.activation;
    t_.out = storage(out_.dtype);
    t_.row_stride = out_.row_stride;
  }

  // What is stored in whole lines is read from the panels, as one block where it is all of them.
  void lines(std::int64_t begin, std::int64_t end) {
    t_.run = static_cast<std::int32_t>((s_.dense ? s_.padded : s_.red_block) / s_.line);
    t_.first = t_.last = true;
    for (std::int64_t o = begin; o < end; ++o) {
      outputs(o);
      t_.w = weights(o);
      t_.index = s_.dense ? &kOne : stored_.columns + stored_.begin[o];
      t_.blocks = s_.dense ? (lines_of(o) > 0 ? 1 : 0) : stored_.begin[o + 1] - stored_.begin[o];
      for (std::int64_t m = 0; m < tokens_; m += kPanelTokens) {
        t_.panel = panel(m);
        multiply(o, m);
      }
    }
  }

  // Groups are put together for all outputs of a block row, each of a few tokens' on its own.
  void groups(std::int64_t begin, std::int64_t end) {
    t_.run = static_cast<std::int32_t>(s_.offsets());
    for (std::int64_t o = begin; o < end; ++o) {
      outputs(o);
      t_.w = weights(o);
      t_.blocks = prepared_.first[o + 1] - prepared_.first[o];
      t_.next = {memory_.panels, prepared_.offsets + prepared_.first[o] * s_.offsets(), memory_.gathered, 0,
                 false};
      multiply(o, 0);
    }
  }

  // Of a few tokens they are put together where they are multiplied, for all outputs of a block row.
  void few_columns(std::int64_t begin, std::int64_t end) {
    static const bool by_l2 = detect().has("prefetch_l2");
    // A Zen 4, 4096→11008: 32×1 .69 → .52 ms by L2, 64×1 and 128×1 .49 and .43 → .55 and .8.
    t_.ask = by_l2 && s_.out_block <= kTileRows * 2 ? Ask::l2 : Ask::far;
    t_.index = &kOne;
    t_.blocks = 1;
    t_.first = t_.last = true;
    t_.panel = memory_.gathered;
    t_.sums = static_cast<std::int32_t*>(memory_.sums);
    for (std::int64_t o = begin; o < end; ++o) {
      outputs(o);
      t_.w = weights(o);
      t_.run = static_cast<std::int32_t>(lines_of(o));
      t_.next = {memory_.panels, prepared_.offsets + prepared_.first[o] * s_.offsets(), memory_.gathered,
                 t_.run, false};
      multiply(o, 0);
    }
  }

  // Columns are put together as lines: those of a product while the one before is at work. Some at a time, so
  // that they and their weights stay in L1 while these meet all panels.
  void columns(std::int64_t begin, std::int64_t end) {
    t_.index = &kOne;
    Place at{begin, 0, 0};
    t_.next = gathering(at, end, memory_.gathered);
    product_(t_);  // no tokens, no blocks
    t_.blocks = 1;
    for (std::int64_t step = 0; at.o < end; ++step) {
      const Place now = at;
      const std::int64_t chunks = chunks_of(at.o);
      const std::int64_t from = line_of(now.o, now.chunk);
      t_.run = static_cast<std::int32_t>(line_of(now.o, now.chunk + 1) - from);
      t_.first = now.chunk == 0;
      t_.last = now.chunk + 1 == chunks;
      t_.w = weights(now.o) + from * 2 * s_.out_block;
      t_.sums = static_cast<std::int32_t*>(memory_.sums) + now.m * s_.out_block;
      t_.panel = memory_.gathered + step % 2 * kLaneRing;
      if ((at.m += kPanelTokens) >= tokens_) {
        at.m = 0;
        if (++at.chunk == chunks) at = {at.o + 1, 0, 0};
      }
      t_.next = gathering(at, end, memory_.gathered + (step + 1) % 2 * kLaneRing);
      outputs(now.o);
      multiply(now.o, now.m);
    }
  }

 private:
  static constexpr std::int32_t kOne = 0;
  struct Place {
    std::int64_t o, chunk, m;
  };
  std::int64_t lines_of(std::int64_t o) const { return prepared_.lines[o]; }
  std::int64_t chunks_of(std::int64_t o) const {
    return std::max<std::int64_t>(1, ceil_div(lines_of(o), kLaneChunk));
  }
  std::int64_t line_of(std::int64_t o, std::int64_t chunk) const {
    return lines_of(o) * chunk / chunks_of(o);
  }
  const std::uint16_t* weights(std::int64_t o) const { return tiles_ + prepared_.first[o] * s_.tiles_size(); }
  const std::uint16_t* panel(std::int64_t m) const {
    return memory_.panels + m / kPanelTokens * s_.panel_size();
  }
  bool half(std::int64_t m) const { return panel_rows(tokens_, m) <= kPanelTokens / 2; }
  LaneGather gathering(const Place& at, std::int64_t end, std::uint16_t* to) const {
    if (at.o == end) return {};
    const std::int64_t from = line_of(at.o, at.chunk);
    return {panel(at.m), prepared_.offsets + prepared_.first[at.o] * s_.offsets() + from * s_.line, to,
            static_cast<std::int32_t>(line_of(at.o, at.chunk + 1) - from), half(at.m)};
  }
  void outputs(std::int64_t o) {
    const std::int64_t from = o * s_.out_block;
    t_.start = scaling_.start + from;
    if (scaling_.scales != nullptr) {
      t_.totals = scaling_.totals + from;
      t_.scales = scaling_.scales + from;
    }
    t_.cols = static_cast<std::int32_t>(std::min(s_.out_block, out_.cols - from));
  }
  void multiply(std::int64_t o, std::int64_t m) {
    t_.tokens = panel_rows(tokens_, m);
    if (scaling_.tokens != nullptr) t_.token_scales = scaling_.tokens + m;
    t_.y = at(out_, first_ + m, o * s_.out_block - left_);
    product_(t_);
  }

  const GroupedShape& s_;
  const Prepared& prepared_;
  const std::uint16_t* tiles_;
  const Stored stored_;
  const Memory memory_;
  const std::int64_t first_, tokens_, left_;
  const Scaling scaling_;
  const MutableMatrixView& out_;
  void (*const product_)(const LaneProduct&);
  LaneProduct t_{};
};

}  // namespace rarefy::cpu
