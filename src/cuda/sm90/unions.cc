// What the union kernel runs and how: supported problems, the layout of a weight, the choice of a tile shape.
#include "cuda/sm90/unions.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "cuda/sm90/parts.h"

namespace rarefy::sm90 {
namespace {

// Rates of one SM, fitted to 900 measurements in a chain (docs/design/hopper/unions.md), and what is around
// them to 4,800, most with up to 1,024 tokens: on average 12 % off, and what is chosen by them takes .7 %
// longer than the best.
constexpr double kClock = 1750;           // per microsecond
constexpr double kBytesPerClock = 40;     // from L2 into shared memory, all SMs at once
constexpr double kBytesAlone = 46.7;      // … and few
constexpr double kMultiply = 0.92;        // of the tensor cores' peak that a warpgroup's products reach
constexpr double kTogether = 7;           // products and copies alike take a tenth more than one of them
constexpr double kThreeStrips = 1.03;     // copies for three strips
constexpr double kWaitClocks = 50;        // of a step, for each that is missing to four in flight
constexpr double kShortStep = 160;        // of a step of 64 tokens: its copies are too short to hide others
constexpr double kPairClocks = 430;       // of a step of a pair, beside the products that its strips wait for
constexpr double kPairTileClocks = 1750;  // of its tile: what it waits for comes later
constexpr double kTileClocks = 1650;      // writing the sums of 256 tokens
constexpr double kCut = 1.06;             // a last round of strips alone …
constexpr double kCutAtOnce = 1.54;       // … or the only one
constexpr Exchange kExchange{2400, 7.6, 1950};  // of parts
// Tiles of one strip in parts, an H200: the exchange, and of each step what one warpgroup waits for its
// product.
constexpr Exchange kExchangeAlone{3600, 7.6};
constexpr double kAloneStep = 220;
constexpr double kLaunchClocks = 10700;  // launch, first loads, last stores

constexpr std::int64_t kMostFeatures = (1 << 20) - 64;  // unit rows and overlaps are 16-bit in the plan
constexpr std::int64_t kPieceBytes = 64 * 32;
constexpr int kStateBytes = 2048;  // UnionState, and what the system takes

// Clocks of a tile with so many steps and 64 × 64 weights, pieces that are not there left out.
double tile_clocks(const UnionConfig& c, double steps, double weights, double bytes_per_clock) {
  const double tokens = c.tokens / 256.0;
  const double products = weights * 512 * tokens,
               multiply = c.pair > 1 ? products + steps * kPairClocks : products / kMultiply;
  // Steps in flight, by their pieces with a little to spare.
  const double room = weights > 0 ? c.pieces / (1.15 * 4 * weights / steps) : c.slots;
  const double wait = kWaitClocks * std::max(0.0, 4 - std::min(room, 1.0 * c.slots));
  const double bytes = steps * c.tokens * 128 / c.pair + weights * 8192;
  const double copy = (c.strips == 3 ? kThreeStrips : 1) * bytes / bytes_per_clock + steps * wait;
  return std::pow(std::pow(multiply, kTogether) + std::pow(copy, kTogether), 1 / kTogether) +
         kTileClocks * tokens + (c.pair > 1 ? kPairTileClocks : 0) +
         (c.tokens == 64 ? steps * kShortStep : 0);
}

// Room for pieces in the shared memory that the others leave.
int piece_room(UnionConfig c, const Machine& machine) {
  c.pieces = 0;
  return static_cast<int>(std::min<std::int64_t>(
      (machine.shared_bytes - kStateBytes - c.shared_bytes()) / kPieceBytes, 12 * c.slots));
}

}  // namespace

double UnionProblem::piece_share() const {
  return 1 - std::pow(1 - density(), met(block_out(), 64) * met(block_in(), column()));
}

double UnionProblem::box_share(const UnionLayout& layout) const {
  return 1 - std::pow(1 - density(), met(block_out(), 64 * layout.strips) * met(block_in(), layout.width));
}

int UnionConfig::shared_bytes() const { return 1024 + ring_bytes() + strips * buffers * 8192; }

int UnionConfig::ring_bytes() const { return slots * tokens * 128 + static_cast<int>(pieces * kPieceBytes); }

std::string UnionConfig::text() const {
  return "strips=" + std::to_string(strips) + " width=" + std::to_string(width) +
         " tokens=" + std::to_string(tokens) + " slots=" + std::to_string(slots) +
         " pieces=" + std::to_string(pieces) + " buffers=" + std::to_string(buffers) +
         " split=" + std::to_string(split) + " pair=" + std::to_string(pair) +
         " alone=" + std::to_string(static_cast<int>(alone));
}

UnionPlan::UnionPlan(const UnionProblem& p, int thread_blocks)
    : strips(static_cast<int>(p.strips())),
      sms(std::min(thread_blocks, kMostClusters)),
      columns(static_cast<int>(ceil_div(p.in_features(), p.step()))) {
  const auto take = [&](std::int64_t count) {
    const std::int64_t at = words;
    words += (count + 31) / 32 * 32;
    return at;
  };
  const std::int64_t all_columns = ceil_div(p.in_features(), p.column());
  // No more than all, and than if no two blocks met in one.
  pieces = std::min(p.strips() * all_columns,
                    p.blocks * touched(p.block_out(), p.unit()) * touched(p.block_in(), p.column()));
  units_at = take(std::int64_t{4} * strips);
  first_at = take(std::int64_t{strips} + 1);
  for (std::size_t i = 0; i < std::size(kGroupSizes); ++i) {
    const int size = kGroupSizes[i], pair = size > kMostGroup ? 2 : 1;
    Groups& its = groups[i] = {size, static_cast<int>(ceil_div(strips, size)), pair, std::max(1, sms / pair)};
    const std::int64_t all = std::int64_t{its.count} * pair;
    its.groups_at = take(8 * all);
    its.first_at = take(4 * all);
    its.steps_at = take(4 * all * columns);
    its.items_at = take(2 * std::int64_t{lists(its).begin(lists(its).levels())});
  }
  sources_at = take(p.fine() ? 0 : pieces * (64 / p.unit()));
  places_at = take(p.fine() ? p.strips() * all_columns : 0);
  slots_at = take(p.fine() ? p.units() : 0);
  // Columns of block rows and of strips as bits, and how many; members by falling length and their columns,
  // of unit rows and for either group size of strips; of each group strips, clocks and steps.
  const std::int64_t rows = ceil_div(p.out_features(), p.marked()) + strips, bits = ceil_div(all_columns, 32);
  scratch_at = take(rows * (bits + 1) + p.units() + 2 * strips + group_words(p.units(), bits) +
                    2 * group_words(strips, bits) +
                    std::int64_t{kMostGroup + 2} * (groups[0].count + groups[1].count));
}

std::int64_t UnionPlan::packed_bytes() const { return pieces * kPieceBytes; }

std::string unsupported(const UnionProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16 && p.dtype != DType::f32)
    return "tensor cores of this kernel take bf16, f16 and, rounded to tf32, f32";
  const auto piece = static_cast<std::int64_t>(16 / size_of(p.dtype));
  if (p.dtype != DType::f32 && p.block_rows % 64 == 0 && p.block_cols % 64 == 0)
    return "blocks of 64 are strips already";
  if (p.x_stride % piece != 0 || p.y_stride % piece != 0) return "TMA needs rows of X and Y 16 bytes apart";
  if (p.x_stride < p.in_features() || p.y_stride < p.out_features())
    return "TMA needs rows that do not overlap";
  if (!p.pieces_fit(piece)) return "TMA writes rows of Y in pieces of 16 bytes";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX / 2 || p.blocks * p.block_rows > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (p.fine() && p.block_out() > INT32_MAX / (p.in_features() + p.block_in()))
    return "values of a block row are counted in 32 bits";
  if (p.in_features() > kMostFeatures || p.out_features() > kMostFeatures)
    return "grouping rows takes less than 2^20 features";
  if (p.strips() * ceil_div(p.tokens, 64) > INT32_MAX / 4) return "tiles are counted in 32 bits";
  if (p.transposed && p.activation != Activation::none) return "grad_input has no activation";
  return {};
}

namespace {

// Of all pieces, of all boxes of X, and of those of one strip alone, what a layout's tiles have.
struct Shares {
  double pieces, boxes, alone;
};

UnionCandidate candidate_of(const UnionProblem& p, const UnionLayout& layout, const Shares& shares,
                            int tokens, int buffers, const Machine& machine) {
  const auto columns = static_cast<double>(ceil_div(p.in_features(), p.step()));
  const int pair = layout.strips > kMostGroup ? 2 : 1;
  UnionConfig c{layout.strips / pair, layout.width, tokens, 0, 0, buffers, 1, pair};
  const double strips = c.strips;
  // As many steps as leave room for the pieces that they have on average, and for one that has all.
  const double per_step =
      shares.boxes > 0 ? std::min(4 * strips * shares.pieces / shares.boxes, 4 * strips) : 4;
  for (c.slots = 8; c.slots > 2; --c.slots) {
    c.pieces = piece_room(c, machine);
    if (c.pieces >= std::max((pair > 1 ? 0.9 : 1.0) * per_step * c.slots, 4 * strips)) break;
  }
  c.pieces = piece_room(c, machine);

  const std::int64_t token_tiles = ceil_div(p.tokens, std::int64_t{tokens}),
                     tiles = p.groups(layout) * token_tiles;
  const std::int64_t sms = machine.sms, clusters = std::max<std::int64_t>(1, sms / pair);
  const ListChoice rounds({static_cast<int>(p.groups(layout)), c.strips, static_cast<int>(clusters)},
                          static_cast<int>(token_tiles));
  const auto tile = [&](double steps, double weights, std::int64_t thread_blocks) {
    const double left = static_cast<double>(sms) / static_cast<double>(thread_blocks);
    return tile_clocks(c, steps, weights, std::min(kBytesAlone, kBytesPerClock * std::max(1.0, left)));
  };
  const double whole = tile(columns * shares.boxes, columns * shares.pieces * strips, tiles * pair);
  // The last tiles of a list are cut into strips if these are no more than a round.
  const std::int64_t rest = std::max<std::int64_t>(1, tiles % clusters);
  const double cut =
      (rounds.whole > 0 ? kCut : kCutAtOnce) *
      tile(columns * (pair > 1 ? shares.boxes : shares.alone), columns * shares.pieces, rest * layout.strips);
  double all = rounds.whole * whole + rounds.cut * cut;
  const double in_lists = all;
  for (const bool alone : {false, true}) {
    const double its = alone ? 1 : strips;  // strips of a tile
    const std::int64_t its_tiles = alone ? tiles * c.strips : tiles;
    const auto clocks = [&](int parts) {
      if (parts == 1) return in_lists;
      const double steps = columns * (alone ? shares.alone : shares.boxes) / parts;
      const std::int64_t there = std::min<std::int64_t>(tokens, p.tokens);
      return tile(steps, columns * shares.pieces * its / parts, its_tiles * parts) +
             (alone ? steps * kAloneStep + kExchangeAlone(there, 1) : kExchange(there, c.strips, parts));
    };
    int split = pair > 1 ? 1 : best_parts(its_tiles, machine.sms, clocks);
    while (!parts_fit(split, c.tokens, c.strips, c.ring_bytes())) --split;
    if (split > 1 && clocks(split) < all) c.split = split, c.alone = alone, all = clocks(split);
  }
  return {c, (all + kLaunchClocks) / kClock, {}};
}

}  // namespace

std::vector<UnionCandidate> union_candidates(const UnionProblem& p, const UnionLayouts& layouts,
                                             const Machine& machine) {
  struct Shape {
    int tokens, buffers;
  };
  std::vector<UnionCandidate> list;
  for (const UnionLayout& layout : layouts) {
    const Shares shares{p.piece_share(), p.box_share(layout), p.box_share({1, layout.width})};
    for (const auto& [tokens, buffers] : {Shape{256, 2}, {256, 1}, {192, 2}, {128, 2}, {64, 2}}) {
      if ((tokens == 192 || tokens == 64) && p.dtype == DType::f32) continue;  // not compiled
      if (tokens < 256 && layout.strips > kMostGroup) continue;                // nor are these
      list.push_back(candidate_of(p, layout, shares, tokens, buffers, machine));
    }
  }
  return list;
}

std::vector<UnionLayouts> all_union_layouts(const UnionProblem& p) {
  const int step = p.step();
  return {{{{2, step}, {3, step}, {6, step}}}, {{{2, step / 2}, {3, step / 2}, {6, step / 2}}}};
}

// As measured: narrow boxes where they save some.
UnionLayout layout_of(const UnionProblem& p, int strips) {
  const UnionLayout wide{strips, p.step()}, narrow{strips, p.step() / 2};
  const bool saves = p.block_in() % p.step() != 0 && p.box_share(narrow) <= 0.9 * p.box_share(wide);
  return saves ? narrow : wide;
}

UnionLayouts layouts_of(const UnionProblem& p) {
  return {layout_of(p, kGroupSizes[0]), layout_of(p, kGroupSizes[1]), layout_of(p, kGroupSizes[2])};
}

namespace {
UnionCandidate best_of(const UnionProblem& problem, const Machine& machine) {
  const std::vector<UnionCandidate> list = union_candidates(problem, layouts_of(problem), machine);
  const UnionCandidate* best = &list.front();
  for (const UnionCandidate& candidate : list) {
    if (candidate.reason.empty() && candidate.microseconds < best->microseconds) best = &candidate;
  }
  return *best;
}
}  // namespace

UnionConfig configure(const UnionProblem& problem, const Machine& machine) {
  return best_of(problem, machine).config;
}

double predicted_microseconds(const UnionProblem& problem, const Machine& machine) {
  return best_of(problem, machine).microseconds;
}

}  // namespace rarefy::sm90
