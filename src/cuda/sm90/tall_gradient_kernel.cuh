// The weight gradient of tall vectors, device side. dY by token, 64 rows of W a panel, is operand A with M
// innermost; columns of X by feature, 64 (or 32) tokens a row, are operand B with the sum innermost. Four
// warps bring both, X 16 bytes a copy, as its columns lie anywhere; two warpgroups multiply, share their sums
// with the cluster's other thread blocks, and store.
#pragma once

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/gradient_exchange.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {

struct TallGradientParams {
  CUtensorMap dy, out;  // out: [stored column][row of the block]
  TileLists lists;
  const int4* tiles;  // row tile, first stored column, how many
  const int* col;
  const char* x;  // by feature
  u32 x_pieces;   // of 16 bytes, from one feature to the next
  void* dvalues;
  int tokens, rows, block_rows, tiles_of_block;
  u32 slots;
};

template <int kRows>
struct TallGradientShape {
  static constexpr int kColumns = kRows == 128 ? 256 : 512;
  static constexpr int kTokens = kRows == 128 ? 64 : 32;  // of a step: as many as leave four slots
  static constexpr u32 kPanelBytes = kTokens * 128;       // of dY, 64 rows of W
  static constexpr u32 kXBytes = kColumns * kTokens * 2, kSlotBytes = kXBytes + kRows / 64 * kPanelBytes;
  static constexpr int kMultiplyRegisters = 200;
  static constexpr int kGatherRegisters = 3 * 168 - 2 * kMultiplyRegisters;
};

inline constexpr int kGradientTiles = 2;  // known ahead to those that multiply
inline constexpr int kGradientOwn = 64;   // of a thread block, known to those that load
inline constexpr u32 kGatherBarrier = 3;  // behind those of two ways out

struct TallGradientState {
  RingState ring;
  int4 tile[kGradientTiles];  // row tile (-1: there are no more), first column, how many
  alignas(8) u64 tile_full[kGradientTiles], tile_empty[kGradientTiles];
  int own[kGradientOwn], own_count;
};

template <class T, int kRows, int kSplit>
struct TallGradientWarps {
  using Shape = TallGradientShape<kRows>;
  static constexpr int kColumns = Shape::kColumns, kTokens = Shape::kTokens;
  const TallGradientParams& p;
  u32 slots, buffers;  // addresses
  TallGradientState& state;
  u32 rank;  // in the cluster

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }
  // This thread block's share of the steps.
  __device__ int first_step(u32 share) const {
    const int steps = (p.tokens + kTokens - 1) / kTokens;
    return static_cast<int>(static_cast<u32>(steps) * share / kSplit);
  }
  // The tile's first row in W, and in its block.
  __device__ int first_row(int row_tile) const {
    return row_tile / p.tiles_of_block * p.block_rows + first_in_block(row_tile);
  }
  __device__ int first_in_block(int row_tile) const { return row_tile % p.tiles_of_block * kRows; }

  __device__ void put_tile(Turn& turn, const int4& tile, int lane) const {
    wait(shared_address(&state.tile_empty[turn.slot]), turn.parity);
    if (lane == 0) {
      state.tile[turn.slot] = tile;
      arrive(shared_address(&state.tile_full[turn.slot]));
    }
    turn.next(kGradientTiles);
  }

  // Reads which tiles are this thread block's, up to kGradientOwn. They are walked from the last one on: a
  // list begins with whole tiles, and what is left of a row had better be multiplied while others read the
  // same dY.
  __device__ int own_tiles(TileCursor& cursor, int warp, int lane) const {
    if (warp == 0) {
      int count = 0;
      while (count < kGradientOwn && cursor.next(p.lists, static_cast<int>(blockIdx.x) / kSplit)) {
        if (lane == 0) state.own[count] = unpack_tile(cursor.item.x).group;
        ++count;
      }
      if (lane == 0) state.own_count = count;
    }
    named_barrier(kGatherBarrier, 128);
    return state.own_count;
  }

  // Four warps bring a tile's columns, step by step in turn, four or eight at a time; the first ones dY.
  __device__ void load_tile(const int4& tile, int warp, int lane, Turn& at) const {
    constexpr int kPieces = kTokens / 8, kAtOnce = 128 / kPieces, kCopies = kColumns / kAtOnce;
    const int row = (32 * warp + lane) / kPieces, piece = lane % kPieces;  // of each kAtOnce columns
    const int swizzled = kPieces == 8 ? piece ^ row % 8 : piece ^ row / 2 % 4;
    const auto place = static_cast<u32>(row * kTokens * 2 + (swizzled << 4));
    const int begin = first_step(rank), end = first_step(rank + 1), n0 = first_row(tile.x), count = tile.z;
    u32 columns[kCopies];  // where they begin in X
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int column = min(kAtOnce * i + row, count - 1);
      columns[i] = static_cast<u32>(__ldg(p.col + tile.y + column)) * p.x_pieces;
    }
    const char* x = p.x + static_cast<std::int64_t>(begin) * kTokens * 2 + piece * 16;
#pragma unroll 1
    for (int step = begin; step < end; ++step, x += kTokens * 2) {
      const u32 to = slots + at.slot * Shape::kSlotBytes, barrier = full(at.slot);
      wait(empty(at.slot), at.parity);
      if (warp < kRows / 64 && lane == 0) {
        if (warp == 0) arrive_expect(barrier, Shape::kSlotBytes - Shape::kXBytes);
        load_box(to + Shape::kXBytes + static_cast<u32>(warp) * Shape::kPanelBytes, &p.dy, n0 + warp * 64,
                 step * kTokens, barrier);
      }
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (kAtOnce * i < count) {
          copy_16(to + place + static_cast<u32>(i * kAtOnce * kTokens * 2), x + u64{columns[i]} * 16);
        }
      }
      arrive_after_copies(barrier);
      at.next(p.slots);
    }
    if constexpr (kSplit > 1) {
      device::wait_for_all_copies();  // they have arrived; what is exchanged goes to the same places
      cluster_sync();
      cluster_sync();
      cluster_sync();  // all have read what they were given
    }
  }

  __device__ void load(int warp, int lane) const {
    Turn at, tiles;
    at.parity = tiles.parity = 1;  // the first round is free
    TileCursor cursor;
    bool x_is_there = false;
    for (int count = kGradientOwn; count == kGradientOwn;) {
      count = own_tiles(cursor, warp, lane);
      for (int own = count - 1; own >= 0; --own) {
        const int4 tile = load_ahead(p.tiles + state.own[own]);
        if (tile.z == 0) continue;  // behind the last
        if (warp == 0) put_tile(tiles, tile, lane);
        if (!x_is_there) wait_for_kernels();  // it has just been transposed
        x_is_there = true;
        load_tile(tile, warp, lane, at);
      }
      named_barrier(kGatherBarrier, 128);  // all have read which are their own
    }
    if (warp == 0) put_tile(tiles, {-1, 0, 0, 0}, lane);
    if (!x_is_there) wait_for_kernels();
    device::wait_for_all_copies();
  }

  // A step's products: one or two halves of 128 columns.
  template <int kHalves>
  __device__ static void products(float (&d)[2][64], u64 a, u64 b, u32 add) {
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (u32 half = 0; half < kHalves; ++half) {
        wgmma<T, Major::mn, Major::k>(d[half], a + k * kNext16<Major::mn>,
                                      b + half * (128 * kTokens * 2 >> 4) + k * kNext16<Major::k>,
                                      k == 0 ? add : 1);
      }
    }
    wgmma_commit();
  }

  // All steps of a tile. `at` goes on.
  template <int kHalves>
  __device__ void multiply_steps(float (&d)[2][64], Turn& at, int steps, u32 panel, u32 columns,
                                 int lane) const {
    constexpr u64 kXLayout =
        kTokens == 64 ? operand_layout(Swizzle::b128, 1024) : operand_layout(Swizzle::b64, 512);
    u32 before = 0;
    for (int step = 0; step < steps; ++step) {
      const u32 from = slots + at.slot * Shape::kSlotBytes;
      wait(full(at.slot), at.parity);
      fence_async();  // gathered by ordinary copies
      if constexpr (kHalves > 0) {
        products<kHalves>(d, operand(from + Shape::kXBytes + panel), operand_at(kXLayout, from + columns),
                          step > 0);
        wgmma_wait<1>();  // the step before has ended, and this one is on its way
      }
      if (step > 0) {
        __syncwarp();
        if (lane == 0) arrive(empty(before));
      }
      before = at.slot;
      at.next(p.slots);
    }
    if constexpr (kHalves > 0) wgmma_wait<0>();
    __syncwarp();
    if (steps > 0 && lane == 0) arrive(empty(before));
  }

  __device__ void multiply(u32 group, int warp, int lane) const {
    const u32 panel = kRows == 128 ? group * Shape::kPanelBytes : 0;
    const int my_first = kRows == 128 ? 0 : static_cast<int>(group) * 256;  // column of the tile
    const int steps = first_step(rank + 1) - first_step(rank);
    StoreLane out{buffers + group * kStoreBuffers * kStoreBytes, group + 1, warp, lane};
    Turn at, tiles;
    for (;;) {
      wait(shared_address(&state.tile_full[tiles.slot]), tiles.parity);
      const int4 tile = state.tile[tiles.slot];
      const int row_tile = uniform(tile.x), first = uniform(tile.y), count = uniform(tile.z);
      arrive(shared_address(&state.tile_empty[tiles.slot]));  // each lane for what it read
      tiles.next(kGradientTiles);
      if (row_tile < 0) break;
      const int mine = count - my_first;  // columns
      float d[2][64];
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i / 64][i % 64] = 0;  // no tokens in a share: sums of nothing
      if (mine > 128) {
        multiply_steps<2>(d, at, steps, panel, static_cast<u32>(my_first) * kTokens * 2, lane);
      } else if (mine > 0) {
        multiply_steps<1>(d, at, steps, panel, static_cast<u32>(my_first) * kTokens * 2, lane);
      } else {
        multiply_steps<0>(d, at, steps, panel, 0, lane);
      }
      if constexpr (kSplit > 1) {
        exchange<kSplit>(d, rank, slots);
        cluster_sync();
      }
      store(out, d, row_tile, first + my_first, mine, static_cast<int>(group));
    }
    if (out.leads()) store_wait_all();
  }

  // Cells of 64 columns, those that this thread block has the sums of; whole ones by TMA, which leaves out
  // what lies behind the block's last row.
  __device__ void store(StoreLane& out, const float (&d)[2][64], int row_tile, int first, int count,
                        int group) const {
    const int panel = kRows == 128 ? group * 64 : 0, in_block = first_in_block(row_tile) + panel;
    const int row = first_row(row_tile) + panel + 16 * out.warp + out.lane / 4;
    const bool inside[2] = {row < p.rows, row + 8 < p.rows};  // of W
#pragma unroll
    for (int cell = 0; cell < 4; ++cell) {
      if (cell * kSplit / 4 != static_cast<int>(rank)) continue;
      const int left = count - cell * 64;
      if (left <= 0) break;
      if (out.leads()) store_wait_read<kStoreBuffers - 1>();
      named_barrier(out.barrier, 128);
      const u32 buffer = out.buffers + out.turn * kStoreBytes;
      out.turn ^= 1;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrix i: columns 8(j + i / 2) …, rows 16 · warp + 8(i % 2) …
          const float* sums = &d[cell / 2][cell % 2 * 32 + (j + i / 2) * 4 + i % 2 * 2];
          v[i] = inside[i % 2] ? pack<T>(sums[0], sums[1]) : 0;
        }
        const int column = (j + out.lane / 16) * 8 + out.lane % 8, piece = 2 * out.warp + out.lane / 8 % 2;
        store_transposed(buffer + static_cast<u32>(column * 128 + ((piece ^ column % 8) << 4)), v[0], v[1],
                         v[2], v[3]);
      }
      fence_async();
      named_barrier(out.barrier, 128);
      const int at = first + cell * 64;
      if (left >= 64) {
        if (out.leads()) {
          store_box(&p.out, in_block, at, buffer);
          store_commit();
        }
        continue;
      }
      const int pieces = min(8, (p.block_rows - in_block) / 8);  // of 16 bytes
      for (int i = out.warp * 32 + out.lane; i < left * 8; i += 128) {
        const int column = i / 8, piece = i % 8;
        if (piece >= pieces) continue;
        T* to = static_cast<T*>(p.dvalues) + static_cast<std::int64_t>(at + column) * p.block_rows + in_block;
        *reinterpret_cast<float4*>(to + piece * 8) =
            load_shared_4(buffer + static_cast<u32>(column * 128 + ((piece ^ column % 8) << 4)));
      }
    }
  }
};

template <class T, int kRows, int kSplit>
__global__ void __launch_bounds__(384, 1) tall_gradient_kernel(const __grid_constant__ TallGradientParams p) {
  using Shape = TallGradientShape<kRows>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ TallGradientState state;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&p.dy);
    prefetch_map(&p.out);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&state.ring.full[i]), 128 + 1);
      barrier_init(shared_address(&state.ring.empty[i]), 8);
    }
    for (int i = 0; i < kGradientTiles; ++i) {
      barrier_init(shared_address(&state.tile_full[i]), 1);
      barrier_init(shared_address(&state.tile_empty[i]), 256);
    }
    barrier_init_done();
  }
  __syncthreads();
  launch_dependents();
  const TallGradientWarps<T, kRows, kSplit> warps{p, slots, slots + p.slots * Shape::kSlotBytes, state,
                                                  kSplit > 1 ? cluster_rank() : 0};
  if (warp < 8) {
    take_registers<Shape::kMultiplyRegisters>();
    warps.multiply(static_cast<u32>(warp) / 4, warp % 4, lane);
  } else {
    give_registers<Shape::kGatherRegisters>();
    warps.load(warp - 8, lane);
  }
}

}  // namespace rarefy::sm90
