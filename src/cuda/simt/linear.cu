// Y = act(X Wᵀ + b). A thread block owns up to kRows rows of one block row and kCols tokens at a
// time, and walks the stored columns of that block row.
#include "cuda/device/activation.cuh"
#include "cuda/simt/kernels.h"
#include "cuda/simt/launch.cuh"

namespace rarefy::cuda::simt {
namespace {

using namespace device;

// The activation goes to the device by its number.
static_assert(kActivations == 5);
template <rarefy::Activation host, device::Activation on_device>
constexpr bool kSame = static_cast<int>(host) == static_cast<int>(on_device);
static_assert(kSame<rarefy::Activation::none, device::Activation::none> &&
              kSame<rarefy::Activation::relu, device::Activation::relu> &&
              kSame<rarefy::Activation::gelu_erf, device::Activation::gelu_erf> &&
              kSame<rarefy::Activation::gelu_tanh, device::Activation::gelu_tanh> &&
              kSame<rarefy::Activation::silu, device::Activation::silu>);

template <class Tile, class T>
__global__ void __launch_bounds__(Tile::kThreads)
    linear_kernel(Plan plan, const T* values, Matrix<const T> x, const T* bias, device::Activation activation,
                  Matrix<T> y) {
  const std::int64_t chunks = (plan.block_rows + Tile::kRows - 1) / Tile::kRows;  // of a block row
  const std::int64_t block_row = blockIdx.x / chunks;
  const std::int64_t first_row = blockIdx.x % chunks * Tile::kRows;  // inside the block row
  const std::int64_t first_n = block_row * plan.block_rows + first_row;
  const std::int64_t rows = min(plan.block_rows - first_row, plan.rows - first_n);
  if (rows <= 0) return;  // nothing but padding

  const std::int64_t first_block = plan.crow[block_row];
  const std::int64_t stored_cols = (plan.crow[block_row + 1] - first_block) * plan.block_cols;
  const auto block_cols = static_cast<std::uint32_t>(plan.block_cols);

  // The s-th stored column of this block row. s < 2^32, and a 32-bit division is far cheaper.
  const auto stored_col = [&](std::int64_t s) -> Step {
    const std::int64_t block = first_block + static_cast<std::uint32_t>(s) / block_cols;
    const std::int64_t c = static_cast<std::uint32_t>(s) % block_cols;
    const std::int64_t k = plan.col[block] * plan.block_cols + c;
    if (k >= plan.cols) return {kSkip, kSkip};
    return {(block * plan.block_rows + first_row) * plan.block_cols + c, k * x.col_stride};
  };

  for (std::int64_t m0 = std::int64_t{blockIdx.y} * Tile::kCols; m0 < x.rows;
       m0 += std::int64_t{gridDim.y} * Tile::kCols) {
    tile_product<Tile>(
        values, Along::steps, x.data, x.by_feature() ? Along::index : Along::steps, stored_cols,
        [&](int i) { return i < rows ? i * plan.block_cols : kSkip; },
        [&](int j) { return m0 + j < x.rows ? (m0 + j) * x.row_stride : kSkip; }, stored_col,
        [&](int i, int j, accumulator_t<T> sum) {
          if (i >= rows || m0 + j >= x.rows) return;
          if (bias != nullptr) sum += load(bias + first_n + i);
          store(y.data + (m0 + j) * y.row_stride + (first_n + i) * y.col_stride, activate(activation, sum));
        });
  }
}

}  // namespace

cudaError_t launch_linear(const Call& call) {
  const BsrShape& shape = call.plan.shape;
  return with_element(call.problem.weight.dtype, [&]<class T>(T) {
    return with_tile(call.config, [&]<class Tile>(Tile) {
      return launch(linear_kernel<Tile, T>,
                    grid(shape.row_count() * ceil_div(shape.block_rows, Tile::kRows),
                         ceil_div(call.x.rows, Tile::kCols)),
                    Tile::kThreads, call.stream, device_plan(call.plan), static_cast<const T*>(call.values),
                    device_matrix<T>(call.x), static_cast<const T*>(call.bias),
                    static_cast<device::Activation>(call.activation), device_matrix<T>(call.out));
    });
  });
}

}  // namespace rarefy::cuda::simt
