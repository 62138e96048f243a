// The strip kernel, device side. One warp loads: for each step of each tile it brings 64 features of X for
// the tile's tokens and, packed behind one another, those 64 × 64 blocks of W that the tile's strips store
// there. A warpgroup for each strip multiplies: W is operand A, X is operand B. It skips steps where its
// strip stores nothing, and stores its 64 features of all tokens at the end.
#pragma once

#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"

namespace rarefy::sm90 {

inline constexpr u32 kBlockBytes = 64 * 64 * 2;
struct StripTile {  // 32 bytes of the plan
  int first_step, steps, token_tile, unused;
  int strip[4];  // -1: none
};

struct StripParams {
  CUtensorMap x, w, y;
  const int* tile_range;  // of each cluster
  const int4* tiles;      // StripTile
  const int* steps;       // four words each: column, block of W for each strip or -1
  const void* bias;
  int features;   // of y
  int w_columns;  // 64-wide columns of a stored block
  u32 slots, w_slots;
};

// A thread's share of the register file by role. ptxas refuses a single instruction with more registers than
// the launch allows each thread (65536 / threads), but hands out as many as setmaxnreg takes: three
// warpgroups work with products of 128 tokens at a time, and not with one of 256.
template <int kStrips, int kTokens>
struct StripShape {
  static constexpr int kThreads = (kStrips + 1) * 128;
  static constexpr u32 kSlotBytes = kTokens * 64 * 2;         // X of a step
  static constexpr int kPart = kStrips == 2 ? kTokens : 128;  // tokens of one instruction
  static constexpr int kParts = kTokens / kPart;
  // Together as many as the launch gives: 3 × 168 and 4 × 128. One more, and taking them waits for ever.
  static constexpr int kOtherRegisters = kStrips == 2 ? 40 : 32;
  static constexpr int kMultiplyRegisters = kStrips == 2 ? 232 : 160;
  static_assert(kStrips * kMultiplyRegisters + kOtherRegisters == (kStrips + 1) * (65536 / kThreads / 8 * 8));
};

template <int kStrips, int kTokens, int kCluster>
struct StripWarps {
  using Shape = StripShape<kStrips, kTokens>;
  const StripParams& p;
  u32 x_ring, w_ring, rank;
  RingState& ring;
  int tile, end;  // the cluster's tiles that are left

  __device__ u32 full(u32 slot) const { return shared_address(&ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&ring.empty[slot]); }
  __device__ int4 read_tile(int t) const { return t < end ? __ldg(p.tiles + 2 * t) : int4{}; }
  __device__ int read_strip(int t, int strip) const {
    return t < end ? __ldg(reinterpret_cast<const int*>(p.tiles + 2 * t + 1) + strip) : -1;
  }
  __device__ int first_token(int token_tile) const {
    return (token_tile * kCluster + static_cast<int>(rank)) * kTokens;
  }

  // A warp reads eight steps at once: lane 4j + r has word r of step j.
  __device__ int read_steps(const int4& t, int step, int lane) const {
    if (step + lane / 4 >= t.y || lane % 4 > kStrips) return -1;
    return __ldg(p.steps + (static_cast<std::int64_t>(t.x) + step) * 4 + lane);
  }

  __device__ void load(int lane) {
    RingSpace space{p.slots, p.w_slots};
    Turn at;         // the next slot
    u32 w_head = 0;  // the next slot of W
    int4 now = read_tile(tile), next = read_tile(tile + 1);
    int step = 0;
    int word = read_steps(now, 0, lane);
    while (tile < end) {
      const int first = step, steps = now.y, this_word = word;
      const int x_row = first_token(now.z);
      step += 8;  // ask for the next eight before these are copied
      if (step >= steps) {
        ++tile;
        now = next;
        next = read_tile(tile + 1);
        step = 0;
      }
      if (tile < end) word = read_steps(now, step, lane);

      const u32 stored = __ballot_sync(~0u, this_word >= 0 && lane % 4 != 0);
      for (int j = 0; j < min(8, steps - first); ++j) {
        const u32 present = stored >> (4 * j + 1) & 7;
        const auto blocks = static_cast<u32>(__popc(present));
        space.take(blocks, empty(0), p.slots);
        const u32 barrier = full(at.slot);
        const auto w_slot = [&](int strip) {
          const u32 s = w_head + static_cast<u32>(__popc(present & ((1u << strip) - 1)));
          return s < p.w_slots ? s : s - p.w_slots;
        };
        if (lane == 4 * j) {
          u32 header = 0;
#pragma unroll
          for (int s = 0; s < kStrips; ++s) header |= (present >> s & 1 ? w_slot(s) : kAbsent) << (8 * s);
          ring.header[at.slot] = header;
          arrive_expect(barrier, Shape::kSlotBytes + blocks * kBlockBytes);
        }
        __syncwarp();
        if (lane == 4 * j) {
          load_box(x_ring + at.slot * Shape::kSlotBytes, &p.x, this_word * 64, x_row, barrier);
        } else if (lane / 4 == j && this_word >= 0) {
          constexpr u32 kPart =
              kBlockBytes / kCluster;  // each thread block of the cluster brings its rows to all
          const u32 to = w_ring + w_slot(lane % 4 - 1) * kBlockBytes + rank * kPart;
          const int column = this_word % p.w_columns;
          const int row = this_word / p.w_columns * 64 + static_cast<int>(rank) * (64 / kCluster);
          if constexpr (kCluster == 1) {
            load_box(to, &p.w, 0, column, row, barrier);
          } else {
            load_box_multicast(to, &p.w, 0, column, row, barrier, (1 << kCluster) - 1);
          }
        }
        w_head += blocks;
        if (w_head >= p.w_slots) w_head -= p.w_slots;
        at.next(p.slots);
      }
    }
  }

  template <class T, Major kMajorW, Activation kActivation>
  __device__ void multiply(int strip, StoreLane out) {
    const int warp = out.warp, lane = out.lane;
    int4 next = read_tile(tile);
    int next_strip = read_strip(tile, strip);
    Turn at;
    while (tile < end) {
      const int4 now = next;
      const int feature = next_strip * 64;  // negative: this warpgroup has no strip in this tile
      ++tile;
      next = read_tile(tile);
      next_strip = read_strip(tile, strip);

      float2 bias{0, 0};
      if (p.bias != nullptr && feature >= 0) {
        const int row = feature + 16 * warp + lane / 4;
        const T* b = static_cast<const T*>(p.bias);
        if (row < p.features) bias.x = static_cast<float>(b[row]);
        if (row + 8 < p.features) bias.y = static_cast<float>(b[row + 8]);
      }

      float d[Shape::kParts][Shape::kPart / 2];
      u32 add = 0;  // the first product overwrites d
      for (int step = 0; step < now.y; ++step) {
        wait(full(at.slot), at.parity);
        // Read by the lane that will say so: the slot, header and all, is free once it has arrived.
        u32 header = 0;
        if (lane == 0) header = ring.header[at.slot];
        const u32 w_slot = __shfl_sync(~0u, header, 0) >> (8 * strip) & 0xFF;
        if (w_slot != kAbsent) {
          const u64 a = operand(w_ring + w_slot * kBlockBytes);
          const u64 b = operand(x_ring + at.slot * Shape::kSlotBytes);
          wgmma_fence();
#pragma unroll
          for (u32 k = 0; k < 4; ++k) {
#pragma unroll
            for (u32 part = 0; part < Shape::kParts; ++part) {
              wgmma<T, kMajorW, Major::k>(d[part], a + k * kNext16<kMajorW>,
                                          b + k * kNext16<Major::k> + part * (Shape::kPart * 128 >> 4),
                                          k == 0 ? add : 1);
            }
          }
          wgmma_commit();
          wgmma_wait<0>();
          add = 1;
        }
        if constexpr (kCluster == 1) {
          if (lane == 0) arrive(empty(at.slot));
        } else {
          if (lane < kCluster) arrive_remote(empty(at.slot), static_cast<u32>(lane) ^ rank);  // lane 0: here
        }
        at.next(p.slots);
      }
      if (add == 0) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
          for (float& sum : d[part]) sum = 0;
        }
      }
      if (feature >= 0) {
        const int token = first_token(now.z);
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          store_tile<T, kActivation>(out, d[part], bias, &p.y, feature, token + part * Shape::kPart);
        }
      }
    }
    if (out.leads()) store_wait_all();
  }
};

template <class T, bool kTransposed, Activation kActivation, int kStrips, int kTokens, int kCluster>
__global__ void __launch_bounds__(StripShape<kStrips, kTokens>::kThreads, 1)
    strip_kernel(const __grid_constant__ StripParams p) {
  using Shape = StripShape<kStrips, kTokens>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RingState ring;
  const u32 x_ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  if (threadIdx.x == 0) {
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&ring.full[i]), 1);
      barrier_init(shared_address(&ring.empty[i]), 4 * kStrips * kCluster);
    }
    barrier_init_done();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_sync();

  const int cluster = static_cast<int>(blockIdx.x) / kCluster;
  const u32 w_ring = x_ring + p.slots * Shape::kSlotBytes, y_buffers = w_ring + p.w_slots * kBlockBytes;
  StripWarps<kStrips, kTokens, kCluster> warps{p,
                                               x_ring,
                                               w_ring,
                                               kCluster == 1 ? 0 : cluster_rank(),
                                               ring,
                                               __ldg(p.tile_range + cluster),
                                               __ldg(p.tile_range + cluster + 1)};
  if (warp < 4 * kStrips) {
    take_registers<Shape::kMultiplyRegisters>();
    const auto strip = static_cast<u32>(warp) / 4;
    warps.template multiply<T, kTransposed ? Major::mn : Major::k, kActivation>(
        static_cast<int>(strip),
        {y_buffers + strip * kStoreBuffers * kStoreBytes, strip + 1, warp % 4, lane});
  } else {  // one warp of this warpgroup works
    give_registers<Shape::kOtherRegisters>();
    if (warp == 4 * kStrips) warps.load(lane);
  }
  if constexpr (kCluster > 1) {
    __syncwarp();
    cluster_sync();  // a peer may still write here
  }
}

}  // namespace rarefy::sm90
