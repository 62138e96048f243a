// Products in bf16 pairs by vdpbf16ps on lanes of outputs (lanes.h): a pair of x is broadcast to 16 outputs'
// pairs of W. The sums are made as in avx512_pairs.h, pair by pair in one accumulator, and leave as they do
// there: the bits are the same.
#pragma once

#include "cpu/lane_kernels.h"
#include "cpu/simd/avx512.h"

namespace rarefy::cpu {

// Two features of 32 tokens, or of the first 16, put together as Avx512Pairs::pair does.
template <bool kHalf>
struct Avx512PairTokens {
  static constexpr std::int32_t kFeatures = 2;
  static void put(const LaneGather& t, std::int32_t line, const std::uint32_t* offsets) {
    const __m512i a = _mm512_loadu_si512(t.panel + offsets[0]), b = _mm512_loadu_si512(t.panel + offsets[1]);
    std::uint16_t* to = t.to + 4 * kLaneTokens / 2 * line;
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
    if constexpr (!kHalf) _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(a, b));
  }
};

template <bool kHalf>
struct Avx512PairLanes {
  using Isa = Avx512;
  using Sum = __m512;
  using Vector = __m512i;
  using Gather = GatherLanes<Avx512PairTokens<kHalf>>;
  static constexpr bool kParts = false, kRounds = true;
  static constexpr std::int32_t kLine = kLaneTokens * 4;

  static float* at(const LaneProduct& t, int token, int o) {
    return reinterpret_cast<float*>(t.sums) + std::int64_t{token} * t.rows + o;
  }
  static Sum start(const LaneProduct& t, int token, int o) {
    return t.first ? _mm512_setzero_ps() : _mm512_loadu_ps(at(t, token, o));
  }
  static void keep(const LaneProduct& t, int token, int o, Sum sum) {
    _mm512_storeu_ps(at(t, token, o), sum);
  }
  static Vector broadcast(const char* x) {
    std::int32_t pair;
    __builtin_memcpy(&pair, x, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  template <Storage kStorage>
  static Vector weights(const char* w) {
    return _mm512_loadu_si512(w);
  }
  static Sum dot(Sum sum, Vector x, Vector w) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }

  template <int Vectors>
  struct Finish {
    __m512 start[Vectors];

    Finish(const LaneProduct& t, std::int32_t /*first*/, std::int32_t row) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) start[v] = _mm512_loadu_ps(t.start + row + v * Isa::kWidth);
    }
    __m512 operator()(Sum sum, int /*m*/, int v) const { return _mm512_add_ps(sum, start[v]); }
  };

  // Rounded rows of Y, activated as Avx512Pairs::store does.
  template <int Tokens, int Vectors>
  static void store(const LaneProduct& t, const Sum (&sum)[Tokens][Vectors], std::int32_t first,
                    std::int32_t row) {
    constexpr int kCols = Vectors * Isa::kWidth;
    if (t.cols <= row) return;
    alignas(64) float out[Tokens][kCols];
    const Finish<Vectors> finish(t, first, row);
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        _mm512_store_ps(out[m] + v * Isa::kWidth, finish(sum[m][v], m, v));
      }
    }
    const std::int32_t tokens = t.tokens - first < Tokens ? t.tokens - first : Tokens;
    const std::int32_t cols = t.cols - row < kCols ? t.cols - row : kCols;
    store_rows<Vectors>(t.activation, out[0], tokens, cols,
                        static_cast<std::uint16_t*>(t.y) + first * t.row_stride + row, t.row_stride);
  }

 private:
  template <int Vectors>
  [[gnu::noinline]] static void store_rows(Activation activation, const float* out, std::int32_t tokens,
                                           std::int32_t cols, std::uint16_t* y, std::int64_t stride) {
    constexpr int kCols = Vectors * Isa::kWidth;
    with_activation(activation, [&]<Activation kActivation>() {
      for (std::int32_t m = 0; m < tokens; ++m, out += kCols, y += stride) {
        const __m512 low = activate_bf16<Avx512, kActivation>(_mm512_load_ps(out));
        const __m512 high =
            Vectors == 1 ? low
                         : activate_bf16<Avx512, kActivation>(_mm512_load_ps(out + kCols - Isa::kWidth));
        const auto line = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        if (Vectors == 2 && cols == kCols) {
          _mm512_storeu_si512(y, line);
        } else if (Vectors == 1 && cols == kCols) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_castsi512_si256(line));
        } else {
          alignas(64) std::uint16_t edge[32];
          _mm512_store_si512(edge, line);
          __builtin_memcpy(y, edge, static_cast<std::size_t>(cols) * sizeof(*y));
        }
      }
    });
  }
};

static void multiply_pair_lanes(const LaneProduct& t) {
  if (t.next.half) return multiply_gathering<Avx512PairLanes<true>>(t);
  multiply_gathering<Avx512PairLanes<false>>(t);
}

}  // namespace rarefy::cpu
