// Elements of Y that must be computed again from stored blocks alone: those that are NaN where zeros, packed
// for blocks that are not stored, may have met an Inf or a NaN of X. Slow, and right; nothing comes here
// while sums are finite.
#pragma once

#include <cstdint>

#include "cuda/sm90/product.h"
#include "cuda/sm90/tile/store.cuh"

namespace rarefy::sm90 {

// A product as its caller stated it: canonical values, the index, X and Y.
struct Stored {
  const void *x, *values;
  void* y;
  const int *offsets, *others, *entries;  // entries: null, or of grad_input
  std::int64_t x_stride, y_stride;
  int tokens, in, out;                        // features
  int block_in, block_out;                    // of a block
  std::int64_t x_feature = 1, y_feature = 1;  // between features
};

// Of matrices by token, as p has them.
inline Stored stored_of(const Product& p, const StatedProduct& stated, const void* x, void* y) {
  const auto n = [](std::int64_t size) { return static_cast<int>(size); };
  const ProductIndex& index = stated.index;
  return {x,
          stated.values,
          y,
          index.offsets,
          index.others,
          index.entries,
          p.x_stride,
          p.y_stride,
          n(p.tokens),
          n(p.in_features()),
          n(p.out_features()),
          n(stated.product.block_in()),
          n(stated.product.block_out())};
}

// One element, by a warp; every lane gets it. Stops at the first NaN, which stays.
template <class T>
__device__ float stored_sum(const Stored& p, std::int64_t token, int o, int lane) {
  const T* x = static_cast<const T*>(p.x) + token * p.x_stride;
  const int begin = p.offsets[o / p.block_out], row = o % p.block_out;
  const int count = (p.offsets[o / p.block_out + 1] - begin) * p.block_in;
  float sum = 0;
  for (int first = 0; first < count; first += 32) {
    const int at = first + lane;
    if (at < count) {
      const int e = begin + at / p.block_in, k = at % p.block_in;
      const int i = p.others[e] * p.block_in + k;
      const std::int64_t entry = p.entries == nullptr ? e : p.entries[e];
      const std::int64_t place = p.entries == nullptr ? (entry * p.block_out + row) * p.block_in + k
                                                      : (entry * p.block_in + k) * p.block_out + row;
      if (i < p.in)
        sum += static_cast<float>(static_cast<const T*>(p.values)[place]) *
               static_cast<float>(x[i * p.x_feature]);
    }
    if (__any_sync(~0u, sum != sum)) break;
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
  return sum;
}

// By each warp: features `first` … `first` + 15 of `count` tokens. Y is written, and the thread sees it.
template <class T, bool kActivates>
__device__ inline void repair(const Stored& p, const T* bias, Activations<kActivates> activations, int first,
                              int token, int count, int lane) {
  if (first < 0) return;
  const int end = min(token + count, p.tokens);
  const int feature = first + lane % 16;
#pragma unroll 1
  for (; token < end; token += 2) {
    const int own = token + lane / 16;
    bool bad = false;
    if (own < end && feature < p.out) {
      const T y = __ldcg(static_cast<const T*>(p.y) + own * p.y_stride + feature * p.y_feature);
      bad = static_cast<float>(y) != static_cast<float>(y);
    }
    u32 left = __ballot_sync(~0u, bad);
#pragma unroll 1
    while (left != 0) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const std::int64_t its_token = token + at / 16;
      const int o = first + at % 16;
      float sum = stored_sum<T>(p, its_token, o, lane);
      if (bias != nullptr) sum += static_cast<float>(bias[o]);
      if (lane != 0) continue;
      activations.apply_to([&]<Activation activation>() {
        static_cast<T*>(p.y)[its_token * p.y_stride + o * p.y_feature] =
            static_cast<T>(apply_rounded<T, activation>(sum));
      });
    }
  }
}

// All sums of a tile added up: NaN if one of them is.
template <int parts, int sums>
__device__ inline float sum_of_all(const float (&d)[parts][sums]) {
  float all[4] = {0, 0, 0, 0};
#pragma unroll
  for (int part = 0; part < parts; ++part) {
#pragma unroll
    for (int i = 0; i < sums; ++i) all[i % 4] += d[part][i];
  }
  return (all[0] + all[1]) + (all[2] + all[3]);
}

// The same of its first `tokens`, where what was multiplied behind these is not of X (LastTokens).
template <int parts, int sums>
__device__ inline float sum_of_tokens(const float (&d)[parts][sums], int tokens, int lane) {
  if (tokens >= parts * 2 * sums) return sum_of_all(d);
  const int its = tokens - 2 * (lane % 4);
  float all = 0;
#pragma unroll
  for (int part = 0; part < parts; ++part) {
#pragma unroll
    for (int i = 0; i < sums; ++i) all += part * 2 * sums + 8 * (i / 4) + i % 2 < its ? d[part][i] : 0;
  }
  return all;
}

// By a warpgroup: until what its stores wrote is there.
__device__ inline void wait_to_repair(const StoreLane& out) {
  if (out.warp == 0) store_wait_all();
  named_barrier(out.barrier, 128);
}

// By a warpgroup that has stored a tile, where one of its threads has a NaN among its sums: repair, by all
// warps, as they share the stores. `first` is the warp's first feature.
template <class T, bool kActivates>
__device__ inline void repair_if_nan(const Stored& p, const T* bias, Activations<kActivates> activations,
                                     float sum, const StoreLane& out, int first, int token, int count) {
  if (!named_barrier_any(out.barrier, 128, sum != sum)) return;
  wait_to_repair(out);
  repair(p, bias, activations, first, token, count, out.lane);
}

}  // namespace rarefy::sm90
