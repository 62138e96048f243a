// How a product is cut into tasks: problem → blocking, a pure function, tested without running it.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace rarefy::cpu {

// Weights that caches do not hold (L3 is shared) are read from memory once for a set of panels: each group of
// them meets one panel after the other while it is in L2.
inline constexpr double kStreamed = 16e6;  // bytes

// linear or grad_input, seen as out += W · in with blocks of out_block × red_block.
struct BlockingProblem {
  std::int64_t tokens = 0;
  std::int64_t out_blocks = 0, red_blocks = 0;
  std::int64_t out_block = 1, red_block = 1;
  std::int64_t entries = 0;  // stored blocks
  int threads = 1;
  int width = 16;       // floats in a vector
  int max_vectors = 4;  // of the kernels
  int registers = 32;
  std::int64_t panel_floats = 128 * 1024;  // of X, or of sums, that stay in L2: half of 1 MB
  bool transposed = false;                 // scatter meets the blocks in another order than they lie in
  bool woven = false;                      // gather's sums leave along the way (woven.h) if X is one tile
  bool asks = true;                        // see Blocking
};

struct Blocking {
  std::int64_t scatter = 0;      // 1: input stationary
  std::int64_t vectors = 1;      // of a panel; the last one may be narrower
  std::int64_t panels = 1;       // gather: panels of one task, which share each group of weights
  std::int64_t splits = 1;       // tasks over the output blocks of one such set of panels
  std::int64_t tile_blocks = 1;  // gather: reduction blocks of X in L2 at a time; scatter: in L1
  std::int64_t group = 1;        // gather: output blocks that are stored at a time
  std::int64_t asks = 1;  // gather, blocks of one reduction feature: for lines of X, before it reads them

  static constexpr std::string_view kFields[] = {"scatter",     "vectors", "panels", "splits",
                                                 "tile_blocks", "group",   "asks"};
  bool operator==(const Blocking&) const = default;
};

inline constexpr std::int64_t kMostPanels = 8;

// The cheapest of all that `for_each` visits with their costs. What comes first wins by less than 0.1 %:
// models are not as exact, and list what is simpler first.
template <class T, class ForEach>
T cheapest(ForEach&& for_each) {
  T best;
  double best_cost = std::numeric_limits<double>::infinity();
  for_each([&](const T& choice, double cost) {
    if (cost >= best_cost * 0.999) return;
    best_cost = cost;
    best = choice;
  });
  return best;
}

// Cycles that a panel of `vectors` costs for each stored weight.
double cycles_per_weight(const BlockingProblem& problem, int vectors, bool scatter);

// Packing or storing one element: a transpose in registers and a trip to L3. Measured, in cycles.
inline constexpr double kMove = 0.4;

Blocking choose_blocking(const BlockingProblem& problem);

// Every blocking that choose_blocking weighs, the cheapest by its model first.
std::vector<Blocking> all_blockings(const BlockingProblem& problem);

// Output blocks that a task works on at once: ranges have equal work, so that one of a skewed pattern can
// be many times the average; beyond twice that, it goes piece by piece. It bounds the workspace.
std::int64_t piece_of_range(std::int64_t out_blocks, std::int64_t splits);

// Where part `part` of `parts` begins, when `blocks` blocks of one dimension are cut into ranges of equal
// work: `per_entry` for each of their stored blocks, which `begin` counts up, and `per_block` for each
// itself.
std::int32_t begin_of_part(const std::int32_t* begin, std::int64_t blocks, std::int64_t per_entry,
                           std::int64_t per_block, std::int64_t part, std::int64_t parts);

}  // namespace rarefy::cpu
