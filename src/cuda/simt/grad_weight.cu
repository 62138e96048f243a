// dW = dYᵀ X on the stored blocks. A thread block owns up to kRows rows of one block row and kCols
// of its stored columns at a time, and walks all tokens.
#include "cuda/simt/kernels.h"
#include "cuda/simt/launch.cuh"

namespace rarefy::cuda::simt {
namespace {

using namespace device;

template <class Tile, class T>
__global__ void __launch_bounds__(Tile::kThreads)
    grad_weight_kernel(Plan plan, Matrix<const T> dy, Matrix<const T> x, T* dvalues) {
  const std::int64_t chunks = (plan.block_rows + Tile::kRows - 1) / Tile::kRows;  // of a block row
  const std::int64_t block_row = blockIdx.x / chunks;
  const std::int64_t first_row = blockIdx.x % chunks * Tile::kRows;  // inside the block row
  const std::int64_t first_n = block_row * plan.block_rows + first_row;
  const std::int64_t rows = plan.block_rows - first_row;  // padding too: it gets zeros

  const std::int64_t first_block = plan.crow[block_row];
  const std::int64_t stored_cols = (plan.crow[block_row + 1] - first_block) * plan.block_cols;
  const auto block_cols = static_cast<std::uint32_t>(plan.block_cols);

  for (std::int64_t q0 = std::int64_t{blockIdx.y} * Tile::kCols; q0 < stored_cols;
       q0 += std::int64_t{gridDim.y} * Tile::kCols) {
    // The block and the column inside it of the j-th stored column from q0 on.
    const auto block_at = [&](int j) {
      return first_block + static_cast<std::uint32_t>(q0 + j) / block_cols;
    };
    const auto col_at = [&](int j) -> std::int64_t {
      return static_cast<std::uint32_t>(q0 + j) % block_cols;
    };
    const Along along_dy = dy.by_feature() ? Along::steps : Along::index;
    const Along along_x = x.by_feature() ? Along::steps : Along::index;
    tile_product<Tile>(
        dy.data, along_dy, x.data, along_x, x.rows,
        [&](int i) { return i < rows && first_n + i < plan.rows ? (first_n + i) * dy.col_stride : kSkip; },
        [&](int j) {
          if (q0 + j >= stored_cols) return kSkip;
          const std::int64_t k = plan.col[block_at(j)] * plan.block_cols + col_at(j);
          return k < plan.cols ? k * x.col_stride : kSkip;
        },
        [&](std::int64_t m) {
          return Step{m * dy.row_stride, m * x.row_stride};
        },
        [&](int i, int j, accumulator_t<T> sum) {
          if (i >= rows || q0 + j >= stored_cols) return;
          const std::int64_t r = block_at(j) * plan.block_rows + first_row + i;
          store(dvalues + r * plan.block_cols + col_at(j), sum);
        });
  }
}

}  // namespace

cudaError_t launch_grad_weight(const Call& call) {
  const BsrShape& shape = call.plan.shape;
  // Only the device knows how long each block row is: as many tiles as the average one needs.
  const std::int64_t stored_cols = ceil_div(shape.nnzb * shape.block_cols, shape.row_count());
  return with_element(call.problem.weight.dtype, [&]<class T>(T) {
    return with_tile(call.config, [&]<class Tile>(Tile) {
      return launch(grad_weight_kernel<Tile, T>,
                    grid(shape.row_count() * ceil_div(shape.block_rows, Tile::kRows),
                         ceil_div(stored_cols, Tile::kCols)),
                    Tile::kThreads, call.stream, device_plan(call.plan), device_matrix<T>(call.dy),
                    device_matrix<T>(call.x), static_cast<T*>(call.dvalues));
    });
  });
}

}  // namespace rarefy::cuda::simt
