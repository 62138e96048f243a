// Products in int8 on AVX-512: packing, and storing sums that lie by output, as AMX has them.
#pragma once

#include "cpu/quad_kernels.h"
#include "cpu/simd/avx512.h"
#include "cpu/simd/interleave_quad.h"

namespace rarefy::cpu {

// vpdpbusd wants bytes without sign on one side: then x is kept as x + 128, and 128 times the total of an
// output's stored values is taken off its sums. `Engine` is who shares it, in a unit of its own, whose names
// the linker must not mix.
template <class Engine, bool kUnsigned, int kPanel = kPanelTokens>
struct Avx512Quads {
  using Isa = Avx512;
  static constexpr int kFeatures = 4, kTokens = kPanel;
  static constexpr int kEarly = 1;
  static constexpr bool kByToken = false, kByLine = false;

  static std::uint32_t absmax(const float* x, std::int32_t count) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    std::int32_t k = 0;
    for (; k + 32 <= count; k += 32) {
      for (int i = 0; i < 2; ++i) {
        const __m512i v = _mm512_and_si512(_mm512_loadu_si512(x + k + 16 * i), magnitude);
        most[i] = _mm512_max_epu32(most[i], v);
      }
    }
    for (; k < count; k += 16) {
      const auto mask = static_cast<__mmask16>(count - k >= 16 ? 0xffff : (1U << (count - k)) - 1);
      const __m512i v = _mm512_and_si512(_mm512_maskz_loadu_epi32(mask, x + k), magnitude);
      most[0] = _mm512_max_epu32(most[0], v);
    }
    return _mm512_reduce_max_epu32(_mm512_max_epu32(most[0], most[1]));
  }
  static std::uint32_t absmax(const std::uint16_t* x, std::int32_t count) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (std::int32_t k = 0; k < count; k += 32) {
      const auto mask = static_cast<__mmask32>(count - k >= 32 ? ~0U : (1U << (count - k)) - 1);
      most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, x + k), magnitude));
    }
    const __m512i wide =
        _mm512_max_epu32(_mm512_slli_epi32(most, 16),
                         _mm512_and_si512(most, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
    return _mm512_reduce_max_epu32(wide);
  }

  static __m512 load(const float* x) { return Avx512::load(x); }
  static __m512 load(const std::uint16_t* x) { return Avx512::load_bf16(x); }

  // 64 features of a token. Dword r has features 4 · line(r) … : the order in which packing leaves them.
  template <class T>
  static __m512i rounded(const T* x, float inverse) {
    const __m512 by = _mm512_set1_ps(inverse);
    __m512i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + 16 * i), by));
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
    return kUnsigned ? _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80))) : bytes;
  }
  static constexpr int line(int r) { return r % 4 * 4 + r / 4; }
  static __m128i transposed() {  // of 4 × 4 bytes
    return _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  }

  static void transpose(__m512i (&m)[16]) {
    __m512 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) t[i] = _mm512_castsi512_ps(m[i]);
    Avx512::transpose(t);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) m[i] = _mm512_castps_si512(t[i]);
  }

  // 32 tokens × 64 features. A dword is four features of a token: transposed as such, it is in order. Apart,
  // tokens lie in fours 0, 2, 4, 6, 1, 3, 5, 7, which interleaving halves of vectors (quad) undoes.
  template <class T>
  static void pack(const T* x, std::int64_t stride, const float* inverse, int live, bool quads,
                   std::uint8_t* panel) {
    if constexpr (kTokens == 64) return pack_64(x, stride, inverse, live, quads, panel);
#pragma GCC unroll 32
    for (int m = 0; m < kPanelTokens; ++m) __builtin_prefetch(x + m * stride + kQuadGroup);
    __m512i low[16], high[16];
#pragma GCC unroll 16
    for (int m = 0; m < 16; ++m) low[m] = rounded(x + m * stride, inverse[m]);
    transpose(low);
    if (quads) {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) _mm512_storeu_si512(panel + line(r) * kQuadLine, low[r]);
    }
    if (live > 1) {
#pragma GCC unroll 16
      for (int m = 0; m < 16; ++m) high[m] = rounded(x + (m + 16) * stride, inverse[m + 16]);
      transpose(high);
    } else {
#pragma GCC unroll 16
      for (__m512i& row : high) row = _mm512_setzero_si512();
    }
    if (quads) {
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) _mm512_storeu_si512(panel + line(r) * kQuadLine + 64, high[r]);
      return;
    }
    const __m512i bytes = _mm512_broadcast_i32x4(transposed());
    const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 4, 12, 20, 28, 1, 9, 17, 25, 5, 13, 21, 29);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      const __m512i a = _mm512_shuffle_epi8(low[r], bytes), b = _mm512_shuffle_epi8(high[r], bytes);
      std::uint8_t* to = panel + line(r) * kQuadLine;
      _mm512_storeu_si512(to, _mm512_permutex2var_epi32(a, first, b));
      _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi32(a, second, b));
    }
  }

  static void quad(const std::uint16_t* panel, const std::uint32_t* offsets, std::uint16_t* to) {
    interleave_quad(panel, offsets, to);
  }
  static void copy(const std::uint16_t* from, std::uint16_t* to) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    _mm512_storeu_si512(to, a);
    _mm512_storeu_si512(to + 32, b);
  }

  // 16 outputs of 32 tokens, from output `first` on.
  template <class T>
  static void store(const QuadStore& t, std::int32_t first, T* y, std::int64_t stride) {
    for (int half = 0; half < kPanelTokens / 16; ++half, y += 16 * stride)
      store_half(t, first, half, y, stride);
  }

  // 16 outputs of tokens 16 · half … 16 · half + 15.
  template <class T>
  static void store_half(const QuadStore& t, std::int32_t first, int half, T* y, std::int64_t stride) {
    if (t.activation == Activation::none) return store_as<false>(t, first, half, y, stride);
    store_as<true>(t, first, half, y, stride);
  }

 protected:
  static void put(float* y, __m512 v) { Avx512::store(y, v); }
  static void put(std::uint16_t* y, __m512 v) { Avx512::store_bf16(y, v); }

 private:
  // 64 tokens. Apart, a feature's fours of tokens are those of 4 × 4: vector j of what interleaving whole
  // vectors gives has tokens 16 · j … 16 · j + 15.
  template <class T>
  static void pack_64(const T* x, std::int64_t stride, const float* inverse, int live, bool quads,
                      std::uint8_t* panel) {
    alignas(64) std::uint8_t fours[16][kTokens * kQuad];
    const __m512i bytes = _mm512_broadcast_i32x4(transposed());
    for (int j = 0; j < live; ++j) {
#pragma GCC unroll 16
      for (int m = 0; m < 16; ++m) __builtin_prefetch(x + (16 * j + m) * stride + kQuadGroup);
      __m512i v[16];
#pragma GCC unroll 16
      for (int m = 0; m < 16; ++m) v[m] = rounded(x + (16 * j + m) * stride, inverse[16 * j + m]);
      transpose(v);
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        if (quads) {
          _mm512_storeu_si512(panel + line(r) * kTokens * kQuad + 64 * j, v[r]);
        } else {
          _mm512_store_si512(fours[r] + 64 * j, _mm512_shuffle_epi8(v[r], bytes));
        }
      }
    }
    for (int r = 0; r < 16 && !quads; ++r) {
      __m512i v[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) v[j] = _mm512_load_si512(fours[r] + 64 * j);
      const __m512i low[2] = {_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1])};
      const __m512i high[2] = {_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3])};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i feature = i % 2 == 0 ? _mm512_unpacklo_epi64(low[i / 2], high[i / 2])
                                           : _mm512_unpackhi_epi64(low[i / 2], high[i / 2]);
        _mm512_storeu_si512(panel + (4 * line(r) + i) * kTokens, feature);
      }
    }
  }

  template <bool kActivate, class T>
  static void store_as(const QuadStore& t, std::int32_t first, int half, T* y, std::int64_t stride) {
    __m512i sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_loadu_si512(t.sums + (first + i) * kTokens + half * 16);
    transpose(sums);
    // By token: what belongs to the outputs is read once for all of them.
    const __m512i offset = _mm512_slli_epi32(_mm512_loadu_si512(t.totals + first), 7);
    const __m512 scales = _mm512_loadu_ps(t.scales + first), bias = _mm512_loadu_ps(t.bias + first);
    const float* tokens = t.tokens + half * 16;
    constexpr int some = kAtOnce<Avx512>;
#pragma GCC unroll 4
    for (int m = 0; m < 16; m += some) {
      __m512 row[some];
#pragma GCC unroll 4
      for (int i = 0; i < some; ++i) {
        const __m512i sum = kUnsigned ? _mm512_sub_epi32(sums[m + i], offset) : sums[m + i];
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales);
        row[i] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(tokens[m + i]), bias);
      }
      if constexpr (kActivate) activate_several<Avx512>(t.activation, row);
#pragma GCC unroll 4
      for (int i = 0; i < some; ++i, y += stride) {
        put(y, row[i]);
        __builtin_prefetch(y + 32, 0, 2);  // as PairRows does
      }
    }
  }
};

}  // namespace rarefy::cpu
