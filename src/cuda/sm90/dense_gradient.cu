// What surrounds the block gradient where all of W's gradient is made: the index of all its tiles, and the
// stored values read out of them.
#include "cuda/sm90/dense_gradient.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kDenseTile);

__global__ void __launch_bounds__(kThreads) index_kernel(int tile_rows, int tile_cols, int* crow, int* col) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i <= tile_rows) crow[i] = i * tile_cols;
  if (i < tile_rows * tile_cols) col[i] = i % tile_cols;
}

struct ReadParams {
  const int *crow, *col;
  const void* tiles;
  void* dvalues;
  int rows, cols, tile_cols;
  int block_rows, block_cols;
};

// blockIdx.x is a block row; its values, one after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) read_kernel(const ReadParams p) {
  const int begin = p.crow[blockIdx.x], end = p.crow[blockIdx.x + 1], each = p.block_rows * p.block_cols;
  const int count = (end - begin) * each;
  T* to = static_cast<T*>(p.dvalues) + static_cast<std::int64_t>(begin) * each;
  for (int t = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x); t < count;
       t += static_cast<int>(gridDim.y) * kThreads) {
    const int within = t % each;
    const int n = static_cast<int>(blockIdx.x) * p.block_rows + within / p.block_cols;
    const int k = p.col[begin + t / each] * p.block_cols + within % p.block_cols;
    T value{};
    if (n < p.rows && k < p.cols) {
      const std::int64_t tile = static_cast<std::int64_t>(n / kTile) * p.tile_cols + k / kTile;
      value = static_cast<const T*>(p.tiles)[tile * kTile * kTile + n % kTile * kTile + k % kTile];
    }
    to[t] = value;
  }
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
  if (p.blocks == 0) return cudaSuccess;
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const ReadParams params{
      crow,           col, tiles, dvalues, n(p.rows), n(p.cols), n(dense.tile_cols()), n(p.block_rows),
      n(p.block_cols)};
  const std::int64_t block_rows = p.block_row_count();
  const dim3 grid(static_cast<unsigned>(block_rows), static_cast<unsigned>(1 + 2048 / block_rows));
  if (p.dtype == DType::f32) {
    read_kernel<float><<<grid, kThreads, 0, stream>>>(params);
  } else {
    read_kernel<std::uint16_t><<<grid, kThreads, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
