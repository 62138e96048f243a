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
      for (std::int32_t m = 0; m < t.tokens; ++m) {
        store(t, m, row, sums(t, row, x + std::int64_t{m} * t.blocks * kQuadGroup));
      }
    }
  }

 private:
  template <class T>
  static void pack_of(const QuadPack& t) {
    const T* x = static_cast<const T*>(t.x);
    float inverse[kTokens];
    for (std::int32_t m = 0; m < kTokens; ++m) {
      scale_token<Quads>(m < t.rows ? Quads::absmax(x + m * t.row_stride, t.cols) : 0, t.scales[m],
                         inverse[m]);
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

  // Of 16 outputs.
  static __m512i sums(const LaneProduct& t, std::int32_t row, const std::uint8_t* x) {
    __m512i sum[kTileRows];
#pragma GCC unroll 16
    for (__m512i& s : sum) s = _mm512_setzero_si512();
    const auto* w = static_cast<const std::int8_t*>(t.w) + std::int64_t{row} * kQuadGroup;
    for (std::int32_t g = 0; g < t.blocks; ++g, w += std::int64_t{t.rows} * kQuadGroup, x += kQuadGroup) {
      const __m512i v = _mm512_loadu_si512(x);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        __builtin_prefetch(w + r * kQuadGroup + kAhead);
        const auto* of = reinterpret_cast<const __m512i*>(w + r * kQuadGroup);
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r]) : "v"(v), "m"(*of));
      }
    }
    const __m512i exact = added_up(sum);
    return _mm512_sub_epi32(exact, _mm512_slli_epi32(_mm512_loadu_si512(t.totals + row), 7));
  }

  // The lanes of each of 16 vectors, as one.
  static __m512i added_up(const __m512i (&sum)[kTileRows]) {
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

  static void store(const LaneProduct& t, std::int32_t token, std::int32_t row, __m512i sum) {
    const std::int32_t cols = t.cols - row;
    if (cols <= 0) return;
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(t.scales + row));
    const __m512 of_token = _mm512_set1_ps(t.token_scales[token]);
    const __m512 y =
        activate<Avx512>(t.activation, _mm512_fmadd_ps(scaled, of_token, _mm512_loadu_ps(t.start + row)));
    const std::int64_t at = token * t.row_stride + row;
    if (t.out == Storage::f32) {
      const auto mask = static_cast<__mmask16>(cols >= kTileRows ? 0xffff : (1U << cols) - 1);
      return _mm512_mask_storeu_ps(static_cast<float*>(t.y) + at, mask, y);
    }
    alignas(32) std::uint16_t rounded[kTileRows];
    Avx512::store_bf16(rounded, y);
    const auto count = static_cast<std::size_t>(cols < kTileRows ? cols : kTileRows);
    __builtin_memcpy(static_cast<std::uint16_t*>(t.y) + at, rounded, count * 2);
  }

  static constexpr std::int64_t kAhead = 4096;  // bytes of W
};

}  // namespace rarefy::cpu
