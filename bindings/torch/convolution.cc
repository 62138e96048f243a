// Ops of sparse_conv2d on the host; python/rarefy/sparse/conv.py knows what the arguments mean.
#include "rarefy/convolution.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "adapt.h"
#include "core/message.h"
#include "derived.h"

namespace rarefy::binding {

namespace {

// kernel, stride and dilation, rows and columns of each; zeros above, below, left and right.
using Geometry = std::vector<std::int64_t>;

Convolution sizes_of(const Call& call, const Geometry& g, std::int64_t images, std::int64_t rows,
                     std::int64_t cols, std::int64_t channels) {
  if (g.size() != 10) raise(call.op(), invalid(call.op(), "geometry must be 10 numbers", cat(g.size())));
  return {images, rows, cols, channels, g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9]};
}

// x is (B, H, W, C), channels side by side: copied if they are not.
ImagesView images_of(const Call& call, Tensor& x) {
  if (x.dim() != 4) raise(call.op(), invalid(call.op(), "x must have 4 dimensions", cat(x.dim())));
  if (x.stride(3) != 1) x = torch::stable::contiguous(x);
  return {call.elements("x", x), call.float_dtype("x", x), x.stride(0), x.stride(1), x.stride(2)};
}

// (B, H, W, last) without gaps, of the dtype of `like`.
Tensor empty_images(const Tensor& like, const Convolution& c, std::int64_t rows, std::int64_t cols,
                    std::int64_t last) {
  return torch::stable::new_empty(like, {c.images, rows, cols, last});
}

Tensor contiguous_gradient(const Call& call, const Tensor& dy, const Convolution& c, std::int64_t n) {
  call.check_device("grad_output", dy);
  if (dy.dim() == 4 && dy.numel() == c.images * c.out_rows() * c.out_cols() * n)
    return torch::stable::contiguous(dy);
  raise(call.op(),
        invalid(call.op(),
                cat("grad_output must be (", c.images, ", ", c.out_rows(), ", ", c.out_cols(), ", ", n, ')'),
                cat(dy.numel(), " elements")));
}

Tensor forward(Tensor x, const Tensor& values, const Tensor& plan, const std::optional<Tensor>& bias,
               std::int64_t n, std::int64_t k, const Geometry& geometry,
               const std::optional<Tensor>& prepared, const std::optional<Tensor>& packed,
               std::int64_t derived, std::string_view activation) {
  const Call call("sparse_conv2d", "data", values);
  call.check_device("x", x);
  const Activation fused = call.activation(activation);
  BsrView w = call.weight(values, plan, n, k, Call::Part::rows);
  const ImagesView in = images_of(call, x);
  call.check_stored(w.dtype, "x", in.dtype);
  const Convolution c = sizes_of(call, geometry, x.size(0), x.size(1), x.size(2), x.size(3));
  w.derived = view_derived(call, {prepared, packed, derived}, Op::linear, w.plan, in.dtype, &w, w.dtype);
  const void* offsets = call.bias(bias, n, in.dtype);
  Tensor y = empty_images(x, c, c.out_rows(), c.out_cols(), n);
  check(call.op(), convolution(call.op(), c, in, w, offsets, fused, y.mutable_data_ptr(), call.context()));
  return y;
}

Tensor grad_input(const Tensor& dy, const Tensor& values, const Tensor& plan, std::int64_t n, std::int64_t k,
                  const Geometry& geometry, std::int64_t rows, std::int64_t cols) {
  const Call call("sparse_conv2d", "data", values);
  const BsrView w = call.weight(values, plan, n, k);
  if (dy.dim() != 4)
    raise(call.op(), invalid(call.op(), "grad_output must have 4 dimensions", cat(dy.dim())));
  const std::int64_t places = geometry.size() == 10 ? geometry[0] * geometry[1] : 0;
  if (places < 1 || k % places != 0)
    raise(call.op(), invalid(call.op(), "geometry must fit the weight's columns", cat(places, " places")));
  const Convolution c = sizes_of(call, geometry, dy.size(0), rows, cols, k / places);
  const DType dtype = call.float_dtype("grad_output", dy);
  call.check_stored(w.dtype, "grad_output", dtype);
  const Tensor from = contiguous_gradient(call, dy, c, n);
  Tensor dx = empty_images(dy, c, rows, cols, c.channels);
  check(call.op(), convolution_grad_input(call.op(), c, call.elements("grad_output", from), dtype, w,
                                          dx.mutable_data_ptr(), call.context()));
  return dx;
}

Tensor grad_weight(const Tensor& dy, Tensor x, const Tensor& plan, const std::vector<std::int64_t>& block,
                   std::int64_t n, std::int64_t k, const Geometry& geometry) {
  const Call call("sparse_conv2d", "x", x);
  if (block.size() != 2) raise(call.op(), invalid(call.op(), "block must be 2 numbers", cat(block.size())));
  const PlanView pattern = call.plan(plan, n, k, block[0], block[1]);
  const ImagesView in = images_of(call, x);
  call.check_dtype("grad_output", dy, "x", in.dtype);
  const Convolution c = sizes_of(call, geometry, x.size(0), x.size(1), x.size(2), x.size(3));
  const Tensor from = contiguous_gradient(call, dy, c, n);
  Tensor dvalues = call.empty_values(pattern.shape, x.scalar_type());
  check(call.op(), convolution_grad_weight(call.op(), c, call.elements("grad_output", from), in, pattern,
                                           dvalues.mutable_data_ptr(), call.context()));
  return dvalues;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "_conv2d(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, SymInt in_features, "
      "int[] geometry, Tensor? prepared=None, Tensor? packed=None, int derived=0, str activation=\"none\") "
      "-> Tensor");
  m.def(
      "_conv2d_grad_input(Tensor grad_output, Tensor values, Tensor plan, SymInt out_features, "
      "SymInt in_features, int[] geometry, SymInt rows, SymInt cols) -> Tensor");
  m.def(
      "_conv2d_grad_weight(Tensor grad_output, Tensor x, Tensor plan, int[] block, SymInt out_features, "
      "SymInt in_features, int[] geometry) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("_conv2d", TORCH_BOX(&forward));
  m.impl("_conv2d_grad_input", TORCH_BOX(&grad_input));
  m.impl("_conv2d_grad_weight", TORCH_BOX(&grad_weight));
}

}  // namespace rarefy::binding
