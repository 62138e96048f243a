// A sparse matrix of small integers and the same dense, for tests of what is around products.
#pragma once

#include <cstddef>
#include <vector>

#include "product_checks.h"

namespace rarefy::test {

// Calls f(position in values, row, column) for all elements of stored blocks, those in the padding, too.
template <class F>
void each_stored(const PlanView& plan, F&& f) {
  const BsrShape& s = plan.shape;
  for (std::int64_t i = 0; i < s.row_count(); ++i) {
    for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      for (std::int64_t b = 0; b < s.block_size(); ++b) {
        f(static_cast<std::size_t>(e * s.block_size() + b), i * s.block_rows + b / s.block_cols,
          plan.col[e] * s.block_cols + b % s.block_cols);
      }
    }
  }
}

// A weight of test::Problem, in some dtype, and the same dense.
struct Matrix {
  test::Problem problem;
  DType dtype;
  std::vector<std::byte> values;
  std::vector<double> dense;

  Matrix(std::int64_t rows, std::int64_t cols, std::int64_t r, std::int64_t c, DType type, unsigned seed,
         double density = 0.4)
      : problem(make_problem({1, rows, cols, r, c, density, type, true, 0}, seed)),
        dtype(type),
        values(encode(problem.values, type)),
        dense(static_cast<std::size_t>(rows * cols)) {
    each([&](std::size_t at, std::int64_t n, std::int64_t k) {
      dense[static_cast<std::size_t>(n * cols + k)] = problem.values[at];
    });
  }
  BsrView view() const { return {problem.pattern.view(), values.data(), dtype}; }
  const BsrShape& shape() const { return problem.pattern.shape(); }

  // Calls f(position in values, row, column) for all that is stored inside the matrix.
  template <class F>
  void each(F&& f) const {
    each_stored(view().plan, [&](std::size_t at, std::int64_t n, std::int64_t k) {
      if (n < shape().rows && k < shape().cols) f(at, n, k);
    });
  }
};

}  // namespace rarefy::test
