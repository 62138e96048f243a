// The strip kernel, host side: linear and grad_input for blocks whose sides are multiples of 64.
// A strip is 64 rows of W (64 columns for grad_input): what one warpgroup multiplies. A tile is a few strips
// with similar patterns times 256 or 128 tokens; it walks the union of its strips' 64-wide columns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rarefy/dtype.h"
#include "rarefy/linear.h"

namespace rarefy::sm90 {

struct StripProblem {
  bool transposed = false;  // grad_input: Y = X W instead of X Wᵀ
  DType dtype = DType::bf16;
  std::int64_t tokens = 0;
  std::int64_t rows = 0, cols = 0;              // of W
  std::int64_t block_rows = 0, block_cols = 0;  // of a block
  std::int64_t blocks = 0;                      // stored
  std::int64_t x_stride = 0, y_stride = 0;      // elements between consecutive tokens
  Activation activation = Activation::none;

  std::int64_t in_features() const { return transposed ? rows : cols; }
  std::int64_t out_features() const { return transposed ? cols : rows; }
  double density() const;  // stored / all
};

struct Machine {
  int sms = 132;
  int shared_bytes = 227 * 1024;  // that a block may have
};

// One warpgroup for each strip; `cluster` thread blocks with neighbouring tokens share every block of W.
struct StripConfig {
  int strips = 2, tokens = 256, cluster = 1;
  int slots = 5, w_slots = 8;  // in flight: steps, and blocks of W

  int shared_bytes() const;
  std::string text() const;
};

struct StripCandidate {
  StripConfig config;
  double microseconds = 0;  // predicted; what candidates are compared by
  std::string reason;       // why not; empty if it can run
};

// Why no configuration can run the problem; empty if one can. Looks at no pointer.
std::string unsupported(const StripProblem& problem);
std::vector<StripCandidate> strip_candidates(const StripProblem& problem, const Machine& machine);
// The fastest by prediction. Only for supported problems.
StripConfig configure(const StripProblem& problem, const Machine& machine);

// What the kernel walks, as one buffer of 32-bit words: for each cluster its tiles, for each tile its steps.
// Derived from the pattern and the number of tokens alone. Offsets are in words.
struct StripPlan {
  std::vector<std::int32_t> words;
  std::int64_t tiles_at = 0, steps_at = 0;
  int clusters = 0;
  std::int64_t steps = 0, tiles = 0;
  double clocks = 0;  // predicted
};

// The pattern's index by block row (crow, col) or, for grad_input, by block column (ccol, row, perm), on the
// host.
struct HostIndex {
  const std::int32_t* offsets = nullptr;
  const std::int32_t* others = nullptr;
  const std::int32_t* entries = nullptr;  // position in values; null: in order
};
StripPlan prepare(const StripProblem& problem, const StripConfig& config, const Machine& machine,
                  const HostIndex& index);

// Device pointers, all 16-byte aligned. bias: out_features elements of the dtype, or null.
struct StripOperands {
  const void* x = nullptr;
  const void* values = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  const std::int32_t* plan = nullptr;  // StripPlan::words on the device
};

// Queues one kernel; waits for nothing and allocates nothing.
cudaError_t launch(const StripProblem& problem, const StripConfig& config, const StripPlan& plan,
                   const StripOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
