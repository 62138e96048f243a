// dX of tall vectors as a dense product, device side. A tile is 128 columns of W × 256 or 128 tokens. Of 64
// outputs of W a column that is stored is 128 bytes in `values`, side by side, and a row of operand A; one
// that is not is a row of zeros. Four warps bring these, 16 bytes a copy, and dY, operand B; two warpgroups
// multiply and store.
#pragma once

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/tile/repair.cuh"
#include "cuda/sm90/tile/ring.cuh"

namespace rarefy::sm90 {

struct SpreadParams {
  CUtensorMap dy, dx;
  const int2* stored;  // of 32 columns and a block row: where the first is in values, and which are stored
  const void* values;
  int block_rows, row_blocks;  // rows of a block, blocks of rows
  int steps, column_tiles, tiles;
  u32 slots;
  Stored repairs;
};

template <int kTokens>
struct SpreadShape {
  static constexpr int kColumns = 128, kRows = 64;  // kRows outputs are a step
  static constexpr u32 kPanelBytes = 64 * 128, kDyBytes = kTokens * 128,
                       kSlotBytes = kDyBytes + 2 * kPanelBytes;
  static constexpr int kMultiplyRegisters = 200, kBringRegisters = 3 * 168 - 2 * kMultiplyRegisters;
};

template <class T, int kTokens>
struct SpreadWarps {
  using Shape = SpreadShape<kTokens>;
  const SpreadParams& p;
  u32 slots;  // address
  RingState& ring;

  __device__ u32 full(u32 slot) const { return shared_address(&ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&ring.empty[slot]); }

  // Which of a warp's 32 columns are stored in the outputs of a lane: eight outputs of each step.
  struct Walk {
    const int2* at;
    int row, block, blocks, block_rows;  // in the block; which
    int2 stored;

    __device__ void read() { stored = block < blocks ? __ldg(at + block) : int2{0, 0}; }
    __device__ void next() {
      for (row += Shape::kRows; row >= block_rows; row -= block_rows) ++block;
      read();
    }
  };

  __device__ void bring(int warp, int lane) const {
    Turn at;
    at.parity = 1;  // the first round is free
    const int piece = lane % 8;
    const u32 to = Shape::kDyBytes + static_cast<u32>((32 * warp + lane / 8) * 128);
    const u32 place[2] = {to + static_cast<u32>((piece ^ lane / 8) << 4),
                          to + static_cast<u32>((piece ^ lane / 8 ^ 4) << 4)};
    const char* values = static_cast<const char*>(p.values);
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const int column_tile = tile % p.column_tiles, token = tile / p.column_tiles * kTokens;
      Walk walk{p.stored + (column_tile * 4 + warp) * std::int64_t{p.row_blocks},
                piece * 8 % p.block_rows,
                piece * 8 / p.block_rows,
                p.row_blocks,
                p.block_rows,
                {}};
      walk.read();
      const char* from[8];
      u32 bytes[8];
#pragma unroll 1
      for (int step = 0; step < p.steps; ++step) {
        const u32 slot = slots + at.slot * Shape::kSlotBytes, barrier = full(at.slot);
        if (walk.row < Shape::kRows) {  // else further on in the blocks of the step before
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const u32 bit = static_cast<u32>(4 * i + lane / 8), stored = static_cast<u32>(walk.stored.y);
            const auto entry = static_cast<u32>(walk.stored.x + __popc(stored & ((1u << bit) - 1)));
            bytes[i] = (stored >> bit & 1) * 16;
            from[i] = values + (u64{entry} * static_cast<u32>(p.block_rows) + static_cast<u32>(walk.row)) * 2;
          }
        } else {
#pragma unroll
          for (const char*& source : from) source += Shape::kRows * 2;
        }
        walk.next();
        wait(empty(at.slot), at.parity);
        if (warp == 0 && lane == 0) {
          arrive_expect(barrier, Shape::kDyBytes);
          load_box(slot, &p.dy, step * Shape::kRows, token, barrier);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          copy_16(slot + place[i % 2] + static_cast<u32>(i * 512), from[i], bytes[i]);
        arrive_after_copies(barrier);
        at.next(p.slots);
      }
    }
    device::wait_for_all_copies();
  }

  __device__ void multiply(u32 group, StoreLane out) const {
    Turn at;
    const u32 panel = Shape::kDyBytes + uniform(group) * Shape::kPanelBytes;
    int next = uniform(static_cast<int>(blockIdx.x));
    bool bad = false;  // a sum is NaN
    while (next < p.tiles) {
      const int tile = next, column = tile % p.column_tiles * Shape::kColumns + static_cast<int>(group) * 64,
                token = tile / p.column_tiles * kTokens;
      at = {uniform(at.slot), uniform(at.parity)};
      float d[1][kTokens / 2];
      u32 before = 0;  // the slot of the step before
      const auto release = [&] {
        __syncwarp();
        if (out.lane == 0) arrive(empty(before));
      };
      for (int step = 0; step < p.steps; ++step) {
        const u32 from = slots + at.slot * Shape::kSlotBytes;
        wait(full(at.slot), at.parity);
        fence_async();  // W came by ordinary copies
        const u64 a = operand(from + panel), b = operand(from);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
          wgmma<T, Major::k, Major::k>(d[0], a + k * kNext16<Major::k>, b + k * kNext16<Major::k>,
                                       step + k > 0);
        wgmma_commit();
        wgmma_wait<1>();  // the step before has ended, and this one is on its way
        if (step > 0) release();
        before = at.slot;
        at.next(p.slots);
      }
      wgmma_wait<0>();
      release();
      next = uniform(tile +
                     static_cast<int>(gridDim.x));  // here: operands of products stay in uniform registers
      store_tile<T, Activation::none>(out, d[0], float2{0, 0}, &p.dx, column, token);
      const float all = sum_of_all(d);
      bad |= all != all;
    }
    if (out.leads()) store_wait_read<0>();  // they end with the kernel
    // Behind the loop: in it, ptxas would take lanes for divergent, and move operands before each product.
    if (!named_barrier_any(out.barrier, 128, bad)) return;
    wait_to_repair(out);
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const int column = tile % p.column_tiles * Shape::kColumns + static_cast<int>(group) * 64;
      repair<T>(p.repairs, nullptr, Activations<false>{}, column + 16 * out.warp,
                tile / p.column_tiles * kTokens, kTokens, out.lane);
    }
  }
};

template <class T, int kTokens>
__global__ void __launch_bounds__(384, 1) tall_spread_kernel(const __grid_constant__ SpreadParams p) {
  using Shape = SpreadShape<kTokens>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RingState ring;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&p.dy);
    prefetch_map(&p.dx);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&ring.full[i]), 128 + 1);
      barrier_init(shared_address(&ring.empty[i]), 8);
    }
    barrier_init_done();
  }
  __syncthreads();
  begin_behind_kernels();
  const SpreadWarps<T, kTokens> warps{p, slots, ring};
  if (warp < 8) {
    take_registers<Shape::kMultiplyRegisters>();
    const auto group = static_cast<u32>(warp) / 4;
    const u32 buffers = slots + p.slots * Shape::kSlotBytes;
    warps.multiply(group, {buffers + group * kStoreBuffers * kStoreBytes, group + 1, warp % 4, lane});
  } else {
    give_registers<Shape::kBringRegisters>();
    warps.bring(warp - 8, lane);
  }
}

}  // namespace rarefy::sm90
