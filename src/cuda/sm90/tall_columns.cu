// What other blocks store as columns of tall ones: which they are, and the way of values there and back.
#include "cuda/sm90/tall_columns.h"

#include <algorithm>
#include <cmath>

#include "cuda/sm90/places.cuh"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kMostFeatures = 1 << 16;  // of X: bits of a group in shared memory

struct ColumnParams {
  const int *offsets, *others;  // of the blocks
  int in, block_in;             // features of X
  int block_out, block_rows;    // features of Y; rows of blocks
  int height, groups, words;    // words of `in` bits
  int *group_offsets, *columns;
  int2* places;
  int* counts;
};

// The sum of all threads' numbers, in all threads.
__device__ inline int block_sum(int mine, int* of_warps) {
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  int sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += of_warps[w];
  __syncthreads();
  return sum;
}

// A thread block for each group: what its blocks touch.
__global__ void __launch_bounds__(kThreads) touch_kernel(const ColumnParams p) {
  __shared__ std::uint32_t bits[kMostFeatures / 32];
  __shared__ int of_warps[kThreads / 32];
  const int self = static_cast<int>(threadIdx.x), group = static_cast<int>(blockIdx.x);
  for (int w = self; w < p.words; w += kThreads) bits[w] = 0;
  __syncthreads();
  // The rows of blocks that it meets are one range of the index.
  const int first = group * p.height / p.block_out,
            last = min(((group + 1) * p.height - 1) / p.block_out, p.block_rows - 1);
  const int end = p.offsets[last + 1];
  for (int e = p.offsets[first] + self; e < end; e += kThreads) {
    const int feature = p.others[e] * p.block_in, stop = min(feature + p.block_in, p.in);  // then padding
    for (int c = feature; c < stop; ++c) atomicOr(bits + c / 32, 1u << c % 32);
  }
  __syncthreads();
  int mine = 0;
  for (int w = self; w < p.words; w += kThreads) {
    p.places[std::int64_t{group} * p.words + w].x = static_cast<int>(bits[w]);
    mine += __popc(bits[w]);
  }
  const int count = block_sum(mine, of_warps);
  if (self == 0) p.counts[group] = count;
}

// A thread block for each group: where its columns begin, and which they are.
__global__ void __launch_bounds__(kThreads) column_kernel(const ColumnParams p) {
  __shared__ int of_warps[kThreads / 32], sums[kThreads / 32];
  const int self = static_cast<int>(threadIdx.x), group = static_cast<int>(blockIdx.x);
  int before = 0;
  for (int g = self; g < group; g += kThreads) before += p.counts[g];
  before = block_sum(before, of_warps);
  if (self == 0) p.group_offsets[group] = before;
  if (self == 0 && group == p.groups - 1) p.group_offsets[p.groups] = before + p.counts[group];
  // How many columns come before each thread's words.
  int2* const places = p.places + std::int64_t{group} * p.words;
  const int each = (p.words + kThreads - 1) / kThreads;
  const int begin = min(self * each, p.words), end = min(begin + each, p.words);
  int mine = 0;
  for (int w = begin; w < end; ++w) mine += __popc(places[w].x);
  int sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, sum, d);
    if (self % 32 >= d) sum += below;
  }
  if (self % 32 == 31) sums[self / 32] = sum;
  __syncthreads();
  int at = before + sum - mine;
  for (int w = 0; w < self / 32; ++w) at += sums[w];
  for (int w = begin; w < end; ++w) {
    places[w].y = at;
    for (auto left = static_cast<std::uint32_t>(places[w].x); left != 0; left &= left - 1)
      p.columns[at++] = w * 32 + __ffs(static_cast<int>(left)) - 1;
  }
}

// Where a weight lies among the packed ones.
struct ColumnPlace {
  const int2* places;
  unsigned char* packed;
  int words, height;
  __device__ unsigned char* operator()(int y, int x) const {
    const int group = y / height;
    const int2 place = __ldg(places + std::int64_t{group} * words + x / 32);
    const std::int64_t column = place.y + __popc(static_cast<unsigned>(place.x) & ((1u << x % 32) - 1));
    return packed + (column * height + y % height) * 2;
  }
};

int n(std::int64_t x) { return static_cast<int>(x); }

ColumnPlace place_of(const TallColumns& c, const std::int32_t* words, const void* packed) {
  return {reinterpret_cast<const int2*>(words + c.places_at),
          static_cast<unsigned char*>(const_cast<void*>(packed)), n(c.words_of_group()), n(c.height)};
}

// Whether eight values that lie side by side in a block do so in a column.
bool wide(const Product& p) { return (p.transposed || p.block_cols == 1) && p.block_out() % 8 == 0; }

}  // namespace

TallColumns::TallColumns(const Product& p)
    : product(p),
      height(p.block_out() % 128 == 0 ? 128 : 64),
      groups((p.out_features() + height - 1) / height),
      most(std::min(groups * p.in_features(), p.blocks * p.block_in() * touched(p.block_out(), height))) {
  const auto take = [&](std::int64_t count) {
    const std::int64_t at = words;
    words += (count + 31) / 32 * 32;
    return at;
  };
  offsets_at = take(groups + 1);
  others_at = take(most);
  places_at = take(2 * groups * words_of_group());
  counts_at = take(groups);
}

std::int64_t TallColumns::expected() const {
  const double share = 1 - std::pow(1 - product.density(), met(product.block_out(), height));
  return static_cast<std::int64_t>(share * static_cast<double>(groups * product.in_features()));
}

std::string unsupported(const TallColumns& c) {
  const Product& p = c.product;
  if (p.block_rows % 64 == 0 && p.block_cols % 64 == 0) return "blocks of 64 are strips already";
  if (p.in_features() > kMostFeatures) return "columns are found among up to 2^16 features of X";
  if (p.block_out() > INT32_MAX / (p.in_features() + p.block_in()))
    return "values of a block row are counted in 32 bits";
  if (c.most > INT32_MAX / 2) return "columns are counted in 32 bits";
  return {};
}

cudaError_t prepare(const TallColumns& c, const ProductIndex& index, std::int32_t* words,
                    cudaStream_t stream) {
  if (c.groups == 0) return cudaSuccess;
  const Product& p = c.product;
  const ColumnParams params{
      index.offsets,        index.others,        n(p.in_features()),
      n(p.block_in()),      n(p.block_out()),    n((p.out_features() + p.block_out() - 1) / p.block_out()),
      n(c.height),          n(c.groups),         n(c.words_of_group()),
      words + c.offsets_at, words + c.others_at, reinterpret_cast<int2*>(words + c.places_at),
      words + c.counts_at};
  touch_kernel<<<static_cast<unsigned>(c.groups), kThreads, 0, stream>>>(params);
  column_kernel<<<static_cast<unsigned>(c.groups), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t pack(const TallColumns& c, const ProductIndex& index, const std::int32_t* words,
                 const void* values, void* packed, cudaStream_t stream) {
  if (c.most == 0) return cudaSuccess;
  const Product& p = c.product;
  clear(words + c.offsets_at + c.groups, n(c.height) / 8, packed, stream);
  const auto run = p.transposed ? (wide(p) ? scatter<std::uint16_t, true, 8, ColumnPlace>
                                           : scatter<std::uint16_t, true, 1, ColumnPlace>)
                                : (wide(p) ? scatter<std::uint16_t, false, 8, ColumnPlace>
                                           : scatter<std::uint16_t, false, 1, ColumnPlace>);
  return run(p, index, values, place_of(c, words, packed), stream);
}

cudaError_t unpack(const TallColumns& c, const ProductIndex& index, const std::int32_t* words,
                   const void* packed, void* values, cudaStream_t stream) {
  const auto run =
      wide(c.product) ? collect<std::uint16_t, 8, ColumnPlace> : collect<std::uint16_t, 1, ColumnPlace>;
  return run(c.product, index, values, place_of(c, words, packed), stream);
}

}  // namespace rarefy::sm90
