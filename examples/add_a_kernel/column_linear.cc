// A block of R×1 is a short column of W: it adds x[k] times itself to R outputs next to each other, so
// the inner loop runs along values and outputs at once, and the compiler can vectorise it. Two rows: one
// reads float values in place; the other, for values stored in 16 bits, has them widened once, in pack().
#include "column_linear.h"

#include <algorithm>

#include "core/message.h"
#include "core/scalar.h"

namespace example {

namespace {

using namespace rarefy;

// Pure, and asked without data: explain() prints the text beside the kernel's name.
Reason supports(const Problem& p, const Machine& /*machine*/) {
  if (p.weight.shape.block_cols != 1)
    return cat("takes blocks of one column; got ", p.weight.shape.block_cols);
  if (p.in != DType::f32 || p.out != DType::f32) return cat("takes inputs in f32; got ", name(p.in));
  if (p.activation != Activation::none && p.activation != Activation::relu) {
    return cat("fuses relu at most; got ", name(p.activation));
  }
  return {};
}

Reason supports_f32(const Problem& p, const Machine& machine) {
  if (p.weight.dtype != DType::f32) return cat("takes values in f32; got ", name(p.weight.dtype));
  return supports(p, machine);
}

Reason supports_halves(const Problem& p, const Machine& machine) {
  if (size_of(p.weight.dtype) != 2) return cat("takes values in bf16 or f16; got ", name(p.weight.dtype));
  return supports(p, machine);
}

// Four tasks a thread: the last ones to end are short.
Config configure(const Problem& p, const Machine& /*machine*/) {
  return to_config(Split{std::max<std::int64_t>(1, p.tokens / (4 * p.threads))});
}

// linear() has checked every argument, so there is nothing left to check, and W has outputs and x rows.
Status product(const Call& call, const float* values) {
  const PlanView& plan = call.plan;
  const BsrShape& shape = plan.shape;
  const auto* bias = static_cast<const float*>(call.bias);
  // A task is some tokens: tasks write to different rows of Y, so the result does not depend on threads.
  const std::int64_t tokens = from_config<Split>(call.config).tokens;
  if (tokens < 1) return invalid("columns", "tokens of the config must be at least 1", cat(tokens));
  const auto token = [&](std::int64_t m) {
    const float* x = static_cast<const float*>(call.x.data) + m * call.x.row_stride;
    float* y = static_cast<float*>(call.out.data) + m * call.out.row_stride;
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
      if (call.activation != Activation::relu) continue;
      for (std::int64_t r = 0; r < rows; ++r)
        y[first + r] = y[first + r] < 0 ? 0.0F : y[first + r];  // NaN stays
    }
  };
  call.executor.parallel_for((call.x.rows + tokens - 1) / tokens, [&](std::int64_t task) {
    for (std::int64_t m = task * tokens; m < std::min((task + 1) * tokens, call.x.rows); ++m) token(m);
  });
  return {};
}

Status run(const Call& call) { return product(call, static_cast<const float*>(call.values)); }

// Tier 3: the values in the order and dtype that the kernel wants. The caller keeps the buffer until a
// value changes.
std::int64_t packed_size(const Problem& p, const Config& /*config*/) {
  return p.weight.shape.value_count() * static_cast<std::int64_t>(sizeof(float));
}

Status pack(const Call& call, void* packed) {
  visit_dtype(call.problem.weight.dtype, [&]<class T>(T) {
    for (std::int64_t i = 0; i < call.plan.shape.value_count(); ++i) {
      static_cast<float*>(packed)[i] = static_cast<float>(load(static_cast<const T*>(call.values) + i));
    }
  });
  return {};
}

Status run_packed(const Call& call) { return product(call, static_cast<const float*>(call.derived.packed)); }

}  // namespace

void register_columns(Registry& registry) {
  const Kernel columns{.op = Op::linear,
                       .device = Device::cpu,
                       .family = "columns",
                       .name = "columns_linear",
                       .supports = supports_f32,
                       .run = run,
                       .configure = configure,
                       .fields = Split::kFields};
  Kernel packed = columns;
  packed.name = "columns_packed_linear";
  packed.supports = supports_halves;
  packed.run = run_packed;
  packed.packed_size = packed_size;
  packed.pack = pack;
  registry.insert(registry.begin(), {columns, packed});
}

}  // namespace example
