// Which loops this machine has, and a Cholesky made of them.
#include "prune/dense.h"

#include <cmath>

#include "cpu/cpuid.h"
#include "prune/dense_loops.h"

namespace rarefy::prune {

#if defined(__x86_64__)
extern const DenseKernels kDense_avx2, kDense_avx512;
#endif

const DenseKernels& dense_kernels() {
  static const DenseKernels& chosen = []() -> const DenseKernels& {
#if defined(__x86_64__)
    const Machine machine = cpu::detect();
    if (machine.has("avx512")) return kDense_avx512;
    if (machine.has("avx2")) return kDense_avx2;
#endif
    return kKernels;
  }();
  return chosen;
}

bool cholesky(const DenseKernels& k, double* a, std::int64_t n, std::int64_t stride) {
  for (std::int64_t i = 0; i < n; ++i) {
    double* row = a + i * stride;
    for (std::int64_t j = 0; j < i; ++j) {
      const double* other = a + j * stride;
      row[j] = (row[j] - k.dot(row, other, j)) / other[j];
    }
    const double rest = row[i] - k.dot(row, row, i);
    if (!(rest > 0)) return false;
    row[i] = std::sqrt(rest);
  }
  return true;
}

void solve_lower(const DenseKernels& k, const double* l, std::int64_t n, std::int64_t stride, double* x) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = (x[i] - k.dot(l + i * stride, x, i)) / l[i * stride + i];
}

void solve_upper(const DenseKernels& k, const double* l, std::int64_t n, std::int64_t stride, double* x) {
  for (std::int64_t i = n - 1; i >= 0; --i) {
    x[i] /= l[i * stride + i];
    k.minus(x, x[i], l + i * stride, i);
  }
}

}  // namespace rarefy::prune
