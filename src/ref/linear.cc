// The reference of the three products: plain loops, any dtype and block shape, sums in double, one
// rounding at the end. Everything else is tested against this.
#include <algorithm>
#include <cmath>

#include "core/quantize.h"
#include "core/registry.h"
#include "core/scalar.h"
#include "ref/activation.h"
#include "ref/bitmap.h"
#include "ref/feed_forward.h"
#include "ref/sum.h"

namespace rarefy {
namespace {

// Calls f(In{}, W{}, Out{}) for inputs and outputs that linear.cc lets through, and any stored weight.
template <class F>
void dispatch_dtypes(const Problem& p, F&& f) {
  visit_dtype(p.in, [&]<class In>(In) {
    visit_dtype(p.weight.dtype, [&]<class W>(W) {
      if constexpr (!std::is_same_v<In, std::int8_t>) {
        f(In{}, W{}, In{});
      } else {
        visit_float(p.out, [&]<class Out>(Out) { f(In{}, W{}, Out{}); });
      }
    });
  });
}

template <class T>
const T* at(const MatrixView& matrix, std::int64_t row, std::int64_t col) {
  return static_cast<const T*>(matrix.data) + row * matrix.row_stride + col * matrix.col_stride;
}

template <class In>
TokenScale scale_of(const In* x, std::int64_t count, std::int64_t stride) {
  std::uint32_t most = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    most = std::max(most, magnitude_bits(static_cast<float>(load(x + k * stride))));
  }
  return token_scale(most);
}

// Scaled int8 values: each row's sum, exact where x is rounded to integers too, times the scales.
Status linear_scaled_ref(const Call& call) {
  const PlanView& plan = call.plan;
  const BsrShape& shape = plan.shape;
  const bool dynamic = call.problem.weight.scaling == Scaling::dynamic;
  const auto* values = static_cast<const std::int8_t*>(call.values);
  visit_float(call.problem.in, [&]<class In>(In) {
    const auto* bias = static_cast<const In*>(call.bias);
    call.executor.parallel_for(call.x.rows, [&](std::int64_t m) {
      const In* x = static_cast<const In*>(call.x.data) + m * call.x.row_stride;
      In* y = static_cast<In*>(call.out.data) + m * call.out.row_stride;
      const TokenScale token = dynamic ? scale_of(x, shape.cols, call.x.col_stride) : TokenScale{1, 0};
      const auto number = [&](std::int64_t k) {
        const double value = load(x + k * call.x.col_stride);
        if (!dynamic) return value;
        if (std::isnan(token.scale)) return 0.0;
        return static_cast<double>(quantized(static_cast<float>(value), token));
      };
      for (std::int64_t n = 0; n < shape.rows; ++n) {
        const std::int64_t i = n / shape.block_rows;
        double sum = 0;
        for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
          const std::int8_t* w = values + e * shape.block_size() + (n % shape.block_rows) * shape.block_cols;
          const std::int64_t k0 = plan.col[e] * shape.block_cols;
          for (std::int64_t c = 0; c < std::min(shape.block_cols, shape.cols - k0); ++c) {
            sum += number(k0 + c) * w[c];
          }
        }
        sum = sum * call.scales[n] * token.scale;
        if (bias != nullptr) sum += load(bias + n);
        store(y + n * call.out.col_stride, ref::activate(call.activation, sum));
      }
    });
  });
  return {};
}

Status linear_ref(const Call& call) {
  if (call.scales != nullptr) return linear_scaled_ref(call);
  const PlanView& plan = call.plan;
  const BsrShape& shape = plan.shape;
  dispatch_dtypes(call.problem, [&]<class In, class W, class Out>(In, W, Out) {
    const auto* values = static_cast<const W*>(call.values);
    const auto* bias = static_cast<const Out*>(call.bias);
    call.executor.parallel_for(call.x.rows, [&](std::int64_t m) {
      const In* x = static_cast<const In*>(call.x.data) + m * call.x.row_stride;
      Out* y = static_cast<Out*>(call.out.data) + m * call.out.row_stride;
      for (std::int64_t n = 0; n < shape.rows; ++n) {
        const std::int64_t i = n / shape.block_rows;
        ref::Sum terms;
        for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
          const W* w = values + e * shape.block_size() + (n % shape.block_rows) * shape.block_cols;
          const std::int64_t k0 = plan.col[e] * shape.block_cols;
          for (std::int64_t c = 0; c < std::min(shape.block_cols, shape.cols - k0); ++c) {
            terms.add(load(x + (k0 + c) * call.x.col_stride) * load(w + c));
          }
        }
        double sum = terms.total();
        if (bias != nullptr) sum += load(bias + n);
        store(y + n * call.out.col_stride, ref::activate(call.activation, sum));
      }
    });
  });
  return {};
}

Status grad_input_ref(const Call& call) {
  const PlanView& plan = call.plan;
  const BsrShape& shape = plan.shape;
  dispatch_dtypes(call.problem, [&]<class In, class W, class Out>(In, W, Out) {
    const auto* values = static_cast<const W*>(call.values);
    call.executor.parallel_for(call.dy.rows, [&](std::int64_t m) {
      const In* dy = static_cast<const In*>(call.dy.data) + m * call.dy.row_stride;
      Out* dx = static_cast<Out*>(call.out.data) + m * call.out.row_stride;
      for (std::int64_t k = 0; k < shape.cols; ++k) {
        const std::int64_t j = k / shape.block_cols;
        ref::Sum terms;
        for (std::int32_t e = plan.ccol[j]; e < plan.ccol[j + 1]; ++e) {
          const W* w = values + plan.perm[e] * shape.block_size() + k % shape.block_cols;
          const std::int64_t n0 = plan.row[e] * shape.block_rows;
          for (std::int64_t r = 0; r < std::min(shape.block_rows, shape.rows - n0); ++r) {
            const double scale = call.scales == nullptr ? 1 : call.scales[n0 + r];
            terms.add(load(dy + (n0 + r) * call.dy.col_stride) * scale * load(w + r * shape.block_cols));
          }
        }
        store(dx + k * call.out.col_stride, terms.total());
      }
    });
  });
  return {};
}

Status grad_weight_ref(const Call& call) {
  const PlanView& plan = call.plan;
  const BsrShape& shape = plan.shape;
  visit_dtype(call.problem.in, [&]<class In>(In) {
    visit_float(call.problem.weight.dtype, [&]<class Out>(Out) {
      call.executor.parallel_for(shape.row_count(), [&](std::int64_t i) {
        for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
          Out* block = static_cast<Out*>(call.dvalues) + e * shape.block_size();
          for (std::int64_t r = 0; r < shape.block_rows; ++r) {
            for (std::int64_t c = 0; c < shape.block_cols; ++c) {
              const std::int64_t n = i * shape.block_rows + r;
              const std::int64_t k = plan.col[e] * shape.block_cols + c;
              ref::Sum terms;
              if (n < shape.rows && k < shape.cols) {
                for (std::int64_t m = 0; m < call.x.rows; ++m) {
                  terms.add(load(at<In>(call.dy, m, n)) * load(at<In>(call.x, m, k)));
                }
              }
              store(block + r * shape.block_cols + c, terms.total());
            }
          }
        }
      });
    });
  });
  return {};
}

Reason always(const Problem& /*problem*/, const Machine& /*machine*/) { return {}; }

}  // namespace

void register_ref(Registry& registry) {
  const auto row = [](Op op, std::string_view name, Status (*run)(const Call&)) -> Kernel {
    return {.op = op,
            .device = Device::cpu,
            .family = "ref",
            .name = name,
            .supports = always,
            .run = run,
            .any_layout = true};
  };
  registry.push_back(row(Op::linear, "ref_linear", linear_ref));
  registry.push_back(row(Op::grad_input, "ref_grad_input", grad_input_ref));
  registry.push_back(row(Op::grad_weight, "ref_grad_weight", grad_weight_ref));
  registry.push_back(row(Op::feed_forward, "ref_feed_forward", ref::feed_forward));
  registry.back().workspace = ref::feed_forward_workspace;
  registry.push_back(row(Op::linear, "ref_linear_bitmap", ref::linear_bitmap));
  registry.back().format = Format::bitmap;
  registry.push_back(row(Op::linear, "ref_linear_two_of_four", ref::linear_bitmap));
  registry.back().format = Format::two_of_four;
}

}  // namespace rarefy
