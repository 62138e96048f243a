// Products in int8 by vpdpbusd, on lanes of outputs (lanes.h): a dword of x, four features without sign, is
// broadcast to 16 outputs' dwords of W, or 8.
#pragma once

#include "cpu/lane_kernels.h"
#include "cpu/simd/avx512_half.h"
#include "cpu/simd/avx512_quads.h"
#include "cpu/simd/few_quads.h"
#include "cpu/simd/quad_lanes.h"

namespace rarefy::cpu {

struct Avx512VnniLanes {
  using Isa = Avx512;
  using Sum = __m512i;
  using Vector = __m512i;
  using Gather = GatherLanes<PanelTokens<Avx512, false>>;
  static constexpr bool kParts = false, kRounds = false;
  static constexpr std::int32_t kLine = kLaneTokens * 4;

  static std::int32_t* at(const LaneProduct& t, int token, int o) {
    return t.sums + std::int64_t{token} * t.rows + o;
  }
  // From −128 · Σ w, as x is kept plus 128: two instructions less for each sum than where they end.
  static Sum start(const LaneProduct& t, int token, int o) {
    if (!t.first) return _mm512_loadu_si512(at(t, token, o));
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_loadu_si512(t.totals + o), 7));
  }
  static void keep(const LaneProduct& t, int token, int o, Sum sum) {
    _mm512_storeu_si512(at(t, token, o), sum);
  }
  static Vector broadcast(const char* x) {
    std::int32_t four;
    __builtin_memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  template <Storage kStorage>
  static Vector weights(const char* w) {
    return _mm512_loadu_si512(w);
  }
  // By name: of the intrinsic, GCC 12 keeps copies of all sums, in memory.
  static Sum dot(Sum sum, Vector x, Vector w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }

  static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }

  static __m512 to_float(Sum sum) { return _mm512_cvtepi32_ps(sum); }
  template <int Vectors>
  using Finish = ScaledSums<Avx512VnniLanes, Vectors>;
};

// The same on half a vector: two of these instructions a cycle do what one does on a whole.
struct Avx512VnniHalfLanes : EightQuads<Avx512Half, true> {
  using Vector = __m256i;

  template <Storage kStorage>
  static Vector weights(const char* w) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  }
  static Sum dot(Sum sum, Vector x, Vector w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
};

}  // namespace rarefy::cpu
