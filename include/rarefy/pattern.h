// Which blocks of a weight are stored. Pattern is the immutable, validated, shared handle; Plan is
// everything derived from it, in one flat int32 buffer that callers can hold, copy and move.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "rarefy/executor.h"
#include "rarefy/export.h"
#include "rarefy/status.h"

namespace rarefy {

// Sizes of a block-sparse weight W of shape (rows, cols) = (out_features, in_features), stored in
// blocks of block_rows × block_cols. Sizes that are no multiple are padded inside the last block.
struct BsrShape {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t block_rows = 1;
  std::int64_t block_cols = 1;
  std::int64_t nnzb = 0;  // stored blocks

  std::int64_t row_count() const { return (rows + block_rows - 1) / block_rows; }  // block rows
  std::int64_t col_count() const { return (cols + block_cols - 1) / block_cols; }  // block columns
  std::int64_t block_size() const { return block_rows * block_cols; }
  std::int64_t value_count() const { return nnzb * block_size(); }
  bool operator==(const BsrShape&) const = default;
};

// Everything kernels read of a pattern. Pointers are host or device memory, like the values.
struct PlanView {
  BsrShape shape;
  const std::int32_t* crow = nullptr;  // row_count + 1: block row i is blocks crow[i] … crow[i+1]
  const std::int32_t* col = nullptr;   // nnzb: block column of each block
  const std::int32_t* ccol = nullptr;  // col_count + 1: the transposed index, by block column
  const std::int32_t* row = nullptr;   // nnzb: block row of each entry of the transposed index
  const std::int32_t* perm = nullptr;  // nnzb: which stored block that entry is
};

// Checks sizes: non-negative, block dims ≥ 1, no product overflows, nnzb and counts fit in int32.
RAREFY_API Status check_shape(std::string_view op, const BsrShape& shape);

// Checks the index arrays against the shape; the message names argument and position.
RAREFY_API Status check_indices(std::string_view op, const BsrShape& shape,
                                std::span<const std::int32_t> crow_indices,
                                std::span<const std::int32_t> col_indices);
RAREFY_API Status check_indices(std::string_view op, const BsrShape& shape,
                                std::span<const std::int64_t> crow_indices,
                                std::span<const std::int64_t> col_indices);

// The plan as plain words: its length depends on the shape alone, so device code never reads it back.
RAREFY_API std::int64_t plan_size(const BsrShape& shape);  // in int32 words

// Copies the indices into `plan`, plan_size(shape) words, validates the copy and writes the rest. Whoever
// writes to the indices meanwhile does no harm. On error the header is not written: no plan.
RAREFY_API Status build_plan(std::string_view op, const BsrShape& shape,
                             std::span<const std::int32_t> crow_indices,
                             std::span<const std::int32_t> col_indices, std::span<std::int32_t> plan,
                             const Executor& executor = {});

// A row plan is the first part of a plan, the header, crow and col: all that `linear` on the host needs, and
// whatever else goes by rows. Made in a fifth of the time of a whole plan, on the executor's threads, for
// those with indices for one product. Of blocks that are wider than tall some kernels read the rest: then
// the call makes it.
RAREFY_API std::int64_t row_plan_size(const BsrShape& shape);  // in int32 words
RAREFY_API Status build_row_plan(std::string_view op, const BsrShape& shape,
                                 std::span<const std::int32_t> crow_indices,
                                 std::span<const std::int32_t> col_indices, std::span<std::int32_t> plan,
                                 const Executor& executor = {});
RAREFY_API Status build_row_plan(std::string_view op, const BsrShape& shape,
                                 std::span<const std::int32_t> crow_indices,
                                 std::span<const std::int64_t> col_indices, std::span<std::int32_t> plan,
                                 const Executor& executor = {});

// Whether given indices are those that a plan holds, element by element: such ones need no other check.
RAREFY_API bool equal_indices(std::span<const std::int32_t> held, std::span<const std::int32_t> given,
                              const Executor& executor = {});
RAREFY_API bool equal_indices(std::span<const std::int32_t> held, std::span<const std::int64_t> given,
                              const Executor& executor = {});

// Pointers into a plan in host memory, after checking in O(1) that it is one and has this shape.
RAREFY_API Result<PlanView> view_plan(std::string_view op, const BsrShape& shape,
                                      std::span<const std::int32_t> plan);

// The same of a row plan or a whole one; of a row plan ccol, row and perm are null.
RAREFY_API Result<PlanView> view_row_plan(std::string_view op, const BsrShape& shape,
                                          std::span<const std::int32_t> plan);

// The same for device memory, which the host cannot look into: only the length can be checked.
RAREFY_API Result<PlanView> view_device_plan(std::string_view op, const BsrShape& shape,
                                             const std::int32_t* plan, std::int64_t plan_words);

// An immutable pattern with its plan; copies share one buffer.
class RAREFY_API Pattern {
 public:
  // shape.nnzb is taken from col_indices. The plan takes 12 bytes a block and 4 for each block row and
  // each block column, stored blocks or not: 8 GiB for 2^31 columns of nothing. File readers bound that.
  static Result<Pattern> create(BsrShape shape, std::span<const std::int32_t> crow_indices,
                                std::span<const std::int32_t> col_indices);

  const BsrShape& shape() const { return view_.shape; }
  double density() const;  // stored blocks / all blocks; 0 for an empty matrix
  std::span<const std::int32_t> crow_indices() const;
  std::span<const std::int32_t> col_indices() const;
  std::span<const std::int32_t> plan() const { return *words_; }
  const PlanView& view() const { return view_; }

 private:
  Pattern() = default;
  std::shared_ptr<const std::vector<std::int32_t>> words_;
  PlanView view_;
};

}  // namespace rarefy
