// Rows of W with X and Y by feature, as they lie in memory: a sum of a row takes runs of tokens from rows of
// X, and nothing is packed. For few stored elements, whose panels would take longer than their products; and
// for doubles, by feature or in panels (doubles.h).
#pragma once

#include <concepts>

#include "cpu/activation.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

// Few vectors would be one chain of sums, each waiting for the one before: elements take turns. In doubles as
// the rows say, for any number of tokens, as layers' bits must not depend on the batch.
template <class I, int Rows, int V>
constexpr int in_place_turns() {
  if (kDoubles<I>) return Rows >= 4 ? 1 : 2;
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

// Fewer tokens than a vector has lanes: the first of a vector. Where masks are to be had, that is.
template <class I>
concept CountsLanes = requires(float* y, const float* x, Vec<I> v) {
  { I::load_first(x, 1) } -> std::same_as<Vec<I>>;
  I::store_first(y, v, 1);
};

// A row's elements side by side in a vector, each times its own columns of x: eight elements of 2 tokens,
// four of 4, two of 8.
template <class I, int Tokens>
concept HoldsElements = requires(const float* values, const std::int32_t* index, Vec<I> v) {
  { I::template each<Tokens>(values) } -> std::same_as<Vec<I>>;
  { I::template group<Tokens, Tokens>(values, index) } -> std::same_as<Vec<I>>;
  { I::template fold<Tokens>(v) } -> std::same_as<Vec<I>>;
  { I::fma_in(typename I::Lanes{}, v, v, v) } -> std::same_as<Vec<I>>;
};

// Tokens m … m + V vectors of rows r … r + Rows of block row o: a line of X serves them all.
// kSide: outputs lie side by side in W, which takes one address instead of one a row.
// kFew: all tokens that there are, less than a vector.
template <class I, int Rows, int V, bool kSide, bool kFew = false>
void in_place_run(const InPlaceTaskOf<Element<I>>& t, std::int32_t o, std::int64_t r, std::int64_t m) {
  using T = Element<I>;
  constexpr int w = I::kWidth;
  constexpr int kTurns = in_place_turns<I, Rows, V>();
  Vec<I> sum[kTurns][Rows][V], total[Rows][V];
  const std::int64_t size = t.w.block_size, next_row = kSide ? 1 : t.w.out_stride,
                     next_column = t.w.red_stride;
  const T* const values = static_cast<const T*>(t.w.values) + r * next_row;
  const std::int32_t *const index = t.w.index, *const perm = t.w.perm;
  const auto block = [&](std::int32_t e) {  // floats come by rows alone: a question less for each element
    if constexpr (kDoubles<I>) {
      if (perm != nullptr) return values + perm[e] * size;
    }
    return values + e * size;
  };
  [[maybe_unused]] const int tokens = static_cast<int>(t.tokens);
  const auto load = [&](const T* from) {
    if constexpr (kFew) {
      return I::load_first(from, tokens);
    } else {
      return I::load(from);
    }
  };
  const auto add = [&](int turn, const T* of, const T* x) {
    Vec<I> xv[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) xv[v] = load(x + v * w);
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const Vec<I> element = I::set1(of[i * next_row]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[turn][i][v] = I::fma(element, xv[v], sum[turn][i][v]);
    }
  };
  const auto each = [](auto f) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) f(i, v);
    }
  };
  each([&](int i, int v) { total[i][v] = I::zero(); });
  const std::int32_t c_block = t.w.red_block, end = t.entry_begin[o + 1];
  const T* const from = t.x + m;
  const std::int64_t stride = t.x_stride;
  const std::int32_t last_part = end - least_entries(t.part);
  for (std::int32_t e = t.entry_begin[o]; e < end;) {
    const std::int32_t stop = e + t.part <= last_part ? e + t.part : end;
#pragma GCC unroll 4
    for (int turn = 0; turn < kTurns; ++turn) each([&](int i, int v) { sum[turn][i][v] = I::zero(); });
    if (c_block == 1) {
      for (; stop - e >= kTurns; e += kTurns) {
#pragma GCC unroll 4
        for (int turn = 0; turn < kTurns; ++turn) {
          add(turn, block(e + turn), from + index[e + turn] * stride);
        }
      }
      for (; e < stop; ++e) add(0, block(e), from + index[e] * stride);
    }
    for (; e < stop; ++e) {
      const std::int64_t first = std::int64_t{index[e]} * c_block;
      const std::int64_t columns = t.columns - first < c_block ? t.columns - first : c_block;
      const T* of = block(e);
      const T* x = t.x + first * t.x_stride + m;
      std::int64_t c = 0;
      if constexpr (kDoubles<I>) {
        for (; columns - c >= kTurns; c += kTurns) {
#pragma GCC unroll 4
          for (int turn = 0; turn < kTurns; ++turn, of += next_column, x += t.x_stride) add(turn, of, x);
        }
      }
      for (; c < columns; ++c, of += next_column, x += t.x_stride) add(0, of, x);
    }
#pragma GCC unroll 4
    for (int turn = 0; turn < kTurns; ++turn) {
      each([&](int i, int v) { total[i][v] = I::add(total[i][v], sum[turn][i][v]); });
    }
  }
  const std::int64_t row = std::int64_t{o - t.begin} * t.w.out_block + r;
  T* const y = t.y + row * t.y_stride + m;
  each([&](int i, int v) {
    const Vec<I> bias = t.bias == nullptr ? I::zero() : I::set1(t.bias[row + i]);
    const Vec<I> out = activate_in_place<I>(t.activation, I::add(total[i][v], bias));
    if constexpr (kFew) {
      I::store_first(y + i * t.y_stride, out, tokens);
    } else {
      I::store(y + i * t.y_stride + v * w, out);
    }
  });
}

// The same of all rows of single elements, as floats: what in_place_run asks for each row takes as long as
// the row's own elements where they are few (9 ns against 3), so here it is asked once.
template <class I, int V, bool kFew = false>
void in_place_singles(const InPlaceTask& t, std::int64_t m) {
  constexpr int w = I::kWidth, kTurns = in_place_turns<I, 1, V>();
  const std::int32_t *const entry = t.entry_begin, *const index = t.w.index;
  const auto* const values = static_cast<const float*>(t.w.values);
  const float *const from = t.x + m, *bias = t.bias;
  const std::int64_t stride = t.x_stride, y_stride = t.y_stride;
  const std::int32_t part = t.part, least = least_entries(part), last = t.end;
  const Activation activation = t.activation;
  [[maybe_unused]] const int tokens = static_cast<int>(t.tokens);
  Vec<I> sum[kTurns][V], total[V];
  const auto add = [&](int turn, std::int32_t e) {
    const Vec<I> element = I::set1(values[e]);
    const float* const x = from + index[e] * stride;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if constexpr (kFew) {
        sum[turn][v] = I::fma(element, I::load_first(x, tokens), sum[turn][v]);
      } else {
        sum[turn][v] = I::fma(element, I::load(x + v * w), sum[turn][v]);
      }
    }
  };
  float* y = t.y + m;
  std::int32_t e = entry[t.begin];
  for (std::int32_t o = t.begin; o < last; ++o, y += y_stride) {
    const std::int32_t end = entry[o + 1];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) total[v] = I::zero();
    while (e < end) {
      const std::int32_t stop = end - e < part + least ? end : e + part;
#pragma GCC unroll 4
      for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[turn][v] = I::zero();
      }
      for (; stop - e >= kTurns; e += kTurns) {
#pragma GCC unroll 4
        for (int turn = 0; turn < kTurns; ++turn) add(turn, e + turn);
      }
      for (; e < stop; ++e) add(0, e);
#pragma GCC unroll 4
      for (int turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) total[v] = I::add(total[v], sum[turn][v]);
      }
    }
    const Vec<I> b = bias == nullptr ? I::zero() : I::set1(bias[o - t.begin]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Vec<I> out = I::add(total[v], b);
      if (activation != Activation::none) out = activate<I>(activation, out);
      if constexpr (kFew) {
        I::store_first(y, out, tokens);
      } else {
        I::store(y + v * w, out);
      }
    }
  }
}

// The same of Tokens tokens that are all there are, side by side in vectors (HoldsElements). Of long rows a
// turn takes eight elements, and what a row's last one has of the next row's is masked out; where nothing
// follows, they are copied. So a row has one branch that is not foreseen: .75–.97 of the time (Xeon with
// AMX). Short rows that come again are foreseen, and take 1.2–1.5 times as long by that.
inline constexpr std::int64_t kLongRow = 16;  // elements, on average

template <class I, int Tokens, bool kLong>
void in_place_side_by_side(const InPlaceTask& t) {
  constexpr int kTurn = kLong ? 8 : 4, kSide = I::kWidth / Tokens, kVectors = kTurn / kSide;
  using Lanes = typename I::Lanes;
  const std::int32_t *const entry = t.entry_begin, *const index = t.w.index;
  const auto* const values = static_cast<const float*>(t.w.values);
  const float *const x = t.x, *const bias = t.bias;
  const std::int32_t part = t.part, most = part + least_entries(part);
  const Activation activation = t.activation;
  Vec<I> sum[kVectors];
  const auto turn = [&](const float* of, const std::int32_t* at, auto add) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, of += kSide, at += kSide) {
      add(v, I::template each<Tokens>(of), I::template group<Tokens, Tokens>(x, at));
    }
  };
  const auto sum_of = [&]<bool kLast>(std::int32_t e, std::int32_t stop) {  // one element and more
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[v] = I::zero();
    for (; stop - e >= kTurn + kLong; e += kTurn) {
      turn(values + e, index + e,
           [&](int v, Vec<I> elements, Vec<I> own) { sum[v] = I::fma(elements, own, sum[v]); });
    }
    if constexpr (kLong) {
      const std::uint64_t lanes = ~std::uint64_t{0} >> (64 - Tokens * (stop - e));
      const auto add = [&](int v, Vec<I> elements, Vec<I> own) {
        sum[v] = I::fma_in(static_cast<Lanes>(lanes >> (v * I::kWidth)), elements, own, sum[v]);
      };
      if constexpr (kLast) {
        float last_values[kTurn] = {};
        std::int32_t last_index[kTurn] = {};
        for (int i = 0; i < stop - e; ++i) last_values[i] = values[e + i], last_index[i] = index[e + i];
        turn(last_values, last_index, add);
      } else {
        turn(values + e, index + e, add);
      }
    } else {
      for (; e < stop; ++e) {
        const Vec<I> own = I::template repeat<Tokens>(x + std::int64_t{index[e]} * Tokens);
        sum[0] = I::fma_in(static_cast<Lanes>((1U << Tokens) - 1), I::set1(values[e]), own, sum[0]);
      }
    }
#pragma GCC unroll 2
    for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 2
      for (int v = 0; v < half; ++v) sum[v] = I::add(sum[v], sum[v + half]);
    }
    return I::template fold<Tokens>(sum[0]);
  };
  const auto rows = [&]<bool kLast>(std::int32_t begin, std::int32_t end) {
    for (std::int32_t o = begin; o < end; ++o) {
      std::int32_t e = entry[o];
      const std::int32_t stop = entry[o + 1];
      Vec<I> total = I::zero();
      const auto unsigned_of = [](std::int32_t n) { return static_cast<std::uint32_t>(n); };
      if (unsigned_of(stop - e - 1) < unsigned_of(most - 1)) {  // one part, as nearly always: one question
        total = sum_of.template operator()<kLast>(e, stop);
      } else {
        for (std::int32_t next; e < stop; e = next) {
          next = stop - e < most ? stop : e + part;
          total = I::add(total, sum_of.template operator()<kLast>(e, next));
        }
      }
      if (bias != nullptr) total = I::add(total, I::set1(bias[o - t.begin]));
      if (activation != Activation::none) total = activate<I>(activation, total);
      I::store_first(t.y + (o - t.begin) * t.y_stride, total, Tokens);
    }
  };
  if constexpr (kLong) {
    std::int32_t followed = t.end;  // rows whose last turn may read on
    while (followed > t.begin && entry[followed] + kTurn - 1 > entry[t.rows]) --followed;
    rows.template operator()<false>(t.begin, followed);
    rows.template operator()<true>(followed, t.end);
  } else {
    rows.template operator()<false>(t.begin, t.end);
  }
}

template <class I>
void in_place_of_singles(const InPlaceTask& t) {
  constexpr int w = I::kWidth, most = I::kRegisters / 4;
  if constexpr (CountsLanes<I>) {
    if (t.tokens < w) return in_place_singles<I, 1, true>(t, 0);
  }
  std::int64_t m = 0;
  const auto runs = [&]<int V>() {
    for (; t.tokens - m >= V * w; m += V * w) in_place_singles<I, V>(t, m);
  };
  if constexpr (most >= 8) runs.template operator()<8>();
  if constexpr (most >= 4) runs.template operator()<4>();
  if constexpr (most >= 2) runs.template operator()<2>();
  runs.template operator()<1>();
  if (m < t.tokens) in_place_singles<I, 1>(t, t.tokens - w);
}

// As many vectors of tokens at a time as leave sums in registers. What is left is a vector that ends with the
// last token: some are computed twice, with the same bits.
template <class I, int Rows, bool kSide>
void in_place_rows(const InPlaceTaskOf<Element<I>>& t, std::int32_t o, std::int64_t r) {
  constexpr int w = I::kWidth, most = I::kRegisters / (Rows < 4 ? 4 * Rows : 2 * Rows);
  if constexpr (CountsLanes<I>) {
    if (t.tokens < w) return in_place_run<I, Rows, 1, kSide, true>(t, o, r, 0);
  }
  std::int64_t m = 0;
  const auto runs = [&]<int V>() {
    for (; t.tokens - m >= V * w; m += V * w) in_place_run<I, Rows, V, kSide>(t, o, r, m);
  };
  if constexpr (most >= 8 && !kDoubles<I>) runs.template operator()<8>();
  if constexpr (most >= 4) runs.template operator()<4>();
  if constexpr (most >= 2) runs.template operator()<2>();
  runs.template operator()<1>();
  if (m < t.tokens) in_place_run<I, Rows, 1, kSide>(t, o, r, t.tokens - w);
}

// Narrow: for as few tokens as it has lanes, since a vector that begins anywhere lies in two lines of x.
template <class I, class Narrow = I>
void in_place(const InPlaceTaskOf<Element<I>>& t) {
  if constexpr (HoldsElements<I, 8>) {
    if (t.w.block_size == 1 && t.tokens == t.x_stride) {
      // By all rows, not the task's: sums are the same however the work is cut.
      const bool long_rows = t.entry_begin[t.rows] >= kLongRow * t.rows;
      if (t.tokens == 2 && long_rows) return in_place_side_by_side<I, 2, true>(t);
      if (t.tokens == 4 && !long_rows) return in_place_side_by_side<I, 4, false>(t);
      if (t.tokens == 4) return in_place_side_by_side<I, 4, true>(t);
      if (t.tokens == 8 && long_rows) return in_place_side_by_side<I, 8, true>(t);
    }
  }
  if constexpr (Narrow::kWidth < I::kWidth) {
    static_assert(CountsLanes<Narrow>);
    if (t.tokens <= Narrow::kWidth) return in_place<Narrow>(t);
  }
  if constexpr (!kDoubles<I>) {
    if (t.w.block_size == 1) return in_place_of_singles<I>(t);
  }
  for (std::int32_t o = t.begin; o < t.end; ++o) {
    const std::int64_t left = t.rows - std::int64_t{o} * t.w.out_block;
    const std::int64_t rows = left < t.w.out_block ? left : t.w.out_block;
    std::int64_t r = 0;
    if constexpr (kDoubles<I>) {
      const auto some = [&]<int Rows>() {
        for (; rows - r >= Rows; r += Rows) {
          t.w.out_stride == 1 ? in_place_rows<I, Rows, true>(t, o, r)
                              : in_place_rows<I, Rows, false>(t, o, r);
        }
      };
      some.template operator()<8>();
      some.template operator()<4>();
      some.template operator()<2>();
    }
    for (; r < rows; ++r) in_place_rows<I, 1, false>(t, o, r);
  }
}

}  // namespace rarefy::cpu
