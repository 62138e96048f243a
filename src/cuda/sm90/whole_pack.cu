// W packed whole in one pass, zeros and values together, 16 bytes a thread; and what is stored read out of a
// gradient that was made whole.
#include <algorithm>

#include "cuda/sm90/places.cuh"
#include "cuda/sm90/whole.h"

namespace rarefy::sm90 {
namespace {

constexpr int kSpanValues = 8192;  // that a thread block packs, about
constexpr int kMostEntries = 8192;

struct PackParams {
  ProductIndex index;
  int rows, cols, block_rows, block_cols;
  int span;            // columns of a thread block
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

enum class Packed { by_column, by_row, by_row_single };  // how 16 bytes lie in blocks: side by side, or not

// blockIdx: a block row, and a span of W's columns. First the stored block of each of the span's block
// columns is looked up, once for all of the block's rows.
template <Packed kHow>
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
  const auto value_at = [&](int entry, int within) {
    return values + std::int64_t{entry} * (p.block_rows * p.block_cols) + within;
  };
  // Read in any case, so that several are on their way at once.
  const auto piece_of = [&](int entry, int within) {
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(value_at(max(entry, 0), within)));
    return entry < 0 ? uint4{} : piece;
  };
  const auto write = [&](std::int64_t line, std::int64_t at, const uint4& piece) {
    *reinterpret_cast<uint4*>(packed + line * p.pitch + at) = piece;
  };
  if constexpr (kHow == Packed::by_column) {
#pragma unroll 4
    for (Pieces t((rows + 7) / 8); t.major < end - first; t.next()) {
      write(first + t.major, row + t.minor * 8, piece_of(entries[t.major], t.minor * 8));
    }
  } else {
#pragma unroll 4
    for (Pieces t((end - first + 7) / 8); t.major < rows; t.next()) {
      const int x = first + t.minor * 8;
      int block = x / p.block_cols, column = x - block * p.block_cols;
      block -= first_block;
      uint4 piece{};
      if constexpr (kHow == Packed::by_row) {
        piece = piece_of(entries[block], t.major * p.block_cols + column);
      } else {
        auto* elements = reinterpret_cast<std::uint16_t*>(&piece);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int entry = block < blocks ? entries[block] : -1;  // behind W's last column there is none
          if (entry >= 0) elements[i] = __ldg(value_at(entry, t.major * p.block_cols + column));
          if (++column == p.block_cols) column = 0, ++block;
        }
      }
      write(row + t.major, x, piece);
    }
  }
}

template <Packed kHow>
cudaError_t run(const PackParams& p, const void* values, void* packed, cudaStream_t stream) {
  const auto up = [](int a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  const std::size_t shared = (static_cast<std::size_t>(p.span) / p.block_cols + 2) * sizeof(int);
  pack_kernel<kHow><<<dim3(up(p.rows, p.block_rows), up(p.cols, p.span)), kPlaceThreads, shared, stream>>>(
      p, static_cast<const std::uint16_t*>(values), static_cast<std::uint16_t*>(packed));
  return cudaGetLastError();
}

}  // namespace

cudaError_t pack(const Product& problem, const ProductIndex& by_row, const void* values, void* packed,
                 cudaStream_t stream) {
  const WholeWeight w(problem);
  if (problem.rows == 0 || problem.cols == 0) return cudaSuccess;
  if (problem.blocks == 0 || (w.by_column && !w.in_pieces(problem))) {  // 16 bytes of several block rows
    const cudaError_t status = cudaMemsetAsync(packed, 0, static_cast<std::size_t>(w.bytes()), stream);
    if (status != cudaSuccess || problem.blocks == 0) return status;
    return scatter<std::uint16_t, false, 1>(by_rows(problem), by_row, values, WholePlace(w, packed), stream);
  }
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  PackParams p{by_row, n(problem.rows), n(problem.cols), n(problem.block_rows), n(problem.block_cols)};
  // Spans are blockIdx.y, of which there are 65,535 at most.
  const std::int64_t least = (problem.cols / 65535 + 8) / 8 * 8,
                     most = std::min(kMostEntries * problem.block_cols, (problem.cols + 7) / 8 * 8);
  p.span = n(std::clamp(kSpanValues / problem.block_rows / 8 * 8, std::min(least, most), most));
  p.pitch = w.pitch;
  if (w.by_column) return run<Packed::by_column>(p, values, packed, stream);
  return w.in_pieces(problem) ? run<Packed::by_row>(p, values, packed, stream)
                              : run<Packed::by_row_single>(p, values, packed, stream);
}

cudaError_t read_stored(const Product& problem, const ProductIndex& by_row, const void* whole, void* values,
                        cudaStream_t stream) {
  const WholeWeight w(problem);
  const auto run =
      w.in_pieces(problem) ? collect<std::uint16_t, 8, WholePlace> : collect<std::uint16_t, 1, WholePlace>;
  return run(by_rows(problem), by_row, values, WholePlace(w, const_cast<void*>(whole)), stream);
}

}  // namespace rarefy::sm90
