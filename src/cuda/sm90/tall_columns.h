// A weight of any blocks as one of tall blocks: of each *group* of 64 or 128 features of Y the features of X
// that any of its blocks touches are stored columns, with zeros where it stores nothing. The tall kernels
// take it as if it were blocks of 64×1 or 128×1. Which columns there are follows from the pattern alone and
// is made on the device; nothing comes back to the host, which knows how many there may be.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/sm90/product.h"

namespace rarefy::sm90 {

struct TallColumns {
  Product product;
  std::int64_t height, groups;  // weights of a column
  std::int64_t most;            // columns: no more than all, and than if no two blocks met in one
  // Where things are in a prepared buffer, in words: the index by groups; for each 32 features of X that a
  // group may touch those that it does, as bits, and the first one's column; and how many of each group.
  std::int64_t offsets_at = 0, others_at = 0, places_at = 0, counts_at = 0, words = 0;

  explicit TallColumns(const Product& p);
  std::int64_t words_of_group() const { return (product.in_features() + 31) / 32; }
  // Columns that random patterns of this density have.
  std::int64_t expected() const;
  std::int64_t bytes() const { return most * height * 2; }  // of all columns' weights
  ProductIndex index(const std::int32_t* prepared) const {
    return {prepared + offsets_at, prepared + others_at, nullptr};
  }
};

std::string unsupported(const TallColumns& columns);

// Queues the kernels that fill `words`.
cudaError_t prepare(const TallColumns& columns, const ProductIndex& index, std::int32_t* words,
                    cudaStream_t stream);
// values to columns; and from columns to values, zeros in the padding.
cudaError_t pack(const TallColumns& columns, const ProductIndex& index, const std::int32_t* words,
                 const void* values, void* packed, cudaStream_t stream);
cudaError_t unpack(const TallColumns& columns, const ProductIndex& index, const std::int32_t* words,
                   const void* packed, void* values, cudaStream_t stream);

}  // namespace rarefy::sm90
