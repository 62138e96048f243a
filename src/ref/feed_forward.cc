// The reference of feed_forward: a token at a time, everything in double up to the result, any dtypes and
// block shapes.
#include "ref/feed_forward.h"

#include <algorithm>
#include <cmath>

#include "core/quantize.h"
#include "core/scalar.h"
#include "ref/activation.h"
#include "ref/sum.h"

namespace rarefy::ref {

namespace {

void read(DType dtype, const void* data, std::int64_t first, std::int64_t stride, std::int64_t count,
          double* row) {
  visit_dtype(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(data) + first;
    for (std::int64_t i = 0; i < count; ++i) row[i] = load(from + i * stride);
  });
}

void write(const MutableMatrixView& to, std::int64_t m, const double* row) {
  visit_float(to.dtype, [&]<class T>(T) {
    T* out = static_cast<T*>(to.data) + m * to.row_stride;
    for (std::int64_t i = 0; i < to.cols; ++i) store(out + i * to.col_stride, row[i]);
  });
}

// The same of int8 with scales; a dynamic layer rounds x, as floats, first (core/quantize.h).
void apply_scaled(const LayerView& layer, DType bias_dtype, const double* x, double* y) {
  const PlanView& plan = layer.weight.plan;
  const BsrShape& s = plan.shape;
  const bool dynamic = layer.weight.scaling == Scaling::dynamic;
  std::uint32_t most = 0;
  for (std::int64_t k = 0; k < s.cols; ++k) most = std::max(most, magnitude_bits(static_cast<float>(x[k])));
  const TokenScale token = dynamic ? token_scale(most) : TokenScale{1, 0};
  const auto number = [&](std::int64_t k) -> double {
    if (!dynamic) return x[k];
    return std::isnan(token.scale) ? 0 : quantized(static_cast<float>(x[k]), token);
  };
  std::fill_n(y, s.rows, 0.0);
  if (layer.bias != nullptr) read(bias_dtype, layer.bias, 0, 1, s.rows, y);
  const auto* values = static_cast<const std::int8_t*>(layer.weight.values);
  for (std::int64_t n = 0; n < s.rows; ++n) {
    const std::int64_t i = n / s.block_rows;
    double sum = 0;
    for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      const std::int8_t* w = values + e * s.block_size() + n % s.block_rows * s.block_cols;
      const std::int64_t k = plan.col[e] * s.block_cols;
      for (std::int64_t c = 0; c < std::min(s.block_cols, s.cols - k); ++c) sum += number(k + c) * w[c];
    }
    y[n] += sum * layer.weight.scales[n] * token.scale;
  }
}

// y = x Wᵀ + b for one token.
void apply(const LayerView& layer, DType bias_dtype, const double* x, double* y) {
  const PlanView& plan = layer.weight.plan;
  const BsrShape& s = plan.shape;
  if (layer.weight.scaling != Scaling::none) return apply_scaled(layer, bias_dtype, x, y);
  std::fill_n(y, s.rows, 0.0);
  if (layer.bias != nullptr) read(bias_dtype, layer.bias, 0, 1, s.rows, y);
  visit_dtype(layer.weight.dtype, [&]<class T>(T) {
    const auto* values = static_cast<const T*>(layer.weight.values);
    for (std::int64_t n = 0; n < s.rows; ++n) {
      const std::int64_t i = n / s.block_rows;
      Sum terms;
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        const T* w = values + e * s.block_size() + n % s.block_rows * s.block_cols;
        const std::int64_t k = plan.col[e] * s.block_cols;
        for (std::int64_t c = 0; c < std::min(s.block_cols, s.cols - k); ++c)
          terms.add(x[k + c] * load(w + c));
      }
      y[n] = terms.total() + y[n];  // a bias of −0 gives +0, as in linear
    }
  });
}

}  // namespace

std::int64_t feed_forward_workspace(const Problem& p, const Config& /*config*/) {
  const std::int64_t row = p.weight.shape.cols + 2 * p.weight.shape.rows + p.down.shape.rows;
  return p.threads * row * static_cast<std::int64_t>(sizeof(double));
}

Status feed_forward(const Call& call) {
  const FeedForward& layers = *call.layers;
  const std::int64_t in = call.x.cols, width = layers.up.weight.plan.shape.rows, out = call.out.cols;
  call.executor.parallel_for(call.x.rows, [&](std::int64_t m, int worker) {
    double* x = static_cast<double*>(call.workspace) + worker * (in + 2 * width + out);
    double* hidden = x + in;
    double* gate = hidden + width;
    double* y = gate + width;
    read(call.x.dtype, call.x.data, m * call.x.row_stride, call.x.col_stride, in, x);
    apply(layers.up, call.out.dtype, x, hidden);
    if (call.save.up.data != nullptr) write(call.save.up, m, hidden);
    if (layers.gate) apply(*layers.gate, call.out.dtype, x, gate);
    if (call.save.gate.data != nullptr) write(call.save.gate, m, gate);
    for (std::int64_t h = 0; h < width; ++h) {
      hidden[h] = layers.gate ? activate(layers.activation, gate[h]) * hidden[h]
                              : activate(layers.activation, hidden[h]);
    }
    apply(layers.down, call.out.dtype, hidden, y);
    write(call.out, m, y);
  });
  return {};
}

}  // namespace rarefy::ref
