// The gradient of stored blocks, host side: grad_weight for blocks whose sides are multiples of 16.
// A tile is 64 rows of W times 512 features of X that these store, or 128 times 256 where blocks are so high,
// or halves of two of them, summed over a share of the tokens; the thread blocks of a cluster have the other
// shares and add up a part of the sums each. Features of X come in panels of 64, or of 32 for blocks with
// smaller sides, those that any of the 64 rows stores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/gradient_tiles.h"
#include "cuda/sm90/strips.h"
#include "rarefy/dtype.h"

namespace rarefy::sm90 {

struct GradientProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, block_cols = 0, blocks = 0;
  std::int64_t dy_stride = 0, x_stride = 0;  // elements between tokens

  bool whole() const { return block_rows % 64 == 0 && block_cols % 64 == 0; }  // blocks are whole cells
  std::int64_t block_row_count() const { return (rows + block_rows - 1) / block_rows; }
};

struct GradientConfig {
  int split = 1;  // thread blocks that share the tokens of a tile: 1, 2 or 4
  int wide = 64;  // features of a panel: 64, or 32 where blocks are smaller
  // Tiles of two strips: where block rows come in pairs of 64, or where their columns are mostly the same.
  bool two = true;
  bool pairs = false;  // what is left of two rows may be one tile

  TileShape shape() const { return {wide, two, pairs}; }
  int columns() const { return shape().columns(); }
  std::string text() const {
    return "split=" + std::to_string(split) + " wide=" + std::to_string(wide) +
           " strips=" + (two ? "2" : "1") + " pairs=" + (pairs ? "1" : "0");
  }
};

struct GradientCandidate {
  GradientConfig config;
  double microseconds = 0;  // predicted
  std::string reason;       // why not; empty if it can run
};

std::string unsupported(const GradientProblem& problem);
std::vector<GradientCandidate> gradient_candidates(const GradientProblem& problem, const Machine& machine);
GradientConfig configure(const GradientProblem& problem, const Machine& machine);

// Thread blocks of a launch: the most tiles that a pattern of these sizes can have. Each reads its own in a
// list made once, or, with panels of 64, finds it in crow and col; those that have none leave.
std::int64_t tiles_at_most(const GradientProblem& problem, const GradientConfig& config);
inline constexpr int kTileWords64 = 27, kTileWords32 = 155;                             // of the list
std::int64_t union_rows(const GradientProblem& problem, const GradientConfig& config);  // with panels of 32
inline constexpr int kMostUnionColumns = 1 << 15;                                       // 32-wide, of W
std::int64_t list_at(const GradientProblem& problem,
                     const GradientConfig& config);  // behind counts of columns
std::int64_t prepared_words(const GradientProblem& problem, const GradientConfig& config);

// Queues the kernels that make the list. Splits do not matter.
cudaError_t prepare(const GradientProblem& problem, const GradientConfig& config, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream);

struct GradientOperands {  // device pointers, 16-byte aligned
  const void *dy = nullptr, *x = nullptr;
  const std::int32_t *crow = nullptr, *col = nullptr;
  void* dvalues = nullptr;
  const std::int32_t* prepared = nullptr;  // null: tiles are found by each thread block; panels of 64 alone
};

cudaError_t launch(const GradientProblem& problem, const GradientConfig& config,
                   const GradientOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
