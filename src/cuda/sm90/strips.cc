// What the strip kernel runs and how: supported problems, the choice of a tile shape, the order of tiles.
#include "cuda/sm90/strips.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "cuda/sm90/parts.h"

namespace rarefy::sm90 {
namespace {

// Rates of one SM, fitted to 3,800 measurements in a chain and 42 of many tokens
// (docs/design/hopper/shapes.md): 6 % off in the median, and what is chosen by them takes 3 % longer than the
// best, as much as two runs differ. What is around them, since launches overlap, to 1,290 with up to 1,024
// tokens: 12 % off, and 1.5 % longer.
constexpr double kClock = 1750;           // per microsecond
constexpr double kBytesPerClock = 53.3;   // from L2 into shared memory, all SMs at once
constexpr double kFew = 63.5;             // the most of few SMs
constexpr double kBlockClocks = 612;      // 64 × 64 × 256 products of one warpgroup
constexpr double kShortStep = 60;         // more of a step of 64 tokens
constexpr double kTileClocks = 2390;      // writing the sums of 256 tokens
constexpr double kCut = 1.12;             // the last tiles cut into strips
constexpr Exchange kExchange{4610, 2.7};  // of parts
// Tiles of one strip, an H200: the exchange of parts, and of each step what a warpgroup waits for its
// product.
constexpr Exchange kExchangeAlone{2300, 2.7, 300};
constexpr double kAloneStep = 330;
constexpr double kWaitInParts = 1.45;    // of three warpgroups, more than of tiles in lists
constexpr double kUneven = 0.88;         // of a deviation that the longest tiles of a round are behind others
constexpr double kLaunchClocks = 10860;  // launch, first loads, last stores
constexpr double kClusterClocks = 5000;  // more of the same in clusters

// Of copies: smaller steps meet more barriers, and three warpgroups wait for one another more often.
double waiting(const StripConfig& c) {
  if (c.tokens <= 128) return c.strips == 3 ? 1.165 : 1.19;
  if (c.tokens == 192) return c.strips == 3 ? 1.2 : 1.03;
  return c.strips == 3 ? 1.3 : 1;
}

constexpr std::int64_t kMostFeatures = (1 << 22) - 64;  // strips and overlaps are 16-bit in the plan

constexpr int kStateBytes = 2048;  // StripState, and what the system takes

// Clocks of a tile with `steps` steps and `blocks` stored 64 × 64 blocks.
double tile_clocks(const StripConfig& c, double steps, double blocks, double bytes_per_clock) {
  const double multiply = blocks * kBlockClocks * c.tokens / 256;
  const double w_share = c.cluster == 2 ? 0.85 : 1.0;  // half of the bytes, but each step waits for the peer
  const double copy = waiting(c) * (steps * c.tokens * 128 + w_share * blocks * 8192) / bytes_per_clock +
                      (c.tokens == 64 ? steps * kShortStep : 0);
  return std::max(multiply, copy) + kTileClocks * c.tokens / 256;
}

// Slots for blocks of W in the shared memory that the others leave.
int w_room(StripConfig c, const Machine& machine) {
  c.w_slots = 0;
  return std::min((machine.shared_bytes - kStateBytes - c.shared_bytes()) / 8192, c.strips * c.slots);
}

}  // namespace

StripPlan::StripPlan(const StripProblem& p, int thread_blocks)
    : groups(static_cast<int>(p.groups())),
      size(p.group_size()),
      sms(std::min(thread_blocks, kMostClusters)) {
  const auto take = [&](std::int64_t count) {
    const std::int64_t at = words;
    words += (count + 31) / 32 * 32;
    return at;
  };
  const std::int64_t rows = p.transposed ? ceil_div(p.cols, p.block_cols) : ceil_div(p.rows, p.block_rows);
  const std::int64_t columns = ceil_div(p.in_features(), 64);
  groups_at = take(8 * p.groups());
  steps_at = take(4 * p.groups() * columns);
  for (int i = 0; i < (size == 2 ? 2 : 1); ++i) {
    const StripLists l = lists(i + 1);
    items_at[i] = take(2 * std::int64_t{l.begin(l.levels())});
  }
  // Columns of each block row as bits, how many; strips by falling length and their columns; of each group
  // strips, clocks and steps.
  const std::int64_t bits = ceil_div(columns, 32);
  scratch_at =
      take(rows * (bits + 1) + p.strips() + group_words(p.strips(), bits) + (kMostGroup + 2) * p.groups());
}

int StripConfig::shared_bytes() const { return 1024 + ring_bytes() + strips * 2 * 8192; }

std::string StripConfig::text() const {
  return "strips=" + std::to_string(strips) + " tokens=" + std::to_string(tokens) +
         " cluster=" + std::to_string(cluster) + " slots=" + std::to_string(slots) +
         " w_slots=" + std::to_string(w_slots) + " split=" + std::to_string(split) +
         " alone=" + std::to_string(static_cast<int>(alone));
}

std::string unsupported(const StripProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 64 != 0 || p.block_cols % 64 != 0) return "block sides must be multiples of 64";
  if (p.x_stride % 8 != 0 || p.y_stride % 8 != 0) return "TMA needs rows of X and Y 16 bytes apart";
  if (p.x_stride < p.in_features() || p.y_stride < p.out_features())
    return "TMA needs rows that do not overlap";
  if (!p.pieces_fit(8)) return "TMA writes rows of Y in pieces of 16 bytes";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX || p.blocks * p.block_rows > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (p.in_features() > kMostFeatures || p.out_features() > kMostFeatures)
    return "grouping strips takes less than 2^22 features";
  if (p.groups() * ceil_div(p.tokens, 64) > INT32_MAX / 4) return "tiles are counted in 32 bits";
  if (p.transposed && p.activation != Activation::none) return "grad_input has no activation";
  return {};
}

std::vector<StripCandidate> strip_candidates(const StripProblem& p, const Machine& machine) {
  const double density = p.density();
  const auto columns = static_cast<double>(ceil_div(p.in_features(), 64));
  // Strips of one block row have the same columns.
  const std::int64_t alike = p.block_out() / 64;
  std::vector<StripCandidate> list;
  struct Shape {
    int strips, tokens, cluster;
  };
  for (const Shape& shape : {Shape{2, 256, 1},
                             {2, 256, 2},
                             {2, 192, 1},
                             {2, 128, 1},
                             {2, 64, 1},
                             {3, 256, 1},
                             {3, 192, 1},
                             {3, 128, 1},
                             {3, 64, 1}}) {
    const int n = shape.strips, tokens = shape.tokens, cluster = shape.cluster;
    if (n != p.group_size()) continue;
    StripCandidate& candidate = list.emplace_back();
    StripConfig& c = candidate.config = {n, tokens, cluster, 0, 0};
    const double distinct = std::ceil(static_cast<double>(n) / static_cast<double>(alike));
    const double steps = columns * (1 - std::pow(1 - density, distinct));
    const double blocks = columns * density * n;
    // As many steps as leave room for the blocks of W that they have on average.
    const double per_step = steps > 0 ? std::min(blocks / steps, 1.0 * n) : n;  // rounded, it may be more
    for (c.slots = 8; c.slots > 2; --c.slots) {
      c.w_slots = w_room(c, machine);
      if (c.w_slots >= std::max(per_step * c.slots, 1.0 * n)) break;
    }
    c.w_slots = w_room(c, machine);

    const std::int64_t token_tiles = ceil_div(p.tokens, std::int64_t{c.tokens});
    const std::int64_t tiles = p.groups() * ceil_div(token_tiles, cluster);
    const int whole = machine.sms / cluster;  // clusters at a time
    const double clusters = whole;
    const ListChoice rounds({static_cast<int>(p.groups()), n, whole},
                            static_cast<int>(ceil_div(token_tiles, std::int64_t{cluster})));
    // Few thread blocks have L2 to themselves, up to what one SM takes.
    const auto bandwidth = [&](double blocks_at_work) {
      return std::min(kFew, kBytesPerClock * std::max(1.0, clusters / blocks_at_work));
    };
    const auto part_clocks = [&](int parts) {
      const double wait = parts > 1 && n == 3 ? kWaitInParts : 1;
      return tile_clocks(c, steps / parts, blocks / parts,
                         bandwidth(static_cast<double>(tiles * parts)) / wait);
    };
    // Of block rows that store as many as others but for what is random.
    const double in_row = density * static_cast<double>(p.in_features()) / static_cast<double>(p.block_in());
    const double deviation = in_row > 0 ? std::sqrt((1 - density) / in_row / distinct) : 0;
    double all =
        rounds.whole * part_clocks(1) * (1 + kUneven * deviation / std::max(1.0, rounds.whole + rounds.cut));
    const auto alone_clocks = [&](double its, double at_work) {  // of so many blocks, and steps
      const double multiplied = its * (kBlockClocks * c.tokens / 256 + kAloneStep) + kTileClocks / 2;
      return std::max(tile_clocks(c, its, its, bandwidth(at_work)), multiplied);
    };
    if (rounds.cut > 0) {
      const auto strips_alone = static_cast<double>(std::max<std::int64_t>(1, tiles % whole) * n);
      all += rounds.whole > 0
                 ? rounds.cut * kCut * tile_clocks(c, blocks / n, blocks / n, bandwidth(strips_alone))
                 : rounds.cut * alone_clocks(blocks / n, strips_alone);
    }
    if (cluster == 1) {
      const double in_lists = all;
      for (const bool alone : {false, true}) {
        const auto clocks = [&](int parts) {
          if (parts == 1) return in_lists;
          if (!alone) return part_clocks(parts) + kExchange(p.tokens, n);
          return alone_clocks(blocks / n / parts, static_cast<double>(tiles * n * parts)) +
                 kExchangeAlone(p.tokens, 1, parts);
        };
        int split = best_parts(alone ? tiles * n : tiles, machine.sms, clocks);
        while (!parts_fit(split, c.tokens, n, c.ring_bytes())) --split;
        if (split > 1 && clocks(split) < all) c.split = split, c.alone = alone, all = clocks(split);
      }
    }
    candidate.microseconds = (all + kLaunchClocks + (cluster - 1) * kClusterClocks) / kClock;
    if (cluster > 1 && token_tiles < cluster) candidate.reason = "fewer token tiles than blocks of a cluster";
  }
  return list;
}

StripConfig configure(const StripProblem& problem, const Machine& machine) {
  const std::vector<StripCandidate> list = strip_candidates(problem, machine);
  const StripCandidate* best = &list.front();  // needs no cluster, so nothing speaks against it
  for (const StripCandidate& candidate : list) {
    if (candidate.reason.empty() && candidate.microseconds < best->microseconds) best = &candidate;
  }
  return best->config;
}

}  // namespace rarefy::sm90
