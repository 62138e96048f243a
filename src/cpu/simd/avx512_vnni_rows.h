// Products in int8 by vpdpbusd, for blocks of few outputs: 4 outputs × 64 tokens of sums in registers, tokens
// as lanes. Four bytes of W are broadcast to vectors of x, four features of 16 tokens each, and where columns
// are stored one by one, these are made on the way: 8 unpacks of bytes and words beside 16 products, on other
// ports.
#pragma once

#include "cpu/simd/avx512_quads.h"

namespace rarefy::cpu {

struct Avx512VnniRows {
  static constexpr int kRows = 4, kTokens = 64;  // outputs whose sums are in registers; tokens of a panel

  // Below, lanes of outputs are faster; those of 32 outputs always are, and 12, 20, 28 have no lanes (Zen 5:
  // docs/design/cpu_kernels.md; where one product starts in a cycle nobody measured, and R×1's are kept).
  static std::int32_t fewest(std::int64_t rows, bool fours, bool two) {
    if (rows >= 32) return 0;
    if (rows != 4 && rows % 8 != 0) return 1;
    if (!two || rows == 16) return rows == 4 ? 12 : rows == 8 ? 20 : 48;
    if (rows == 4) return fours ? 5 : 13;
    return rows == 8 ? fours ? 9 : 24 : fours ? 16 : 28;
  }

  static std::int32_t multiply(const QuadRows& t) {
    switch (t.vectors) {
      case 1: return multiply_source<1>(t);
      case 2: return multiply_source<2>(t);
      case 3: return multiply_source<3>(t);
      default: return multiply_source<4>(t);
    }
  }

 private:
  template <int kVectors>
  static std::int32_t multiply_source(const QuadRows& t) {
    switch (t.source) {
      case PairSource::columns: return multiply_all<PairSource::columns, kVectors>(t);
      case PairSource::lines: return multiply_all<PairSource::lines, kVectors>(t);
      default: return multiply_all<PairSource::whole, kVectors>(t);
    }
  }

  template <PairSource kSource, int kVectors>
  static std::int32_t multiply_all(const QuadRows& t) {
    std::int32_t next = t.line;
    for (std::int32_t row = 0; row < t.rows; row += kRows) next = multiply_rows<kSource, kVectors>(t, row);
    return next;
  }

  // Bytes of W that the first of 16 outputs and more ask for: 4096², 16×16, 14.5 → 12 ms. Smaller ones read
  // too little in a step.
  static constexpr std::int64_t kAhead = 3072;

  // By name, as in avx512_vnni.h.
  static __m512i dot(__m512i sum, __m512i x, __m512i w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
  }
  static __m512i load(const std::uint8_t* from) { return _mm512_loadu_si512(from); }

  // In bytes. Offsets are those of panels of 32 tokens, in words.
  static std::int64_t place(std::uint32_t offset) {
    return std::int64_t{offset} * 2 * (kTokens / kPanelTokens);
  }

  // A line of four features, 16 tokens a vector.
  template <PairSource kSource, int kVectors>
  static void line(const std::uint8_t* panel, const std::uint32_t* offset, __m512i (&x)[kVectors]) {
    if constexpr (kSource == PairSource::columns) {
      const auto column = [&](int i) { return load(panel + place(offset[i])); };
      const __m512i a = column(0), b = column(1), c = column(2), d = column(3);
      const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
      x[0] = _mm512_unpacklo_epi16(ab, cd);
      if constexpr (kVectors > 1) x[1] = _mm512_unpackhi_epi16(ab, cd);
      if constexpr (kVectors > 2) {
        const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
        x[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
        if constexpr (kVectors > 3) x[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
      }
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[v] = load(panel + 64 * v);
    }
  }

  template <PairSource kSource, int kVectors>
  static std::int32_t multiply_rows(const QuadRows& t, std::int32_t row) {
    std::int32_t* sums = t.sums + std::int64_t{row} * kTokens;
    __m512i sum[kRows][kVectors];
    const auto each = [](auto f) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) f(r, v);
      }
    };
    if (t.first) {
      each([&](int r, int v) { sum[r][v] = _mm512_setzero_si512(); });
    } else {
      each([&](int r, int v) { sum[r][v] = _mm512_loadu_si512(sums + r * kTokens + 16 * v); });
    }
    const std::int64_t stride = std::int64_t{t.rows} * kQuad;
    const std::int8_t* w = t.w + t.line * stride + row * kQuad;
    const bool leads = row == 0 && stride >= 64;
    const auto step = [&](const std::uint8_t* from, const std::uint32_t* offset) {
      __m512i x[kVectors];
      if (leads) __builtin_prefetch(w + kAhead);
      line<kSource>(from, offset, x);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        std::int32_t four;
        __builtin_memcpy(&four, w + r * kQuad, sizeof(four));
        const __m512i wv = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = dot(sum[r][v], x[v], wv);
      }
      w += stride;
    };
    constexpr std::int32_t kOffsets = offsets_of(kSource, kQuad), kLines = kGroup / 2;
    constexpr std::int32_t kStep = kSource == PairSource::whole ? kLines : 1;  // lines for one test
    const std::uint32_t* offset = t.offsets + std::int64_t{t.line} * kOffsets / kLines;
    std::int32_t at = t.line;
    for (; at < t.lines && *offset < t.end; at += kStep, offset += kStep * kOffsets / kLines) {
      const std::uint8_t* from = kSource == PairSource::columns ? t.panel : t.panel + place(*offset);
      step(from, offset);
      for (std::int32_t i = at + 1; kStep > 1 && i < at + kStep && i < t.lines; ++i) {
        step(from += kQuad * kTokens, offset);
      }
    }
    each([&](int r, int v) { _mm512_storeu_si512(sums + r * kTokens + 16 * v, sum[r][v]); });
    return at < t.lines ? at : t.lines;
  }
};

}  // namespace rarefy::cpu
