// What the dense product of packed weights runs and how.
#include "cuda/sm90/whole.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "core/checked.h"
#include "cuda/sm90/parts.h"

namespace rarefy::sm90 {
namespace {

constexpr double kClock = 1750;       // per microsecond
constexpr double kTileClocks = 2000;  // around a tile's steps
constexpr double kTogether = 7;       // reading and multiplying alike take a tenth more than one of them
constexpr double kReadBytes = 15;     // of memory, a clock and SM, where all are at it
// Launch and first loads; and, of 64 MB of X and Y and more, what of them is last and first in memory.
constexpr double kLaunchClocks = 9000, kManyClocks = 7000, kManyBytes = 64 << 20;
// Of parts' sums, of 64 features: in any case, and for each token of another part (an H200: 64 × 64 in two
// and four parts 1 and 1.3 us, 128 × 128 1.7 and 5.5).
constexpr double kExchangeClocks = 1200, kExchangeEach = 8;

constexpr int kWide = WholeConfig::kWide, kHalf = WholeConfig::kHalf;

std::int64_t steps_of(const WholeProblem& p) { return ceil_div(p.in_features(), std::int64_t{64}); }

// Of a step: products, 4 clocks a token and 128 features, or, if all SMs work, bytes from L2; one alone comes
// from there in 400.
double step_clocks(const WholeConfig& c, bool all_sms) {
  return std::max(20 + 4.2 * c.tokens * c.features / 128, all_sms ? c.slot_bytes() / 48. : 400);
}

bool is_between(int tokens) { return tokens != kWide && tokens != kHalf && tokens != WholeConfig::kFew; }

// Wide tiles that may be added if all are narrow ones or more.
std::int64_t most_more(std::int64_t tokens) {
  return tokens / WholeConfig::kNarrow - ceil_div(tokens, std::int64_t{kWide});
}

}  // namespace

WholeGradient::WholeGradient(const Product& p)
    : lies(p, p.block_cols % 8 != 0 && p.block_rows > p.block_cols),
      operand(p.tokens, lies.by_column ? p.x_stride : p.y_stride) {
  product.dtype = p.dtype;
  product.tokens = lies.lines;
  product.rows = lies.by_column ? p.rows : p.cols;
  product.cols = p.tokens;
  product.block_rows = product.block_cols = 1;
  product.x_layout = Layout::by_feature;
  product.x_stride = lies.by_column ? p.y_stride : p.x_stride;
  product.y_stride = lies.pitch;
  product.y_padded = true;
}

std::string unsupported(const WholeProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.x_stride % 8 != 0 || p.y_stride % 8 != 0) return "TMA needs rows of X and Y 16 bytes apart";
  if (p.x_stride < (p.x_layout == Layout::by_feature ? p.tokens : p.in_features()) ||
      p.y_stride < p.out_features())
    return "TMA needs rows that do not overlap";
  if (!p.pieces_fit(8)) return "TMA writes rows of Y in pieces of 16 bytes";
  if (p.in_features() < 1) return "there are no inputs";
  if (p.tokens < 1) return "there are no tokens";
  if (p.tokens > INT32_MAX - 1024 || p.rows > INT32_MAX - 1024 || p.cols > INT32_MAX - 1024 ||
      WholeConfig{kHalf}.tiles(p) > INT32_MAX / 4)
    return "tiles and coordinates of TMA are counted in 32 bits";
  if (p.block_rows * p.block_cols > INT32_MAX / std::max<std::int64_t>(1, ceil_div(p.cols, p.block_cols)))
    return "values of a block row are counted in 32 bits";
  if (p.transposed && p.activation != Activation::none) return "grad_input has no activation";
  return {};
}

std::string refuse(const WholeProblem& p, const WholeConfig& c) {
  if (c.features != 128 && c.features != 64) return "features of the config must be 128 or 64";
  if (c.features == 128 && std::ranges::count(WholeConfig::kWidths, c.tokens) == 0)
    return "tokens of the config must be 256, 208, 192, 160 or 128";
  if (c.features == 64 && std::ranges::count(WholeConfig::kFewWidths, c.tokens) == 0)
    return "tokens of the config must be 128 or 64 where a tile has 64 features";
  if (is_between(c.tokens) &&
      (c.split > 1 || p.x_layout == Layout::by_feature || p.activation != Activation::none))
    return "tokens of the config must be 256 or 128 in parts, for X by feature and before activations";
  if (c.split < 1 || c.split > 4 || (c.split > 1 && c.split > steps_of(p)))
    return "split of the config must be 1 to 4, and no more than there are steps";
  if (c.more < 0 || (c.more > 0 && (c.tokens != kWide || c.single() || c.more > most_more(p.tokens))))
    return "more of the config must be 0, or so many that tiles of 256 have 248 tokens or more";
  if ((c.single() || c.more > 0) && p.x_layout == Layout::by_feature)
    return "split of the config must be 1, more 0 and features 128 for X by feature";
  return {};
}

std::vector<WholeCandidate> whole_candidates(const WholeProblem& p, int sms) {
  std::vector<WholeCandidate> list;
  const auto clocks = [&](const WholeConfig& c) {  // of a tile
    const bool all = c.tiles(p) * c.split * 10 > std::int64_t{sms} * 11;
    const double narrow = c.more == 0 ? 1 : 1. * WholeConfig::kNarrow / kWide;
    const auto tokens = static_cast<double>(std::min<std::int64_t>(p.tokens, c.tokens));
    const double exchange =
        (kExchangeClocks + kExchangeEach * (c.split - 1) * tokens) * (c.features == 128 ? 2 : 1);
    return narrow * static_cast<double>(ceil_div(steps_of(p), std::int64_t{c.split})) * step_clocks(c, all) +
           kTileClocks + (c.split > 1 ? exchange : 0);
  };
  const double reading =  // all of W, from memory
      2. * static_cast<double>(p.rows * p.cols) / (kReadBytes * sms);
  const double many =  // of X by feature few tokens were not measured
      p.x_layout == Layout::by_feature
          ? 1
          : std::min(1., 2. * static_cast<double>(p.tokens * (p.rows + p.cols)) / kManyBytes);
  const auto add = [&](const WholeConfig& c) {
    const auto rounds = static_cast<double>(ceil_div(c.tiles(p) * c.split, std::int64_t{sms}));
    const double both =
        std::pow(std::pow(rounds * clocks(c), kTogether) + std::pow(reading, kTogether), 1 / kTogether);
    list.push_back({c, (both + kLaunchClocks + many * kManyClocks) / kClock, refuse(p, c)});
  };
  const auto add_with_parts = [&](WholeConfig c) {
    add(c);
    if (is_between(c.tokens) || p.x_layout != Layout::by_token) return;
    c.split = best_parts_of(c, c.tiles(p), sms, clocks);
    if (c.split > 1) add(c);
  };
  for (const int tokens : WholeConfig::kWidths) add_with_parts({tokens});
  for (const int tokens : WholeConfig::kFewWidths) add_with_parts({tokens, 1, 0, 64});
  // The most that there may be, and as many as fill a round.
  for (std::int64_t more = most_more(p.tokens); more > 0 && p.x_layout == Layout::by_token; --more) {
    const WholeConfig c{kWide, 1, static_cast<int>(more)};
    const std::int64_t tiles = c.tiles(p);
    if (tiles % sms == 0 || more == most_more(p.tokens)) add(c);
    if (tiles % sms == 0) break;
  }
  return list;
}

WholeCandidate best_whole(const WholeProblem& p, int sms) {
  const std::vector<WholeCandidate> list = whole_candidates(p, sms);
  const WholeCandidate* best = &list.front();  // nothing speaks against it
  for (const WholeCandidate& candidate : list) {
    if (candidate.reason.empty() && candidate.microseconds < best->microseconds) best = &candidate;
  }
  return *best;
}

}  // namespace rarefy::sm90
