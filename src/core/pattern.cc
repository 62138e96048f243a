// Plans as flat int32 words, and Pattern, their owner.
#include "rarefy/pattern.h"

#include <algorithm>
#include <new>

#include "core/column_sort.h"
#include "core/message.h"
#include "core/plan_layout.h"

namespace rarefy {

namespace {

PlanView pointers(const BsrShape& shape, const std::int32_t* words) {
  const PlanLayout layout(shape);
  return {shape,
          words + layout.crow,
          words + layout.col,
          words + layout.ccol,
          words + layout.row,
          words + layout.perm};
}

Status check_length(std::string_view op, const BsrShape& shape, std::int64_t words) {
  if (words != plan_size(shape)) {
    return invalid(op, cat("plan must have ", plan_size(shape), " elements for this pattern"), cat(words));
  }
  return {};
}

Status check_header(std::string_view op, const BsrShape& shape, const std::int32_t* words) {
  const BsrShape stored = PlanHeader::shape_of(words);
  if (words[0] == PlanHeader::kMagic && stored == shape) return {};
  return invalid(
      op,
      cat("plan must be made by bsr_plan for shape (", shape.rows, ", ", shape.cols, "), block_shape (",
          shape.block_rows, ", ", shape.block_cols, "), ", shape.nnzb, " blocks"),
      words[0] != PlanHeader::kMagic
          ? std::string("something else")
          : cat("a plan for shape (", stored.rows, ", ", stored.cols, "), block_shape (", stored.block_rows,
                ", ", stored.block_cols, "), ", stored.nnzb, " blocks"));
}

}  // namespace

Status check_index_sizes(std::string_view op, const BsrShape& shape, std::size_t crow, std::size_t col) {
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (static_cast<std::int64_t>(col) != shape.nnzb) {
    return invalid(op, cat("col_indices must have ", shape.nnzb, " elements"), cat(col));
  }
  if (static_cast<std::int64_t>(crow) != shape.row_count() + 1) {
    return invalid(op,
                   cat("crow_indices must have ", shape.row_count() + 1, " elements for ", shape.row_count(),
                       " block rows"),
                   cat(crow));
  }
  return {};
}

Status check_plan_sizes(std::string_view op, const BsrShape& shape, std::size_t crow, std::size_t col,
                        std::size_t plan) {
  if (Status status = check_index_sizes(op, shape, crow, col); !status.ok()) return status;
  return check_length(op, shape, static_cast<std::int64_t>(plan));
}

std::int64_t plan_size(const BsrShape& shape) { return PlanLayout(shape).size; }

Status build_plan(std::string_view op, const BsrShape& shape, std::span<const std::int32_t> crow_indices,
                  std::span<const std::int32_t> col_indices, std::span<std::int32_t> plan,
                  const Executor& executor) try {
  if (Status status = check_plan_sizes(op, shape, crow_indices.size(), col_indices.size(), plan.size());
      !status.ok()) {
    return status;
  }
  const auto by_rows = plan.first(static_cast<std::size_t>(row_plan_size(shape)));
  if (Status status = build_row_plan(op, shape, crow_indices, col_indices, by_rows, executor); !status.ok())
    return status;
  const PlanLayout layout(shape);
  std::int32_t* words = plan.data();
  sort_by_column(pointers(shape, words), words + layout.ccol, words + layout.row, words + layout.perm,
                 executor, [](std::int32_t e) { return e; });
  return {};
} catch (const std::bad_alloc&) {
  if (!plan.empty()) plan[0] = 0;  // the rows alone are no plan
  return error(StatusCode::out_of_memory, op, "the transposed index must fit in memory",
               "an allocation failure");
}

Result<PlanView> view_plan(std::string_view op, const BsrShape& shape, std::span<const std::int32_t> plan) {
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (Status status = check_length(op, shape, static_cast<std::int64_t>(plan.size())); !status.ok()) {
    return status;
  }
  if (Status status = check_header(op, shape, plan.data()); !status.ok()) return status;
  return pointers(shape, plan.data());
}

Result<PlanView> view_row_plan(std::string_view op, const BsrShape& shape,
                               std::span<const std::int32_t> plan) {
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (std::ssize(plan) != row_plan_size(shape)) return view_plan(op, shape, plan);
  if (Status status = check_header(op, shape, plan.data()); !status.ok()) return status;
  const PlanView whole = pointers(shape, plan.data());
  return PlanView{shape, whole.crow, whole.col};
}

Result<PlanView> view_device_plan(std::string_view op, const BsrShape& shape, const std::int32_t* plan,
                                  std::int64_t plan_words) {
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (Status status = check_length(op, shape, plan_words); !status.ok()) return status;
  return pointers(shape, plan);
}

Result<Pattern> Pattern::create(BsrShape shape, std::span<const std::int32_t> crow_indices,
                                std::span<const std::int32_t> col_indices) {
  constexpr std::string_view op = "Pattern";
  shape.nnzb = static_cast<std::int64_t>(col_indices.size());
  if (Status status = check_index_sizes(op, shape, crow_indices.size(), col_indices.size()); !status.ok()) {
    return status;  // before memory is taken
  }
  try {
    std::vector<std::int32_t> words(static_cast<std::size_t>(plan_size(shape)));
    if (Status status = build_plan(op, shape, crow_indices, col_indices, words); !status.ok()) return status;
    Pattern pattern;
    pattern.words_ = std::make_shared<const std::vector<std::int32_t>>(std::move(words));
    pattern.view_ = pointers(shape, pattern.words_->data());
    return pattern;
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, op, "the plan must fit in memory",
                 cat(plan_size(shape), " words"));
  }
}

double Pattern::density() const {
  const double blocks = static_cast<double>(shape().row_count()) * static_cast<double>(shape().col_count());
  return blocks == 0 ? 0.0 : static_cast<double>(shape().nnzb) / blocks;
}

std::span<const std::int32_t> Pattern::crow_indices() const {
  return {view_.crow, static_cast<std::size_t>(shape().row_count() + 1)};
}

std::span<const std::int32_t> Pattern::col_indices() const {
  return {view_.col, static_cast<std::size_t>(shape().nnzb)};
}

}  // namespace rarefy
