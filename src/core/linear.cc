// The three products: check everything, then run the first kernel in the registry that fits.
#include "rarefy/linear.h"

#include <new>

#include "core/checked.h"
#include "core/message.h"
#include "core/registry.h"

namespace rarefy {

std::string_view name(Activation activation) {
  switch (activation) {
    case Activation::none: return "none";
    case Activation::relu: return "relu";
    case Activation::gelu_erf: return "gelu_erf";
    case Activation::gelu_tanh: return "gelu_tanh";
    case Activation::silu: return "silu";
  }
  return "?";
}

namespace {

std::string shape_text(const MatrixView& m) { return cat('(', m.rows, ", ", m.cols, ')'); }

// Bytes from the first element to past the last one; nullopt when that overflows.
std::optional<std::int64_t> extent_bytes(const MatrixView& m) {
  if (m.rows == 0 || m.cols == 0) return 0;
  const auto last_row = checked_mul(m.rows - 1, m.row_stride);
  const auto elements = last_row ? checked_add(*last_row, m.cols) : std::nullopt;
  return elements ? checked_mul(*elements, static_cast<std::int64_t>(size_of(m.dtype))) : std::nullopt;
}

Status check_matrix(std::string_view op, std::string_view argument, const MatrixView& m, Device device) {
  if (m.rows < 0 || m.cols < 0)
    return invalid(op, cat(argument, "'s shape must not be negative"), shape_text(m));
  if (m.row_stride < 0)
    return invalid(op, cat(argument, "'s row stride must not be negative"), cat(m.row_stride));
  if (!extent_bytes(m)) {
    return invalid(op, cat(argument, " must fit in memory"),
                   cat("shape ", shape_text(m), ", row stride ", m.row_stride));
  }
  if (m.data == nullptr && m.rows > 0 && m.cols > 0) {
    return invalid(op, cat(argument, " must point to its elements"), "a null pointer");
  }
  if (m.device != device) {
    return mismatch(op, cat(argument, " must be on the weight's device, ", name(device)), name(m.device));
  }
  return {};
}

Status check_output(std::string_view op, std::string_view argument, const MatrixView& m, Device device) {
  if (Status status = check_matrix(op, argument, m, device); !status.ok()) return status;
  if (m.rows > 1 && m.row_stride < m.cols) {
    return invalid(op, cat(argument, "'s rows must not overlap: row stride ≥ ", m.cols), cat(m.row_stride));
  }
  return {};
}

Status check_size(std::string_view op, std::string_view argument, std::string_view what,
                  std::int64_t expected, std::int64_t got) {
  if (expected == got) return {};
  return invalid(op, cat(argument, " must have ", expected, ' ', what), cat(got));
}

// Inputs share one dtype; the output has it too, except that int8 products are float32 or float64.
Status check_dtypes(std::string_view op, std::string_view a, DType a_dtype, std::string_view b, DType b_dtype,
                    std::string_view out, DType out_dtype) {
  if (a_dtype != b_dtype) {
    return mismatch(op, cat(a, " and ", b, " must have one dtype"),
                    cat(name(a_dtype), " and ", name(b_dtype)));
  }
  const bool fits =
      a_dtype == DType::i8 ? out_dtype == DType::f32 || out_dtype == DType::f64 : out_dtype == a_dtype;
  if (!fits) {
    return mismatch(op,
                    cat(out, " must be ", a_dtype == DType::i8 ? "f32 or f64" : name(a_dtype), " for ",
                        name(a_dtype), " inputs"),
                    name(out_dtype));
  }
  return {};
}

struct Range {
  std::string_view argument;
  const void* data;
  std::int64_t bytes;
};

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

Range range_of(std::string_view argument, const MatrixView& m) {
  return {argument, m.data, *extent_bytes(m)};
}

Range range_of(std::string_view argument, const PlanView& plan, const void* values, DType dtype) {
  return {argument, values, plan.shape.value_count() * static_cast<std::int64_t>(size_of(dtype))};
}

Status check_plan(std::string_view op, const PlanView& plan, const void* values) {
  if (Status status = check_shape(op, plan.shape); !status.ok()) return status;
  if (plan.crow == nullptr || plan.ccol == nullptr) {
    return invalid(op, "plan must point to its index arrays", "a null pointer");
  }
  if (values == nullptr && plan.shape.nnzb > 0) {
    return invalid(op, "values must point to its elements", "a null pointer");
  }
  return {};
}

template <class Args>
Status dispatch(std::string_view op, const std::vector<Kernel<Args>>& kernels, Device device,
                const Args& args, const Context& context) {
  const std::string forced = forced_impl();
  const Kernel<Args>* kernel = select_kernel(kernels, device, args, forced);
  if (kernel == nullptr && !forced.empty()) {
    return error(StatusCode::unsupported, op,
                 "RAREFY_FORCE_IMPL must name an implementation that this machine and these inputs can use",
                 cat('"', forced, "\" on ", name(device)));
  }
  if (kernel == nullptr) {
    return error(StatusCode::unsupported, op, "the device must have a kernel in this build", name(device));
  }
  try {
    return kernel->run(args, context);
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, op, "the workspace must fit in memory", "an allocation failure");
  }
}

}  // namespace

Status linear(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
              const MutableMatrixView& y, const Context& context) {
  constexpr std::string_view op = "linear";
  const BsrShape& shape = w.plan.shape;
  if (Status status = check_plan(op, w.plan, w.values); !status.ok()) return status;
  if (Status status = check_matrix(op, "x", x, w.device); !status.ok()) return status;
  if (Status status = check_output(op, "y", y, w.device); !status.ok()) return status;
  if (Status status = check_size(op, "x", "columns (in_features)", shape.cols, x.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "y", "columns (out_features)", shape.rows, y.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "y", "rows, like x", x.rows, y.rows); !status.ok()) return status;
  if (Status status = check_dtypes(op, "x", x.dtype, "values", w.dtype, "y", y.dtype); !status.ok())
    return status;
  const Range bias_range{"bias", bias,
                         bias == nullptr ? 0 : shape.rows * static_cast<std::int64_t>(size_of(y.dtype))};
  if (Status status =
          check_disjoint(op, range_of("y", y),
                         {range_of("x", x), range_of("values", w.plan, w.values, w.dtype), bias_range});
      !status.ok()) {
    return status;
  }
  if (y.rows == 0 || y.cols == 0) return {};
  return dispatch(op, registry().linear, w.device, {x, w, bias, activation, y}, context);
}

Status grad_input(const MatrixView& dy, const BsrView& w, const MutableMatrixView& dx,
                  const Context& context) {
  constexpr std::string_view op = "grad_input";
  const BsrShape& shape = w.plan.shape;
  if (Status status = check_plan(op, w.plan, w.values); !status.ok()) return status;
  if (Status status = check_matrix(op, "dy", dy, w.device); !status.ok()) return status;
  if (Status status = check_output(op, "dx", dx, w.device); !status.ok()) return status;
  if (Status status = check_size(op, "dy", "columns (out_features)", shape.rows, dy.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "dx", "columns (in_features)", shape.cols, dx.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "dx", "rows, like dy", dy.rows, dx.rows); !status.ok()) return status;
  if (Status status = check_dtypes(op, "dy", dy.dtype, "values", w.dtype, "dx", dx.dtype); !status.ok())
    return status;
  if (Status status = check_disjoint(op, range_of("dx", dx),
                                     {range_of("dy", dy), range_of("values", w.plan, w.values, w.dtype)});
      !status.ok()) {
    return status;
  }
  if (dx.rows == 0 || dx.cols == 0) return {};
  return dispatch(op, registry().grad_input, w.device, {dy, w, dx}, context);
}

Status grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                   DType dtype, const Context& context) {
  constexpr std::string_view op = "grad_weight";
  const BsrShape& shape = plan.shape;
  if (Status status = check_plan(op, plan, dvalues); !status.ok()) return status;
  if (Status status = check_matrix(op, "dy", dy, x.device); !status.ok()) return status;
  if (Status status = check_matrix(op, "x", x, x.device); !status.ok()) return status;
  if (Status status = check_size(op, "dy", "columns (out_features)", shape.rows, dy.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "x", "columns (in_features)", shape.cols, x.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "x", "rows, like dy", dy.rows, x.rows); !status.ok()) return status;
  if (Status status = check_dtypes(op, "dy", dy.dtype, "x", x.dtype, "dvalues", dtype); !status.ok())
    return status;
  if (Status status = check_disjoint(op, range_of("dvalues", plan, dvalues, dtype),
                                     {range_of("dy", dy), range_of("x", x)});
      !status.ok()) {
    return status;
  }
  if (shape.nnzb == 0) return {};
  return dispatch(op, registry().grad_weight, x.device, {dy, x, plan, dvalues, dtype}, context);
}

}  // namespace rarefy
