// The ops of scaled int8 weights (Scaling of rarefy/problem.h): linear, and what its kernels derive.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "adapt.h"
#include "core/message.h"
#include "derived.h"

namespace rarefy::binding {

BsrView scaled_weight(const Call& call, const Tensor& values, const Tensor& scales, const Tensor& plan,
                      std::int64_t out_features, std::int64_t in_features, bool dynamic) {
  if (values.scalar_type() != ScalarType::Char) {
    raise(call.op(), mismatch(call.op(), "values must be int8", toString(values.scalar_type())));
  }
  if (values.dim() != 3 || !values.is_contiguous()) {
    raise(call.op(), invalid(call.op(), "values must be contiguous, of shape (nnzb, block_rows, block_cols)",
                             cat(values.dim(), " dimensions")));
  }
  call.check_device("scales", scales);
  if (scales.scalar_type() != ScalarType::Float) {
    raise(call.op(), mismatch(call.op(), "scales must be float32", toString(scales.scalar_type())));
  }
  if (scales.dim() != 1 || scales.numel() != out_features || !scales.is_contiguous()) {
    raise(call.op(),
          invalid(call.op(), cat("scales must be contiguous, with out_features=", out_features, " elements"),
                  cat(scales.numel(), " elements in ", scales.dim(), " dimensions")));
  }
  const PlanView pattern =
      call.plan(plan, {out_features, in_features, values.size(1), values.size(2), values.size(0)});
  BsrView weight{pattern, values.data_ptr(), DType::i8, call.device()};
  weight.scaling = dynamic ? Scaling::dynamic : Scaling::weight;
  weight.scales = static_cast<const float*>(scales.data_ptr());
  return weight;
}

namespace {

Tensor int8_linear(Tensor x, const Tensor& values, const Tensor& scales, const Tensor& plan,
                   const std::optional<Tensor>& bias, std::int64_t out_features, std::int64_t in_features,
                   bool dynamic, const std::optional<Tensor>& prepared, const std::optional<Tensor>& packed,
                   std::int64_t derived, std::string_view activation) {
  const Call call("int8_linear", "values", values);
  const Activation fused = call.activation(activation);
  BsrView weight = scaled_weight(call, values, scales, plan, out_features, in_features, dynamic);
  const MatrixView in = call.matrix("x", x, "in_features", in_features);
  weight.derived = view_derived(call, {prepared, packed, derived}, Op::linear, weight.plan, in.dtype, &weight,
                                weight.dtype);
  const void* bias_data = call.bias(bias, out_features, in.dtype);
  Tensor y = call.empty_rows(x, out_features);
  check(call.op(), linear(in, weight, bias_data, fused, call.output(y, in, out_features), call.context()));
  return y;
}

// The same for eager calls that nothing records; see bsr_linear_held (ops.cc).
Tensor int8_linear_held(Tensor x, const Tensor& values, const Tensor& scales, const Tensor& plan,
                        const std::optional<Tensor>& bias, std::int64_t out_features,
                        std::int64_t in_features, bool dynamic, const std::optional<Tensor>& prepared,
                        const std::optional<Tensor>& packed, std::int64_t derived) {
  return int8_linear(std::move(x), values, scales, plan, bias, out_features, in_features, dynamic, prepared,
                     packed, derived, "none");
}

// Of the scaled values, whatever x was rounded to.
Tensor int8_grad_input(Tensor grad_output, const Tensor& values, const Tensor& scales, const Tensor& plan,
                       std::int64_t out_features, std::int64_t in_features) {
  const Call call("int8_grad_input", "values", values);
  const BsrView weight = scaled_weight(call, values, scales, plan, out_features, in_features, false);
  const MatrixView dy = call.matrix("grad_output", grad_output, "out_features", out_features);
  Tensor dx = call.empty_rows(grad_output, in_features);
  check(call.op(), grad_input(dy, weight, call.output(dx, dy, in_features), call.context()));
  return dx;
}

HeldSizes int8_derived_sizes(const Tensor& values, const Tensor& scales, const Tensor& plan,
                             std::int64_t out_features, std::int64_t in_features, bool dynamic,
                             ScalarType dtype) {
  const Call call("int8_derived_sizes", "values", values);
  return derived_sizes(call, scaled_weight(call, values, scales, plan, out_features, in_features, dynamic),
                       dtype);
}

bool int8_packs_for_few(const Tensor& values, const Tensor& scales, const Tensor& plan,
                        std::int64_t out_features, std::int64_t in_features, bool dynamic, ScalarType dtype,
                        std::int64_t tokens) {
  const Call call("_int8_packs_for_few", "values", values);
  return packs_for_few(call, scaled_weight(call, values, scales, plan, out_features, in_features, dynamic),
                       dtype, tokens);
}

Tensor int8_prepare(const Tensor& values, const Tensor& scales, const Tensor& plan, std::int64_t out_features,
                    std::int64_t in_features, bool dynamic, ScalarType dtype) {
  const Call call("int8_prepare", "values", values);
  return prepare(call, scaled_weight(call, values, scales, plan, out_features, in_features, dynamic), dtype);
}

Tensor int8_pack(const Tensor& values, const Tensor& scales, const Tensor& plan,
                 const std::optional<Tensor>& prepared, std::int64_t out_features, std::int64_t in_features,
                 bool dynamic, ScalarType dtype) {
  const Call call("int8_pack", "values", values);
  return pack(call, scaled_weight(call, values, scales, plan, out_features, in_features, dynamic), prepared,
              dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "int8_linear(Tensor x, Tensor values, Tensor scales, Tensor plan, Tensor? bias, SymInt out_features, "
      "SymInt in_features, bool dynamic, Tensor? prepared=None, Tensor? packed=None, int derived=0, "
      "str activation=\"none\") -> Tensor");
  m.def(
      "_int8_linear_held(Tensor x, Tensor values, Tensor scales, Tensor plan, Tensor? bias, "
      "SymInt out_features, SymInt in_features, bool dynamic, Tensor? prepared, Tensor? packed, "
      "int derived) -> Tensor");
  m.def(
      "int8_grad_input(Tensor grad_output, Tensor values, Tensor scales, Tensor plan, SymInt out_features, "
      "SymInt in_features) -> Tensor");
  m.def(
      "int8_derived_sizes(Tensor values, Tensor scales, Tensor plan, int out_features, int in_features, "
      "bool dynamic, ScalarType dtype) -> (int, int, int, int)");
  m.def(
      "_int8_packs_for_few(Tensor values, Tensor scales, Tensor plan, int out_features, int in_features, "
      "bool dynamic, ScalarType dtype, int tokens) -> bool");
  m.def(
      "int8_prepare(Tensor values, Tensor scales, Tensor plan, int out_features, int in_features, "
      "bool dynamic, ScalarType dtype) -> Tensor");
  m.def(
      "int8_pack(Tensor values, Tensor scales, Tensor plan, Tensor? prepared, int out_features, "
      "int in_features, bool dynamic, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
  m.impl("_int8_linear_held", TORCH_BOX(&int8_linear_held));
  m.impl("int8_grad_input", TORCH_BOX(&int8_grad_input));
}

// On CUDA no kernel takes them: to say so.
STABLE_TORCH_LIBRARY_IMPL(rarefy, CUDA, m) {
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
  m.impl("_int8_linear_held", TORCH_BOX(&int8_linear_held));
  m.impl("int8_grad_input", TORCH_BOX(&int8_grad_input));
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("_int8_packs_for_few", TORCH_BOX(&int8_packs_for_few));
  m.impl("int8_derived_sizes", TORCH_BOX(&int8_derived_sizes));
  m.impl("int8_prepare", TORCH_BOX(&int8_prepare));
  m.impl("int8_pack", TORCH_BOX(&int8_pack));
}

}  // namespace rarefy::binding
