// How products on panels of packed tokens are cut, bf16 in pairs and int8 in fours alike: sets of panels, and
// ranges of output blocks for each.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/checked.h"
#include "core/registry.h"
#include "cpu/kernels.h"
#include "cpu/pairs.h"

namespace rarefy::cpu {

struct PairsBlocking {
  std::int64_t panels = 1;  // of 32 or 64 tokens each, which meet a block row's weights while they are near
  std::int64_t splits = 1;  // tasks over the output blocks of one such set
  std::int64_t rest = 0;  // the last panels, of which every thread takes a part of the outputs: 17 panels are
                          // 8.5 for each of two threads, not 9 and 8; at most `panels`
  static constexpr std::string_view kFields[] = {"panels", "splits", "rest"};
  bool operator==(const PairsBlocking&) const = default;
};

// The tasks that panels are cut into: sets of them, which differ by a panel at most, each cut into `splits`
// parts; and the rest, in `parts`, each of which comes after an equal range of the others, as workers take
// ranges of tasks (task_queue.h).
class PanelTasks {
 public:
  struct Task {
    std::int64_t first, tokens, part, parts;
    bool shared;  // of the rest
    bool again;   // by part: its worker had another set with the same part just before
  };

  PanelTasks(std::int64_t tokens, const PairsBlocking& b, std::int64_t threads,
             std::int64_t side = kPanelTokens)
      : side_(side),
        tokens_(tokens),
        panels_(std::max<std::int64_t>(1, (tokens + side - 1) / side)),
        rest_(std::min(b.rest, panels_)),
        threads_(threads),
        splits_(b.splits),
        parts_(rest_ > 0 ? threads : 0) {
    const std::int64_t own = panels_ - rest_, ranges = std::max<std::int64_t>(1, parts_);
    sets_ = (own + ranges * b.panels - 1) / (ranges * b.panels) * ranges;  // as many for each thread
  }

  std::int64_t count() const { return sets_ * splits_ + parts_; }
  std::int64_t parts() const { return parts_; }

  // Set by set, or part by part, so that neighbouring tasks read the same x, or the same weights.
  Task task(std::int64_t t, bool by_part) const {
    const std::int64_t shared = t * parts_ / count();
    if ((t + 1) * parts_ / count() > shared) return rest(shared);
    const std::int64_t worker = ((t + 1) * threads_ - 1) / count();  // task_queue.h
    const bool begins = worker * count() / threads_ == t;
    t -= shared;
    const std::int64_t set = by_part ? t % sets_ : t / splits_, part = by_part ? t / sets_ : t % splits_;
    const std::int64_t own = panels_ - rest_;
    const std::int64_t first = own * set / sets_ * side_, end = own * (set + 1) / sets_ * side_;
    return {first, std::min(end, tokens_) - first, part, splits_, false, by_part && set > 0 && !begins};
  }
  Task rest(std::int64_t part) const {
    const std::int64_t first = (panels_ - rest_) * side_;
    return {first, tokens_ - first, part, parts_, true, false};
  }

 private:
  std::int64_t side_, tokens_, panels_, rest_, threads_, splits_, parts_, sets_;
};

// The panels that are left where each thread has as many as any other (0: none, or more than a set has), how
// many a thread has, and in how many sets.
struct RestOfPanels {
  std::int64_t rest, sets;
  double each;  // panels of a set

  RestOfPanels(std::int64_t all, std::int64_t panels, std::int64_t threads) {
    const std::int64_t own = all / threads, left = all % threads;
    rest = threads > 1 && all > threads && left <= panels ? left : 0;
    sets = ceil_div(own, panels);
    each = static_cast<double>(own) / static_cast<double>(std::max<std::int64_t>(1, sets));
  }
};

// The share of so many output blocks that a thread takes at most.
constexpr double part_of(std::int64_t blocks, std::int64_t threads) {
  return blocks > 0 ? static_cast<double>(ceil_div(blocks, threads)) / static_cast<double>(blocks) : 1;
}

// What the cost of a blocking follows from.
struct PanelWork {
  double tiles = 0;             // of W, 16 outputs × 64 bytes
  double tile_cycles = 0;       // for one of them and one panel
  double packed = 0;            // elements of x that a panel packs
  std::int64_t panel_size = 0;  // 16-bit words
  std::int64_t out_features = 0, out_blocks = 0;
  double weight_byte = 0.1;            // cycles, of W out of L3 (docs/design/cpu/bf16.md)
  std::int64_t tokens = kPanelTokens;  // of a panel
  double alone_cycles = 0;  // tile_cycles of a set of one panel that goes by lanes of outputs; 0: none does
  std::int64_t most = 16;   // panels of a set
  bool ahead = false;       // W is asked for ahead, into L2
};

// Of kernels that read W as one stream and ask for it ahead: nothing, while it is small.
constexpr double streamed_byte(double weight_bytes) { return weight_bytes < 6e6 ? 0 : 0.1; }

Config configure_panels(const PanelWork& work, const Problem& problem, const Machine& machine);
std::vector<Config> panel_candidates(const PanelWork& work, const Problem& problem, const Machine& machine);

// Whether a configuration is one for that many output blocks.
Status check_panels(std::string_view family, const PairsBlocking& b, std::int64_t out_blocks);

// Calls run(worker, task) for every set of panels of `side` tokens and part of the output blocks.
template <class Run>
void for_each_part(const Call& call, const PairsBlocking& b, Run&& run, std::int64_t side = kPanelTokens) {
  const PanelTasks tasks(call.problem.tokens, b, call.problem.threads, side);
  call.executor.parallel_for(tasks.count(),
                             [&](std::int64_t t, int worker) { run(worker, tasks.task(t, true)); });
}

}  // namespace rarefy::cpu
