// Softmax of a row's stored floats, a vector at a time.
#pragma once

#include "core/stored_row.h"
#include "cpu/activation.h"

namespace rarefy::cpu {

// Up to `count` elements; lanes past them are −∞, whose exponential is 0.
template <class I>
static Vec<I> load_lanes(const float* from, std::int64_t count) {
  if (count >= I::kWidth) return I::load(from);
  float lanes[I::kWidth];
  for (int i = 0; i < I::kWidth; ++i) lanes[i] = i < count ? from[i] : -__builtin_inff();
  return I::load(lanes);
}

template <class I>
static void store_lanes(float* to, std::int64_t count, Vec<I> v) {
  if (count >= I::kWidth) return I::store(to, v);
  float lanes[I::kWidth];
  I::store(lanes, v);
  for (int i = 0; i < count; ++i) to[i] = lanes[i];
}

// In double, and from every so many elements: a sum of floats that grew with the row would lose its last
// bits.
inline constexpr std::int64_t kSoftmaxPart = 1024;

// to = exp(from − max) / Σ exp(from − max). −∞ gives 0, and so does what lies 87 below the largest; NaN or ∞
// make the whole row NaN, and a row of −∞ is 0.
template <class I>
static void softmax_row(const StoredRow& row, const float* from, float* to) {
  constexpr std::int64_t w = I::kWidth;
  const auto each = [&](auto&& run) {  // (offset, count) of parts of pieces
    for (std::int64_t p = 0; p < row.pieces; ++p) {
      const std::int64_t begin = p * row.stride;
      const std::int64_t end = begin + (p + 1 < row.pieces ? row.length : row.last);
      for (std::int64_t at = begin; at < end; at += kSoftmaxPart) {
        run(at, at + kSoftmaxPart < end ? kSoftmaxPart : end - at);
      }
    }
  };
  const auto folded = [](Vec<I> v, auto&& f) {
    float lanes[w];
    I::store(lanes, v);
    for (int i = 1; i < w; ++i) lanes[0] = f(lanes[0], lanes[i]);
    return lanes[0];
  };

  Vec<I> most = I::set1(-__builtin_inff()), spoilt = I::zero();  // NaN once an element is NaN or ∞
  each([&](std::int64_t at, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += w) {
      const Vec<I> v = load_lanes<I>(from + at + i, count - i);
      most = I::max(v, most);
      spoilt = I::fma(I::max(I::set1(-3e38F), v), I::zero(), spoilt);
    }
  });
  const float largest = folded(most, [](float a, float b) { return a > b ? a : b; });
  const float broken = folded(spoilt, [](float a, float b) { return a + b; });
  const bool none = !(largest > -__builtin_inff());

  double total = 0;
  const Vec<I> shift = I::set1(none ? 0.0F : -largest);
  each([&](std::int64_t at, std::int64_t count) {
    Vec<I> sum = I::zero();
    for (std::int64_t i = 0; i < count; i += w) {
      const Vec<I> x = I::add(load_lanes<I>(from + at + i, count - i), shift);
      const Vec<I> e = I::select_negative(I::add(x, I::set1(87.0F)), I::zero(), exp<I>(x));
      store_lanes<I>(to + at + i, count - i, e);
      sum = I::add(sum, e);
    }
    total += I::sum(sum);
  });
  const auto scale = I::set1(broken != 0 ? broken : none ? 0.0F : static_cast<float>(1 / total));  // or NaN
  each([&](std::int64_t at, std::int64_t count) {
    for (std::int64_t i = 0; i < count; i += w) {
      store_lanes<I>(to + at + i, count - i, I::mul(load_lanes<I>(to + at + i, count - i), scale));
    }
  });
}

}  // namespace rarefy::cpu
