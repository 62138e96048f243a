// Plain loops that the compiler turns into vectors of whatever the including file is built for: each has its
// own.
#pragma once

#include "prune/dense.h"

namespace rarefy::prune {
namespace {

// NOLINTBEGIN(misc-definitions-in-headers)

double dot(const double* a, const double* b, std::int64_t n) {
  constexpr int kLanes = 16;
  double sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) sums[l] += a[i + l] * b[i + l];
  }
  double sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const double lane : sums) sum += lane;
  return sum;
}

void minus(double* __restrict y, double a, const double* __restrict x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] -= a * x[i];
}

void minus8(double* __restrict y, const double* __restrict a, const double* __restrict x, std::int64_t stride,
            std::int64_t n) {
  const double a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3], a4 = a[4], a5 = a[5], a6 = a[6], a7 = a[7];
  const double *x1 = x + stride, *x2 = x1 + stride, *x3 = x2 + stride, *x4 = x3 + stride, *x5 = x4 + stride,
               *x6 = x5 + stride, *x7 = x6 + stride;
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] -= ((a0 * x[i] + a1 * x1[i]) + (a2 * x2[i] + a3 * x3[i])) +
            ((a4 * x4[i] + a5 * x5[i]) + (a6 * x6[i] + a7 * x7[i]));
  }
}

constexpr DenseKernels kKernels = {dot, minus, minus8};

// NOLINTEND(misc-definitions-in-headers)

}  // namespace
}  // namespace rarefy::prune
