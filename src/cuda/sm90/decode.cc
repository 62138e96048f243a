// Which problems the decode kernel takes, and how W is cut among warps.
#include "cuda/sm90/decode.h"

#include <algorithm>

namespace rarefy::sm90 {
namespace {

// Warps that an SM holds: with more tokens a thread has more sums.
int warps_at_once(const DecodeProblem& p) { return p.many() ? 20 : 32; }

std::string why_not(const DecodeProblem& p, const DecodeConfig& c) {
  if ((c.rows != 64 && c.rows != 32 && c.rows != 16) || (c.warps != 8 && c.warps != 4) || c.split < 1 ||
      c.split > 8)
    return "strips have 64, 32 or 16 rows, thread blocks 8 or 4 warps, clusters up to 8 of them";
  if (p.block_rows % c.rows != 0) return "strips must divide block rows";
  if (c.rows == 64 && (p.wide() != 32 || !p.many()))
    return "64 rows are for more than eight tokens, and blocks of a multiple of 32 columns";
  return {};
}

}  // namespace

std::string unsupported(const DecodeProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.tokens < 1 || p.tokens > 16) return "made for 1 to 16 tokens";
  if (p.block_rows % 16 != 0 || p.block_cols % 16 != 0) return "block sides must be multiples of 16";
  if (p.cols % 8 != 0 || p.x_stride % 8 != 0)
    return "16-byte loads need rows of X in multiples of 8 elements";
  if (p.block_rows * p.block_cols > INT32_MAX || p.blocks * p.block_cols / 16 > INT32_MAX ||
      p.tokens * p.cols > INT32_MAX)
    return "32-bit positions in a block row";
  return {};
}

std::vector<DecodeCandidate> decode_candidates(const DecodeProblem& p) {
  std::vector<DecodeCandidate> list;
  for (const int rows : {64, 32, 16}) {
    for (const int warps : {8, 4}) {
      for (const int split : {1, 2, 4, 8}) {
        const DecodeConfig c{rows, warps, split};
        list.push_back({c, why_not(p, c)});
      }
    }
  }
  return list;
}

bool valid(const DecodeProblem& p, const DecodeConfig& config) { return why_not(p, config).empty(); }

// Best is one round of warps that fills half of the places or more, of few strips with many rows (their
// inputs are read once for all of them), without clusters.
DecodeConfig configure(const DecodeProblem& p, int sms) {
  const std::int64_t places = std::int64_t{warps_at_once(p)} * sms;
  const auto warps_of = [&](const DecodeConfig& c) { return c.strips(p) * c.warps * c.split; };
  const auto fits = [&](const DecodeConfig& c) { return warps_of(c) <= places; };
  const auto fill = [&](const DecodeConfig& c) { return 20 * warps_of(c) >= 9 * places; };
  DecodeConfig best;
  for (const int rows : {64, 32, 16}) {
    best = {rows, 8, 1};
    if (!why_not(p, best).empty()) continue;
    if (!fits(best)) best.warps = 4;
    if (fill(best)) break;  // many rounds, too
  }
  // Strips that are few, or long, are shared.
  const std::int64_t bytes = p.blocks * p.block_rows * p.block_cols * 2;
  while (best.split < 8 && 2 * warps_of(best) <= places) {
    const std::int64_t each = bytes / std::max<std::int64_t>(1, warps_of(best));
    if (each < (fill(best) ? 16 << 10 : 8 << 10)) break;
    best.split *= 2;
  }
  return best;
}

}  // namespace rarefy::sm90
