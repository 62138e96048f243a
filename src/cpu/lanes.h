// The contract of kernels whose lanes are neighbouring outputs (lane_kernels.h): a number of x is broadcast
// and meets a vector of W, sums of some tokens × outputs stay in registers until they are complete, and go to
// the rows of Y from there. Nothing is transposed on the way out, and no sum waits in memory. Plain structs
// only.
//
// x is packed feature-major for 32 tokens, as all panels are: a line has 32 dwords, one a token, of one
// float, two bf16 (pairs.h) or four int8 (quads.h), or 4 of them, for up to 4 tokens in int8.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kLaneTokens = 32;

// Lines of bf16 or int8 to be put together for a later product, from the features of a panel.
struct LaneGather {
  const std::uint16_t* panel;
  const std::uint32_t* offsets;  // of two or four features a line, in units of 16 bits
  std::uint16_t* to;
  std::int32_t lines;
  bool half;  // tokens 0 … 15 alone
};

// y[token][o] = act(Σ over blocks and their lines of w[block][line][o] · x[index[block] · run +
// line][token]), for the outputs of one block row: floats start from `start`, to bf16's sums it is added, and
// int8's are scaled as in QuadStore.
// One a task, so what belongs together stands together.
struct LaneProduct {  // NOLINT(clang-analyzer-optin.performance.Padding)
  const void* w;
  Storage storage;           // of w, for floats
  const std::int32_t* perm;  // position of each block in w; null: as they are listed
  const std::int32_t* index;
  std::int32_t blocks;
  std::int32_t run;    // lines of a block
  std::int32_t rows;   // outputs, whole vectors
  bool by_row;         // floats: a block of w is [row][line], and both are whole vectors; else [line][row]
  Ask ask = Ask::far;  // int8 of a few tokens: how W is asked for
  std::int64_t ahead = 0;  // by row: bytes of whole blocks, after which w is asked for
  const void* panel;       // lines of 32 dwords
  std::int32_t tokens;
  const float* start;  // or, in bf16 and int8, what is added at the end
  std::int32_t part;   // floats: blocks of a part of a sum (kernels.h)
  const std::int32_t* totals;
  const float* scales;
  const float* token_scales;
  // bf16 (as floats) and int8: [token][rows], of the lines before and for those after, where there are some.
  std::int32_t* sums;
  bool first, last;
  LaneGather next;  // made along the way
  Activation activation;
  void* y;
  Storage out;
  std::int64_t row_stride;
  std::int32_t cols;  // of the outputs, those that exist
};

// Floats on lanes of outputs, beside a table of kernels.h that packs.
struct LaneKernels {
  const Kernels& panels;
  void (*multiply)(const LaneProduct&);
};

#if defined(__x86_64__)
extern const LaneKernels kLanesAvx2;
extern const LaneKernels kLanesAvx512;
#endif

}  // namespace rarefy::cpu
