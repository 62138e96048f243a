// Drives the weight gradient in bf16 pairs (pairs.h), pairs of tokens. Of a stored block one side's features
// are lines of tokens, the other side's the lanes of sums: the side along which values lie together. For R×1
// blocks that is dY's, and lines of X are gathered by what a block row stores; else it is X's, and nothing is
// gathered. Chunks of tokens are packed by all threads.
#include <algorithm>

#include "core/message.h"
#include "cpu/linear_pairs.h"
#include "cpu/pairs_weight.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kSide = 32;
constexpr std::int64_t kPartSize = kSide * kPanelTokens;   // of 32 lanes, a step
constexpr std::int64_t kChunk = kDotSteps * kPanelTokens;  // tokens packed at a time
constexpr std::int64_t kTasks = 8;                         // a thread: the last ones to end are short
constexpr std::int64_t kFewest = 32;                       // tokens that are worth packing

// How a weight's two sides are packed: lines as panels, lanes by groups of a block each, in 32s.
struct Sides {
  bool columns;  // R×1: X is lines, dY is lanes; else the other way round
  std::int64_t lines, groups, group_lanes, group_parts;

  explicit Sides(const BsrShape& s)
      : columns(s.block_cols == 1),
        lines((columns ? s.cols : s.row_count() * s.block_rows) +
              kSide),  // tiles may read past the last block
        groups(columns ? s.row_count() : s.col_count()),
        group_lanes(columns ? s.block_rows : s.block_cols),
        group_parts(ceil_div(group_lanes, kSide)) {}
  std::int64_t lines_size() const { return lines * kPanelTokens; }
  std::int64_t lanes_size() const { return groups * group_parts * kPartSize; }
};

struct DotParts {
  std::uint16_t *lines, *lanes;
  float* partial;

  DotParts(Room& room, const Problem& p, const Sides& sides) {
    const std::int64_t steps = std::min<std::int64_t>(ceil_div(p.tokens, kPanelTokens), kDotSteps);
    lines = room.take<std::uint16_t>(steps * sides.lines_size());
    lanes = room.take<std::uint16_t>(steps * sides.lanes_size());
    partial = room.take<float>(p.tokens > kChunk ? p.weight.shape.value_count() : 0);
  }
};

// One chunk of tokens.
struct Chunk {
  std::int64_t first, tokens;
  bool is_first, is_last;
  std::int32_t steps() const { return static_cast<std::int32_t>(ceil_div(tokens, kPanelTokens)); }
};

class Gradient {
 public:
  Gradient(const PairKernels& kernels, const Call& call)
      : k_(kernels), call_(call), shape_(call.plan.shape), sides_(shape_), parts_(make(call, sides_)) {}

  void run() const {
    for (std::int64_t m = 0; m < call_.x.rows; m += kChunk) {
      const std::int64_t tokens = std::min(kChunk, call_.x.rows - m);
      const Chunk chunk{m, tokens, m == 0, m + tokens == call_.x.rows};
      pack(chunk);
      const auto ranges = from_config<PairDotRanges>(call_.config);
      const std::int64_t rows = shape_.row_count();
      call_.executor.parallel_for(ranges.rows * ranges.columns, [&](std::int64_t task, int) {
        const std::int64_t row = task % ranges.rows, column = task / ranges.rows;
        const std::int64_t all = shape_.col_count();
        k_.enter();
        for (std::int64_t o = rows * row / ranges.rows; o < rows * (row + 1) / ranges.rows; ++o) {
          const std::int64_t begin = all * column / ranges.columns, end = all * (column + 1) / ranges.columns;
          sides_.columns ? row_of_columns(chunk, o, begin, end) : row_of_blocks(chunk, o, begin, end);
        }
        k_.leave();
      });
    }
  }

 private:
  static DotParts make(const Call& call, const Sides& sides) {
    Room room(call.workspace);
    return {room, call.problem, sides};
  }
  static const std::uint16_t* element(const MatrixView& m, std::int64_t row, std::int64_t col) {
    return reinterpret_cast<const std::uint16_t*>(at(m, row, col));
  }

  // 32 tokens a task, once as lines and once as lanes.
  void pack(const Chunk& chunk) const {
    const MatrixView& lines = sides_.columns ? call_.x : call_.dy;
    const MatrixView& lanes = sides_.columns ? call_.dy : call_.x;
    call_.executor.parallel_for(2 * chunk.steps(), [&](std::int64_t task, int) {
      const std::int64_t step = task / 2, m = chunk.first + step * kPanelTokens;
      const std::int32_t rows = panel_rows(chunk.first + chunk.tokens, m);
      if (task % 2 == 0) {
        k_.pack({element(lines, m, 0), false, lines.row_stride, rows, static_cast<std::int32_t>(lines.cols),
                 static_cast<std::int32_t>(sides_.lines), PairOrder::apart,
                 parts_.lines + step * sides_.lines_size()});
        return;
      }
      std::uint16_t* to = parts_.lanes + step * kPartSize;
      for (std::int64_t group = 0; group < sides_.groups; ++group) {
        const std::int64_t begin = group * sides_.group_lanes;
        const std::int64_t end = std::min(begin + sides_.group_lanes, lanes.cols);
        for (std::int64_t i = 0; i < sides_.group_parts; ++i, to += chunk.steps() * kPartSize) {
          const std::int64_t col = begin + i * kSide;
          const auto cols = static_cast<std::int32_t>(std::clamp<std::int64_t>(end - col, 0, kSide));
          k_.pack_tokens({element(lanes, m, cols > 0 ? col : 0), lanes.row_stride, rows, cols, to});
        }
      }
    });
  }

  // The sums of up to 32 lines with 32 lanes, all steps of which lie together.
  void multiply(const Chunk& chunk, const std::uint16_t* lines, const std::uint32_t* offsets,
                std::int64_t count, std::int64_t part, bool half, float* sums) const {
    k_.dots({lines, sides_.lines_size(), offsets, static_cast<std::int32_t>(count),
             parts_.lanes + part * chunk.steps() * kPartSize, kPartSize, half ? 1 : 2, chunk.steps(), sums});
  }
  void deliver(const Chunk& chunk, const float* sums, const PairRun* runs, std::int64_t count,
               std::int64_t length) const {
    k_.deliver({sums, runs, static_cast<std::int32_t>(count), static_cast<std::int32_t>(length),
                chunk.is_first, chunk.is_last, parts_.partial, static_cast<std::uint16_t*>(call_.dvalues)});
  }

  // One block row of R×1 blocks, 32 of them at a time.
  void row_of_columns(const Chunk& chunk, std::int64_t row, std::int64_t begin, std::int64_t end) const {
    const PlanView& plan = call_.plan;
    const std::int32_t* last = plan.col + plan.crow[row + 1];
    const std::int32_t* col = std::lower_bound(plan.col + plan.crow[row], last, begin);
    last = std::lower_bound(col, last, end);
    const std::int64_t there = shape_.rows - row * shape_.block_rows;
    alignas(64) float sums[kDotLines * kSide];
    PairRun runs[kDotLines];
    for (; col < last; col += kDotLines) {
      std::uint32_t offsets[kDotLines] = {};  // of what is no line: any
      const std::int64_t count = std::min<std::int64_t>(last - col, kDotLines);
      for (std::int64_t i = 0; i < count; ++i) offsets[i] = static_cast<std::uint32_t>(col[i] * kPanelTokens);
      for (std::int64_t lane = 0; lane < shape_.block_rows; lane += kSide) {
        const std::int64_t lanes = std::min(kSide, shape_.block_rows - lane);
        multiply(chunk, parts_.lines, offsets, count, row * sides_.group_parts + lane / kSide,
                 lanes <= kSide / 2, sums);
        for (std::int64_t i = 0; i < count; ++i) {
          runs[i] = {(col + i - plan.col) * shape_.block_rows + lane, static_cast<std::int32_t>(i * kSide),
                     static_cast<std::int32_t>(std::clamp<std::int64_t>(there - lane, 0, lanes))};
        }
        deliver(chunk, sums, runs, count, lanes);
      }
    }
  }

  // One block row, block by block.
  void row_of_blocks(const Chunk& chunk, std::int64_t row, std::int64_t begin, std::int64_t end) const {
    const PlanView& plan = call_.plan;
    const std::int64_t n = row * shape_.block_rows, width = shape_.block_cols;
    const std::int32_t* from = plan.col + plan.crow[row];
    const std::int32_t* to = plan.col + plan.crow[row + 1];
    alignas(64) float sums[kDotLines * kSide];
    PairRun runs[kDotLines];
    for (const std::int32_t* col = std::lower_bound(from, to, begin); col != to && *col < end; ++col) {
      const std::int64_t position = (col - plan.col) * shape_.block_size();
      for (std::int64_t lane = 0; lane < width; lane += kSide) {
        const std::int64_t lanes = std::min(kSide, width - lane);
        const std::int64_t there = std::clamp<std::int64_t>(shape_.cols - *col * width - lane, 0, lanes);
        for (std::int64_t r = 0; r < shape_.block_rows; r += kDotLines) {
          const std::int64_t lines = std::min<std::int64_t>(kDotLines, shape_.block_rows - r);
          multiply(chunk, parts_.lines + (n + r) * kPanelTokens, nullptr, lines,
                   *col * sides_.group_parts + lane / kSide, lanes <= kSide / 2, sums);
          for (std::int64_t i = 0; i < lines; ++i) {
            runs[i] = {position + (r + i) * width + lane, static_cast<std::int32_t>(i * kSide),
                       n + r + i < shape_.rows ? static_cast<std::int32_t>(there) : 0};
          }
          deliver(chunk, sums, runs, lines, lanes);
        }
      }
    }
  }

  const PairKernels& k_;
  const Call& call_;
  const BsrShape& shape_;
  Sides sides_;
  DotParts parts_;
};

}  // namespace

Reason supports_grad_weight_pairs(const Problem& p) {
  if (p.in != DType::bf16 || p.weight.dtype != DType::bf16 || p.out != DType::bf16) {
    return "takes bf16 inputs and values alone, to bf16";
  }
  const BsrShape& s = p.weight.shape;
  const bool columns = s.block_cols == 1 && s.block_rows % kTileRows == 0;
  const bool blocks = s.block_cols % kTileRows == 0 && s.block_rows >= 8;
  if (!columns && !blocks) {
    return cat("takes blocks of one column and a multiple of ", kTileRows,
               " rows, or of as many columns and 8 rows or more; got ", s.block_rows, 'x', s.block_cols);
  }
  if (p.tokens < kFewest) return cat("takes at least ", kFewest, " tokens; got ", p.tokens);
  return {};
}

// What tasks read of X stays in half of L2; ranges of block rows leave every thread several tasks.
Config configure_grad_weight_pairs(const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  const Sides sides(s);
  const std::int64_t steps = std::min<std::int64_t>(ceil_div(p.tokens, kPanelTokens), kDotSteps);
  const std::int64_t elements = (sides.columns ? sides.lines_size() : sides.lanes_size()) * steps;
  PairDotRanges ranges;
  ranges.columns = std::clamp<std::int64_t>(ceil_div(elements, panel_floats(machine) * 2), 1,
                                            std::max<std::int64_t>(1, s.col_count()));
  ranges.rows = std::clamp<std::int64_t>(ceil_div(kTasks * p.threads, ranges.columns), 1,
                                         std::max<std::int64_t>(1, s.row_count()));
  return to_config(ranges);
}

std::int64_t grad_weight_pairs_workspace(const Problem& p, const Config& /*config*/) {
  Room room;
  const DotParts parts(room, p, Sides(p.weight.shape));
  return room.bytes();
}

Status run_grad_weight_pairs(const PairKernels& kernels, const Call& call) {
  const auto ranges = from_config<PairDotRanges>(call.config);
  if (ranges.rows < 1 || ranges.columns < 1 || ranges.rows > 1 << 20 || ranges.columns > 1 << 20) {
    return invalid(kernels.family, "rows and columns of the config must be in [1, 1048576]",
                   cat(ranges.rows, " and ", ranges.columns));
  }
  Gradient(kernels, call).run();
  return {};
}

}  // namespace rarefy::cpu
