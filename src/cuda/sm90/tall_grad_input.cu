// What the input gradient of tall vectors prepares and packs.
#include "cuda/sm90/tall_grad_input.h"

#include <algorithm>

#include "cuda/shared_limit.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = kThreads / 32;  // of W for a thread block: a warp each
constexpr int kSpan = 8192;              // rows of W that it packs at once: 128 KB

std::int64_t up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Of a block of Wᵀ: those of 128 share more of X.
std::int64_t side(const Product& p) { return p.rows % 128 == 0 && p.cols % 128 == 0 ? 128 : 64; }

std::int64_t index_words(const Product& p) {
  return up(1 + up(p.cols, side(p)) * (1 + up(p.rows, side(p))), 32) * 32;
}

__global__ void __launch_bounds__(kThreads)
    all_blocks_kernel(int block_rows, int block_cols, int* offsets, int* others) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i <= block_rows) offsets[i] = i * block_cols;
  if (i < block_rows * block_cols) others[i] = i % block_cols;
}

struct PackParams {
  const int *ccol, *row, *perm;
  const std::uint16_t* values;
  uint4* packed;
  int rows, cols, block_rows;  // of W
  int side, across;            // of Wᵀ's blocks; of them in a row
};

// A thread block for eight columns of W and kSpan of its rows: zeros and what is stored go together in shared
// memory, and leave as rows of Wᵀ's blocks.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  extern __shared__ uint4 eights[];  // of rows of W: [column][eight]
  const int self = static_cast<int>(threadIdx.x), first_row = static_cast<int>(blockIdx.y) * kSpan,
            end_row = min(p.across * p.side, first_row + kSpan), count = (end_row - first_row) / 8;
  for (int i = self; i < count * kColumns; i += kThreads) eights[i] = {0, 0, 0, 0};
  __syncthreads();
  const int mine = self / 32, lane = self % 32, pieces = p.block_rows / 8;
  const int column = static_cast<int>(blockIdx.x) * kColumns + mine;
  if (column < p.cols) {
    const int begin = p.ccol[column], end = p.ccol[column + 1];
#pragma unroll 4
    for (int i = lane; i < (end - begin) * pieces; i += 32) {
      const int at = begin + i / pieces, piece = i % pieces, row = p.row[at] * p.block_rows + piece * 8;
      if (row < first_row || row >= end_row) continue;
      uint4 v = *reinterpret_cast<const uint4*>(
          p.values + static_cast<std::int64_t>(p.perm[at]) * p.block_rows + piece * 8);
      if (row + 8 > p.rows) {  // what is padding in W is zero here
        auto* halves = reinterpret_cast<std::uint16_t*>(&v);
        for (int h = max(0, p.rows - row); h < 8; ++h) halves[h] = 0;
      }
      eights[mine * count + (row - first_row) / 8] = v;
    }
  }
  __syncthreads();
  const int row_eights = p.side / 8;  // of a block's row
  for (int i = self; i < count * kColumns; i += kThreads) {
    const int k = static_cast<int>(blockIdx.x) * kColumns + i / count, e = first_row / 8 + i % count;
    const std::int64_t block = std::int64_t{k / p.side} * p.across + e / row_eights;
    p.packed[(block * p.side + k % p.side) * row_eights + e % row_eights] = eights[i];
  }
}

}  // namespace

StripProblem dense_problem(const Product& p) {
  StripProblem dense;
  dense.dtype = p.dtype;
  dense.tokens = p.tokens;
  dense.rows = p.cols;
  dense.cols = p.rows;
  dense.block_rows = dense.block_cols = side(p);
  dense.blocks = up(p.rows, side(p)) * up(p.cols, side(p));
  dense.x_stride = p.x_stride;
  dense.y_stride = p.y_stride;
  return dense;
}

std::string tall_grad_input_unsupported(const Product& p) {
  if (p.block_rows % 32 != 0) return "blocks must have a multiple of 32 rows";
  return unsupported(dense_problem(p));
}

std::int64_t tall_grad_input_words(const Product& p, int sms) {
  return index_words(p) + StripPlan(dense_problem(p), sms).words;
}

const std::int32_t* strip_plan_of(const Product& p, const std::int32_t* words) {
  return words + index_words(p);
}

cudaError_t prepare_tall_grad_input(const Product& p, int sms, std::int32_t* words, cudaStream_t stream) {
  const int block_rows = static_cast<int>(up(p.cols, side(p))),
            block_cols = static_cast<int>(up(p.rows, side(p)));
  std::int32_t* others = words + 1 + block_rows;
  const auto blocks = static_cast<unsigned>(up(std::int64_t{block_rows} * block_cols + 1, kThreads));
  all_blocks_kernel<<<blocks, kThreads, 0, stream>>>(block_rows, block_cols, words, others);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  return prepare(dense_problem(p), sms, {words, others, nullptr}, words + index_words(p), stream);
}

std::int64_t tall_grad_input_packed_bytes(const Product& p) {
  const StripProblem dense = dense_problem(p);
  return dense.blocks * dense.block_rows * dense.block_cols * 2;
}

cudaError_t pack_tall_grad_input(const Product& p, const ProductIndex& index, const void* values,
                                 void* packed, cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const PackParams params{index.offsets,
                          index.others,
                          index.entries,
                          static_cast<const std::uint16_t*>(values),
                          static_cast<uint4*>(packed),
                          n(p.rows),
                          n(p.cols),
                          n(p.block_rows),
                          n(side(p)),
                          n(up(p.rows, side(p)))};
  const std::int64_t rows = up(p.rows, side(p)) * side(p);
  const int shared = n(std::min<std::int64_t>(rows, kSpan) * kColumns * 2);
  static cuda::SharedLimit limit;
  if (const cudaError_t status = limit.allow(pack_kernel, shared); status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>(up(p.cols, side(p)) * side(p) / kColumns),
                  static_cast<unsigned>(up(rows, kSpan)));
  pack_kernel<<<grid, kThreads, static_cast<std::size_t>(shared), stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
