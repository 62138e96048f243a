// A dense product for weights of which zeros are left in anyway: linear and grad_input of any blocks, W
// packed whole, and their weight gradient, made whole and read out. As fast as cuBLAS with the same zeros, so
// that no pattern is slower than dense; docs/design/hopper/whole.md.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/product.h"

namespace rarefy::sm90 {

// A tile is 128 features × `tokens` tokens, of kWidths those that fill the rounds of all SMs best, or, for
// few tiles, 64 × kFewWidths. Where tiles are few, `split` thread blocks have a part of a tile's steps each;
// where a few `more` of them fill rounds, most have 248 tokens instead of 256 (8192 tokens, 4096 features: 8
// rounds of 33 × 32 tiles, not 7.8 of 32 × 32 that take as long as 8).
struct WholeConfig {
  static constexpr int kWide = 256, kNarrow = 248, kHalf = 128, kFew = 64;
  static constexpr int kWidths[] = {kWide, 208, 192, 160, kHalf}, kFewWidths[] = {kFew, kHalf};
  int tokens = kWide, split = 1, more = 0, features = 128;

  // A thread block for each tile, or for a part of one.
  bool single() const { return split > 1 || features == 64; }
  std::int64_t token_tiles(std::int64_t all) const { return (all + tokens - 1) / tokens + more; }
  std::int64_t tiles(const Product& p) const {
    return (p.out_features() + features - 1) / features * token_tiles(p.tokens);
  }

  int slot_bytes() const { return (tokens + features) * 128; }
  int slots() const { return slot_bytes() > 0 ? std::min(8, 196608 / slot_bytes()) : 0; }
  int ring_bytes() const { return slots() * slot_bytes(); }
  int shared_bytes() const { return 1024 + ring_bytes() + features / 64 * 2 * 8192; }
  std::string text() const {
    return "tokens=" + std::to_string(tokens) + " split=" + std::to_string(split) +
           " more=" + std::to_string(more) + " features=" + std::to_string(features);
  }
};

struct WholeProblem : Product {
  Layout x_layout = Layout::by_token;  // by feature: x_stride is between features
};

struct WholeCandidate {
  WholeConfig config;
  double microseconds = 0;  // predicted
  std::string reason;       // why not; empty if it can run
};

// How W lies packed: by row, or by column where blocks are columns of a multiple of 8 weights, which stay
// side by side so. Every product takes either.
struct WholeWeight {
  bool by_column;
  std::int64_t lines, pitch;  // elements between rows, or columns
  explicit WholeWeight(const Product& p) : WholeWeight(p, p.block_cols == 1 && p.block_rows % 8 == 0) {}
  WholeWeight(const Product& p, bool its_by_column)
      : by_column(its_by_column),
        lines(by_column ? p.cols : p.rows),
        pitch(((by_column ? p.rows : p.cols) + 63) / 64 * 64) {}
  // A gradient's operand, which is there: `rows` tokens, so far apart.
  WholeWeight(std::int64_t rows, std::int64_t stride) : by_column(true), lines(rows), pitch(stride) {}
  std::int64_t bytes() const { return lines * pitch * 2; }
  // Whether 16 bytes lie side by side here and in blocks.
  bool in_pieces(const Product& p) const {
    return by_column ? p.block_cols == 1 && p.block_rows % 8 == 0 : p.block_cols % 8 == 0;
  }
};

// All of W's gradient as such a product over the tokens of two matrices that lie along their features: dYᵀ X,
// or Xᵀ dY, which lies by column, where blocks are rather high than wide.
struct WholeGradient {
  WholeWeight lies;
  WholeProblem product;
  WholeWeight operand;  // dY, or X where W lies by row: the product's weight; the other one is its x
  // p: of the weight, x_stride of dY and y_stride of X.
  explicit WholeGradient(const Product& p);
};

std::string unsupported(const WholeProblem& problem);
std::vector<WholeCandidate> whole_candidates(const WholeProblem& problem, int sms);
WholeCandidate best_whole(const WholeProblem& problem, int sms);
// Why a config, which may hold anything, cannot be run; empty if it can.
std::string refuse(const WholeProblem& problem, const WholeConfig& config);

// Fills `packed`, WholeWeight::bytes, from canonical values and the index by row.
cudaError_t pack(const Product& problem, const ProductIndex& by_row, const void* values, void* packed,
                 cudaStream_t stream);

// values of what is stored, from a gradient that lies as a weight does; zeros in the padding.
cudaError_t read_stored(const Product& problem, const ProductIndex& by_row, const void* whole, void* values,
                        cudaStream_t stream);

struct WholeOperands {  // device pointers, 16-byte aligned
  const void *x = nullptr, *packed = nullptr, *bias = nullptr;
  void* y = nullptr;
  StatedProduct stated;  // without values there is nothing to repair
};

// Queues one kernel. weight: how `packed` lies.
cudaError_t launch(const WholeProblem& problem, const WholeConfig& config, int sms, const WholeWeight& weight,
                   const WholeOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
