// The three products: check everything, then run the first kernel in the registry that fits.
#include "rarefy/linear.h"

#include <new>

#include "core/arguments.h"
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
  if (Status status = check_plan(op, "values", w.plan, w.values); !status.ok()) return status;
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
  if (Status status = check_plan(op, "values", w.plan, w.values); !status.ok()) return status;
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
  if (Status status = check_plan(op, "dvalues", plan, dvalues); !status.ok()) return status;
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
