// Where sparse matrices store: sums, parts, several side by side, and values on another pattern; on the host.
// Plans are whole ones or row plans; in what is written padding gets 0. What only moves blocks takes elements
// of `bytes` 1, 2, 4 or 8.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "rarefy/executor.h"
#include "rarefy/export.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

// What a result will store, before it has a place: the shape, and the blocks before each block row.
struct StoredRows {
  BsrShape shape;
  std::vector<std::int32_t> crow;
};

// A + B of one shape, in equal blocks: what either stores. Floats of one dtype; or integers of `integers`
// bytes, 1, 2, 4 or 8, modulo 2^(8 bytes), whatever dtype the views say.
RAREFY_API Result<StoredRows> sum_rows(std::string_view op, const PlanView& a, const PlanView& b,
                                       const Executor& executor = {});

// Its row plan, row_plan_size(rows.shape) words, and its values, (nnzb, R, C), each sum rounded once.
RAREFY_API Status write_sum(std::string_view op, const BsrView& a, const BsrView& b, const StoredRows& rows,
                            std::span<std::int32_t> row_plan, void* values, const Executor& executor = {},
                            int integers = 0);

// Y = X + W of elements of one dtype; integers as above. X and Y are row-major, and may be the same.
RAREFY_API Status add_dense(std::string_view op, const MatrixView& x, const BsrView& w,
                            const MutableMatrixView& y, const Executor& executor = {}, int integers = 0);

// Rows, or columns, begin … end: at multiples of the block's, or at the end of the matrix.
struct Range {
  std::int64_t begin = 0, end = 0;
};

// The blocks of W in a range of rows and of columns.
RAREFY_API Result<StoredRows> slice_rows(std::string_view op, const PlanView& w, const Range& rows,
                                         const Range& cols, const Executor& executor = {});
RAREFY_API Status write_slice(std::string_view op, const PlanView& w, const void* values, int bytes,
                              const Range& rows, const Range& cols, const StoredRows& stored,
                              std::span<std::int32_t> row_plan, void* out, const Executor& executor = {});

// Matrices below one another or side by side, in equal blocks; all but the last end at the edge of a block.
enum class Side : std::uint8_t { below, beside };
RAREFY_API Result<BsrShape> joined_shape(std::string_view op, std::span<const PlanView> parts, Side side);
RAREFY_API Status join(std::string_view op, std::span<const PlanView> parts,
                       std::span<const void* const> values, int bytes, Side side,
                       std::span<std::int32_t> row_plan, void* out, const Executor& executor = {});

// The blocks of `to` from where `from` stores them, zero elsewhere: block (i, j) of `to` is (i + rows,
// j + cols) of `from`, in block rows and columns. Of blocks of one shape; of matrices of any. So gradients go
// back: from a sum to what one operand stores, from a slice to the whole, from the whole to a part.
struct Offset {
  std::int64_t rows = 0, cols = 0;
};
RAREFY_API Status on_pattern(std::string_view op, const PlanView& from, const void* values, int bytes,
                             const PlanView& to, const Offset& offset, void* out,
                             const Executor& executor = {});

}  // namespace rarefy
