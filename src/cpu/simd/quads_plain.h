// Products in int8 over a trait of floats (Scalar): rounding and scaling in vectors, the rest element by
// element.
#pragma once

#include <cstring>

#include "cpu/quad_kernels.h"

namespace rarefy::cpu {

template <class I>
struct QuadsPlain {
  using Isa = I;
  static constexpr int kFeatures = 4, kTokens = kPanelTokens;
  static constexpr int kEarly = 1;
  static constexpr bool kByToken = false, kByLine = false;

  static void enter() {}
  static void leave() {}

  static std::uint32_t bits_of(const float* x) {
    std::uint32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    return bits & 0x7fffffffU;
  }
  static std::uint32_t bits_of(const std::uint16_t* x) { return std::uint32_t{*x & 0x7fffU} << 16; }
  static auto load(const float* x) { return I::load(x); }
  static auto load(const std::uint16_t* x) { return I::load_bf16(x); }

  template <class T>
  static std::uint32_t absmax(const T* x, std::int32_t count) {
    std::uint32_t most = 0;
    for (std::int32_t k = 0; k < count; ++k) {
      const std::uint32_t bits = bits_of(x + k);
      most = bits > most ? bits : most;
    }
    return most;
  }

  template <class T>
  static void pack(const T* x, std::int64_t stride, const float* inverse, int /*live*/, bool quads,
                   std::uint8_t* panel) {
    for (int m = 0; m < kPanelTokens; ++m) {
      float rounded[kQuadGroup] = {};
      for (int k = 0; k < kQuadGroup && inverse[m] != 0; k += I::kWidth) {
        I::store(rounded + k, I::round(I::mul(load(x + m * stride + k), I::set1(inverse[m]))));
      }
      for (int k = 0; k < kQuadGroup; ++k) {
        const int at = quads ? k / kQuad * kQuadLine + m * kQuad + k % kQuad : k * kPanelTokens + m;
        panel[at] = static_cast<std::uint8_t>(static_cast<std::int32_t>(rounded[k]));
      }
    }
  }

  // Four features of 32 tokens, interleaved.
  static void quad(const std::uint16_t* panel, const std::uint32_t* offsets, std::uint16_t* to) {
    for (int i = 0; i < kQuad; ++i) {
      const auto* from = reinterpret_cast<const std::uint8_t*>(panel + offsets[i]);
      for (int m = 0; m < kPanelTokens; ++m) reinterpret_cast<std::uint8_t*>(to)[m * kQuad + i] = from[m];
    }
  }
  static void copy(const std::uint16_t* from, std::uint16_t* to) { std::memcpy(to, from, kQuadLine); }

  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    auto* sums = reinterpret_cast<std::int32_t*>(s.sums);
    if (s.first) std::memset(sums, 0, sizeof(std::int32_t) * kOutputs * kPanelTokens);
    for (std::int32_t step = 0; step < s.steps; ++step) {
      const auto along = work.at(step);
      for (int p = 0; p < kGroup / 2 && along.any(); ++p) along(p);
      const int lines = step + 1 == s.steps ? s.last_pairs : kGroup / 2;
      for (int o = 0; o < kOutputs; ++o) {
        const auto* w = reinterpret_cast<const std::int8_t*>(s.w + step * s.w_stride + o * kGroup);
        for (int i = 0; i < kQuad * lines; ++i) {
          const auto* x = reinterpret_cast<const std::int8_t*>(s.x[step]) + i / kQuad * kQuadLine + i % kQuad;
          for (int m = 0; m < kHalves * 16; ++m) sums[o * kPanelTokens + m] += w[i] * x[kQuad * m];
        }
      }
    }
  }

  static void put(float* y, typename I::Vec v) { I::store(y, v); }
  static void put(std::uint16_t* y, typename I::Vec v) { I::store_bf16(y, v); }

  // 16 outputs of 32 tokens, from output `first` on.
  template <class T>
  static void store(const QuadStore& t, std::int32_t first, T* y, std::int64_t stride) {
    for (std::int32_t o = first; o < first + kTileRows; ++o) {
      for (int m = 0; m < kPanelTokens; m += I::kWidth) {
        float sum[I::kWidth];
        for (int i = 0; i < I::kWidth; ++i) sum[i] = static_cast<float>(t.sums[o * kPanelTokens + m + i]);
        const auto scaled = I::mul(I::load(sum), I::set1(t.scales[o]));
        T out[I::kWidth];
        put(out, activate<I>(t.activation, I::fma(scaled, I::load(t.tokens + m), I::set1(t.bias[o]))));
        for (int i = 0; i < I::kWidth; ++i) y[(m + i) * stride + o - first] = out[i];
      }
    }
  }
};

}  // namespace rarefy::cpu
