// Products in int8 on AVX2 for blocks of few outputs, with vpdpbusd or without, as avx512_vnni_rows.h: tokens
// as lanes, so that nothing is joined, and columns made lines on the way. 4 outputs × 16 tokens, half of a
// panel, are in registers. On a Zen 3 4×1 and 4×4 at .5 take .62 of what joined to 8 outputs they took.
#pragma once

#include "cpu/simd/avx2_quads.h"

namespace rarefy::cpu {

// kUnsigned: x is kept plus 128, for vpdpbusd. Else W is split into magnitudes and signs (Avx2QuadLanes).
template <bool kUnsigned>
struct Avx2QuadRows {
  static constexpr int kRows = 4;  // outputs whose sums are in registers

  // Lanes of outputs join other blocks to 8, and are faster where that makes no more products (3×5 at .5,
  // where both multiply all columns: 18.0 for 20.0 ms).
  static std::int32_t fewest(const QuadBlocks& blocks) {
    if (blocks.rows % 8 == 0 || blocks.more < 1.15) return 0;
    return blocks.rows == kRows ? 12 : static_cast<std::int32_t>(32 / blocks.more);
  }

  static void multiply(const QuadRows& t) {
    if (t.blocks > 0) {
      switch (t.source) {
        case PairSource::columns: multiply_part<PairSource::columns>(t); break;
        case PairSource::lines: multiply_part<PairSource::lines>(t); break;
        default: multiply_part<PairSource::whole>(t);
      }
    }
    while (t.last && t.leaving->left > 0) step(*t.leaving);
  }

 private:
  static constexpr std::int32_t kLine = kRows * kQuad;  // bytes of 4 outputs
  static constexpr std::int64_t kAhead = 2048;          // bytes of W

  // Lines whose weights are split at a time, to 4 KB: magnitudes, and where they are negative.
  static constexpr std::int32_t kSplit = 128;
  struct Split {
    alignas(32) std::uint8_t magnitudes[kSplit * kLine], negative[kSplit * kLine];
  };
  struct Weights {
    const std::uint8_t* of;  // Split::magnitudes, or as they are stored
    std::int64_t stride;     // between lines
  };

  template <PairSource kSource>
  static void multiply_part(const QuadRows& t) {
    t.last ? multiply_blocks<kSource, true>(t) : multiply_blocks<kSource, false>(t);
  }

  // Once for all tokens of a panel: made for each product, products ran at 145 GOP/s, not 174 (a Zen 3, in
  // L1).
  static Weights split(const std::int8_t* w, std::int64_t stride, std::int32_t lines, Split& to) {
    const auto zero = _mm256_setzero_si256();
    std::int32_t i = 0;
    for (; stride == kLine && i + 2 <= lines; i += 2, w += 2 * kLine) {  // of blocks of 4 outputs, two
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
      put(to.magnitudes + i * kLine, _mm256_abs_epi8(v));
      put(to.negative + i * kLine, _mm256_cmpgt_epi8(zero, v));
      __builtin_prefetch(w + kAhead);
    }
    for (; i < lines; ++i, w += stride) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
      put(to.magnitudes + i * kLine, _mm_abs_epi8(v));
      put(to.negative + i * kLine, _mm_cmpgt_epi8(_mm256_castsi256_si128(zero), v));
      __builtin_prefetch(w + kAhead);
    }
    return {to.magnitudes, kLine};
  }
  static void put(std::uint8_t* to, __m256i v) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), v); }
  static void put(std::uint8_t* to, __m128i v) { _mm_store_si128(reinterpret_cast<__m128i*>(to), v); }

  static __m256i load(const std::uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static __m256i broadcast(const std::uint8_t* from) {
    return Avx2QuadLanes::broadcast(reinterpret_cast<const char*>(from));
  }

  // An output's four weights and 16 tokens. By name: of intrinsics GCC 12 makes all products of an output
  // first. Sums by value, as it would keep in memory what it passes by reference.
  [[gnu::always_inline]] static void dot(__m256i (&sum)[2], const __m256i (&x)[2], const std::uint8_t* w,
                                         __m256i ones) {
    __m256i first = sum[0], second = sum[1];
    const __m256i four = broadcast(w);
    if constexpr (kUnsigned) {
      first = Avx2VnniLanes::dot(first, x[0], four);
      second = Avx2VnniLanes::dot(second, x[1], four);
    } else {
      __m256i a, b;
      __asm__(
          "vpxor %4, %6, %2\n\tvpxor %5, %6, %3\n\t"
          "vpmaddubsw %2, %7, %2\n\tvpmaddubsw %3, %7, %3\n\t"
          "vpmaddwd %2, %8, %2\n\tvpmaddwd %3, %8, %3\n\t"
          "vpaddd %2, %0, %0\n\tvpaddd %3, %1, %1"
          : "+x"(first), "+x"(second), "=&x"(a), "=&x"(b)
          : "x"(x[0]), "x"(x[1]), "x"(broadcast(w + kSplit * kLine)), "x"(four), "x"(ones));
    }
    sum[0] = first;
    sum[1] = second;
  }

  // Line i of four features. Offsets are in words.
  template <PairSource kSource, bool kHigh>
  [[gnu::always_inline]] static void line(const std::uint8_t* panel, const std::uint32_t* offsets,
                                          std::int32_t i, __m256i (&x)[2]) {
    if constexpr (kSource == PairSource::columns) {
      const auto column = [&](int c) { return load(panel + std::int64_t{offsets[kQuad * i + c]} * 2); };
      const auto bytes = [](__m256i a, __m256i b) {
        return kHigh ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b);
      };
      const __m256i ab = bytes(column(0), column(1)), cd = bytes(column(2), column(3));
      x[0] = _mm256_unpacklo_epi16(ab, cd);
      x[1] = _mm256_unpackhi_epi16(ab, cd);
    } else {
      constexpr std::int32_t kUnit = kSource == PairSource::whole ? kGroup / 2 : 1;  // lines of an offset
      const std::uint8_t* from = panel + std::int64_t{offsets[i / kUnit]} * 2 + i % kUnit * kQuadLine;
      x[0] = load(from + (kHigh ? kQuadLine / 2 : 0));
      x[1] = load(from + (kHigh ? kQuadLine / 2 : 0) + 32);
    }
  }

  // The sums of 16 tokens: 16 int32 for every fourth token, [token / 4][output], once they are complete;
  // before, for each output. From `totals`, or from where they are.
  template <PairSource kSource, bool kHigh>
  static void half(const std::uint8_t* panel, const std::uint32_t* offsets, const Weights& w,
                   std::int32_t lines, const std::int32_t* totals, bool complete, std::int32_t* sums) {
    const auto place = [&](int r, int v) {
      return reinterpret_cast<__m256i*>(sums + r * kRowsStride + 8 * v);
    };
    __m256i sum[kRows][2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if (totals == nullptr) {
          sum[r][v] = _mm256_loadu_si256(place(r, v));
          continue;
        }
        const auto total = static_cast<std::uint32_t>(totals[r]);
        sum[r][v] = _mm256_set1_epi32(static_cast<std::int32_t>(kUnsigned ? 0U - (total << 7) : total));
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    const std::uint8_t* of = w.of;
    for (std::int32_t i = 0; i < lines; ++i, of += w.stride) {
      __m256i x[2];
      line<kSource, kHigh>(panel, offsets, i, x);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) dot(sum[r], x, of + r * kQuad, ones);
    }
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      __m256 quad[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) quad[r] = _mm256_castsi256_ps(sum[r][v]);
      if (complete) Avx2::transpose_quads(quad);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) _mm256_storeu_si256(place(r, v), _mm256_castps_si256(quad[r]));
    }
  }

  template <PairSource kSource, bool kLast>
  static void multiply_blocks(const QuadRows& t) {
    constexpr std::int32_t kLines = kGroup / 2, kOffsets = offsets_of(kSource, kQuad);
    constexpr std::int32_t kUnit = kSource == PairSource::whole ? kLines : 1;
    constexpr std::int32_t kPlaces = kUnit * kOffsets / kLines;  // offsets of a unit
    Split parts;
    const std::int64_t stride = std::int64_t{t.rows} * kQuad;
    // What is leaving does so between halves.
    const std::int32_t halves = t.blocks * t.rows / kRows * t.vectors;
    const std::int32_t burst = (t.leaving->left + halves - 1) / halves;
    std::int32_t* sums = t.sums;
    const std::int32_t* totals = t.totals;
    for (std::int32_t b = 0; b < t.blocks; ++b) {
      const std::int32_t done = t.next[b], left = t.lines[b] - done;
      const std::uint32_t* offsets =
          t.offsets + t.groups[b] * std::int64_t{kOffsets} + done / kUnit * kPlaces;
      std::int32_t lines = kLast ? left : 0;
      while (lines < left && offsets[lines / kUnit * kPlaces] < t.end) lines += kUnit;
      lines = lines < left ? lines : left;
      for (std::int32_t row = 0; row < t.rows; row += kRows, totals += kRows, sums += 16) {
        const std::int8_t* w = t.w + (t.groups[b] * std::int64_t{kLines} + done) * stride + row * kQuad;
        std::int32_t from = 0;
        do {
          const std::int32_t count = kUnsigned || lines - from < kSplit ? lines - from : kSplit;
          const Weights of = kUnsigned ? Weights{reinterpret_cast<const std::uint8_t*>(w), stride}
                                       : split(w + from * stride, stride, count, parts);
          const std::uint32_t* at = offsets + from / kUnit * kPlaces;
          const std::int32_t* begin = t.first && from == 0 ? totals : nullptr;
          from += count;
          const bool complete = kLast && from == lines;
          half<kSource, false>(t.panel, at, of, count, begin, complete, sums);
          if (t.vectors > 1) {
            half<kSource, true>(t.panel, at, of, count, begin, complete, sums + 4 * kRowsStride);
          }
          for (std::int32_t i = burst * t.vectors; complete && i > 0 && t.leaving->left > 0; --i) {
            step(*t.leaving);
          }
        } while (from < lines);
      }
      t.next[b] = done + lines;
    }
  }

  // Every fourth of 16 tokens × 16 outputs to Y.
  static void step(QuadLeaving& t) {
    const QuadStore& out = t.out;
    const std::int32_t token = t.turn / 4 * 16 + t.turn % 4, o = t.done;
    const float* from = reinterpret_cast<const float*>(out.sums) + t.turn * kRowsStride + o * 4;
    __m256 row[4][2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256 scales = _mm256_loadu_ps(out.scales + o + 8 * v);
      const __m256 bias = _mm256_loadu_ps(out.bias + o + 8 * v);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const float* lane = from + v * 32 + i * 4;
        const __m256 sum = _mm256_set_m128(_mm_loadu_ps(lane + 16), _mm_loadu_ps(lane));
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_castps_si256(sum)), scales);
        row[i][v] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(out.tokens[token + 4 * i]), bias);
      }
    }
    if (out.activation != Activation::none) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) activate_several<Avx2>(out.activation, row[i]);
    }
    const std::int32_t cols = out.cols - o < 16 ? out.cols - o : 16;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const std::int64_t at = (token + 4 * i) * out.row_stride + o;
      if (cols < 16 || token + 4 * i >= out.rows) [[unlikely]] {
        if (token + 4 * i < out.rows) store_some(out, at, row[i], cols);
      } else if (out.bf16) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          Avx2::store_bf16(static_cast<std::uint16_t*>(out.y) + at + 8 * v, row[i][v]);
      } else {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) Avx2::store(static_cast<float*>(out.y) + at + 8 * v, row[i][v]);
      }
    }
    --t.left;
    if ((t.done += 16) >= out.cols) {
      t.done = 0;
      ++t.turn;
    }
  }
  [[gnu::noinline]] static void store_some(const QuadStore& out, std::int64_t at, const __m256 (&row)[2],
                                           std::int32_t cols) {
    for (int v = 0; v < 2 && 8 * v < cols; ++v) {
      store_part<Avx2>(out.bf16 ? Storage::bf16 : Storage::f32, out.y, at + 8 * v, row[v],
                       cols - 8 * v < 8 ? cols - 8 * v : 8);
    }
  }
};

}  // namespace rarefy::cpu
