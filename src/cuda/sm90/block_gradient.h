// The gradient of stored blocks, host side: grad_weight for blocks whose sides are multiples of 16.
// A tile is 64 rows of W times 512 features of X that these store, or 128 times 256 where blocks are so high,
// or halves of two of them, or fewer features, summed over a share of the tokens; the thread blocks of a
// cluster have the other shares and add up a part of the sums each. Features of X come in panels of 64, or
// for blocks with smaller sides of 32, or of 16 of an X that is transposed first: those that any of the 64
// rows stores, which are twice 32 that store anything (RowUnits). f32 is rounded to tf32; X is transposed
// first for all panels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/gradient_tiles.h"
#include "cuda/sm90/strips.h"
#include "rarefy/dtype.h"

namespace rarefy::sm90 {

struct GradientProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, block_cols = 0, blocks = 0;
  std::int64_t dy_stride = 0, x_stride = 0;  // elements between tokens

  bool whole() const { return block_rows % 64 == 0 && block_cols % 64 == 0; }  // blocks are whole cells
  std::int64_t block_row_count() const { return (rows + block_rows - 1) / block_rows; }
};

struct GradientConfig {
  int split = 1;  // thread blocks that share the tokens of a tile, or of the last ones: 1, 2 or 4
  int wide = 64;  // features of a panel: 64, or 32 or 16 where blocks are smaller
  // Tiles of two strips: where block rows come in pairs of 64, or where their columns are mostly the same.
  bool two = true;
  bool pairs = false;  // what is left of two rows may be one tile
  bool even = false;   // tiles of a row are of one width, and nothing is left
  int most = 0;  // panels of X of a tile, fewer than it has room for; 0: all. Of 64: all or half of them
  // Whole rounds of tiles, a thread block each, come before those that share their tokens: so many of both. A
  // pattern's further tiles are not shared. 0: all tiles alike.
  int alone = 0, shared = 0;
  // Thread blocks that take tiles of panels of 64, of which each has all tokens, one after the other, if
  // there is a list of them. 0: one each.
  int queues = 0;

  TileShape shape() const { return {wide, two, pairs, even, most}; }
  int columns() const { return shape().columns(); }
  std::string text() const {
    return "split=" + std::to_string(split) + " wide=" + std::to_string(wide) +
           " strips=" + (two ? "2" : "1") + " pairs=" + (pairs ? "1" : "0") +
           (wide == 64 ? "" : std::string(" even=") + (even ? "1" : "0")) +
           (wide == 64 && most == 0 ? "" : " most=" + std::to_string(most)) +
           (alone == 0 ? "" : " alone=" + std::to_string(alone) + " shared=" + std::to_string(shared)) +
           (queues == 0 ? "" : " queues=" + std::to_string(queues));
  }
};

// What is prepared has the lists of both, one behind the other: tokens decide which one a call takes.
GradientConfig whole_tiles(const GradientConfig& config);
GradientConfig half_tiles(const GradientConfig& config);

struct GradientCandidate {
  GradientConfig config;
  double microseconds = 0;  // predicted
  std::string reason;       // why not; empty if it can run
};

std::string unsupported(const GradientProblem& problem);
std::vector<GradientCandidate> gradient_candidates(const GradientProblem& problem, const Machine& machine);
GradientConfig configure(const GradientProblem& problem, const Machine& machine);
// Whether the kernels take a configuration, which may be a forced one.
bool valid(const GradientProblem& problem, const GradientConfig& config);

// Thread blocks of a launch: the most tiles that a pattern of these sizes can have. Each reads its own in a
// list made once, or, with panels of 64, finds it in crow and col; those that have none leave.
std::int64_t tiles_at_most(const GradientProblem& problem, const GradientConfig& config);
RAREFY_HOST_DEVICE constexpr int tile_words(int wide) {  // of the list
  return wide == 64 ? 29 : 142 + 512 / wide;
}
std::int64_t union_rows(const GradientProblem& problem, const GradientConfig& config);  // of narrow panels
inline constexpr int kMostUnionColumns = 1 << 16;                                       // of W
// Of panels of 64 behind the list of whole tiles, of others behind each row's count of columns and its units.
std::int64_t list_at(const GradientProblem& problem, const GradientConfig& config);
std::int64_t prepared_words(const GradientProblem& problem, const GradientConfig& config);

// Queues the kernels that make the lists. Splits do not matter, nor, with panels of 64, `most`.
cudaError_t prepare(const GradientProblem& problem, const GradientConfig& config, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream);

struct GradientOperands {  // device pointers, 16-byte aligned
  const void *dy = nullptr, *x = nullptr;
  const std::int32_t *crow = nullptr, *col = nullptr;
  void* dvalues = nullptr;
  const std::int32_t* prepared = nullptr;  // null: tiles are found by each thread block; panels of 64 alone
  void* workspace = nullptr;               // workspace_bytes
  bool accumulate = false;                 // add to what dvalues holds; its padding gets 0 all the same
  // The gradient of a bias, rows elements: the sum of dY over the tokens. Null: not asked for; of 16-bit
  // dtypes alone, as f32 comes rounded.
  void* dbias = nullptr;
};

// Whether the sum of dY is worth less in a pass of its own: not where that costs more. f32 comes rounded to
// tf32, and sums of that are not what a bias wants.
bool sums_dy(const GradientProblem& problem, const GradientConfig& config);

// Whether X is transposed first: panels of 16, and tf32, whose products want tokens side by side.
bool transposes(const GradientProblem& problem, const GradientConfig& config);
// Of X by feature.
std::int64_t workspace_bytes(const GradientProblem& problem, const GradientConfig& config);

cudaError_t launch(const GradientProblem& problem, const GradientConfig& config,
                   const GradientOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
