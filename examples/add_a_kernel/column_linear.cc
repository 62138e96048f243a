// A block of R×1 is a short column of W: it adds x[k] times itself to R outputs next to each other, so
// the inner loop runs along values and outputs at once, and the compiler can vectorise it.
#include "column_linear.h"

#include <algorithm>
#include <vector>

namespace example {

namespace {

using namespace rarefy;

// Says yes only to what run() can do; the registry asks the next kernel otherwise. It must not look at
// pointers: backend_info asks with none.
bool supports(const LinearArgs& args) {
  return args.w.dtype == DType::f32 && args.w.plan.shape.block_cols == 1 &&
         (args.activation == Activation::none || args.activation == Activation::relu);
}

// linear() has checked every argument, so there is nothing left to check, and W has outputs and x rows.
Status run(const LinearArgs& args, const Context& context) {
  const PlanView& plan = args.w.plan;
  const BsrShape& shape = plan.shape;
  const auto* values = static_cast<const float*>(args.w.values);
  const auto* bias = static_cast<const float*>(args.bias);
  // One task a token: tasks write to different rows of Y, so the result does not depend on threads.
  context.executor.parallel_for(args.x.rows, [&](std::int64_t m) {
    const float* x = static_cast<const float*>(args.x.data) + m * args.x.row_stride;
    float* y = static_cast<float*>(args.y.data) + m * args.y.row_stride;
    for (std::int64_t i = 0; i < shape.row_count(); ++i) {
      // The last block row may reach past the matrix: its padding is neither read nor written.
      const std::int64_t first = i * shape.block_rows;
      const std::int64_t rows = std::min(shape.block_rows, shape.rows - first);
      for (std::int64_t r = 0; r < rows; ++r) y[first + r] = bias == nullptr ? 0.0F : bias[first + r];
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        const float* block = values + e * shape.block_size();
        const float xk = x[plan.col[e]];
        for (std::int64_t r = 0; r < rows; ++r) y[first + r] += block[r] * xk;
      }
      if (args.activation != Activation::relu) continue;
      for (std::int64_t r = 0; r < rows; ++r)
        y[first + r] = y[first + r] < 0 ? 0.0F : y[first + r];  // NaN stays
    }
  });
  return {};
}

}  // namespace

void register_columns(Registry& registry) {
  registry.linear.insert(registry.linear.begin(), {"columns", "columns_linear", Device::cpu, supports, run});
}

}  // namespace example
