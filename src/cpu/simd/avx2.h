// Eight floats: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "cpu/simd/collect.h"
#include "cpu/simd/expand_table.h"

namespace rarefy::cpu {

struct Avx2 {
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;
  using Vec = __m256;
  static constexpr bool kEdges = true;  // as in avx512.h

  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec set1(float x) { return _mm256_set1_ps(x); }
  // A bit for each of 16 integers that is below the limit.
  static std::uint16_t below_16(const std::int32_t* p, std::int32_t limit) {
    const auto eight = [&](const std::int32_t* of) {
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(of));
      return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(limit), values)));
    };
    return static_cast<std::uint16_t>(eight(p) | eight(p + 8) << 8);
  }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
  static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is NaN
  static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
  static Vec select_negative(Vec x, Vec if_negative, Vec otherwise) {
    return _mm256_blendv_ps(otherwise, if_negative, _mm256_cmp_ps(x, zero(), _CMP_LT_OQ));
  }
  static Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Vec scale(Vec v, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  // x - ⌊x⌋, 0 for infinities; v · 2^⌊x⌋ from 2⁻¹²⁵ to 2¹²⁷, and by these beyond; min(|x|, most).
  static Vec floor(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static Vec fraction(Vec x) { return _mm256_max_ps(_mm256_sub_ps(x, floor(x)), zero()); }
  static Vec scale_floor(Vec v, Vec x) {
    return scale(v, _mm256_min_ps(_mm256_max_ps(floor(x), set1(-125.0F)), set1(127.0F)));
  }
  static Vec magnitude(Vec x, float most) {
    return _mm256_min_ps(_mm256_andnot_ps(set1(-0.0F), x), set1(most));
  }
  static float sum(Vec v) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
  }
  static void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {  // four sums for the shuffles of two
    const Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const Vec abcd = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
  }

  // Each of four elements, in all lanes.
  static void four(const float* p, Vec (&to)[4]) {
    for (int m = 0; m < 4; ++m) to[m] = set1(p[m]);
  }
  // Lanes first and first + 1, four times each.
  static Vec each_four_times(Vec v, int first) {
    const __m256i lane = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_ps(v, _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
  }
  // Of four from p on, by a load and a shuffle within halves (vpermps is two instructions on a Zen 3).
  static Vec each_four_times(const float* p, int first) {
    const __m256i lane = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar_ps(repeat<4>(p), _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
  }
  // Of every four lanes the i-th.
  template <int i>
  static Vec one_of_four(Vec v) {
    return _mm256_permute_ps(v, i * 0b01010101);
  }
  // Fours of x, [column][4], in a half each: those of every fourth column of `index`.
  template <class Index>
  static Vec quads(const float* x, const Index* index) {
    const auto four = [&](int i) { return _mm_loadu_ps(x + std::int64_t{index[4 * i]} * 4); };
    return _mm256_insertf128_ps(_mm256_castps128_ps256(four(0)), four(1), 1);
  }
  // Each one's sum, to four neighbours.
  static void add_sums(Vec a, Vec b, Vec c, Vec d, float* to) {
    alignas(16) float four[4];
    sum4(a, b, c, d, four);
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm_load_ps(four)));
  }

  // The sums of each N neighbouring lanes, to the first 8 / N floats of `out`.
  template <int N>
  static void fold(Vec v, float* out) {
    v = add(v, _mm256_permute_ps(v, 0b10110001));
    if constexpr (N == 4) v = add(v, _mm256_permute_ps(v, 0b01001110));
    alignas(32) float lane[kWidth];
    store(lane, v);
    for (int i = 0; i < kWidth / N; ++i) out[i] = lane[i * N];
  }

  static Vec load_bf16(const std::uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store_bf16(std::uint16_t* p, Vec v) {  // to nearest even; NaN stays a (quiet) NaN
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static Vec load_i8(const std::int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
  }
  static Vec load_f16(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f16(std::uint16_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  // N elements, over and over.
  template <int N>
  static Vec repeat(const float* p) {
    if constexpr (N == 1) return set1(*p);
    if constexpr (N == 2) return _mm256_castpd_ps(_mm256_broadcastsd_pd(_mm_castsi128_pd(_mm_loadu_si64(p))));
    if constexpr (N == 4) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  }
  // Size lanes with the N elements from x + index[0] · N, Size with those from x + index[1] · N, …
  template <int Size, int N>
  static Vec group(const float* x, const std::int32_t* index) {
    const auto from = [&](int i) { return repeat<N>(x + std::int64_t{index[i]} * N); };
    if constexpr (Size == 4) return _mm256_blend_ps(from(0), from(1), 0xf0);
    if constexpr (Size == 2) {
      return _mm256_blend_ps(_mm256_blend_ps(from(0), from(1), 0x0c), _mm256_blend_ps(from(2), from(3), 0xc0),
                             0xf0);
    }
  }

  // x[index[0]], x[index[1]], …: by one instruction; load by load. The first lanes of v, 0 in the others; and
  // of what is in memory.
  static Vec gather(const float* x, const std::int32_t* index) {
    return _mm256_i32gather_ps(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index)), 4);
  }
  static Vec gather(const float* x, const std::uint16_t* index) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
    return _mm256_i32gather_ps(x, _mm256_cvtepu16_epi32(narrow), 4);
  }
  // Of the first `count` alone, 0 beside them: no line of x is read for others.
  static Vec gather_first(const float* x, const std::int32_t* index, int count) {
    return gather_lanes(x, _mm256_maskload_epi32(index, mask(count)), mask(count));
  }
  static Vec gather_first(const float* x, const std::uint16_t* index,
                          int count) {  // there is room behind them
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
    return gather_lanes(x, _mm256_cvtepu16_epi32(narrow), mask(count));
  }
  static Vec gather_lanes(const float* x, __m256i index, __m256i lanes) {
    return _mm256_mask_i32gather_ps(zero(), x, index, _mm256_castsi256_ps(lanes), 4);
  }
  template <class Index>
  static Vec collect(const float* x, const Index* index) {
    return collect8(x, index);
  }
  // v's lanes in another order.
  static Vec permute(Vec v, const std::int32_t* from) {
    return _mm256_permutevar8x32_ps(v, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Vec first(Vec v, int count) { return _mm256_and_ps(v, _mm256_castsi256_ps(mask(count))); }
  static Vec load_first(const float* p, int count) { return _mm256_maskload_ps(p, mask(count)); }
  static void store_first(float* p, Vec v, int count) {  // a masked store is some 20 instructions on AMD
    alignas(32) float all[kWidth];
    _mm256_store_ps(all, v);
    if (count < 4) {
      for (int i = 0; i < count; ++i) p[i] = all[i];
      return;
    }
    _mm_storeu_ps(p, _mm256_castps256_ps128(v));
    _mm_storeu_ps(p + count - 4, _mm_loadu_ps(all + count - 4));
  }
  static __m256i mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  // Which of 8 columns from k on a row of bits stores, and how many; the first lanes, spread to those, what
  // no one looks at elsewhere; a · b + c there, c elsewhere. The sign of a lane's place says that it stores
  // nothing, which is all that vblendvps wants to know: no mask is made of the bits (768→3072 with one token
  // on a Zen 3 .49 → .375 ms).
  struct Lanes {
    std::uint8_t bits;
    __m256i from;
  };
  static Lanes lanes(const std::uint8_t* bits, std::int64_t k) {
    const std::uint8_t stored = bits[k / 8];
    return {stored, _mm256_cvtepi8_epi32(_mm_loadu_si64(kExpand<8>.lane[stored]))};
  }
  static int count(Lanes stored) { return __builtin_popcount(stored.bits); }
  static Vec expand(Vec v, Lanes stored) { return _mm256_permutevar8x32_ps(v, stored.from); }
  static Vec fma_in(Lanes stored, Vec a, Vec b, Vec c) {
    return _mm256_blendv_ps(_mm256_fmadd_ps(a, b, c), c, _mm256_castsi256_ps(stored.from));
  }
  // Of each four of 16 columns of x two, for the 8 values whose positions begin at `codes`: shuffles within
  // halves look at two bits of each.
  static __m256i positions(const std::uint8_t* codes) {
    std::uint16_t word;
    __builtin_memcpy(&word, codes, sizeof(word));
    const __m256i shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    return _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);
  }
  static Vec pick(const float* x, __m256i which) {
    const Vec middle = load(x + 4);  // fours 0 and 2, 1 and 3
    const Vec even = _mm256_blend_ps(load(x), middle, 0xf0), odd = _mm256_blend_ps(middle, load(x + 8), 0xf0);
    return _mm256_blend_ps(_mm256_permutevar_ps(even, which), _mm256_permutevar_ps(odd, which), 0xcc);
  }

  // Half of a transpose: 4 × 4 inside each 128-bit lane of four rows.
  static void transpose_quads(Vec (&m)[4]) {
    const Vec a = _mm256_unpacklo_ps(m[0], m[1]), b = _mm256_unpackhi_ps(m[0], m[1]);
    const Vec c = _mm256_unpacklo_ps(m[2], m[3]), d = _mm256_unpackhi_ps(m[2], m[3]);
    m[0] = _mm256_shuffle_ps(a, c, 0x44);
    m[1] = _mm256_shuffle_ps(a, c, 0xee);
    m[2] = _mm256_shuffle_ps(b, d, 0x44);
    m[3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  // The other half: 2 × 2 lanes, of every fourth row.
  static void transpose_lanes(Vec (&m)[2]) {
    const Vec a = m[0];
    m[0] = _mm256_permute2f128_ps(a, m[1], 0x20);
    m[1] = _mm256_permute2f128_ps(a, m[1], 0x31);
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
      Vec rows[2] = {m[i], m[i + 4]};
      transpose_lanes(rows);
#pragma GCC unroll 4
      for (int j = 0; j < 2; ++j) m[i + 4 * j] = rows[j];
    }
  }
};

}  // namespace rarefy::cpu
