// One tile of a matrix product whose operands are gathered: what all three products are made of.
//   sum(i, j) = Σ_s  A[a_index(i) + step(s).a] · B[b_index(j) + step(s).b]
// One thread adds up an element's terms in order of s, so that the result depends on nothing else:
// neither on the tile's size nor on its neighbours.
#pragma once

#include <cstdint>

#include "convert.cuh"

namespace rarefy::device {

// A tile of rows × cols sums, shared out over threads_a × threads_b threads.
template <int rows, int cols, int threads_a, int threads_b>
struct Tile {
  static constexpr int kRows = rows, kCols = cols;
  static constexpr int kThreadsA = threads_a, kThreadsB = threads_b;
  static constexpr int kThreads = threads_a * threads_b;
};

inline constexpr int kDepth = 16;          // terms staged in shared memory at a time
inline constexpr std::int64_t kSkip = -1;  // an offset that reads as zero

struct Step {
  std::int64_t a, b;
};

// In which direction consecutive threads read an operand; choose the one contiguous in memory.
enum class Along { steps, index };

template <class Tile, class T, class IndexA, class IndexB, class StepAt, class Store>
__device__ void tile_product(const T* a, Along along_a, const T* b, Along along_b, std::int64_t steps,
                             IndexA a_index, IndexB b_index, StepAt step_at, Store store_sum) {
  using Sum = accumulator_t<T>;
  constexpr int kSumsA = Tile::kRows / Tile::kThreadsA;
  constexpr int kSumsB = Tile::kCols / Tile::kThreadsB;
  // One word of padding: threads that walk along the steps write to different banks.
  __shared__ Sum a_panel[kDepth][Tile::kRows + 1];
  __shared__ Sum b_panel[kDepth][Tile::kCols + 1];
  __shared__ std::int64_t a_offset[Tile::kRows];
  __shared__ std::int64_t b_offset[Tile::kCols];
  __shared__ Step step[kDepth];

  const int thread = static_cast<int>(threadIdx.x);
  const int thread_a = thread % Tile::kThreadsA;
  const int thread_b = thread / Tile::kThreadsA;

  const auto stage = [&](auto& panel, const T* data, const auto& offset, auto step_offset, int size,
                         Along along) {
    for (int t = thread; t < size * kDepth; t += Tile::kThreads) {
      const int s = along == Along::steps ? t % kDepth : t / size;
      const int i = along == Along::steps ? t / kDepth : t % size;
      const std::int64_t at = step_offset(s);
      panel[s][i] = offset[i] >= 0 && at >= 0 ? load(data + offset[i] + at) : Sum(0);
    }
  };

  __syncthreads();  // the tile before may still be read
  for (int i = thread; i < Tile::kRows; i += Tile::kThreads) a_offset[i] = a_index(i);
  for (int j = thread; j < Tile::kCols; j += Tile::kThreads) b_offset[j] = b_index(j);
  __syncthreads();

  Sum sum[kSumsA][kSumsB] = {};
  for (std::int64_t first = 0; first < steps; first += kDepth) {
    if (thread < kDepth) step[thread] = first + thread < steps ? step_at(first + thread) : Step{kSkip, kSkip};
    __syncthreads();
    stage(
        a_panel, a, a_offset, [&](int s) { return step[s].a; }, Tile::kRows, along_a);
    stage(
        b_panel, b, b_offset, [&](int s) { return step[s].b; }, Tile::kCols, along_b);
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kDepth; ++s) {
#pragma unroll
      for (int i = 0; i < kSumsA; ++i) {
#pragma unroll
        for (int j = 0; j < kSumsB; ++j) {
          sum[i][j] +=
              a_panel[s][thread_a + i * Tile::kThreadsA] * b_panel[s][thread_b + j * Tile::kThreadsB];
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kSumsA; ++i) {
#pragma unroll
    for (int j = 0; j < kSumsB; ++j) {
      const int row = thread_a + i * Tile::kThreadsA;
      const int col = thread_b + j * Tile::kThreadsB;
      // Padding of one operand meets the other's NaNs: its sum is zero by definition.
      const bool exists = a_offset[row] >= 0 && b_offset[col] >= 0;
      store_sum(row, col, exists ? sum[i][j] : Sum(0));
    }
  }
}

}  // namespace rarefy::device
