// Which weight gradients the kernel takes, and how it cuts them.
#include "cuda/sm90/block_gradient.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numbers>
#include <utility>

#include "cuda/sm90/parts.h"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Rows that tiles are cut from, and what blocks at random make of one: `cells` that store with probability p,
// `columns` panels each.
struct Rows {
  double count, p;
  std::int64_t cells, columns;
};

Rows rows_of(const GradientProblem& problem, const GradientConfig& c) {
  const std::int64_t block_cols = ceil_div(problem.cols, problem.block_cols);
  const auto all = static_cast<double>(std::max<std::int64_t>(1, problem.block_row_count() * block_cols));
  const double density = static_cast<double>(problem.blocks) / all;
  if (c.wide == 64) {
    const std::int64_t tiles = problem.block_rows / 64 / c.shape().strips();
    return {static_cast<double>(problem.block_row_count() * tiles), density, block_cols,
            problem.block_cols / 64};
  }
  const double blocks = std::max(1., 64. * c.shape().strips() / static_cast<double>(problem.block_rows)) *
                        std::max(1., c.wide / static_cast<double>(problem.block_cols));
  return {static_cast<double>(union_rows(problem, c)), 1 - std::pow(1 - density, blocks),
          ceil_div(block_cols * problem.block_cols, c.wide), 1};
}

// Tiles alike: bytes of a step of 64 tokens (f32: 32), and its clocks: of products at 89 % of the tensor
// cores' rate, of 60 bytes from L2, or of two rows of boxes in three, of 128 bytes or fewer
// (docs/design/hopper.md); and the clocks that it takes among few others.
struct Tiles {
  double bytes, clocks, least;
  std::int64_t count;
};

// Stirling's series, within 6e-4; std::lgamma writes to a global.
double log_factorial(double n) {
  if (n < 1) return 0;
  return (n + .5) * std::log(n) - n + .5 * std::log(2 * std::numbers::pi) + 1 / (12 * n) -
         1 / (360 * n * n * n);
}

std::vector<Tiles> expected_tiles(const GradientProblem& problem, const GradientConfig& c) {
  const TileShape shape = c.shape();
  const Rows rows = rows_of(problem, c);
  const auto tiles_of = [&](int columns, int parts, int quarters, std::int64_t count) -> Tiles {
    const double bytes = columns * shape.wide * 128. + parts * shape.strips() * 8192.,
                 boxes = columns * (transposes(problem, c) ? shape.wide : 64.) + parts * shape.strips() * 64.;
    // A quarter reads 6 KB for each 16 tokens, of shared memory's 128 bytes a clock, which also takes what
    // comes. What narrow panels cost was fitted without that.
    const double shared = c.wide == 64 ? (quarters * 24576. + bytes) / 121 : 0;
    const double products = quarters * 288.;
    return {bytes, std::max({products, bytes / 60, 1.5 * boxes, shared}), std::max(products, bytes / 66),
            count};
  };
  double whole = 0, rest[kMostColumns] = {}, even[kMostColumns + 1] = {};
  const auto n = static_cast<double>(rows.cells), p = rows.p;
  const auto add = [&](double k, double share) {
    const std::int64_t columns = static_cast<std::int64_t>(k) * rows.columns,
                       tiles = columns / shape.columns();
    if (shape.even) {
      const std::int64_t cut = ceil_div(columns, shape.columns());
      if (cut > 0) even[ceil_div(columns, cut)] += rows.count * share * static_cast<double>(cut);
      return;
    }
    whole += rows.count * share * static_cast<double>(tiles);
    rest[columns % shape.columns()] += rows.count * share;
  };
  // Binomial: from its summit down on both sides.
  const double summit = p <= 0 ? 0 : std::min(n, std::floor((n + 1) * p));
  const double top = p <= 0 || p >= 1
                         ? 1
                         : std::exp(log_factorial(n) - log_factorial(summit) - log_factorial(n - summit) +
                                    summit * std::log(p) + (n - summit) * std::log1p(-p));
  add(summit, top);
  if (p > 0 && p < 1) {
    double share = top;
    for (double k = summit; k < n && share > 1e-6; ++k) add(k + 1, share *= (n - k) / (k + 1) * p / (1 - p));
    share = top;
    for (double k = summit; k > 0 && share > 1e-6; --k) add(k - 1, share *= k / (n - k + 1) * (1 - p) / p);
  }
  if (shape.even) {
    std::vector<Tiles> tiles;
    double expected = 0;
    std::int64_t so_far = 0;
    for (int w = shape.columns(); w > 0; --w) {
      expected += 1.01 * even[w];  // a pattern may well have some more
      const std::int64_t count = std::llround(expected) - so_far;
      so_far += count;
      if (count > 0) tiles.push_back(tiles_of(w, 1, shape.quarters(w), count));
    }
    return tiles;
  }
  std::vector<Tiles> tiles{
      tiles_of(shape.columns(), 1, shape.quarters(shape.columns()), std::llround(whole))};
  int left[kMostColumns] = {};
  for (int w = 1; w < kMostColumns; ++w) left[w] = static_cast<int>(std::lround(rest[w]));
  pair_rests(shape, left, [&](int w, int v, int count) {
    tiles.push_back(tiles_of(w + v, v > 0 ? 2 : 1, shape.quarters(w) + shape.quarters(v), count));
    return false;
  });
  // A pattern may well have some more: what is left of rows is spread evenly, a deviation of sqrt(1 / 12)
  // each.
  const bool rests = rows.columns % shape.columns() != 0;
  if (c.wide == 64 && rests && p > 0 && p < 1) tiles.back().count += std::llround(std::sqrt(rows.count / 12));
  return tiles;
}

// When the last of them is ready, in clocks: each begins where it can first, and L2 has 45 bytes a clock and
// SM for all together.
double makespan(const std::vector<Tiles>& all, double steps, double around, int places) {
  struct Level {  // so many places are free from then on
    double clocks;
    std::int64_t places;
  };
  std::vector<Level> levels{{0, places}};  // latest first
  double last = 0, bytes = 0;
  for (const Tiles& tiles : all) {
    bytes += steps * tiles.bytes * static_cast<double>(tiles.count);
    for (std::int64_t left = tiles.count; left > 0;) {
      Level& first = levels.back();
      const std::int64_t now = std::min(left, first.places);
      const double end = first.clocks + steps * tiles.clocks + around;
      left -= now;
      first.places -= now;
      if (first.places == 0) levels.pop_back();
      const auto at =
          std::find_if(levels.begin(), levels.end(), [&](const Level& l) { return l.clocks <= end; });
      if (at != levels.end() && at->clocks == end) {
        at->places += now;
      } else {
        levels.insert(at, {end, now});
      }
      last = std::max(last, end);
    }
  }
  return std::max(last, bytes / (45. * places) + around);
}

double count_of(const std::vector<Tiles>& tiles) {
  double count = 0;
  for (const Tiles& its : tiles) count += static_cast<double>(its.count);
  return count;
}

// Tiles of one launch: a thread block each, or `split` that share the tokens. All of X and dY passes by in a
// round, a part of them still in L2.
double launch_microseconds(const GradientProblem& p, const GradientConfig& c, int split,
                           const Machine& machine, const std::vector<Tiles>& tiles) {
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const double steps = static_cast<double>(ceil_div(p.tokens, 128 / size)) / split;
  // The first loads; sums on their way out. In a queue the next tile's first loads are beside them.
  const bool queued = split == 1 && c.queues > 0;
  const double around = split > 1 ? 14200 : queued ? 1500 : 5000, before = queued ? 3500 : 0;
  const int places = std::max(1, clusters_at_once(machine.sms, split));
  const double rounds = std::max(1., count_of(tiles) / places);
  const double memory = rounds * static_cast<double>(p.tokens * (p.rows + p.cols) * size) / 6e6;
  // Tiles that do not end together do not begin together, and no longer find each other's panels in L2.
  // So tiles of one strip, whose bytes limit, where a call's last round is one of this kind; halves of these
  // ask for dY twice as often.
  const bool limited = c.wide == 64 && !c.two;
  const double apart = limited && c.most > 0        ? 1.2
                       : rounds <= 1 || c.alone > 0 ? 1
                       : c.even                     ? 1.15
                       : limited                    ? 1.03
                                                    : 1;
  return std::max(memory, (before + apart * makespan(tiles, steps, around, places)) / 1750);
}

// Panels of 64 in one round: of its longest tile, what L2 gives and what memory gives of the rows and columns
// that any block wants, the longest. Fitted to 102 products of 768 to 5120 features in six ways each, an
// H200: 7 % off; as if there were rounds, 29 %, and the way that was chosen took 4 % longer than the best
// one.
double one_round_microseconds(const GradientProblem& p, const GradientConfig& c, const Machine& machine,
                              const std::vector<Tiles>& tiles) {
  constexpr double kL2 = 9.1e6 / 132, kMemory = 4.25e6;                 // bytes of a microsecond
  const double around = c.split == 4 ? 12.7 : c.split == 2 ? 10.8 : 8;  // alone; in a chain 3 less
  // Clocks fall where more than 80 of 132 SMs multiply at one time.
  const double busy = count_of(tiles) * c.split / machine.sms, clock = 1900 - 1200 * std::max(0., busy - .6);
  double longest = 0, bytes = 0;  // of a step
  for (const Tiles& its : tiles) {
    if (its.count > 0) longest = std::max(longest, its.least);
    bytes += its.bytes * static_cast<double>(its.count) * c.split;
  }
  const auto block_rows = static_cast<double>(p.block_row_count()),
             block_cols = static_cast<double>(ceil_div(p.cols, p.block_cols));
  const double empty = 1 - static_cast<double>(p.blocks) / (block_rows * block_cols),
               features = static_cast<double>(p.rows) * (1 - std::pow(empty, block_cols)) +
                          static_cast<double>(p.cols) * (1 - std::pow(empty, block_rows));
  const double steps = static_cast<double>(ceil_div(p.tokens, 64)) / c.split;
  return around + std::max({steps * longest / clock, steps * bytes / (kL2 * machine.sms),
                            static_cast<double>(p.tokens * 2) * features / kMemory});
}

double rounds_microseconds(const GradientProblem& p, const GradientConfig& c, const Machine& machine,
                           const std::vector<Tiles>& tiles) {
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  const double around = 5 + (transposes(p, c) ? transpose_microseconds(p.tokens * p.cols * size) : 0);
  if (c.alone == 0) return around + launch_microseconds(p, c, c.split, machine, tiles);
  std::vector<Tiles> alone, shared;
  std::int64_t left = c.alone;
  for (const Tiles& its : tiles) {
    const std::int64_t first = std::min(left, its.count);
    left -= first;
    const auto some = [&](std::int64_t count) {
      Tiles part = its;
      part.count = count;
      return part;
    };
    if (first > 0) alone.push_back(some(first));
    if (its.count > first) shared.push_back(some(its.count - first));
  }
  constexpr double kSecond = 4;  // what a second launch takes
  return around + launch_microseconds(p, c, 1, machine, alone) +
         launch_microseconds(p, c, c.split, machine, shared) + kSecond;
}

double predicted_microseconds(const GradientProblem& p, const GradientConfig& c, const Machine& machine,
                              const std::vector<Tiles>& tiles) {
  const bool one_round = c.wide == 64 && !transposes(p, c) && c.alone == 0 &&
                         count_of(tiles) <= clusters_at_once(machine.sms, c.split);
  return one_round ? one_round_microseconds(p, c, machine, tiles) : rounds_microseconds(p, c, machine, tiles);
}

// Ways to share tokens: all tiles alike, or those of the last round alone. After many rounds that is worth
// little; and of narrow panels those that begin apart cost more.
std::vector<GradientConfig> shares_of(const GradientConfig& cut, const Machine& machine,
                                      const std::vector<Tiles>& tiles) {
  constexpr int kMostRounds = 4;
  const auto count = static_cast<int>(count_of(tiles)), rounds = count / std::max(1, machine.sms);
  std::vector<GradientConfig> all;
  for (const int split : {1, 2, 4}) {
    GradientConfig config = cut;
    config.split = split;
    if (split == 1 && cut.wide == 64) config.queues = machine.sms;
    all.push_back(config);
    if (split == 1 || cut.wide < 64 || rounds == 0 || rounds > kMostRounds) continue;
    config.alone = rounds * machine.sms;
    config.shared = (count - config.alone) * 9 / 8 + 4;  // a pattern may well have some more
    config.queues = machine.sms;
    all.push_back(config);
  }
  return all;
}

std::int64_t panels_touched(std::int64_t side, std::int64_t panel) {  // by a block
  return side % panel == 0 ? side / panel : panel % side == 0 ? 1 : side / panel + 2;
}

// A way to cut rows into tiles, and what that makes of a pattern.
struct Tiling {
  GradientConfig config;
  std::vector<Tiles> tiles;
};

// What is prepared together: a way, and with panels of 64 the same in tiles of half the size.
struct Cut {
  std::vector<Tiling> tilings;
  // The best of all splits with a typical number of tokens: of whole tiles in rounds; of all tiles, as
  // predicted.
  double typically = INFINITY, at_best = INFINITY;
};

std::vector<Cut> cuts_of(const GradientProblem& p, const Machine& machine) {
  GradientProblem typical = p;
  typical.tokens = 8192;
  std::vector<Cut> cuts;
  const auto add = [&](const GradientConfig& config, double worth) {
    Cut& cut = cuts.emplace_back(Cut{{{config, expected_tiles(p, config)}}});
    if (config.wide == 64) {
      const GradientConfig half = half_tiles(config);
      cut.tilings.push_back({half, expected_tiles(p, half)});
    }
    for (const Tiling& tiling : cut.tilings) {
      const bool whole = &tiling == &cut.tilings.front();
      for (const GradientConfig& shared : shares_of(tiling.config, machine, tiling.tiles)) {
        if (shared.alone > 0) continue;  // fits fewer tokens less
        const auto keep_least = [&](double& least, auto&& microseconds) {
          least = std::min(least, worth * microseconds(typical, shared, machine, tiling.tiles));
        };
        if (whole) keep_least(cut.typically, rounds_microseconds);
        keep_least(cut.at_best, predicted_microseconds);
      }
    }
  };
  for (const bool two : {true, false}) {
    if (p.whole()) {
      if (two != (p.block_rows % 128 == 0)) continue;
      for (const bool pairs : {true, false})
        add({1, 64, two, pairs}, pairs ? 1 : 1.01);  // of equal ones, fewer tiles
      continue;
    }
    for (const int wide : {32, 16}) {
      if (wide == 16 && p.block_cols % 32 == 0) continue;
      const int most = TileShape{wide, two, false}.columns();
      for (int columns = most; columns > most / 2; columns -= most / (two ? 8 : 16)) {
        const double worth =
            wide == 16 && p.dtype != DType::f32 ? 1.05 : 1;  // a workspace as large as X is worth some gain
        add({1, wide, two, true, false, columns}, worth);
        add({1, wide, two, false, true, columns}, worth);
      }
    }
  }
  return cuts;
}

// The weight alone decides how tiles are cut, as what is prepared follows it.
std::size_t best_of(const std::vector<Cut>& cuts) {
  const auto best = std::min_element(cuts.begin(), cuts.end(),
                                     [](const Cut& a, const Cut& b) { return a.typically < b.typically; });
  // Another way where few tiles make it much better: twice what predictions of these are off.
  const auto rival = std::min_element(cuts.begin(), cuts.end(),
                                      [](const Cut& a, const Cut& b) { return a.at_best < b.at_best; });
  return static_cast<std::size_t>((rival->at_best < .85 * best->at_best ? rival : best) - cuts.begin());
}

std::vector<GradientCandidate> candidates_of(const GradientProblem& p, const Machine& machine,
                                             const Cut& cut) {
  std::vector<GradientCandidate> list;
  for (const Tiling& tiling : cut.tilings) {
    for (const GradientConfig& config : shares_of(tiling.config, machine, tiling.tiles)) {
      list.push_back({config, predicted_microseconds(p, config, machine, tiling.tiles), {}});
      if (config.split > ceil_div(p.tokens, 64)) list.back().reason = "fewer than 64 tokens for each share";
    }
  }
  return list;
}

// The best cut, remembered for the weights of a model: it takes up to 0.2 ms to find.
const Cut& best_cut(const GradientProblem& p, const Machine& machine) {
  using Weight = std::array<std::int64_t, 7>;
  thread_local std::map<Weight, Cut> known;
  const Weight weight{
      p.rows, p.cols, p.block_rows, p.block_cols, p.blocks, machine.sms, static_cast<std::int64_t>(p.dtype)};
  const auto at = known.find(weight);
  if (at != known.end()) return at->second;
  if (known.size() >= 4096) known.clear();
  std::vector<Cut> cuts = cuts_of(p, machine);
  return known.emplace(weight, std::move(cuts[best_of(cuts)])).first->second;
}

}  // namespace

GradientConfig whole_tiles(const GradientConfig& config) {
  GradientConfig whole = config;
  whole.most = 0;
  return whole;
}

GradientConfig half_tiles(const GradientConfig& config) {
  GradientConfig half = whole_tiles(config);
  half.most = half.columns() / 2;
  return half;
}

std::string unsupported(const GradientProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16 && p.dtype != DType::f32)
    return "tensor cores of this kernel take bf16, f16 and, rounded to tf32, f32";
  const auto piece = static_cast<std::int64_t>(16 / size_of(p.dtype));
  if (p.block_rows % 16 != 0 || p.block_cols % 16 != 0) return "block sides must be multiples of 16";
  if (p.x_stride % piece != 0 || p.dy_stride % piece != 0) return "TMA needs rows of X and dY 16 bytes apart";
  if (p.x_stride < p.cols || p.dy_stride < p.rows) return "TMA needs rows that do not overlap";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX - 1024 || p.blocks * p.block_rows > INT32_MAX ||
      p.blocks * p.block_rows * p.block_cols / 8 > INT32_MAX)
    return "coordinates are 32-bit";
  if (!p.whole() && ceil_div(p.cols, p.block_cols) * p.block_cols > std::int64_t{kMostUnionColumns} * 16)
    return "lists of tiles take up to 2^20 features";
  return {};
}

std::vector<GradientCandidate> gradient_candidates(const GradientProblem& p, const Machine& machine) {
  const std::vector<Cut> cuts = cuts_of(p, machine);
  const std::size_t best = best_of(cuts);
  std::vector<GradientCandidate> list;
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    for (GradientCandidate& candidate : candidates_of(p, machine, cuts[i])) {
      if (candidate.reason.empty() && i != best) candidate.reason = "other tiles fit better";
      list.push_back(std::move(candidate));
    }
  }
  return list;
}

GradientConfig configure(const GradientProblem& p, const Machine& machine) {
  const std::vector<GradientCandidate> all = candidates_of(p, machine, best_cut(p, machine));
  GradientCandidate best = all.front();
  for (const GradientCandidate& candidate : all) {
    if (candidate.reason.empty() && candidate.microseconds < best.microseconds) best = candidate;
  }
  return best.config;
}

bool valid(const GradientProblem& p, const GradientConfig& c) {
  if (c.split != 1 && c.split != 2 && c.split != 4) return false;
  if (c.queues < 0 || (c.queues > 0 && c.wide < 64)) return false;
  if (c.alone < 0 || (c.alone > 0 && (c.split == 1 || c.shared < 1))) return false;
  if (c.wide == 64) {
    return p.whole() && (!c.two || p.block_rows % 128 == 0) && !c.even &&
           (c.most == 0 || c.most == half_tiles(c).most);
  }
  return (c.wide == 32 || c.wide == 16) && c.most >= 0 && c.most <= TileShape{c.wide, c.two, false}.columns();
}

std::int64_t tiles_at_most(const GradientProblem& p, const GradientConfig& config) {
  // Whole tiles, and one for what is left of each row that stores anything.
  if (config.wide == 64) {
    const std::int64_t columns = p.blocks * (p.block_cols / 64);
    return (columns / config.columns() + std::min(p.block_row_count(), p.blocks)) *
           (p.block_rows / 64 / config.shape().strips());
  }
  const std::int64_t rows = union_rows(p, config);
  const std::int64_t all = ceil_div(ceil_div(p.cols, p.block_cols) * p.block_cols, config.wide) * rows;
  const std::int64_t columns =
      std::min(all, p.blocks * panels_touched(p.block_rows, 64 * config.shape().strips()) *
                        panels_touched(p.block_cols, config.wide));
  return columns / config.columns() + std::min(rows, columns);
}

bool sums_dy(const GradientProblem& p, const GradientConfig& config) {
  // Tiles of narrow panels and two strips that sum fall behind the others, and in many rounds may no longer
  // find their panels in L2: with ten rounds up to 300 µs of 1300, where a pass over dY takes 35 to 70. With
  // three or four rounds (4096²) it is 5 to 9.
  // Half tiles take half of a step's time, and no longer hide a sum of it: 4096→14336, b=128 at .1 175 µs
  // become 277 where thread blocks take several, but 56 become 73 at 4096².
  constexpr std::int64_t kMostTiles = 5 * 132, kRound = 132;
  if (p.dtype == DType::f32) return false;
  if (config.wide == 64) return config.most == 0 || tiles_at_most(p, config) <= kRound + p.block_row_count();
  return !config.two || tiles_at_most(p, config) <= kMostTiles;
}

bool transposes(const GradientProblem& p, const GradientConfig& config) {
  return config.wide == 16 || p.dtype == DType::f32;
}

std::int64_t workspace_bytes(const GradientProblem& p, const GradientConfig& config) {
  if (!transposes(p, config)) return 0;
  return p.cols * turned_stride(p.tokens) * static_cast<std::int64_t>(size_of(p.dtype));
}

std::int64_t list_at(const GradientProblem& p, const GradientConfig& config) {
  if (config.wide < 64) return ceil_div(union_rows(p, config) * (1 + config.shape().units()), 32) * 32;
  return config.most == 0 ? 0 : tiles_at_most(p, whole_tiles(config)) * tile_words(64);
}

std::int64_t union_rows(const GradientProblem& p, const GradientConfig& config) {
  return ceil_div(p.block_row_count() * p.block_rows, 64 * config.shape().strips());
}

std::int64_t prepared_words(const GradientProblem& p, const GradientConfig& config) {
  const GradientConfig last = config.wide == 64 ? half_tiles(config) : config;
  return list_at(p, last) + tiles_at_most(p, last) * tile_words(config.wide);
}

}  // namespace rarefy::sm90
