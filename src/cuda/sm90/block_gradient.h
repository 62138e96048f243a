// The gradient of stored blocks, host side: grad_weight for blocks whose sides are multiples of 64.
// A part is 64 × 64 weights of a stored block. A tile is up to eight parts of the same rows (or, where blocks
// are higher, up to four of each of two neighbouring strips of 64 rows), summed over a share of the tokens;
// the thread blocks of a cluster have the other shares and hand their sums to the first one, which adds them
// in order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/strips.h"
#include "rarefy/dtype.h"

namespace rarefy::sm90 {

struct GradientProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, block_cols = 0, blocks = 0;
  std::int64_t dy_stride = 0, x_stride = 0;  // elements between tokens
};

struct GradientConfig {
  int split = 1;                               // thread blocks that share the tokens of a tile: 1, 2 or 4
  bool two = true;                             // tiles of two strips: where block rows come in pairs of 64
  int columns() const { return two ? 4 : 8; }  // of a tile, 64-wide

  std::string text() const {
    return "split=" + std::to_string(split) + " strips=" + (two ? std::string("2") : std::string("1"));
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

// Thread blocks of a launch: the most tiles that a pattern of these sizes can have. Each finds its own tile
// in crow and col, or in a list made of them once; those that find none leave.
std::int64_t tiles_at_most(const GradientProblem& problem, const GradientConfig& config);
inline constexpr std::int64_t kTileWords = 20;  // of the list

// Queues the kernel that makes the list: kTileWords for each tile. Splits do not matter.
cudaError_t prepare(const GradientProblem& problem, const GradientConfig& config, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream);

struct GradientOperands {  // device pointers, 16-byte aligned
  const void *dy = nullptr, *x = nullptr;
  const std::int32_t *crow = nullptr, *col = nullptr;
  void* dvalues = nullptr;
  const std::int32_t* prepared = nullptr;  // null: tiles are found by each thread block
};

cudaError_t launch(const GradientProblem& problem, const GradientConfig& config,
                   const GradientOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
