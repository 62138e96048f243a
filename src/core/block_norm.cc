// Which blocks to keep by their L2 norm: the one place of the converters that computes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>

#include "core/arguments.h"
#include "core/message.h"
#include "core/scalar.h"
#include "rarefy/convert.h"

namespace rarefy {

namespace {

// Squared L2 norm of each block. A block with a NaN counts as infinite: it is kept, not hidden.
std::vector<double> squared_norms(const MatrixView& dense, const BsrShape& shape) {
  const std::int64_t cols = shape.col_count();
  std::vector<double> norms(static_cast<std::size_t>(shape.row_count() * cols));
  visit_dtype(dense.dtype, [&]<class T>(T) {
    for (std::int64_t n = 0; n < dense.rows; ++n) {
      const T* row = static_cast<const T*>(dense.data) + n * dense.row_stride;
      double* out = norms.data() + n / shape.block_rows * cols;
      for (std::int64_t k = 0; k < dense.cols; ++k) {
        const double x = load(row + k);
        out[k / shape.block_cols] += x * x;
      }
    }
  });
  for (double& norm : norms) {
    if (std::isnan(norm)) norm = std::numeric_limits<double>::infinity();
  }
  return norms;
}

}  // namespace

Result<std::vector<std::uint8_t>> block_mask_by_norm(const MatrixView& dense, BlockShape block,
                                                     double density) {
  constexpr std::string_view op = "block_mask_by_norm";
  if (Status status = check_matrix(op, "dense", dense, Device::cpu); !status.ok()) return status;
  const BsrShape shape{dense.rows, dense.cols, block.rows, block.cols, 0};
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (!(density >= 0 && density <= 1)) return invalid(op, "density must be in [0, 1]", cat(density));
  try {
    const std::vector<double> norms = squared_norms(dense, shape);
    std::vector<std::int64_t> order(norms.size());
    std::iota(order.begin(), order.end(), 0);
    const auto kept =
        static_cast<std::ptrdiff_t>(std::nearbyint(density * static_cast<double>(norms.size())));
    const auto before = [&](std::int64_t a, std::int64_t b) {
      return norms[a] != norms[b] ? norms[a] > norms[b] : a < b;
    };
    std::nth_element(order.begin(), order.begin() + kept, order.end(), before);
    std::vector<std::uint8_t> mask(norms.size());
    for (std::ptrdiff_t i = 0; i < kept; ++i) mask[order[i]] = 1;
    return mask;
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, op, "the norms must fit in memory",
                 cat(shape.row_count() * shape.col_count(), " blocks"));
  }
}

}  // namespace rarefy
