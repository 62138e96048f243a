// Products of integers modulo their bits: a thread for each element of Y, its sum in the order of the blocks.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/integers.h"
#include "cuda/status.h"

namespace rarefy {

namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kMostGroups = 1 << 20;  // beyond, threads take several elements

template <class U>
struct IntegerParams {
  const U *x, *values, *bias;
  U* y;
  const std::int32_t *crow, *col;
  std::int64_t elements, rows, cols, block_rows, block_cols;
  bool relu;
};

template <class U>
__global__ void integer_kernel(const IntegerParams<U> p) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < p.elements;
       at += step) {
    const std::int64_t m = at / p.rows, n = at % p.rows, i = n / p.block_rows;
    const U* x = p.x + m * p.cols;
    std::uint64_t sum = p.bias == nullptr ? 0 : p.bias[n];
    for (std::int64_t e = p.crow[i]; e < p.crow[i + 1]; ++e) {
      const U* row = p.values + (e * p.block_rows + n % p.block_rows) * p.block_cols;
      const std::int64_t k = p.col[e] * p.block_cols, count = min(p.block_cols, p.cols - k);
      for (std::int64_t c = 0; c < count; ++c) sum += std::uint64_t{x[k + c]} * row[c];
    }
    // The sign is the highest of the bits that stay.
    const bool negative = (sum >> (8 * sizeof(U) - 1) & 1) != 0;
    p.y[at] = p.relu && negative ? U{0} : static_cast<U>(sum);
  }
}

template <class U>
cudaError_t launch(const IntegerParams<U>& params, cudaStream_t stream) {
  if (params.elements == 0) return cudaSuccess;
  const auto groups =
      static_cast<unsigned>(std::min((params.elements + kThreads - 1) / kThreads, kMostGroups));
  integer_kernel<<<groups, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

Status integer_linear_on_device(std::string_view op, int bytes, const void* x, std::int64_t tokens,
                                const PlanView& plan, const void* values, const void* bias,
                                Activation activation, void* y, const Context& context) {
  if (Status status = check_integers(op, bytes, activation); !status.ok()) return status;
  const BsrShape& s = plan.shape;
  const auto run = [&](auto unit) {
    using U = decltype(unit);
    const IntegerParams<U> params{static_cast<const U*>(x),
                                  static_cast<const U*>(values),
                                  static_cast<const U*>(bias),
                                  static_cast<U*>(y),
                                  plan.crow,
                                  plan.col,
                                  tokens * s.rows,
                                  s.rows,
                                  s.cols,
                                  s.block_rows,
                                  s.block_cols,
                                  activation == Activation::relu};
    return launch(params, static_cast<cudaStream_t>(context.stream));
  };
  switch (bytes) {
    case 1: return cuda::launch_status(op, run(std::uint8_t{}));
    case 2: return cuda::launch_status(op, run(std::uint16_t{}));
    case 4: return cuda::launch_status(op, run(std::uint32_t{}));
    default: return cuda::launch_status(op, run(std::uint64_t{}));
  }
}

}  // namespace rarefy
