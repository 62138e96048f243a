// Products in pairs on AVX-512: packing and storing, which AMX shares, and vdpbf16ps.
#pragma once

#include "cpu/pair_kernels.h"
#include "cpu/simd/avx512.h"

namespace rarefy::cpu {

// `Engine` is who shares it, in a unit of its own, whose names the linker must not mix.
template <class Engine>
struct Avx512Pairs {
  static constexpr int kFeatures = 2;
  static constexpr int kEarly = 1;  // steps before a group is multiplied, it is gathered
  static constexpr bool kByToken = false, kByLine = false;

  static __m512i bits(__m512 v) { return _mm512_castps_si512(v); }

  // 16 × 16 dwords.
  [[gnu::always_inline]] static void transpose(__m512i (&m)[16]) {
    __m512 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) t[i] = _mm512_castsi512_ps(m[i]);
    Avx512::transpose(t);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) m[i] = bits(t[i]);
  }

  // 32 features of a token, floats rounded.
  static __m512i line(const std::uint16_t* x) { return _mm512_loadu_si512(x); }
  static __m512i line(const float* x) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
  }

  // 32 tokens × 32 features of row-major X into the lines of a panel. A dword of X is a pair of features:
  // transposed as such, it is in pair order. Apart, tokens lie in an order that interleaving lines (unpack)
  // undoes: 4 of the first half, 4 of the second.
  template <class T>
  static void pack(const T* x, std::int64_t stride, PairOrder order, std::uint16_t* panel) {
    if (order == PairOrder::tokens) {
#pragma GCC unroll 32
      for (int m = 0; m < kPanelTokens; ++m) _mm512_storeu_si512(panel + m * kGroup, line(x + m * stride));
      return;
    }
    const bool paired = order == PairOrder::paired;
    __m512i low[16], high[16];
#pragma GCC unroll 16
    for (int m = 0; m < 16; ++m) low[m] = line(x + m * stride);
    transpose(low);
    if (paired) {
#pragma GCC unroll 16
      for (int p = 0; p < 16; ++p) _mm512_storeu_si512(panel + p * kPairLine, low[p]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < 16; ++m) high[m] = line(x + (m + 16) * stride);
    transpose(high);
    if (paired) {
#pragma GCC unroll 16
      for (int p = 0; p < 16; ++p) _mm512_storeu_si512(panel + p * kPairLine + 32, high[p]);
      return;
    }
    const __m512i words = _mm512_set1_epi32(0xffff);
#pragma GCC unroll 16
    for (int p = 0; p < 16; ++p) {
      _mm512_storeu_si512(panel + p * kPairLine, _mm512_packus_epi32(_mm512_and_si512(low[p], words),
                                                                     _mm512_and_si512(high[p], words)));
      _mm512_storeu_si512(panel + p * kPairLine + 32,
                          _mm512_packus_epi32(_mm512_srli_epi32(low[p], 16), _mm512_srli_epi32(high[p], 16)));
    }
  }

  static std::int32_t token(std::int32_t token) { return token % 16 / 4 * 8 + token / 16 * 4 + token % 4; }

  static void pair(const std::uint16_t* even, const std::uint16_t* odd, std::uint16_t* to) {
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi16(a, b));
  }
  static void copy(const std::uint16_t* from, std::uint16_t* to) {
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 32);
    _mm512_storeu_si512(to, a);
    _mm512_storeu_si512(to + 32, b);
  }

  static void copy_line(const std::uint16_t* from, std::uint16_t* to) {
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  }

  // 32 tokens × 32 features of row-major X to pairs of tokens, in the order of a panel's lines.
  static void pack_tokens(const std::uint16_t* x, std::int64_t stride, std::uint16_t* to) {
    alignas(64) static constexpr std::uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                           37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                           11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 16
    for (int m = 0; m < kPanelTokens; m += 2) {
      const __m512i even = _mm512_loadu_si512(x + m * stride), odd = _mm512_loadu_si512(x + (m + 1) * stride);
      std::uint16_t* line = to + token(m) / 2 * kPairLine;
      _mm512_storeu_si512(line, _mm512_permutex2var_epi16(even, low, odd));
      _mm512_storeu_si512(line + 32, _mm512_permutex2var_epi16(even, high, odd));
    }
  }

  // Up to 16 sums, of which `valid` are there, and those of `before`: to `after`, or rounded.
  static void deliver(const float* sums, int valid, int length, const float* before, float* after,
                      std::uint16_t* to) {
    const auto all = static_cast<__mmask16>((1U << length) - 1);
    __m512 v = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << valid) - 1), sums);
    if (before != nullptr) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(all, before));
    if (after != nullptr) return _mm512_mask_storeu_ps(after, all, v);
    _mm256_mask_storeu_epi16(to, all, (__m256i)_mm512_cvtneps_pbh(v));
  }

  // to[i] *= by[i], in multiples of 16.
  static void times(std::uint16_t* to, const std::uint16_t* by, int count) {
    for (int i = 0; i < count; i += Avx512::kWidth)
      Avx512::store_bf16(to + i, Avx512::mul(Avx512::load_bf16(to + i), Avx512::load_bf16(by + i)));
  }

  static void keep(const PairKeep& t) {
    with_activation(t.activation, [&]<Activation kActivation>() { keep_as<kActivation>(t); });
  }

  // `outputs` × 32 sums to 32 tokens of row-major Y. Rounded before it is transposed, in dwords of two
  // outputs: half of the shuffles.
  static void store(const float* sums, int outputs, const float* bias, Activation activation,
                    const PairRows<std::uint16_t>& y) {
    if (activation == Activation::none) {
      outputs == 32 ? store_as<32, true>(sums, bias, y) : store_as<16, true>(sums, bias, y);
      return;
    }
    alignas(64) float active[32 * kPanelTokens];
    with_activation(activation, [&]<Activation kActivation>() {
      for (int o = 0; o < outputs; ++o, sums += kPanelTokens) {
        const __m512 start = _mm512_set1_ps(bias[o]);
        float* to = active + o * kPanelTokens;
        _mm512_store_ps(to, finished<kActivation>(sums, start));
        _mm512_store_ps(to + 16, finished<kActivation>(sums + 16, start));
      }
    });
    outputs == 32 ? store_as<32, false>(active, bias, y) : store_as<16, false>(active, bias, y);
  }

  // To floats: 16 × 16 at a time.
  static void store(const float* sums, int outputs, const float* bias, Activation activation,
                    const PairRows<float>& to) {
    PairRows<float> y = to;
    for (int half = 0; half < 2; ++half) {
      float* rows[16];
#pragma GCC unroll 16
      for (float*& row : rows) row = y.next();
      for (int from = 0; from < outputs; from += 16) {
        __m512 v[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          const int o = from + i;
          v[i] = _mm512_add_ps(_mm512_loadu_ps(sums + o * kPanelTokens + half * 16), _mm512_set1_ps(bias[o]));
          if (activation != Activation::none) v[i] = activate<Avx512>(activation, v[i]);
        }
        Avx512::transpose(v);
#pragma GCC unroll 16
        for (int m = 0; m < 16; ++m) _mm512_storeu_ps(rows[m] + from, v[m]);
      }
    }
  }

  // The same of sums by token.
  static void store_tokens(const float* sums, const float* bias, Activation activation,
                           const PairRows<float>& to) {
    PairRows<float> y = to;
    const __m512 low = _mm512_loadu_ps(bias), high = _mm512_loadu_ps(bias + 16);
#pragma GCC unroll 4
    for (int m = 0; m < kPanelTokens; ++m, sums += 32) {
      float* row = y.next();
      const __m512 a = _mm512_add_ps(_mm512_loadu_ps(sums), low);
      const __m512 b = _mm512_add_ps(_mm512_loadu_ps(sums + 16), high);
      _mm512_storeu_ps(row, activate<Avx512>(activation, a));
      _mm512_storeu_ps(row + 16, activate<Avx512>(activation, b));
    }
  }
  static void store_tokens(const float* sums, const float* bias, Activation activation,
                           const PairRows<std::uint16_t>& to) {
    PairRows<std::uint16_t> y = to;
    const __m512 low = _mm512_loadu_ps(bias), high = _mm512_loadu_ps(bias + 16);
    with_activation(activation, [&]<Activation kActivation>() {
#pragma GCC unroll 4
      for (int m = 0; m < kPanelTokens; ++m, sums += 32) {
        const __m512 a = finished<kActivation>(sums, low), b = finished<kActivation>(sums + 16, high);
        _mm512_storeu_si512(y.next(), (__m512i)_mm512_cvtne2ps_pbh(b, a));
      }
    });
  }

 private:
  template <Activation kActivation>
  [[gnu::always_inline]] static __m512 finished(const float* sums, __m512 bias) {
    return activate_bf16<Avx512, kActivation>(_mm512_add_ps(_mm512_loadu_ps(sums), bias));
  }
  // Two lines of 16 words, alternating.
  static __m512i interleaved(__m512bh both) {
    alignas(64) static constexpr std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                  21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                  11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), (__m512i)both);
  }

  // Two features at a time, in the orders that pack gives.
  template <Activation kActivation>
  static void keep_as(const PairKeep& t) {
    const __m512i quarters = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const float* sums = t.sums;
    std::uint16_t* to = t.panel + t.feature * kPanelTokens;
    for (std::int32_t o = 0; o < t.rows; o += 2, sums += 2 * kPanelTokens, to += kPairLine) {
      __m512 v[2][2];  // [feature][half]
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512 bias = _mm512_set1_ps(t.bias[o + i]);
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) v[i][h] = finished<kActivation>(sums + i * kPanelTokens + h * 16, bias);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i line =
            t.order == PairOrder::paired
                ? interleaved(_mm512_cvtne2ps_pbh(v[1][i], v[0][i]))
                : _mm512_permutexvar_epi64(quarters, (__m512i)_mm512_cvtne2ps_pbh(v[i][1], v[i][0]));
        _mm512_storeu_si512(to + i * kPanelTokens, line);
      }
    }
  }

  // kBias: the sums lack it.
  template <int kOutputs, bool kBias>
  static void store_as(const float* sums, const float* bias, const PairRows<std::uint16_t>& to) {
    PairRows<std::uint16_t> y = to;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto sum = [&](int o) {
        const __m512 v = _mm512_loadu_ps(sums + o * kPanelTokens + half * 16);
        return kBias ? _mm512_add_ps(v, _mm512_set1_ps(bias[o])) : v;
      };
      __m512i rows[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        rows[i] = _mm512_setzero_si512();
        if (2 * i >= kOutputs) continue;
        rows[i] = interleaved(_mm512_cvtne2ps_pbh(sum(2 * i + 1), sum(2 * i)));
      }
      transpose(rows);
#pragma GCC unroll 16
      for (const __m512i& outputs : rows) {
        std::uint16_t* row = y.next();
        if constexpr (kOutputs == 32) {
          _mm512_storeu_si512(row, outputs);
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(outputs));
        }
      }
    }
  }
};

// vdpbf16ps: 8 outputs × 32 tokens in registers, weights broadcast by pairs; blocks of 4 outputs on their
// own.
struct Avx512Bf16 : Avx512Pairs<Avx512Bf16> {
  static constexpr int kRows = 8, kLeast = 4;
  static constexpr bool kByLine = true;
  static constexpr double kTileCycles = 550;

  static void enter() {}
  static void leave() {}

  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    multiply_at<kGroup, kOutputs, kHalves>(s, work);
  }
  template <int kOutputs, int kHalves, class Work>
  static void multiply_lines(const PairSteps& s, Work work) {
    multiply_at<2, kOutputs, kHalves>(s, work);
  }

  // Outputs lie kStride apart.
  template <int kStride, int kOutputs, int kHalves, class Work>
  static void multiply_at(const PairSteps& s, Work work) {
    __m512 sum[kOutputs][kHalves];
    const auto each = [](auto f) {
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) f(o, h);
      }
    };
    each([&](int o, int h) {
      sum[o][h] = s.first ? _mm512_setzero_ps() : _mm512_loadu_ps(s.sums + o * kPanelTokens + h * 16);
    });
    for (std::int32_t step = 0; step < s.steps; ++step) {
      const std::uint16_t* x = s.x[step];
      const std::uint16_t* w = s.w + (step & s.w_ring) * s.w_stride;
      s.fetch(step);
      const int pairs = step + 1 == s.steps ? s.last_pairs : kGroup / 2;
      const auto dots = [&](auto along) {
        for (int p = 0; p < pairs; ++p, x += kPairLine, w += s.w_pair) {
          along(p);
          __m512bh xv[kHalves];
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) xv[h] = (__m512bh)_mm512_loadu_si512(x + h * 32);
#pragma GCC unroll 8
          for (int o = 0; o < kOutputs; ++o) {
            std::int32_t pair;
            __builtin_memcpy(&pair, w + o * kStride, sizeof(pair));
            const auto wv = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) sum[o][h] = _mm512_dpbf16_ps(sum[o][h], wv, xv[h]);
          }
        }
        for (int p = pairs; p < kGroup / 2; ++p) along(p);
      };
      if (const auto along = work.at(step); along.any()) {
        dots(along);
      } else {
        dots(NoWork{});
      }
    }
    each([&](int o, int h) { _mm512_storeu_ps(s.sums + o * kPanelTokens + h * 16, sum[o][h]); });
  }

  // 4 outputs have two sets of sums, for even and odd pairs, as Zen 5 starts two products a cycle, which take
  // 6; whatever the tokens, so that bits are the same in every batch.
  template <int kOutputs, int kHalves, PairSource kSource>
  static void multiply_few(const PairLines& s) {
    constexpr int kSets = kOutputs > 4 ? 1 : 2, kAtOnce = 4;
    __m512 sum[kSets][kOutputs][kHalves];
    const auto each = [](auto f) {
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) f(o, h);
      }
    };
    each([&](int o, int h) {
      sum[0][o][h] = s.first ? _mm512_setzero_ps() : _mm512_loadu_ps(s.sums + o * kPanelTokens + h * 16);
      if constexpr (kSets == 2) sum[1][o][h] = _mm512_setzero_ps();
    });
    const std::uint16_t *w = s.w, *x = s.panel;
    const std::uint32_t* offsets = s.offsets;
    const auto add = [&]([[maybe_unused]] std::int32_t p, auto& to) {
      __m512i xv[2];
      if constexpr (kSource == PairSource::columns) {
        const __m512i a = _mm512_loadu_si512(x + offsets[0]), b = _mm512_loadu_si512(x + offsets[1]);
        xv[0] = _mm512_unpacklo_epi16(a, b);
        xv[1] = _mm512_unpackhi_epi16(a, b);
        offsets += 2;
      } else {
        const std::uint16_t* line = kSource == PairSource::lines ? x + *offsets++ : x + p * kPairLine;
        xv[0] = _mm512_loadu_si512(line);
        xv[1] = _mm512_loadu_si512(line + 32);
      }
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) {
        std::int32_t pair;
        __builtin_memcpy(&pair, w + 2 * o, sizeof(pair));
        const auto wv = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) to[o][h] = _mm512_dpbf16_ps(to[o][h], wv, (__m512bh)xv[h]);
      }
      w += 2 * kOutputs;
    };
    const auto add_all = [&](std::int32_t pairs) {
      std::int32_t p = 0;
      for (; p + kAtOnce <= pairs; p += kAtOnce) {
        if (s.ahead != 0) {
          const char* ahead = reinterpret_cast<const char*>(w) + s.ahead;
          __builtin_prefetch(ahead);
          if constexpr (kOutputs > 4) __builtin_prefetch(ahead + 64);
          if constexpr (kSource != PairSource::whole)
            __builtin_prefetch(reinterpret_cast<const char*>(offsets) + s.ahead);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kAtOnce; ++i) add(p + i, sum[i % kSets]);
      }
      if constexpr (kSets == 2) {
        for (; p + 2 <= pairs; p += 2) {
          add(p, sum[0]);
          add(p + 1, sum[1]);
        }
      }
      for (; p < pairs; ++p) add(p, sum[0]);
    };
    if constexpr (kSource == PairSource::whole) {
      for (std::int32_t left = s.pairs; left > 0; left -= kGroup / 2) {
        x = s.panel + *offsets++;
        add_all(left < kGroup / 2 ? left : kGroup / 2);
      }
    } else {
      add_all(s.pairs);  // group by group 4×1 took 3 % longer
    }
    each([&](int o, int h) {
      if constexpr (kSets == 2) sum[0][o][h] = _mm512_add_ps(sum[0][o][h], sum[1][o][h]);
      _mm512_storeu_ps(s.sums + o * kPanelTokens + h * 16, sum[0][o][h]);
    });
  }

  // As many columns at a time, their sums in registers.
  static void spread(const PairSpread& t) {
    std::int32_t e = 0;
    for (; e + kRows <= t.entries; e += kRows) spread_columns<kRows>(t, e);
    for (; e + 2 <= t.entries; e += 2) spread_columns<2>(t, e);
    if (e < t.entries) spread_columns<1>(t, e);
  }

 private:
  template <int kColumns>
  static void spread_columns(const PairSpread& t, std::int32_t first) {
    float* to[kColumns];
    __m512 sum[kColumns][2];
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i) {
      to[i] = t.sums + std::int64_t{t.columns[first + i]} * kPanelTokens;
      sum[i][0] = _mm512_loadu_ps(to[i]);
      sum[i][1] = _mm512_loadu_ps(to[i] + 16);
    }
    const std::uint16_t* w = t.w + std::int64_t{first} * t.rows;
    const std::uint16_t* dy = t.dy;
    for (std::int32_t o = 0; o < t.rows; o += 2, w += 2, dy += kPairLine) {
      const auto low = (__m512bh)_mm512_loadu_si512(dy), high = (__m512bh)_mm512_loadu_si512(dy + 32);
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; ++i) {
        std::int32_t pair;
        __builtin_memcpy(&pair, w + std::int64_t{i} * t.rows, sizeof(pair));
        const auto wv = (__m512bh)_mm512_set1_epi32(pair);
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], wv, low);
        sum[i][1] = _mm512_dpbf16_ps(sum[i][1], wv, high);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i) {
      _mm512_storeu_ps(to[i], sum[i][0]);
      _mm512_storeu_ps(to[i] + 16, sum[i][1]);
    }
  }
};

}  // namespace rarefy::cpu
