// Portable vectors of four floats in plain C++; the compiler may use the baseline's SIMD.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd/expand_table.h"

namespace rarefy::cpu {

struct Scalar {
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 16;
  struct Vec {
    float lane[kWidth];
  };

  template <class F>
  static Vec map(F f) {
    Vec v;
    for (int i = 0; i < kWidth; ++i) v.lane[i] = f(i);
    return v;
  }
  static Vec zero() {
    return map([](int) { return 0.0F; });
  }
  static Vec set1(float x) {
    return map([x](int) { return x; });
  }
  static Vec load(const float* p) {
    return map([p](int i) { return p[i]; });
  }
  static void store(float* p, Vec v) { std::memcpy(p, v.lane, sizeof(v.lane)); }
  static Vec add(Vec a, Vec b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Vec mul(Vec a, Vec b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Vec div(Vec a, Vec b) {
    return map([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static Vec fma(Vec a, Vec b, Vec c) {  // two roundings: the baseline has no fused multiply-add
    return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static Vec max(Vec a, Vec b) {  // b if either is NaN, as the x86 instruction
    return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Vec min(Vec a, Vec b) {
    return map([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static Vec select_negative(Vec x, Vec if_negative, Vec otherwise) {
    return map([&](int i) { return x.lane[i] < 0 ? if_negative.lane[i] : otherwise.lane[i]; });
  }
  // x rounded to an integer, and v · 2ⁿ for such an n in [-126, 127].
  static Vec round(Vec x) {
    return map([&](int i) {  // adding 1.5 · 2²³ leaves no room for a fraction; |x| < 2²²
      volatile float shifted = x.lane[i] + 12582912.0F;
      return shifted - 12582912.0F;
    });
  }
  static Vec scale(Vec v, Vec n) {
    return map([&](int i) {
      const auto bits = static_cast<std::uint32_t>((static_cast<std::int32_t>(n.lane[i]) + 127)) << 23;
      float power;
      std::memcpy(&power, &bits, sizeof(power));
      return v.lane[i] * power;
    });
  }
  // x - ⌊x⌋, 0 for infinities; v · 2^⌊x⌋ for any x; 1 / x; min(|x|, most).
  static Vec fraction(Vec x) {
    return map([&](int i) {
      return __builtin_isfinite(x.lane[i]) != 0 ? x.lane[i] - __builtin_floorf(x.lane[i]) : 0;
    });
  }
  static Vec scale_floor(Vec v, Vec x) {
    return map([&](int i) {  // 300 is further than floats go, either way
      const float most = x.lane[i] < 300 ? x.lane[i] : 300;
      return __builtin_ldexpf(v.lane[i], static_cast<int>(__builtin_floorf(most > -300 ? most : -300)));
    });
  }
  static Vec reciprocal(Vec x) { return div(set1(1), x); }
  static Vec magnitude(Vec x, float most) {
    return map([&](int i) { return __builtin_fabsf(x.lane[i]) < most ? __builtin_fabsf(x.lane[i]) : most; });
  }
  static float sum(Vec v) { return (v.lane[0] + v.lane[2]) + (v.lane[1] + v.lane[3]); }
  static void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
  }

  static Vec load_bf16(const std::uint16_t* p) {
    return map([p](int i) { return bits_to_float(std::uint32_t{p[i]} << 16); });
  }
  static void store_bf16(std::uint16_t* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) {
      const std::uint32_t bits = float_to_bits(v.lane[i]);
      const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
      p[i] = static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40U
                                            : (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
    }
  }
  // Half precision by scaling: the float hardware does the rounding and the subnormals.
  static Vec load_f16(const std::uint16_t* p) {
    return map([p](int i) {
      const std::uint32_t sign = std::uint32_t{p[i] & 0x8000U} << 16;
      const std::uint32_t magnitude = p[i] & 0x7fffU;
      if (magnitude >= 0x7c00U) return bits_to_float(sign | 0x7f800000U | (magnitude << 13));
      return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112F));
    });
  }
  static void store_f16(std::uint16_t* p, Vec v) {
    for (int i = 0; i < kWidth; ++i) {
      const std::uint32_t bits = float_to_bits(v.lane[i]);
      const std::uint32_t magnitude = bits & 0x7fffffffU;
      std::uint32_t half = 0;
      if (magnitude > 0x7f800000U) {
        half = 0x7e00U;
      } else if (magnitude >= 0x47800000U) {
        half = 0x7c00U;
      } else if (magnitude < 0x38800000U) {  // subnormal: adding 0.5 makes the hardware round
        half = float_to_bits(bits_to_float(magnitude) + 0.5F) - 0x3f000000U;
      } else {
        half = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - 0x38000000U) >> 13;
      }
      p[i] = static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | half);
    }
  }

  // Which of 4 columns from k on a row of bits stores, and how many; the first lanes, spread to those; a · b
  // + c there, c elsewhere.
  using Lanes = unsigned;
  static Lanes lanes(const std::uint8_t* bits, std::int64_t k) { return bits[k / 8] >> (k % 8) & 15U; }
  static int count(Lanes stored) { return kExpand<4>.count[stored]; }
  static Vec expand(Vec v, Lanes stored) {
    return map([&](int i) { return (stored >> i & 1U) != 0 ? v.lane[kExpand<4>.lane[stored][i]] : 0.0F; });
  }
  static Vec fma_in(Lanes stored, Vec a, Vec b, Vec c) {
    return map(
        [&](int i) { return (stored >> i & 1U) != 0 ? a.lane[i] * b.lane[i] + c.lane[i] : c.lane[i]; });
  }
  // Of each four of 8 columns of x two, for the 4 values whose positions begin at `codes`.
  static unsigned positions(const std::uint8_t* codes) { return *codes; }
  static Vec pick(const float* x, unsigned which) {
    return map([&](int i) { return x[i / 2 * 4 + static_cast<int>(which >> (2 * i) & 3U)]; });
  }

  static void transpose(Vec (&m)[kWidth]) {
    for (int i = 0; i < kWidth; ++i) {
      for (int j = i + 1; j < kWidth; ++j) {
        const float t = m[i].lane[j];
        m[i].lane[j] = m[j].lane[i];
        m[j].lane[i] = t;
      }
    }
  }

 private:
  static float bits_to_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
  static std::uint32_t float_to_bits(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
  }
};

}  // namespace rarefy::cpu
