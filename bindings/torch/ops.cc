// The ops of torch.ops.rarefy: schemas, and kernels that adapt their tensors and call the core.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "adapt.h"
#include "core/message.h"
#include "core/products.h"
#include "derived.h"

namespace rarefy::binding {

namespace {

template <bool kRoundsX = false>
Tensor bsr_linear(Tensor x, const Tensor& values, const Tensor& plan, const std::optional<Tensor>& bias,
                  std::int64_t out_features, std::int64_t in_features, const std::optional<Tensor>& prepared,
                  const std::optional<Tensor>& packed, std::int64_t derived, std::string_view activation) {
  const Call call(kRoundsX ? "bsr_linear_rounded" : "bsr_linear", "values", values);
  if (kRoundsX && call.device() != Device::cpu) {
    raise(call.op(), error(StatusCode::unsupported, call.op(), "x must be on the CPU", "a CUDA tensor"));
  }
  const Activation fused = call.activation(activation);
  BsrView weight = call.weight(values, plan, out_features, in_features, Call::Part::rows);
  weight.rounds_x = kRoundsX;
  const Call::Product product{weight.plan.shape, weight.dtype, derived};
  const MatrixView in = call.matrix("x", x, "in_features", in_features, &product);
  call.check_stored(weight.dtype, "x", in.dtype);
  weight.derived = view_derived(call, {prepared, packed, derived}, Op::linear, weight.plan, in.dtype, &weight,
                                weight.dtype, in.rows);
  const void* bias_data = call.bias(bias, out_features, in.dtype);
  Tensor y = call.empty_rows(x, out_features);
  check(call.op(), run_linear(in, weight, bias_data, fused, call.output(y, in, out_features),
                              call.context(allows_tf32(call, derived, weight.plan, in.dtype, weight.dtype))));
  return y;
}

// bsr_linear for eager calls that nothing records, where a small layer spends its time on the way to an op:
// each argument that is not there saves 0.1 to 0.2 us of boxing, an autograd kernel to step over 0.7.
Tensor bsr_linear_held(Tensor x, const Tensor& values, const Tensor& plan, const std::optional<Tensor>& bias,
                       std::int64_t out_features, std::int64_t in_features,
                       const std::optional<Tensor>& prepared, const std::optional<Tensor>& packed,
                       std::int64_t derived) {
  return bsr_linear(std::move(x), values, plan, bias, out_features, in_features, prepared, packed, derived,
                    "none");
}

// The same where nothing is derived.
Tensor bsr_linear_alone(Tensor x, const Tensor& values, const Tensor& plan, const std::optional<Tensor>& bias,
                        std::int64_t out_features, std::int64_t in_features) {
  return bsr_linear(std::move(x), values, plan, bias, out_features, in_features, std::nullopt, std::nullopt,
                    0, "none");
}

Tensor bsr_grad_input(Tensor grad_output, const Tensor& values, const Tensor& plan, std::int64_t out_features,
                      std::int64_t in_features, const std::optional<Tensor>& prepared,
                      const std::optional<Tensor>& packed, std::int64_t derived) {
  const Call call("bsr_grad_input", "values", values);
  BsrView weight = call.weight(values, plan, out_features, in_features);
  const MatrixView dy = call.matrix("grad_output", grad_output, "out_features", out_features);
  call.check_stored(weight.dtype, "grad_output", dy.dtype);
  weight.derived = view_derived(call, {prepared, packed, derived}, Op::grad_input, weight.plan, dy.dtype,
                                &weight, weight.dtype);
  Tensor dx = call.empty_rows(grad_output, in_features);
  check(call.op(),
        run_grad_input(dy, weight, call.output(dx, dy, in_features),
                       call.context(allows_tf32(call, derived, weight.plan, dy.dtype, weight.dtype))));
  return dx;
}

// The stored blocks of dYᵀ X into `dvalues`, of `stored`, or added to them.
void write_weight_gradient(const Call& call, const MatrixView& dy, const MatrixView& x,
                           const PlanView& pattern, const Tensor& dvalues, DType stored,
                           const DerivedTensors& derived, bool accumulate, BiasGradient* bias = nullptr) {
  const Context context = call.context(allows_tf32(call, derived.key, pattern, x.dtype, stored));
  check(call.op(),
        run_grad_weight(dy, x, pattern, dvalues.data_ptr(), stored, context,
                        view_derived(call, derived, Op::grad_weight, pattern, x.dtype, nullptr, stored),
                        accumulate, bias));
}

Tensor bsr_grad_weight(Tensor grad_output, Tensor x, const Tensor& plan, std::int64_t block_rows,
                       std::int64_t block_cols, std::int64_t out_features, std::int64_t in_features,
                       const std::optional<ScalarType>& dtype, const std::optional<Tensor>& prepared,
                       std::int64_t derived) {
  const Call call("bsr_grad_weight", "x", x);
  const PlanView pattern = call.plan(plan, out_features, in_features, block_rows, block_cols);
  const MatrixView dy = call.matrix("grad_output", grad_output, "out_features", out_features);
  const DType stored = call.stored_dtype(dtype, "x", call.float_dtype("x", x));
  const Call::Product product{pattern.shape, stored, derived, &dy};
  const MatrixView in = call.matrix("x", x, "in_features", in_features, &product);
  call.check_dtype("x", x, "grad_output", dy.dtype);
  call.check_rows(in, dy);
  Tensor dvalues = call.empty_values(pattern.shape, dtype.value_or(x.scalar_type()));
  write_weight_gradient(call, dy, in, pattern, dvalues, stored, {prepared, std::nullopt, derived}, false);
  return dvalues;
}

// The same added to `gradient`, in its dtype, which values of such an x can have.
void bsr_add_grad_weight(const Tensor& gradient, Tensor grad_output, Tensor x, const Tensor& plan,
                         std::int64_t out_features, std::int64_t in_features,
                         const std::optional<Tensor>& prepared, std::int64_t derived) {
  const Call call("bsr_add_grad_weight", "x", x);
  const BsrView weight = call.weight(gradient, plan, out_features, in_features);
  const MatrixView dy = call.matrix("grad_output", grad_output, "out_features", out_features);
  const Call::Product product{weight.plan.shape, weight.dtype, derived, &dy};
  const MatrixView in = call.matrix("x", x, "in_features", in_features, &product);
  call.check_dtype("x", x, "grad_output", dy.dtype);
  call.check_stored(weight.dtype, "x", in.dtype);
  call.check_rows(in, dy);
  write_weight_gradient(call, dy, in, weight.plan, gradient, weight.dtype, {prepared, std::nullopt, derived},
                        true);
}

// The gradients of bsr_linear in one call, for eager backward passes, where a small layer spends its time
// on the way to an op: dx if values are given, dvalues if x is, dbias if asked for; else empty tensors.
std::tuple<Tensor, Tensor, Tensor> bsr_linear_backward(
    Tensor grad_output, std::optional<Tensor> x, const std::optional<Tensor>& values, const Tensor& plan,
    std::int64_t block_rows, std::int64_t block_cols, std::int64_t out_features, std::int64_t in_features,
    bool bias, const std::optional<ScalarType>& dtype, const std::optional<Tensor>& prepared,
    const std::optional<Tensor>& packed, std::int64_t derived) {
  const Call call("bsr_linear_backward", "grad_output", grad_output);
  const PlanView pattern = call.plan(plan, out_features, in_features, block_rows, block_cols);
  const MatrixView dy = call.matrix("grad_output", grad_output, "out_features", out_features);
  const auto input_gradient = [&] {
    BsrView weight = call.weight(*values, pattern);
    call.check_stored(weight.dtype, "grad_output", dy.dtype);
    weight.derived = view_derived(call, {prepared, packed, derived}, Op::grad_input, pattern, dy.dtype,
                                  &weight, weight.dtype);
    Tensor dx = call.empty_rows(grad_output, in_features);
    check(call.op(),
          run_grad_input(dy, weight, call.output(dx, dy, in_features),
                         call.context(allows_tf32(call, derived, pattern, dy.dtype, weight.dtype))));
    return dx;
  };
  std::optional<Tensor> dbias;  // of a kernel that sums dY as it multiplies it
  const auto weight_gradient = [&] {
    const DType stored = call.stored_dtype(dtype, "x", call.float_dtype("x", *x));
    const Call::Product product{pattern.shape, stored, derived, &dy};
    const MatrixView in = call.matrix("x", *x, "in_features", in_features, &product);
    call.check_dtype("x", *x, "grad_output", dy.dtype);
    call.check_rows(in, dy);
    Tensor dvalues = call.empty_values(pattern.shape, dtype.value_or(x->scalar_type()));
    BiasGradient sums;
    if (bias && dy.device == Device::cuda) {
      dbias = call.empty_elements(dy.cols, grad_output.scalar_type());
      sums.data = dbias->data_ptr();
    }
    write_weight_gradient(call, dy, in, pattern, dvalues, stored, {prepared, std::nullopt, derived}, false,
                          &sums);
    if (!sums.written) dbias.reset();
    return dvalues;
  };
  return {values ? input_gradient() : call.nothing(grad_output),
          x ? weight_gradient() : call.nothing(grad_output),
          dbias  ? *dbias
          : bias ? call.sum_rows(grad_output, dy)
                 : call.nothing(grad_output)};
}

// Errors speak of `caller`, who has the user's arguments.
Tensor bsr_plan(const Tensor& crow_indices, const Tensor& col_indices, std::int64_t out_features,
                std::int64_t in_features, std::int64_t block_rows, std::int64_t block_cols,
                std::string_view caller) {
  const Call call(caller, "crow_indices", crow_indices);
  call.check_device("col_indices", col_indices);
  const BsrShape shape{out_features, in_features, block_rows, block_cols, col_indices.numel()};
  return call.build_plan(shape, crow_indices, col_indices);
}

}  // namespace

STABLE_TORCH_LIBRARY(rarefy, m) {
  m.def(
      "bsr_linear(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, "
      "SymInt in_features, Tensor? prepared=None, Tensor? packed=None, int derived=0, "
      "str activation=\"none\") -> Tensor");
  m.def(
      "bsr_linear_rounded(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, "
      "SymInt in_features, Tensor? prepared=None, Tensor? packed=None, int derived=0, "
      "str activation=\"none\") -> Tensor");
  m.def(
      "_bsr_linear(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, "
      "SymInt in_features) -> Tensor");
  m.def(
      "_bsr_linear_held(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, "
      "SymInt in_features, Tensor? prepared, Tensor? packed, int derived) -> Tensor");
  m.def(
      "bsr_grad_input(Tensor grad_output, Tensor values, Tensor plan, SymInt out_features, "
      "SymInt in_features, Tensor? prepared=None, Tensor? packed=None, int derived=0) -> Tensor");
  m.def(
      "bsr_grad_weight(Tensor grad_output, Tensor x, Tensor plan, SymInt block_rows, SymInt block_cols, "
      "SymInt out_features, SymInt in_features, ScalarType? dtype=None, Tensor? prepared=None, "
      "int derived=0) -> Tensor");
  m.def(
      "bsr_add_grad_weight(Tensor(a!) gradient, Tensor grad_output, Tensor x, Tensor plan, "
      "SymInt out_features, SymInt in_features, Tensor? prepared=None, int derived=0) -> ()");
  m.def(
      "_bsr_linear_backward(Tensor grad_output, Tensor? x, Tensor? values, Tensor plan, SymInt block_rows, "
      "SymInt block_cols, SymInt out_features, SymInt in_features, bool bias, ScalarType? dtype=None, "
      "Tensor? prepared=None, Tensor? packed=None, int derived=0) -> (Tensor, Tensor, Tensor)");
  m.def(
      "bsr_plan(Tensor crow_indices, Tensor col_indices, SymInt out_features, SymInt in_features, "
      "SymInt block_rows, SymInt block_cols, str caller=\"bsr_plan\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("bsr_linear", TORCH_BOX(&bsr_linear<>));
  m.impl("bsr_linear_rounded", TORCH_BOX(&bsr_linear<true>));
  m.impl("_bsr_linear", TORCH_BOX(&bsr_linear_alone));
  m.impl("_bsr_linear_held", TORCH_BOX(&bsr_linear_held));
  m.impl("bsr_grad_input", TORCH_BOX(&bsr_grad_input));
  m.impl("bsr_grad_weight", TORCH_BOX(&bsr_grad_weight));
  m.impl("bsr_add_grad_weight", TORCH_BOX(&bsr_add_grad_weight));
  m.impl("_bsr_linear_backward", TORCH_BOX(&bsr_linear_backward));
  m.impl("bsr_plan", TORCH_BOX(&bsr_plan));
}

// Also in builds without CUDA, to say so; on CUDA no kernel rounds x.
STABLE_TORCH_LIBRARY_IMPL(rarefy, CUDA, m) {
  m.impl("bsr_linear", TORCH_BOX(&bsr_linear<>));
  m.impl("bsr_linear_rounded", TORCH_BOX(&bsr_linear<true>));
  m.impl("_bsr_linear", TORCH_BOX(&bsr_linear_alone));
  m.impl("_bsr_linear_held", TORCH_BOX(&bsr_linear_held));
  m.impl("bsr_grad_input", TORCH_BOX(&bsr_grad_input));
  m.impl("bsr_grad_weight", TORCH_BOX(&bsr_grad_weight));
  m.impl("bsr_add_grad_weight", TORCH_BOX(&bsr_add_grad_weight));
  m.impl("_bsr_linear_backward", TORCH_BOX(&bsr_linear_backward));
  m.impl("bsr_plan", TORCH_BOX(&bsr_plan));
}

}  // namespace rarefy::binding
