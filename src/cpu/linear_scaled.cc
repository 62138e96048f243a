// linear of scaled int8 values with x as it is: the values become floats, scale · value rounded once, and
// the float kernels do the rest. Who holds them packed has the memory and the speed of a layer in f32. What
// reads int8 instead: linear_few.cc for a few tokens, linear_digits.cc where kernels multiply it.
#include <algorithm>
#include <new>

#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/linear_quads.h"

namespace rarefy::cpu {

namespace {

// The same product on float values.
Problem float_problem(const Problem& p) {
  Problem own = p;
  own.weight.dtype = DType::f32;
  own.weight.scaling = Scaling::none;
  own.in_alignment = std::min(own.in_alignment, 16);
  own.derived = 0;
  return own;
}

}  // namespace

Reason supports_scaled(const Problem& p) {
  if (p.weight.dtype != DType::i8 || p.weight.scaling == Scaling::none) {
    return "takes int8 values with scales";
  }
  if (p.op == Op::linear && p.weight.scaling == Scaling::dynamic) return "takes x as it is, not rounded";
  return {};
}

// What the kernel wants that the float problem gets now; with less it takes its memory from the heap.
Config configure_scaled(const Problem& p, const Machine& /*machine*/) {
  const auto bytes = workspace_size(float_problem(p));
  if (bytes.ok()) return to_config(ScaledWorkspace{*bytes});
  if (bytes.status().code() == StatusCode::out_of_memory) throw std::bad_alloc();  // for choose(), who asks
  return to_config(ScaledWorkspace{});
}

std::int64_t scaled_workspace(const Problem& /*problem*/, const Config& config) {
  return from_config<ScaledWorkspace>(config).workspace;
}

std::int64_t scaled_packed_size(const Problem& problem, const Config& /*config*/) {
  return problem.weight.shape.value_count() * static_cast<std::int64_t>(sizeof(float));
}

Status pack_scaled(const Call& call, void* packed) {
  const BsrShape& s = call.problem.weight.shape;
  const auto* values = static_cast<const std::int8_t*>(call.values);
  auto* out = static_cast<float*>(packed);
  call.executor.parallel_for(s.row_count(), [&](std::int64_t i) {
    const std::int64_t rows = std::min(s.block_rows, s.rows - i * s.block_rows);
    for (std::int64_t e = call.plan.crow[i]; e < call.plan.crow[i + 1]; ++e) {
      for (std::int64_t r = 0; r < s.block_rows; ++r) {
        const float scale = r < rows ? call.scales[i * s.block_rows + r] : 0;
        const std::int64_t from = (e * s.block_rows + r) * s.block_cols;
        for (std::int64_t c = from; c < from + s.block_cols; ++c)
          out[c] = scale * static_cast<float>(values[c]);
      }
    }
  });
  return {};
}

Status run_scaled(const Call& call) {
  Call own = call;
  own.problem = float_problem(call.problem);
  own.values = call.derived.packed;
  own.scales = nullptr;
  own.derived = {};
  const std::int64_t bytes = from_config<ScaledWorkspace>(call.config).workspace;
  return dispatch(own, {call.executor, call.stream, {call.workspace, bytes}});
}

}  // namespace rarefy::cpu
