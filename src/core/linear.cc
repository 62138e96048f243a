// The three products, every argument checked, and what their kernels derive from a weight.
#include "rarefy/linear.h"

#include <algorithm>
#include <cmath>

#include "core/arguments.h"
#include "core/message.h"
#include "core/products.h"
#include "core/registry.h"

namespace rarefy {

namespace {

// What scaled values need of the other arguments; `in`: x, or dy.
Status check_scaling(std::string_view op, const WeightSpec& w, std::string_view argument, DType in) {
  if (w.scaling == Scaling::none) return {};
  if (w.scaling != Scaling::weight && w.scaling != Scaling::dynamic) {
    return invalid(op, "scaling must be one of rarefy/problem.h", cat(static_cast<int>(w.scaling)));
  }
  if (w.dtype != DType::i8) return mismatch(op, "values with scales must be i8", name(w.dtype));
  if (in == DType::f32 || in == DType::bf16 || in == DType::f16) return {};
  return mismatch(op, cat(argument, " must be f32, bf16 or f16 for values with scales"), name(in));
}

}  // namespace

Status check_scaling(std::string_view op, const BsrView& w, std::string_view argument, DType in) {
  if (w.scaling == Scaling::none && w.scales == nullptr) return {};
  if (w.scaling == Scaling::none) return invalid(op, "scales must come with a scaling", "none");
  if (w.scales == nullptr && w.plan.shape.rows > 0) {
    return invalid(op, "scales must point to their elements", "a null pointer");
  }
  return check_scaling(op, {Format::bsr, w.plan.shape, w.dtype, w.scaling}, argument, in);
}

Range range_of_scales(const BsrView& w) {
  return {"scales", w.scales,
          w.scales == nullptr ? 0 : w.plan.shape.rows * static_cast<std::int64_t>(sizeof(float))};
}

Status check_scales(std::string_view op, std::span<const float> scales) {
  const auto bad = std::ranges::find_if(scales, [](float s) { return !(s > 0 && std::isfinite(s)); });
  if (bad == scales.end()) return {};
  return invalid(op, "scales must be finite and above 0",
                 cat("scales[", bad - scales.begin(), "]=", static_cast<double>(*bad)));
}

Status check_problem(std::string_view op, const Problem& p) {
  if (Status status = check_shape(op, p.weight.shape); !status.ok()) return status;
  if (Status status = check_scaling(op, p.weight, "inputs", p.in); !status.ok()) return status;
  if (p.weight.format != Format::bsr && p.weight.shape.block_size() != 1) {
    return invalid(op, "a bitmap must be of blocks of 1x1",
                   cat(p.weight.shape.block_rows, 'x', p.weight.shape.block_cols));
  }
  if (Status status = check_activation(op, p.activation); !status.ok()) return status;
  if (p.op == Op::feed_forward) {
    if (Status status = check_feed_forward(op, p.weight.shape, p.down.shape, p.gate.shape); !status.ok())
      return status;
  }
  if (p.tokens < 0) return invalid(op, "tokens must not be negative", cat(p.tokens));
  if (p.threads < 1) return invalid(op, "threads must be at least 1", cat(p.threads));
  if (p.op == Op::grad_weight) return {};
  return check_output_dtype(op, "inputs", p.in, "out", p.out);
}

Status linear(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
              const MutableMatrixView& y, const Context& context) {
  constexpr std::string_view op = "linear";
  const BsrShape& shape = w.plan.shape;
  if (Status status = check_plan(op, "values", w.plan, w.values, w.device == Device::cpu); !status.ok())
    return status;
  if (Status status = check_rows(op, {"x", "columns (in_features)", shape.cols, x},
                                 {"y", "columns (out_features)", shape.rows, y}, "rows, like x", w.device);
      !status.ok()) {
    return status;
  }
  if (Status status = check_scaling(op, w, "x", x.dtype); !status.ok()) return status;
  if (Status status = check_activation(op, activation); !status.ok()) return status;
  const Range bias_range{"bias", bias,
                         bias == nullptr ? 0 : shape.rows * static_cast<std::int64_t>(size_of(y.dtype))};
  if (Status status = check_disjoint(
          op, range_of("y", y),
          {range_of("x", x), range_of("values", w.plan, w.values, w.dtype), bias_range, range_of_scales(w)});
      !status.ok()) {
    return status;
  }
  return run_linear(x, w, bias, activation, y, context);
}

Status grad_input(const MatrixView& dy, const BsrView& w, const MutableMatrixView& dx,
                  const Context& context) {
  constexpr std::string_view op = "grad_input";
  const BsrShape& shape = w.plan.shape;
  if (Status status = check_plan(op, "values", w.plan, w.values); !status.ok()) return status;
  if (Status status = check_rows(op, {"dy", "columns (out_features)", shape.rows, dy},
                                 {"dx", "columns (in_features)", shape.cols, dx}, "rows, like dy", w.device);
      !status.ok()) {
    return status;
  }
  if (Status status = check_scaling(op, w, "dy", dy.dtype); !status.ok()) return status;
  if (Status status = check_disjoint(
          op, range_of("dx", dx),
          {range_of("dy", dy), range_of("values", w.plan, w.values, w.dtype), range_of_scales(w)});
      !status.ok()) {
    return status;
  }
  return run_grad_input(dy, w, dx, context);
}

Status grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                   DType dtype, const Context& context, const Derived& derived, bool accumulate) {
  constexpr std::string_view op = "grad_weight";
  const BsrShape& shape = plan.shape;
  if (Status status = check_plan(op, "dvalues", plan, dvalues); !status.ok()) return status;
  if (Status status = check_matrix(op, "dy", dy, x.device, true); !status.ok()) return status;
  if (Status status = check_matrix(op, "x", x, x.device, true); !status.ok()) return status;
  if (Status status = check_size(op, "dy", "columns (out_features)", shape.rows, dy.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "x", "columns (in_features)", shape.cols, x.cols); !status.ok())
    return status;
  if (Status status = check_size(op, "x", "rows, like dy", dy.rows, x.rows); !status.ok()) return status;
  if (dy.dtype != x.dtype) {
    return mismatch(op, "dy and x must have one dtype", cat(name(dy.dtype), " and ", name(x.dtype)));
  }
  if (dtype == DType::i8) return mismatch(op, "dvalues must be f64, f32, bf16 or f16", name(dtype));
  if (Status status = check_disjoint(op, range_of("dvalues", plan, dvalues, dtype),
                                     {range_of("dy", dy), range_of("x", x)});
      !status.ok()) {
    return status;
  }
  return run_grad_weight(dy, x, plan, dvalues, dtype, context, derived, accumulate);
}

namespace {

// The kernel that a caller gets who makes what it derives, or what of it follows from the pattern, and its
// call up to the data.
Result<Choice> deriving(std::string_view op, Problem& problem) {
  if (Status status = check_problem(op, problem); !status.ok()) return status;
  if (problem.derived != kAnyPrepared) problem.derived = kAnyDerived;
  return choose(problem);
}

Status check_same_shape(std::string_view op, const Problem& problem, const PlanView& plan) {
  if (problem.weight.shape == plan.shape) return {};
  return invalid(op, "the problem must be of the plan's shape, block and number of blocks",
                 to_string(problem));
}

}  // namespace

Result<DerivedSizes> derived_sizes(const Problem& problem) {
  Problem asked = problem;
  const auto choice = deriving("derived_sizes", asked);
  if (!choice.ok()) return choice.status();
  return choice->derived;
}

Status prepare(const Problem& problem, const PlanView& plan, void* prepared, const Context& context) {
  Call call;
  call.problem = problem;
  const auto choice = deriving("prepare", call.problem);
  if (!choice.ok()) return choice.status();
  const bool by_rows = problem.op == Op::linear && problem.device == Device::cpu;  // as `linear`
  if (Status status = check_plan("prepare", "prepared", plan, prepared, by_rows); !status.ok()) return status;
  if (Status status = check_same_shape("prepare", problem, plan); !status.ok()) return status;
  if (choice->kernel->prepare == nullptr) return {};
  call.config = choice->config;
  call.plan = plan;
  call.executor = context.executor;
  call.stream = context.stream;
  return choice->kernel->prepare(call, prepared);
}

Status pack(const Problem& problem, const BsrView& w, const void* prepared, void* packed,
            const Context& context) {
  Call call;
  call.problem = problem;
  const auto choice = deriving("pack", call.problem);
  if (!choice.ok()) return choice.status();
  const bool by_rows = problem.op == Op::linear && problem.device == Device::cpu &&
                       w.plan.shape.block_size() == 1;  // single elements are packed by row
  if (Status status = check_plan("pack", "values", w.plan, w.values, by_rows); !status.ok()) return status;
  if (Status status = check_same_shape("pack", problem, w.plan); !status.ok()) return status;
  if (Status status = check_scaling("pack", w, "inputs", problem.in); !status.ok()) return status;
  if (choice->kernel->pack == nullptr) return {};
  call.config = choice->config;
  call.plan = w.plan;
  call.values = w.values;
  call.scales = w.scales;
  call.derived = {choice->derived.key, prepared, nullptr};
  call.executor = context.executor;
  call.stream = context.stream;
  return choice->kernel->pack(call, packed);
}

}  // namespace rarefy
