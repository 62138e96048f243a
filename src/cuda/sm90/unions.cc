// What the union kernel runs and how: supported problems, the layout of a weight, the choice of a tile shape.
#include "cuda/sm90/unions.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "cuda/sm90/parts.h"

namespace rarefy::sm90 {
namespace {

// Rates of one SM, fitted to measurements (docs/design/hopper.md).
constexpr double kClock = 1750;          // per microsecond
constexpr double kBytesPerClock = 43;    // from L2 into shared memory, all SMs at once
constexpr double kMultiply = 0.84;       // of the tensor cores' peak that a warpgroup's products reach
constexpr double kLoadClocks = 500;      // of a step: a loading warp's instructions
constexpr double kSecondBox = 100;       // more of them
constexpr double kWaitClocks = 65;       // of a step, for each that is missing to four in flight
constexpr double kTileClocks = 900;      // writing a tile's sums
constexpr double kOneBuffer = 300;       // more, with one buffer for results
constexpr double kLaunchClocks = 20000;  // launch, first loads from device memory, last stores

constexpr std::int64_t kMostFeatures = (1 << 20) - 64;  // unit rows and overlaps are 16-bit in the plan
constexpr std::int64_t kPieceBytes = 64 * 32;
constexpr int kStateBytes = 2048;  // UnionState, and what the system takes

// Clocks of a tile by shares of pieces and boxes (of all).
double tile_clocks(const UnionConfig& c, bool two_boxes, double columns, double pieces, double boxes,
                   double bytes_per_clock) {
  const double steps = columns * boxes, blocks = columns * pieces * c.strips, tokens = c.tokens / 256.0;
  const double multiply = blocks * 512 * tokens / kMultiply;
  const double share = c.strips == 3 ? 1.08 : 1.0;
  const double copy = share * (steps * c.tokens * 128 + blocks * 8192) / bytes_per_clock;
  // Steps in flight, by their pieces with a little to spare.
  const double room = blocks > 0 ? c.pieces / (1.15 * 4 * blocks / steps) : c.slots;
  const double wait = kWaitClocks * std::max(0.0, 4 - std::min(room, 1.0 * c.slots));
  const double load = steps * (kLoadClocks + (two_boxes ? kSecondBox : 0));
  return std::max({multiply, copy + steps * (50 + wait), load}) + kTileClocks * tokens +
         (c.buffers == 1 ? kOneBuffer * tokens : 0);
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
         " split=" + std::to_string(split);
}

UnionPlan::UnionPlan(const UnionProblem& p, const UnionLayout& l, int thread_blocks)
    : layout(l),
      groups(static_cast<int>(p.groups(l))),
      strips(static_cast<int>(p.strips())),
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
  groups_at = take(std::int64_t{8} * groups);
  units_at = take(std::int64_t{4} * strips);
  steps_at = take(std::int64_t{4} * groups * columns);
  sources_at = take(p.fine() ? 0 : pieces * (64 / p.unit()));
  places_at = take(p.fine() ? p.strips() * all_columns : 0);
  slots_at = take(p.fine() ? p.units() : 0);
  count_at = take(std::int64_t{groups} + 1);
  items_at = take(2 * std::int64_t{lists().begin(lists().levels())});
  // Columns of block rows and of strips as bits, how many, and those of each unit row; unit rows by falling
  // length; of each group strips, clocks, steps and pieces.
  const std::int64_t rows = ceil_div(p.out_features(), p.marked()) + strips, bits = ceil_div(all_columns, 32);
  scratch_at = take(rows * (bits + 1) + p.units() * (bits + 1) + std::int64_t{kMostGroup + 3} * groups);
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
  if (p.out_features() % piece != 0) return "TMA writes rows of Y in pieces of 16 bytes";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX / 2 || p.blocks * p.block_rows > INT32_MAX) return "coordinates of TMA are 32-bit";
  if (p.fine() && p.block_out() > INT32_MAX / (p.in_features() + p.block_in()))
    return "values of a block row are counted in 32 bits";
  if (p.in_features() > kMostFeatures || p.out_features() > kMostFeatures)
    return "grouping rows takes less than 2^20 features";
  if (p.strips() * ceil_div(p.tokens, 128) > INT32_MAX / 4) return "tiles are counted in 32 bits";
  if (p.transposed && p.activation != Activation::none) return "grad_input has no activation";
  return {};
}

std::vector<UnionCandidate> union_candidates(const UnionProblem& p, const UnionLayout& layout,
                                             const Machine& machine) {
  const auto columns = static_cast<double>(ceil_div(p.in_features(), p.step()));
  const double pieces = p.piece_share(), boxes = p.box_share(layout);
  std::vector<UnionCandidate> list;
  struct Shape {
    int tokens, buffers;
  };
  for (const auto& [tokens, buffers] : {Shape{256, 2}, {256, 1}, {128, 2}}) {
    UnionCandidate& candidate = list.emplace_back();
    UnionConfig& c = candidate.config = {layout.strips, layout.width, tokens, 0, 0, buffers};
    // As many steps as leave room for the pieces that they have on average, and for one that has all.
    const double strips = layout.strips,
                 per_step = boxes > 0 ? std::min(4 * strips * pieces / boxes, 4 * strips) : 4;
    for (c.slots = 8; c.slots > 2; --c.slots) {
      c.pieces = piece_room(c, machine);
      if (c.pieces >= std::max(per_step * c.slots, 4 * strips)) break;
    }
    c.pieces = piece_room(c, machine);

    const std::int64_t token_tiles = ceil_div(p.tokens, c.tokens);
    const std::int64_t tiles = p.groups(layout) * token_tiles;
    const double sms = machine.sms, rounds = std::max(static_cast<double>(tiles) / sms, 1.0);
    const auto part_clocks = [&](int parts) {
      // Few thread blocks have L2 to themselves, up to what one SM takes.
      const double bandwidth =
          std::min(64.0, kBytesPerClock * std::max(1.0, sms / static_cast<double>(tiles * parts)));
      return tile_clocks(c, c.width < p.step(), columns / parts, pieces, boxes, bandwidth);
    };
    c.split = best_parts(tiles, p.tokens, c.strips, machine.sms, part_clocks);
    while (!parts_fit(c.split, c.tokens, c.strips, c.ring_bytes())) --c.split;
    const double clocks = part_clocks(c.split) + (c.split > 1 ? exchange_clocks(p.tokens, c.strips) : 0);
    candidate.microseconds = (rounds * clocks + kLaunchClocks) / kClock;
  }
  return list;
}

std::vector<UnionLayout> union_layouts(const UnionProblem& p) {
  const int step = p.step();
  return {{2, step}, {2, step / 2}, {3, step}, {3, step / 2}};
}

// As measured: three strips, unless two leave out half of X or are all of a block row; narrow boxes where
// they save some.
UnionLayout layout_of(const UnionProblem& p) {
  UnionLayout layout{3, p.step() / 2};
  if (p.block_in() % p.step() == 0 || p.box_share(layout) > 0.9 * p.box_share({3, p.step()}))
    layout.width = p.step();
  if (p.box_share({2, layout.width}) < 0.5 || p.block_out() % 128 == 0) layout.strips = 2;
  return layout;
}

namespace {
UnionCandidate best_of(const UnionProblem& problem, const Machine& machine) {
  const std::vector<UnionCandidate> list = union_candidates(problem, layout_of(problem), machine);
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
