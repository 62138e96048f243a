// What the strip kernel runs and how: supported problems, the choice of a tile shape, the plan of a pattern.
#include "cuda/sm90/strips.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "cuda/sm90/schedule.h"

namespace rarefy::sm90 {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Rates of one SM, fitted to measurements (docs/design/hopper.md).
constexpr double kClock = 1750;          // per microsecond
constexpr double kBytesPerClock = 42;    // from L2 into shared memory, all SMs at once
constexpr double kBlockClocks = 512;     // 64 × 64 × 256 products of one warpgroup
constexpr double kTileClocks = 700;      // writing a tile's sums
constexpr double kStepClocks = 60;       // barriers of a step
constexpr double kLaunchClocks = 16000;  // launch, first loads from device memory, last stores
constexpr double kClusterClocks = 5000;  // more of the same in clusters

// Clocks of a tile with `steps` steps and `blocks` stored 64 × 64 blocks.
double tile_clocks(const StripConfig& c, double steps, double blocks,
                   double bytes_per_clock = kBytesPerClock) {
  const double multiply = blocks * kBlockClocks * c.tokens / 256 + steps * kStepClocks;
  // Three warpgroups wait for one another more often; smaller steps meet more barriers.
  const double wait = c.strips == 3 ? 1.08 : c.tokens == 128 ? 1.2 : 1.0;
  const double w_share = c.cluster == 2 ? 0.85 : 1.0;  // half of the bytes, but each step waits for the peer
  const double copy = wait * (steps * c.tokens * 128 + w_share * blocks * 8192) / bytes_per_clock;
  return std::max(multiply, copy) + kTileClocks * c.tokens / 256;
}

// Slots for blocks of W in the shared memory that the others leave.
int w_room(StripConfig c, const Machine& machine) {
  c.w_slots = 0;
  return std::min((machine.shared_bytes - 512 - c.shared_bytes()) / 8192, c.strips * c.slots);
}

struct Step {
  std::int32_t column, block;
};
using Strip = std::vector<Step>;

std::vector<Strip> strips_of(const StripProblem& p, const HostIndex& index) {
  const std::int64_t high = p.block_rows / 64, wide = p.block_cols / 64;
  const std::int64_t outer = p.transposed ? ceil_div(p.cols, p.block_cols) : ceil_div(p.rows, p.block_rows);
  const std::int64_t across = p.transposed ? wide : high, along = p.transposed ? high : wide;
  std::vector<Strip> strips;
  for (std::int64_t i = 0; i < outer; ++i) {
    for (std::int64_t a = 0; a < across; ++a) {
      if ((i * across + a) * 64 >= p.out_features()) break;  // nothing but padding
      Strip& strip = strips.emplace_back();
      for (std::int32_t e = index.offsets[i]; e < index.offsets[i + 1]; ++e) {
        const std::int64_t entry = index.entries == nullptr ? e : index.entries[e];
        for (std::int64_t k = 0; k < along; ++k) {
          const std::int64_t column = index.others[e] * along + k;
          if (column * 64 >= p.in_features()) break;
          const std::int64_t r = p.transposed ? k : a, c = p.transposed ? a : k;
          strip.push_back(
              {static_cast<std::int32_t>(column), static_cast<std::int32_t>((entry * high + r) * wide + c)});
        }
      }
    }
  }
  return strips;
}

// Groups of `size` strips whose columns overlap most, greedily from the longest strip on; -1 fills the last.
std::vector<std::vector<int>> group_strips(const std::vector<Strip>& strips, std::int64_t columns, int size) {
  const auto words = static_cast<std::size_t>(ceil_div(columns, 64));
  std::vector<std::vector<std::uint64_t>> bits(strips.size(), std::vector<std::uint64_t>(words));
  for (std::size_t i = 0; i < strips.size(); ++i) {
    for (const Step& s : strips[i])
      bits[i][static_cast<std::size_t>(s.column / 64)] |= 1ull << (s.column % 64);
  }
  std::vector<int> left(strips.size());
  std::iota(left.begin(), left.end(), 0);
  std::stable_sort(left.begin(), left.end(), [&](int a, int b) {
    return strips[static_cast<std::size_t>(a)].size() > strips[static_cast<std::size_t>(b)].size();
  });
  std::vector<std::vector<int>> groups;
  while (!left.empty()) {
    std::vector<int>& group = groups.emplace_back();
    std::vector<std::uint64_t> joined(words);
    while (std::ssize(group) < size && !left.empty()) {
      std::size_t best = 0;
      int best_score = -1;
      for (std::size_t i = 0; i < left.size() && !group.empty(); ++i) {
        int shared = 0;
        for (std::size_t w = 0; w < words; ++w) {
          shared += std::popcount(joined[w] & bits[static_cast<std::size_t>(left[i])][w]);
        }
        if (shared > best_score) {
          best_score = shared;
          best = i;
        }
      }
      group.push_back(left[best]);
      for (std::size_t w = 0; w < words; ++w) joined[w] |= bits[static_cast<std::size_t>(left[best])][w];
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(best));
    }
    group.resize(static_cast<std::size_t>(size), -1);
  }
  return groups;
}

struct Group {
  std::vector<int> strips;  // -1: none
  std::int64_t first = 0, steps = 0, blocks = 0;
  double clocks = 0;
};

// Joins the strips' columns into steps, each four words.
Group join(const std::vector<Strip>& strips, std::vector<int> members, const StripConfig& config,
           std::vector<std::int32_t>& words) {
  Group group{std::move(members), std::ssize(words) / 4};
  std::vector<std::size_t> at(group.strips.size(), 0);
  for (;;) {
    std::int32_t column = INT32_MAX;
    const auto head = [&](std::size_t s) -> const Step* {
      if (group.strips[s] < 0) return nullptr;
      const Strip& strip = strips[static_cast<std::size_t>(group.strips[s])];
      return at[s] < strip.size() ? &strip[at[s]] : nullptr;
    };
    for (std::size_t s = 0; s < at.size(); ++s) {
      if (const Step* step = head(s)) column = std::min(column, step->column);
    }
    if (column == INT32_MAX) break;
    std::int32_t step_words[4] = {column, -1, -1, -1};
    for (std::size_t s = 0; s < at.size(); ++s) {
      const Step* step = head(s);
      if (step == nullptr || step->column != column) continue;
      step_words[1 + s] = step->block;
      ++at[s];
      ++group.blocks;
    }
    words.insert(words.end(), step_words, step_words + 4);
    ++group.steps;
  }
  group.clocks = tile_clocks(config, static_cast<double>(group.steps), static_cast<double>(group.blocks));
  return group;
}

}  // namespace

double StripProblem::density() const {
  const std::int64_t all = ceil_div(rows, block_rows) * ceil_div(cols, block_cols);
  return all == 0 ? 0 : static_cast<double>(blocks) / static_cast<double>(all);
}

int StripConfig::shared_bytes() const {
  return 1024 + slots * tokens * 128 + w_slots * 8192 + strips * 2 * 8192;
}

std::string StripConfig::text() const {
  return "strips=" + std::to_string(strips) + " tokens=" + std::to_string(tokens) +
         " cluster=" + std::to_string(cluster) + " slots=" + std::to_string(slots) +
         " w_slots=" + std::to_string(w_slots);
}

std::string unsupported(const StripProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.block_rows % 64 != 0 || p.block_cols % 64 != 0) return "block sides must be multiples of 64";
  if (p.x_stride % 8 != 0 || p.y_stride % 8 != 0) return "TMA needs rows of X and Y 16 bytes apart";
  if (p.x_stride < p.in_features() || p.y_stride < p.out_features())
    return "TMA needs rows that do not overlap";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX || p.blocks * p.block_rows > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (p.transposed && p.activation != Activation::none) return "grad_input has no activation";
  return {};
}

std::vector<StripCandidate> strip_candidates(const StripProblem& p, const Machine& machine) {
  const double density = p.density();
  const double columns = static_cast<double>(ceil_div(p.in_features(), 64));
  const std::int64_t strips = ceil_div(p.out_features(), 64);
  // Strips of one block row have the same columns.
  const std::int64_t alike = (p.transposed ? p.block_cols : p.block_rows) / 64;
  std::vector<StripCandidate> list;
  struct Shape {
    int strips, tokens, cluster;
  };
  for (const auto& [n, tokens, cluster] : {Shape{2, 256, 1}, {2, 256, 2}, {3, 256, 1}, {2, 128, 1}}) {
    StripCandidate& candidate = list.emplace_back();
    StripConfig& c = candidate.config = {n, tokens, cluster, 0, 0};
    const double distinct = std::ceil(static_cast<double>(n) / static_cast<double>(alike));
    const double steps = columns * (1 - std::pow(1 - density, distinct));
    const double blocks = columns * density * n;
    // As many steps as leave room for the blocks of W that they have on average.
    const double per_step = steps > 0 ? blocks / steps : n;
    for (c.slots = 8; c.slots > 2; --c.slots) {
      c.w_slots = w_room(c, machine);
      if (c.w_slots >= std::max(per_step * c.slots, 1.0 * n)) break;
    }
    c.w_slots = w_room(c, machine);

    const std::int64_t token_tiles = ceil_div(p.tokens, c.tokens);
    const double tiles = static_cast<double>(ceil_div(strips, n) * ceil_div(token_tiles, cluster));
    const double clusters = machine.sms / cluster;
    const double rounds = tiles <= clusters ? 1 : std::max(tiles / clusters, 1.0);
    // Few thread blocks have L2 to themselves, up to what one SM takes.
    const double bandwidth = std::min(64.0, kBytesPerClock * std::max(1.0, clusters / tiles));
    candidate.microseconds =
        (rounds * tile_clocks(c, steps, blocks, bandwidth) + kLaunchClocks + (cluster - 1) * kClusterClocks) /
        kClock;
    if (cluster > 1 && token_tiles < cluster) candidate.reason = "fewer token tiles than blocks of a cluster";
  }
  return list;
}

StripConfig configure(const StripProblem& problem, const Machine& machine) {
  const std::vector<StripCandidate> list = strip_candidates(problem, machine);
  const StripCandidate* best = nullptr;
  for (const StripCandidate& candidate : list) {
    if (!candidate.reason.empty()) continue;
    if (best == nullptr || candidate.microseconds < best->microseconds) best = &candidate;
  }
  return best->config;
}

StripPlan prepare(const StripProblem& p, const StripConfig& config, const Machine& machine,
                  const HostIndex& index) {
  const std::vector<Strip> strips = strips_of(p, index);
  std::vector<std::int32_t> steps;
  std::vector<Group> groups;
  for (auto& members : group_strips(strips, ceil_div(p.in_features(), 64), config.strips)) {
    groups.push_back(join(strips, std::move(members), config, steps));
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const Group& a, const Group& b) { return a.clocks > b.clocks; });

  const std::int64_t token_tiles = ceil_div(ceil_div(p.tokens, config.tokens), config.cluster);
  const std::vector<Tile> tiles =
      tile_order(std::ssize(groups), token_tiles, p.blocks * p.block_rows * p.block_cols * 2);
  const auto clocks = [&] {
    std::vector<double> list;
    for (const Group& g : groups) list.push_back(g.clocks);
    return list;
  };

  // What is left of the last round is cut into single strips if all end sooner so.
  const auto clusters = static_cast<std::int64_t>(machine.sms / config.cluster);
  Schedule schedule = assign(tiles, clocks(), clusters);
  const std::int64_t rest = std::ssize(tiles) % clusters;
  std::vector<Tile> cut(tiles.begin(), tiles.end() - rest);
  std::vector<std::int64_t> single(groups.size(), -1);  // of a group: its first strip as a group
  const std::size_t whole_groups = groups.size(), whole_steps = steps.size();
  for (std::int64_t i = std::ssize(tiles) - rest; i < std::ssize(tiles); ++i) {
    const Tile tile = tiles[static_cast<std::size_t>(i)];
    std::int64_t& first = single[static_cast<std::size_t>(tile.group)];
    const std::vector<int> members = groups[static_cast<std::size_t>(tile.group)].strips;
    if (first < 0) {
      first = std::ssize(groups);
      for (std::size_t s = 0; s < members.size(); ++s) {
        std::vector<int> alone(members.size(), -1);
        alone[s] = members[s];
        groups.push_back(join(strips, std::move(alone), config, steps));
      }
    }
    for (std::size_t s = 0; s < members.size(); ++s) {
      if (members[s] >= 0) cut.push_back({static_cast<int>(first) + static_cast<int>(s), tile.token_tile});
    }
  }
  if (Schedule finer = assign(cut, clocks(), clusters); finer.clocks < 0.98 * schedule.clocks) {
    schedule = std::move(finer);
  } else {
    groups.resize(whole_groups);
    steps.resize(whole_steps);
  }

  StripPlan plan;
  plan.clusters = static_cast<int>(std::ssize(schedule.lists));
  std::vector<std::int32_t>& words = plan.words;
  append_ranges(schedule, words);
  plan.tiles_at = std::ssize(words);
  for (const auto& list : schedule.lists) {
    plan.tiles += std::ssize(list);
    for (const Tile& tile : list) {
      const Group& g = groups[static_cast<std::size_t>(tile.group)];
      words.insert(words.end(), {static_cast<std::int32_t>(g.first), static_cast<std::int32_t>(g.steps),
                                 tile.token_tile, 0});
      for (std::size_t s = 0; s < 4; ++s) words.push_back(s < g.strips.size() ? g.strips[s] : -1);
    }
  }
  pad_to_line(words);
  plan.steps_at = std::ssize(words);
  words.insert(words.end(), steps.begin(), steps.end());
  plan.steps = std::ssize(steps) / 4;
  plan.clocks = schedule.clocks;
  return plan;
}

}  // namespace rarefy::sm90
