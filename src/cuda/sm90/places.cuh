// The way of stored values to places that have no order of their own, and back: zeros, then each value goes
// to its place.
#pragma once

#include "cuda/device/matrix.cuh"
#include "cuda/sm90/product.h"

namespace rarefy::sm90 {

inline constexpr int kPlaceThreads = 256;
inline constexpr int kClearBlocks = 1056;  // eight for each of 132 SMs

inline __global__ void __launch_bounds__(kPlaceThreads)
    clear_kernel(const int* count, int each, uint4* packed) {
  const std::int64_t end = std::int64_t{__ldg(count)} * each;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kPlaceThreads + threadIdx.x; i < end;
       i += std::int64_t{kClearBlocks} * kPlaceThreads)
    packed[i] = {0, 0, 0, 0};
}

// Queues zeros for *count items of `each` times 16 bytes.
inline void clear(const std::int32_t* count, int each, void* packed, cudaStream_t stream) {
  clear_kernel<<<kClearBlocks, kPlaceThreads, 0, stream>>>(count, each, static_cast<uint4*>(packed));
}

struct PlaceParams {
  ProductIndex index;
  int in, out, block_in, block_out;  // features
};

// blockIdx.x is a row of the index. A thread moves kAtOnce values that lie side by side, 16 bytes or one, to
// place(feature of Y, feature of X) of the first. f32 is rounded to tf32, to nearest.
template <class T, bool kTransposed, int kAtOnce, class Place>
__global__ void __launch_bounds__(kPlaceThreads)
    scatter_kernel(const PlaceParams p, const T* values, const Place place) {
  using device::to_tf32;
  const int begin = p.index.offsets[blockIdx.x], end = p.index.offsets[blockIdx.x + 1];
  const int each = p.block_in * p.block_out / kAtOnce, count = (end - begin) * each;
  for (int t = static_cast<int>(blockIdx.y) * kPlaceThreads + static_cast<int>(threadIdx.x); t < count;
       t += static_cast<int>(gridDim.y) * kPlaceThreads) {
    const int at = begin + t / each, within = t % each * kAtOnce;
    // A block is (features of Y, features of X), for grad_input the other way round.
    const int inner = kTransposed ? p.block_out : p.block_in, row = within / inner, column = within % inner;
    const int y = static_cast<int>(blockIdx.x) * p.block_out + (kTransposed ? column : row);
    const int x = p.index.others[at] * p.block_in + (kTransposed ? row : column);
    if (y >= p.out || x >= p.in) continue;  // padding
    const int entry = kTransposed ? p.index.entries[at] : at;
    const T* from = values + std::int64_t{entry} * each * kAtOnce + within;
    unsigned char* to = place(y, x);
    if constexpr (kAtOnce == 1) {
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<std::uint32_t*>(to) = to_tf32(*from);
      } else {
        *reinterpret_cast<T*>(to) = *from;
      }
    } else {
      uint4 out = __ldg(reinterpret_cast<const uint4*>(from));
      if constexpr (sizeof(T) == 4) {
        for (std::uint32_t* word : {&out.x, &out.y, &out.z, &out.w}) *word = to_tf32(__uint_as_float(*word));
      }
      *reinterpret_cast<uint4*>(to) = out;
    }
  }
}

// The other way round, for a weight by rows: values from their places, zeros in the padding.
template <class T, int kAtOnce, class Place>
__global__ void __launch_bounds__(kPlaceThreads)
    collect_kernel(const PlaceParams p, T* values, const Place place) {
  const int begin = p.index.offsets[blockIdx.x], end = p.index.offsets[blockIdx.x + 1];
  const int each = p.block_in * p.block_out / kAtOnce, count = (end - begin) * each;
  T* const to = values + std::int64_t{begin} * each * kAtOnce;
  for (int t = static_cast<int>(blockIdx.y) * kPlaceThreads + static_cast<int>(threadIdx.x); t < count;
       t += static_cast<int>(gridDim.y) * kPlaceThreads) {
    const int within = t % each * kAtOnce;
    const int y = static_cast<int>(blockIdx.x) * p.block_out + within / p.block_in;
    const int x = p.index.others[begin + t / each] * p.block_in + within % p.block_in;
    const bool stored = y < p.out && x < p.in;
    if constexpr (kAtOnce == 1) {
      to[t] = stored ? *reinterpret_cast<const T*>(place(y, x)) : T{};
    } else {
      uint4 out{0, 0, 0, 0};
      if (stored) out = *reinterpret_cast<const uint4*>(place(y, x));
      reinterpret_cast<uint4*>(to)[t] = out;
    }
  }
}

inline PlaceParams place_params(const Product& p, const ProductIndex& index) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  return {index, n(p.in_features()), n(p.out_features()), n(p.block_in()), n(p.block_out())};
}

// Thread blocks for all SMs; each takes a share of a row of the index.
inline dim3 place_grid(const Product& p) {
  const std::int64_t rows = (p.out_features() + p.block_out() - 1) / p.block_out();
  return {static_cast<unsigned>(rows), static_cast<unsigned>(1 + 2048 / rows)};
}

template <class T, bool kTransposed, int kAtOnce, class Place>
cudaError_t scatter(const Product& p, const ProductIndex& index, const void* values, const Place& place,
                    cudaStream_t stream) {
  scatter_kernel<T, kTransposed, kAtOnce><<<place_grid(p), kPlaceThreads, 0, stream>>>(
      place_params(p, index), static_cast<const T*>(values), place);
  return cudaGetLastError();
}

template <class T, int kAtOnce, class Place>
cudaError_t collect(const Product& p, const ProductIndex& index, void* values, const Place& place,
                    cudaStream_t stream) {
  if (p.blocks == 0) return cudaSuccess;
  collect_kernel<T, kAtOnce>
      <<<place_grid(p), kPlaceThreads, 0, stream>>>(place_params(p, index), static_cast<T*>(values), place);
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
