// Checks of matrices and weights that several operations share.
#include "core/arguments.h"

#include "core/checked.h"
#include "core/message.h"
#include "core/registry.h"

namespace rarefy {

namespace {

// Bytes from the first element to past the last one; nullopt when that overflows.
std::optional<std::int64_t> extent_bytes(const MatrixView& m) {
  if (m.rows == 0 || m.cols == 0) return 0;
  const bool by_token = m.layout() == Layout::by_token;
  const auto last = checked_mul((by_token ? m.rows : m.cols) - 1, m.stride());
  const auto elements = last ? checked_add(*last, by_token ? m.cols : m.rows) : std::nullopt;
  return elements ? checked_mul(*elements, static_cast<std::int64_t>(size_of(m.dtype))) : std::nullopt;
}

}  // namespace

Status check_size(std::string_view op, std::string_view argument, std::string_view what,
                  std::int64_t expected, std::int64_t got) {
  if (expected == got) return {};
  return invalid(op, cat(argument, " must have ", expected, ' ', what), cat(got));
}

Status check_output_dtype(std::string_view op, std::string_view in_name, DType in, std::string_view out_name,
                          DType out) {
  if (in == DType::i8 ? out == DType::f32 || out == DType::f64 : out == in) return {};
  return mismatch(
      op,
      cat(out_name, " must be ", in == DType::i8 ? "f32 or f64" : name(in), " for ", name(in), ' ', in_name),
      name(out));
}

Status check_activation(std::string_view op, Activation activation) {
  if (static_cast<int>(activation) < kActivations) return {};
  return invalid(op, cat("activation must be one of the ", kActivations, " of rarefy/activation.h"),
                 cat(static_cast<int>(activation)));
}

Status check_feed_forward(std::string_view op, const BsrShape& up, const BsrShape& down,
                          const BsrShape& gate) {
  if (Status status = check_shape(op, down); !status.ok()) return status;
  if (Status status = check_size(op, "down", "columns (hidden features)", up.rows, down.cols); !status.ok())
    return status;
  if (gate == BsrShape{}) return {};
  if (Status status = check_shape(op, gate); !status.ok()) return status;
  if (Status status = check_size(op, "gate", "rows (hidden features)", up.rows, gate.rows); !status.ok())
    return status;
  return check_size(op, "gate", "columns (in_features)", up.cols, gate.cols);
}

Status check_matrix(std::string_view op, std::string_view argument, const MatrixView& m, Device device,
                    bool any_layout) {
  const auto shape = [&] { return cat('(', m.rows, ", ", m.cols, ')'); };  // costs more than the checks
  if (m.rows < 0 || m.cols < 0) return invalid(op, cat(argument, "'s shape must not be negative"), shape());
  if (m.row_stride < 0) {
    return invalid(op, cat(argument, "'s row stride must not be negative"), cat(m.row_stride));
  }
  if (m.layout() == Layout::by_feature) {
    if (m.col_stride < 0)
      return invalid(op, cat(argument, "'s column stride must not be negative"), cat(m.col_stride));
    if (!any_layout) return invalid(op, cat(argument, "'s column stride must be 1"), cat(m.col_stride));
    if (m.row_stride != 1 && m.rows > 1) {
      return invalid(op, cat(argument, "'s row or column stride must be 1"),
                     cat(m.row_stride, " and ", m.col_stride));
    }
  }
  if (!extent_bytes(m)) {
    return invalid(op, cat(argument, " must fit in memory"),
                   cat("shape ", shape(),
                       m.layout() == Layout::by_token ? ", row stride " : ", column stride ", m.stride()));
  }
  if (m.data == nullptr && m.rows > 0 && m.cols > 0) {
    return invalid(op, cat(argument, " must point to its elements"), "a null pointer");
  }
  if (m.device != device) {
    return mismatch(op, cat(argument, " must be on device ", name(device)), name(m.device));
  }
  return {};
}

Status check_output(std::string_view op, std::string_view argument, const MatrixView& m, Device device,
                    bool any_layout) {
  if (Status status = check_matrix(op, argument, m, device, any_layout); !status.ok()) return status;
  if (m.layout() == Layout::by_feature) {
    if (m.cols <= 1 || m.col_stride >= m.rows) return {};
    return invalid(op, cat(argument, "'s columns must not overlap: column stride ≥ ", m.rows),
                   cat(m.col_stride));
  }
  if (m.rows > 1 && m.row_stride < m.cols) {
    return invalid(op, cat(argument, "'s rows must not overlap: row stride ≥ ", m.cols), cat(m.row_stride));
  }
  return {};
}

Status check_plan(std::string_view op, std::string_view argument, const PlanView& plan, const void* values,
                  bool by_rows) {
  if (Status status = check_shape(op, plan.shape); !status.ok()) return status;
  const bool alone = by_rows && plan.ccol == nullptr && plan.row == nullptr && plan.perm == nullptr;
  const bool rows = plan.crow != nullptr && (alone || plan.ccol != nullptr);
  const bool blocks = plan.col != nullptr && (alone || (plan.row != nullptr && plan.perm != nullptr));
  if (!rows || (!blocks && plan.shape.nnzb > 0)) {
    return invalid(op, "plan must point to its index arrays", "a null pointer");
  }
  if (values == nullptr && plan.shape.value_count() > 0) {
    return invalid(op, cat(argument, " must point to its elements"), "a null pointer");
  }
  return {};
}

Range range_of(std::string_view argument, const MatrixView& checked) {
  return {argument, checked.data, *extent_bytes(checked)};
}

Range range_of(std::string_view argument, const PlanView& checked, const void* values, DType dtype) {
  return {argument, values, checked.shape.value_count() * static_cast<std::int64_t>(size_of(dtype))};
}

Status check_disjoint(std::string_view op, const Range& out, std::initializer_list<Range> inputs) {
  const auto begin = reinterpret_cast<std::uintptr_t>(out.data);
  for (const Range& in : inputs) {
    const auto other = reinterpret_cast<std::uintptr_t>(in.data);
    const bool apart = out.bytes == 0 || in.bytes == 0 ||
                       begin + static_cast<std::uintptr_t>(out.bytes) <= other ||
                       other + static_cast<std::uintptr_t>(in.bytes) <= begin;
    if (!apart) {
      return invalid(op, cat(out.argument, " must not share memory with the inputs"),
                     cat("an overlap with ", in.argument));
    }
  }
  return {};
}

Status check_rows(std::string_view op, const Rows<MatrixView>& in, const Rows<MutableMatrixView>& out,
                  std::string_view rows_text, Device device) {
  const MatrixView& x = in.matrix;
  const MutableMatrixView& y = out.matrix;
  if (Status status = check_matrix(op, in.argument, x, device, true); !status.ok()) return status;
  if (Status status = check_output(op, out.argument, y, device, true); !status.ok()) return status;
  if (Status status = check_size(op, in.argument, in.columns_text, in.columns, x.cols); !status.ok())
    return status;
  if (Status status = check_size(op, out.argument, out.columns_text, out.columns, y.cols); !status.ok())
    return status;
  if (Status status = check_size(op, out.argument, rows_text, x.rows, y.rows); !status.ok()) return status;
  return check_output_dtype(op, in.argument, x.dtype, out.argument, y.dtype);
}

}  // namespace rarefy
