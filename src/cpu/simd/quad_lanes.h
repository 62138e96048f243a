// Products in int8 on lanes of outputs (lanes.h): where lines of x come from, and the sums of eight outputs,
// on 256 bits. What AVX2, with or without vpdpbusd, and AVX-512 have alike; `I` is the trait of floats whose
// unit compiles it.
#pragma once

#include "cpu/lane_kernels.h"
#include "cpu/quads.h"
#include "cpu/simd/interleave_quad.h"

namespace rarefy::cpu {

// 32 tokens, or the first 16 of them.
template <class I, bool kHalf>
struct PanelTokens {
  static constexpr std::int32_t kFeatures = kQuad;
  static void put(const LaneGather& t, std::int32_t line, const std::uint32_t* offsets) {
    interleave_quad<kHalf>(t.panel, offsets, t.to + kPairLine * line);
  }
};

// Up to 4 or 8, where a feature is as many bytes.
template <class I, int kFew>
struct FewTokens {
  static constexpr std::int32_t kFeatures = kQuad, kTokens = kFew;
  static void put(const LaneGather& t, std::int32_t line, const std::uint32_t* offsets) {
    interleave_few<kTokens>(t.panel, offsets, t.to + kTokens * kQuad / 2 * line);
  }
};

// An engine E of lane_kernels.h on lines of 4 or 8 tokens: those of a panel, or of columns.
template <class E, int kTokens>
struct FewLanes : E {
  using Gather = GatherLanes<FewTokens<typename E::Isa, kTokens>>;
  static constexpr int kVectors = 2;
  static constexpr std::int32_t kLine = kQuad * kTokens;
};

template <class E, int kTokens>
void multiply_few_columns(const LaneProduct& t) {
  multiply_columns<FewLanes<E, kTokens>, FewTokens<typename E::Isa, kTokens>>(t);
}

// Or of panels that are half empty.
template <class E>
struct HalfLanes : E {
  using Gather = GatherLanes<PanelTokens<typename E::Isa, true>>;
};

// How an engine's sums become rows of Y: times the scales of their outputs and of their token, plus the bias.
template <class E, int Vectors>
class ScaledSums {
 public:
  ScaledSums(const LaneProduct& t, std::int32_t first, std::int32_t row) : tokens_(t.token_scales + first) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) {
      scales_[v] = I::load(t.scales + row + v * I::kWidth);
      start_[v] = I::load(t.start + row + v * I::kWidth);
    }
  }
  Vec<typename E::Isa> operator()(typename E::Sum sum, int m, int v) const {
    return I::fma(I::mul(E::to_float(sum), scales_[v]), I::set1(tokens_[m]), start_[v]);
  }

 private:
  using I = typename E::Isa;
  const float* tokens_;
  Vec<I> scales_[Vectors], start_[Vectors];
};

// What an engine on eight outputs needs beside its product. kUnsigned: x is kept plus 128, for vpdpbusd.
template <class I, bool kUnsigned>
struct EightQuads {
  using Isa = I;
  using Sum = __m256i;
  using Gather = GatherLanes<PanelTokens<I, false>>;
  static constexpr bool kParts = false, kRounds = false;
  static constexpr std::int32_t kLine = kLaneTokens * 4;

  static Sum* at(const LaneProduct& t, int token, int o) {
    return reinterpret_cast<Sum*>(t.sums + std::int64_t{token} * t.rows + o);
  }
  // Of x plus 128 from −128 · Σ w: two instructions less for each sum than where they end. Else totals are
  // what sums start from.
  static Sum start(const LaneProduct& t, int token, int o) {
    if (!t.first) return _mm256_loadu_si256(at(t, token, o));
    const __m256i totals = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t.totals + o));
    if constexpr (!kUnsigned) return totals;
    return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(totals, 7));
  }
  static void keep(const LaneProduct& t, int token, int o, Sum sum) {
    _mm256_storeu_si256(at(t, token, o), sum);
  }
  static __m256i broadcast(const char* x) {
    std::int32_t four;
    __builtin_memcpy(&four, x, sizeof(four));
    return _mm256_set1_epi32(four);
  }
  static Sum add(Sum a, Sum b) { return _mm256_add_epi32(a, b); }

  static __m256 to_float(Sum sum) { return _mm256_cvtepi32_ps(sum); }
  template <int Vectors>
  using Finish = ScaledSums<EightQuads, Vectors>;
};

}  // namespace rarefy::cpu
