// Drives linear of rows of W with X and Y by feature (in_place.h): tasks are ranges of rows with equal shares
// of the stored elements.
#include <algorithm>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"

namespace rarefy::cpu {

namespace {

// A row of W as long as a stored element: what its sums cost to begin and to store.
constexpr std::int64_t kPerRow = 4;

// Stored elements, times vectors of tokens, that are worth a thread, some 1.5 us; with as many times that,
// its work is cut in so many tasks. To find where one begins takes .1 us, and to start a thread 1.
constexpr std::int64_t kLeastWork = 1 << 12;

}  // namespace

Reason supports_in_place(const Kernels& kernels, const Problem& p) {
  const BsrShape& s = p.weight.shape;
  if (p.in_layout != Layout::by_feature || p.out_layout != Layout::by_feature) {
    return "takes and gives matrices by feature; got one by token";
  }
  if (p.in != DType::f32 || p.out != DType::f32 || p.weight.dtype != DType::f32) return "takes f32 alone";
  if (s.block_rows != 1) return cat("takes blocks of one row; got ", s.block_rows);
  if (p.tokens < kernels.in_place_least) {
    return cat("takes ", kernels.in_place_least, " tokens and more; got ", p.tokens);
  }
  return {};
}

Status run_in_place(const Kernels& kernels, const Call& call) {
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  const std::int64_t threads = call.problem.threads;
  const std::int64_t work = (s.nnzb * s.block_cols + kPerRow * s.rows) * ceil_div(call.x.rows, kernels.width);
  const std::int64_t each = work < kLeastWork * kTasksPerThread * threads ? 1 : kTasksPerThread;
  const std::int64_t tasks = work < kLeastWork * threads ? 1 : std::min(s.rows, each * threads);
  const InPlaceTask all{.w = operand(call, plan.col, nullptr, false),
                        .entry_begin = plan.crow,
                        .begin = 0,
                        .end = 0,
                        .x = static_cast<const float*>(call.x.data),
                        .x_stride = call.x.col_stride,
                        .rows = s.rows,
                        .columns = s.cols,
                        .tokens = call.x.rows,
                        .y = static_cast<float*>(call.out.data),
                        .y_stride = call.out.col_stride,
                        .bias = static_cast<const float*>(call.bias),
                        .activation = call.activation,
                        .part = part_entries(static_cast<std::int32_t>(s.block_cols))};
  call.executor.parallel_for(tasks, [&](std::int64_t task) {
    InPlaceTask own = all;
    own.begin = begin_of_part(plan.crow, s.rows, s.block_cols, kPerRow, task, tasks);
    own.end = begin_of_part(plan.crow, s.rows, s.block_cols, kPerRow, task + 1, tasks);
    own.y += own.begin * own.y_stride;
    if (own.bias != nullptr) own.bias += own.begin;
    kernels.in_place(own);
  });
  return {};
}

}  // namespace rarefy::cpu
