// The weight gradient's dot products in bf16 (dot.h): a lane holds two tokens of a feature, whose products
// vdpbf16ps adds to one float. For blocks that are no vectors along a side; those are grad_weight_pairs.cc's.
#pragma once

#include "cpu/dot.h"
#include "cpu/simd/avx512.h"

namespace rarefy::cpu {

struct Avx512PairDots : Avx512 {
  static Vec fma(Vec a, Vec b, Vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

  // 32 features of a token; those past `cols` are 0.
  static __m512i line(const std::uint16_t* x, std::int32_t cols) {
    return cols >= 32 ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((1U << cols) - 1, x);
  }

  // A panel of 16 pairs of tokens a line. Two tokens' features are interleaved within 128 bits: 4 of each 8
  // of them in either half, which their lines' places undo.
  static void pack(const PackTask& task) {
    const RowBlock& from = task.from;
    const auto* x = static_cast<const std::uint16_t*>(from.data);
    for (std::int32_t m = 0; m < task.lanes; m += kWidth) {
      for (std::int32_t k = 0; k < from.cols; k += 2 * kWidth) {
        Vec low[kWidth], high[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          const std::int32_t t = 2 * (m + i);
          const std::uint16_t* at = x + t * from.row_stride + k;
          const __m512i a = t < from.rows ? line(at, from.cols - k) : _mm512_setzero_si512();
          const __m512i b =
              t + 1 < from.rows ? line(at + from.row_stride, from.cols - k) : _mm512_setzero_si512();
          low[i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
          high[i] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
        }
        transpose(low);
        transpose(high);
        float* to = task.panel + std::int64_t{k} * task.lanes + m;
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          const int feature = i / 4 * 8 + i % 4;
          if (k + feature < from.cols) store(to + std::int64_t{feature} * task.lanes, low[i]);
          if (k + feature + 4 < from.cols) store(to + std::int64_t{feature + 4} * task.lanes, high[i]);
        }
      }
    }
  }
};

constexpr Kernels pair_dots_table(const char* family) {
  Kernels table{};
  table.family = family;
  table.width = Avx512PairDots::kWidth;
  table.registers = Avx512PairDots::kRegisters;
  table.tokens_of_lane = 2;
  table.pack = Avx512PairDots::pack;
  table.dot = dot<Avx512PairDots>;
  table.round = round_to<Avx512PairDots>;
  return table;
}

}  // namespace rarefy::cpu
