// linear for up to 16 tokens, host side. Bound by reading W once: canonical values and the pattern's own
// index are all it needs. A strip is 16, 32 or 64 rows of one block row; a cluster of `split` thread blocks
// shares its stored blocks and adds up in a fixed order.
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
  Activation activation = Activation::none;

  int strip_rows() const { return block_rows % 64 == 0 ? 64 : block_rows % 32 == 0 ? 32 : 16; }
  std::int64_t strips() const;
};

struct DecodeConfig {
  int split = 1;
  std::string text() const { return "split=" + std::to_string(split); }
};

struct DecodeCandidate {
  DecodeConfig config;
  std::string reason;  // why not; empty if it can run
};

std::string unsupported(const DecodeProblem& problem);
std::vector<DecodeCandidate> decode_candidates(const DecodeProblem& problem);
DecodeConfig configure(const DecodeProblem& problem, int sms);

struct DecodeOperands {  // device pointers; x and values 16-byte aligned
  const void* x = nullptr;
  const void* values = nullptr;
  const std::int32_t *crow = nullptr, *col = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
};

cudaError_t launch(const DecodeProblem& problem, const DecodeConfig& config, const DecodeOperands& operands,
                   cudaStream_t stream);

}  // namespace rarefy::sm90
