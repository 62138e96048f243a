// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/collect.h"

namespace rarefy::cpu {

struct Avx512 {
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;
  using Vec = __m512;
  static constexpr bool kEdges = true;  // few.h takes blocks that do not fill vectors

  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec set1(float x) { return _mm512_set1_ps(x); }
  // A bit for each of 16 integers that is below the limit.
  static std::uint16_t below_16(const std::int32_t* p, std::int32_t limit) {
    return _mm512_cmplt_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(limit));
  }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if either is NaN
  static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
  static Vec select_negative(Vec x, Vec if_negative, Vec otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), otherwise, if_negative);
  }
  static Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec scale(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
  // x - ⌊x⌋, 0 for infinities; v · 2^⌊x⌋ for any x; 1 / x to 2⁻¹⁴, exact for powers of 2; min(|x|, most).
  static Vec fraction(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static Vec scale_floor(Vec v, Vec x) { return _mm512_scalef_ps(v, x); }
  static Vec reciprocal(Vec x) { return _mm512_rcp14_ps(x); }
  static Vec magnitude(Vec x, float most) { return _mm512_range_ps(x, set1(most), 0b1010); }
  static float sum(Vec v) { return _mm512_reduce_add_ps(v); }
  static void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {  // four sums for the shuffles of two
    const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const Vec abcd = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

  // Each one's sum, to four neighbours.
  static void add_sums(Vec a, Vec b, Vec c, Vec d, float* to) {
    alignas(16) float four[4];
    sum4(a, b, c, d, four);
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm_load_ps(four)));
  }

  // The sums of each N neighbouring lanes, to the first 16 / N floats of `out`.
  template <int N>
  static void fold(Vec v, float* out) {
    v = add(v, _mm512_permute_ps(v, 0b10110001));
    if constexpr (N >= 4) v = add(v, _mm512_permute_ps(v, 0b01001110));
    if constexpr (N == 8) v = add(v, _mm512_shuffle_f32x4(v, v, 0b10110001));
    store(out, _mm512_maskz_compress_ps(N == 2 ? 0x5555 : N == 4 ? 0x1111 : 0x0101, v));
  }

  static Vec load_bf16(const std::uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store_bf16(std::uint16_t* p, Vec v) {  // to nearest even; NaN stays a (quiet) NaN
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i words = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
  }
  static Vec load_i8(const std::int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static Vec load_f16(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_f16(std::uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  // N elements, over and over.
  template <int N>
  static Vec repeat(const float* p) {
    if constexpr (N == 1) return set1(*p);
    if constexpr (N == 2) return _mm512_castpd_ps(_mm512_broadcastsd_pd(_mm_castsi128_pd(_mm_loadu_si64(p))));
    if constexpr (N == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    if constexpr (N == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
  }
  // Each of four elements, in all lanes: a load less would be a shuffle more than Zen 5 has room for.
  static void four(const float* p, Vec (&to)[4]) {
    const Vec v = repeat<4>(p);
    to[0] = set1(*p);
    to[1] = _mm512_permute_ps(v, 0x55);
    to[2] = _mm512_permute_ps(v, 0xaa);
    to[3] = _mm512_permute_ps(v, 0xff);
  }
  // Lanes first … first + 3, four times each.
  static Vec each_four_times(Vec v, int first) {
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(first)), v);
  }
  // The same as repeat, but in the lanes of `to` alone.
  template <int N>
  static Vec repeat(Vec others, __mmask16 to, const float* p) {
    if constexpr (N == 1) return _mm512_mask_broadcastss_ps(others, to, _mm_load_ss(p));
    if constexpr (N == 2) return _mm512_mask_broadcast_f32x2(others, to, _mm_castsi128_ps(_mm_loadu_si64(p)));
    if constexpr (N == 4) return _mm512_mask_broadcast_f32x4(others, to, _mm_loadu_ps(p));
    if constexpr (N == 8) return _mm512_mask_broadcast_f32x8(others, to, _mm256_loadu_ps(p));
  }
  // … and in the upper half; a and b in a half each; the lower or the upper half in both.
  template <int N>
  static Vec repeat_above(Vec below, const float* p) {
    return repeat<N>(below, 0xff00, p);
  }
  // p[0] and p[1] over and over, above p[2] and p[3]. By doubles: GCC broadcasts those from memory, pairs of
  // floats by way of a register and a shuffle.
  static Vec twos(const float* p) {
    double below, above;
    __builtin_memcpy(&below, p, sizeof(below));
    __builtin_memcpy(&above, p + 2, sizeof(above));
    return _mm512_castpd_ps(_mm512_mask_mov_pd(_mm512_set1_pd(below), 0xf0, _mm512_set1_pd(above)));
  }
  static Vec two_halves(float a, float b) { return _mm512_mask_mov_ps(set1(a), 0xff00, set1(b)); }
  static Vec half_twice(Vec v, int upper) {
    return upper != 0 ? _mm512_shuffle_f32x4(v, v, 0b11101110) : _mm512_shuffle_f32x4(v, v, 0b01000100);
  }
  // Of every four lanes the i-th.
  template <int i>
  static Vec one_of_four(Vec v) {
    return _mm512_permute_ps(v, i * 0b01010101);
  }
  // Fours of x, [column][4], in a quarter each: those of every fourth column of `index`.
  template <class Index>
  static Vec quads(const float* x, const Index* index) {
    const auto four = [&](int i) { return _mm_loadu_ps(x + std::int64_t{index[4 * i]} * 4); };
    const __m256 below = _mm256_insertf128_ps(_mm256_castps128_ps256(four(0)), four(1), 1);
    const __m256 above = _mm256_insertf128_ps(_mm256_castps128_ps256(four(2)), four(3), 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(below), above, 1);
  }
  // Four numbers in each quarter of the lower half, four others in each of the upper.
  static Vec two_fours(const float* lower, const float* upper) {
    return _mm512_mask_broadcast_f32x4(_mm512_broadcast_f32x4(_mm_loadu_ps(lower)), 0xff00,
                                       _mm_loadu_ps(upper));
  }
  // The same as repeat, or a whole vector.
  template <int N>
  static Vec repeat_any(const float* p) {
    if constexpr (N == 16)
      return load(p);
    else
      return repeat<N>(p);
  }
  // Onto y: of four vectors that transpose_quads turned, lane i of each quarter (128 bits) is vector i's, and
  // all its quarters are one row, or each two of them.
  template <int Quarters>
  static void add_quarters(Vec v, float* y) {
    if constexpr (Quarters == 4) {
      const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
      const __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
      _mm_storeu_ps(y, _mm_add_ps(_mm_loadu_ps(y), sum));
    } else {
      static_assert(Quarters == 2);
      const Vec sum = add(v, _mm512_shuffle_f32x4(v, v, 0b10110001));
      const __m512i rows = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11);
      const __m256 all = _mm512_castps512_ps256(_mm512_permutexvar_ps(rows, sum));
      _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), all));
    }
  }
  // The first elements, each Times times; and what lies in the first lanes of every Times of v, added up.
  template <int Times>
  static Vec each(const float* p) {
    if constexpr (Times == 4) return each_four_times(repeat<4>(p), 0);
    if constexpr (Times == 2) {
      const __m512i two = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      return _mm512_permutexvar_ps(two, repeat<8>(p));
    }
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(lane, repeat<2>(p));
  }
  template <int Times>
  static Vec fold(Vec v) {
    const Vec halves = add(v, _mm512_shuffle_f32x4(v, v, 0b01001110));
    if constexpr (Times == 8) return halves;
    const Vec quarters = add(halves, _mm512_shuffle_f32x4(halves, halves, 0b10110001));
    if constexpr (Times == 4) return quarters;
    return add(quarters, _mm512_permute_ps(quarters, 0b01001110));
  }
  // Size lanes with the N elements from x + index[0] · N, Size with those from x + index[1] · N, …
  template <int Size, int N>
  static Vec group(const float* x, const std::int32_t* index) {
    if constexpr (Size == 2 && N == 2) {  // by doubles, as twos
      const auto two = [&](int i) {
        double both;
        __builtin_memcpy(&both, x + std::int64_t{index[i]} * 2, sizeof(both));
        return _mm_set_sd(both);
      };
      __m512d lanes = _mm512_broadcastsd_pd(two(0));
#pragma GCC unroll 7
      for (int i = 1; i < 8; ++i)
        lanes = _mm512_mask_broadcastsd_pd(lanes, static_cast<__mmask8>(1U << i), two(i));
      return _mm512_castpd_ps(lanes);
    }
    Vec lanes = repeat<N>(x + std::int64_t{index[0]} * N);
#pragma GCC unroll 8
    for (int i = 1; i < kWidth / Size; ++i) {
      const auto to = static_cast<__mmask16>(((1U << Size) - 1) << (i * Size));
      lanes = repeat<N>(lanes, to, x + std::int64_t{index[i]} * N);
    }
    return lanes;
  }

  // x[index[0]], x[index[1]], …: by one instruction; load by load. The first lanes of v, 0 in the others; and
  // of what is in memory.
  static Vec gather(const float* x, const std::int32_t* index) {
    return _mm512_i32gather_ps(_mm512_loadu_si512(index), x, 4);
  }
  static Vec gather(const float* x, const std::uint16_t* index) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index));
    return _mm512_i32gather_ps(_mm512_cvtepu16_epi32(narrow), x, 4);
  }
  // Of the first `count` alone, 0 beside them: neither an index nor a line of x is read for others.
  static Vec gather_first(const float* x, const std::int32_t* index, int count) {
    return gather_lanes(x, _mm512_maskz_loadu_epi32(mask(count), index), mask(count));
  }
  static Vec gather_first(const float* x, const std::uint16_t* index, int count) {
    return gather_lanes(x, _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(count), index)), mask(count));
  }
  static Vec gather_lanes(const float* x, __m512i index, __mmask16 lanes) {
    return _mm512_mask_i32gather_ps(zero(), lanes, index, x, 4);
  }
  template <class Index>
  static Vec collect(const float* x, const Index* index) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(collect8(x, index)), collect8(x, index + 8), 1);
  }
  // v's lanes in another order.
  static Vec permute(Vec v, const std::int32_t* from) {
    return _mm512_permutexvar_ps(_mm512_loadu_si512(from), v);
  }
  static Vec first(Vec v, int count) { return _mm512_maskz_mov_ps(mask(count), v); }
  static Vec load_first(const float* p, int count) { return _mm512_maskz_loadu_ps(mask(count), p); }
  static void store_first(float* p, Vec v, int count) { _mm512_mask_storeu_ps(p, mask(count), v); }
  static __mmask16 mask(int count) { return static_cast<__mmask16>((1U << count) - 1); }

  // Which of 16 columns from k on a row of bits stores, and how many; the first lanes, spread to those; a · b
  // + c there, c elsewhere.
  using Lanes = std::uint16_t;
  static Lanes lanes(const std::uint8_t* bits, std::int64_t k) {
    Lanes stored;
    __builtin_memcpy(&stored, bits + k / 8, sizeof(stored));
    return stored;
  }
  static int count(Lanes stored) { return __builtin_popcount(stored); }
  // Other lanes hold what no one looks at, as in spread.
  static Vec expand(Vec v, Lanes stored) { return _mm512_mask_expand_ps(v, stored, v); }
  static Vec fma_in(Lanes stored, Vec a, Vec b, Vec c) { return _mm512_mask3_fmadd_ps(a, b, c, stored); }
  // The first values (columns, in bytes) to the lanes that are stored; others hold what no one looks at. As
  // one register in and out: into another one it waits for what that held before, and GCC reads memory by the
  // same instruction, in microcode (Zen 5: 6 cycles a step of windows.h, 12 and 15; Zen 4: 16 lanes 1.6
  // cycles, else 5).
  static Vec spread(Lanes stored, const float* p) {
    const Vec v = load(p);
    return _mm512_mask_expand_ps(v, stored, v);
  }
  static __m512i expand_columns(Lanes stored, const std::uint8_t* columns) {
    const __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(columns)));
    return _mm512_mask_expand_epi32(v, stored, v);
  }
  // x[which], of 64.
  static Vec pick64(const float* x, __m512i which) {
    const __mmask16 high = _mm512_test_epi32_mask(which, _mm512_set1_epi32(32));
    return _mm512_mask_blend_ps(high, pick(x, which), pick(x + 32, which));
  }
  // Of each four of 32 columns of x two, for the 16 values whose positions begin at `codes`.
  static __m512i positions(const std::uint8_t* codes) {
    std::int32_t word;
    __builtin_memcpy(&word, codes, sizeof(word));
    const __m512i shift = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i four = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    const __m512i code = _mm512_srlv_epi32(_mm512_set1_epi32(word), shift);
    return _mm512_ternarylogic_epi32(code, _mm512_set1_epi32(3), four, 0xea);  // (code & 3) | four
  }
  static Vec pick(const float* x, __m512i which) {
    return _mm512_permutex2var_ps(load(x), which, load(x + kWidth));
  }

  // Half of a transpose: 4 × 4 inside each 128-bit lane of four rows.
  static void transpose_quads(Vec (&m)[4]) {
    const Vec a = _mm512_unpacklo_ps(m[0], m[1]), b = _mm512_unpackhi_ps(m[0], m[1]);
    const Vec c = _mm512_unpacklo_ps(m[2], m[3]), d = _mm512_unpackhi_ps(m[2], m[3]);
    m[0] = _mm512_shuffle_ps(a, c, 0x44);
    m[1] = _mm512_shuffle_ps(a, c, 0xee);
    m[2] = _mm512_shuffle_ps(b, d, 0x44);
    m[3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  // The other half: 4 × 4 lanes, of every fourth row.
  static void transpose_lanes(Vec (&m)[4]) {
    const Vec a = _mm512_shuffle_f32x4(m[0], m[1], 0x44), b = _mm512_shuffle_f32x4(m[0], m[1], 0xee);
    const Vec c = _mm512_shuffle_f32x4(m[2], m[3], 0x44), d = _mm512_shuffle_f32x4(m[2], m[3], 0xee);
    m[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    m[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
    m[2] = _mm512_shuffle_f32x4(b, d, 0x88);
    m[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  static void transpose(Vec (&m)[kWidth]) {
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      Vec rows[4] = {m[i], m[i + 1], m[i + 2], m[i + 3]};
      transpose_quads(rows);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) m[i + j] = rows[j];
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Vec rows[4] = {m[i], m[i + 4], m[i + 8], m[i + 12]};
      transpose_lanes(rows);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) m[i + 4 * j] = rows[j];
    }
  }
};

}  // namespace rarefy::cpu
