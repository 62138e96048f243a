// The union kernel, host side: linear and grad_input for blocks of any shape but those whose sides are both
// multiples of 64, and for these in f32, as tf32. A *unit row* is 16, 32 or 64 features of Y; 64 / unit of
// them are a strip, which stores the union of their columns, packed with zeros; two or three strips are a
// group: three share more of X, two are more tiles where tokens are few. Or two thread blocks with three
// strips each are a pair, which brings each byte of X once for both. What is prepared has all of these. A
// unit row lies in one block row, or, of blocks that are no multiple of 16 high, meets several and stores
// what any of them does. Which unit rows go together and what they store follows from the pattern alone and
// is made on the device (union_plan.cu); the values are packed when they change (union_pack.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/product.h"
#include "cuda/sm90/strips.h"

namespace rarefy::sm90 {

// How strips are walked; of the weight alone, so that what is prepared serves any tokens.
struct UnionLayout {
  int strips = 2;  // of a group: two, three, or six of a pair of thread blocks
  int width = 64;  // features of a box of X: a step's, or half of them
};

struct UnionProblem : Product {
  // Features of X: of a column, which is 32 bytes, and of a step.
  int column() const { return 32 / static_cast<int>(size_of(dtype)); }
  int step() const { return 4 * column(); }
  // Blocks that do not fill all of the unit rows and columns that they touch.
  bool fine() const { return block_out() % 16 != 0 || block_in() % column() != 0; }
  // Features of Y whose columns are marked together: a block row's, or a unit row's where that meets several.
  std::int64_t marked() const { return block_out() % 16 == 0 ? block_out() : 16; }
  int unit() const { return block_out() % 64 == 0 ? 64 : block_out() % 32 == 0 ? 32 : 16; }
  std::int64_t units() const { return (out_features() + unit() - 1) / unit(); }
  std::int64_t strips() const { return (units() * unit() + 63) / 64; }
  std::int64_t groups(const UnionLayout& layout) const {
    return (strips() + layout.strips - 1) / layout.strips;
  }
  // Shares of all (0 … 1) that random patterns of this density fill: pieces of strips, boxes of X of groups.
  double piece_share() const;
  double box_share(const UnionLayout& layout) const;
};

struct UnionConfig {
  int strips = 2, width = 64;  // of a thread block; the layout's
  int tokens = 256;
  int slots = 4, pieces = 32;  // in flight
  int buffers = 2;             // for results, of each strip
  int split = 1;               // thread blocks with a part of a tile's steps each, where tiles are few
  int pair = 1;                // thread blocks that share X: 2 have a group of six strips
  bool alone = false;          // in parts: each strip has a tile of its own

  int group() const { return strips * pair; }  // strips of a group

  int ring_bytes() const;  // of what is in flight
  int shared_bytes() const;
  std::string text() const;
};

struct UnionCandidate {
  UnionConfig config;
  double microseconds = 0;  // predicted
  std::string reason;       // why not; empty if it can run
};

std::string unsupported(const UnionProblem& problem);
inline constexpr int kGroupSizes[] = {2, 3, 6};   // strips of a group, as they are prepared
using UnionLayouts = std::array<UnionLayout, 3>;  // of these
UnionLayout layout_of(const UnionProblem& problem, int strips);
UnionLayouts layouts_of(const UnionProblem& problem);
std::vector<UnionLayouts> all_union_layouts(const UnionProblem& problem);
std::vector<UnionCandidate> union_candidates(const UnionProblem& problem, const UnionLayouts& layouts,
                                             const Machine& machine);
UnionConfig configure(const UnionProblem& problem, const Machine& machine);
double predicted_microseconds(const UnionProblem& problem, const Machine& machine);  // of that

// Where things are in a prepared buffer, in words.
struct UnionPlan {
  struct Groups {        // of so many strips each; of pairs two, one behind the other, of three each
    int size, count;     // count: of groups, or of pairs
    int pair, clusters;  // thread blocks of a pair, 1 of others; of these how many at work
    std::int64_t groups_at = 0, first_at = 0, steps_at = 0, items_at = 0;
  };
  int strips, sms, columns;  // columns: room for steps of a group
  std::int64_t pieces;       // at most
  std::array<Groups, 3> groups;
  // Of fine blocks: the piece of each strip's column, and where each unit row is among `units_at`'s.
  std::int64_t places_at = 0, slots_at = 0;
  std::int64_t first_at = 0;  // of each strip its first piece, and behind the last the number of all
  std::int64_t units_at = 0, sources_at = 0, scratch_at = 0, words = 0;
  UnionPlan(const UnionProblem& problem, int thread_blocks);
  const Groups& of(int size) const { return groups[size == 2 ? 0 : size == 3 ? 1 : 2]; }
  // The last tiles of a list are cut into strips, of pairs into one of either thread block.
  static StripLists lists(const Groups& its) { return {its.count, its.size / its.pair, its.clusters}; }
  std::int64_t packed_bytes() const;
};

cudaError_t prepare(const UnionProblem& problem, const UnionLayouts& layouts, int sms,
                    const ProductIndex& index, std::int32_t* words, cudaStream_t stream);
// Fills `packed` (UnionPlan::packed_bytes) from canonical values and what prepare made; the index is read of
// fine blocks.
cudaError_t pack(const UnionProblem& problem, int sms, const ProductIndex& index, const std::int32_t* words,
                 const void* values, void* packed, cudaStream_t stream);

struct UnionOperands {
  const void* x = nullptr;
  const void* values = nullptr;  // canonical, with the index: for what must be computed again
  ProductIndex index;
  const void* bias = nullptr;
  void* y = nullptr;
  const std::int32_t* plan = nullptr;
  const void* packed = nullptr;
};

// Queues one kernel; waits for nothing and allocates nothing. The config's layout is one of those prepared.
cudaError_t launch(const UnionProblem& problem, const UnionConfig& config, int sms,
                   const UnionOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
