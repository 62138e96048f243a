// Runs a checked product: the first kernel of the registry that fits, with its workspace and what it derives.
#include "core/products.h"

#include <array>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/aligned_rows.h"
#include "core/arguments.h"
#include "core/checked.h"
#include "core/column_sort.h"
#include "core/memory.h"
#include "core/message.h"
#include "core/registry.h"
#include "core/scalar.h"

namespace rarefy {

namespace {

// The workspace that the kernel asked for: the caller's, what its function gives, or ours.
Status find_workspace(Call& call, const Workspace& given, std::int64_t bytes, Memory& own) {
  const std::string_view op = name(call.problem.op);
  call.workspace = given.data;
  if (given.bytes >= bytes) return {};
  if (given.provide != nullptr) {
    call.workspace = given.provide(given.provider, bytes);
  } else if (call.problem.device == Device::cpu) {
    own = aligned_memory(bytes);
    call.workspace = own.get();
  } else {
    return invalid(op, cat("workspace must have ", bytes, " bytes (workspace_size)"), cat(given.bytes));
  }
  if (call.workspace == nullptr) {
    return error(StatusCode::out_of_memory, op, "the workspace must fit in memory", "an allocation failure");
  }
  return {};
}

// What is at hand for the kernel must be as large as derived_sizes said; packed may be missing.
Status check_derived(const Call& call, const DerivedSizes& sizes) {
  const auto check = [&](std::string_view what, std::int64_t size, std::int64_t got) -> Status {
    if (got >= size) return {};
    return invalid(name(call.problem.op), cat(what, " must have at least ", size, " bytes (derived_sizes)"),
                   cat(got));
  };
  const Derived& derived = call.derived;
  Status status = check("derived.prepared", sizes.prepared, derived.prepared_bytes);
  if (!status.ok() || derived.packed == nullptr) return status;
  return check("derived.packed", sizes.packed, derived.packed_bytes);
}

// Prepares and packs what is not at hand at the start of the workspace; the kernel's own follows.
Status make_derived(Call& call, const Choice& choice, const Made& made) {
  auto* memory = static_cast<std::byte*>(call.workspace);
  call.derived.key = choice.derived.key;
  if (made.prepared > 0) {
    if (Status status = choice.kernel->prepare(call, memory); !status.ok()) return status;
    call.derived.prepared = memory;
    call.derived.prepared_bytes = made.prepared;
  }
  if (made.packed > 0) {
    if (Status status = choice.kernel->pack(call, memory + made.prepared); !status.ok()) return status;
    call.derived.packed = memory + made.prepared;
    call.derived.packed_bytes = made.packed;
  }
  call.workspace = memory + made.bytes();
  return {};
}

// The transposed index of a plan of rows alone, in `words`: 3 ns an entry, on all threads.
Status make_columns(Call& call, std::vector<std::int32_t>& words) try {
  const BsrShape& s = call.plan.shape;
  words.resize(static_cast<std::size_t>(s.col_count() + 1 + 2 * s.nnzb));
  std::int32_t *const ccol = words.data(), *const row = ccol + s.col_count() + 1, *const perm = row + s.nnzb;
  sort_by_column(call.plan, ccol, row, perm, call.executor, [](std::int32_t e) { return e; });
  call.plan.ccol = ccol;
  call.plan.row = row;
  call.plan.perm = perm;
  return {};
} catch (const std::bad_alloc&) {
  return error(StatusCode::out_of_memory, name(call.problem.op), "the transposed index must fit in memory",
               "an allocation failure");
}

// to += call.dvalues
Status add_values(const Call& call, void* to) {
  const WeightSpec& w = call.problem.weight;
  const std::int64_t count = w.shape.value_count();
  if (call.problem.device == Device::cuda) {
    return add_on_device(name(call.problem.op), w.dtype, call.dvalues, to, count, call.stream);
  }
  visit_float(w.dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(call.dvalues);
    T* sum = static_cast<T*>(to);
    constexpr std::int64_t kTask = 1 << 16;
    call.executor.parallel_for(ceil_div(count, kTask), [&](std::int64_t task) {
      const std::int64_t end = std::min(count, (task + 1) * kTask);
      for (std::int64_t i = task * kTask; i < end; ++i) store(sum + i, load(sum + i) + load(from + i));
    });
  });
  return {};
}

}  // namespace

void complete(Call& call, const Context& context) {
  Problem& problem = call.problem;
  problem.threads = context.executor.threads;
  problem.tf32 = context.tf32;
  problem.derived = call.derived.key;
  if (problem.device == Device::cuda) problem.device_index = current_cuda_device();
}

Status dispatch(Call& call, const Context& context) {
  Problem& problem = call.problem;
  complete(call, context);
  const auto choice = choose(problem);
  if (!choice.ok()) return choice.status();
  const Kernel& kernel = *choice->kernel;
  if (kernel.sums_dy == nullptr || !kernel.sums_dy(problem, choice->config)) call.dbias = nullptr;
  const bool held = choice->derived.key == call.derived.key;  // not another kernel's, or a forced config's
  if (held) {
    if (Status status = check_derived(call, choice->derived); !status.ok()) return status;
  } else {
    if (kernel.derives() && kernel.unheld == Unheld::refused) {
      return invalid(name(problem.op), cat("derived data must be made by prepare and pack for ", kernel.name),
                     "another configuration's");
    }
    call.derived = {};
    problem.derived = 0;
  }
  call.config = choice->config;
  call.executor = context.executor;
  call.stream = context.stream;
  std::vector<std::int32_t> columns;
  if (call.plan.ccol == nullptr && kernel.reads_columns != nullptr &&
      kernel.reads_columns(problem, choice->config)) {
    if (Status status = make_columns(call, columns); !status.ok()) return status;
  }
  Memory own;
  const Made made = made_in_call(*choice, held, call.derived.packed != nullptr);
  const std::int64_t to_add = bytes_to_add(problem, *choice),
                     bytes = made.bytes() + to_add + choice->workspace;
  if (Status status = find_workspace(call, context.workspace, bytes, own); !status.ok()) return status;
  const Problem asked = problem;
  void* const copies = call.workspace;
  if (choice->aligns_rows) {
    problem = with_aligned_rows(asked);
    call.workspace = static_cast<std::byte*>(copies) + aligned_rows_bytes(asked);
  }
  if (made.bytes() > 0) {
    if (Status status = make_derived(call, *choice, made); !status.ok()) return status;
  }
  void* const sum = call.dvalues;
  if (to_add > 0) {
    call.dvalues = call.workspace;
    call.workspace = static_cast<std::byte*>(call.workspace) + to_add;
  }
  Status status = choice->aligns_rows ? run_aligned(kernel, call, asked, copies) : kernel.run(call);
  return status.ok() && to_add > 0 ? add_values(call, sum) : status;
}

namespace {

// What linear's calls have in common; x and y are not empty.
Call linear_call(const MatrixView& x, const WeightSpec& w, Device device, const void* values,
                 const void* bias, Activation activation, const MutableMatrixView& y) {
  Alignment in, out, weight;
  in.add(x);
  out.add(y);
  out.add(bias);
  weight.add(bias);
  if (w.shape.nnzb > 0) in.add(values), weight.add(values);
  Call call;
  call.problem = {Op::linear, w,          x.dtype,    y.dtype,     x.rows,          x.stride(), y.stride(),
                  x.layout(), y.layout(), in.bytes(), out.bytes(), bias != nullptr, activation, device};
  call.problem.weight_alignment = weight.bytes();
  call.x = x;
  call.values = values;
  call.bias = bias;
  call.activation = activation;
  call.out = y;
  return call;
}

// The same of a weight of blocks.
Call linear_call(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
                 const MutableMatrixView& y) {
  Call call = linear_call(x, {Format::bsr, w.plan.shape, w.dtype, w.scaling, w.rounds_x}, w.device, w.values,
                          bias, activation, y);
  call.plan = w.plan;
  call.scales = w.scales;
  call.derived = w.derived;
  return call;
}

}  // namespace

Status run_linear(const MatrixView& x, const BsrView& w, const void* bias, Activation activation,
                  const MutableMatrixView& y, const Context& context) {
  if (y.rows == 0 || y.cols == 0) return {};
  Call call = linear_call(x, w, bias, activation, y);
  return dispatch(call, context);
}

namespace {

// The kernel that every one of these calls would get, configured for all their rows as one weight; none where
// they differ, or have to derive something first.
std::optional<Choice> choose_together(std::span<Call> calls, const Context& context) {
  Problem whole = calls.front().problem;
  whole.weight.shape.rows = whole.weight.shape.nnzb = 0;
  for (Call& call : calls) {
    Problem& p = call.problem;
    p.threads = context.executor.threads;
    p.derived = call.derived.key;
    const BsrShape& shape = p.weight.shape;
    if (p.device != Device::cpu || p.derived != calls.front().problem.derived) return {};
    WeightSpec alike = calls.front().problem.weight;
    alike.shape.rows = shape.rows;
    alike.shape.nnzb = shape.nnzb;
    if (p.weight != alike) return {};
    whole.weight.shape.rows += shape.row_count() * shape.block_rows;
    whole.weight.shape.nnzb += shape.nnzb;
    whole.in_alignment = std::min(whole.in_alignment, p.in_alignment);
    whole.out_alignment = std::min(whole.out_alignment, p.out_alignment);
  }
  whole.threads = context.executor.threads;
  whole.derived = calls.front().problem.derived;
  const auto together = choose(whole);
  if (!together.ok() || together->kernel->run_together == nullptr) return {};
  for (const Call& call : calls) {
    const auto alone = choose(call.problem);
    if (!alone.ok() || alone->kernel != together->kernel || alone->derived.key != call.derived.key) return {};
    if (!check_derived(call, alone->derived).ok() ||
        made_in_call(*alone, true, call.derived.packed != nullptr).bytes() > 0) {
      return {};
    }
  }
  return *together;
}

}  // namespace

Status run_linears(const MatrixView& x, std::span<const LayerView> layers,
                   std::span<const MutableMatrixView> y, const Context& context) {
  constexpr std::size_t kMost = 8;
  std::array<Call, kMost> memory;
  std::size_t count = 0;
  for (; count < layers.size() && count < kMost && y[count].rows > 0 && y[count].cols > 0; ++count) {
    memory[count] = linear_call(x, layers[count].weight, layers[count].bias, Activation::none, y[count]);
  }
  const std::span<Call> calls(memory.data(), count);
  const auto choice = count == layers.size() && count > 1 ? choose_together(calls, context) : std::nullopt;
  if (!choice) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      Status status = run_linear(x, layers[i].weight, layers[i].bias, Activation::none, y[i], context);
      if (!status.ok()) return status;
    }
    return {};
  }
  const Kernel& kernel = *choice->kernel;
  const auto bytes = [&](const Call& call) {
    return kernel.workspace == nullptr
               ? 0
               : ceil_div(kernel.workspace(call.problem, choice->config), 256) * std::int64_t{256};
  };
  std::int64_t all = 0;
  for (const Call& call : calls) all += bytes(call);
  Memory own;
  if (Status status = find_workspace(calls.front(), context.workspace, all, own); !status.ok()) return status;
  auto* at = static_cast<std::byte*>(calls.front().workspace);
  for (Call& call : calls) {
    call.config = choice->config;
    call.executor = context.executor;
    call.workspace = at;
    at += bytes(call);
  }
  return kernel.run_together(calls);
}

namespace {

// Workspace of a call of linear as `dispatch` takes it, up to a multiple of 256.
Result<std::int64_t> workspace_of(Call call, const Context& context) {
  complete(call, context);
  const auto choice = choose(call.problem);
  if (!choice.ok()) return choice.status();
  const bool held = choice->derived.key == call.derived.key;
  const Made made = made_in_call(*choice, held, held && call.derived.packed != nullptr);
  return ceil_div(made.bytes() + choice->workspace, 256) * 256;
}

}  // namespace

Status run_layers(const MatrixView& x, const FeedForward& layers, const MutableMatrixView& y,
                  const Context& context) {
  const std::int64_t width = layers.up.weight.plan.shape.rows, count = x.rows * width,
                     bytes = ceil_div(count * static_cast<std::int64_t>(size_of(y.dtype)), 256) * 256;
  MutableMatrixView hidden{nullptr, y.dtype, x.rows, width, width, y.device}, gate = hidden;
  const Activation activation = layers.activation;
  const auto up = [&] {
    const LayerView& l = layers.up;
    return linear_call(x, l.weight, l.bias, layers.gate ? Activation::none : activation, hidden);
  };
  const auto gated = [&] { return linear_call(x, layers.gate->weight, layers.gate->bias, activation, gate); };
  const auto down = [&] {
    return linear_call(hidden, layers.down.weight, layers.down.bias, Activation::none, y);
  };
  // In one piece: who provides workspace may take back what was given before.
  std::int64_t most = 0;
  for (const Call& call : {up(), layers.gate ? gated() : up(), down()}) {
    const auto wanted = workspace_of(call, context);
    if (!wanted.ok()) return wanted.status();
    most = std::max(most, *wanted);
  }
  Call whole;
  whole.problem.op = Op::feed_forward;
  whole.problem.device = y.device;
  Memory own;
  const std::int64_t held = layers.gate ? 2 * bytes : bytes;
  if (Status status = find_workspace(whole, context.workspace, held + most, own); !status.ok()) return status;
  auto* const memory = static_cast<std::byte*>(whole.workspace);
  hidden.data = memory;
  gate.data = memory + bytes;
  Context inner = context;
  inner.workspace = {memory + held, most};
  const auto run = [&](Call call) { return call.out.cols == 0 ? Status() : dispatch(call, inner); };
  if (Status status = run(up()); !status.ok()) return status;
  if (layers.gate) {
    if (Status status = run(gated()); !status.ok()) return status;
    if (Status status =
            multiply_on_device("feed_forward", y.dtype, gate.data, hidden.data, count, context.stream);
        !status.ok()) {
      return status;
    }
  }
  return run(down());
}

Status run_linear(const MatrixView& x, const BitmapView& w, const void* bias, Activation activation,
                  const MutableMatrixView& y, const Context& context) {
  if (y.rows == 0 || y.cols == 0) return {};
  Call call =
      linear_call(x, {w.plan.format(), w.plan.shape, w.dtype}, Device::cpu, w.values, bias, activation, y);
  call.plan.shape = w.plan.shape;
  call.plan.crow = w.plan.crow;
  call.bits = w.plan.bits;
  return dispatch(call, context);
}

Status run_grad_input(const MatrixView& dy, const BsrView& w, const MutableMatrixView& dx,
                      const Context& context) {
  if (dx.rows == 0 || dx.cols == 0) return {};
  Alignment in, out, weight;
  in.add(dy);
  out.add(dx);
  if (w.plan.shape.nnzb > 0) in.add(w.values), weight.add(w.values);
  Call call;
  call.problem = {Op::grad_input,   {Format::bsr, w.plan.shape, w.dtype, w.scaling},
                  dy.dtype,         dx.dtype,
                  dy.rows,          dy.stride(),
                  dx.stride(),      dy.layout(),
                  dx.layout(),      in.bytes(),
                  out.bytes(),      false,
                  Activation::none, w.device};
  call.problem.weight_alignment = weight.bytes();
  call.dy = dy;
  call.plan = w.plan;
  call.values = w.values;
  call.scales = w.scales;
  call.derived = w.derived;
  call.out = dx;
  return dispatch(call, context);
}

Status run_grad_weight(const MatrixView& dy, const MatrixView& x, const PlanView& plan, void* dvalues,
                       DType dtype, const Context& context, const Derived& derived, bool accumulate,
                       BiasGradient* bias) {
  if (plan.shape.nnzb == 0) return {};
  Alignment in, out;
  in.add(dy);
  in.add(x);
  out.add(dvalues);
  Call call;
  call.problem = {Op::grad_weight,  {Format::bsr, plan.shape, dtype},
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
  call.problem.weight_alignment = out.bytes();
  call.problem.accumulate = accumulate;
  call.dvalues = dvalues;
  if (bias != nullptr) call.dbias = bias->data;
  Status status = dispatch(call, context);
  if (bias != nullptr) bias->written = status.ok() && call.dbias != nullptr;
  return status;
}

}  // namespace rarefy
