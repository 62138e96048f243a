// How rows reach the kernels of pairs and leave them, as templates over an engine E (simd/…): x into panels,
// sums to rows of Y or of hidden features, sums of the weight gradient to dW. Edges go through a buffer.
#pragma once

#include "cpu/activation.h"
#include "cpu/pairs.h"

namespace rarefy::cpu {

// Rows of Y, one after the other; with each, its next 32 elements are asked for, into L2: the next block row
// wants them. Asked for into L1, the lines of Y held the fill buffers (16 on Sapphire Rapids) that tiles load
// by, for as long as L3 takes: a tenth of a layer. Functions take them by reference and copy inside, where
// they are registers (see multiply_chunk).
template <class T>
struct PairRows {
  T* y;
  std::int64_t stride;

  [[gnu::always_inline]] T* next() {
    T* row = y;
    __builtin_prefetch(row + 32, 0, 2);
    if constexpr (sizeof(T) == 4) __builtin_prefetch(row + 48, 0, 2);
    y += stride;
    return row;
  }
};

template <class E, class T>
void pack_rows(const PairPack& t) {
  constexpr std::int32_t kSide = 32;  // E::pack takes 32 × 32
  const auto* x = static_cast<const T*>(t.x);
  std::int32_t k = 0;
  if (t.rows == kPanelTokens) {
    for (; k + kSide <= t.cols; k += kSide) {
      // Each row is a stream of its own, too many for the hardware: cold, it took 2.5 times as long.
      for (std::int32_t m = 0; m < kPanelTokens; ++m) {
        const T* ahead = x + k + kSide + m * t.row_stride;
        __builtin_prefetch(ahead);
        if constexpr (sizeof(T) == 4) __builtin_prefetch(ahead + 16);
      }
      E::pack(x + k, t.row_stride, t.order, t.panel + std::int64_t{k} * kPanelTokens);
    }
  }
  constexpr std::int32_t kHalf = 32 / sizeof(T);
  alignas(64) T from[kPanelTokens][kSide];
  alignas(64) std::uint16_t to[kSide * kPanelTokens];
  for (; k < t.padded; k += kSide) {
    const std::int32_t cols = t.cols - k < 0 ? 0 : t.cols - k < kSide ? t.cols - k : kSide;
    const std::int32_t width = t.padded - k < kSide ? t.padded - k : kSide;
    __builtin_memset(from, 0, sizeof(from));
    for (std::int32_t m = 0; cols > 0 && m < t.rows; ++m) {
      const T* row = x + m * t.row_stride + k;
      std::int32_t done =
          0;  // sizes that the compiler knows are no calls: 16×1 blocks come here all the time
      for (; done + kHalf <= cols; done += kHalf) __builtin_memcpy(from[m] + done, row + done, 32);
      if (done < cols)
        __builtin_memcpy(from[m] + done, row + done, static_cast<std::size_t>(cols - done) * sizeof(T));
    }
    E::pack(from[0], kSide, t.order, to);
    __builtin_memcpy(t.panel + std::int64_t{k} * kPanelTokens, to,
                     static_cast<std::size_t>(width) * kPanelTokens * 2);
  }
}

template <class E>
void pack_pairs(const PairPack& t) {
  if (t.floats) return pack_rows<E, float>(t);
  pack_rows<E, std::uint16_t>(t);
}

// 32 × 32, or half as many outputs.
template <class E, class T>
void store_square(const float* sums, bool by_token, int outputs, const float* bias, Activation activation,
                  const PairRows<T>& y) {
  if constexpr (E::kByToken) {
    if (by_token) return E::store_tokens(sums, bias, activation, y);
  }
  E::store(sums, outputs, bias, activation, y);
}

// The first `cols` of each row to Y; whole rows by a size that the compiler knows: calls of memcpy took 7 %
// of a layer of 8 tokens.
template <class T, int kSide>
[[gnu::always_inline]] inline void put_rows(const T (*rows)[kSide], T* y, std::int64_t stride,
                                            std::int32_t count, std::int32_t cols) {
  for (std::int32_t m = 0; m < count; ++m, y += stride) {
    if (cols == kSide) {
      __builtin_memcpy(y, rows[m], sizeof(rows[m]));
    } else {
      __builtin_memcpy(y, rows[m], static_cast<std::size_t>(cols) * sizeof(T));
    }
  }
}

template <class E, class T>
void store_rows(const PairStore& t) {
  constexpr std::int32_t kSide = 32;
  auto* y = static_cast<T*>(t.y);
  alignas(64) T to[kPanelTokens][kSide];
  for (std::int32_t n = 0; n < t.cols; n += kSide) {
    const std::int32_t cols = t.cols - n < kSide ? t.cols - n : kSide;
    const float* sums = t.sums + n * kPanelTokens;
    if (cols == kSide && t.rows == kPanelTokens) {
      store_square<E, T>(sums, t.by_token, kSide, t.bias + n, t.activation, {y + n, t.row_stride});
      continue;
    }
    // Whole tiles of sums are there: 16 or 32 of them.
    store_square<E, T>(sums, t.by_token, cols <= kTileRows ? kTileRows : kSide, t.bias + n, t.activation,
                       {to[0], kSide});
    put_rows(to, y + n, t.row_stride, t.rows, cols);
  }
}

template <class E>
void store_pairs(const PairStore& t) {
  if (t.floats) return store_rows<E, float>(t);
  store_rows<E, std::uint16_t>(t);
}

// As rows of 32 features, and from there in another order, where sums or the panel are by token.
template <class E>
void keep_rows(const PairKeep& t) {
  constexpr std::int32_t kSide = 32;
  if (!t.by_token && t.order != PairOrder::tokens) return E::keep(t);
  const std::int32_t width = t.by_token ? kSide : kTileRows;
  alignas(64) std::uint16_t square[kPanelTokens * kSide];
  for (std::int32_t o = 0; o < t.rows; o += width) {
    const std::int64_t feature = t.feature + o, within = feature % kSide;
    const bool tokens = t.order == PairOrder::tokens;
    std::uint16_t* to = tokens ? t.panel + (feature - within) * kPanelTokens + within : square;
    store_square<E, std::uint16_t>(t.sums + o * kPanelTokens, t.by_token, width, t.bias + o, t.activation,
                                   {to, kSide});
    if (!tokens) E::pack(square, kSide, t.order, t.panel + feature * kPanelTokens);
  }
}

template <class E>
void keep_pairs(const PairKeep& t) {
  if (!t.times) return keep_rows<E>(t);
  constexpr std::int32_t kSide = 32;
  const std::int32_t width = t.by_token ? kSide : kTileRows;
  const bool tokens = t.order == PairOrder::tokens;       // rows of 32 features; else features side by side
  alignas(64) std::uint16_t group[kPanelTokens * kSide];  // of which `width` features
  PairKeep part = t;
  part.panel = group;
  for (std::int32_t o = 0; o < t.rows; o += width) {
    const std::int64_t feature = t.feature + o, within = tokens ? feature % kSide : 0;
    part.sums = t.sums + o * kPanelTokens, part.bias = t.bias + o;
    part.rows = t.rows - o < width ? t.rows - o : width;
    part.feature = within;
    keep_rows<E>(part);
    std::uint16_t* to = t.panel + (feature - within) * kPanelTokens + within;
    if (!tokens) E::times(to, group, part.rows * kPanelTokens);
    for (int m = 0; tokens && m < kPanelTokens; ++m, to += kSide)
      E::times(to, group + m * kSide + within, width);
  }
}

template <class E>
void pack_token_pairs(const PairTokens& t) {
  if (t.rows == kPanelTokens && t.cols == 32) return E::pack_tokens(t.x, t.row_stride, t.to);
  alignas(64) std::uint16_t from[kPanelTokens][32];
  __builtin_memset(from, 0, sizeof(from));
  for (std::int32_t m = 0; m < t.rows; ++m) {
    __builtin_memcpy(from[m], t.x + m * t.row_stride, static_cast<std::size_t>(t.cols) * 2);
  }
  E::pack_tokens(from[0], 32, t.to);
}

template <class E>
void deliver_pairs(const PairDeliver& t) {
  constexpr int kMost = 16;  // E::deliver's
  for (std::int32_t i = 0; i < t.count; ++i) {
    const PairRun& run = t.runs[i];
    for (std::int32_t from = 0; from < run.length; from += kMost) {
      float* partial = t.partial == nullptr ? nullptr : t.partial + run.to + from;  // one chunk has none
      const std::int32_t length = run.length - from < kMost ? run.length - from : kMost;
      const std::int32_t valid = run.valid - from < 0 ? 0 : run.valid - from;
      E::deliver(t.sums + run.from + from, valid < length ? valid : length, length,
                 t.first ? nullptr : partial, t.last ? nullptr : partial, t.out + run.to + from);
    }
  }
}

template <class E>
bool finite_pairs(const std::uint16_t* values, std::int64_t count) {
  std::uint16_t most = 0;  // of the exponents, and what is below them; signs are shifted out
  for (std::int64_t i = 0; i < count; ++i) {
    const auto exponent = static_cast<std::uint16_t>(values[i] << 1);
    most = exponent > most ? exponent : most;
  }
  return most < 0xff00;
}

}  // namespace rarefy::cpu
