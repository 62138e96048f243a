// Which problems the tall decode kernel takes, and how W is cut among warps.
#include "cuda/sm90/tall_decode.h"

#include <algorithm>

namespace rarefy::sm90 {
namespace {

std::string why_not(const TallDecodeProblem& p, const TallDecodeConfig& c) {
  if ((c.rows != 64 && c.rows != 32 && c.rows != 16) || (c.warps != 16 && c.warps != 8 && c.warps != 4) ||
      c.split < 1 || c.split > 8)
    return "strips have 64, 32 or 16 rows, thread blocks 16, 8 or 4 warps, clusters up to 8 of them";
  if (p.block_rows % c.rows != 0) return "strips must divide block rows";
  return {};
}

}  // namespace

std::string unsupported(const TallDecodeProblem& p) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores of this kernel take bf16 and f16";
  if (p.tokens < 1 || p.tokens > kMostDecoded) return "made for 1 to 32 tokens";
  if (p.block_rows % 16 != 0) return "blocks must have a multiple of 16 rows";
  if (p.columns > INT32_MAX || 32 * p.cols > INT32_MAX || p.block_rows > 1 << 20) return "32-bit positions";
  return {};
}

std::vector<TallDecodeCandidate> tall_decode_candidates(const TallDecodeProblem& p) {
  std::vector<TallDecodeCandidate> list;
  for (const int rows : {64, 32, 16}) {
    for (const int warps : {16, 8, 4}) {
      for (const int split : {1, 2, 4, 8}) {
        for (const bool late : {false, true}) {
          const TallDecodeConfig c{rows, warps, split, late};
          list.push_back({c, why_not(p, c)});
        }
      }
    }
  }
  return list;
}

bool valid(const TallDecodeProblem& p, const TallDecodeConfig& config) { return why_not(p, config).empty(); }

std::int64_t workspace_bytes(const TallDecodeProblem& p) { return p.turned() * p.cols * 2; }

// Warps for 16 places of each SM and no more, so that there is one round, of strips of 64 rows where those
// are enough: rather larger thread blocks than clusters, and strips of 16 rows where others would be few. A
// warp that reads less than 2 KB, or 3.5 in a cluster, is not worth it. (H200, 486 layers and batches: 1 %
// slower than the best configuration in the median, 33 at most.) The same for any number of tokens, so that
// bits are.
TallDecodeConfig configure(const TallDecodeProblem& p, int sms) {
  const std::int64_t places = std::int64_t{16} * sms;
  const auto warps_of = [&](const TallDecodeConfig& c) { return c.strips(p) * c.warps * c.split; };
  const auto bytes_of_warp = [&](const TallDecodeConfig& c) {
    return p.columns * p.block_rows * 2 / std::max<std::int64_t>(1, warps_of(c));
  };
  TallDecodeConfig best{64, 8, 1, false};
  if (!why_not(p, best).empty() || 4 * warps_of(best) < 3 * places)
    best.rows = p.block_rows % 32 == 0 ? 32 : 16;
  if (warps_of(best) > places) best.warps = 4;
  const auto grow = [&](const TallDecodeConfig& more, std::int64_t least) {
    const bool grown = why_not(p, more).empty() && warps_of(more) <= places && bytes_of_warp(more) >= least;
    if (grown) best = more;
    return grown;
  };
  if (best.warps == 8) grow({best.rows, 16, 1, false}, 2 << 10);
  if (best.rows == 32 && 4 * warps_of(best) < places) grow({16, best.warps, 1, false}, 1400);
  while (grow({best.rows, best.warps, 2 * best.split, false}, 7 << 9)) {
  }
  best.late = bytes_of_warp(best) < 4 << 10;
  return best;
}

}  // namespace rarefy::sm90
