// The three inner loops of reconstruction, one translation unit for each instruction set, and a small
// Cholesky.
#pragma once

#include <cstdint>

namespace rarefy::prune {

struct DenseKernels {
  double (*dot)(const double* a, const double* b, std::int64_t n);
  // y −= a · x
  void (*minus)(double* y, double a, const double* x, std::int64_t n);
  // y −= a0 x0 + … + a7 x7, the x in rows `stride` apart
  void (*minus8)(double* y, const double* a, const double* x, std::int64_t stride, std::int64_t n);
};

const DenseKernels& dense_kernels();  // of this machine

// A (n × n, rows `stride` apart; the lower triangle is read) becomes L with A = L Lᵀ; false if A is not
// positive definite.
bool cholesky(const DenseKernels& k, double* a, std::int64_t n, std::int64_t stride);

// x ← L⁻¹ x, and x ← L⁻ᵀ x.
void solve_lower(const DenseKernels& k, const double* l, std::int64_t n, std::int64_t stride, double* x);
void solve_upper(const DenseKernels& k, const double* l, std::int64_t n, std::int64_t stride, double* x);

}  // namespace rarefy::prune
