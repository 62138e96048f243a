// Products in pairs in plain C++: what the instructions do, for tests on any machine.
#pragma once

#include "cpu/pair_kernels.h"
#include "cpu/simd/scalar.h"

namespace rarefy::cpu {

struct PairsPortable {
  static constexpr int kFeatures = 2;
  static constexpr int kRows = 32, kLeast = 32, kEarly = 2;
  static constexpr bool kByToken = true, kByLine = false;
  static constexpr double kTileCycles = 20000;

  static void enter() {}
  static void leave() {}

  // 32 tokens × 32 features of row-major X into the lines of a panel.
  static void pack(const std::uint16_t* x, std::int64_t stride, PairOrder order, std::uint16_t* panel) {
    for (int k = 0; k < kGroup; ++k) {
      for (int m = 0; m < kPanelTokens; ++m) panel[place(order, k, m)] = x[m * stride + k];
    }
  }
  static void pack(const float* x, std::int64_t stride, PairOrder order, std::uint16_t* panel) {
    std::uint16_t rounded[kPanelTokens * kGroup];
    for (int m = 0; m < kPanelTokens; ++m) {
      for (int k = 0; k < kGroup; k += Scalar::kWidth) {
        Scalar::store_bf16(rounded + m * kGroup + k, Scalar::load(x + m * stride + k));
      }
    }
    pack(rounded, kGroup, order, panel);
  }
  static int place(PairOrder order, int feature, int token) {
    if (order == PairOrder::apart) return feature * kPanelTokens + token;
    if (order == PairOrder::tokens) return feature / kGroup * kGroupSize + token * kGroup + feature % kGroup;
    return feature / 2 * kPairLine + 2 * token + feature % 2;
  }
  static std::int32_t token(std::int32_t token) { return token; }
  // Two features of 32 tokens, in pair order.
  static void pair(const std::uint16_t* even, const std::uint16_t* odd, std::uint16_t* to) {
    for (int m = 0; m < kPanelTokens; ++m) {
      to[2 * m] = even[m];
      to[2 * m + 1] = odd[m];
    }
  }
  static void copy(const std::uint16_t* from, std::uint16_t* to) { std::memcpy(to, from, 2 * kPairLine); }

  static void copy_line(const std::uint16_t* from, std::uint16_t* to) { std::memcpy(to, from, kPairLine); }
  // 32 tokens × 32 features of row-major X to pairs of tokens.
  static void pack_tokens(const std::uint16_t* x, std::int64_t stride, std::uint16_t* to) {
    for (int m = 0; m < kPanelTokens; ++m) {
      for (int k = 0; k < 32; ++k) to[m / 2 * kPairLine + 2 * k + m % 2] = x[m * stride + k];
    }
  }
  // Up to 16 sums, of which `valid` are there, and those of `before`: to `after`, or rounded.
  static void deliver(const float* sums, int valid, int length, const float* before, float* after,
                      std::uint16_t* to) {
    const auto count = static_cast<std::size_t>(length);
    float v[16] = {};
    std::uint16_t rounded[16];
    for (int i = 0; i < valid; ++i) v[i] = sums[i];
    for (int i = 0; i < length && before != nullptr; ++i) v[i] += before[i];
    if (after != nullptr) {
      std::memcpy(after, v, count * sizeof(float));
      return;
    }
    for (int i = 0; i < 16; i += Scalar::kWidth) Scalar::store_bf16(rounded + i, Scalar::load(v + i));
    std::memcpy(to, rounded, count * sizeof(std::uint16_t));
  }

  static float number(std::uint16_t bf16) {
    const std::uint32_t bits = std::uint32_t{bf16} << 16;
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }

  template <int kOutputs, int kHalves, class Work>
  static void multiply(const PairSteps& s, Work work) {
    if (s.first) std::memset(s.sums, 0, sizeof(float) * kOutputs * kPanelTokens);
    for (std::int32_t step = 0; step < s.steps; ++step) {
      const auto along = work.at(step);
      for (int p = 0; p < kGroup / 2 && along.any(); ++p) along(p);
      const int pairs = step + 1 == s.steps ? s.last_pairs : kGroup / 2;
      for (int o = 0; o < kOutputs; ++o) {
        const std::uint16_t* w = s.w + (step & s.w_ring) * s.w_stride + o * kGroup;
        for (int i = 0; i < 2 * pairs; ++i) {
          const std::uint16_t* x = s.x[step] + i / 2 * kPairLine + i % 2;
          for (int m = 0; m < kHalves * 16; ++m) {
            s.sums[o * kPanelTokens + m] += number(w[i]) * number(x[2 * m]);
          }
        }
      }
    }
  }

  template <int kHalves>
  static void multiply_tokens(const PairSteps& s) {
    if (s.first) std::memset(s.sums, 0, sizeof(float) * 32 * kPanelTokens);
    for (std::int32_t step = 0; step < s.steps; ++step) {
      for (int m = 0; m < kHalves * 16; ++m) {
        for (int o = 0; o < 32; ++o) {
          const std::uint16_t* w = s.w + step * s.w_stride + o / 16 * kTileSize + o % 16 * 2;
          for (int i = 0; i < kGroup; ++i) {
            s.sums[m * 32 + o] += number(s.x[step][m * kGroup + i]) * number(w[i / 2 * 32 + i % 2]);
          }
        }
      }
    }
  }

  static void spread(const PairSpread& t) {
    for (std::int32_t e = 0; e < t.entries; ++e) {
      float* sums = t.sums + std::int64_t{t.columns[e]} * kPanelTokens;
      const std::uint16_t* w = t.w + std::int64_t{e} * t.rows;
      for (std::int32_t o = 0; o < t.rows; ++o) {
        const std::uint16_t* dy = t.dy + std::int64_t{o / 2} * kPairLine + o % 2;
        for (int m = 0; m < kPanelTokens; ++m) sums[m] += number(w[o]) * number(dy[2 * m]);
      }
    }
  }

  // `outputs` × 32 sums to 32 tokens of row-major Y.
  template <class T>
  static void store(const float* sums, int outputs, const float* bias, Activation activation, PairRows<T> y) {
    for (int o = 0; o < outputs; ++o) {
      const Scalar::Vec b = Scalar::set1(bias[o]);
      for (int m = 0; m < kPanelTokens; m += Scalar::kWidth) {
        T out[Scalar::kWidth];
        finish(Scalar::add(Scalar::load(sums + o * kPanelTokens + m), b), activation, out);
        for (int i = 0; i < Scalar::kWidth; ++i) y.y[(m + i) * y.stride + o] = out[i];
      }
    }
  }

  // The same of sums by token.
  template <class T>
  static void store_tokens(const float* sums, const float* bias, Activation activation, PairRows<T> y) {
    for (int m = 0; m < kPanelTokens; ++m, sums += 32) {
      T* row = y.next();
      for (int o = 0; o < 32; o += Scalar::kWidth) {
        finish(Scalar::add(Scalar::load(sums + o), Scalar::load(bias + o)), activation, row + o);
      }
    }
  }

  static void times(std::uint16_t* to, const std::uint16_t* by, int count) {
    for (int i = 0; i < count; i += Scalar::kWidth)
      Scalar::store_bf16(to + i, Scalar::mul(Scalar::load_bf16(to + i), Scalar::load_bf16(by + i)));
  }

  static void keep(const PairKeep& t) {
    alignas(64) std::uint16_t rows[kPanelTokens][kTileRows];
    std::uint16_t* panel = t.panel + t.feature * kPanelTokens;
    for (std::int32_t o = 0; o < t.rows; o += kTileRows) {
      store(t.sums + o * kPanelTokens, kTileRows, t.bias + o, t.activation,
            PairRows<std::uint16_t>{rows[0], kTileRows});
      for (int i = 0; i < kTileRows; ++i) {
        for (int m = 0; m < kPanelTokens; ++m) panel[place(t.order, o + i, m)] = rows[m][i];
      }
    }
  }

 private:
  static void finish(Scalar::Vec sum, Activation activation, std::uint16_t* to) {
    with_activation(activation, [&]<Activation kActivation>() {
      Scalar::store_bf16(to, activate_bf16<Scalar, kActivation>(sum));
    });
  }
  static void finish(Scalar::Vec sum, Activation activation, float* to) {
    Scalar::store(to, activate<Scalar>(activation, sum));
  }
};

}  // namespace rarefy::cpu
