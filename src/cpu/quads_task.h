// A task's share of a product in int8 (quads.h): its memory, x rounded and packed, the products.
// linear_quads.cc drives one layer with it, feed_forward_quads.cc two.
#pragma once

#include <algorithm>

#include "cpu/lane_task.h"
#include "cpu/quads_weight.h"

namespace rarefy::cpu {

// The working memory of a call: what all tasks read, and what each worker has.
struct QuadsParts {
  float *bias, *scales;
  std::uint16_t *panels, *gathered;
  float *tokens, *sums;
  std::int32_t* lane_sums;
};

struct QuadsLayout {
  std::int64_t shared, worker;  // bytes

  QuadsLayout(const QuadKernels& kernels, const QuadsShape& s, const PairsBlocking& b) {
    QuadsParts parts{};
    Room all;
    take_shared(all, s, parts);
    shared = all.bytes();
    Room own;
    take_worker(own, kernels, s, b, parts);
    worker = own.bytes();
  }
  static void take_shared(Room& room, const QuadsShape& s, QuadsParts& parts) {
    parts.bias = room.take<float>(s.read_features());
    parts.scales = room.take<float>(s.read_features());
  }
  static void take_worker(Room& room, const QuadKernels& kernels, const QuadsShape& s, const PairsBlocking& b,
                          QuadsParts& parts) {
    parts.panels = room.take<std::uint16_t>(b.panels * s.panel_size());
    parts.tokens = room.take<float>(b.panels * s.tokens);
    if (kernels.lanes != nullptr) {
      const bool gathers = s.source == PairSource::columns;
      parts.gathered = room.take<std::uint16_t>(gathers ? 2 * kLaneRing : 0);
      parts.lane_sums = room.take<std::int32_t>(gathers ? b.panels * kPanelTokens * s.out_block : 0);
      return;
    }
    if (kernels.few_rows != nullptr) {
      parts.lane_sums = room.take<std::int32_t>(2 * kRowsSums);
      return;
    }
    // Of a few tokens, all groups of a block row.
    const std::int64_t few = (s.padded + kQuadGroup) * kernels.few[0].tokens / 2;
    parts.gathered = room.take<std::uint16_t>(std::max<std::int64_t>(kGatheredGroups * kGroupSize, few));
    parts.sums = room.take<float>(std::min(b.panels, s.near()) * s.sums_size());
  }
};

// Bias, of floats or bf16, and scales of whole blocks of outputs, 0 where there is nothing.
inline void unpack_outputs(const Call& call, const QuadsShape& s, const QuadsParts& parts, DType bias) {
  const std::int64_t count = call.plan.shape.rows;
  std::fill_n(parts.bias, s.read_features(), 0.0F);
  std::fill_n(parts.scales, s.read_features(), 0.0F);
  std::copy_n(call.scales, count, parts.scales);
  if (call.bias == nullptr) return;
  for (std::int64_t n = 0; n < count; ++n) {
    parts.bias[n] = bias == DType::f32 ? static_cast<const float*>(call.bias)[n]
                                       : to_float(static_cast<const bfloat16*>(call.bias)[n]);
  }
}

// Null where there is none for so many. What is multiplied as if all of W were stored goes by tiles from four
// tokens on (AMX, 768→3072: 140 µs by vpdpbusd, 107 on tiles).
inline const QuadFew* few_of(const QuadKernels& kernels, const QuadsShape& s, std::int64_t tokens) {
  if (s.dense && kernels.range != nullptr && tokens > 3) return nullptr;
  for (const QuadFew& few : kernels.few) {
    if (tokens <= few.tokens) return &few;
  }
  return nullptr;
}

// Tokens first … first + tokens, rounded.
inline void pack_quads_x(const QuadKernels& kernels, const QuadsShape& s, const Call& call,
                         const QuadsParts& parts, std::int64_t first, std::int64_t tokens) {
  const QuadFew* few = few_of(kernels, s, tokens);
  const auto pack = few != nullptr ? few->pack : kernels.pack;
  for (std::int64_t m = 0; m < tokens; m += s.tokens) {
    pack({at(call.x, first + m, 0), call.problem.in == DType::bf16, call.x.row_stride, s.rows_of(tokens, m),
          static_cast<std::int32_t>(call.x.cols), static_cast<std::int32_t>(s.padded), order_of(s.source),
          reinterpret_cast<std::uint8_t*>(parts.panels + m / s.tokens * s.panel_size()), parts.tokens + m});
  }
}

// Whether columns of a few tokens are put together where they are multiplied, by who has sums for `join`
// vectors of `join` outputs (multiply_columns), and not as lines before: where all tokens and outputs go by
// at once, or W comes out of memory, which it does in order then. One thread of a Zen 4, int8 at .5, µs,
// before and now: 4096→11008 with one and four tokens 32×1 853, 999 → 577, 752, 64×1 1242, 1599 → 490, 582;
// 768→3072 32×1 47, 49 → 38, 48; but 128×1 there with four 41 → 50.
inline bool puts_together(const QuadKernels& kernels, const QuadsShape& s, std::int64_t tokens,
                          std::int64_t bytes) {
  const std::int64_t vectors = s.out_block / kernels.join, most = kernels.join / 2;
  if (s.out_block % kernels.join != 0 || (vectors & (vectors - 1)) != 0) return false;
  if (bytes > kCached && tokens <= 4) return true;
  return vectors <= most && tokens <= kernels.join / vectors && (tokens <= 4 || vectors > 1);
}

// Output blocks begin … end for tokens first … first + tokens; `call.out` begins with output `left`.
inline void multiply_quads(const QuadsWeight& w, const Call& call, const QuadsParts& parts,
                           std::int64_t first, std::int64_t tokens, std::int64_t begin, std::int64_t end,
                           std::int64_t left = 0) {
  const QuadsShape& s = w.shape;
  const QuadFew* few = few_of(w.kernels, s, tokens);
  const bool columns = few != nullptr && few->columns != nullptr && s.source == PairSource::columns &&
                       puts_together(w.kernels, s, tokens, s.tiles_bytes());
  const auto product = few == nullptr ? w.kernels.lanes : columns ? few->columns : few->product;
  if (product != nullptr) {
    LaneTask task(s, w.prepared, reinterpret_cast<const std::uint16_t*>(w.packed.tiles),
                  {w.begin, call.plan.col}, {parts.panels, parts.gathered, parts.lane_sums},
                  {first, tokens, left}, {parts.bias, w.packed.totals, parts.scales, parts.tokens}, call,
                  product);
    if (w.kernels.lanes == nullptr) {
      task.groups(begin, end);
    } else if (s.source == PairSource::columns) {
      columns ? task.few_columns(begin, end) : task.columns(begin, end);
    } else {
      task.lines(begin, end);
    }
    return;
  }
  const auto out = [&](std::int64_t m, std::int32_t rows, std::int64_t from, std::int64_t count) {
    return QuadStore{nullptr,
                     is_by_token(s.source),
                     w.packed.totals + from,
                     parts.scales + from,
                     parts.bias + from,
                     parts.tokens + m,
                     call.activation,
                     at(call.out, first + m, from - left),
                     call.problem.out == DType::bf16,
                     call.out.row_stride,
                     rows,
                     static_cast<std::int32_t>(std::min(count, call.out.cols - from))};
  };
  if (w.kernels.few_rows != nullptr) {
    return w.multiply_rows(parts.panels, tokens, begin, end, parts.lane_sums, out);
  }
  w.multiply(parts.panels, tokens, begin, end, parts.gathered, parts.sums,
             [&](std::int64_t m, std::int32_t rows, std::int64_t from, std::int64_t count, const auto* sums) {
               QuadStore to = out(m, rows, from, count);
               to.sums = reinterpret_cast<const std::int32_t*>(sums);
               w.kernels.store(to);
             });
}

}  // namespace rarefy::cpu
