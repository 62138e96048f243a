// The input gradient of tall vectors: what it prepares, and the launch.
#include "cuda/sm90/tall_grad_input.h"

#include <algorithm>

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tall_scatter_kernel.cuh"
#include "cuda/sm90/tall_spread_kernel.cuh"
#include "cuda/sm90/tensor_map.h"

namespace rarefy::sm90 {
namespace {

int n(std::int64_t x) { return static_cast<int>(x); }
std::uint64_t u(std::int64_t x) { return static_cast<std::uint64_t>(x); }
std::int64_t up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr int kWord = 32;  // columns

// As many as tiles of 128 columns have, and one behind.
std::int64_t column_words(const Product& p) { return up(p.cols, 128) * 4 + 1; }

__global__ void __launch_bounds__(256)
    stored_kernel(const int* crow, const int* col, int row_blocks, int words, int2* stored) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x), row = i % row_blocks,
            first = i / row_blocks * kWord;
  if (i >= words * row_blocks) return;
  int low = crow[row], high = crow[row + 1];
  const int end = high;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (col[middle] < first) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  unsigned bits = 0;
  for (int at = low; at < end && col[at] < first + kWord; ++at) bits |= 1u << (col[at] - first);
  stored[i] = {low, static_cast<int>(bits)};
}

template <auto kKernel, class Params>
cudaError_t launch_tiles(const TallInputConfig& c, const Params& params, int threads, int sms,
                         cudaStream_t stream) {
  return launch_kernel<kKernel>(
      {.blocks = std::min(sms, params.tiles), .threads = threads, .shared_bytes = c.shared_bytes()}, params,
      stream);
}

template <class T>
cudaError_t spread(const TallInputConfig& c, const SpreadParams& params, int sms, cudaStream_t stream) {
  return c.tokens == 256 ? launch_tiles<tall_spread_kernel<T, 256>>(c, params, 384, sms, stream)
                         : launch_tiles<tall_spread_kernel<T, 128>>(c, params, 384, sms, stream);
}

template <class T, int kTokens, int kPanels>
cudaError_t launch_scatter(const TallInputConfig& c, const ScatterParams& params, int sms,
                           cudaStream_t stream) {
  return launch_tiles<tall_scatter_kernel<T, kTokens, kPanels>>(c, params, int{kScatterThreads}, sms, stream);
}

template <class T>
cudaError_t scatter(const Product& p, const TallInputConfig& c, const ScatterParams& params, int sms,
                    cudaStream_t stream) {
  if (c.tokens == 64) {
    return p.block_rows == 64 ? launch_scatter<T, 64, 1>(c, params, sms, stream)
                              : launch_scatter<T, 64, 2>(c, params, sms, stream);
  }
  return p.block_rows == 64 ? launch_scatter<T, 128, 1>(c, params, sms, stream)
                            : launch_scatter<T, 128, 2>(c, params, sms, stream);
}

template <class Params>
Params params_of(const Product& p, const TallInputConfig& c, const TallInputOperands& o) {
  Params params{};
  params.stored = reinterpret_cast<const int2*>(o.prepared);
  params.row_blocks = n(up(p.rows, p.block_rows));
  params.column_tiles = n(up(p.cols, c.columns));
  params.tiles = n(up(p.tokens, c.tokens)) * params.column_tiles;
  params.slots = static_cast<u32>(c.slots);
  params.repairs = stored_of(p, o.stated, o.dy, o.dx);
  return params;
}

cudaError_t spread(const Product& p, const TallInputConfig& c, int sms, const TallInputOperands& o,
                   const CUtensorMap& dy, cudaStream_t stream) {
  auto params = params_of<SpreadParams>(p, c, o);
  params.dy = dy;
  TensorShape shape;
  shape.box[0] = shape.box[1] = 64;
  shape.size[0] = u(p.cols);
  shape.size[1] = u(p.tokens);
  shape.stride[0] = u(p.y_stride) * 2;
  const cudaError_t status = make_tensor_map(&params.dx, p.dtype, o.dx, shape);
  if (status != cudaSuccess) return status;
  params.values = o.values;
  params.block_rows = n(p.block_rows);
  params.steps = n(up(p.rows, 64));
  return p.dtype == DType::bf16 ? spread<__nv_bfloat16>(c, params, sms, stream)
                                : spread<__half>(c, params, sms, stream);
}

cudaError_t scatter(const Product& p, const TallInputConfig& c, int sms, const TallInputOperands& o,
                    const CUtensorMap& dy, cudaStream_t stream) {
  auto params = params_of<ScatterParams>(p, c, o);
  params.dy = dy;
  TensorShape shape;
  shape.box[0] = 64;
  shape.box[1] = kScatterRun;
  shape.size[0] = u(p.block_rows);
  shape.size[1] = u(p.blocks);
  shape.stride[0] = u(p.block_rows) * 2;
  const cudaError_t status = make_tensor_map(&params.values, p.dtype, o.values, shape);
  if (status != cudaSuccess) return status;
  params.col = o.col;
  params.dx = o.dx;
  params.dx_stride = p.y_stride;
  params.tokens = n(p.tokens);
  params.cols = n(p.cols);
  params.columns = c.columns;
  params.words = n(column_words(p));
  if (o.stated.values == o.values) params.repairs.values = nullptr;  // no zeros
  return p.dtype == DType::bf16 ? scatter<__nv_bfloat16>(p, c, params, sms, stream)
                                : scatter<__half>(p, c, params, sms, stream);
}

}  // namespace

std::int64_t tall_input_words(const Product& p) {
  return 2 * column_words(p) * std::max<std::int64_t>(1, up(p.rows, p.block_rows));
}

cudaError_t prepare_tall_input(const Product& p, const std::int32_t* crow, const std::int32_t* col,
                               std::int32_t* words, cudaStream_t stream) {
  const std::int64_t row_blocks = up(p.rows, p.block_rows);
  if (row_blocks == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(up(column_words(p) * row_blocks, 256));
  stored_kernel<<<blocks, 256, 0, stream>>>(crow, col, n(row_blocks), n(column_words(p)),
                                            reinterpret_cast<int2*>(words));
  return cudaGetLastError();
}

cudaError_t launch_tall_input(const Product& p, const TallInputConfig& c, int sms, const TallInputOperands& o,
                              cudaStream_t stream) {
  if (p.blocks == 0) return cudaMemset2DAsync(o.dx, u(p.y_stride) * 2, 0, u(p.cols) * 2, u(p.tokens), stream);
  CUtensorMap dy;
  TensorShape shape;
  shape.box[0] = 64;
  shape.box[1] = static_cast<std::uint32_t>(c.tokens);
  shape.size[0] = u(p.rows);
  shape.size[1] = u(p.tokens);
  shape.stride[0] = u(p.x_stride) * 2;
  const cudaError_t status = make_tensor_map(&dy, p.dtype, o.dy, shape);
  if (status != cudaSuccess) return status;
  return c.scatter ? scatter(p, c, sms, o, dy, stream) : spread(p, c, sms, o, dy, stream);
}

}  // namespace rarefy::sm90
