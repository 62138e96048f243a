// Rows of W with X and Y by feature, as they lie in memory: a sum of a row takes runs of tokens from rows of
// X, and nothing is packed. For few stored elements, whose panels would take longer than their products.
#pragma once

#include "cpu/activation.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

// Tokens m … m + V vectors of row o.
template <class I, int V>
void in_place_run(const InPlaceTask& t, std::int32_t o, std::int64_t m) {
  constexpr int w = I::kWidth;
  // Few vectors would be one chain of sums, each waiting for the one before: elements take turns.
  constexpr int kTurns = V >= 4 ? 1 : 4 / V;
  Vec<I> sum[kTurns][V], total[V];
  const auto add = [&](int turn, float value, const float* x) {
    const Vec<I> element = I::set1(value);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[turn][v] = I::fma(element, I::load(x + v * w), sum[turn][v]);
  };
  for (int v = 0; v < V; ++v) total[v] = I::zero();
  const auto* values = static_cast<const float*>(t.w.values);
  const std::int32_t c_block = t.w.red_block, end = t.entry_begin[o + 1];
  const std::int32_t last_part = end - least_entries(t.part);
  for (std::int32_t e = t.entry_begin[o]; e < end;) {
    const std::int32_t stop = e + t.part <= last_part ? e + t.part : end;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int v = 0; v < V; ++v) sum[turn][v] = I::zero();
    }
    if (c_block == 1) {
      for (; stop - e >= kTurns; e += kTurns) {
#pragma GCC unroll 4
        for (int turn = 0; turn < kTurns; ++turn) {
          add(turn, values[e + turn], t.x + t.w.index[e + turn] * t.x_stride + m);
        }
      }
    }
    for (; e < stop; ++e) {
      const std::int64_t first = std::int64_t{t.w.index[e]} * c_block;
      const std::int64_t columns = t.columns - first < c_block ? t.columns - first : c_block;
      for (std::int64_t c = 0; c < columns; ++c) {
        add(0, values[std::int64_t{e} * c_block + c], t.x + (first + c) * t.x_stride + m);
      }
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int v = 0; v < V; ++v) total[v] = I::add(total[v], sum[turn][v]);
    }
  }
  const Vec<I> bias = t.bias == nullptr ? I::zero() : I::set1(t.bias[o]);
  float* y = t.y + o * t.y_stride + m;
  for (int v = 0; v < V; ++v) {
    I::store(y + v * w, activate<I>(t.activation, I::add(total[v], bias)));
  }
}

// As many vectors of tokens at a time as leave sums and totals in registers. What is left is a vector that
// ends with the last token: some are computed twice, with the same bits.
template <class I>
void in_place(const InPlaceTask& t) {
  constexpr int w = I::kWidth, most = I::kRegisters / 4;
  for (std::int32_t o = t.begin; o < t.end; ++o) {
    std::int64_t m = 0;
    const auto runs = [&]<int V>() {
      for (; t.tokens - m >= V * w; m += V * w) in_place_run<I, V>(t, o, m);
    };
    if constexpr (most >= 8) runs.template operator()<8>();
    runs.template operator()<4>();
    runs.template operator()<2>();
    runs.template operator()<1>();
    if (m < t.tokens) in_place_run<I, 1>(t, o, t.tokens - w);
  }
}

}  // namespace rarefy::cpu
