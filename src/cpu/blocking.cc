// Scores every cut of a product with a small cycle model, and takes the cheapest.
#include "cpu/blocking.h"

#include <algorithm>
#include <utility>

#include "core/checked.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kSharing = 4;
// Where panels do not share, what they read again of a part of W that is not in L3 beside the other threads'
// parts: cycles a weight. 512 × 4096→11008, 32×1 at 0.25, one thread of a Zen 5: 180 GFLOP/s in one part,
// 208, 219 and 222 in 2, 4 and 6.
constexpr double kAgain = 0.45;

// Features of X that scatter packs at a time; with the sums of a few output blocks they stay in L1.
constexpr std::int64_t kL1Features = 64;

// Where scatter meets the blocks out of their order (columns of W, stored by rows), each entry is in another
// row's page: so many pages of a range of outputs stay in the second TLB. 512 × 4096², 1×16, density 0.5, one
// thread of a Zen 4: 205 ms with all 4096 rows, 149 with 1024, 126 with 512.
constexpr std::int64_t kPages = 640, kPageFloats = 1024;

// What is left of storing an element of Y that leaves along the way. There X may be all of L2: its tiles,
// with sums that wait between them, cost more (4096², 4×1 at a density of 0.5, Zen 4: 96 → 79 ms).
constexpr double kWovenMove = 0.15;
constexpr std::int64_t kWovenPanel = 2;  // of panel_floats

// Features of Y that gather stores at a time: runs of four cache lines (panel.h, store_run), and their sums
// still fit in L1.
constexpr std::int64_t kStoredFeatures = 64;

}  // namespace

// Two FMAs and two loads a cycle, 4 cycles of FMA latency, 32 bytes a cycle out of L2; a part of the L2 time
// is never hidden, and each weight also streams in once per panel. Fitted to Zen 5,
// docs/design/cpu/floats.md has the runs.
double cycles_per_weight(const BlockingProblem& p, int vectors, bool scatter) {
  const std::int64_t stationary = scatter ? p.red_block : p.out_block;
  const int budget = p.registers - vectors - 1;
  int rows = 1;
  for (const int candidate : {2, 4, 8}) {
    if (candidate <= stationary && candidate * vectors <= budget) rows = candidate;
  }
  // Scatter also writes its sums back, over the same path.
  const double line = p.width * 4 * vectors / 32.0 * (scatter ? 2 : 1);
  const double fma = 0.5 * rows * vectors;
  const double loads = 0.5 * (rows + vectors);
  return (std::max({fma, loads, line, 4.0}) + 0.15 * line) / rows + 0.1;
}

namespace {

// Whether panels of so many vectors are woven.
bool weaves(const BlockingProblem& p, bool scatter, std::int64_t vectors) {
  return p.woven && !scatter &&
         p.red_blocks * p.red_block * vectors * p.width <= kWovenPanel * p.panel_floats;
}

// The rest of a blocking whose cut is chosen: equal tiles, so that the last one is no sliver.
Blocking completed(const BlockingProblem& p, Blocking b) {
  const std::int64_t fits = p.panel_floats / (b.panels * b.vectors * p.width * p.red_block);
  const std::int64_t tile = std::max<std::int64_t>(1, fits);
  const std::int64_t tiles = (p.red_blocks + tile - 1) / tile;
  b.tile_blocks = tiles <= 1 ? std::max<std::int64_t>(1, p.red_blocks) : (p.red_blocks + tiles - 1) / tiles;
  if (weaves(p, b.scatter != 0, b.vectors)) b.tile_blocks = std::max<std::int64_t>(1, p.red_blocks);
  if (b.scatter != 0) b.tile_blocks = std::max<std::int64_t>(1, kL1Features / p.red_block);
  b.group = std::max<std::int64_t>(1, kStoredFeatures / p.out_block);
  b.asks = p.asks ? 1 : 0;
  return b;
}

// Calls visit(blocking, cost in cycles) for all that the kernels offer.
template <class F>
void for_each_blocking(const BlockingProblem& p, F&& visit) {
  const double weight_bytes = 4.0 * static_cast<double>(p.entries * p.out_block * p.red_block);
  const int sharers = std::max(2, p.threads);  // of L3, with what else it holds
  const std::int64_t most_splits =
      4 * p.threads + static_cast<std::int64_t>(weight_bytes * sharers / kStreamed);
  const double per_feature = static_cast<double>(p.entries * p.red_block) /
                             static_cast<double>(std::max<std::int64_t>(1, p.out_blocks));
  for (const bool scatter : {false, true}) {
    for (int vectors = 1; vectors <= p.max_vectors; ++vectors) {
      const std::int64_t lanes = static_cast<std::int64_t>(vectors) * p.width;
      const bool woven = weaves(p, scatter, vectors);
      const std::int64_t sharing = scatter || woven || weight_bytes < kStreamed ? 1 : kSharing;
      const std::int64_t panels = (p.tokens + lanes - 1) / lanes;
      const std::int64_t sets = (panels + sharing - 1) / sharing;
      // The last panel may be narrower: 512 tokens are 10 panels of 48 and one of 32.
      const double filled = panels > 0 ? static_cast<double>(ceil_div(p.tokens, p.width)) /
                                             static_cast<double>(panels * vectors)
                                       : 1;
      const std::int64_t out_features = p.out_blocks * p.out_block;
      const std::int64_t red_features = p.red_blocks * p.red_block;
      const double pack = static_cast<double>(red_features * lanes) * kMove;
      const double work =
          static_cast<double>(out_features) * (per_feature * cycles_per_weight(p, vectors, scatter) +
                                               static_cast<double>(lanes) * (woven ? kWovenMove : kMove));
      const std::int64_t pages = std::min(p.out_blocks, p.entries * p.out_block * p.red_block / kPageFloats);
      const std::int64_t least = scatter ? std::max({std::int64_t{1}, out_features * lanes / p.panel_floats,
                                                     p.transposed ? ceil_div(pages, kPages) : 1})
                                         : 1;
      for (std::int64_t splits = least; splits <= std::max(least, most_splits); ++splits) {
        if (splits > std::max<std::int64_t>(1, p.out_blocks)) break;
        const std::int64_t rounds = (sets * splits + p.threads - 1) / p.threads;
        const double part = weight_bytes / static_cast<double>(splits);
        const bool again = sharing == 1 && sets > 1 && part * sharers > kStreamed;
        const double cost = static_cast<double>(rounds * std::min(sharing, panels)) * filled *
                            (pack + work / static_cast<double>(splits) + (again ? part / 4 * kAgain : 0));
        visit(Blocking{scatter, vectors, sharing, splits}, cost);
      }
    }
  }
}

}  // namespace

Blocking choose_blocking(const BlockingProblem& p) {
  return completed(p, cheapest<Blocking>([&](auto&& visit) { for_each_blocking(p, visit); }));
}

std::vector<Blocking> all_blockings(const BlockingProblem& p) {
  std::vector<std::pair<double, Blocking>> scored;
  for_each_blocking(p, [&](const Blocking& b, double cost) { scored.emplace_back(cost, completed(p, b)); });
  std::stable_sort(scored.begin(), scored.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Blocking> all;
  all.reserve(scored.size());
  for (const auto& [cost, blocking] : scored) all.push_back(blocking);
  return all;
}

std::int64_t piece_of_range(std::int64_t out_blocks, std::int64_t splits) {
  return splits <= 1 ? out_blocks : std::min(out_blocks, 2 * ((out_blocks + splits - 1) / splits));
}

std::int32_t begin_of_part(const std::int32_t* begin, std::int64_t blocks, std::int64_t per_entry,
                           std::int64_t per_block, std::int64_t part, std::int64_t parts) {
  if (part == 0) return 0;  // blocks without work belong to the part before them, the first ones to the first
  if (part == parts) return static_cast<std::int32_t>(blocks);
  const auto work = [&](std::int64_t b) { return begin[b] * per_entry + b * per_block; };
  const std::int64_t target = work(blocks) / parts * part + work(blocks) % parts * part / parts;
  std::int64_t low = 0;
  std::int64_t high = blocks;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (work(middle) < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<std::int32_t>(low);
}

}  // namespace rarefy::cpu
