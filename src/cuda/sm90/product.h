// A product with blocks as the kernels by strips and by unions see it: linear, or grad_input with W's roles
// swapped.
#pragma once

#include <cstdint>
#include <numeric>

#include "rarefy/dtype.h"
#include "rarefy/linear.h"

namespace rarefy::sm90 {

// Parts of `size` features that a block may touch, which begins at a multiple of its own.
constexpr std::int64_t touched(std::int64_t block, std::int64_t size) {
  if (size % block == 0) return 1;
  return block % size == 0 ? block / size : (block + size - 2) / size + 1;
}

// Blocks that `size` features meet, which begin at a multiple of that: the mean.
inline double met(std::int64_t block, std::int64_t size) {
  if (block % size == 0) return 1;
  return static_cast<double>(size + block - std::gcd(size, block)) / static_cast<double>(block);
}

struct Product {
  bool transposed = false;  // grad_input: Y = X W instead of X Wᵀ
  DType dtype = DType::bf16;
  std::int64_t tokens = 0;
  std::int64_t rows = 0, cols = 0;                           // of W
  std::int64_t block_rows = 0, block_cols = 0;               // of a block
  std::int64_t blocks = 0;                                   // stored
  std::int64_t x_stride = 0, y_stride = 0;                   // elements between consecutive tokens
  rarefy::Activation activation = rarefy::Activation::none;  // device/ has another
  bool y_padded = false;  // rows of Y may be written up to a multiple of 16 bytes

  std::int64_t in_features() const { return transposed ? rows : cols; }
  std::int64_t out_features() const { return transposed ? cols : rows; }
  // A block's features of Y and of X.
  std::int64_t block_out() const { return transposed ? block_cols : block_rows; }
  std::int64_t block_in() const { return transposed ? block_rows : block_cols; }
  // Whether TMA, which writes rows of Y in pieces of so many elements, writes nothing but Y.
  bool pieces_fit(std::int64_t piece) const { return y_padded || out_features() % piece == 0; }
  double density() const {  // stored / all
    const auto up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
    const std::int64_t all = up(rows, block_rows) * up(cols, block_cols);
    return all == 0 ? 0 : static_cast<double>(blocks) / static_cast<double>(all);
  }
};

// A pattern's index on the device: by block row (crow, col) or, for grad_input, by block column (ccol, row,
// perm).
struct ProductIndex {
  const std::int32_t* offsets = nullptr;
  const std::int32_t* others = nullptr;
  const std::int32_t* entries = nullptr;  // position in values; null: in order
};

// What packed values stand for. Zeros among them may have met an Inf or a NaN of X: where sums are NaN they
// are made again of this.
struct StatedProduct {
  Product product;
  ProductIndex index;
  const void* values = nullptr;  // null: there are no such zeros
};

}  // namespace rarefy::sm90
