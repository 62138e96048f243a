// What surrounds the block gradient where all of W's gradient is made: the index of all its tiles, and the
// stored values read out of them.
#include "cuda/sm90/dense_gradient.h"

#include "cuda/sm90/places.cuh"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kDenseTile);

__global__ void __launch_bounds__(kThreads) index_kernel(int tile_rows, int tile_cols, int* crow, int* col) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i <= tile_rows) crow[i] = i * tile_cols;
  if (i < tile_rows * tile_cols) col[i] = i % tile_cols;
}

// Where a weight's gradient lies in the tiles.
template <class T>
struct TilePlace {
  const T* tiles;
  int tile_cols;
  __device__ const T* operator()(int y, int x) const {
    const std::int64_t tile = static_cast<std::int64_t>(y / kTile) * tile_cols + x / kTile;
    return tiles + tile * kTile * kTile + y % kTile * kTile + x % kTile;
  }
};

template <class T>
cudaError_t read_tiles(const Product& stored, const ProductIndex& index, const void* tiles, int tile_cols,
                       void* dvalues, cudaStream_t stream) {
  const TilePlace<T> place{static_cast<const T*>(tiles), tile_cols};
  return collect<T, 1>(stored, index, dvalues, place, stream);
}

}  // namespace

cudaError_t fill_dense_index(const DenseGradient& dense, std::int32_t* index, cudaStream_t stream) {
  const auto threads = dense.tiles() + 1;  // tile_rows + 1 are no more, but for a W without features of X
  const auto blocks = static_cast<unsigned>((threads + dense.tile_rows()) / kThreads + 1);
  index_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<int>(dense.tile_rows()),
                                                static_cast<int>(dense.tile_cols()), index,
                                                index + dense.crow_words());
  return cudaGetLastError();
}

cudaError_t read_stored(const DenseGradient& dense, const std::int32_t* crow, const std::int32_t* col,
                        const void* tiles, void* dvalues, cudaStream_t stream) {
  const GradientProblem& p = dense.problem;
  const Product stored{false, p.dtype, p.tokens, p.rows, p.cols, p.block_rows, p.block_cols, p.blocks};
  const auto read = p.dtype == DType::f32 ? read_tiles<float> : read_tiles<std::uint16_t>;
  return read(stored, {crow, col, nullptr}, tiles, static_cast<int>(dense.tile_cols()), dvalues, stream);
}

}  // namespace rarefy::sm90
