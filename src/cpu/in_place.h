// Rows of W with X and Y by feature, as they lie in memory: a sum of a row takes runs of tokens from rows of
// X, and nothing is packed. For few stored elements, whose panels would take longer than their products; and
// for doubles, by feature or in panels (doubles.h).
#pragma once

#include "cpu/activation.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

// Few vectors would be one chain of sums, each waiting for the one before: elements take turns. In doubles
// for any number of them, as layers' bits must not depend on the batch.
template <class I, int V>
constexpr int in_place_turns() {
  if (kDoubles<I>) return 2;
  return V >= 4 ? 1 : 4 / V;
}

template <class I>
Vec<I> activate_in_place(Activation activation, Vec<I> v) {
  if constexpr (kDoubles<I>) {  // no other is asked for
    return activation == Activation::relu ? I::max(I::zero(), v) : v;
  } else {
    return activate<I>(activation, v);
  }
}

// Tokens m … m + V vectors of row r of block row o.
template <class I, int V>
void in_place_run(const InPlaceTaskOf<Element<I>>& t, std::int32_t o, std::int64_t r, std::int64_t m) {
  using T = Element<I>;
  constexpr int w = I::kWidth;
  constexpr int kTurns = in_place_turns<I, V>();
  Vec<I> sum[kTurns][V], total[V];
  const auto add = [&](int turn, T value, const T* x) {
    const Vec<I> element = I::set1(value);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[turn][v] = I::fma(element, I::load(x + v * w), sum[turn][v]);
  };
  for (int v = 0; v < V; ++v) total[v] = I::zero();
  const std::int32_t c_block = t.w.red_block, end = t.entry_begin[o + 1];
  const std::int64_t size = t.w.block_size;
  const T* const values = static_cast<const T*>(t.w.values) + r * c_block;
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
          add(turn, values[(e + turn) * size], t.x + t.w.index[e + turn] * t.x_stride + m);
        }
      }
    }
    for (; e < stop; ++e) {
      const std::int64_t first = std::int64_t{t.w.index[e]} * c_block;
      const std::int64_t columns = t.columns - first < c_block ? t.columns - first : c_block;
      std::int64_t c = 0;
      if constexpr (kDoubles<I>) {
        for (; columns - c >= kTurns; c += kTurns) {
#pragma GCC unroll 4
          for (int turn = 0; turn < kTurns; ++turn) {
            add(turn, values[e * size + c + turn], t.x + (first + c + turn) * t.x_stride + m);
          }
        }
      }
      for (; c < columns; ++c) add(0, values[e * size + c], t.x + (first + c) * t.x_stride + m);
    }
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int v = 0; v < V; ++v) total[v] = I::add(total[v], sum[turn][v]);
    }
  }
  const std::int64_t row = std::int64_t{o - t.begin} * t.w.out_block + r;
  const Vec<I> bias = t.bias == nullptr ? I::zero() : I::set1(t.bias[row]);
  T* y = t.y + row * t.y_stride + m;
  for (int v = 0; v < V; ++v) {
    I::store(y + v * w, activate_in_place<I>(t.activation, I::add(total[v], bias)));
  }
}

// As many vectors of tokens at a time as leave sums and totals in registers. What is left is a vector that
// ends with the last token: some are computed twice, with the same bits.
template <class I>
void in_place(const InPlaceTaskOf<Element<I>>& t) {
  constexpr int w = I::kWidth, most = I::kRegisters / 4;
  const auto row = [&](std::int32_t o, std::int64_t r) {
    std::int64_t m = 0;
    const auto runs = [&]<int V>() {
      for (; t.tokens - m >= V * w; m += V * w) in_place_run<I, V>(t, o, r, m);
    };
    if constexpr (most >= 8 && !kDoubles<I>) runs.template operator()<8>();
    runs.template operator()<4>();
    runs.template operator()<2>();
    runs.template operator()<1>();
    if (m < t.tokens) in_place_run<I, 1>(t, o, r, t.tokens - w);
  };
  for (std::int32_t o = t.begin; o < t.end; ++o) {
    const std::int64_t left = t.rows - std::int64_t{o} * t.w.out_block;
    for (std::int64_t r = 0; r < t.w.out_block && r < left; ++r) row(o, r);
  }
}

}  // namespace rarefy::cpu
