// dX = dY W. A thread block owns up to kRows columns of one block column and kCols tokens at a time,
// and walks the stored rows of that block column through the transposed index.
#include "cuda/simt/kernels.h"
#include "cuda/simt/launch.cuh"

namespace rarefy::cuda::simt {
namespace {

using namespace device;

template <class Tile, class T>
__global__ void __launch_bounds__(Tile::kThreads)
    grad_input_kernel(Plan plan, const T* values, Matrix<const T> dy, Matrix<T> dx) {
  const std::int64_t chunks = (plan.block_cols + Tile::kRows - 1) / Tile::kRows;  // of a block column
  const std::int64_t block_col = blockIdx.x / chunks;
  const std::int64_t first_col = blockIdx.x % chunks * Tile::kRows;  // inside the block column
  const std::int64_t first_k = block_col * plan.block_cols + first_col;
  const std::int64_t cols = min(plan.block_cols - first_col, plan.cols - first_k);
  if (cols <= 0) return;  // nothing but padding

  const std::int64_t first_entry = plan.ccol[block_col];
  const std::int64_t stored_rows = (plan.ccol[block_col + 1] - first_entry) * plan.block_rows;
  const auto block_rows = static_cast<std::uint32_t>(plan.block_rows);

  // The s-th stored row of this block column. s < 2^32, and a 32-bit division is far cheaper.
  const auto stored_row = [&](std::int64_t s) -> Step {
    const std::int64_t entry = first_entry + static_cast<std::uint32_t>(s) / block_rows;
    const std::int64_t r = static_cast<std::uint32_t>(s) % block_rows;
    const std::int64_t n = plan.row[entry] * plan.block_rows + r;
    if (n >= plan.rows) return {kSkip, kSkip};
    return {(plan.perm[entry] * plan.block_rows + r) * plan.block_cols + first_col, n * dy.col_stride};
  };

  for (std::int64_t m0 = std::int64_t{blockIdx.y} * Tile::kCols; m0 < dy.rows;
       m0 += std::int64_t{gridDim.y} * Tile::kCols) {
    tile_product<Tile>(
        values, Along::index, dy.data, dy.by_feature() ? Along::index : Along::steps, stored_rows,
        [&](int i) { return i < cols ? std::int64_t{i} : kSkip; },
        [&](int j) { return m0 + j < dy.rows ? (m0 + j) * dy.row_stride : kSkip; }, stored_row,
        [&](int i, int j, accumulator_t<T> sum) {
          if (i >= cols || m0 + j >= dy.rows) return;
          store(dx.data + (m0 + j) * dx.row_stride + (first_k + i) * dx.col_stride, sum);
        });
  }
}

}  // namespace

cudaError_t launch_grad_input(const Call& call) {
  const BsrShape& shape = call.plan.shape;
  return with_element(call.problem.weight.dtype, [&]<class T>(T) {
    return with_tile(call.config, [&]<class Tile>(Tile) {
      return launch(grad_input_kernel<Tile, T>,
                    grid(shape.col_count() * ceil_div(shape.block_cols, Tile::kRows),
                         ceil_div(call.dy.rows, Tile::kCols)),
                    Tile::kThreads, call.stream, device_plan(call.plan), static_cast<const T*>(call.values),
                    device_matrix<T>(call.dy), device_matrix<T>(call.out));
    });
  });
}

}  // namespace rarefy::cuda::simt
