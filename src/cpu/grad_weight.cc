// Drives the weight gradient: both inputs are packed feature-major, a chunk of tokens at a time, by
// all threads; then tasks of block rows × a tile of block columns take their dot products. Or, where blocks
// are whole vectors along one side, by strips of their features, token by token, which is a copy (strips.h),
// of dY's made by who uses it. Chunks are added in order, so the result does not depend on the number of
// threads.
#include <algorithm>
#include <cstring>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"
#include "cpu/padding.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kChunk = 512;         // lanes: long enough to pay for the sum across them
constexpr std::int64_t kFewestPairs = 32;    // tokens: a vector of pairs
constexpr std::int64_t kNearSums = 2 << 20;  // floats that L3 keeps between chunks
constexpr std::int64_t kFeatures = 256;      // features of one packing task
constexpr std::int64_t kTasks = 8;           // per thread: the last ones to end are short

std::int64_t tokens_of_vector(const Kernels& kernels) {
  return std::int64_t{kernels.width} * kernels.tokens_of_lane;
}

// Packs the features (rounded up to `padded`, the rest 0) of tokens first … first + rows.
void pack_features(const Kernels& kernels, const Executor& executor, const MatrixView& m, std::int64_t first,
                   std::int64_t rows, std::int64_t lanes, std::int64_t padded, std::int64_t per_task,
                   float* panel) {
  executor.parallel_for((padded + per_task - 1) / per_task, [&](std::int64_t task) {
    const std::int64_t from = task * per_task;
    const std::int64_t to = std::min(from + per_task, padded);
    const std::int64_t features = std::clamp<std::int64_t>(m.cols - from, 0, to - from);
    kernels.pack({{at(m, first, from), m.row_stride, static_cast<std::int32_t>(rows),
                   static_cast<std::int32_t>(features), storage(m.dtype)},
                  panel + from * lanes,
                  static_cast<std::int32_t>(lanes)});
    std::fill(panel + (from + features) * lanes, panel + to * lanes, 0.0F);
  });
}

// Block `strip` of a token's features, 0 past the last one.
void pack_block(const Kernels& kernels, const MatrixView& m, std::int64_t token, std::int64_t strip,
                std::int64_t block, float* to) {
  const std::int64_t count = std::min(block, m.cols - strip * block);
  const char* from = at(m, token, strip * block);
  if (m.dtype == DType::f32) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  } else {
    kernels.unpack(storage(m.dtype), from, count, to);
  }
  std::fill(to + count, to + block, 0.0F);
}

// [strip][lanes][block] of `strips` strips of `block` features.
void pack_strips(const Kernels& kernels, const Executor& executor, const MatrixView& m, std::int64_t first,
                 std::int64_t rows, std::int64_t lanes, std::int64_t strips, std::int64_t block,
                 std::int64_t features, float* to) {
  const std::int64_t per_task = std::max<std::int64_t>(1, features / block);
  executor.parallel_for(ceil_div(strips, per_task), [&](std::int64_t task) {
    const std::int64_t end = std::min((task + 1) * per_task, strips);
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t s = task * per_task; s < end; ++s) {
        pack_block(kernels, m, first + t, s, block, to + (s * lanes + t) * block);
      }
    }
  });
}

// What copying that block will read, of up to kStripTokens tokens from `first` on.
Lines strip_lines(const MatrixView& m, std::int64_t first, std::int64_t last, std::int64_t strip,
                  std::int64_t block) {
  const std::int64_t features = std::min(block, m.cols - strip * block);
  if (features <= 0) return {};
  const auto size = static_cast<std::int64_t>(size_of(m.dtype));
  return {at(m, first, strip * block), m.row_stride * size,
          static_cast<std::int32_t>(std::min(kStripTokens, last - first)),
          static_cast<std::int32_t>(ceil_div(features * size, 64))};
}

bool takes_strips(const Kernels& kernels, const BsrShape& s) {
  return kernels.strips != nullptr &&
         (s.block_cols % kernels.width == 0 || (s.block_cols == 1 && s.block_rows % kernels.width == 0));
}

// Where both are there: dot products load less for an FMA, unless lanes are two vectors, but their sums cross
// lanes. So a few tokens go by strips: 768→3072 at .5 with 4 / 16 / 64 tokens, µs, Zen 4 16×16 1746 / 1734 /
// 2604 → 229 / 503 / 2052, 4×16 1242 / 1288 / 2459 → 254 / 665 / 2319; a Xeon 16×1 1357 / 2030 / 3277 → 517 /
// 915 / 2585, 1×16 2153 / 2256 → 1189 / 2102. AVX2's vectors of 8 columns always do, where 8 rows share them
// (512 tokens: 8×8 18.5 → 14.8 ms, 32×8 18.8 → 14.9).
bool goes_by_strips(const Kernels& kernels, const Problem& p) {
  const BsrShape& s = p.weight.shape;
  if (!takes_strips(kernels, s)) return false;
  const bool column = s.block_cols == 1;
  if ((column ? s.block_rows : s.block_cols) >= 2 * kernels.width) return true;
  if (kernels.width == 8 && !column && s.block_rows >= 8) return true;
  constexpr std::int64_t kMost = 16;  // rows that share a vector; by columns, any number of columns does
  return p.tokens <= kernels.width * (column ? kMost : std::min(s.block_rows, kMost)) / 4;
}

// Strips of dY that are a line wide are copied as they are used, if that is once: 128 tokens, which stay in
// L1.
bool copies(const BsrShape& s, const GradWeightTiling& tiling) {
  return tiling.strips != 0 && tiling.columns >= s.col_count() && s.block_rows * sizeof(float) >= 64;
}

// Both inputs packed for a chunk of tokens, and the sums where dvalues cannot hold them.
struct Parts {
  float* dy;  // or a worker's strip, one after the other
  float* x;
  float* sums;

  Parts(const Kernels& kernels, Room& room, const Problem& p, const GradWeightTiling& tiling) {
    const BsrShape& s = p.weight.shape;
    const std::int64_t lanes = tiling.chunk / kernels.tokens_of_lane;
    dy = room.take<float>(copies(s, tiling) ? p.threads * kStripTokens * s.block_rows
                                            : s.row_count() * s.block_rows * lanes);
    x = room.take<float>(s.col_count() * s.block_cols * lanes);
    sums = room.take<float>(p.weight.dtype == DType::f32 ? 0 : s.value_count());
  }
};

Status check_tiling(const Kernels& kernels, const BsrShape& s, const GradWeightTiling& t) {
  const std::int64_t most = takes_strips(kernels, s) ? 1 : 0;
  if (t.strips < 0 || t.strips > most) {
    return invalid(kernels.family, cat("strips of the config must be in [0, ", most, ']'), cat(t.strips));
  }
  const std::int64_t vector = tokens_of_vector(kernels);
  const bool whole = t.chunk >= vector && t.chunk % vector == 0;
  if (whole && t.columns >= 1 && t.ranges >= 1 && t.features >= 1) return {};
  return invalid(
      kernels.family, cat("the config must have positive numbers, and a chunk of whole vectors of ", vector),
      cat("chunk=", t.chunk, " columns=", t.columns, " ranges=", t.ranges, " features=", t.features));
}

}  // namespace

Reason supports_grad_weight_dots(const Problem& p) {
  if (p.in != DType::bf16 || p.weight.dtype != DType::bf16 || p.out != DType::bf16) {
    return "takes bf16 inputs and values alone, to bf16";
  }
  const BsrShape& s = p.weight.shape;
  const std::int64_t side = s.block_cols == 1 ? s.block_rows : s.block_rows >= 8 ? s.block_cols : 0;
  if (side % 16 == 0 && side > 16) {
    return cat("takes blocks without a side of 32 or more, by which others go; got ", s.block_rows, 'x',
               s.block_cols);
  }
  if (p.tokens < kFewestPairs) return cat("takes at least ", kFewestPairs, " tokens; got ", p.tokens);
  return {};
}

// A task: the stored blocks of a range of block rows within one tile of block columns. Ranges have equal
// shares of all stored blocks.
Config configure_grad_weight(const Kernels& kernels, const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  GradWeightTiling t;
  t.strips = goes_by_strips(kernels, p) ? 1 : 0;
  const std::int64_t vector = tokens_of_vector(kernels);
  const std::int64_t tokens = ceil_div(p.tokens, vector) * vector;
  const auto columns = [&](std::int64_t chunk) {
    return std::clamp<std::int64_t>(panel_floats(machine) * kernels.tokens_of_lane / (chunk * s.block_cols),
                                    1, std::max<std::int64_t>(1, s.col_count()));
  };
  // Sums of strips end every 128 tokens anyway. As many of all of X stay in L2 where 512 would not, and then
  // each strip of dY is wanted once; the sums come and go, which is too much where they are in memory.
  const bool brief =
      t.strips != 0 && (columns(kStripTokens) == s.col_count() || s.value_count() <= kNearSums);
  t.chunk = std::clamp(tokens, vector, brief ? kStripTokens : kChunk * kernels.tokens_of_lane);
  t.columns = columns(t.chunk);
  const std::int64_t tiles = (s.col_count() + t.columns - 1) / t.columns;
  t.ranges = std::clamp<std::int64_t>(kTasks * p.threads / std::max<std::int64_t>(1, tiles), 1,
                                      std::max<std::int64_t>(1, s.row_count()));
  t.features = kFeatures;
  return to_config(t);
}

std::int64_t grad_weight_workspace(const Kernels& kernels, const Problem& problem, const Config& config) {
  Room room;
  const Parts parts(kernels, room, problem, from_config<GradWeightTiling>(config));
  return room.bytes();
}

Status run_grad_weight(const Kernels& kernels, const Call& call) {
  const auto tiling = from_config<GradWeightTiling>(call.config);
  if (Status status = check_tiling(kernels, call.plan.shape, tiling); !status.ok()) return status;
  const PlanView& plan = call.plan;
  const BsrShape& shape = plan.shape;
  const std::int64_t tokens = call.x.rows;
  const std::int64_t vector = tokens_of_vector(kernels);
  const std::int64_t tiles = (shape.col_count() + tiling.columns - 1) / tiling.columns;
  const bool in_place = call.problem.weight.dtype == DType::f32;
  Room room(call.workspace);
  const Parts parts(kernels, room, call.problem, tiling);
  float* sums = in_place ? static_cast<float*>(call.dvalues) : parts.sums;
  if (tokens == 0) std::fill(sums, sums + shape.value_count(), 0.0F);

  for (std::int64_t first = 0; first < tokens; first += tiling.chunk) {
    const std::int64_t rows = std::min(tiling.chunk, tokens - first);
    const std::int64_t lanes = ceil_div(rows, vector) * kernels.width;
    const auto pack = [&](const MatrixView& m, std::int64_t blocks, std::int64_t block, bool strips,
                          float* to) {
      if (strips) {
        return pack_strips(kernels, call.executor, m, first, rows, lanes, blocks, block, tiling.features, to);
      }
      pack_features(kernels, call.executor, m, first, rows, lanes, blocks * block, tiling.features, to);
    };
    const bool strips = tiling.strips != 0, copied = copies(shape, tiling);
    if (!copied) pack(call.dy, shape.row_count(), shape.block_rows, strips, parts.dy);
    pack(call.x, shape.col_count(), shape.block_cols, strips && shape.block_cols > 1, parts.x);
    call.executor.parallel_for(tiles * tiling.ranges, [&](std::int64_t task, int worker) {
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
        DotTask dot{parts.dy + i * shape.block_rows * lanes,
                    parts.x,
                    lanes,
                    rows,
                    plan.col,
                    static_cast<std::int32_t>(blocks - plan.col),
                    static_cast<std::int32_t>(row_end - plan.col),
                    static_cast<std::int32_t>(shape.block_rows),
                    static_cast<std::int32_t>(shape.block_cols),
                    sums + (blocks - plan.col) * shape.block_size(),
                    first > 0};
        if (!strips) {
          kernels.dot(dot);
          continue;
        }
        float* strip = parts.dy + worker * kStripTokens * shape.block_rows;
        if (copied) dot.dy = strip;
        for (std::int64_t t = 0; t < rows; t += kStripTokens) {
          dot.tokens = std::min(kStripTokens, rows - t);
          if (copied) {
            for (std::int64_t k = 0; k < dot.tokens; ++k) {
              pack_block(kernels, call.dy, first + t + k, i, shape.block_rows, strip + k * shape.block_rows);
            }
            const bool more = t + kStripTokens < rows;
            dot.next = strip_lines(call.dy, first + (more ? t + kStripTokens : 0), first + rows,
                                   more ? i : i + 1, shape.block_rows);
          }
          kernels.strips(dot);
          dot.dy += copied ? 0 : kStripTokens * shape.block_rows;
          dot.x += kStripTokens * shape.block_cols;
          dot.accumulate = true;
        }
      }
    });
  }
  clear_padding(plan, sums);
  if (!in_place) kernels.round(storage(call.problem.weight.dtype), sums, shape.value_count(), call.dvalues);
  return {};
}

}  // namespace rarefy::cpu
