// What runs a product in bf16 pairs on a table of pair kernels (linear_pairs.cc): linear, and grad_input of
// blocks that are tall the other way round; and the rows beside it.
#pragma once

#include "core/registry.h"
#include "cpu/pairs.h"
#include "cpu/pairs_blocking.h"

namespace rarefy::cpu {

Reason supports_pairs(const PairKernels& kernels, const Problem& problem);
Config configure_pairs(const PairKernels& kernels, const Problem& problem, const Machine& machine);
std::vector<Config> pairs_candidates(const PairKernels& kernels, const Problem& problem,
                                     const Machine& machine);
std::int64_t pairs_workspace(const PairKernels& kernels, const Problem& problem, const Config& config);
Status run_pairs(const PairKernels& kernels, std::span<const Call> calls);  // of linear, several on one x

// The same for tables with the same `rows`: where an output block's columns lie, and its weights in tiles.
std::int64_t pairs_prepared_size(const PairKernels& kernels, const Problem& problem);
Status prepare_pairs(const PairKernels& kernels, const Call& call, void* data);
std::int64_t pairs_packed_size(const PairKernels& kernels, const Problem& problem);
Status pack_pairs_weight(const PairKernels& kernels, const Call& call, void* packed);

// feed_forward on weights that linear's row packed (feed_forward_pairs.cc).
struct FeedForwardSets {
  std::int64_t panels =
      1;  // of 32 tokens each, at most, that a task takes from x to y, or to hidden features
  std::int64_t splits = 1;  // more: parts of each product that are tasks of their own, hidden panels shared
  std::int64_t rest = 0;    // the last panels, so cut where others are whole (PairsBlocking)
  std::int64_t after = 0;   // panels of a task of the last product, where products are tasks of their own; 0:
                            // they are with splits alone, and then as many
  static constexpr std::string_view kFields[] = {"panels", "splits", "rest", "after"};
  bool apart() const { return splits > 1 || after > 0; }
  std::int64_t panels_after() const { return after > 0 ? after : panels; }
};
Reason supports_feed_forward_pairs(const PairKernels& kernels, const Problem& problem);
Config configure_feed_forward_pairs(const PairKernels& kernels, const Problem& problem,
                                    const Machine& machine);
std::vector<Config> feed_forward_pairs_candidates(const PairKernels& kernels, const Problem& problem,
                                                  const Machine& machine);
std::int64_t feed_forward_pairs_workspace(const PairKernels& kernels, const Problem& problem,
                                          const Config& config);
Status run_feed_forward_pairs(const PairKernels& kernels, const Call& call);

// grad_input of R×1 blocks, which needs nothing packed (grad_input_pairs.cc).
struct SpreadBlocking {
  std::int64_t panels = 1;  // of 32 tokens each, of one task
  std::int64_t splits = 1;  // ranges of W's columns
  static constexpr std::string_view kFields[] = {"panels", "splits"};
};
Reason supports_spread(const Problem& problem);
Config configure_spread(const Problem& problem, const Machine& machine);
std::int64_t spread_workspace(const Problem& problem, const Config& config);
Status run_spread(const PairKernels& kernels, const Call& call);

// grad_weight, which needs nothing packed either (grad_weight_pairs.cc).
struct PairDotRanges {
  std::int64_t rows = 1;     // ranges of block rows, or of tiles of rows
  std::int64_t columns = 1;  // of block columns, or tiles; each pair of ranges is a task
  static constexpr std::string_view kFields[] = {"rows", "columns"};
};
Reason supports_grad_weight_pairs(const PairKernels& kernels, const Problem& problem);
Config configure_grad_weight_pairs(const Problem& problem, const Machine& machine);
std::int64_t grad_weight_pairs_workspace(const Problem& problem, const Config& config);
Status run_grad_weight_pairs(const PairKernels& kernels, const Call& call);

}  // namespace rarefy::cpu
