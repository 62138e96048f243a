// The three products: check everything, then run the first kernel of the registry that fits.
#include "rarefy/linear.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "core/arguments.h"
#include "core/checked.h"
#include "core/message.h"
#include "core/registry.h"

namespace rarefy {

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }  // NOLINT(cppcoreguidelines-no-malloc)
};

// The workspace that the kernel asked for: the caller's, what its function gives, or ours.
Status find_workspace(Call& call, const Workspace& given, std::int64_t bytes,
                      std::unique_ptr<void, Free>& own) {
  const std::string_view op = name(call.problem.op);
  call.workspace = given.data;
  if (given.bytes >= bytes) return {};
  if (given.provide != nullptr) {
    call.workspace = given.provide(given.provider, bytes);
  } else if (call.problem.device == Device::cpu) {
    own.reset(std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64)));
    call.workspace = own.get();
  } else {
    return invalid(op, cat("workspace must have ", bytes, " bytes (workspace_size)"), cat(given.bytes));
  }
  if (call.workspace == nullptr) {
    return error(StatusCode::out_of_memory, op, "the workspace must fit in memory", "an allocation failure");
  }
  return {};
}

// Bytes that are packed in the call, behind the kernel's own workspace: its caller holds nothing packed.
std::int64_t packed_in_call(const Call& call, const Choice& choice) {
  const bool missing = call.derived.key != 0 && call.derived.packed == nullptr;
  return missing && choice.kernel->pack != nullptr
             ? choice.kernel->packed_size(call.problem, choice.config)
             : 0;
}

// What is at hand for the kernel must be as large as derived_sizes said; packed may be missing.
Status check_derived(const Call& call, const Choice& choice) {
  const auto check = [&](std::string_view what, auto of, std::int64_t got) -> Status {
    const std::int64_t size = of == nullptr ? 0 : of(call.problem, choice.config);
    if (got >= size) return {};
    return invalid(name(call.problem.op), cat(what, " must have at least ", size, " bytes (derived_sizes)"),
                   cat(got));
  };
  Status status = check("derived.prepared", choice.kernel->prepared_size, call.derived.prepared_bytes);
  if (!status.ok()) return status;
  if (packed_in_call(call, choice) > 0) return {};
  return check("derived.packed", choice.kernel->packed_size, call.derived.packed_bytes);
}

}  // namespace

Status dispatch(Call& call, const Context& context) {
  Problem& problem = call.problem;
  problem.threads = context.executor.threads;
  problem.derived = call.derived.key;
  if (problem.device == Device::cuda) problem.device_index = current_cuda_device();
  const auto choice = choose(problem);
  if (!choice.ok()) return choice.status();
  if (choice->derived_key != call.derived.key) {  // another kernel's; or a forced configuration's
    if (choice->kernel->derives() && !choice->kernel->derived_optional) {
      return invalid(name(problem.op),
                     cat("derived data must be made by prepare and pack for ", choice->kernel->name),
                     "another configuration's");
    }
    call.derived = {};
    problem.derived = 0;
  } else if (choice->derived_key != 0) {
    if (Status status = check_derived(call, *choice); !status.ok()) return status;
  }
  call.config = choice->config;
  call.executor = context.executor;
  call.stream = context.stream;
  std::unique_ptr<void, Free> own;
  const std::int64_t packed = packed_in_call(call, *choice);
  const std::int64_t first = packed == 0 ? choice->workspace : ceil_div(choice->workspace, 256) * 256;
  if (Status status = find_workspace(call, context.workspace, first + packed, own); !status.ok())
    return status;
  if (packed > 0) {
    void* to = static_cast<std::byte*>(call.workspace) + first;
    if (Status status = choice->kernel->pack(call, to); !status.ok()) return status;
    call.derived.packed = to;
    call.derived.packed_bytes = packed;
  }
  return choice->kernel->run(call);
}

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

// The same of a call.
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

}  // namespace

Status check_scales(std::string_view op, std::span<const float> scales) {
  const auto bad = std::ranges::find_if(scales, [](float s) { return !(s > 0 && std::isfinite(s)); });
  if (bad == scales.end()) return {};
  return invalid(op, "scales must be finite and above 0",
                 cat("scales[", bad - scales.begin(), "]=", static_cast<double>(*bad)));
}

Status check_problem(std::string_view op, const Problem& p) {
  if (Status status = check_shape(op, p.weight.shape); !status.ok()) return status;
  if (Status status = check_scaling(op, p.weight, "inputs", p.in); !status.ok()) return status;
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
  if (Status status = check_plan(op, "values", w.plan, w.values); !status.ok()) return status;
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
  if (y.rows == 0 || y.cols == 0) return {};
  Alignment in, out;
  in.add(x);
  in.add(w.values);
  out.add(y);
  out.add(bias);
  Call call;
  call.problem = {Op::linear,  {Format::bsr, shape, w.dtype, w.scaling},
                  x.dtype,     y.dtype,
                  x.rows,      x.stride(),
                  y.stride(),  x.layout(),
                  y.layout(),  in.bytes(),
                  out.bytes(), bias != nullptr,
                  activation,  w.device};
  call.x = x;
  call.plan = w.plan;
  call.values = w.values;
  call.scales = w.scales;
  call.derived = w.derived;
  call.bias = bias;
  call.activation = activation;
  call.out = y;
  return dispatch(call, context);
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
  if (dx.rows == 0 || dx.cols == 0) return {};
  Alignment in, out;
  in.add(dy);
  in.add(w.values);
  out.add(dx);
  Call call;
  call.problem = {Op::grad_input,   {Format::bsr, shape, w.dtype, w.scaling},
                  dy.dtype,         dx.dtype,
                  dy.rows,          dy.stride(),
                  dx.stride(),      dy.layout(),
                  dx.layout(),      in.bytes(),
                  out.bytes(),      false,
                  Activation::none, w.device};
  call.dy = dy;
  call.plan = w.plan;
  call.values = w.values;
  call.scales = w.scales;
  call.derived = w.derived;
  call.out = dx;
  return dispatch(call, context);
}

Status grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                   DType dtype, const Context& context, const Derived& derived) {
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
  if (shape.nnzb == 0) return {};
  Alignment in, out;
  in.add(dy);
  in.add(x);
  out.add(dvalues);
  Call call;
  call.problem = {Op::grad_weight,  {Format::bsr, shape, dtype},
                  x.dtype,          dtype,
                  x.rows,           dy.stride(),
                  x.stride(),       dy.layout(),
                  x.layout(),       in.bytes(),
                  out.bytes(),      false,
                  Activation::none, x.device};
  call.dy = dy;
  call.x = x;
  call.plan = plan;
  call.derived = derived;
  call.dvalues = dvalues;
  return dispatch(call, context);
}

namespace {

// The kernel that a caller gets who makes what it derives, and its call up to the data.
Result<Choice> deriving(std::string_view op, Problem& problem) {
  if (Status status = check_problem(op, problem); !status.ok()) return status;
  problem.derived = kAnyDerived;
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
  const Kernel& kernel = *choice->kernel;
  const auto size = [&](auto of) { return of == nullptr ? 0 : of(asked, choice->config); };
  return DerivedSizes{choice->derived_key, size(kernel.prepared_size), size(kernel.packed_size)};
}

Status prepare(const Problem& problem, const PlanView& plan, void* prepared, const Context& context) {
  Call call;
  call.problem = problem;
  const auto choice = deriving("prepare", call.problem);
  if (!choice.ok()) return choice.status();
  if (Status status = check_plan("prepare", "prepared", plan, prepared); !status.ok()) return status;
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
  if (Status status = check_plan("pack", "values", w.plan, w.values); !status.ok()) return status;
  if (Status status = check_same_shape("pack", problem, w.plan); !status.ok()) return status;
  if (Status status = check_scaling("pack", w, "inputs", problem.in); !status.ok()) return status;
  if (choice->kernel->pack == nullptr) return {};
  call.config = choice->config;
  call.plan = w.plan;
  call.values = w.values;
  call.scales = w.scales;
  call.derived = {choice->derived_key, prepared, nullptr};
  call.executor = context.executor;
  call.stream = context.stream;
  return choice->kernel->pack(call, packed);
}

}  // namespace rarefy
