// The gradient of stored blocks: dW = dYᵀ X. Tokens are the sum, so both operands lie with them outermost:
// strips of dY are operand A, panels of X side by side operand B, wherever in X they come from. f32 is
// multiplied as tf32, which wants the sum innermost: so X is transposed first, and dY goes by way of
// registers.
#include "cuda/sm90/block_gradient.h"

#include <algorithm>

#include "cuda/shared_limit.h"
#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/gradient_bias.cuh"
#include "cuda/sm90/gradient_exchange.cuh"
#include "cuda/sm90/gradient_tiles.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {
namespace {

constexpr u32 kCellBytes = 64 * 64 * 2;  // of results of 16 bits; of dY, a step's tokens × 64 features
constexpr u32 kRingBytes = 3 * 9 * kCellBytes;  // three steps of the largest tiles, more of smaller ones
// Products read up to seven panels of 16 beyond X's last one, which dY's are too short for: columns that
// nobody stores.
constexpr u32 kSharedBytes = 1024 + kRingBytes + 7 * 2048 - kCellBytes;
constexpr u32 kResultsAt = 16 * kCellBytes;  // behind the sums of other thread blocks
constexpr u32 kBiasAt = kRingBytes;          // sums of dY: read as columns that nobody stores
static_assert(kBiasAt + PanelSums<__half>::kBytes + 1024 <= kSharedBytes);

__device__ inline float2 load_two(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ inline float2 load_two(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ inline float2 load_two(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}

// Rows of dY's features in tf32's products: eight lanes read words of eight rows at one time, so these are of
// two halves of the swizzled 128 bytes, which never meet in a bank. `piece`: of 16 bytes, in the first half.
struct WordRows {
  int half, piece, in_piece;  // of a panel's 32 features; the lane's rows: in `piece` and the next one
  __device__ WordRows(int warp, int lane)
      : half(warp / 2), piece(2 * (warp % 2) + lane / 16 * 4), in_piece(lane / 4 % 4) {}
  __device__ int feature(int h) const { return 32 * half + 4 * (piece + h) + in_piece; }
  // Bytes from a panel of dY to the word at row h and step lane % 4 + 4 · later of eight.
  __device__ u32 place(int h, int later, int lane) const {
    const int token = lane % 4 + 4 * later;
    return static_cast<u32>(half * 4096 + token * 128 + (((piece + h) ^ token) << 4) + in_piece * 4);
  }
};

template <class T, int kWide, int kSplit>
__global__ void __launch_bounds__(kTileThreads, 1) gradient_kernel(const __grid_constant__ GradientParams p) {
  using Tile = GradientTile<kWide>;
  constexpr bool kTf32 = sizeof(T) == 4;
  constexpr int kTokens = 128 / sizeof(T);               // of a step
  constexpr u32 kXBytes = kWide * 128, kDyBytes = 8192;  // panels
  // X that has been transposed is read by feature: tokens lie side by side.
  constexpr bool kTransposed = kTf32 || kWide == 16;
  constexpr Major kXMajor = kTransposed ? Major::k : Major::mn;
  constexpr int kInCell = 64 / kWide;  // panels
  constexpr int kWords = sizeof(Tile) / sizeof(int);
  static_assert(kSharedBytes + sizeof(Tile) + sizeof(RingState) + 512 <= 227 * 1024);
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RingState ring;
  __shared__ Tile tile;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const auto full = [&](u32 slot) { return shared_address(&ring.full[slot]); };
  const auto empty = [&](u32 slot) { return shared_address(&ring.empty[slot]); };
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const u32 rank = kSplit == 1 ? 0 : cluster_rank();
  if constexpr (!kTf32) {
    if (static_cast<int>(blockIdx.x) >= p.tile_blocks) {
      sum_unstored<T>(p, static_cast<int>(blockIdx.x) - p.tile_blocks,
                      static_cast<int>(gridDim.x) - p.tile_blocks, reinterpret_cast<float*>(dynamic_shared));
      return;
    }
  }
  int index = static_cast<int>(blockIdx.x) / kSplit;
  if (index >= p.skip_from) index += p.skipped;
  if constexpr (kWide == 64) {
    if (p.list == nullptr) find_tile(p, index, tile);
  }
  if (p.list != nullptr && threadIdx.x < kWords) {
    reinterpret_cast<int*>(&tile)[threadIdx.x] =
        __ldg(p.list + index * kWords + static_cast<int>(threadIdx.x));
  }
  const int all_steps = (p.tokens + kTokens - 1) / kTokens;
  const int first = all_steps * static_cast<int>(rank) / kSplit,
            last = all_steps * (static_cast<int>(rank) + 1) / kSplit;
  __syncthreads();
  const int x_panels = uniform(tile.x_panels), dy_panels = uniform(tile.dy_panels);
  if (x_panels <= 0) {  // of all blocks of the cluster
    if (p.goes_on) wait_for_kernels();
    return;
  }
  const u32 to_sum = kTf32 || p.dbias == nullptr ? 0 : uniform(tile.sums);
  if (threadIdx.x < kMaxSlots) {
    barrier_init(full(threadIdx.x), 1);
    // Lanes that read it, or warps; and the loading warps' lanes, if they do.
    barrier_init(empty(threadIdx.x), (kTf32 ? 256 : 8) + (to_sum != 0 ? 128 : 0));
    barrier_init_done();
  }
  __syncthreads();
  const u32 dy_at = static_cast<u32>(x_panels) * kXBytes,
            slot_bytes = dy_at + static_cast<u32>(dy_panels) * kDyBytes,
            slot_count = min(static_cast<u32>(kMaxSlots), kRingBytes / slot_bytes);

  if (warp >= 8) {
    give_registers<40>();
    // A lane of one of four warps for each panel: of X, then of dY. A warp's copies are issued one after
    // another.
    const int panel = lane * 4 + warp - 8;
    const bool of_x = panel < x_panels, loads = panel < x_panels + dy_panels;
    const int feature = loads ? tile.feature[panel] : 0;
    const u32 place =
        of_x ? static_cast<u32>(panel) * kXBytes : dy_at + static_cast<u32>(panel - x_panels) * kDyBytes;
    const bool by_feature = of_x && kTransposed;
    if (kTransposed && !p.goes_on) wait_for_kernels();  // X has been transposed
    if (p.followed) launch_dependents();                // behind that, as they do not wait for it
    PanelSums<T> sums(to_sum, warp - 8, lane);
    const u32 sums_at = slots + dy_at + static_cast<u32>(to_sum == 0 ? 0 : sums.mine()) * kDyBytes;
    Turn at, summed;
    const auto sum_step = [&] {
      wait(full(summed.slot), summed.parity);
      if constexpr (!kTf32) sums.add(sums_at + summed.slot * slot_bytes);
      arrive(empty(summed.slot));  // each lane for what it read
      summed.next(slot_count);
    };
    at.parity = 1;                                       // the first round is free
    const int ahead = static_cast<int>(slot_count) - 1;  // steps that are being loaded while one is summed
    for (int step = first; step < last; ++step) {
      wait(empty(at.slot), at.parity);
      if (warp == 8 && lane == 0) arrive_expect(full(at.slot), slot_bytes);
      __syncwarp();
      if (loads) {
        const u32 to = slots + at.slot * slot_bytes + place;
        load_box(to, of_x ? &p.x : &p.dy, by_feature ? step * kTokens : feature,
                 by_feature ? feature : step * kTokens, full(at.slot));
        if (kTf32 && !of_x) load_box(to + 4096, &p.dy, feature + 32, step * kTokens, full(at.slot));
      }
      at.next(slot_count);
      if constexpr (!kTf32) {
        if (to_sum != 0 && step - first >= ahead) sum_step();
      }
    }
    if constexpr (!kTf32) {
      for (int left = to_sum == 0 ? 0 : min(last - first, ahead); left > 0; --left) sum_step();
      // The multiplying warps leave results where the panels are.
      if (kSplit == 1 && to_sum != 0) named_barrier_arrive(1, 384);
      sums.sums.add_lanes();
    }
    __syncwarp();
    if constexpr (kSplit > 1) cluster_sync();
    if constexpr (!kTf32) {
      if (to_sum != 0 && lane < 8) {
        sums.template leave<kSplit>(slots + kBiasAt, static_cast<int>(rank));
      }
      __syncwarp();
    }
    if constexpr (kSplit > 1) cluster_sync();
    if constexpr (!kTf32) {
      if (to_sum != 0) {
        if (kSplit == 1) named_barrier(4, 128);
        if (rank == 0) sums.finish(p, tile.feature + x_panels, slots + kBiasAt, kSplit);
      }
    }
    if (p.goes_on) wait_for_kernels();
    return;
  }

  take_registers<232>();
  const int group = warp / 4;
  const int a0 = uniform(tile.a[2 * group]), a1 = uniform(tile.a[2 * group + 1]),
            b0 = uniform(tile.b[2 * group]), b1 = uniform(tile.b[2 * group + 1]);
  // Operands of the first slot, but for their constant upper halves. Reduced, so that the compiler keeps them
  // and does not make them anew in each step.
  constexpr bool kNarrow = kWide == 32 && !kTransposed;  // rows of 64 bytes
  constexpr u64 kA = operand_layout(Swizzle::b128, 1024),
                kB = kNarrow ? operand_layout(Swizzle::b64, 512, kXBytes)
                             : operand_layout(Swizzle::b128, 1024, kTransposed ? 16 : kXBytes);
  constexpr u64 kNextB = kNext16<kXMajor> / (kNarrow ? 2 : 1);
  const auto low = [&](u64 layout, u32 at) {
    return uniform(static_cast<int>(operand_at(layout, slots + at)));
  };
  const int a_low[2] = {low(kA, dy_at + static_cast<u32>(max(a0, 0)) * kDyBytes),
                        low(kA, dy_at + static_cast<u32>(max(a1, 0)) * kDyBytes)},
            b_low[2] = {low(kB, static_cast<u32>(max(b0, 0)) * kXBytes),
                        low(kB, static_cast<u32>(max(b1, 0)) * kXBytes)};
  float d[2][64];
#pragma unroll
  for (int i = 0; i < 64; ++i) d[0][i] = d[1][i] = 0;
  // Products of a step are queued while those of the step before run; but not of three slots, which had
  // better be free one step sooner, and not where a step's registers are operands.
  const bool queued = !kTf32 && slot_count > 3;
  const WordRows rows(warp % 4, lane);
  const auto multiply = [&](auto halves) {  // all steps
    constexpr int kHalves = decltype(halves)::value;
    Turn at;
    u32 from = 0, before = 0;  // where the slot begins, in pieces of 16 bytes; the slot to be left next
    const auto release = [&] {
      __syncwarp();
      if (kTf32 || lane == 0) arrive(empty(before));
    };
    for (int step = first; step < last; ++step) {
      wait(full(at.slot), at.parity);
      u64 a[2], b[2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        a[half] = kA >> 32 << 32 | (static_cast<u32>(a_low[half]) + from);
        b[half] = kB >> 32 << 32 | (static_cast<u32>(b_low[half]) + from);
      }
      if constexpr (kTf32) {
        u32 words[2][4][4];  // A
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const u32 dy = slots + dy_at + static_cast<u32>(half == 0 ? a0 : a1) * kDyBytes + from * 16;
#pragma unroll
          for (u32 i = 0; i < 16; ++i) {
            words[half][i / 4][i % 4] = load_shared(dy + rows.place(i % 2, i / 2 % 2, lane) + i / 4 * 1024);
          }
        }
        if constexpr (kHalves > 0) wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            wgmma_tf32(d[half], words[half][k], b[half] + k * kNextB);
        }
      } else {
        if constexpr (kHalves > 0) wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            wgmma<T, Major::mn, kXMajor>(d[half], a[half] + k * kNext16<Major::mn>, b[half] + k * kNextB, 1);
          }
        }
      }
      if constexpr (kHalves > 0) wgmma_commit();
      if (!queued) {
        if constexpr (kHalves > 0) wgmma_wait<0>();
        before = at.slot;
        release();
      } else {
        if constexpr (kHalves > 0) wgmma_wait<1>();
        if (step > first) release();
        before = at.slot;
      }
      at.next(slot_count);
      from = at.slot == 0 ? 0 : from + slot_bytes / 16;
    }
    if constexpr (kHalves > 0) wgmma_wait<0>();
    if (queued && last > first) release();
  };
  if (a1 >= 0) {
    multiply(std::integral_constant<int, 2>{});
  } else if (a0 >= 0) {
    multiply(std::integral_constant<int, 1>{});
  } else {
    multiply(std::integral_constant<int, 0>{});
  }

  // From here on the slots hold sums of other shares, and results.
  if constexpr (kSplit > 1) {
    exchange<kSplit>([&](u32 i) { return &d[i / 16][i % 16 * 4]; }, rank, slots);
  } else {
    named_barrier(1, to_sum != 0 ? 384 : 256);
  }
  const auto row = [&](int h) {  // of the cell: the lane has two
    return kTf32 ? rows.feature(h) : 16 * (warp % 4) + lane / 4 + 8 * h;
  };
  // Where a weight of cell i of this warpgroup goes; null: nowhere.
  const auto place_of = [&](int i, int r, int column) -> T* {
    const int cell = 4 * group + i;
    const int offset =
        kWide == 64 ? tile.offset[cell] : tile.offset[cell * Tile::kPieces + r / 16 * 4 + column / 16];
    const int inside = kWide == 64 ? r * p.block_cols + column : r % 16 * p.block_cols + column % 16;
    return offset < 0 ? nullptr : static_cast<T*>(p.dvalues) + std::int64_t{offset} * 8 + inside;
  };
  const u32 stage = slots + kResultsAt + static_cast<u32>(group) * 4 * kCellBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i * kSplit / 4 != static_cast<int>(rank) || (i < 2 ? a0 : a1) < 0) continue;
    float* sums = &d[i / 2][i % 2 * 32];
    const int strip = tile.feature[x_panels + (i < 2 ? a0 : a1)];
    if (p.accumulate) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const T* from = place_of(i, row(j % 2), j / 2 * 8 + 2 * (lane % 4));
        if (from == nullptr) continue;
        const float2 more = load_two(from);
        sums[2 * j] += more.x;
        sums[2 * j + 1] += more.y;
      }
    }
#pragma unroll
    for (int panel = 0; panel < kInCell; ++panel) {
      const int index = (i < 2 ? b0 : b1) + i % 2 * kInCell + panel;
      const int k0 = tile.feature[min(index, Tile::kPanels - 1)];
      if (k0 + kWide <= p.cols && strip + 64 <= p.rows) continue;
#pragma unroll
      for (int j = 0; j < kWide / 2; ++j) {  // padding is zero, whatever dY has
        const int k = k0 + j / 4 * 8 + 2 * (lane % 4) + j % 2;
        if (k >= p.cols || strip + row(j % 4 / 2) >= p.rows) sums[panel * (kWide / 2) + j] = 0;
      }
    }
    if constexpr (kTf32) {  // from registers: lanes write whole sectors of 32 bytes
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        T* to = place_of(i, row(j % 2), j / 2 * 8 + 2 * (lane % 4));
        if (to != nullptr) *reinterpret_cast<float2*>(to) = {sums[2 * j], sums[2 * j + 1]};
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {  // matrices: rows 0 and 8, columns 8j and 8j + 8
        const u32 to =
            stage + static_cast<u32>(i) * kCellBytes +
            static_cast<u32>((16 * (warp % 4) + lane % 16) * 128 + ((j + lane / 16) ^ lane % 8) * 16);
        store_matrices(to, pack<T>(sums[4 * j], sums[4 * j + 1]), pack<T>(sums[4 * j + 2], sums[4 * j + 3]),
                       pack<T>(sums[4 * j + 4], sums[4 * j + 5]), pack<T>(sums[4 * j + 6], sums[4 * j + 7]));
      }
    }
  }
  if constexpr (!kTf32) {
    named_barrier(2 + static_cast<u32>(group), 128);
    const int thread = static_cast<int>(threadIdx.x) % 128, piece = thread % 8;  // 16 bytes of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i * kSplit / 4 != static_cast<int>(rank) || (i < 2 ? a0 : a1) < 0) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int r = n * 16 + thread / 8;
        T* to = place_of(i, r, piece * 8);
        if (to == nullptr) continue;
        *reinterpret_cast<float4*>(to) = load_shared_4(stage + static_cast<u32>(i) * kCellBytes +
                                                       static_cast<u32>(r * 128 + ((piece ^ r % 8) << 4)));
      }
    }
  }
}

template <class T, int kWide, int kSplit>
cudaError_t launch_kernel(std::int64_t tiles, const GradientParams& params, cudaStream_t stream) {
  const auto kernel = gradient_kernel<T, kWide, kSplit>;
  static cuda::SharedLimit limit;
  const cudaError_t status = limit.allow(kernel, static_cast<int>(kSharedBytes));
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  // It may start while X is being transposed, or in place of thread blocks of the launch before that are
  // done.
  if (kWide == 16 || sizeof(T) == 4 || params.goes_on) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (kSplit > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {kSplit, 1, 1};
  }
  cudaLaunchConfig_t launch{};
  const std::int64_t slices = (params.rows + kSlice - 1) / kSlice;
  const std::int64_t for_bias = params.dbias == nullptr || params.goes_on
                                    ? 0
                                    : (std::min<std::int64_t>(128, slices) + kSplit - 1) / kSplit * kSplit;
  launch.gridDim = dim3(static_cast<unsigned>(tiles * kSplit + for_bias));
  launch.blockDim = dim3(kTileThreads);
  launch.dynamicSmemBytes = kSharedBytes;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = count;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <class T, int kWide>
cudaError_t launch_split(int split, std::int64_t tiles, const GradientParams& params, cudaStream_t stream) {
  switch (split) {
    case 1: return launch_kernel<T, kWide, 1>(tiles, params, stream);
    case 2: return launch_kernel<T, kWide, 2>(tiles, params, stream);
    case 4: return launch_kernel<T, kWide, 4>(tiles, params, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

template <class T>
cudaError_t launch_wide(int wide, int split, std::int64_t tiles, GradientParams params, cudaStream_t stream) {
  params.tile_blocks = static_cast<int>(tiles) * split;
  switch (wide) {
    case 64: return launch_split<T, 64>(split, tiles, params, stream);
    case 32: return launch_split<T, 32>(split, tiles, params, stream);
    case 16: return launch_split<T, 16>(split, tiles, params, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}

// Tiles that have all tokens, then those that share them, in a launch each. Those that no pattern but an
// unlikely one has are the first one's: thread blocks without a tile leave at once there.
template <class T>
cudaError_t launch_type(const GradientConfig& c, std::int64_t tiles, GradientParams params,
                        cudaStream_t stream) {
  if (c.alone == 0) return launch_wide<T>(c.wide, c.split, tiles, params, stream);
  if (c.alone >= tiles) return launch_wide<T>(c.wide, 1, tiles, params, stream);
  const std::int64_t shared = std::min<std::int64_t>(c.shared, tiles - c.alone);
  GradientParams first = params;
  first.skip_from = c.alone;
  first.skipped = static_cast<int>(shared);
  first.followed = true;
  const cudaError_t status = launch_wide<T>(c.wide, 1, tiles - shared, first, stream);
  if (status != cudaSuccess) return status;
  params.skipped = c.alone;
  params.goes_on = true;
  return launch_wide<T>(c.wide, c.split, shared, params, stream);
}

}  // namespace

cudaError_t launch(const GradientProblem& p, const GradientConfig& config, const GradientOperands& o,
                   cudaStream_t stream) {
  const std::int64_t tiles = tiles_at_most(p, config);
  if (o.dbias != nullptr && (tiles == 0 || p.dtype == DType::f32)) return cudaErrorInvalidValue;
  if (tiles == 0) return cudaSuccess;
  if (config.wide < 64 && o.prepared == nullptr) return cudaErrorInvalidValue;
  GradientParams params = of_pattern(p, config, o.crow, o.col);
  params.list = o.prepared == nullptr ? nullptr : o.prepared + list_at(p, config);
  params.dvalues = o.dvalues;
  params.accumulate = o.accumulate;
  params.dbias = o.dbias;
  params.dy_values = o.dy;
  params.dy_stride = p.dy_stride;
  params.row_features = static_cast<int>(config.wide == 64 ? p.block_rows : 64 * config.shape().strips());
  // Boxes of features × tokens, or, of X transposed, the other way round.
  const std::size_t size = size_of(p.dtype);
  const auto step = static_cast<int>(128 / size);  // tokens
  const auto map_of = [&](CUtensorMap* map, const void* data, std::int64_t inner, std::int64_t outer,
                          std::int64_t stride, int inner_box, int outer_box) {
    const auto u = [](std::int64_t x) { return static_cast<std::uint64_t>(x); };
    TensorShape shape;
    shape.tf32 = true;
    shape.size[0] = u(inner);
    shape.size[1] = u(outer);
    shape.stride[0] = u(stride) * size;
    shape.box[0] = static_cast<std::uint32_t>(inner_box);
    shape.box[1] = static_cast<std::uint32_t>(outer_box);
    return make_tensor_map(map, p.dtype, data, shape);
  };
  cudaError_t status = map_of(&params.dy, o.dy, p.rows, p.tokens, p.dy_stride, step, step);
  if (status != cudaSuccess) return status;
  if (transposes(p, config)) {
    const std::int64_t stride = transposed_stride(p.tokens);
    status = transpose(o.x, static_cast<int>(size), p.tokens, p.cols, p.x_stride, o.workspace, stride, false,
                       stream);
    if (status == cudaSuccess)
      status = map_of(&params.x, o.workspace, p.tokens, p.cols, stride, step, config.wide);
  } else {
    status = map_of(&params.x, o.x, p.cols, p.tokens, p.x_stride, config.wide, step);
  }
  if (status != cudaSuccess) return status;
  params.tokens = static_cast<int>(p.tokens);
  params.rows = static_cast<int>(p.rows);
  params.cols = static_cast<int>(p.cols);
  const auto run = p.dtype == DType::bf16  ? launch_type<__nv_bfloat16>
                   : p.dtype == DType::f16 ? launch_type<__half>
                                           : launch_type<float>;
  return run(config, tiles, params, stream);
}

}  // namespace rarefy::sm90
