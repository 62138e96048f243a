// The kernels of quads.h as templates over an engine E (simd/…). Shared here: the scale of a token, edges
// through buffers. What multiplies is pair_kernels.h.
#pragma once

#include "cpu/pair_kernels.h"
#include "cpu/quads.h"

namespace rarefy::cpu {

// core/quantize.h's rule in a translation unit of an instruction set: from the bits of the largest |x|.
template <class E>
void scale_token(std::uint32_t bits, float& scale, float& inverse) {
  constexpr float kLevels = 127, kSmallest = 0x1p-100F;
  if (bits >= 0x7f800000U) {
    scale = __builtin_nanf("");
    inverse = 0;
    return;
  }
  float most;
  __builtin_memcpy(&most, &bits, sizeof(most));
  if (most < kSmallest) most = kSmallest;
  scale = most / kLevels;
  inverse = kLevels / most;
}

// Of row m of what is packed, whose elements lie from x on.
template <class E, class T>
void scale_row(const QuadPack& t, std::int32_t m, const T* x, float& scale, float& inverse) {
  if (t.given == nullptr || m >= t.rows) {
    return scale_token<E>(m < t.rows ? E::absmax(x, t.cols) : 0, scale, inverse);
  }
  scale = t.given[m];
  inverse = 1;
}

// A panel, X's elements being of type T. E::absmax gives the bits of the largest |x| of a row as a float's;
// E::pack rounds its tokens × 64 features: anything where the inverse is 0, as the scale is NaN there.
template <class E, class T>
void pack_quads_of(const QuadPack& t) {
  constexpr std::int32_t kSide = kQuadGroup, kTokens = E::kTokens;
  const T* x = static_cast<const T*>(t.x);
  const bool quads = t.order == PairOrder::paired;
  alignas(64) float inverse[kTokens];
  const std::int32_t live = (t.rows + 15) / 16;  // vectors of tokens; what others hold does not matter
  for (std::int32_t m = 0; m < kTokens; ++m) {
    scale_row<E>(t, m, x + m * t.row_stride, t.scales[m], inverse[m]);
  }
  std::int32_t k = 0;
  if (t.rows == kTokens) {
    for (; k + kSide <= t.cols; k += kSide) {
      E::pack(x + k, t.row_stride, inverse, live, quads, t.panel + std::int64_t{k} * kTokens);
    }
  }
  const std::int32_t start = k;
  alignas(64) T from[kTokens][kSide];
  alignas(64) std::uint8_t to[kSide * kTokens];
  for (; k < t.padded; k += kSide) {
    const std::int32_t cols = t.cols - k < 0 ? 0 : t.cols - k < kSide ? t.cols - k : kSide;
    const std::int32_t width = t.padded - k < kSide ? t.padded - k : kSide;
    if (k == start || cols < kSide) __builtin_memset(from, 0, sizeof(from));
    for (std::int32_t m = 0; cols > 0 && m < t.rows; ++m) {
      const T* row = x + m * t.row_stride + k;
      std::int32_t done = 0;
      for (; done + 16 <= cols; done += 16) __builtin_memcpy(from[m] + done, row + done, 16 * sizeof(T));
      if (done < cols) {
        __builtin_memcpy(from[m] + done, row + done, static_cast<std::size_t>(cols - done) * sizeof(T));
      }
    }
    E::pack(from[0], kSide, inverse, live, quads, to);
    __builtin_memcpy(t.panel + std::int64_t{k} * kTokens, to, static_cast<std::size_t>(width) * kTokens);
  }
}

// The same by token, whose row is in L1 when it is rounded. E::pack_row takes `count` features, up to 64.
template <class E, class T, int kSide>
void pack_tokens_of(const QuadPack& t) {
  for (std::int32_t m = 0; m < kPanelTokens; ++m) {
    const T* x = static_cast<const T*>(t.x) + m * t.row_stride;
    float inverse;
    scale_row<E>(t, m, x, t.scales[m], inverse);
    std::uint8_t* to = t.panel + m * kSide;
    for (std::int32_t k = 0; m < t.rows && k < t.padded; k += kQuadGroup, to += kQuadGroup * kPanelTokens) {
      E::template pack_row<kSide>(x + k, t.cols > k ? t.cols - k : 0, inverse, to);
    }
  }
}

template <class E>
void pack_quads(const QuadPack& t) {
  if constexpr (E::kByToken) {
    const auto by_token = [&]<int kSide> {
      if (t.bf16) return pack_tokens_of<E, std::uint16_t, kSide>(t);
      pack_tokens_of<E, float, kSide>(t);
    };
    if (t.order == PairOrder::tokens) return by_token.template operator()<kQuadGroup>();
    if (t.order == PairOrder::halves) return by_token.template operator()<kQuadGroup / 2>();
  }
  if (t.bf16) return pack_quads_of<E, std::uint16_t>(t);
  pack_quads_of<E, float>(t);
}

// E::store gives a panel's tokens × 16 outputs.
template <class E, class T>
void store_quads_of(const QuadStore& t) {
  constexpr std::int32_t kSide = kTileRows, kTokens = E::kTokens;
  alignas(64) T to[kTokens][kSide];
  T* y = static_cast<T*>(t.y);
  if constexpr (E::kByToken) {
    if (t.by_token) return E::store_tokens(t, y);
  }
  for (std::int32_t n = 0; n < t.cols; n += kSide) {
    const std::int32_t cols = t.cols - n < kSide ? t.cols - n : kSide;
    if (cols == kSide && t.rows == kTokens) {
      E::store(t, n, y + n, t.row_stride);
      continue;
    }
    E::store(t, n, to[0], std::int64_t{kSide});  // whole tiles of sums are there
    put_rows(to, y + n, t.row_stride, t.rows, cols);
  }
}

template <class E>
void store_quads(const QuadStore& t) {
  if (t.bf16) return store_quads_of<E, std::uint16_t>(t);
  store_quads_of<E, float>(t);
}

template <class E>
constexpr QuadKernels quad_table(const char* family, const QuadFew& few = {}) {
  QuadKernels table{};
  table.family = family;
  table.tile_cycles = E::kTileCycles;
  table.rows = table.join = kTileRows;
  table.tokens = E::kTokens;
  table.enter = E::enter;
  table.leave = E::leave;
  table.pack = pack_quads<E>;
  table.activate = activate_to_int8<typename E::Isa>;
  if constexpr (requires { E::range; }) {
    table.range = E::range;
  } else {
    table.multiply = multiply_pairs<E>;
  }
  table.store = store_quads<E>;
  table.few[0] = few;
  return table;
}

}  // namespace rarefy::cpu
