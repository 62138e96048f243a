// Which problems the decode kernel takes, and how far it splits a strip.
#include "cuda/sm90/decode.h"

namespace rarefy::sm90 {

std::int64_t DecodeProblem::strips() const {
  const std::int64_t block_count = (rows + block_rows - 1) / block_rows;
  return block_count * (block_rows / strip_rows());
}

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
  for (const int split : {1, 2, 4, 8}) {
    DecodeCandidate& c = list.emplace_back();
    c.config.split = split;
    // A warp has about 8 KB in flight; less than that for each warp of a strip is nothing to share.
    const std::int64_t strip_bytes =
        p.blocks * p.block_rows * p.block_cols * 2 / (p.strips() > 0 ? p.strips() : 1);
    if (split > 1 && strip_bytes < std::int64_t{split} * 8 * 4096) c.reason = "less than 4 KB for each warp";
  }
  return list;
}

DecodeConfig configure(const DecodeProblem& p, int sms) {
  DecodeConfig best;
  for (const DecodeCandidate& c : decode_candidates(p)) {
    if (!c.reason.empty()) continue;
    if (10 * p.strips() * best.split < std::int64_t{19} * sms)
      best = c.config;  // about two thread blocks an SM are best
  }
  return best;
}

}  // namespace rarefy::sm90
