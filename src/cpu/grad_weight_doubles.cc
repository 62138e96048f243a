// Drives grad_weight in f64 as grad_weight.cc does in floats: both inputs by feature, a chunk of tokens at a
// time, then the dot products (dot.h) of a range of block rows within a tile of block columns, which stays in
// L2. Chunks are added in order, so the result does not depend on the number of threads.
#include <algorithm>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/double_panels.h"
#include "cpu/drivers.h"
#include "cpu/padding.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kChunk = 256;  // tokens: long enough to pay for the sum across lanes
constexpr std::int64_t kTasks = 8;    // per thread: the last ones to end are short

struct Panels {
  double *dy, *x;
  std::int64_t bytes;

  Panels(const Problem& p, const GradWeightTiling& tiling, void* base) {
    const BsrShape& s = p.weight.shape;
    Room room(base);
    dy = room.take<double>(s.row_count() * s.block_rows * tiling.chunk);
    x = room.take<double>(s.col_count() * s.block_cols * tiling.chunk);
    bytes = room.bytes();
  }
};

}  // namespace

Reason supports_grad_weight_doubles(const Problem& p) {
  for (const DType dtype : {p.in, p.weight.dtype, p.out}) {
    if (dtype != DType::f64) return cat("takes f64 alone; got ", name(dtype));
  }
  return {};
}

Config configure_grad_weight_doubles(const DoubleKernels& kernels, const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  GradWeightTiling t;
  const std::int64_t width = kernels.width;
  t.chunk = std::clamp<std::int64_t>(ceil_div(p.tokens, width) * width, width, kChunk);
  t.columns = std::clamp<std::int64_t>(panel_floats(machine) / 2 / (t.chunk * s.block_cols), 1,
                                       std::max<std::int64_t>(1, s.col_count()));
  const std::int64_t tiles = ceil_div(s.col_count(), t.columns);
  t.ranges = std::clamp<std::int64_t>(kTasks * p.threads / std::max<std::int64_t>(1, tiles), 1,
                                      std::max<std::int64_t>(1, s.row_count()));
  t.features = kDoublesPacked;
  return to_config(t);
}

std::int64_t grad_weight_doubles_workspace(const Problem& problem, const Config& config) {
  return Panels(problem, from_config<GradWeightTiling>(config), nullptr).bytes;
}

Status run_grad_weight_doubles(const DoubleKernels& kernels, const Call& call) {
  const auto t = from_config<GradWeightTiling>(call.config);
  if (t.chunk < kernels.width || t.chunk % kernels.width != 0 || t.columns < 1 || t.ranges < 1) {
    return invalid(
        kernels.family,
        cat("the config must have positive numbers, and a chunk of whole vectors of ", kernels.width),
        cat("chunk=", t.chunk, " columns=", t.columns, " ranges=", t.ranges));
  }
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  const Panels panels(call.problem, t, call.workspace);
  auto* sums = static_cast<double*>(call.dvalues);
  const std::int64_t tokens = call.x.rows, tiles = ceil_div(s.col_count(), t.columns);
  if (tokens == 0) std::fill(sums, sums + s.value_count(), 0.0);
  for (std::int64_t first = 0; first < tokens; first += t.chunk) {
    const std::int64_t rows = std::min(t.chunk, tokens - first);
    const std::int64_t lanes = ceil_div(rows, std::int64_t{kernels.width}) * kernels.width;
    pack_doubles(call.executor, call.dy, first, rows, lanes, s.row_count() * s.block_rows, panels.dy);
    pack_doubles(call.executor, call.x, first, rows, lanes, s.col_count() * s.block_cols, panels.x);
    call.executor.parallel_for(tiles * t.ranges, [&](std::int64_t task) {
      const auto from = static_cast<std::int32_t>(task / t.ranges * t.columns);
      const auto row = [&](std::int64_t part) {
        return begin_of_part(plan.crow, s.row_count(), 1, 0, part, t.ranges);
      };
      const std::int64_t end = row(task % t.ranges + 1);
      for (std::int64_t i = row(task % t.ranges); i < end; ++i) {
        const std::int32_t* row_end = plan.col + plan.crow[i + 1];
        const std::int32_t* begin = std::lower_bound(plan.col + plan.crow[i], row_end, from);
        row_end = std::lower_bound(begin, row_end, from + t.columns);
        if (begin == row_end) continue;
        kernels.dot({panels.dy + i * s.block_rows * lanes, panels.x, lanes, rows, plan.col,
                     static_cast<std::int32_t>(begin - plan.col),
                     static_cast<std::int32_t>(row_end - plan.col), static_cast<std::int32_t>(s.block_rows),
                     static_cast<std::int32_t>(s.block_cols), sums + (begin - plan.col) * s.block_size(),
                     first > 0});
      }
    });
  }
  clear_padding(plan, sums);
  return {};
}

}  // namespace rarefy::cpu
