// Drives the weight gradient: both inputs are packed feature-major, a chunk of tokens at a time, by
// all threads; then tasks of block rows × a tile of block columns take their dot products. Chunks are
// added in order, so the result does not depend on the number of threads.
#include <algorithm>

#include "cpu/blocking.h"
#include "cpu/cpuid.h"
#include "cpu/drivers.h"
#include "cpu/scratch.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kChunk = 512;     // tokens: long enough to pay for the sum across lanes
constexpr std::int64_t kFeatures = 256;  // features of one packing task
constexpr std::int64_t kTasks = 8;       // per thread: the last ones to end are short

// Packs `features` (rounded up to `padded`, the rest 0) of tokens first … first + rows.
void pack_features(const Kernels& kernels, const Context& context, const MatrixView& m, std::int64_t first,
                   std::int64_t rows, std::int64_t lanes, std::int64_t padded, float* panel) {
  context.executor.parallel_for((padded + kFeatures - 1) / kFeatures, [&](std::int64_t task) {
    const std::int64_t from = task * kFeatures;
    const std::int64_t to = std::min(from + kFeatures, padded);
    const std::int64_t features = std::clamp<std::int64_t>(m.cols - from, 0, to - from);
    const char* data = static_cast<const char*>(m.data) +
                       (first * m.row_stride + from) * static_cast<std::int64_t>(size_of(m.dtype));
    kernels.pack({{data, m.row_stride, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(features),
                   storage(m.dtype)},
                  panel + from * lanes,
                  static_cast<std::int32_t>(lanes)});
    std::fill(panel + (from + features) * lanes, panel + to * lanes, 0.0F);
  });
}

// A task: the stored blocks of a range of block rows within one tile of block columns, whose part of the
// X panel stays in L2. Ranges have equal shares of all stored blocks.
struct Tiling {
  std::int64_t columns;  // block columns of a tile
  std::int64_t tiles;
  std::int64_t ranges;

  Tiling(const BsrShape& shape, std::int64_t lanes, std::int64_t threads)
      : columns(std::clamp<std::int64_t>(panel_floats() / (lanes * shape.block_cols), 1,
                                         std::max<std::int64_t>(1, shape.col_count()))),
        tiles((shape.col_count() + columns - 1) / columns),
        ranges(std::clamp<std::int64_t>(kTasks * threads / std::max<std::int64_t>(1, tiles), 1,
                                        std::max<std::int64_t>(1, shape.row_count()))) {}
};

// Elements of edge blocks outside the matrix: 0, also where NaN times a zero of padding made a NaN.
void clear_padding(const PlanView& plan, float* sums) {
  const BsrShape& s = plan.shape;
  const std::int64_t rows = s.rows % s.block_rows;
  const std::int64_t cols = s.cols % s.block_cols;
  if (rows != 0) {
    for (std::int64_t e = plan.crow[s.row_count() - 1]; e < plan.crow[s.row_count()]; ++e) {
      float* block = sums + e * s.block_size();
      std::fill(block + rows * s.block_cols, block + s.block_size(), 0.0F);
    }
  }
  if (cols != 0) {
    for (std::int64_t i = plan.ccol[s.col_count() - 1]; i < plan.ccol[s.col_count()]; ++i) {
      float* row = sums + plan.perm[i] * s.block_size();
      for (std::int64_t r = 0; r < s.block_rows; ++r, row += s.block_cols) {
        std::fill(row + cols, row + s.block_cols, 0.0F);
      }
    }
  }
}

}  // namespace

Status run_grad_weight(const Kernels& kernels, const GradWeightArgs& args, const Context& context) {
  const PlanView& plan = args.plan;
  const BsrShape& shape = plan.shape;
  const std::int64_t tokens = args.x.rows;
  const std::int64_t width = kernels.width;
  const std::int64_t longest = std::min(kChunk, (tokens + width - 1) / width * width);
  const std::int64_t out_features = shape.row_count() * shape.block_rows;
  const std::int64_t in_features = shape.col_count() * shape.block_cols;

  static thread_local TaskScratch scratch;  // shared with the workers for this call
  auto* dy = scratch.y.get<float>(out_features * longest);
  auto* x = scratch.x.get<float>(in_features * longest);
  float* sums = args.dtype == DType::f32 ? static_cast<float*>(args.dvalues)
                                         : scratch.unpacked.get<float>(shape.value_count());
  if (tokens == 0) std::fill(sums, sums + shape.value_count(), 0.0F);

  for (std::int64_t first = 0; first < tokens; first += longest) {
    const std::int64_t rows = std::min(longest, tokens - first);
    const std::int64_t lanes = (rows + width - 1) / width * width;
    pack_features(kernels, context, args.dy, first, rows, lanes, out_features, dy);
    pack_features(kernels, context, args.x, first, rows, lanes, in_features, x);
    const Tiling tiling(shape, lanes, context.executor.threads);
    context.executor.parallel_for(tiling.tiles * tiling.ranges, [&](std::int64_t task) {
      const auto from = static_cast<std::int32_t>(task / tiling.ranges * tiling.columns);
      const std::int64_t to = from + tiling.columns;
      const auto row = [&](std::int64_t part) {
        return begin_of_part(plan.crow, shape.row_count(), 1, 0, part, tiling.ranges);
      };
      const std::int64_t end = row(task % tiling.ranges + 1);
      for (std::int64_t i = row(task % tiling.ranges); i < end; ++i) {
        const std::int32_t* blocks = plan.col + plan.crow[i];
        const std::int32_t* row_end = plan.col + plan.crow[i + 1];
        if (from > 0) blocks = std::lower_bound(blocks, row_end, from);
        if (to < shape.col_count()) row_end = std::lower_bound(blocks, row_end, to);
        if (blocks == row_end) continue;
        kernels.dot({dy + i * shape.block_rows * lanes, x, lanes, plan.col,
                     static_cast<std::int32_t>(blocks - plan.col),
                     static_cast<std::int32_t>(row_end - plan.col),
                     static_cast<std::int32_t>(shape.block_rows), static_cast<std::int32_t>(shape.block_cols),
                     sums + (blocks - plan.col) * shape.block_size(), first > 0});
      }
    });
  }
  clear_padding(plan, sums);
  if (args.dtype != DType::f32) kernels.round(storage(args.dtype), sums, shape.value_count(), args.dvalues);
  return {};
}

}  // namespace rarefy::cpu
