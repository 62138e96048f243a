// Host side of a launch: picks the element type and the tile, and reports what the launch returned.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/checked.h"
#include "cuda/device/bsr.cuh"
#include "cuda/device/tile.cuh"
#include "cuda/simt/kernels.h"

namespace rarefy::cuda::simt {

inline device::Plan device_plan(const PlanView& plan) {
  const BsrShape& shape = plan.shape;
  return {shape.rows, shape.cols, shape.block_rows, shape.block_cols, plan.crow,
          plan.col,   plan.ccol,  plan.row,         plan.perm};
}

template <class T>
device::Matrix<const T> device_matrix(const MatrixView& m) {
  return {static_cast<const T*>(m.data), m.rows, m.row_stride, m.col_stride};
}

template <class T>
device::Matrix<T> device_matrix(const MutableMatrixView& m) {
  return {static_cast<T*>(m.data), m.rows, m.row_stride, m.col_stride};
}

// Calls f(T{}) for the dtypes that supports() lets through.
template <class F>
cudaError_t with_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f(double{});
    case DType::f32: return f(float{});
    case DType::bf16: return f(device::bf16{});
    case DType::f16: return f(device::f16{});
    case DType::i8: break;
  }
  return cudaErrorInvalidValue;
}

// Calls f(Tile{}) with the tile of the configuration.
template <class F>
cudaError_t with_tile(const Config& config, F&& f) {
  switch (from_config<TileChoice>(config).rows) {
    case 32: return f(device::Tile<32, 64, 8, 16>{});
    case 16: return f(device::Tile<16, 64, 4, 32>{});
    case 4: return f(device::Tile<4, 128, 1, 128>{});
    case 1: return f(device::Tile<1, 128, 1, 128>{});
    default: return cudaErrorInvalidConfiguration;
  }
}

// x covers the pattern: at most one thread block a row of W, and W has fewer than 2^31, the limit
// of grid.x. grid.y ends at 65535, so kernels walk it in strides of gridDim.y.
inline dim3 grid(std::int64_t x, std::int64_t y) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(std::clamp<std::int64_t>(y, 1, 65535)), 1};
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, void* stream, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads), 1, 1);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace rarefy::cuda::simt
