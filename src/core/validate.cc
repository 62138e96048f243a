// Checks of sizes and index arrays: the invariants of torch's and scipy's compressed formats, with
// the position in every message.
#include <algorithm>
#include <limits>

#include "core/checked.h"
#include "core/compressed.h"
#include "core/message.h"

namespace rarefy {

namespace {

constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

template <class Index>
Status check_crow(std::string_view op, const IndexNames& names, const BsrShape& shape,
                  std::span<const Index> crow) {
  const std::int64_t rows = shape.row_count();
  const auto at = [&](std::int64_t i) { return cat(names.compressed, '[', i, ']'); };
  if (static_cast<std::int64_t>(crow.size()) != rows + 1) {
    return invalid(
        op, cat(names.compressed, " must have ", rows + 1, " elements for ", rows, ' ', names.row, 's'),
        cat(crow.size()));
  }
  if (crow[0] != 0) return invalid(op, cat(at(0), " must be 0"), cat(crow[0]));
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto begin = static_cast<std::int64_t>(crow[i]);
    const auto end = static_cast<std::int64_t>(crow[i + 1]);
    if (end < begin) {
      return invalid(op, cat(names.compressed, " must not decrease"),
                     cat(at(i + 1), '=', end, " after ", at(i), '=', begin));
    }
    // Both are in [0, …] here, since crow starts at 0 and does not decrease: no overflow.
    if (end - begin > shape.col_count()) {
      return invalid(op, cat("a ", names.row, " must have at most ", shape.col_count(), " entries"),
                     cat(at(i + 1), '-', at(i), '=', end - begin));
    }
  }
  if (static_cast<std::int64_t>(crow[rows]) != shape.nnzb) {
    return invalid(op, cat(at(rows), " must be the length of ", names.plain, ", ", shape.nnzb),
                   cat(crow[rows]));
  }
  return {};
}

template <class Index>
Status check_all(std::string_view op, const IndexNames& names, const BsrShape& shape,
                 std::span<const Index> crow, std::span<const Index> col) {
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (static_cast<std::int64_t>(col.size()) != shape.nnzb) {
    return invalid(op, cat(names.plain, " must have ", shape.nnzb, " elements"), cat(col.size()));
  }
  if (Status status = check_crow(op, names, shape, crow); !status.ok()) return status;
  const std::int64_t cols = shape.col_count();
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    std::int64_t previous = -1;
    for (auto e = static_cast<std::int64_t>(crow[i]); e < static_cast<std::int64_t>(crow[i + 1]); ++e) {
      const auto c = static_cast<std::int64_t>(col[e]);
      const auto here = [&] { return cat(names.plain, '[', e, "]=", c); };
      if (c < 0 || c >= cols) {
        return invalid(op, cat(names.plain, " must be in [0, ", cols, ')'),
                       cat(here(), " out of range for ", cols, ' ', names.col, 's'));
      }
      if (c <= previous) {
        return invalid(op, cat(names.plain, " must be sorted and distinct in each ", names.row),
                       cat(here(), " after ", previous, " in ", names.row, ' ', i));
      }
      previous = c;
    }
  }
  return {};
}

}  // namespace

Status check_shape(std::string_view op, const BsrShape& shape) {
  if (shape.rows < 0 || shape.cols < 0) {
    return invalid(op, "shape must not be negative", cat('(', shape.rows, ", ", shape.cols, ')'));
  }
  if (shape.block_rows < 1 || shape.block_cols < 1) {
    return invalid(op, "block_shape must be at least 1 in each dimension",
                   cat('(', shape.block_rows, ", ", shape.block_cols, ')'));
  }
  if (shape.rows > kMaxIndex || shape.cols > kMaxIndex || shape.block_rows > kMaxIndex ||
      shape.block_cols > kMaxIndex) {
    return invalid(op, cat("shape and block_shape must be at most ", kMaxIndex),
                   cat("shape (", shape.rows, ", ", shape.cols, "), block_shape (", shape.block_rows, ", ",
                       shape.block_cols, ')'));
  }
  // Values and what kernels allocate have blocks of full size: past the matrix these may reach for
  // convenience (one block shape for a whole model), not for gigabytes.
  const auto rounded_up = [](std::int64_t size) {
    constexpr std::int64_t kMultiple = 256;
    return std::max<std::int64_t>(1, (size + kMultiple - 1) / kMultiple) * kMultiple;
  };
  if (shape.block_rows > rounded_up(shape.rows) || shape.block_cols > rounded_up(shape.cols)) {
    return invalid(op,
                   cat("block_shape must be at most (", rounded_up(shape.rows), ", ", rounded_up(shape.cols),
                       "), the shape rounded up to multiples of 256"),
                   cat('(', shape.block_rows, ", ", shape.block_cols, ") for shape (", shape.rows, ", ",
                       shape.cols, ')'));
  }
  if (shape.nnzb < 0 || shape.nnzb > kMaxIndex || shape.nnzb > shape.row_count() * shape.col_count()) {
    return invalid(op,
                   cat("the number of stored blocks must be in [0, ",
                       std::min(kMaxIndex, shape.row_count() * shape.col_count()), ']'),
                   cat(shape.nnzb));
  }
  // 8 bytes is the widest dtype: with this, every byte count of values fits in int64.
  const auto bytes = checked_mul(shape.block_size(), 8);
  if (!bytes || !checked_mul(*bytes, shape.nnzb)) {
    return invalid(op, "the values must fit in memory",
                   cat(shape.nnzb, " blocks of (", shape.block_rows, ", ", shape.block_cols, ')'));
  }
  return {};
}

Status check_indices(std::string_view op, const BsrShape& shape, std::span<const std::int32_t> crow_indices,
                     std::span<const std::int32_t> col_indices) {
  return check_all(op, kBsrNames, shape, crow_indices, col_indices);
}

Status check_indices(std::string_view op, const BsrShape& shape, std::span<const std::int64_t> crow_indices,
                     std::span<const std::int64_t> col_indices) {
  return check_all(op, kBsrNames, shape, crow_indices, col_indices);
}

Status check_compressed(std::string_view op, const IndexNames& names, const BsrShape& shape,
                        std::span<const std::int32_t> compressed, std::span<const std::int32_t> plain) {
  return check_all(op, names, shape, compressed, plain);
}

}  // namespace rarefy
