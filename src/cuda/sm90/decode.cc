// Which problems the decode kernel takes, and how W is cut among warps.
#include "cuda/sm90/decode.h"

#include <algorithm>
#include <utility>

namespace rarefy::sm90 {
namespace {

std::string why_not(const DecodeProblem& p, const DecodeConfig& c) {
  if ((c.rows != 32 && c.rows != 16) || (c.warps != 8 && c.warps != 4 && c.warps != 2) || c.split < 1 ||
      c.split > 8)
    return "strips have 32 or 16 rows, thread blocks 8, 4 or 2 warps, clusters up to 8 of them";
  if (p.block_rows % c.rows != 0) return "strips must divide block rows";
  if ((c.loads != 8 && c.loads != 16) || (c.loads == 16 && p.many()))
    return "8 loads in flight, or 16 with up to eight tokens";
  if (c.shared && (c.split > 1 || !can_share(p.wide(), p.few(), p.many(), c.rows, c.warps, c.loads)))
    return "in shared memory 8 loads of 8 warps, of 32 columns or more, for five tokens or more, no "
           "clusters; "
           "strips of 32 rows, or of 16 with whole lines and up to eight tokens";
  return {};
}

std::int64_t bytes_of_warp(const DecodeProblem& p, std::int64_t warps) {
  return p.blocks * p.block_rows * p.block_cols * 2 / std::max<std::int64_t>(1, warps);
}

// By way of shared memory eight warps share a strip, and an SM holds 32 instead of 16 to 24. Measured faster
// (by 2 to 15 %) where that many are wanted, and (by 5 to 20 %) with five to eight tokens of whole lines
// where a warp has little to read; slower where warps have many rounds and fit otherwise.
bool worth_sharing(const DecodeProblem& p, const DecodeConfig& c, int sms) {
  if (!why_not(p, c).empty()) return false;
  const std::int64_t warps = c.strips(p) * c.warps;
  if (!p.many() && p.lines()) return bytes_of_warp(p, warps) <= 7 << 10;
  return c.rows == 32 && warps > std::int64_t{20} * sms;
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
  if ((p.cols + p.block_cols) / 16 > (std::int64_t{1} << 32) / (p.block_cols / 16))
    return "columns are divided by those of a block in 32 bits";
  return {};
}

std::vector<DecodeCandidate> decode_candidates(const DecodeProblem& p) {
  std::vector<DecodeCandidate> list;
  for (const int rows : {32, 16}) {
    for (const int warps : {8, 4, 2}) {
      for (const int split : {1, 2, 4, 8}) {
        for (const auto& [loads, shared] : {std::pair{8, false}, {8, true}, {16, false}}) {
          for (const bool late : {false, true}) {
            const DecodeConfig c{rows, warps, split, loads, shared, late};
            list.push_back({c, why_not(p, c)});
          }
        }
      }
    }
  }
  return list;
}

bool valid(const DecodeProblem& p, const DecodeConfig& config) { return why_not(p, config).empty(); }

// Best is one round of warps that fills half of the places or more, of few strips with many rows (their
// inputs are read once for all of them), without clusters. Where half as many places are enough, each warp
// has twice as many loads in flight.
DecodeConfig configure(const DecodeProblem& p, int sms) {
  std::int64_t places = std::int64_t{warps_of_sm(p.many(), p.lines(), 8, true)} * sms;
  const auto warps_of = [&](const DecodeConfig& c) { return c.strips(p) * c.warps * c.split; };
  const auto fits = [&](const DecodeConfig& c) { return warps_of(c) <= places; };
  const auto fill = [&](const DecodeConfig& c) { return 20 * warps_of(c) >= 9 * places; };
  for (const int rows : {32, 16}) {
    DecodeConfig c{rows, 8, 1, 8, true};
    if (p.block_rows % rows != 0 || !fill(c)) continue;
    if (!worth_sharing(p, c, sms)) break;
    c.late = p.many() || bytes_of_warp(p, warps_of(c)) >= 4 << 10;
    return c;
  }
  places = std::int64_t{warps_of_sm(p.many(), p.lines(), 8, false)} * sms;
  DecodeConfig best;
  for (const int rows : {32, 16}) {
    best = {rows, 8, 1};
    if (!why_not(p, best).empty()) continue;
    for (const int warps : {4, 2}) {
      if (!fits(best) && fits({rows, warps, 1})) best.warps = warps;
    }
    if (!fits(best)) best.warps = 4;  // many rounds
    if (fill(best)) break;
    if (bytes_of_warp(p, warps_of(best)) <= 2 << 10 && warps_of(best) >= 5 * sms) break;  // little to read
  }
  const std::int64_t fewer = std::int64_t{warps_of_sm(false, p.lines(), 16, false)} * sms;
  if (!p.many() && warps_of(best) <= fewer && bytes_of_warp(p, warps_of(best)) >= 3 << 10) {
    best.loads = 16;
    places = fewer;
  }
  // Strips that are few, or long, are shared.
  while (best.split < 8 && 2 * warps_of(best) <= places) {
    if (bytes_of_warp(p, warps_of(best)) < (fill(best) ? 16 << 10 : 8 << 10)) break;
    best.split *= 2;
  }
  if (best.rows == 16 && bytes_of_warp(p, warps_of(best)) < 1 << 10 && warps_of(best) >= 10 * sms)
    best.warps = 4;
  // What the next one asks for would slow this one.
  best.late = p.many() || bytes_of_warp(p, warps_of(best)) >= 7 << 10;
  return best;
}

}  // namespace rarefy::sm90
