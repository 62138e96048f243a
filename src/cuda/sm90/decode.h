// linear for up to 16 tokens, host side. Bound by reading W once: canonical values and the pattern's own
// index are all it needs. A strip is 16 or 32 rows of one block row; a thread block, or a cluster of
// them, shares its stored blocks and adds up in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rarefy/dtype.h"
#include "rarefy/linear.h"

namespace rarefy::sm90 {

struct DecodeProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, block_cols = 0, blocks = 0;
  std::int64_t x_stride = 0, y_stride = 0;
  rarefy::Activation activation = rarefy::Activation::none;  // device/ has another

  bool few() const { return tokens <= 4; }
  bool many() const { return tokens > 8; }
  // Columns that a warp's lanes read side by side: whole lines of 128 bytes, if blocks have them.
  int wide() const { return block_cols % 64 == 0 ? 64 : block_cols % 32 == 0 ? 32 : 16; }
  bool lines() const { return wide() == 64; }
  std::int64_t block_row_count() const { return (rows + block_rows - 1) / block_rows; }
};

// Warps that an SM holds: with more tokens a thread has more sums, with more loads in flight more weights
// (unless they are in shared memory), and whole lines take registers for halves and addresses. (A few bytes
// spilled cost more than fewer warps.)
constexpr int warps_of_sm(bool many, bool lines, int loads, bool shared) {
  return shared ? 32 : loads == 16 ? 16 : many ? 20 : lines ? 24 : 32;
}

// Whether W's loads may be in shared memory (the kernels that there are); `wide` as in DecodeProblem.
constexpr bool can_share(int wide, bool few, bool many, int rows, int warps, int loads) {
  return warps == 8 && loads == 8 && wide >= 32 && !few && (rows == 32 || (wide == 64 && !many));
}

struct DecodeConfig {
  int rows = 32;        // of a strip
  int warps = 8;        // of a thread block
  int split = 1;        // thread blocks for a strip
  int loads = 8;        // of 16 bytes of W that a thread has in flight
  bool shared = false;  // whether those are in shared memory, not in registers
  bool late = false;    // whether the next kernel may start only when this one has read W

  std::int64_t strips(const DecodeProblem& p) const { return p.block_row_count() * (p.block_rows / rows); }
  std::string text() const {
    return "rows=" + std::to_string(rows) + " warps=" + std::to_string(warps) +
           " split=" + std::to_string(split) + " loads=" + std::to_string(loads) +
           " shared=" + std::to_string(static_cast<int>(shared)) +
           " late=" + std::to_string(static_cast<int>(late));
  }
};

struct DecodeCandidate {
  DecodeConfig config;
  std::string reason;  // why not; empty if it can run
};

std::string unsupported(const DecodeProblem& problem);
std::vector<DecodeCandidate> decode_candidates(const DecodeProblem& problem);
DecodeConfig configure(const DecodeProblem& problem, int sms);
bool valid(const DecodeProblem& problem, const DecodeConfig& config);  // a forced one may be anything

struct DecodeOperands {  // device pointers; x and values 16-byte aligned
  const void* x = nullptr;
  const void* values = nullptr;
  const std::int32_t *crow = nullptr, *col = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
};

// One kernel, which may start while the one before in the stream runs, and then reads the pattern's index,
// nothing else: an index must not be what a kernel writes that lets its successor start early. Plans are
// made and copied by others, of which it is assumed that what they wrote is seen once they let this one start
// by ending; tests/python/test_decode.py's plans that are copied right before a call check it.
cudaError_t launch(const DecodeProblem& problem, const DecodeConfig& config, const DecodeOperands& operands,
                   cudaStream_t stream);

}  // namespace rarefy::sm90
