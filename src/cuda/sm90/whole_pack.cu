// W packed whole in one pass, zeros and values together, 16 bytes a thread; and what is stored read out of a
// gradient that was made whole.
#include <algorithm>

#include "cuda/sm90/places.cuh"
#include "cuda/sm90/whole.h"

namespace rarefy::sm90 {
namespace {

constexpr int kSpanValues = 8192;     // that a thread block packs, about
constexpr int kStagedValues = 16384;  // that it puts to their places in shared memory
constexpr int kMostEntries = 8192;

struct PackParams {
  ProductIndex index;
  int rows, cols, block_rows, block_cols;
  int span;            // columns of a thread block
  int most_rows;       // of a thread block, where values are staged
  std::int64_t pitch;  // elements between packed rows, or columns
};

// t / of and t % of for t = threadIdx.x, and then each time kPlaceThreads further, without dividing again.
struct Pieces {
  int of, major, minor;
  __device__ explicit Pieces(int its)
      : of(its), major(static_cast<int>(threadIdx.x) / its), minor(static_cast<int>(threadIdx.x) % its) {}
  __device__ void next() {
    major += kPlaceThreads / of;
    minor += kPlaceThreads % of;
    if (minor >= of) ++major, minor -= of;
  }
};

// Where a weight lies among the packed ones.
struct WholePlace {
  unsigned char* packed;
  std::int64_t next_row, next_column;  // bytes
  WholePlace(const WholeWeight& w, void* to)
      : packed(static_cast<unsigned char*>(to)),
        next_row(w.by_column ? 2 : w.pitch * 2),
        next_column(w.by_column ? w.pitch * 2 : 2) {}
  __device__ unsigned char* operator()(int y, int x) const { return packed + y * next_row + x * next_column; }
};

Product by_rows(Product p) {
  p.transposed = false;
  return p;
}

enum class Pieces16 { of_columns, of_rows };  // where blocks have 16 bytes side by side that W has so, too

// blockIdx: a block row, and a span of W's columns. First the stored block of each of the span's block
// columns is looked up, once for all of the block's rows.
template <Pieces16 kOf>
__global__ void __launch_bounds__(kPlaceThreads)
    pack_kernel(const PackParams p, const std::uint16_t* values, std::uint16_t* packed) {
  extern __shared__ int entries[];  // -1: not stored
  const int self = static_cast<int>(threadIdx.x), block_row = static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * p.span, end = min(first + p.span, p.cols);
  const int first_block = first / p.block_cols, blocks = (end - 1) / p.block_cols - first_block + 1;
  for (int i = self; i < blocks; i += kPlaceThreads) entries[i] = -1;
  __syncthreads();
  const int stop = p.index.offsets[block_row + 1];
  for (int i = p.index.offsets[block_row] + self; i < stop; i += kPlaceThreads) {
    const int at = p.index.others[i] - first_block;
    if (at >= 0 && at < blocks) entries[at] = i;
  }
  __syncthreads();
  const std::int64_t row = std::int64_t{block_row} * p.block_rows;
  const int rows = static_cast<int>(min(std::int64_t{p.block_rows}, p.rows - row));  // that exist
  // Read in any case, so that several are on their way at once.
  const auto piece_of = [&](int entry, int within) {
    const auto* from = values + std::int64_t{max(entry, 0)} * (p.block_rows * p.block_cols) + within;
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(from));
    return entry < 0 ? uint4{} : piece;
  };
  const auto write = [&](std::int64_t line, std::int64_t at, const uint4& piece) {
    *reinterpret_cast<uint4*>(packed + line * p.pitch + at) = piece;
  };
  if constexpr (kOf == Pieces16::of_columns) {
#pragma unroll 4
    for (Pieces t((rows + 7) / 8); t.major < end - first; t.next()) {
      write(first + t.major, row + t.minor * 8, piece_of(entries[t.major], t.minor * 8));
    }
  } else {
#pragma unroll 4
    for (Pieces t((end - first + 7) / 8); t.major < rows; t.next()) {
      const int x = first + t.minor * 8, block = x / p.block_cols;
      write(row + t.major, x,
            piece_of(entries[block - first_block], t.major * p.block_cols + x - block * p.block_cols));
    }
  }
}

// The number-th value of blocks of rows × columns; others are found without dividing again.
struct ValueCursor {
  int rows, columns, block = 0, row = 0, column;
  __device__ ValueCursor(int its_rows, int its_columns, int number)
      : rows(its_rows), columns(its_columns), column(number) {
    row = column / columns, column -= row * columns;
    block = row / rows, row -= block * rows;
  }
  __device__ void next(const ValueCursor& step) {
    column += step.column, row += step.row, block += step.block;
    if (column >= columns) column -= columns, ++row;
    if (row >= rows) row -= rows, ++block;
  }
};

// The stored blocks of a block row that may have one of these columns. By all threads.
__device__ int2 blocks_within(const ProductIndex& index, int block_row, int block_cols, int first, int end) {
  __shared__ int least, behind;
  int begin = index.offsets[block_row], stop = index.offsets[block_row + 1];
  if (gridDim.y == 1) return {begin, stop};
  if (threadIdx.x == 0) least = stop, behind = begin;
  __syncthreads();
  const int all = stop;
  stop = begin;
  for (int i = begin + static_cast<int>(threadIdx.x); i < all; i += kPlaceThreads) {
    const int x = index.others[i] * block_cols;
    if (x + block_cols <= first || x >= end) continue;
    if (stop == begin) atomicMin(&least, i);
    stop = i + 1;
  }
  if (stop > begin) atomicMax(&behind, stop);
  __syncthreads();
  return {least, behind};
}

// Any other blocks, W by row: a thread block puts the values of its rows and columns to their places in
// shared memory, and writes these. blockIdx.z: a share of a block's rows. Value: one of them, or as many as
// lie side by side in a block; of whole ones all lengths are counted.
template <class Value>
__global__ void __launch_bounds__(kPlaceThreads)
    stage_kernel(const PackParams p, const Value* values, std::uint16_t* packed) {
  constexpr int kAtOnce = sizeof(Value) / 2, kBatch = 8;  // loads that are under way
  extern __shared__ uint4 staged[];                       // rows of `span`
  auto* const places = reinterpret_cast<Value*>(staged);
  const int self = static_cast<int>(threadIdx.x), block_row = static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * p.span, end = min(first + p.span, p.cols);
  const int first_row = static_cast<int>(blockIdx.z) * p.most_rows;
  const std::int64_t row = std::int64_t{block_row} * p.block_rows + first_row;
  // Rows that blocks have here, and those of them that W has.
  const int its_rows = min(p.most_rows, p.block_rows - first_row),
            rows = static_cast<int>(min(std::int64_t{its_rows}, p.rows - row));
  for (int i = self; i < its_rows * p.span / 8; i += kPlaceThreads) staged[i] = {};
  const int2 blocks = blocks_within(p.index, block_row, p.block_cols, first, end);
  __syncthreads();
  const int columns = p.block_cols / kAtOnce, span = p.span / kAtOnce, from = first / kAtOnce,
            width = (end - first + kAtOnce - 1) / kAtOnce;
  ValueCursor at(its_rows, columns, self);
  const ValueCursor step(its_rows, columns, kPlaceThreads);
  const int count = (blocks.y - blocks.x) * its_rows * columns;
  for (int all = self - self % 32; all < count; all += kBatch * kPlaceThreads) {  // the same for a warp
    Value value[kBatch];
    int place[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool exists = blocks.x + at.block < blocks.y && at.row < rows;
      const int block = exists ? blocks.x + at.block : blocks.x, its_row = exists ? at.row : 0;
      const int x = p.index.others[block] * columns + at.column - from;
      value[i] =
          __ldg(values + (std::int64_t{block} * p.block_rows + first_row + its_row) * columns + at.column);
      place[i] = exists && x >= 0 && x < width ? its_row * span + x : -1;
      at.next(step);
    }
    __syncwarp();  // or ptxas stores each value before it loads the next one
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (place[i] >= 0) places[place[i]] = value[i];
    }
  }
  __syncthreads();
#pragma unroll 4
  for (Pieces t((end - first + 7) / 8); t.major < rows; t.next()) {
    *reinterpret_cast<uint4*>(packed + (row + t.major) * p.pitch + first + t.minor * 8) =
        staged[t.major * (p.span / 8) + t.minor];
  }
}

}  // namespace

cudaError_t pack(const Product& problem, const ProductIndex& by_row, const void* values, void* packed,
                 cudaStream_t stream) {
  const WholeWeight w(problem);
  if (problem.rows == 0 || problem.cols == 0) return cudaSuccess;
  if (problem.blocks == 0) return cudaMemsetAsync(packed, 0, static_cast<std::size_t>(w.bytes()), stream);
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const auto up = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  PackParams p{by_row, n(problem.rows), n(problem.cols), n(problem.block_rows), n(problem.block_cols)};
  const bool stages = !w.in_pieces(problem);
  const std::int64_t aim = stages ? kStagedValues : kSpanValues, all = (problem.cols + 7) / 8 * 8,
                     most = stages ? kStagedValues : std::min(kMostEntries * problem.block_cols, all);
  // Spans are blockIdx.y, of which there are 65,535 at most.
  const std::int64_t least = (problem.cols / 65535 + 8) / 8 * 8;
  p.span = n(std::clamp(aim / problem.block_rows / 8 * 8, std::min(least, most), std::min(most, all)));
  p.most_rows = std::min(p.block_rows, n(aim) / p.span);
  p.pitch = w.pitch;
  const auto run = [&]<class Value>(void (*kernel)(PackParams, const Value*, std::uint16_t*), int bytes) {
    kernel<<<dim3(up(p.rows, p.block_rows), up(p.cols, p.span), stages ? up(p.block_rows, p.most_rows) : 1),
             kPlaceThreads, static_cast<std::size_t>(bytes), stream>>>(p, static_cast<const Value*>(values),
                                                                       static_cast<std::uint16_t*>(packed));
    return cudaGetLastError();
  };
  if (stages) {
    const int bytes = p.most_rows * p.span * 2;
    if (p.block_cols % 4 == 0) return run(stage_kernel<uint2>, bytes);
    return p.block_cols % 2 == 0 ? run(stage_kernel<std::uint32_t>, bytes)
                                 : run(stage_kernel<std::uint16_t>, bytes);
  }
  const int bytes = (p.span / p.block_cols + 2) * static_cast<int>(sizeof(int));
  return run(w.by_column ? pack_kernel<Pieces16::of_columns> : pack_kernel<Pieces16::of_rows>, bytes);
}

cudaError_t read_stored(const Product& problem, const ProductIndex& by_row, const void* whole, void* values,
                        cudaStream_t stream) {
  const WholeWeight w = WholeGradient(problem).lies;
  const auto run =
      w.in_pieces(problem) ? collect<std::uint16_t, 8, WholePlace> : collect<std::uint16_t, 1, WholePlace>;
  return run(by_rows(problem), by_row, values, WholePlace(w, const_cast<void*>(whole)), stream);
}

}  // namespace rarefy::sm90
