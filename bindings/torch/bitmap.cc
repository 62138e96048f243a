// The ops of bitmaps (rarefy/bitmap.h): their plan, its columns, and linear.
#include "rarefy/bitmap.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string_view>

#include "adapt.h"
#include "core/message.h"
#include "core/products.h"

namespace rarefy::binding {

namespace {

std::span<std::int32_t> words_of(const Tensor& tensor) {
  return {static_cast<std::int32_t*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

BitmapPlanView plan_of(const Call& call, const Tensor& plan, std::int64_t rows, std::int64_t cols) {
  call.check_device("plan", plan);
  if (plan.scalar_type() != ScalarType::Int || plan.dim() != 1 || !plan.is_contiguous()) {
    raise(call.op(), mismatch(call.op(), "plan must be what bitmap_plan returned", "another tensor"));
  }
  return value_of(call.op(), view_bitmap_plan(call.op(), rows, cols, words_of(plan)));
}

void check_on_cpu(const Call& call) {
  if (call.device() == Device::cpu) return;
  raise(call.op(), error(StatusCode::unsupported, call.op(), "bitmaps must be on the CPU", "a CUDA tensor"));
}

// Errors speak of `caller`, who has the user's arguments.
Tensor bitmap_plan(const Tensor& bitmap, std::int64_t out_features, std::int64_t in_features,
                   std::string_view caller) {
  const Call call(caller, "bitmap", bitmap);
  check_on_cpu(call);
  if (bitmap.scalar_type() != ScalarType::Byte) {
    raise(caller, mismatch(caller, "bitmap must be uint8", toString(bitmap.scalar_type())));
  }
  const BsrShape shape{out_features, in_features, 1, 1, 0};
  check(caller, check_shape(caller, shape));
  const std::int64_t bytes = mask_row_bytes(in_features);
  if (bitmap.dim() != 2 || bitmap.size(0) != out_features || bitmap.size(1) != bytes ||
      !bitmap.is_contiguous()) {
    raise(caller,
          invalid(caller, cat("bitmap must be contiguous, of shape (", out_features, ", ", bytes, ')'),
                  "another shape or layout"));
  }
  Tensor plan = call.empty_words(bitmap_plan_size(out_features, in_features));
  const std::span bits(static_cast<const std::uint8_t*>(bitmap.data_ptr()),
                       static_cast<std::size_t>(bitmap.numel()));
  check(caller, build_bitmap_plan(caller, out_features, in_features, bits, words_of(plan)).status());
  return plan;
}

Tensor columns(const Tensor& plan, std::int64_t out_features, std::int64_t in_features) {
  const Call call("bitmap_columns", "plan", plan);
  check_on_cpu(call);
  const BitmapPlanView view = plan_of(call, plan, out_features, in_features);
  Tensor col = call.empty_words(view.shape.nnzb);
  check(call.op(), bitmap_columns(call.op(), view, words_of(col)));
  return col;
}

// `blocks` is for derivatives alone: bsr_plan's of the same elements.
Tensor bitmap_linear(Tensor x, const Tensor& values, const Tensor& plan, const std::optional<Tensor>& bias,
                     std::int64_t out_features, std::int64_t in_features,
                     const std::optional<Tensor>& /*blocks*/, std::string_view activation) {
  const Call call("bitmap_linear", "values", values);
  check_on_cpu(call);
  const Activation fused = call.activation(activation);
  BitmapView weight{plan_of(call, plan, out_features, in_features), nullptr,
                    call.float_dtype("values", values)};
  if (values.dim() != 1 || values.numel() != weight.plan.shape.nnzb || !values.is_contiguous()) {
    raise(call.op(),
          invalid(call.op(), cat("values must be contiguous, of shape (", weight.plan.shape.nnzb, ",)"),
                  cat(values.numel(), " elements in ", values.dim(), " dimensions")));
  }
  weight.values = call.elements("values", values);
  const MatrixView in = call.matrix("x", x, "in_features", in_features);
  call.check_stored(weight.dtype, "x", in.dtype);
  const void* bias_data = call.bias(bias, out_features, in.dtype);
  Tensor y = call.empty_rows(x, out_features);
  check(call.op(),
        run_linear(in, weight, bias_data, fused, call.output(y, in, out_features), call.context()));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "bitmap_plan(Tensor bitmap, SymInt out_features, SymInt in_features, str caller=\"bitmap_plan\") -> "
      "Tensor");
  m.def("bitmap_columns(Tensor plan, SymInt out_features, SymInt in_features) -> Tensor");
  m.def(
      "bitmap_linear(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, "
      "SymInt in_features, Tensor? blocks=None, str activation=\"none\") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("bitmap_plan", TORCH_BOX(&bitmap_plan));
  m.impl("bitmap_columns", TORCH_BOX(&columns));
  m.impl("bitmap_linear", TORCH_BOX(&bitmap_linear));
}

// On CUDA no kernel takes them: to say so.
STABLE_TORCH_LIBRARY_IMPL(rarefy, CUDA, m) {
  m.impl("bitmap_plan", TORCH_BOX(&bitmap_plan));
  m.impl("bitmap_columns", TORCH_BOX(&columns));
  m.impl("bitmap_linear", TORCH_BOX(&bitmap_linear));
}

}  // namespace rarefy::binding
