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

struct GradientTile {  // 80 bytes of the plan
  int strip, strips, columns, unused;
  int column[8];  // panels of X; -1: none
  int part[8];    // of warpgroup w at 4w …; -1: none
};

struct GradientParams {
  CUtensorMap dy, x, dvalues;
  const GradientTile* tiles;
  int tokens, rows, cols, w_columns;
};

template <bool kTwo>
struct GradientShape {
  static constexpr u32 kColumns = kTwo ? 4 : 8;
  static constexpr u32 kSlotBytes = (kColumns + (kTwo ? 2 : 1)) * kPanelBytes;
  static constexpr u32 kSlots = kTwo ? 4 : 3;
  static constexpr u32 kBytes = 1024 + kSlots * kSlotBytes;
};

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
  const GradientTile& tile = p.tiles[blockIdx.x / kSplit];
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
      store_box(&p.dvalues, 0, part[i] % p.w_columns, part[i] / p.w_columns * 64,
                stage + static_cast<u32>(i) * kPanelBytes);
    }
    store_commit();
    store_wait_all();
  }
}

template <class T, bool kTwo, int kSplit>
cudaError_t launch_kernel(const GradientPlan& plan, const GradientParams& params, cudaStream_t stream) {
  const auto kernel = gradient_kernel<T, kTwo, kSplit>;
  const int bytes = static_cast<int>(GradientShape<kTwo>::kBytes);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kSplit, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(plan.tiles * kSplit));
  launch.blockDim = dim3(384);
  launch.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = kSplit > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <class T, bool kTwo>
cudaError_t launch_split(int split, const GradientPlan& plan, const GradientParams& params,
                         cudaStream_t stream) {
  switch (split) {
    case 1: return launch_kernel<T, kTwo, 1>(plan, params, stream);
    case 2: return launch_kernel<T, kTwo, 2>(plan, params, stream);
    case 4: return launch_kernel<T, kTwo, 4>(plan, params, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

}  // namespace

cudaError_t launch(const GradientProblem& p, const GradientConfig& config, const GradientPlan& plan,
                   const GradientOperands& o, cudaStream_t stream) {
  if (plan.tiles == 0) return cudaSuccess;
  GradientParams params{};
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
  params.tiles = reinterpret_cast<const GradientTile*>(o.plan);
  params.tokens = static_cast<int>(p.tokens);
  params.rows = static_cast<int>(p.rows);
  params.cols = static_cast<int>(p.cols);
  params.w_columns = static_cast<int>(p.block_cols / 64);
  if (p.dtype == DType::bf16) {
    return config.two ? launch_split<__nv_bfloat16, true>(config.split, plan, params, stream)
                      : launch_split<__nv_bfloat16, false>(config.split, plan, params, stream);
  }
  return config.two ? launch_split<__half, true>(config.split, plan, params, stream)
                    : launch_split<__half, false>(config.split, plan, params, stream);
}

}  // namespace rarefy::sm90
