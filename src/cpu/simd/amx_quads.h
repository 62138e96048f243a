// Products in int8 on AMX's tiles: those of amx.h with another instruction. Both of its operands have a sign.
#pragma once

#include "cpu/activation.h"
#include "cpu/simd/amx.h"
#include "cpu/simd/avx512_quads.h"

namespace rarefy::cpu {

struct Int8Tiles {
  template <int kSums, int kA, int kB>
  [[gnu::always_inline]] static void dot() {
    tile::dot_int8<kSums, kA, kB>();
  }
};

struct AmxQuads : Avx512Quads<AmxQuads, false> {
  static constexpr bool kByToken = true;
  static constexpr int kRangeOutputs = 64;  // whose rows of Y, in f32, are 256 bytes: 32 at once took longer
  static constexpr int kTokensOutputs = kTokensWide;
  static constexpr double kTileCycles = Amx::kTileCycles;

  // What 32 × 32 of Y take, in ns: a step of 64 features as they are, put together of lines or of columns (to
  // 32 outputs, or twice to 16), of halves more than of lines; and what leaving takes longer by output
  // (docs/design/cpu/int8.md).
  static std::int32_t fewest(const QuadBlocks& b) {
    constexpr double kStep = 56, kLines[] = {94, 74}, kColumns[] = {130, 84}, kHalves = 15, kLeaving = 300;
    const bool wide = b.rows % kGroup == 0;
    const double steps = static_cast<double>(b.features) / kQuadGroup;
    if (wide && b.cols % kQuadGroup == 0) return 5;
    if (wide && b.cols % (kQuadGroup / 2) == 0) return b.density * kHalves * steps < kLeaving ? 5 : 0;
    const bool lines = b.cols % kQuad == 0 && b.rows % kTileRows == 0;
    // Of several threads two share a core's tiles, which halves what they multiply, not what they gather.
    const double gathered = b.more * (lines ? kLines : kColumns)[wide];
    const bool faster = b.alone ? gathered * steps + kLeaving > kStep * steps : b.more > 0.65;
    if (!faster) return 0;
    return b.more > 0.75 ? 5 : 96;  // with fewer tokens it is W that takes the time, and there is more of it
  }

  static void enter() { Amx::enter(); }
  static void leave() { Amx::leave(); }

  static void range(const PairRange& t) { multiply_range<AmxQuads, Int8Tiles>(t); }

  // 64 features of a token, or those that there are, as pieces of kSide bytes that are kPanelTokens pieces
  // apart.
  template <int kSide, class T>
  static void pack_row(const T* x, std::int32_t count, float inverse, std::uint8_t* to) {
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    alignas(64) T edge[kQuadGroup];
    if (count < kQuadGroup) {
      __builtin_memset(edge, 0, sizeof(edge));
      __builtin_memcpy(edge, x, static_cast<std::size_t>(count) * sizeof(T));
      x = edge;
    }
    const __m512i row = _mm512_permutexvar_epi32(in_order, rounded(x, inverse));
    if constexpr (kSide == kQuadGroup) {
      _mm512_storeu_si512(to, row);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(row));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + kPanelTokens, _mm512_extracti64x4_epi64(row, 1));
    }
  }
  static void join_halves(const std::uint16_t* a, const std::uint16_t* b, std::uint16_t* to) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    _mm512_storeu_si512(to, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }

  // Row by row, up to kTokensOutputs of each; none, or less, where an output block goes beyond the last one.
  template <class T>
  static void store_tokens(const QuadStore& t, T* y) {
    if (t.cols == kTokensOutputs && t.activation == Activation::none) return store_whole(t, y);
    const std::int32_t vectors = (t.cols + 15) / 16;
    for (std::int32_t m = 0; t.cols > 0 && m < t.rows; ++m, y += t.row_stride) {
      alignas(64) float row[kTokensOutputs];
      alignas(64) T out[kTokensOutputs];
      const __m512 token = _mm512_set1_ps(t.tokens[m]);
      for (std::int32_t v = 0; v < vectors; ++v) {
        const __m512 scales = _mm512_loadu_ps(t.scales + 16 * v), bias = _mm512_loadu_ps(t.bias + 16 * v);
        _mm512_store_ps(row + 16 * v, scaled(t, m, v, scales, token, bias));
      }
      activate_all<Avx512>(t.activation, row, vectors * 16);
      for (std::int32_t v = 0; v < vectors; ++v) put(out + 16 * v, _mm512_load_ps(row + 16 * v));
      __builtin_memcpy(y, out, static_cast<std::size_t>(t.cols) * sizeof(T));
    }
  }

 private:
  static __m512 scaled(const QuadStore& t, int m, int v, __m512 scales, __m512 token, __m512 bias) {
    const std::int32_t* sums = t.sums + (v / 2 * kPanelTokens + m) * 32 + v % 2 * 16;
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums));
    return _mm512_fmadd_ps(_mm512_mul_ps(sum, scales), token, bias);
  }
  template <class T>
  static void store_whole(const QuadStore& t, T* y) {
    constexpr int kVectors = kTokensOutputs / 16;
    __m512 scales[kVectors], bias[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      scales[v] = _mm512_loadu_ps(t.scales + 16 * v);
      bias[v] = _mm512_loadu_ps(t.bias + 16 * v);
    }
    for (std::int32_t m = 0; m < t.rows; ++m, y += t.row_stride) {
      const __m512 token = _mm512_set1_ps(t.tokens[m]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        if (v * 16 * sizeof(T) % 64 == 0) __builtin_prefetch(y + kTokensOutputs + 16 * v, 0, 2);
        put(y + 16 * v, scaled(t, m, v, scales[v], token, bias[v]));
      }
    }
  }
};

}  // namespace rarefy::cpu
