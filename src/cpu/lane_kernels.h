// The kernel of lanes.h as a template over an engine E: how a number of x is broadcast, multiplied with a
// vector of W and added, and what becomes of a complete sum.
#pragma once

#include "cpu/gather.h"
#include "cpu/lanes.h"

namespace rarefy::cpu {

// Floats over a trait of simd/: W in any storage.
template <class I>
struct FloatLanes {
  using Isa = I;
  using Sum = Vec<I>;
  using Vector = Vec<I>;
  static constexpr bool kParts = true;
  static constexpr std::int32_t kLine = kLaneTokens * 4;

  static Sum start(const LaneProduct& t, std::int32_t /*token*/, std::int32_t o) {
    return I::load(t.start + o);
  }
  static Vec<I> broadcast(const char* x) { return I::set1(*reinterpret_cast<const float*>(x)); }
  template <Storage kStorage>
  static Vec<I> weights(const char* w) {
    return load_as<I>(kStorage, w, 0);
  }
  static Sum dot(Sum sum, Vec<I> x, Vec<I> w) { return I::fma(w, x, sum); }
  static Vec<I> finished(const LaneProduct& /*t*/, Sum sum, int /*token*/, int /*o*/) { return sum; }
};

inline constexpr std::int64_t kLaneAhead = 2048;  // bytes of W

// What is done along the way of the first sums, line by line: `left` counts down to 1. Here: nothing.
struct NoLaneWork {
  [[gnu::always_inline]] void operator()(std::int32_t /*left*/) const {}
};

// Rows of `stride` floats to Y, of which `cols` exist at most.
template <class I>
void lane_rows(const LaneProduct& t, float* out, std::int32_t stride, std::int32_t tokens, std::int32_t cols,
               char* y) {
  activate_all<I>(t.activation, out, std::int64_t{tokens} * stride);
  const std::int32_t count = cols < stride ? cols : stride;
  for (std::int32_t m = 0; m < tokens; ++m, out += stride, y += t.row_stride * bytes_of(t.out)) {
    std::int32_t n = 0;
    for (; n + I::kWidth <= count; n += I::kWidth) store_as<I>(t.out, y, n, I::load(out + n));
    if (n < count) store_part<I>(t.out, y, n, I::load(out + n), count - n);
  }
}

// Tokens first … first + Tokens of outputs row … row + Vectors · width, with parts of sums in memory.
template <class E, Storage kStorage, bool kPermuted, bool kFirst, int Tokens, int Vectors, class Work>
void lane_tile(const LaneProduct& t, std::int32_t first, std::int32_t row, Work work) {
  using I = typename E::Isa;
  constexpr int w = I::kWidth;
  typename E::Sum sum[Tokens][Vectors];
  const auto each = [](auto f) {
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) f(m, v);
    }
  };
  const auto y = [&](int m) {
    return static_cast<char*>(t.y) + ((first + m) * t.row_stride + row) * bytes_of(t.out);
  };
  // Y's lines, for ownership: they come while these sums are at work, where a store would wait for each.
#pragma GCC unroll 16
  for (int m = 0; m < Tokens; ++m) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) __builtin_prefetch(y(m) + v * w * 4, 1);
  }
  each([&](int m, int v) { sum[m][v] = E::start(t, first + m, row + v * w); });
  const std::int64_t line = t.rows * bytes_of(kStorage);
  const char* values = static_cast<const char*>(t.w) + row * bytes_of(kStorage);
  const char* panel = static_cast<const char*>(t.panel) + first * 4;
  // As in gather.h, few addresses live in the loop: GCC would spill more of them to vector registers, where
  // reading them back waits behind the sums.
  const char* weights = values;
  const auto multiply = [&](std::int32_t from, std::int32_t end) {
    const std::int32_t* index = t.index + from;
    for (const std::int32_t* stop = t.index + end; index != stop; ++index) {
      if constexpr (kPermuted) {
        weights = values + reload(t.perm)[index - reload(t.index)] * (line * reload(t.run));
      }
      const char* x = panel + std::int64_t{*index} * reload(t.run) * E::kLine;
      for (std::int32_t i = reload(t.run); i != 0; --i, weights += line, x += E::kLine) {
        work(i);
        typename E::Vector wv[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
          wv[v] = E::template weights<kStorage>(weights + v * w * bytes_of(kStorage));
          // The first to read them: the hardware loses the stream between the lines of x.
          if constexpr (kFirst) __builtin_prefetch(weights + v * w * bytes_of(kStorage) + kLaneAhead);
        }
#pragma GCC unroll 16
        for (int m = 0; m < Tokens; ++m) {
          const auto xv = E::broadcast(x + m * 4);
#pragma GCC unroll 2
          for (int v = 0; v < Vectors; ++v) sum[m][v] = E::dot(sum[m][v], xv, wv[v]);
        }
      }
    }
  };
  if constexpr (E::kParts) {
    const auto keep = [&](float* total, bool begun) {
      each([&](int m, int v) {
        float* to = total + (m * Vectors + v) * w;
        I::store(to, begun ? I::add(sum[m][v], I::load(to)) : sum[m][v]);
        sum[m][v] = I::zero();
      });
    };
    const std::int32_t last_part = t.blocks - least_entries(t.part);  // where it begins at the latest
    if (t.part > last_part) {
      multiply(0, t.blocks);
    } else {
      alignas(64) float total[Tokens * Vectors * w];  // of the parts before
      multiply(0, t.part);
      keep(total, false);
      std::int32_t b = t.part;
      for (; b + t.part <= last_part; b += t.part) {
        multiply(b, b + t.part);
        keep(total, true);
      }
      multiply(b, t.blocks);
      each([&](int m, int v) { sum[m][v] = I::add(I::load(total + (m * Vectors + v) * w), sum[m][v]); });
    }
  } else {
    multiply(0, t.blocks);
    if (!t.last) return each([&](int m, int v) { E::keep(t, first + m, row + v * w, sum[m][v]); });
  }
  const std::int32_t tokens = t.tokens - first < Tokens ? t.tokens - first : Tokens;
  const std::int32_t cols = t.cols - row;
  if (t.out == Storage::f32 && t.activation == Activation::none && cols >= Vectors * w) {
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m) {
      if (m >= tokens) break;
      auto* to = reinterpret_cast<float*>(y(m));
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) {
        I::store(to + v * w, E::finished(t, sum[m][v], first + m, row + v * w));
      }
    }
    return;
  }
  alignas(64) float out[Tokens * Vectors * w];
  each([&](int m, int v) {
    I::store(out + (m * Vectors + v) * w, E::finished(t, sum[m][v], first + m, row + v * w));
  });
  lane_rows<I>(t, out, Vectors * w, tokens, cols, y(0));
}

// All tokens, `Most` at a time, the last ones by the next power of two.
template <class E, Storage kStorage, bool kPermuted, int Vectors, int Most, class Work>
void lane_tokens(const LaneProduct& t, std::int32_t row, Work work) {
  for (std::int32_t m = 0; m < t.tokens;) {
    const std::int32_t left = t.tokens - m;
    const auto some = [&]<int Tokens>() {
      if (m == 0) {
        lane_tile<E, kStorage, kPermuted, true, Tokens, Vectors>(t, m, row, work);
      } else {
        lane_tile<E, kStorage, kPermuted, false, Tokens, Vectors>(t, m, row, NoLaneWork{});
      }
      m += Tokens;
    };
    // With 16 at most, 9 to 12 are 8 and the rest: 7–14 % faster than 16 of which some are idle.
    constexpr std::int32_t kBelow = Most < 8 ? 4 : Most < 16 ? 8 : 12;
    if (left > kBelow) {
      some.template operator()<Most>();
    } else if (left > 4) {
      if constexpr (Most >= 8) some.template operator()<8>();
    } else if (left > 2) {
      some.template operator()<4>();
    } else if (left > 1) {
      some.template operator()<2>();
    } else {
      some.template operator()<1>();
    }
  }
}

// Two vectors of outputs at a time share what is broadcast; the accumulators fill the registers.
template <class E, Storage kStorage, bool kPermuted, class Work>
void lane_outputs(const LaneProduct& t, Work work) {
  constexpr int w = E::Isa::kWidth;
  constexpr bool kMany = E::Isa::kRegisters >= 32;
  std::int32_t row = 0;
  for (; row + 2 * w <= t.rows; row += 2 * w) {
    if (row == 0) {
      lane_tokens<E, kStorage, kPermuted, 2, kMany ? 12 : 6>(t, row, work);
    } else {
      lane_tokens<E, kStorage, kPermuted, 2, kMany ? 12 : 6>(t, row, NoLaneWork{});
    }
  }
  if (row == 0) return lane_tokens < E, kStorage, kPermuted, 1, kMany ? 16 : 8 > (t, row, work);
  if (row < t.rows) lane_tokens<E, kStorage, kPermuted, 1, kMany ? 16 : 8>(t, row, NoLaneWork{});
}

template <class I>
void multiply_lanes(const LaneProduct& t) {
  dispatch_storage(t.storage, [&]<Storage kStorage>() {
    if (t.perm != nullptr) return lane_outputs<FloatLanes<I>, kStorage, true>(t, NoLaneWork{});
    lane_outputs<FloatLanes<I>, kStorage, false>(t, NoLaneWork{});
  });
}

}  // namespace rarefy::cpu
