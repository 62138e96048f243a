// dX of tall vectors without what W does not store, device side. A tile is kTokens tokens × some columns of
// W, its sums in shared memory. Of a block row it stores one run of columns, side by side in `values`: 64 of
// them are operand A as they lie there, dY is operand B, and each row of the product is added to its column's
// sums. Two threads bring both, a warp says which columns these are; two warpgroups multiply in turns, and
// add in the order of the turns.
#pragma once

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma_64.cuh"
#include "cuda/sm90/tile/repair.cuh"
#include "cuda/sm90/tile/ring.cuh"

namespace rarefy::sm90 {

inline constexpr int kScatterRun = 64;  // columns of a turn
inline constexpr u32 kScatterThreads = 352;
inline constexpr int kScatterSlots = 6;  // at most

struct ScatterParams {
  CUtensorMap dy, values;
  const int2* stored;  // of 32 columns and a block row: where the first is in values and col
  const int* col;
  void* dx;
  std::int64_t dx_stride;
  int tokens, cols, row_blocks, column_tiles, columns, tiles;  // columns of a tile
  int words;                                                   // of 32 columns, and one behind the last
  u32 slots;
  Stored repairs;  // where values are packed with zeros; else no values
};

struct ScatterState {
  RingState ring;
  // Of a turn's first slot: how many columns (-1: there are no more turns), the tiles of columns and of
  // tokens that they are of, whether this is the first of its warpgroup there.
  int4 turn[kScatterSlots];
  int columns[kScatterSlots][kScatterRun];
};

template <class T, int kTokens, int kPanels>
struct ScatterWarps {
  static constexpr u32 kABytes = kScatterRun * 128, kBBytes = kTokens * 128, kSlotBytes = kABytes + kBBytes;
  static constexpr u32 kRowBytes = kTokens * 4;  // of a column's sums
  static constexpr u32 kOrder = 1, kTile = 3;    // named barriers: the turn to add, of either; a tile's end
  const ScatterParams& p;
  u32 slots, sums;  // addresses
  ScatterState& state;

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }

  // Bring -----------------------------------------------------------------------------------------------

  // Where what block rows store from a column on lies in values.
  struct Bound {
    const int2* stored;
    u32 before;  // the column, in its word
    __device__ Bound(const ScatterParams& p, int column)
        : stored(p.stored + min(column / 32, p.words - 1) * std::int64_t{p.row_blocks}),
          before((1u << column % 32) - 1) {}
    __device__ int2 read(int row) const { return __ldg(stored + row); }
    __device__ int place(const int2& word) const {
      return word.x + __popc(static_cast<u32>(word.y) & before);
    }
  };

  // This thread block's turns, one after the other: take(turn, block row, first column in values).
  template <class Take>
  __device__ void each_turn(Take&& take) const {
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const int column_tile = tile % p.column_tiles, token_tile = tile / p.column_tiles;
      const Bound begins(p, column_tile * p.columns), ends(p, (column_tile + 1) * p.columns);
      int turns = 0;
      int2 next_begin = begins.read(0), next_end = ends.read(0);
#pragma unroll 1
      for (int row = 0; row < p.row_blocks; ++row) {
        const int begin = begins.place(next_begin), end = ends.place(next_end),
                  next = min(row + 1, p.row_blocks - 1);
        next_begin = begins.read(next);
        next_end = ends.read(next);
#pragma unroll 1
        for (int i = begin; i < end; i += kScatterRun, ++turns)
          take(int4{min(kScatterRun, end - i), column_tile, token_tile, turns < 2}, row, i);
      }
      // Each warpgroup has a turn in each tile, and the first one the next.
      for (; turns == 0 || turns % 2 != 0; ++turns) take(int4{0, column_tile, token_tile, turns < 2}, 0, 0);
    }
    for (int i = 0; i < 2; ++i) take(int4{-1, 0, 0, 0}, 0, 0);
  }

  // One thread brings dY, or the columns of W: `bytes` for each panel of a turn; load(to, panel, …).
  template <class Load>
  __device__ void bring(u32 bytes, Load&& load) const {
    Turn at;
    at.parity = 1;  // the first round is free
    each_turn([&](const int4& turn, int row, int first) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const u32 barrier = full(at.slot);
        wait(empty(at.slot), at.parity);
        if (turn.x > 0) {
          arrive_expect(barrier, bytes);
          load(slots + at.slot * kSlotBytes, panel, turn.z, row, first, barrier);
        } else {
          arrive(barrier);
        }
        at.next(p.slots);
      }
    });
  }
  __device__ void bring_dy() const {
    bring(kBBytes, [&](u32 to, int panel, int token_tile, int row, int /*first*/, u32 barrier) {
      load_box(to + kABytes, &p.dy, (row * kPanels + panel) * 64, token_tile * kTokens, barrier);
    });
  }
  __device__ void bring_values() const {
    bring(kABytes, [&](u32 to, int panel, int /*token_tile*/, int /*row*/, int first, u32 barrier) {
      load_box(to, &p.values, panel * 64, first, barrier);
    });
  }

  // One warp says what the turn is, and which columns it has.
  __device__ void announce(int lane) const {
    Turn at;
    at.parity = 1;
    each_turn([&](const int4& turn, int /*row*/, int first) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        wait(empty(at.slot), at.parity);
        if (panel == 0) {
          if (lane == 0) state.turn[at.slot] = turn;
          const u32 columns = shared_address(state.columns[at.slot]);
#pragma unroll
          for (int i = lane; i < kScatterRun; i += 32) {
            if (i < turn.x) copy_4(columns + static_cast<u32>(i) * 4, p.col + first + i);
          }
        }
        arrive_after_copies(full(at.slot));
        if (lane == 0) arrive(full(at.slot));
        at.next(p.slots);
      }
    });
    device::wait_for_all_copies();
  }

  __device__ static void copy_4(u32 to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  }

  // Multiply --------------------------------------------------------------------------------------------

  // Sums of a column lie in another order: tokens 16t + 8j + 2q + e at 16t + 4q + 2j + e, what a lane holds
  // of a row of a product side by side.
  __device__ static float4 load_if(u32 address, bool stored) {
    float4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
        "mov.f32 %2, 0f00000000;\nmov.f32 %3, 0f00000000;\n@p ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(address), "r"(static_cast<u32>(stored))
        : "memory");
    return v;
  }
  __device__ static void store_if(u32 address, const float4& v, bool stored) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.shared.v4.f32 [%4], {%0, %1, %2, %3};\n}" ::"f"(v.x),
        "f"(v.y), "f"(v.z), "f"(v.w), "r"(address), "r"(static_cast<u32>(stored))
        : "memory");
  }

  // A tile's sums, rounded, to dX; and zeros in their place. A warp's lanes read 32 tokens of four columns at
  // a time and write eight columns of a token each. NaN if one of them is.
  __device__ float write(int column_tile, int token_tile, int warp, int lane) const {
    constexpr int kTokenParts = kTokens / 32;
    const int units = (p.columns + 31) / 32 * kTokenParts, piece = lane % 8;
    float all = 0;
    for (int unit = warp; unit < units; unit += 8) {
      const int c = unit / kTokenParts * 32 + lane / 8 * 8, part = unit % kTokenParts;
      if (c >= p.columns) continue;
      const u32 from = sums + static_cast<u32>(c) * kRowBytes + static_cast<u32>(part * 128 + piece * 16);
      float v[8][4];
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const float4 s = load_shared_4(from + i * kRowBytes);
        v[i][0] = s.x;
        v[i][1] = s.y;
        v[i][2] = s.z;
        v[i][3] = s.w;
        all += (s.x + s.y) + (s.z + s.w);
        device::store_shared_4(from + i * kRowBytes, float4{0, 0, 0, 0});
      }
      const int column = column_tile * p.columns + c, left = p.cols - column;
      const int token = token_tile * kTokens + part * 32 + piece / 4 * 16 + piece % 4 * 2;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int t = token + k / 2 * 8 + k % 2;
        if (t >= p.tokens || left <= 0) continue;
        uint4 packed{device::pack<T>(v[0][k], v[1][k]), device::pack<T>(v[2][k], v[3][k]),
                     device::pack<T>(v[4][k], v[5][k]), device::pack<T>(v[6][k], v[7][k])};
        T* to = static_cast<T*>(p.dx) + t * p.dx_stride + column;
        if (left >= 8) {
          *reinterpret_cast<uint4*>(to) = packed;
        } else {
          const auto* each = reinterpret_cast<const T*>(&packed);
#pragma unroll
          for (int i = 0; i < 7; ++i) {
            if (i < left) to[i] = each[i];
          }
        }
      }
    }
    return all;
  }

  // By all warps that multiply: what is NaN in dX, of all tiles, again.
  __device__ void repair_tiles(int warp, int lane) const {
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const int begin = tile % p.column_tiles * p.columns;
      Stored own = p.repairs;
      own.out = min(own.out, begin + p.columns);
      for (int column = begin + warp * 16; column < own.out; column += 8 * 16)
        repair<T>(own, nullptr, Activations<false>{}, column, tile / p.column_tiles * kTokens, kTokens, lane);
    }
  }

  __device__ void multiply(u32 group, int warp, int lane) const {
    Turn at;
    const auto skip = [&] {
#pragma unroll
      for (int i = 0; i < kPanels; ++i) at.next(p.slots);
    };
    if (group == 1) {
      skip();
      named_barrier_arrive(kOrder, 256);  // the first may add
    }
    const bool odd = lane / 4 % 2 != 0;
    int column_tile = -1, token_tile = 0;  // whose sums these are
    bool bad = false;
    const auto end_tile = [&] {
      named_barrier(kTile, 256);
      const float all = write(column_tile, token_tile, static_cast<int>(group) * 4 + warp, lane);
      bad |= all != all;
      named_barrier(kTile, 256);
    };
    while (true) {
      wait(full(at.slot), at.parity);
      const int4 turn = state.turn[at.slot];
      const int count = uniform(turn.x);
      if (count < 0) break;
      int c[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * warp + lane / 4 + 8 * h;
        c[h] = row < count ? state.columns[at.slot][row] - turn.y * p.columns : -1;
      }
      float d[kTokens / 2];
      Turn slot = at;
      // Of no columns: whatever lies there, for nobody.
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (panel > 0) wait(full(slot.slot), slot.parity);
        const u32 from = slots + slot.slot * kSlotBytes;
        const u64 a = operand(from), b = operand(from + kABytes);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
          wgmma<T, Major::k, Major::k>(d, a + k * kNext16<Major::k>, b + k * kNext16<Major::k>,
                                       panel + k > 0);
        wgmma_commit();
        slot.next(p.slots);
      }
      if (turn.w != 0 && column_tile >= 0) end_tile();
      column_tile = turn.y;
      token_tile = turn.z;
      wgmma_wait<0>();
      __syncwarp();
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (lane == 0) arrive(empty(at.slot));
        at.next(p.slots);
      }
      // Lanes of odd rows swap neighbouring pieces, so that two rows never meet in a bank.
#pragma unroll
      for (int t = 0; t < kTokens / 2; t += 16) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float x = d[t + i], y = d[t + 8 + i];
          d[t + i] = odd ? y : x;
          d[t + 8 + i] = odd ? x : y;
        }
      }
      named_barrier(kOrder + group, 256);
      if (count > 0) {
        const u32 place = static_cast<u32>(lane % 4 * 16), swap = odd ? 64 : 0;
        constexpr int kAtOnce = kTokens / 16 < 4 ? kTokens / 16 : 4;  // pieces of a row
#pragma unroll
        for (int first = 0; first < kTokens / 16; first += kAtOnce) {
          float4 s[2][kAtOnce];
          u32 address[2][kAtOnce];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const u32 t = static_cast<u32>(first + i);
              address[h][i] =
                  (sums + static_cast<u32>(c[h]) * kRowBytes + place + (t % 2 == 0 ? swap : 64 - swap)) +
                  t / 2 * 128;
              s[h][i] = load_if(address[h][i], c[h] >= 0);
            }
          }
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const float* add = d + (first + i) * 8 + 2 * h;
              s[h][i].x += add[0];
              s[h][i].y += add[1];
              s[h][i].z += add[4];
              s[h][i].w += add[5];
              store_if(address[h][i], s[h][i], c[h] >= 0);
            }
          }
        }
      }
      named_barrier_arrive(kOrder + 1 - group, 256);
      skip();
    }
    if (column_tile >= 0) end_tile();
    if (group == 0) named_barrier(kOrder, 256);  // what the other still arrives at
    if (p.repairs.values == nullptr || !named_barrier_any(kTile, 256, bad)) return;
    repair_tiles(static_cast<int>(group) * 4 + warp, lane);
  }
};

template <class T, int kTokens, int kPanels>
__global__ void __launch_bounds__(kScatterThreads, 1)
    tall_scatter_kernel(const __grid_constant__ ScatterParams p) {
  using Warps = ScatterWarps<T, kTokens, kPanels>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ ScatterState state;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u,
            sums = slots + p.slots * Warps::kSlotBytes;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&p.dy);
    prefetch_map(&p.values);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&state.ring.full[i]), 2 + 32 + 1);  // dY, W; what is announced
      barrier_init(shared_address(&state.ring.empty[i]), 4);
    }
    barrier_init_done();
  }
  for (u32 i = threadIdx.x * 16; i < static_cast<u32>(p.columns) * Warps::kRowBytes;
       i += kScatterThreads * 16)
    device::store_shared_4(sums + i, float4{0, 0, 0, 0});
  __syncthreads();
  begin_behind_kernels();
  const Warps warps{p, slots, sums, state};
  if (warp < 8) {
    warps.multiply(static_cast<u32>(warp) / 4, warp % 4, lane);
  } else {
    if (warp == 8 && lane == 0) warps.bring_dy();
    if (warp == 9 && lane == 0) warps.bring_values();
    if (warp == 10) warps.announce(lane);
  }
}

}  // namespace rarefy::sm90
