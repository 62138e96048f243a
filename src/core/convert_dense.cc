// Dense to BSR and back, and the mask of the strongest blocks. Bytes are moved, never computed with.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>

#include "core/arguments.h"
#include "core/checked.h"
#include "core/message.h"
#include "core/scalar.h"
#include "rarefy/convert.h"

namespace rarefy {

namespace {

Result<BsrShape> grid_of(std::string_view op, const MatrixView& dense, BlockShape block) {
  if (Status status = check_matrix(op, "dense", dense, Device::cpu); !status.ok()) return status;
  const BsrShape shape{dense.rows, dense.cols, block.rows, block.cols, 0};
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (!checked_mul(shape.row_count(), shape.col_count())) {
    return invalid(op, "the number of blocks must fit in memory",
                   cat(shape.row_count(), " by ", shape.col_count()));
  }
  return shape;
}

// Calls f(row, bytes in dense, offset in the block, bytes) for the part of each row of block (i, j)
// that lies inside the matrix.
template <class F>
void for_each_run(const BsrShape& s, const MatrixView& dense, std::int64_t i, std::int64_t j, F f) {
  const auto size = static_cast<std::int64_t>(size_of(dense.dtype));
  const std::int64_t cols = std::min(s.block_cols, s.cols - j * s.block_cols);
  for (std::int64_t r = 0; r < std::min(s.block_rows, s.rows - i * s.block_rows); ++r) {
    const std::int64_t at = (i * s.block_rows + r) * dense.row_stride + j * s.block_cols;
    f(at * size, r * s.block_cols * size, cols * size);
  }
}

bool all_zero(const std::byte* bytes, std::int64_t count) {
  return std::all_of(bytes, bytes + count, [](std::byte b) { return b == std::byte{0}; });
}

Status check_mask(std::string_view op, const BsrShape& shape, std::span<const std::uint8_t> mask) {
  const std::int64_t blocks = shape.row_count() * shape.col_count();
  if (std::ssize(mask) != blocks) {
    return invalid(op, cat("block_mask must have ", blocks, " elements, one a block"), cat(mask.size()));
  }
  for (std::int64_t b = 0; b < blocks; ++b) {
    const int value = mask[static_cast<std::size_t>(b)];
    if (value > 1)
      return invalid(op, "block_mask must hold only 0 and 1", cat("block_mask[", b, "]=", value));
  }
  return {};
}

}  // namespace

Result<BsrMatrix> dense_to_bsr(const MatrixView& dense, BlockShape block,
                               std::span<const std::uint8_t> block_mask) {
  constexpr std::string_view op = "dense_to_bsr";
  const Result<BsrShape> grid = grid_of(op, dense, block);
  if (!grid.ok()) return grid.status();
  const BsrShape& shape = *grid;
  // An empty span is "no mask", unless the matrix has no blocks anyway.
  if (!block_mask.empty()) {
    if (Status status = check_mask(op, shape, block_mask); !status.ok()) return status;
  }
  const auto* bytes = static_cast<const std::byte*>(dense.data);
  const auto stored = [&](std::int64_t i, std::int64_t j) {
    if (!block_mask.empty()) return block_mask[static_cast<std::size_t>(i * shape.col_count() + j)] != 0;
    bool zero = true;
    for_each_run(shape, dense, i, j, [&](std::int64_t at, std::int64_t, std::int64_t count) {
      zero = zero && all_zero(bytes + at, count);
    });
    return !zero;
  };
  try {
    std::vector<std::int32_t> crow{0};
    std::vector<std::int32_t> col;
    for (std::int64_t i = 0; i < shape.row_count(); ++i) {
      for (std::int64_t j = 0; j < shape.col_count(); ++j) {
        if (stored(i, j)) col.push_back(static_cast<std::int32_t>(j));
      }
      BsrShape so_far = shape;  // refuses a count that int32 cannot hold before it wraps
      so_far.nnzb = std::ssize(col);
      if (Status status = check_shape(op, so_far); !status.ok()) return status;
      crow.push_back(static_cast<std::int32_t>(col.size()));
    }
    Result<Pattern> pattern = Pattern::create(shape, crow, col);
    if (!pattern.ok()) return pattern.status();
    BsrMatrix bsr{std::move(pattern).value(), dense.dtype, {}};
    const auto block_bytes = shape.block_size() * static_cast<std::int64_t>(size_of(dense.dtype));
    bsr.values.resize(static_cast<std::size_t>(std::ssize(col) * block_bytes));
    for (std::int64_t i = 0; i < shape.row_count(); ++i) {
      for (std::int32_t e = crow[static_cast<std::size_t>(i)]; e < crow[static_cast<std::size_t>(i + 1)];
           ++e) {
        for_each_run(shape, dense, i, col[static_cast<std::size_t>(e)],
                     [&](std::int64_t at, std::int64_t inside, std::int64_t count) {
                       std::memcpy(bsr.values.data() + e * block_bytes + inside, bytes + at,
                                   static_cast<std::size_t>(count));
                     });
      }
    }
    return bsr;
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, op, "the blocks must fit in memory", "an allocation failure");
  }
}

Status bsr_to_dense(const BsrView& bsr, const MutableMatrixView& dense) {
  constexpr std::string_view op = "bsr_to_dense";
  const BsrShape& shape = bsr.plan.shape;
  if (Status status = check_plan(op, "values", bsr.plan, bsr.values); !status.ok()) return status;
  if (bsr.device != Device::cpu) return mismatch(op, "bsr must be in host memory", "cuda");
  if (Status status = check_output(op, "dense", dense, Device::cpu); !status.ok()) return status;
  if (dense.rows != shape.rows || dense.cols != shape.cols) {
    return invalid(op, cat("dense must have shape (", shape.rows, ", ", shape.cols, ')'),
                   cat('(', dense.rows, ", ", dense.cols, ')'));
  }
  if (dense.dtype != bsr.dtype)
    return mismatch(op, cat("dense must be ", name(bsr.dtype)), name(dense.dtype));
  if (Status status =
          check_disjoint(op, range_of("dense", dense), {range_of("values", bsr.plan, bsr.values, bsr.dtype)});
      !status.ok()) {
    return status;
  }
  const auto size = static_cast<std::int64_t>(size_of(dense.dtype));
  auto* to = static_cast<std::byte*>(dense.data);
  const auto* values = static_cast<const std::byte*>(bsr.values);
  for (std::int64_t r = 0; r < dense.rows && dense.cols > 0; ++r) {
    std::memset(to + r * dense.row_stride * size, 0, static_cast<std::size_t>(dense.cols * size));
  }
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    for (std::int32_t e = bsr.plan.crow[i]; e < bsr.plan.crow[i + 1]; ++e) {
      const std::byte* block = values + e * shape.block_size() * size;
      for_each_run(shape, dense, i, bsr.plan.col[e],
                   [&](std::int64_t at, std::int64_t inside, std::int64_t count) {
                     std::memcpy(to + at, block + inside, static_cast<std::size_t>(count));
                   });
    }
  }
  return {};
}

Result<std::vector<std::uint8_t>> block_mask_by_norm(const MatrixView& dense, BlockShape block,
                                                     double density) {
  constexpr std::string_view op = "block_mask_by_norm";
  const Result<BsrShape> grid = grid_of(op, dense, block);
  if (!grid.ok()) return grid.status();
  if (!(density >= 0 && density <= 1)) return invalid(op, "density must be in [0, 1]", cat(density));
  const BsrShape& shape = *grid;
  const std::int64_t blocks = shape.row_count() * shape.col_count();
  try {
    std::vector<double> squares(static_cast<std::size_t>(blocks), 0.0);
    visit_dtype(dense.dtype, [&]<class T>(T) {
      const auto* elements = static_cast<const T*>(dense.data);
      for (std::int64_t n = 0; n < shape.rows; ++n) {
        for (std::int64_t k = 0; k < shape.cols; ++k) {
          const double x = load(elements + n * dense.row_stride + k);
          squares[static_cast<std::size_t>(n / shape.block_rows * shape.col_count() +
                                           k / shape.block_cols)] += x * x;
        }
      }
    });
    std::vector<std::int64_t> order(static_cast<std::size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    // NaN ranks first: a block that holds one must not vanish silently.
    const auto rank = [&](std::int64_t b) {
      const double s = squares[static_cast<std::size_t>(b)];
      return std::isnan(s) ? HUGE_VAL : s;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return rank(a) > rank(b); });
    std::vector<std::uint8_t> mask(static_cast<std::size_t>(blocks), 0);
    const auto kept = static_cast<std::int64_t>(std::nearbyint(density * static_cast<double>(blocks)));
    for (std::int64_t b = 0; b < kept; ++b)
      mask[static_cast<std::size_t>(order[static_cast<std::size_t>(b)])] = 1;
    return mask;
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, op, "the norms must fit in memory", cat(blocks, " blocks"));
  }
}

}  // namespace rarefy
