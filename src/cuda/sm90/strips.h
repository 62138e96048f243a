// The strip kernel, host side: linear and grad_input for blocks whose sides are multiples of 64.
// A strip is 64 rows of W (64 columns for grad_input): what one warpgroup multiplies. A group is two or three
// strips with similar patterns; a tile, a group times 256, 192 or 128 tokens, walks the union of its strips'
// 64-wide columns. Groups and unions follow from the pattern alone and are made on the device
// (strip_plan.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/product.h"
#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

struct StripProblem : Product {
  // Strips of a group. Three save bytes of X, but where two share a block row they have the same columns, and
  // where little is stored groups have little in common. Of the weight alone: what is prepared serves any
  // tokens.
  int group_size() const { return block_out() / 64 % 2 == 0 || density() < 1.0 / 6 ? 2 : 3; }
  std::int64_t strips() const { return (out_features() + 63) / 64; }
  std::int64_t groups() const { return (strips() + group_size() - 1) / group_size(); }
};

struct Machine {
  int sms = 132;
  int shared_bytes = 227 * 1024;  // that a block may have
};

// One warpgroup for each strip of a group; `cluster` thread blocks with neighbouring tokens share every block
// of W. Where tiles are few, `split` thread blocks have a part of a tile's steps each, and, with `alone`,
// each strip of a group has a tile of its own.
struct StripConfig {
  int strips = 2, tokens = 256, cluster = 1;
  int slots = 5, w_slots = 8;  // in flight: steps, and blocks of W
  int split = 1;
  bool alone = false;

  int ring_bytes() const { return slots * tokens * 128 + w_slots * 8192; }  // of what is in flight
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

// Where things are in a prepared buffer, in words: all follows from shapes and the GPU, so that no launch
// reads it. What is there: strip_walk.h.
struct StripPlan {
  int groups, size, sms;  // strips of a group; thread blocks at a time
  std::int64_t groups_at = 0, steps_at = 0, items_at[2] = {}, scratch_at = 0, words = 0;
  StripPlan(const StripProblem& problem, int thread_blocks);
  StripLists lists(int cluster) const { return {groups, size, sms / cluster}; }
};

// Queues the kernels that fill `words`, which are StripPlan::words; tokens and strides do not matter.
cudaError_t prepare(const StripProblem& problem, int sms, const ProductIndex& index, std::int32_t* words,
                    cudaStream_t stream);

// Device pointers, all 16-byte aligned. bias: out_features elements of the dtype, or null.
struct StripOperands {
  const void* x = nullptr;
  const void* values = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  const std::int32_t* plan = nullptr;  // what prepare made
};

// Queues one kernel; waits for nothing and allocates nothing.
cudaError_t launch(const StripProblem& problem, const StripConfig& config, int sms,
                   const StripOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
