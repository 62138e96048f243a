// What the input gradient of tall vectors prepares and packs.
#include "cuda/sm90/tall_grad_input.h"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = kThreads / 32;  // of W for a thread block: a warp each
constexpr int kSpan = 8192;              // rows of W that a warp packs
constexpr int kLeastRows = 32;           // of a block

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

// A warp for a column of W and kSpan of its rows: first what is stored where, then all rows, eight at a time:
// loads that wait for nothing but that, and whole sectors of Wᵀ's blocks.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParams p) {
  __shared__ int stored[kColumns][kSpan / kLeastRows];  // by block row: the place in values, or -1
  const int mine = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = static_cast<int>(blockIdx.x) * kColumns + mine;
  const int first_row = static_cast<int>(blockIdx.y) * kSpan,
            end_row = min(p.across * p.side, first_row + kSpan);
  const int first_block = first_row / p.block_rows, last_block = (end_row - 1) / p.block_rows;
  int* entries = stored[mine];
  for (int i = lane; i <= last_block - first_block; i += 32) entries[i] = -1;
  __syncwarp();
  if (column < p.cols) {
    const int end = p.ccol[column + 1];
    for (int at = p.ccol[column] + lane; at < end; at += 32) {
      const int row = p.row[at];
      if (row >= first_block && row <= last_block) entries[row - first_block] = p.perm[at];
    }
  }
  __syncwarp();
  const int row_eights = p.side / 8;  // of a block's row
  uint4* to = p.packed +
              (static_cast<std::int64_t>(column / p.side) * p.across * p.side + column % p.side) * row_eights;
#pragma unroll 8
  for (int row = first_row + lane * 8; row < end_row; row += 256) {
    const int block_row = row / p.block_rows, entry = entries[block_row - first_block];
    uint4 v{0, 0, 0, 0};
    if (entry >= 0)
      v = __ldcs(reinterpret_cast<const uint4*>(p.values + static_cast<std::int64_t>(entry) * p.block_rows +
                                                (row - block_row * p.block_rows)));
    if (row + 8 > p.rows) {  // what is padding in W is zero here
      auto* halves = reinterpret_cast<std::uint16_t*>(&v);
#pragma unroll
      for (int h = 0; h < 8; ++h) {
        if (row + h >= p.rows) halves[h] = 0;
      }
    }
    to[static_cast<std::int64_t>(row / p.side) * p.side * row_eights + row % p.side / 8] = v;
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
  const dim3 grid(static_cast<unsigned>(up(p.cols, side(p)) * side(p) / kColumns),
                  static_cast<unsigned>(up(rows, kSpan)));
  pack_kernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
