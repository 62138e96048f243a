// linear of scaled int8 values with x as it is: the values become floats, scale · value rounded once, and
// the float kernels do the rest. Who holds them packed has the memory and the speed of a layer in f32.
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

std::int64_t values_bytes(const Problem& p) {
  Room room;
  room.take<float>(p.weight.shape.value_count());
  return room.bytes();
}

}  // namespace

Reason supports_scaled(const Problem& p) {
  if (p.weight.dtype != DType::i8 || p.weight.scaling == Scaling::none) {
    return "takes int8 values with scales";
  }
  if (p.op == Op::linear && p.weight.scaling == Scaling::dynamic) return "takes x as it is, not rounded";
  return {};
}

// What the kernel wants that the float problem gets now; the run sees that it gives it no less.
Config configure_scaled(const Problem& p, const Machine& /*machine*/) {
  const auto choice = choose(float_problem(p));
  if (choice.ok()) return to_config(ScaledWorkspace{choice->workspace});
  if (choice.status().code() == StatusCode::out_of_memory) throw std::bad_alloc();  // for choose(), who asks
  return to_config(ScaledWorkspace{});
}

std::int64_t scaled_workspace(const Problem& problem, const Config& config) {
  return (problem.derived == 0 ? values_bytes(problem) : 0) + from_config<ScaledWorkspace>(config).workspace;
}

std::int64_t scaled_packed_size(const Problem& problem, const Config& /*config*/) {
  return values_bytes(problem);
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
  const auto choice = choose(own.problem);
  if (!choice.ok()) return choice.status();
  const std::int64_t room = from_config<ScaledWorkspace>(call.config).workspace;
  if (choice->workspace > room) {
    return invalid(name(call.problem.op), cat("workspace of the config must be at least ", choice->workspace),
                   cat(room));
  }
  auto* memory = static_cast<char*>(call.workspace);
  own.values = call.derived.packed;
  if (own.values == nullptr) {
    own.values = memory;
    if (Status status = pack_scaled(call, memory); !status.ok()) return status;
    memory += values_bytes(call.problem);
  }
  own.config = choice->config;
  own.workspace = memory;
  own.scales = nullptr;
  own.derived = {};
  return choice->kernel->run(own);
}

}  // namespace rarefy::cpu
