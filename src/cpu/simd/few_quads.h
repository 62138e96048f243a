// Up to 4 or 8 tokens in int8 on AVX-512: their panel, lines of as many dwords; and, of 4, products on W as
// AMX's tiles have it, [group][output][64 features], where a vector of W is one output's and meets 64 bytes
// of a token by vpdpbusd, which every processor with AMX has.
#pragma once

#include "cpu/simd/avx512_quads.h"

namespace rarefy::cpu {

// `Engine` is whose unit compiles it, as in avx512_quads.h.
template <class Engine, int kTokens>
struct FewQuads {
  using Quads = Avx512Quads<Engine, true>;
  static_assert(kTokens == 4 || kTokens == 8);

  // Lines of four features, [token][4]; or a feature's tokens side by side, as lines are put together from
  // them.
  static void pack(const QuadPack& t) {
    if (t.bf16) return pack_of<std::uint16_t>(t);
    pack_of<float>(t);
  }

  // The outputs of one block row: `blocks` groups with `run` offsets each, whose bytes go to `next.to`.
  static void multiply(const LaneProduct& t) {
    auto* x = reinterpret_cast<std::uint8_t*>(t.next.to);
    gather(t, x);
    for (std::int32_t row = 0; row < t.rows; row += kTileRows) {
      for (std::int32_t m = 0; m < t.tokens;) {
        const std::int32_t left = t.tokens - m;
        m += left == 1   ? multiply_some<1>(t, m, row, x)
             : left == 3 ? multiply_some<3>(t, m, row, x)
                         : multiply_some<2>(t, m, row, x);
      }
    }
  }

 private:
  template <class T>
  static void pack_of(const QuadPack& t) {
    const T* x = static_cast<const T*>(t.x);
    float inverse[kTokens];
    for (std::int32_t m = 0; m < kTokens; ++m) {
      scale_row<Quads>(t, m, x + m * t.row_stride, t.scales[m], inverse[m]);
    }
    const bool quads = t.order == PairOrder::paired;
    const __m512i bytes = _mm512_broadcast_i32x4(Quads::transposed());
    for (std::int32_t k = 0; k < t.padded; k += kQuadGroup) {
      const std::int32_t cols = t.cols - k < 0 ? 0 : t.cols - k < kQuadGroup ? t.cols - k : kQuadGroup;
      __m512i v[kTokens];
      for (std::int32_t m = 0; m < kTokens; ++m) {
        alignas(64) T edge[kQuadGroup] = {};
        const T* from = x + m * t.row_stride + k;
        if (m < t.rows && cols < kQuadGroup) {
          __builtin_memcpy(edge, from, static_cast<std::size_t>(cols) * sizeof(T));
        }
        v[m] = Quads::rounded(m < t.rows && cols == kQuadGroup ? from : edge, inverse[m]);
      }
      alignas(64) std::uint8_t to[kQuadGroup * kTokens];
      for (int i = 0; i < 4; ++i) {  // a lane of 128 bits is a line: Quads::line
        const __m512i a = lines(v, i);
        const __m512i of_a = quads ? a : _mm512_shuffle_epi8(a, bytes);
        if constexpr (kTokens == 4) {
          _mm512_store_si512(to + 64 * i, of_a);
        } else {
          const __m512i b = lines(v + 4, i);
          const __m512i of_b = quads ? b : _mm512_shuffle_epi8(b, bytes);
          side_by_side(quads ? of_a : _mm512_unpacklo_epi32(of_a, of_b),
                       quads ? of_b : _mm512_unpackhi_epi32(of_a, of_b), to + 128 * i);
        }
      }
      const std::int32_t width = t.padded - k < kQuadGroup ? t.padded - k : kQuadGroup;
      __builtin_memcpy(t.panel + std::int64_t{k} * kTokens, to, static_cast<std::size_t>(width) * kTokens);
    }
  }

  // Of four tokens, lines 4 · i … 4 · i + 3, [token][4].
  static __m512i lines(const __m512i* v, int i) {
    const auto pair = [&](__m512i a, __m512i b) {
      return i < 2 ? _mm512_unpacklo_epi32(a, b) : _mm512_unpackhi_epi32(a, b);
    };
    const __m512i low = pair(v[0], v[1]), high = pair(v[2], v[3]);
    return i % 2 == 0 ? _mm512_unpacklo_epi64(low, high) : _mm512_unpackhi_epi64(low, high);
  }
  // Lanes of 128 bits of both in turn.
  static void side_by_side(__m512i a, __m512i b, std::uint8_t* to) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(a, first, b));
    _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(a, second, b));
  }

  // Groups of each token, 64 bytes each, from four lines at a time.
  static void gather(const LaneProduct& t, std::uint8_t* to) {
    const __m512i by_token = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const std::int64_t stride = std::int64_t{t.blocks} * kQuadGroup;
    const std::uint32_t* offset = t.next.offsets;
    for (std::int32_t g = 0; g < t.blocks; ++g, offset += t.run) {
      for (int first = 0; first < kGroup / 2; first += 4, to += 16) {
        __m128i four[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int at = first + i;
          const auto there = [&](const std::uint8_t* p) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
          };
          if (t.run == kQuadGroup) {
            interleave_few<kTokens>(t.next.panel, offset + kQuad * at, four + i);
            continue;
          }
          four[i] = t.run == kGroup / 2 ? there(few_quads_at<kTokens>(t.next.panel, offset[at]))
                                        : there(few_quads_at<kTokens>(t.next.panel, *offset) + 16 * at);
        }
        const __m512i low = _mm512_inserti32x4(_mm512_castsi128_si512(four[0]), four[1], 1);
        const __m512i all = _mm512_inserti32x4(_mm512_inserti32x4(low, four[2], 2), four[3], 3);
        alignas(64) std::uint8_t tokens[64];
        _mm512_store_si512(tokens, _mm512_permutexvar_epi32(by_token, all));
        for (std::int32_t m = 0; m < t.tokens; ++m) __builtin_memcpy(to + m * stride, tokens + 16 * m, 16);
      }
    }
  }

  // Tokens m … m + Tokens of 16 outputs. Several share what is read of W, for which they have the sums of
  // eight outputs at a time (three of 4096² in 32×32: .69 → .41 ms, of 768→3072 47 → 41 us).
  template <int Tokens>
  static std::int32_t multiply_some(const LaneProduct& t, std::int32_t m, std::int32_t row,
                                    const std::uint8_t* x) {
    constexpr int kRows = Tokens == 1 ? kTileRows : kTileRows / 2;
    const std::int64_t stride = std::int64_t{t.blocks} * kQuadGroup;
    x += m * stride;
    for (std::int32_t first = row; first < row + kTileRows; first += kRows) {
      __m512i sum[(Tokens * kRows + kTileRows - 1) / kTileRows * kTileRows];
#pragma GCC unroll 32
      for (__m512i& s : sum) s = _mm512_setzero_si512();
      const auto* w = static_cast<const std::int8_t*>(t.w) + std::int64_t{first} * kQuadGroup;
      const std::uint8_t* at = x;
      for (std::int32_t g = 0; g < t.blocks; ++g, w += std::int64_t{t.rows} * kQuadGroup, at += kQuadGroup) {
        __m512i v[Tokens];
#pragma GCC unroll 3
        for (int i = 0; i < Tokens; ++i) v[i] = _mm512_loadu_si512(at + i * stride);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          __builtin_prefetch(w + r * kQuadGroup + kAhead);
          const auto* of = reinterpret_cast<const __m512i*>(w + r * kQuadGroup);
          if constexpr (Tokens == 1) {
            __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r]) : "v"(v[0]), "m"(*of));
            continue;
          }
          const __m512i once = _mm512_loadu_si512(of);
#pragma GCC unroll 3
          for (int i = 0; i < Tokens; ++i) {
            __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[i * kRows + r]) : "v"(v[i]), "v"(once));
          }
        }
      }
      store<kRows>(t, m, first, added_up(sum));
      if constexpr (Tokens == 3) store<kRows>(t, m + 2, first, added_up(sum + kTileRows));
    }
    return Tokens;
  }

  // The lanes of each of 16 vectors, as one.
  static __m512i added_up(const __m512i* sum) {
    __m512i four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const auto pair = [&](int at) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(sum[at], sum[at + 1]),
                                _mm512_unpackhi_epi32(sum[at], sum[at + 1]));
      };
      const __m512i a = pair(4 * i), b = pair(4 * i + 2);
      four[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    const auto halves = [](__m512i a, __m512i b) {  // lanes of 128 bits, two by two
      return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    };
    return halves(halves(four[0], four[1]), halves(four[2], four[3]));
  }

  // 16 outputs of a token, or eight of two, of which the second may not be there.
  template <int kRows>
  static void store(const LaneProduct& t, std::int32_t token, std::int32_t row, __m512i sum) {
    constexpr bool kTwo = kRows < kTileRows;
    const std::int32_t cols = t.cols - row, count = cols < kRows ? cols : kRows;
    if (count <= 0) return;
    const bool second = kTwo && token + 1 < t.tokens;
    const auto of_outputs = [&](const void* from) {
      return kTwo ? _mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i*>(from)))
                  : _mm512_loadu_si512(from);
    };
    const auto floats = [&](const float* from) { return _mm512_castsi512_ps(of_outputs(from)); };
    const __m512i exact = _mm512_sub_epi32(sum, _mm512_slli_epi32(of_outputs(t.totals + row), 7));
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), floats(t.scales + row));
    const __m512 of_token = _mm512_mask_blend_ps(kTwo ? 0xff00 : 0, _mm512_set1_ps(t.token_scales[token]),
                                                 _mm512_set1_ps(t.token_scales[token + (second ? 1 : 0)]));
    const __m512 y = activate<Avx512>(t.activation, _mm512_fmadd_ps(scaled, of_token, floats(t.start + row)));
    const auto mask = static_cast<__mmask16>((1U << count) - 1);
    const std::int64_t at = token * t.row_stride + row;
    if (t.out == Storage::f32) {
      float* to = static_cast<float*>(t.y) + at;
      _mm512_mask_storeu_ps(to, mask, y);
      if (second) _mm512_mask_storeu_ps(to + t.row_stride, mask, _mm512_shuffle_f32x4(y, y, 0xee));
      return;
    }
    alignas(32) std::uint16_t rounded[kTileRows];
    Avx512::store_bf16(rounded, y);
    for (int i = 0; i < (second ? 2 : 1); ++i) {
      __builtin_memcpy(static_cast<std::uint16_t*>(t.y) + at + i * t.row_stride, rounded + i * kRows,
                       static_cast<std::size_t>(count) * 2);
    }
  }

  static constexpr std::int64_t kAhead = 4096;  // bytes of W
};

}  // namespace rarefy::cpu
