// Drives linear for a few tokens (see few.h): X becomes float rows padded to whole blocks, tasks are
// ranges of block rows with equal shares of the stored blocks, and Y is written row by row.
#include <algorithm>

#include "cpu/blocking.h"
#include "cpu/drivers.h"
#include "cpu/scratch.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kTasks = 4;  // per thread

// Rows of `cols` elements as float, each padded with 0 to `padded`; rows past the last are 0.
void to_float(const Kernels& kernels, const MatrixView& from, std::int64_t rows, std::int64_t padded,
              float* to) {
  std::fill_n(to, rows * padded, 0.0F);
  for (std::int64_t m = 0; m < from.rows; ++m) {
    const char* row = static_cast<const char*>(from.data) +
                      m * from.row_stride * static_cast<std::int64_t>(size_of(from.dtype));
    kernels.unpack(storage(from.dtype), row, from.cols, to + m * padded);
  }
}

}  // namespace

bool takes_few(const Kernels& kernels, const LinearArgs& args) {
  const BsrShape& s = args.w.plan.shape;
  return kernels.few != nullptr && has_storage(args.w.dtype) && args.x.rows > 0 &&
         args.x.rows <= kFewTokens && kernels.few_takes(s.block_rows, s.block_cols);
}

Status run_linear_few(const Kernels& kernels, const LinearArgs& args, const Context& context) {
  const PlanView& plan = args.w.plan;
  const BsrShape& s = plan.shape;
  const std::int64_t tokens = args.x.rows == 3 ? 4 : args.x.rows;
  const std::int64_t in_features = s.col_count() * s.block_cols;
  static thread_local Scratch x_scratch;  // read by the workers during this call
  auto* x = x_scratch.get<float>(tokens * in_features);
  to_float(kernels, args.x, tokens, in_features, x);

  const std::int64_t tasks = std::clamp<std::int64_t>(kTasks * context.executor.threads, 1,
                                                      std::max<std::int64_t>(1, s.row_count()));
  run_tasks(context, tasks, [&](std::int64_t task) {
    const std::int32_t begin = begin_of_part(plan.crow, s.row_count(), 1, 0, task, tasks);
    const std::int32_t end = begin_of_part(plan.crow, s.row_count(), 1, 0, task + 1, tasks);
    if (begin == end) return;
    TaskScratch& scratch = task_scratch();
    const std::int64_t first = begin * s.block_rows;
    const std::int64_t padded = (end - begin) * s.block_rows;
    const std::int64_t features = std::min(end * s.block_rows, s.rows) - first;
    const std::int64_t stride = (padded + kernels.width - 1) / kernels.width * kernels.width;
    auto* y = scratch.y.get<float>(tokens * stride);
    std::fill_n(y, tokens * stride, 0.0F);
    if (args.bias != nullptr) {
      const char* bias =
          static_cast<const char*>(args.bias) + first * static_cast<std::int64_t>(size_of(args.y.dtype));
      for (std::int64_t m = 0; m < tokens; ++m) {
        kernels.unpack(storage(args.y.dtype), bias, features, y + m * stride);
      }
      for (std::int64_t i = 0; i < tokens * stride; ++i) y[i] += 0.0F;  // −0 to +0, as in linear.cc
    }
    float* unpacked = args.w.dtype == DType::f32
                          ? nullptr
                          : scratch.unpacked.get<float>(std::max(kUnpacked, s.block_size()));
    kernels.few({operand(args.w, plan.col, nullptr, false), plan.crow, begin, end, x, in_features,
                 static_cast<std::int32_t>(tokens), y, stride, unpacked});
    for (std::int64_t m = 0; m < args.x.rows; ++m) {
      kernels.activate(static_cast<PanelActivation>(args.activation), y + m * stride, stride);
      char* to = static_cast<char*>(args.y.data) +
                 (m * args.y.row_stride + first) * static_cast<std::int64_t>(size_of(args.y.dtype));
      kernels.round(storage(args.y.dtype), y + m * stride, features, to);
    }
  });
  return {};
}

}  // namespace rarefy::cpu
