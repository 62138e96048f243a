// What the dense product of packed weights runs and how.
#include "cuda/sm90/whole.h"

#include <algorithm>
#include <iterator>

#include "core/checked.h"
#include "cuda/sm90/parts.h"

namespace rarefy::sm90 {
namespace {

constexpr double kClock = 1750;          // per microsecond
constexpr double kLaunchClocks = 16000;  // launch, first loads from device memory, last stores
constexpr double kTileClocks = 2000;     // around a tile's steps

constexpr int kFeatures = WholeConfig::kFeatures, kWide = WholeConfig::kWide, kHalf = WholeConfig::kHalf;

std::int64_t steps_of(const WholeProblem& p) { return ceil_div(p.in_features(), std::int64_t{64}); }

// Of a step: products, 4 clocks a token, or, if all SMs work, bytes from L2.
double step_clocks(const WholeConfig& c, bool all_sms) {
  return std::max(20 + 4.2 * c.tokens, all_sms ? c.slot_bytes() / 48. : 0);
}

bool is_between(int tokens) { return tokens != kWide && tokens != kHalf; }

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
      ceil_div(p.out_features(), std::int64_t{kFeatures}) * ceil_div(p.tokens, std::int64_t{kHalf}) >
          INT32_MAX / 4)
    return "tiles and coordinates of TMA are counted in 32 bits";
  if (p.block_rows * p.block_cols > INT32_MAX / std::max<std::int64_t>(1, ceil_div(p.cols, p.block_cols)))
    return "values of a block row are counted in 32 bits";
  if (p.transposed && p.activation != Activation::none) return "grad_input has no activation";
  return {};
}

std::string refuse(const WholeProblem& p, const WholeConfig& c) {
  if (std::find(std::begin(WholeConfig::kWidths), std::end(WholeConfig::kWidths), c.tokens) ==
      std::end(WholeConfig::kWidths))
    return "tokens of the config must be 256, 208, 192, 160 or 128";
  if (is_between(c.tokens) &&
      (c.split > 1 || p.x_layout == Layout::by_feature || p.activation != Activation::none))
    return "tokens of the config must be 256 or 128 in parts, for X by feature and before activations";
  if (c.split < 1 || c.split > 4 || (c.split > 1 && c.split > steps_of(p)))
    return "split of the config must be 1 to 4, and no more than there are steps";
  if (c.more < 0 || (c.more > 0 && (c.tokens != kWide || c.split > 1 || c.more > most_more(p.tokens))))
    return "more of the config must be 0, or so many that tiles of 256 have 248 tokens or more";
  if ((c.split > 1 || c.more > 0) && p.x_layout == Layout::by_feature)
    return "split of the config must be 1 and more 0 for X by feature";
  return {};
}

std::vector<WholeCandidate> whole_candidates(const WholeProblem& p, int sms) {
  const std::int64_t feature_tiles = ceil_div(p.out_features(), std::int64_t{kFeatures});
  std::vector<WholeCandidate> list;
  const auto clocks = [&](const WholeConfig& c) {  // of a tile
    const std::int64_t tiles = feature_tiles * c.token_tiles(p.tokens);
    const bool all = tiles * c.split * 10 > std::int64_t{sms} * 11;
    const double narrow = c.more == 0 ? 1 : 1. * WholeConfig::kNarrow / kWide;
    return narrow * static_cast<double>(ceil_div(steps_of(p), std::int64_t{c.split})) * step_clocks(c, all) +
           kTileClocks + (c.split > 1 ? Exchange{}(std::min<std::int64_t>(p.tokens, c.tokens), 2) : 0);
  };
  const auto add = [&](const WholeConfig& c) {
    const auto rounds =
        static_cast<double>(ceil_div(feature_tiles * c.token_tiles(p.tokens) * c.split, std::int64_t{sms}));
    list.push_back({c, (rounds * clocks(c) + kLaunchClocks) / kClock, refuse(p, c)});
  };
  for (const int tokens : WholeConfig::kWidths) {
    const WholeConfig alone{tokens};
    add(alone);
    if (is_between(tokens)) continue;
    const int parts = best_parts(feature_tiles * alone.token_tiles(p.tokens), sms, [&](int split) {
      return clocks({tokens, split});
    });
    if (parts > 1 && p.x_layout == Layout::by_token) add({tokens, parts});
  }
  // The most that there may be, and as many as fill a round.
  for (std::int64_t more = most_more(p.tokens); more > 0 && p.x_layout == Layout::by_token; --more) {
    const WholeConfig c{kWide, 1, static_cast<int>(more)};
    const std::int64_t tiles = feature_tiles * c.token_tiles(p.tokens);
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
