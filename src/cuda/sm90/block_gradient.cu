// The gradient of stored blocks: dW = dYᵀ X, 64 × 64 parts of stored blocks at a time. Tokens are the sum, so
// both operands lie with them outermost: strips of dY are operand A, 64-wide columns of X side by side
// operand B, wherever in X they come from.
#include "cuda/sm90/block_gradient.h"

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"
#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/tile/ring.cuh"

namespace rarefy::sm90 {
namespace {

constexpr u32 kPanelBytes = 64 * 64 * 2;  // 64 tokens × 64 features

struct GradientTile {
  int strip, strips, columns, unused;  // columns: 0: there is no such tile
  int column[8];                       // panels of X; -1: none
  int part[8];                         // of warpgroup w at 4w …; -1: none
};
static_assert(sizeof(GradientTile) == kTileWords * sizeof(int));

struct GradientParams {
  CUtensorMap dy, x, dvalues;
  const int *crow, *col;
  const int* list;                                      // GradientTile; null: none was made
  int tokens, rows, cols, block_row_count, high, wide;  // high, wide: of a block, / 64
};

template <bool kTwo>
struct GradientShape {
  static constexpr u32 kColumns = kTwo ? 4 : 8;
  static constexpr u32 kSlotBytes = (kColumns + (kTwo ? 2 : 1)) * kPanelBytes;
  static constexpr u32 kSlots = kTwo ? 4 : 3;
  static constexpr u32 kBytes = 1024 + kSlots * kSlotBytes;
};

// The sum of `value` over the threads before this one; `total` over all. Every thread of the block calls it.
__device__ inline int sum_before(int value, int& total, int* of_warps) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < 12; ++w) {
    before += w < warp ? of_warps[w] : 0;
    total += of_warps[w];
  }
  return before + sum - value;
}

// Tile `index` of those of all block rows, by falling width: whole ones first, then what is left of each row,
// which costs less and fills the last round. Into shared memory, by all threads; a barrier has to follow.
template <bool kTwo>
__device__ inline void find_tile(const GradientParams& p, int index, GradientTile& tile) {
  constexpr int kColumns = kTwo ? 4 : 8, kStrips = kTwo ? 2 : 1;
  __shared__ int of_warps[12], found[4];  // block row, first column, columns, its first entry
  const int self = static_cast<int>(threadIdx.x), tiles_of_row = p.high / kStrips;
  const int each = (p.block_row_count + 383) / 384, begin = min(self * each, p.block_row_count),
            end = min(begin + each, p.block_row_count);
  const int first_strip = index % tiles_of_row * kStrips;
  index /= tiles_of_row;
  if (self < 4) found[self] = 0;
  const auto columns_of = [&](int row) { return (__ldg(p.crow + row + 1) - __ldg(p.crow + row)) * p.wide; };
  // Tiles of one width that a row has, for the widths from whole to 1, until `index` is among them.
  for (int width = kColumns; width > 0; --width) {
    const auto tiles_of = [&](int row) {
      return width == kColumns ? columns_of(row) / kColumns : columns_of(row) % kColumns == width ? 1 : 0;
    };
    int mine = 0, total = 0;
    for (int row = begin; row < end; ++row) mine += tiles_of(row);
    int left = index - sum_before(mine, total, of_warps);
    if (left >= 0 && left < mine) {
      int row = begin;
      for (; left >= tiles_of(row); ++row) left -= tiles_of(row);
      found[0] = row;
      found[1] = width == kColumns ? left * kColumns : columns_of(row) / kColumns * kColumns;
      found[2] = width;
      found[3] = __ldg(p.crow + row);
    }
    if (index < total) break;
    index -= total;
  }
  __syncthreads();
  const int row = found[0], first = found[1], count = found[2];
  if (self == 0) {
    tile.strip = row * p.high + first_strip;
    tile.strips = kStrips;
    tile.columns = count;
  }
  if (self < 8) {
    // Without a second strip, warpgroup 0 has the first half of the columns.
    const int half = (count + 1) / 2;
    const int c =
        kTwo ? (self < count ? self : -1)
             : (self < 4 ? (self < half ? self : -1) : (self - 4 < count - half ? half + self - 4 : -1));
    const int entry = c < 0 ? 0 : found[3] + (first + c) / p.wide, inside = (first + c) % p.wide;
    tile.column[self] = c < 0 ? -1 : __ldg(p.col + entry) * p.wide + inside;
    if (!kTwo) tile.part[self] = c < 0 ? -1 : (entry * p.high + first_strip) * p.wide + inside;
    if (kTwo && self < 4) {
      tile.part[self] = c < 0 ? -1 : (entry * p.high + first_strip) * p.wide + inside;
      tile.part[self + 4] = c < 0 ? -1 : (entry * p.high + first_strip + 1) * p.wide + inside;
    }
  }
}

template <bool kTwo>
__global__ void __launch_bounds__(384) list_kernel(const __grid_constant__ GradientParams p, int* list) {
  __shared__ GradientTile tile;
  if (threadIdx.x < kTileWords) reinterpret_cast<int*>(&tile)[threadIdx.x] = -1;
  __syncthreads();
  find_tile<kTwo>(p, static_cast<int>(blockIdx.x), tile);
  __syncthreads();
  if (threadIdx.x < kTileWords)
    list[blockIdx.x * kTileWords + threadIdx.x] = reinterpret_cast<const int*>(&tile)[threadIdx.x];
}

template <class T, bool kTwo, int kSplit>
__global__ void __launch_bounds__(384, 1) gradient_kernel(const __grid_constant__ GradientParams p) {
  using Shape = GradientShape<kTwo>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RingState ring;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const auto full = [&](u32 slot) { return shared_address(&ring.full[slot]); };
  const auto empty = [&](u32 slot) { return shared_address(&ring.empty[slot]); };
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const u32 rank = kSplit == 1 ? 0 : cluster_rank();
  __shared__ GradientTile tile;
  if (p.list == nullptr) {
    find_tile<kTwo>(p, static_cast<int>(blockIdx.x) / kSplit, tile);
  } else if (threadIdx.x < kTileWords) {
    reinterpret_cast<int*>(&tile)[threadIdx.x] =
        __ldg(p.list + blockIdx.x / kSplit * kTileWords + threadIdx.x);
  }
  const int all_steps = (p.tokens + 63) / 64;
  const int first = all_steps * static_cast<int>(rank) / kSplit,
            last = all_steps * (static_cast<int>(rank) + 1) / kSplit;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < Shape::kSlots; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 8);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (tile.columns == 0) return;  // of all blocks of the cluster

  if (warp >= 8) {
    give_registers<40>();
    if (warp == 8) {
      // A lane for each panel: of X, then of dY.
      const bool of_x = lane < static_cast<int>(Shape::kColumns);
      const int strip = lane - static_cast<int>(Shape::kColumns);
      const int feature = of_x                  ? tile.column[lane] * 64
                          : strip < tile.strips ? (tile.strip + strip) * 64
                                                : -1;
      const u32 bytes = static_cast<u32>(tile.columns + tile.strips) * kPanelBytes;
      Turn at;
      at.parity = 1;  // the first round is free
      for (int step = first; step < last; ++step) {
        wait(empty(at.slot), at.parity);
        if (lane == 0) arrive_expect(full(at.slot), bytes);
        __syncwarp();
        if (feature >= 0) {
          const u32 to = slots + at.slot * Shape::kSlotBytes + static_cast<u32>(lane) * kPanelBytes;
          load_box(to, of_x ? &p.x : &p.dy, feature, step * 64, full(at.slot));
        }
        at.next(Shape::kSlots);
      }
      __syncwarp();
    }
    if constexpr (kSplit > 1) {
      cluster_sync();
      cluster_sync();
    }
    return;
  }

  take_registers<232>();
  const int group = warp / 4;
  const int* part = tile.part + 4 * group;
  const int parts = (part[0] >= 0) + (part[1] >= 0) + (part[2] >= 0) + (part[3] >= 0);
  const u32 my_columns = (kTwo ? 0 : 4 * static_cast<u32>(group)) * kPanelBytes;
  const u32 my_strip = (Shape::kColumns + (kTwo ? static_cast<u32>(group) : 0)) * kPanelBytes;
  float d[2][64];  // of two parts each
#pragma unroll
  for (int i = 0; i < 64; ++i) d[0][i] = d[1][i] = 0;
  Turn at;
  for (int step = first; step < last; ++step) {
    const u32 from = slots + at.slot * Shape::kSlotBytes;
    wait(full(at.slot), at.parity);
    const u64 a = operand(from + my_strip), b = operand(from + my_columns, kPanelBytes);
    const auto multiply = [&](auto two) {
      wgmma_fence();
#pragma unroll
      for (u32 k = 0; k < 4; ++k) {
#pragma unroll
        for (u32 half = 0; half < (decltype(two)::value ? 2 : 1); ++half) {
          wgmma<T, Major::mn, Major::mn>(d[half], a + k * kNext16<Major::mn>,
                                         b + k * kNext16<Major::mn> + half * (2 * kPanelBytes >> 4), 1);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
    };
    if (parts > 2) {
      multiply(std::true_type{});
    } else if (parts > 0) {
      multiply(std::false_type{});
    }
    __syncwarp();
    if (lane == 0) arrive(empty(at.slot));
    at.next(Shape::kSlots);
  }

  // From here on the slots hold results: 128 floats of each thread, or 64 × 64 parts.
  named_barrier(1, 256);
  if constexpr (kSplit > 1) {
    const u32 mine = slots + threadIdx.x * 16;
    if (rank != 0) {
#pragma unroll
      for (u32 i = 0; i < 32; ++i) {
        const float* v = &d[i / 16][i % 16 * 4];
        store_shared_4(mine + i * 4096, v[0], v[1], v[2], v[3]);
      }
    }
    cluster_sync();
    if (rank == 0) {
      for (u32 r = 1; r < kSplit; ++r) {
#pragma unroll
        for (u32 i = 0; i < 32; i += 8) {  // eight on their way at a time
          float4 sums[8];
#pragma unroll
          for (u32 j = 0; j < 8; ++j) sums[j] = load_remote_4(mine + (i + j) * 4096, r);
#pragma unroll
          for (u32 j = 0; j < 8; ++j) {
            float* v = &d[(i + j) / 16][(i + j) % 16 * 4];
            v[0] += sums[j].x;
            v[1] += sums[j].y;
            v[2] += sums[j].z;
            v[3] += sums[j].w;
          }
        }
      }
    }
    cluster_sync();
    if (rank != 0) return;
  }
  const int row = 16 * (warp % 4) + lane / 4, n = (tile.strip + (kTwo ? group : 0)) * 64 + row;
  const u32 stage = slots + static_cast<u32>(group) * 4 * kPanelBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float* sums = &d[i / 2][i % 2 * 32];
    const int k0 = tile.column[kTwo ? i : 4 * group + i] * 64;
    if (k0 + 64 > p.cols || n - row + 64 > p.rows) {  // padding is zero, whatever dY has
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int k = k0 + j / 4 * 8 + 2 * (lane % 4) + j % 2;
        if (k >= p.cols || n + j % 4 / 2 * 8 >= p.rows) sums[j] = 0;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {  // matrices: rows 0 and 8, columns 8j and 8j + 8
      const u32 to =
          stage + static_cast<u32>(i) * kPanelBytes +
          static_cast<u32>((16 * (warp % 4) + lane % 16) * 128 + ((j + lane / 16) ^ lane % 8) * 16);
      store_matrices(to, pack<T>(sums[4 * j], sums[4 * j + 1]), pack<T>(sums[4 * j + 2], sums[4 * j + 3]),
                     pack<T>(sums[4 * j + 4], sums[4 * j + 5]), pack<T>(sums[4 * j + 6], sums[4 * j + 7]));
    }
  }
  fence_async();
  named_barrier(2 + static_cast<u32>(group), 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (part[i] < 0) continue;
      store_box(&p.dvalues, 0, part[i] % p.wide, part[i] / p.wide * 64,
                stage + static_cast<u32>(i) * kPanelBytes);
    }
    store_commit();
    store_wait_all();
  }
}

template <class T, bool kTwo, int kSplit>
cudaError_t launch_kernel(std::int64_t tiles, const GradientParams& params, cudaStream_t stream) {
  const auto kernel = gradient_kernel<T, kTwo, kSplit>;
  const int bytes = static_cast<int>(GradientShape<kTwo>::kBytes);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(tiles * kSplit));
  launch.blockDim = dim3(384);
  launch.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = kSplit > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <class T, bool kTwo>
cudaError_t launch_split(int split, std::int64_t tiles, const GradientParams& params, cudaStream_t stream) {
  switch (split) {
    case 1: return launch_kernel<T, kTwo, 1>(tiles, params, stream);
    case 2: return launch_kernel<T, kTwo, 2>(tiles, params, stream);
    case 4: return launch_kernel<T, kTwo, 4>(tiles, params, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

namespace {

GradientParams of_pattern(const GradientProblem& p, const std::int32_t* crow, const std::int32_t* col) {
  GradientParams params{};
  params.crow = crow;
  params.col = col;
  params.block_row_count = static_cast<int>((p.rows + p.block_rows - 1) / p.block_rows);
  params.high = static_cast<int>(p.block_rows / 64);
  params.wide = static_cast<int>(p.block_cols / 64);
  return params;
}

}  // namespace

cudaError_t prepare(const GradientProblem& p, const GradientConfig& config, const std::int32_t* crow,
                    const std::int32_t* col, std::int32_t* words, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(tiles_at_most(p, config));
  if (tiles == 0) return cudaSuccess;
  const GradientParams params = of_pattern(p, crow, col);
  if (config.two) {
    list_kernel<true><<<tiles, 384, 0, stream>>>(params, words);
  } else {
    list_kernel<false><<<tiles, 384, 0, stream>>>(params, words);
  }
  return cudaGetLastError();
}

cudaError_t launch(const GradientProblem& p, const GradientConfig& config, const GradientOperands& o,
                   cudaStream_t stream) {
  const std::int64_t tiles = tiles_at_most(p, config);
  if (tiles == 0) return cudaSuccess;
  GradientParams params = of_pattern(p, o.crow, o.col);
  params.list = o.prepared;
  const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
  const auto by_token = [&](CUtensorMap* map, const void* data, std::int64_t features, std::int64_t stride) {
    TensorShape shape;  // 64 features × 64 tokens
    shape.size[0] = u(features);
    shape.size[1] = u(p.tokens);
    shape.stride[0] = u(stride) * 2;
    shape.box[0] = shape.box[1] = 64;
    return make_tensor_map(map, p.dtype, data, shape);
  };
  cudaError_t status = by_token(&params.dy, o.dy, p.rows, p.dy_stride);
  if (status == cudaSuccess) status = by_token(&params.x, o.x, p.cols, p.x_stride);
  if (status != cudaSuccess) return status;
  TensorShape w;  // [row of a stored block][64-wide column][64]
  w.rank = 3;
  w.size[0] = 64;
  w.size[1] = u(p.block_cols / 64);
  w.size[2] = u(p.blocks * p.block_rows);
  w.stride[0] = 128;
  w.stride[1] = u(p.block_cols) * 2;
  w.box[0] = w.box[2] = 64;
  status = make_tensor_map(&params.dvalues, p.dtype, o.dvalues, w);
  if (status != cudaSuccess) return status;
  params.tokens = static_cast<int>(p.tokens);
  params.rows = static_cast<int>(p.rows);
  params.cols = static_cast<int>(p.cols);
  if (p.dtype == DType::bf16) {
    return config.two ? launch_split<__nv_bfloat16, true>(config.split, tiles, params, stream)
                      : launch_split<__nv_bfloat16, false>(config.split, tiles, params, stream);
  }
  return config.two ? launch_split<__half, true>(config.split, tiles, params, stream)
                    : launch_split<__half, false>(config.split, tiles, params, stream);
}

}  // namespace rarefy::sm90
