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

// 32 tokens, X's elements being of type T. E::absmax gives the bits of the largest |x| of a row as a float's;
// E::pack rounds 32 tokens × 64 features: anything where the inverse is 0, as the scale is NaN there.
template <class E, class T>
void pack_quads_of(const QuadPack& t) {
  constexpr std::int32_t kSide = kQuadGroup;
  const T* x = static_cast<const T*>(t.x);
  alignas(64) float inverse[kPanelTokens];
  for (std::int32_t m = 0; m < kPanelTokens; ++m) {
    scale_token<E>(m < t.rows ? E::absmax(x + m * t.row_stride, t.cols) : 0, t.scales[m], inverse[m]);
  }
  std::int32_t k = 0;
  if (t.rows == kPanelTokens) {
    for (; k + kSide <= t.cols; k += kSide) {
      E::pack(x + k, t.row_stride, inverse, t.quads, t.panel + std::int64_t{k} * kPanelTokens);
    }
  }
  alignas(64) T from[kPanelTokens][kSide];
  alignas(64) std::uint8_t to[kSide * kPanelTokens];
  for (; k < t.padded; k += kSide) {
    const std::int32_t cols = t.cols - k < 0 ? 0 : t.cols - k < kSide ? t.cols - k : kSide;
    const std::int32_t width = t.padded - k < kSide ? t.padded - k : kSide;
    __builtin_memset(from, 0, sizeof(from));
    for (std::int32_t m = 0; cols > 0 && m < t.rows; ++m) {
      const T* row = x + m * t.row_stride + k;
      std::int32_t done = 0;
      for (; done + 16 <= cols; done += 16) __builtin_memcpy(from[m] + done, row + done, 16 * sizeof(T));
      if (done < cols) {
        __builtin_memcpy(from[m] + done, row + done, static_cast<std::size_t>(cols - done) * sizeof(T));
      }
    }
    E::pack(from[0], kSide, inverse, t.quads, to);
    __builtin_memcpy(t.panel + std::int64_t{k} * kPanelTokens, to,
                     static_cast<std::size_t>(width) * kPanelTokens);
  }
}

template <class E>
void pack_quads(const QuadPack& t) {
  if (t.bf16) return pack_quads_of<E, std::uint16_t>(t);
  pack_quads_of<E, float>(t);
}

// E::store gives 32 tokens × 16 outputs.
template <class E, class T>
void store_quads_of(const QuadStore& t) {
  constexpr std::int32_t kSide = kTileRows;
  alignas(64) T to[kPanelTokens][kSide];
  T* y = static_cast<T*>(t.y);
  for (std::int32_t n = 0; n < t.cols; n += kSide) {
    const std::int32_t cols = t.cols - n < kSide ? t.cols - n : kSide;
    if (cols == kSide && t.rows == kPanelTokens) {
      // As in pair_kernels.h: the lines of the next panel, which this one's stores do not wait for.
      for (std::int32_t m = kPanelTokens; m < 2 * kPanelTokens; ++m)
        __builtin_prefetch(y + n + m * t.row_stride, 1);
      E::store(t, n, y + n, t.row_stride);
      continue;
    }
    E::store(t, n, to[0], std::int64_t{kSide});  // whole tiles of sums are there
    for (std::int32_t m = 0; m < t.rows; ++m) {
      __builtin_memcpy(y + n + m * t.row_stride, to[m], static_cast<std::size_t>(cols) * sizeof(T));
    }
  }
}

template <class E>
void store_quads(const QuadStore& t) {
  if (t.bf16) return store_quads_of<E, std::uint16_t>(t);
  store_quads_of<E, float>(t);
}

template <class E>
constexpr QuadKernels quad_table(const char* family, void (*pack_few)(const QuadPack&) = nullptr,
                                 void (*few)(const LaneProduct&) = nullptr) {
  return {family,         E::kTileCycles, kTileRows, E::enter, E::leave, pack_quads<E>, multiply_pairs<E>,
          store_quads<E>, nullptr,        pack_few,  few};
}

}  // namespace rarefy::cpu
