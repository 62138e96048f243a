// How what windows.h reads is made: the rows of a group are lanes, each at its next element.
#pragma once

#include <limits>

#include "cpu/kernels.h"
#include "cpu/simd/avx512.h"

namespace rarefy::cpu {

static inline __m512i load_lanes(const std::int32_t (&lanes)[kWindowRows]) {
  return _mm512_loadu_si512(lanes);
}

// What a step takes, side by side; nothing behind it is written, where another thread may be.
static inline void put_first(std::uint8_t* to, __mmask16 rows, __m512i v) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(rows, v));
  _mm_mask_storeu_epi8(to, Avx512::mask(__builtin_popcount(rows)), bytes);
}

// The steps of a group: each begins with the leftmost column that is left. 0 if they would be more than there
// is room for; −1: a column is not in the matrix.
static inline std::int32_t make_steps(const WindowGroup& group, const std::int32_t* col, std::int64_t cols,
                                      WindowStep* steps, std::uint8_t* columns) {
  const __m512i none = _mm512_set1_epi32(std::numeric_limits<std::int32_t>::max());
  const __m512i last = _mm512_set1_epi32(static_cast<std::int32_t>(cols - 1)), end = load_lanes(group.end);
  __m512i at = load_lanes(group.begin), next = none;
  __mmask16 rows = 0xffff, wrong = 0;
  for (std::int32_t count = 0;; ++count) {
    const __mmask16 more = _mm512_mask_cmplt_epi32_mask(rows, at, end);
    const __m512i found = _mm512_mask_i32gather_epi32(none, more, at, col, 4);
    next = _mm512_mask_mov_epi32(next, rows, found);
    wrong |= _mm512_mask_cmpgt_epu32_mask(more, found, last);
    if (wrong != 0) return -1;
    at = _mm512_mask_add_epi32(at, more, at, _mm512_set1_epi32(1));
    const std::int32_t leftmost = _mm512_reduce_min_epi32(next);
    if (leftmost == std::numeric_limits<std::int32_t>::max()) return count;
    if (count == group.room) return 0;
    const std::int32_t window = leftmost / kWindowGrain;
    const __m512i column = _mm512_sub_epi32(next, _mm512_set1_epi32(window * kWindowGrain));
    rows = _mm512_cmplt_epi32_mask(column, _mm512_set1_epi32(kWindowColumns));
    put_first(columns, rows, column);
    columns += __builtin_popcount(rows);
    steps[count] = {rows, static_cast<std::uint16_t>(window)};
  }
}

// Values in the order of a group's steps.
static inline void take_values(const WindowGroup& group, const WindowStep* steps, std::int32_t count,
                               const float* values, float* to) {
  __m512i at = load_lanes(group.begin);
  for (const WindowStep* const end = steps + count; steps != end; ++steps) {
    const __mmask16 rows = steps->rows;
    const __m512 taken = _mm512_mask_i32gather_ps(Avx512::zero(), rows, at, values, 4);
    const int size = __builtin_popcount(rows);
    _mm512_mask_storeu_ps(to, Avx512::mask(size), _mm512_maskz_compress_ps(rows, taken));
    to += size;
    at = _mm512_mask_add_epi32(at, rows, at, _mm512_set1_epi32(1));
  }
}

}  // namespace rarefy::cpu
