// Products in int8 by vpdpbusd, for blocks of few outputs: 4 outputs × 64 tokens of sums in registers, tokens
// as lanes. Four bytes of W are broadcast to vectors of x, four features of 16 tokens each, and where columns
// are stored one by one, these are made on the way: 8 unpacks of bytes and words beside 16 products, on other
// ports.
#pragma once

#include "cpu/simd/avx512_quads.h"
#include "cpu/woven.h"

namespace rarefy::cpu {

struct Avx512VnniRows {
  static constexpr int kRows = 4, kTokens = 64;  // outputs whose sums are in registers; tokens of a panel

  // Below, lanes of outputs are faster; those of whole vectors of 32 and more always are (Zen 5:
  // docs/design/cpu/int8.md; where one product starts in a cycle nobody measured, and R×1's are kept).
  static std::int32_t fewest(const QuadBlocks& blocks) {
    const std::int64_t rows = blocks.rows;
    const bool fours = blocks.cols % kQuad == 0;
    if (rows >= 32 && rows % 8 == 0) return 0;
    if (rows != 4 && rows % 8 != 0) return static_cast<std::int32_t>((fours ? 20 : 40) / blocks.more);
    if (!blocks.two || rows == 16) return rows == 4 ? 12 : rows == 8 ? 20 : 48;
    if (rows == 4) return fours ? 5 : 13;
    return rows == 8 ? fours ? 9 : 24 : fours ? 16 : 28;
  }

  static void multiply(const QuadRows& t) {
    switch (t.blocks > 0 ? t.vectors : 0) {
      case 0: break;
      case 1: multiply_source<1>(t); break;
      case 2: multiply_source<2>(t); break;
      case 3: multiply_source<3>(t); break;
      default: multiply_source<4>(t);
    }
    while (t.last && t.leaving->left > 0) step(*t.leaving);
  }

 private:
  template <int kVectors>
  static void multiply_source(const QuadRows& t) {
    switch (t.source) {
      case PairSource::columns: return multiply_part<PairSource::columns, kVectors>(t);
      case PairSource::lines: return multiply_part<PairSource::lines, kVectors>(t);
      default: return multiply_part<PairSource::whole, kVectors>(t);
    }
  }

  template <PairSource kSource, int kVectors>
  static void multiply_part(const QuadRows& t) {
    if (t.last) return multiply_blocks<kSource, kVectors, true>(t);
    multiply_blocks<kSource, kVectors, false>(t);
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

  // Four tokens × 16 outputs to Y, 128 bytes of a row in turn. Lines that were asked for ahead came no
  // sooner: 1–3 % slower.
  [[gnu::always_inline]] static void step(QuadLeaving& t) {
    const QuadStore& out = t.out;
    const std::int32_t token = t.turn / 4 * 16 + t.turn % 4, o = t.done;
    const std::int32_t* from = out.sums + t.turn * kRowsStride + o * 4;
    __m512 row[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_ps(from + i * 16);
    Avx512::transpose_lanes(row);
    const __m512 scales = _mm512_loadu_ps(out.scales + o), bias = _mm512_loadu_ps(out.bias + o);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_castps_si512(row[i]));
      row[i] = _mm512_fmadd_ps(_mm512_mul_ps(sum, scales), _mm512_set1_ps(out.tokens[token + 4 * i]), bias);
    }
    if (out.activation != Activation::none) activate_several<Avx512>(out.activation, row);
    if (out.cols - o < 16 || token + 12 >= out.rows) [[unlikely]] {
      store_odd(t, row);
    } else if (out.bf16) {
      store_four(t, row, static_cast<std::uint16_t*>(out.y) + token * out.row_stride + o);
    } else {
      store_four(t, row, static_cast<float*>(out.y) + token * out.row_stride + o);
    }
    --t.left;
    if ((t.done += 16) >= out.cols) {
      t.done = 0;
      ++t.turn;
    }
  }
  template <class T>
  [[gnu::always_inline]] static void store_four(const QuadLeaving& t, const __m512 (&row)[4], T* y) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) put(y + 4 * i * t.out.row_stride, row[i]);
  }
  static void put(float* y, __m512 v) { Avx512::store(y, v); }
  static void put(std::uint16_t* y, __m512 v) { Avx512::store_bf16(y, v); }
  // Some of them.
  [[gnu::noinline]] static void store_odd(const QuadLeaving& t, const __m512 (&row)[4]) {
    const QuadStore& out = t.out;
    const std::int32_t token = t.turn / 4 * 16 + t.turn % 4;
    const std::int32_t cols = out.cols - t.done < 16 ? out.cols - t.done : 16;
    for (int i = 0; i < 4 && token + 4 * i < out.rows; ++i) {
      store_part<Avx512>(out.bf16 ? Storage::bf16 : Storage::f32, out.y,
                         (token + 4 * i) * out.row_stride + t.done, row[i], cols);
    }
  }

  // After how many lines steps stand.
  static Weave weave_of(const QuadRows& t, int unit) {
    std::int64_t lines = 0;
    for (std::int32_t b = 0; b < t.blocks; ++b) lines += t.lines[b] - t.next[b];
    const std::int32_t quads = t.blocks * t.rows / kRows;
    return {static_cast<std::int32_t>(lines / unit / t.blocks), (t.leaving->left + quads - 1) / quads};
  }

  template <PairSource kSource, int kVectors, bool kLast>
  static void multiply_blocks(const QuadRows& t) {
    constexpr std::int32_t kLines = kGroup / 2, kOffsets = offsets_of(kSource, kQuad);
    constexpr std::int32_t kUnit = kSource == PairSource::whole ? kLines : 1;  // lines of an offset
    constexpr std::int32_t kPlaces = kUnit * kOffsets / kLines;
    const Weave weave = weave_of(t, kUnit);
    const std::int64_t stride = std::int64_t{t.rows} * kQuad;
    std::int32_t* sums = t.sums;
    const std::int32_t* totals = t.totals;
    for (std::int32_t b = 0; b < t.blocks; ++b) {
      const std::int32_t done = t.next[b];
      for (std::int32_t row = 0; row < t.rows; row += kRows, totals += kRows, sums += 16) {
        __m512i sum[kRows][kVectors];
        const auto each = [](auto f) {
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) f(r, v);
          }
        };
        if (t.first) {  // from −128 · Σ w, as x is kept plus 128
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m512i start = _mm512_set1_epi32(
                static_cast<std::int32_t>(0U - (static_cast<std::uint32_t>(totals[r]) << 7)));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[r][v] = start;
          }
        } else {
          each([&](int r, int v) { sum[r][v] = _mm512_loadu_si512(sums + (v * 4 + r) * kRowsStride); });
        }
        const std::int8_t* w = t.w + (t.groups[b] * std::int64_t{kLines} + done) * stride + row * kQuad;
        const bool leads = row == 0 && stride >= 64;
        const auto line_step = [&](const std::uint8_t* from, const std::uint32_t* offset) {
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
        const std::uint32_t* offset =
            t.offsets + t.groups[b] * std::int64_t{kOffsets} + done / kUnit * kPlaces;
        std::int32_t left = t.lines[b] - done;
        const auto unit_step = [&] {
          const std::uint8_t* from = kSource == PairSource::columns ? t.panel : t.panel + place(*offset);
          line_step(from, offset);
          for (std::int32_t i = 1; kUnit > 1 && i < kUnit && i < left; ++i) {
            line_step(from += kQuad * kTokens, offset);
          }
          offset += kPlaces;
          left -= kUnit;
        };
        if constexpr (kLast) {
          while (t.leaving->left > 0 && left > weave.run * kUnit) {
            for (std::int32_t i = 0; i < weave.run; ++i) unit_step();
            for (std::int32_t i = 0; i < weave.burst && t.leaving->left > 0; ++i) step(*t.leaving);
          }
          while (left > 0) unit_step();  // NOLINT(bugprone-infinite-loop): it counts left down
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            __m512 quad[4];
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) quad[r] = _mm512_castsi512_ps(sum[r][v]);
            Avx512::transpose_quads(quad);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(sums + (v * 4 + r) * kRowsStride, quad[r]);
          }
        } else {
          while (left > 0 && *offset < t.end) unit_step();
          each([&](int r, int v) { _mm512_storeu_si512(sums + (v * 4 + r) * kRowsStride, sum[r][v]); });
        }
        if (row + kRows == t.rows) t.next[b] = t.lines[b] - (left > 0 ? left : 0);
      }
    }
  }
};

}  // namespace rarefy::cpu
