// The weight gradient of blocks that no tensor core kernel takes: all of W's gradient, in tiles that the
// block gradient makes, and then what is stored is read out of it. As fast as dense whatever the density.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/block_gradient.h"

namespace rarefy::sm90 {

inline constexpr std::int64_t kDenseTile = 128;

// What lies in workspace: the index of all tiles, then the tiles.
struct DenseGradient {
  GradientProblem problem;  // of the blocks that are stored
  explicit DenseGradient(const GradientProblem& p) : problem(p) {}

  std::int64_t tile_rows() const { return (problem.rows + kDenseTile - 1) / kDenseTile; }
  std::int64_t tile_cols() const { return (problem.cols + kDenseTile - 1) / kDenseTile; }
  std::int64_t tiles() const { return tile_rows() * tile_cols(); }
  std::int64_t crow_words() const { return (tile_rows() + 1 + 63) / 64 * 64; }
  std::int64_t index_bytes() const { return (crow_words() + (tiles() + 63) / 64 * 64) * 4; }
  std::int64_t bytes() const {
    return index_bytes() +
           tiles() * kDenseTile * kDenseTile * static_cast<std::int64_t>(size_of(problem.dtype));
  }
};

// crow and col of all tiles.
cudaError_t fill_dense_index(const DenseGradient& dense, std::int32_t* index, cudaStream_t stream);

// dvalues: what the pattern stores of `tiles`; zeros in the padding.
cudaError_t read_stored(const DenseGradient& dense, const std::int32_t* crow, const std::int32_t* col,
                        const void* tiles, void* dvalues, cudaStream_t stream);

}  // namespace rarefy::sm90
