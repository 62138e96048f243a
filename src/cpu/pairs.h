// The contract between the driver of products in bf16 pairs (linear_pairs.cc) and their kernels, which are
// compiled once per instruction set. Plain structs only, as in kernels.h.
//
// An instruction multiplies two neighbouring features at once and adds both products to one float: tdpbf16ps
// on tiles (AMX), vdpbf16ps on vectors. 32 tokens are packed feature-major in bf16, two features to a line of
// 128 bytes: `paired`, [token][2], where W is stored in blocks of an even number of columns; else one after
// the other, and a kernel pairs what a block row stores as it goes. AMX takes 32 neighbouring features by
// token.
#pragma once

#include <cstdint>

#include "cpu/lanes.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kPanelTokens = 32;
inline constexpr std::int32_t kGroup = 32;  // reduction features multiplied at a time
inline constexpr std::int32_t kTileRows = 16;
inline constexpr std::int32_t kPairLine = 2 * kPanelTokens;        // elements of two features
inline constexpr std::int32_t kGroupSize = kGroup * kPanelTokens;  // elements of a group of X
inline constexpr std::int32_t kTileSize = kTileRows * kGroup;      // elements of a tile of W

inline constexpr double kFromMemory = 8e6;  // bytes of W that caches do not hold beside the rest

// How the features of a panel lie.
enum class PairOrder : std::uint8_t {
  apart,   // lines of one feature
  paired,  // lines of two, [token][2]
  tokens,  // as many as a group has, [token][32], or in int8 64
  halves,  // half as many
};

// Row-major X, bf16 or f32, to a panel of `padded` features, an even number; what is not there becomes 0.
struct PairPack {
  const void* x;
  bool floats;
  std::int64_t row_stride;
  std::int32_t rows, cols;
  std::int32_t padded;
  PairOrder order;
  std::uint16_t* panel;
};

// Where the features of a group lie in the panel, as offsets in elements.
enum class PairSource : std::uint8_t {
  columns,  // 32 a group, of features
  lines,    // 16, of paired features
  whole,    // one, of the first of 16 neighbouring pairs
  tokens,   // one, of 32 neighbouring features by token: so are the sums then, [token][32 outputs]
  halves,   // two, each of half as many, also by token
};

constexpr bool is_by_token(PairSource source) {
  return source == PairSource::tokens || source == PairSource::halves;
}

constexpr PairOrder order_of(PairSource source) {
  return source == PairSource::columns  ? PairOrder::apart
         : source == PairSource::tokens ? PairOrder::tokens
         : source == PairSource::halves ? PairOrder::halves
                                        : PairOrder::paired;
}

// A line holds so many features: 2, or 4 in int8 (quads.h), whose groups have 64.
constexpr std::int32_t offsets_of(PairSource source, std::int32_t features = 2) {
  constexpr std::int32_t kLines = kGroup / 2;
  return source == PairSource::columns  ? kLines * features
         : source == PairSource::lines  ? kLines
         : source == PairSource::halves ? 2
                                        : 1;
}

// Called as soon as a panel's sums are there of outputs row … row + rows of the block row, while they are in
// L1. Null: they are wanted of all panels.
struct PairDone {
  void (*call)(void* context, std::int32_t panel, std::int32_t row, std::int32_t rows, float* sums);
  void* context;
};

// sums[panel][o][token] = Σ W[o, i] · x[i][token] over the stored columns of one block row, for some panels.
struct PairProduct {
  // [group][row][32]; by line: [group][pair][row][2]; source tokens: [group][16 rows][pair][row][2]
  const std::uint16_t* w;
  const std::uint32_t* offsets;  // of each group
  PairSource source;
  std::int32_t groups;
  std::int32_t pairs;   // of them all: the last group may have less than 16
  std::int32_t rows;    // outputs: a multiple of 16, or as few as PairKernels::rows says, 4 or 8
  std::int32_t halves;  // of the panels that hold tokens: 1 or 2
  std::int32_t panels;
  const std::uint16_t* panel;  // the first
  std::int64_t panel_stride;
  std::uint16_t* gathered;  // room for kGatheredGroups groups
  float* sums;              // [rows][32], of the first panel; source tokens: [32 rows][token][row]
  std::int64_t sums_stride;
  PairDone done;
  std::int32_t ahead = 0;  // of as few outputs as PairKernels::rows: bytes, after which w is asked for
};

// The same for block rows one after the other, so that what is to be gathered is known beyond the end of one.
// Sums leave as soon as they are there, of as many outputs at a time as the kernel likes.
struct PairRange {
  const std::uint16_t* w;        // of the first block row, as of PairProduct
  const std::uint32_t* offsets;  // of its groups
  const std::int32_t* first;     // groups before each block row, and those before the end
  std::int32_t blocks, rows;
  PairSource source;
  std::int32_t halves, panels;
  const std::uint16_t* panel;
  std::int64_t panel_stride;
  std::uint16_t* gathered;
  float* sums;    // of one panel at a time
  PairDone done;  // its rows count from the first block row's on
  bool ahead;     // w is asked for ahead, into L2: it may be further away
};

// `multiply` goes through a block row in chunks of groups, each for all panels, so that its weights stay
// near: 48 KB where one tile of outputs reads X, as sums go in and out between chunks, else 24 KB, which stay
// in L1 with what is gathered.
inline constexpr std::int32_t kChunkSize = 24 * 1024, kChunkReused = 12 * 1024;  // elements of W
inline constexpr std::int32_t kMostChunk = 24;                                   // groups
inline constexpr std::int32_t kMostReused = 8;  // where several tiles of outputs read X: 16 KB of L1
inline constexpr std::int32_t kGatheredGroups = kMostReused + 2;  // and those gathered ahead

// sums[columns[e]][token] += Σ W[o, columns[e]] · dy[o][token] over the rows o of one block row of R×1
// blocks: stored as they are, [entry][rows], they are rows of a tile.
struct PairSpread {
  const std::uint16_t* w;
  const std::int32_t* columns;
  std::int32_t entries;
  std::int32_t rows;        // a multiple of 16
  const std::uint16_t* dy;  // in pairs, [rows / 2][32 tokens][2], with zeros up to a whole group
  float* sums;              // [column][32]
};

// y[token][o] = act(sums[o][token] + bias[o]), row-major, in bf16 or f32.
struct PairStore {
  const float* sums;  // [cols, in whole tiles][32], or [32 cols][token][32]
  bool by_token;
  const float* bias;  // as many
  Activation activation;
  void* y;
  bool floats;
  std::int64_t row_stride;
  std::int32_t rows, cols;
};

// act(sums[o][token] + bias[o]) as features of a panel, from `feature` on: rounded as in PairStore.
struct PairKeep {
  const float* sums;  // as of PairStore
  bool by_token;
  const float* bias;
  Activation activation;
  std::int32_t rows;  // as of a product
  PairOrder order;
  std::int64_t feature;
  std::uint16_t* panel;
  bool times = false;  // what is there, which is multiplied by what would have been written, and rounded
};

// Row-major x to pairs of tokens, [16 pairs][32 features][2], in the order that a panel's lines of one
// feature have; what is not there becomes 0.
struct PairTokens {
  const std::uint16_t* x;
  std::int64_t row_stride;
  std::int32_t rows, cols;  // at most 32 each
  std::uint16_t* to;
};

// sums[line][lane] = Σ over tokens of lines[line] · lanes[lane]: what a weight's gradient is made of.
struct PairDots {
  const std::uint16_t* lines;    // [step][line][32 tokens]
  std::int64_t lines_stride;     // to the next step's
  const std::uint32_t* offsets;  // of each line in a step, kDotLines of them; null: one after the other
  std::int32_t count;            // lines, at most kDotLines
  const std::uint16_t* lanes;    // [step][16 pairs of tokens][32][2]
  std::int64_t lanes_stride;
  std::int32_t halves;  // of the lanes: 1 or 2
  std::int32_t steps;   // of 32 tokens, at most kDotSteps
  float* sums;          // [kDotLines][32]
};
inline constexpr std::int32_t kDotLines = 32;
inline constexpr std::int32_t kDotSteps = 16;

// Runs of such sums to where they belong: added to those of the tokens before, rounded after the last ones.
struct PairRun {
  std::int64_t to;
  std::int32_t from, valid, length;  // elements that are there, and all: the others become 0
};
struct PairDeliver {
  const float* sums;
  const PairRun* runs;
  std::int32_t count;
  bool first, last;
  float* partial;  // where tokens before and after these meet; not read if first, not written if last
  std::uint16_t* out;
};

// Output blocks of 4 for up to 8 tokens.
struct PairFew {
  const std::uint16_t* w;  // of the first one: [group][16 pairs][4 outputs][2]
  const std::uint32_t* offsets;
  PairSource source;
  const std::int32_t* first;  // groups before each
  std::int32_t blocks, tokens;
  const std::uint16_t* x;  // panels of 4 tokens, as few_pack gives them
  std::int64_t x_stride;   // between two
  float* sums;             // [output][32 tokens]
};

// What one instruction set offers.
struct PairKernels {
  const char* family;
  double tile_cycles;  // that 16 outputs, 32 features and 32 tokens take: a figure for the configuration
  std::int32_t rows;   // outputs that fill a product: block rows of 4 and 8 are joined to so many
  bool by_token;       // takes blocks of whole groups by token (PairSource::tokens)
  bool by_line;        // a group of W is [pair][output][2], else [output][32]
  void (*enter)();     // before and after a task, on its thread
  void (*leave)();
  void (*pack)(const PairPack&);
  void (*multiply)(const PairProduct&);  // null: `range` takes all
  void (*range)(const PairRange&);
  // On lanes of outputs, which stores, too: the same sums, for blocks of a multiple of 16 outputs; or null.
  void (*lanes)(const LaneProduct&);
  void (*spread)(const PairSpread&);
  void (*store)(const PairStore&);
  void (*keep)(const PairKeep&);
  void (*pack_tokens)(const PairTokens&);
  void (*dots)(const PairDots&);
  void (*deliver)(const PairDeliver&);
  bool (*finite)(const std::uint16_t* values, std::int64_t count);
  std::int32_t (*token)(std::int32_t token);  // where it lies in a line of one feature
  void (*few_pack)(const PairPack&) = nullptr;
  void (*few)(const PairFew&) = nullptr;  // null: there is none
};

extern const PairKernels kPairsPortable;
#if defined(__x86_64__)
extern const PairKernels kAvx512Bf16;
extern const PairKernels kAmx;
#endif

}  // namespace rarefy::cpu
