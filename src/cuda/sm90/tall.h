// The tall kernel, host side: linear for blocks of one column and a multiple of 64 rows, with X by feature
// ([feature][token]). Canonical values are read in place; of the pattern it takes col_indices and a list of
// tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rarefy/dtype.h"
#include "rarefy/linear.h"

namespace rarefy::sm90 {

struct TallProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, blocks = 0;
  std::int64_t x_stride = 0, y_stride = 0;  // elements between features of X, between tokens of Y
  Activation activation = Activation::none;
};

// A tile: `rows` features × `tokens` tokens. Two warpgroups share it by rows (128) or by tokens (64).
struct TallConfig {
  int rows = 128;
  int slots = 4;

  int tokens() const { return rows == 128 ? 256 : 512; }
  int columns() const { return rows == 128 ? 64 : 32; }  // of a step
  int slot_bytes() const { return (tokens() + rows) * columns() * 2; }
  int shared_bytes() const { return 1024 + slots * slot_bytes() + 2 * 2 * 8192; }
  std::string text() const {
    return "rows=" + std::to_string(rows) + " tokens=" + std::to_string(tokens()) +
           " slots=" + std::to_string(slots);
  }
};

struct TallCandidate {
  TallConfig config;
  double microseconds = 0;  // predicted
  std::string reason;       // why not; empty if it can run
};

std::string unsupported(const TallProblem& problem);
std::vector<TallCandidate> tall_candidates(const TallProblem& problem, int sms, int shared_bytes);
TallConfig configure(const TallProblem& problem, int sms, int shared_bytes);

struct TallPlan {
  std::vector<std::int32_t> words;  // for each thread block the range of its tiles; the tiles: group of rows,
                                    // token tile, range of stored columns
  std::int64_t tiles_at = 0;
  int workers = 0;
};
// crow on the host.
TallPlan prepare(const TallProblem& problem, const TallConfig& config, int sms, const std::int32_t* crow);

struct TallOperands {  // device pointers, 16-byte aligned
  const void* x = nullptr;
  const void* values = nullptr;
  const std::int32_t* col = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  const std::int32_t* plan = nullptr;
};

cudaError_t launch(const TallProblem& problem, const TallConfig& config, const TallPlan& plan,
                   const TallOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
