// The contract between the driver of products in int8 (linear_quads.cc) and their kernels, beside pairs.h,
// whose layouts and walk they share: an instruction multiplies four neighbouring features and adds the
// products to one int32 (tdpbssd on AMX's tiles, vpdpbusd on vectors), a line has four features of 32 tokens,
// a group 64.
//
// Each token is rounded to int8 with a scale of its own while it is packed (core/quantize.h), each output of
// W has another: y = act(sum · scale[output] · scale[token] + bias). Sums are exact.
#pragma once

#include <cstdint>

#include "cpu/lanes.h"
#include "cpu/pairs.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kQuad = 4;
inline constexpr std::int32_t kQuadGroup = kGroup / 2 * kQuad;   // features multiplied at a time
inline constexpr std::int32_t kQuadLine = kQuad * kPanelTokens;  // bytes

// Row-major floats, or bf16, to a panel of `padded` features, a multiple of 4; what is not there becomes 0.
struct QuadPack {
  const void* x;
  bool bf16;
  std::int64_t row_stride;
  std::int32_t rows, cols;
  std::int32_t padded;
  PairOrder order;      // paired: lines of four; tokens: 64 features at a time, halves: 32
  std::uint8_t* panel;  // int8, plus 128 where the instruction wants it
  float* scales;        // of all tokens of a panel; NaN for one with a NaN or an infinity
  // Of each row where x is whole numbers in −128 … 127, which are kept as they are; null: they are found.
  const float* given = nullptr;
};

// y[token][o] = act((sums[o][token] − offset · total[o]) · scales[o] · tokens[token] + bias[o]), row-major.
struct QuadStore {
  const std::int32_t* sums;  // [cols, in whole tiles][tokens of a panel], or [32 cols][token][32]
  bool by_token;
  const std::int32_t* totals;  // of each output's stored values, and the next three as many as sums
  const float* scales;
  const float* bias;
  const float* tokens;
  Activation activation;
  void* y;
  bool bf16;
  std::int64_t row_stride;
  std::int32_t rows, cols;
};

// Of `few_rows`: outputs whose sums are made together at most; sums that leave together where x is one part,
// two times 8 KB, which stay in L1. int32 between the sums of one set of four tokens and the next, which do
// not have the same place of a page.
inline constexpr std::int32_t kRowsWide = 128, kRowsNear = 2048;
inline constexpr std::int32_t kRowsStride = (kRowsWide / 4 + 1) * 16;
inline constexpr std::int32_t kRowsSums = 16 * kRowsStride;

// Outputs that leave together where sums are by token: 512 bytes of a row in f32. Rows a multiple of 4 KB
// apart meet in one set of L1, where with fewer bytes of each their lines drive each other out.
inline constexpr std::int32_t kTokensWide = 128;

// Sums that go to Y while others are made, by steps of four tokens × 16 outputs: [vector of tokens, token %
// 4][output / 4], 16 int32 each.
struct QuadLeaving {
  QuadStore out;
  std::int32_t left = 0;  // steps
  std::int32_t turn = 0;  // of which four tokens
  std::int32_t done = 0;  // outputs of these
};

// Block rows of a panel: those of their lines, from next[block row] on, that lie before `end` in
// it, so that parts of the panel stay in L1 for several block rows.
struct QuadRows {
  const std::int8_t* w;          // groups of [line][output][4]
  const std::uint32_t* offsets;  // as of PairProduct, for panels of 32 tokens, whatever these have
  PairSource source;
  const std::int32_t *groups, *lines;  // of each block row: where its groups begin, how many lines it has
  std::int32_t* next;                  // lines that have been multiplied; where they are now
  std::int32_t blocks;                 // 0: what is leaving leaves
  std::uint32_t end;                   // of the parts before the last
  std::int32_t rows;                   // outputs of a block row, a multiple of 4
  std::int32_t vectors;                // of 16 tokens each
  const std::uint8_t* panel;
  const std::int32_t* totals;
  bool first, last;
  std::int32_t* sums;  // of QuadLeaving, in the last part; before, as they are
  QuadLeaving* leaving;
};

// What decides between kernels for few and for many tokens.
struct QuadBlocks {
  std::int64_t rows, cols;  // of a block
  std::int64_t features;    // of x
  bool two;                 // the processor starts two products in a cycle
  bool alone;               // one thread
  double density;
  double more;  // how many times as many products those for few tokens would make
};

// For up to so many tokens, whose panel `pack` makes: of lines of so many dwords, not 32. It stores as well.
struct QuadFew {
  std::int32_t tokens;  // 0: there is none
  void (*pack)(const QuadPack&);
  void (*product)(const LaneProduct&);
  void (*columns)(const LaneProduct&) = nullptr;  // of lines that it puts together itself (LaneTask)
};

// What one instruction set offers. `multiply` or `range` is that of pairs.h on groups of 64, with sums in
// int32; or there is `lanes` instead, or `few_rows`, for blocks of few outputs: these store, too.
struct QuadKernels {
  const char* family;
  double tile_cycles;   // that 16 outputs, 64 features and 32 tokens take: a figure for the configuration
  std::int32_t rows;    // outputs of a block row are a multiple of it
  std::int32_t join;    // outputs of a product of what is no such multiple, or less (of_product)
  std::int32_t tokens;  // of a panel
  bool by_line;         // a group of W is [line][output][4], else [output][64]
  bool complements = false;  // the total of an output is Σ |w| of its negative weights, not Σ w
  // Sums are by token, from blocks of 32 outputs × 32 features; any others are multiplied as if all of W were
  // stored.
  bool by_token = false;
  std::int32_t (*fewest)(const QuadBlocks&) = nullptr;  // tokens from which it takes a weight; 0: never
  const char* takes = "";                               // what it does take, for who asks about the others
  void (*enter)();
  void (*leave)();
  void (*pack)(const QuadPack&);
  // Whole vectors of a network's hidden features, to 2⁻¹² of each.
  void (*activate)(Activation activation, float* values, std::int64_t count) = nullptr;
  void (*multiply)(const PairProduct&) = nullptr;
  void (*range)(const PairRange&) = nullptr;
  void (*store)(const QuadStore&) = nullptr;
  void (*lanes)(const LaneProduct&) = nullptr;
  void (*few_rows)(const QuadRows&) = nullptr;
  QuadFew few[2] = {};  // the fewest first
  // What is derived for these and for kernels that take fewer or more tokens lies in one buffer; null: alone.
  const QuadKernels *few_tokens = nullptr, *many_tokens = nullptr;
};

extern const QuadKernels kQuadsScalar;
#if defined(__x86_64__)
extern const QuadKernels kQuadsAvx2;
extern const QuadKernels kQuadsAvx2Rows;
extern const QuadKernels kQuadsAvxVnni;
extern const QuadKernels kQuadsAvxVnniRows;
extern const QuadKernels kQuadsVnni;
extern const QuadKernels kQuadsVnniRows;
extern const QuadKernels kQuadsAmx;
extern const QuadKernels kQuadsAmxTokens;
#endif

}  // namespace rarefy::cpu
