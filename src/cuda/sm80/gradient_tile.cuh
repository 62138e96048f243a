// What the kernels of grad_weight share: which 16 columns of which stored blocks a thread block has, side by
// side.
#pragma once

#include "core/registry.h"
#include "cuda/sm80/tile.cuh"

namespace rarefy::cuda::sm80 {

struct GradientParams {
  const void *dy, *x;
  void* dvalues;
  const int *crow, *col;
  int tokens, rows, cols, block_rows, block_cols, block_row_count;
  std::int64_t dy_stride, x_stride;
  int strips;  // of a block row
};

// Thread blocks of a block row begin at crow / kPieces of it, and one more for each row before: so none has
// fewer than it needs, and none needs a list.
template <int kPieces>
__host__ __device__ inline std::int64_t first_block(std::int64_t pieces_before, std::int64_t row) {
  return pieces_before / kPieces + row;
}

template <int kPieces>
std::int64_t tiles_of(const GradientParams& p, std::int64_t blocks) {
  return first_block<kPieces>(blocks * (p.block_cols / 16), p.block_row_count) * p.strips;
}

// By all threads: for each piece of 16 columns the feature of X where it begins (none: beyond all) and its
// place in values (none: -1), for `rows` rows from the one that is returned; -1: there is nothing for this
// thread block.
template <int kPieces>
__device__ inline int find_pieces(const GradientParams& p, int rows, int (&feature)[kPieces],
                                  std::int64_t (&offset)[kPieces]) {
  const int self = static_cast<int>(threadIdx.x);
  const int index = static_cast<int>(blockIdx.x) / p.strips,
            within = static_cast<int>(blockIdx.x) % p.strips * rows, per = p.block_cols / 16;
  const auto pieces_before = [&](int row) { return std::int64_t{__ldg(p.crow + row)} * per; };
  int low = 0, high = p.block_row_count;  // the last row that begins at `index` or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (first_block<kPieces>(pieces_before(middle), middle) <= index ? low : high) = middle;
  }
  const std::int64_t begin = pieces_before(low), end = pieces_before(low + 1);
  const std::int64_t first = begin + (index - first_block<kPieces>(begin, low)) * kPieces;
  if (first >= end) return -1;
  if (self < kPieces) {
    const std::int64_t piece = first + self;
    const bool stored = piece < end;
    const int entry = static_cast<int>(piece / per), k = static_cast<int>(piece % per) * 16;
    feature[self] = stored ? __ldg(p.col + entry) * p.block_cols + k : p.cols;
    offset[self] =
        stored ? (std::int64_t{entry} * p.block_rows + within) * p.block_cols + k : std::int64_t{-1};
  }
  __syncthreads();
  return low * p.block_rows + within;
}

struct Tokens {
  int first, end;
};

inline GradientParams gradient_params(const Call& call) {
  const Problem& p = call.problem;
  const BsrShape& s = p.weight.shape;
  const auto n = [](std::int64_t i) { return static_cast<int>(i); };
  GradientParams params{};
  params.dy = call.dy.data;
  params.x = call.x.data;
  params.dvalues = call.dvalues;
  params.crow = call.plan.crow;
  params.col = call.plan.col;
  params.tokens = n(p.tokens);
  params.rows = n(s.rows);
  params.cols = n(s.cols);
  params.block_rows = n(s.block_rows);
  params.block_cols = n(s.block_cols);
  params.block_row_count = n(s.row_count());
  params.dy_stride = p.in_stride;
  params.x_stride = p.out_stride;
  return params;
}

}  // namespace rarefy::cuda::sm80
