// linear of tall vectors (blocks of one column) for up to 32 tokens, host side: bound by reading W once, as
// it is stored. A strip is 64, 32 or 16 rows of one block row; a thread block, or a cluster of them, shares
// its columns and adds up in a fixed order. (Blocks of 16 columns and more: decode.h.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "rarefy/dtype.h"
#include "rarefy/linear.h"

namespace rarefy::sm90 {

inline constexpr std::int64_t kMostDecoded = 32;  // tokens

struct TallDecodeProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, columns = 0;     // of a block; that are stored, of all block rows
  std::int64_t x_stride = 0, y_stride = 0;
  rarefy::Activation activation = rarefy::Activation::none;  // device/ has another

  std::int64_t block_row_count() const { return (rows + block_rows - 1) / block_rows; }
  // Tokens that lie side by side where X is turned first; 0: it is read as it is. Of more than four tokens a
  // column's would be as many lines of L1.
  int turned() const { return tokens <= 4 ? 0 : tokens <= 8 ? 8 : tokens <= 16 ? 16 : 32; }
};

struct TallDecodeConfig {
  int rows = 64;      // of a strip
  int warps = 8;      // of a thread block
  int split = 1;      // thread blocks for a strip
  bool late = false;  // whether the next kernel may start only when this one has read W

  std::int64_t strips(const TallDecodeProblem& p) const {
    return p.block_row_count() * (p.block_rows / rows);
  }
  std::string text() const {
    return "rows=" + std::to_string(rows) + " warps=" + std::to_string(warps) +
           " split=" + std::to_string(split) + " late=" + std::to_string(static_cast<int>(late));
  }
};

struct TallDecodeCandidate {
  TallDecodeConfig config;
  std::string reason;  // why not; empty if it can run
};

std::string unsupported(const TallDecodeProblem& problem);
std::vector<TallDecodeCandidate> tall_decode_candidates(const TallDecodeProblem& problem);
TallDecodeConfig configure(const TallDecodeProblem& problem, int sms);
bool valid(const TallDecodeProblem& problem, const TallDecodeConfig& config);  // a forced one may be anything
std::int64_t workspace_bytes(const TallDecodeProblem& problem);                // for X, turned

struct TallDecodeOperands {  // device pointers; x and values 16-byte aligned
  const void* x = nullptr;
  const void* values = nullptr;
  const std::int32_t *crow = nullptr, *col = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  void* workspace = nullptr;
};

// One kernel, or two where X is turned. Either may start while the one before in the stream runs, and then
// reads the pattern's index, nothing else, as in decode.h.
cudaError_t launch(const TallDecodeProblem& problem, const TallDecodeConfig& config,
                   const TallDecodeOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
