// Drives the weight gradient in bf16 pairs (pairs.h), pairs of tokens. Of a stored block one side's features
// are lines of tokens, the other side's the lanes of sums: the side along which values lie together. For R×1
// blocks that is dY's, and lines of X are gathered by what a block row stores; else it is X's, and nothing is
// gathered. Blocks that are no products go by tiles of 32 × 32 of the dense gradient, whatever of it they
// store (AMX alone, whose products are eight times as fast as a float's). Chunks of tokens are packed by all
// threads.
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
// Blocks of which one is stored, from which on tiles of all gain: fewer of short rows, each of which leaves
// alone. AMX, 768→3072, 512 tokens, ms as floats at .1 and by tiles at .25: 8×8 3.4 and 4.2, 10×10 5.8 and
// 3.7, CSR 7.2 and 13.4 (at .5 31 and 17).
constexpr std::int64_t kTilesFrom = 8, kTilesFromShort = 5, kShort = 4;

bool is_columns(const BsrShape& s) { return s.block_cols == 1 && s.block_rows % kTileRows == 0; }
bool is_blocks(const BsrShape& s) { return s.block_cols % kTileRows == 0 && s.block_rows >= 8; }

// How a weight's two sides are packed: lines as panels, lanes by groups of a block each, in 32s, or of a
// tile.
struct Sides {
  bool tiles;               // of 32 × 32, whatever the blocks
  bool columns;             // R×1: X is lines, dY is lanes; else the other way round
  std::int64_t rows, cols;  // block rows and columns, or tiles
  std::int64_t lines, groups, group_lanes, group_parts;

  explicit Sides(const BsrShape& s)
      : tiles(!is_columns(s) && !is_blocks(s)),
        columns(s.block_cols == 1),
        rows(tiles ? ceil_div(s.rows, kSide) : s.row_count()),
        cols(tiles ? ceil_div(s.cols, kSide) : s.col_count()),
        // Products may read past the last block, or values lie there.
        lines((columns ? s.cols : s.row_count() * s.block_rows) + kSide),
        groups(columns ? rows : cols),
        group_lanes(tiles     ? kSide
                    : columns ? s.block_rows
                              : s.block_cols),
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

// Rows and columns of W.
struct Tile {
  std::int64_t top, bottom, left, right;
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
      const std::int64_t rows = sides_.rows, all = sides_.cols;
      call_.executor.parallel_for(ranges.rows * ranges.columns, [&](std::int64_t task, int) {
        const std::int64_t row = task % ranges.rows, column = task / ranges.rows;
        k_.enter();
        for (std::int64_t o = rows * row / ranges.rows; o < rows * (row + 1) / ranges.rows; ++o) {
          const std::int64_t begin = all * column / ranges.columns, end = all * (column + 1) / ranges.columns;
          sides_.tiles     ? row_of_tiles(chunk, o, begin, end)
          : sides_.columns ? row_of_columns(chunk, o, begin, end)
                           : row_of_blocks(chunk, o, begin, end);
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
  void deliver(const Chunk& chunk, const float* sums, const PairRun* runs, std::int64_t count) const {
    k_.deliver({sums, runs, static_cast<std::int32_t>(count), chunk.is_first, chunk.is_last, parts_.partial,
                static_cast<std::uint16_t*>(call_.dvalues)});
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
                     static_cast<std::int32_t>(std::clamp<std::int64_t>(there - lane, 0, lanes)),
                     static_cast<std::int32_t>(lanes)};
        }
        deliver(chunk, sums, runs, count);
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
                       n + r + i < shape_.rows ? static_cast<std::int32_t>(there) : 0,
                       static_cast<std::int32_t>(lanes)};
          }
          deliver(chunk, sums, runs, lines);
        }
      }
    }
  }

  // 32 rows of W, 32 columns at a time: products of all of them where any is stored. Values beyond the last
  // row or column belong to its tile.
  void row_of_tiles(const Chunk& chunk, std::int64_t row, std::int64_t begin, std::int64_t end) const {
    const PlanView& plan = call_.plan;
    const std::int64_t top = row * kSide, rows = shape_.block_rows, cols = shape_.block_cols;
    const std::int64_t bottom =
        row + 1 == sides_.rows ? shape_.row_count() * rows : std::min(top + kSide, shape_.rows);
    const std::int64_t first = top / rows, last = ceil_div(bottom, rows);
    std::int32_t next[2 * kSide];  // entry of each block row
    for (std::int64_t b = first; b < last; ++b) {
      const std::int32_t* from = plan.col + plan.crow[b];
      const std::int32_t* to = plan.col + plan.crow[b + 1];
      next[b - first] =
          static_cast<std::int32_t>(std::lower_bound(from, to, begin * kSide / cols) - plan.col);
    }
    for (std::int64_t column = begin; column < end; ++column) {
      const std::int64_t left = column * kSide;
      const std::int64_t right = column + 1 == sides_.cols ? shape_.col_count() * cols : left + kSide;
      TileRuns runs{*this, chunk, {top, bottom, left, right}};
      for (std::int64_t b = first; b < last; ++b) {
        for (std::int32_t& e = next[b - first]; e < plan.crow[b + 1] && plan.col[e] * cols < right; ++e) {
          runs.add_entry(e, b * rows);
          if ((plan.col[e] + 1) * cols > right) break;  // the next tile has the rest of it
        }
      }
      runs.deliver();
    }
  }

  // What a tile's entries have of its sums, delivered some runs at a time.
  class TileRuns {
   public:
    TileRuns(const Gradient& of, const Chunk& chunk, const Tile& tile)
        : of_(of), chunk_(chunk), tile_(tile) {}

    // By lanes: of a column, or of each row. `n` is the block's first row.
    void add_entry(std::int32_t e, std::int64_t n) {
      const BsrShape& s = of_.shape_;
      const std::int64_t rows = s.block_rows, cols = s.block_cols;
      const std::int64_t c = of_.call_.plan.col[e] * cols, value = e * rows * cols;
      const std::int64_t first = std::max(n, tile_.top), last = std::min(n + rows, tile_.bottom);
      if (of_.sides_.columns) {
        add(value + first - n, (c - tile_.left) * kSide + first - tile_.top, s.rows - first, last - first);
        return;
      }
      const std::int64_t from = std::max(c, tile_.left), to = std::min(c + cols, tile_.right);
      for (std::int64_t r = first; r < last; ++r) {
        add(value + (r - n) * cols + from - c, (r - tile_.top) * kSide + from - tile_.left,
            r < s.rows ? s.cols - from : 0, to - from);
      }
    }
    void deliver() {
      if (count_ > 0) of_.deliver(chunk_, sums_, runs_, count_);
      count_ = 0;
    }

   private:
    static constexpr std::int64_t kRuns = 128;

    void add(std::int64_t to, std::int64_t from, std::int64_t there, std::int64_t length) {
      if (!multiplied_) {
        of_.multiply_tile(chunk_, tile_, sums_);
        multiplied_ = true;
      }
      runs_[count_++] = {to, static_cast<std::int32_t>(from),
                         static_cast<std::int32_t>(std::clamp<std::int64_t>(there, 0, length)),
                         static_cast<std::int32_t>(length)};
      if (count_ == kRuns) deliver();
    }

    const Gradient& of_;
    const Chunk& chunk_;
    const Tile tile_;
    bool multiplied_ = false;
    std::int64_t count_ = 0;
    PairRun runs_[kRuns];
    alignas(64) float sums_[kDotLines * kSide];
  };
  void multiply_tile(const Chunk& chunk, const Tile& tile, float* sums) const {
    const std::int64_t line = sides_.columns ? tile.left : tile.top;
    const std::int64_t part = (sides_.columns ? tile.top : tile.left) / kSide;
    multiply(chunk, parts_.lines + line * kPanelTokens, nullptr, kDotLines, part, false, sums);
  }

  const PairKernels& k_;
  const Call& call_;
  const BsrShape& shape_;
  Sides sides_;
  DotParts parts_;
};

}  // namespace

Reason supports_grad_weight_pairs(const PairKernels& kernels, const Problem& p) {
  if (p.in != DType::bf16 || p.weight.dtype != DType::bf16 || p.out != DType::bf16) {
    return "takes bf16 inputs and values alone, to bf16";
  }
  const BsrShape& s = p.weight.shape;
  const std::int64_t blocks = s.row_count() * s.col_count();
  const bool is_short = (s.block_cols == 1 ? s.block_rows : s.block_cols) < kShort;
  const std::int64_t from = is_short ? kTilesFromShort : kTilesFrom;
  const bool tiles = kernels.rows >= kTileRows && from * s.nnzb >= blocks;
  if (!is_columns(s) && !is_blocks(s) && !tiles) {
    return cat("takes blocks of one column and a multiple of ", kTileRows,
               " rows, of as many columns and 8 rows or more",
               kernels.rows >= kTileRows ? cat(", or one of ", from, " blocks") : "", "; got ", s.block_rows,
               'x', s.block_cols, ", ", s.nnzb, " of ", blocks);
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
                                            std::max<std::int64_t>(1, sides.cols));
  ranges.rows = std::clamp<std::int64_t>(ceil_div(kTasks * p.threads, ranges.columns), 1,
                                         std::max<std::int64_t>(1, sides.rows));
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
