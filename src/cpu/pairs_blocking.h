// How products on panels of packed tokens are cut, bf16 in pairs and int8 in fours alike: sets of panels, and
// ranges of output blocks for each.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/registry.h"
#include "cpu/kernels.h"
#include "cpu/pairs.h"

namespace rarefy::cpu {

struct PairsBlocking {
  std::int64_t panels = 1;  // of 32 tokens each, which meet a block row's weights while they are near
  std::int64_t splits = 1;  // tasks over the output blocks of one such set
  static constexpr std::string_view kFields[] = {"panels", "splits"};
  bool operator==(const PairsBlocking&) const = default;
};

// What the cost of a blocking follows from.
struct PanelWork {
  double tiles = 0;             // of W, 16 outputs × 64 bytes
  double tile_cycles = 0;       // for one of them and one panel
  double packed = 0;            // elements of x that a panel packs
  std::int64_t panel_size = 0;  // 16-bit words
  std::int64_t out_features = 0, out_blocks = 0;
  double weight_byte = 0.1;  // cycles, of W out of L3 (docs/design/cpu_kernels.md)
};

// Of kernels that read W as one stream and ask for it ahead: nothing, while it is small.
constexpr double streamed_byte(double weight_bytes) { return weight_bytes < 6e6 ? 0 : 0.1; }

Config configure_panels(const PanelWork& work, const Problem& problem, const Machine& machine);
std::vector<Config> panel_candidates(const PanelWork& work, const Problem& problem, const Machine& machine);

// Whether a configuration is one for that many output blocks.
Status check_panels(std::string_view family, const PairsBlocking& b, std::int64_t out_blocks);

// Calls run(worker, first token, tokens, part) for every set and part of the output blocks, part by part, as
// workers take neighbouring tasks.
template <class Run>
void for_each_part(const Call& call, const PairsBlocking& b, Run&& run) {
  const std::int64_t set = b.panels * kPanelTokens, tokens = call.problem.tokens;
  const std::int64_t sets = (tokens + set - 1) / set;
  call.executor.parallel_for(sets * b.splits, [&](std::int64_t task, int worker) {
    const std::int64_t first = task % sets * set;
    run(worker, first, std::min(set, tokens - first), task / sets);
  });
}

}  // namespace rarefy::cpu
