// The reference of the three products: plain loops, any dtype and block shape, sums in double, one
// rounding at the end. Everything else is tested against this.
#include <algorithm>
#include <cmath>

#include "core/registry.h"
#include "core/scalar.h"
#include "ref/activation.h"

namespace rarefy {
namespace {

// Calls f(In{}, Out{}) for the dtype pairs that linear.cc lets through.
template <class F>
void dispatch_pair(DType in, DType out, F&& f) {
  visit_dtype(in, [&]<class In>(In) {
    if constexpr (!std::is_same_v<In, std::int8_t>) {
      f(In{}, In{});
    } else if (out == DType::f64) {
      f(In{}, double{});
    } else {
      f(In{}, float{});
    }
  });
}

Status linear_ref(const LinearArgs& args, const Context& context) {
  const PlanView& plan = args.w.plan;
  const BsrShape& shape = plan.shape;
  dispatch_pair(args.w.dtype, args.y.dtype, [&]<class In, class Out>(In, Out) {
    const auto* values = static_cast<const In*>(args.w.values);
    const auto* bias = static_cast<const Out*>(args.bias);
    context.executor.parallel_for(args.x.rows, [&](std::int64_t m) {
      const In* x = static_cast<const In*>(args.x.data) + m * args.x.row_stride;
      Out* y = static_cast<Out*>(args.y.data) + m * args.y.row_stride;
      for (std::int64_t n = 0; n < shape.rows; ++n) {
        const std::int64_t i = n / shape.block_rows;
        double sum = 0;
        for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
          const In* w = values + e * shape.block_size() + (n % shape.block_rows) * shape.block_cols;
          const std::int64_t k0 = plan.col[e] * shape.block_cols;
          for (std::int64_t c = 0; c < std::min(shape.block_cols, shape.cols - k0); ++c) {
            sum += load(x + k0 + c) * load(w + c);
          }
        }
        if (bias != nullptr) sum += load(bias + n);
        store(y + n, ref::activate(args.activation, sum));
      }
    });
  });
  return {};
}

Status grad_input_ref(const GradInputArgs& args, const Context& context) {
  const PlanView& plan = args.w.plan;
  const BsrShape& shape = plan.shape;
  dispatch_pair(args.w.dtype, args.dx.dtype, [&]<class In, class Out>(In, Out) {
    const auto* values = static_cast<const In*>(args.w.values);
    context.executor.parallel_for(args.dy.rows, [&](std::int64_t m) {
      const In* dy = static_cast<const In*>(args.dy.data) + m * args.dy.row_stride;
      Out* dx = static_cast<Out*>(args.dx.data) + m * args.dx.row_stride;
      for (std::int64_t k = 0; k < shape.cols; ++k) {
        const std::int64_t j = k / shape.block_cols;
        double sum = 0;
        for (std::int32_t e = plan.ccol[j]; e < plan.ccol[j + 1]; ++e) {
          const In* w = values + plan.perm[e] * shape.block_size() + k % shape.block_cols;
          const std::int64_t n0 = plan.row[e] * shape.block_rows;
          for (std::int64_t r = 0; r < std::min(shape.block_rows, shape.rows - n0); ++r) {
            sum += load(dy + n0 + r) * load(w + r * shape.block_cols);
          }
        }
        store(dx + k, sum);
      }
    });
  });
  return {};
}

Status grad_weight_ref(const GradWeightArgs& args, const Context& context) {
  const PlanView& plan = args.plan;
  const BsrShape& shape = plan.shape;
  dispatch_pair(args.x.dtype, args.dtype, [&]<class In, class Out>(In, Out) {
    context.executor.parallel_for(shape.row_count(), [&](std::int64_t i) {
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        Out* block = static_cast<Out*>(args.dvalues) + e * shape.block_size();
        for (std::int64_t r = 0; r < shape.block_rows; ++r) {
          for (std::int64_t c = 0; c < shape.block_cols; ++c) {
            const std::int64_t n = i * shape.block_rows + r;
            const std::int64_t k = plan.col[e] * shape.block_cols + c;
            double sum = 0;
            if (n < shape.rows && k < shape.cols) {
              for (std::int64_t m = 0; m < args.x.rows; ++m) {
                sum += load(static_cast<const In*>(args.dy.data) + m * args.dy.row_stride + n) *
                       load(static_cast<const In*>(args.x.data) + m * args.x.row_stride + k);
              }
            }
            store(block + r * shape.block_cols + c, sum);
          }
        }
      }
    });
  });
  return {};
}

template <class Args>
bool always(const Args& /*args*/) {
  return true;
}

}  // namespace

void register_ref(Registry& registry) {
  registry.linear.push_back({"ref", "ref_linear", Device::cpu, always<LinearArgs>, linear_ref});
  registry.grad_input.push_back(
      {"ref", "ref_grad_input", Device::cpu, always<GradInputArgs>, grad_input_ref});
  registry.grad_weight.push_back(
      {"ref", "ref_grad_weight", Device::cpu, always<GradWeightArgs>, grad_weight_ref});
}

}  // namespace rarefy
