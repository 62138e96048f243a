// The tall kernel, device side. Stored columns of a block row are rows of 128 (or 64) weights side by side in
// memory: operand A with M innermost. The same columns of X, by feature, are rows of tokens: operand B with N
// innermost. Four warps gather them, 16 bytes a copy; two warpgroups multiply and store.
#pragma once

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"

namespace rarefy::sm90 {

// Stored columns of a step. More of them are fewer barriers; as many as leave four slots or more.
constexpr int tall_columns(int rows) { return rows == 128 ? 64 : 32; }

struct TallParams {
  CUtensorMap w, y;
  const int *tile_range, *col;
  const int4* tiles;  // group of rows, token tile, its columns' first and end in col
  const void *x, *values, *bias;
  u32 x_bytes;  // between features of X
  int tokens, features, block_rows;
  u32 slots;
};

// A warpgroup multiplies 64 rows by 256 tokens: two share a tile by rows (128 × 256) or by tokens (64 × 512).
template <int kRows>
struct TallShape {
  static constexpr int kTokens = kRows == 128 ? 256 : 512;
  static constexpr int kColumns = tall_columns(kRows);  // of a step
  // As many registers as three warpgroups of 168 have.
  static constexpr int kMultiplyRegisters = 200;
  static constexpr int kGatherRegisters = 3 * 168 - 2 * kMultiplyRegisters;
  static constexpr u32 kPanelBytes = kColumns * 128;  // 64 rows, or 64 tokens, of a step
  static constexpr u32 kXBytes = kTokens / 64 * kPanelBytes;
  static constexpr u32 kSlotBytes = kXBytes + kRows / 64 * kPanelBytes;
};

template <class T, int kRows>
struct TallWarps {
  using Shape = TallShape<kRows>;
  static constexpr int kTokens = Shape::kTokens, kColumns = Shape::kColumns;
  static constexpr u32 kPanelBytes = Shape::kPanelBytes;
  const TallParams& p;
  u32 slots;  // address
  RingState& ring;
  int tile, end;

  __device__ u32 full(u32 slot) const { return shared_address(&ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&ring.empty[slot]); }

  __device__ int4 read_tile(int t) const { return t < end ? __ldg(p.tiles + t) : int4{}; }

  // Each of four warps gathers a quarter of a step's columns, kTokens / 8 pieces of 16 bytes of each. A warp
  // is alone on its scheduler, so what counts are instructions one after another: two to four a copy, and few
  // around them.
  __device__ void load(int warp, int lane) {
    constexpr int kMine = kColumns / 4;
    Turn at;
    at.parity = 1;  // the first round is free
    const auto read_column = [&](const int4& t, int step) {
      const int i = step + kMine * warp + lane % kMine;
      return i < t.w ? __ldg(p.col + i) : -1;
    };
    int4 next_tile = read_tile(tile);
    int next = read_column(next_tile, next_tile.z);
    while (tile < end) {
      const int4 t = next_tile;
      ++tile;
      const int first_row = t.x * kRows % p.block_rows, token = t.y * kTokens;
      const bool tokens_end = token + kTokens > p.tokens;
      const char* x = reinterpret_cast<const char*>(static_cast<const T*>(p.x) + token);
      int column = next;
      next_tile = read_tile(tile);
      int step = t.z;
      for (; step + kColumns <= t.w; step += kColumns) {
        next = read_column(t, step + kColumns);
        const u32 to = slots + at.slot * Shape::kSlotBytes, barrier = full(at.slot);
        wait(empty(at.slot), at.parity);
        if (warp == 0 && lane == 0) {
          arrive_expect(barrier, Shape::kSlotBytes - Shape::kXBytes);
          for (int r = 0; r < kRows; r += 64) {
            load_box(to + Shape::kXBytes + static_cast<u32>(r / 64) * kPanelBytes, &p.w, first_row + r, step,
                     barrier);
          }
        }
        if (!tokens_end) {
          gather<false>(to, column, x, warp, lane);
        } else {
          gather_edge(to, column, token, warp, lane);
        }
        arrive_after_copies(barrier);
        at.next(p.slots);
        column = next;
      }
      next = read_column(next_tile, next_tile.z);
      if (step < t.w) {
        const u32 to = slots + at.slot * Shape::kSlotBytes, barrier = full(at.slot);
        wait(empty(at.slot), at.parity);
        if (warp == 0 && lane == 0) arrive(barrier);
        load_last_weights(to + Shape::kXBytes, first_row, step, t.w, warp, lane);
        if (!tokens_end) {
          gather<true>(to, column, x, warp, lane);
        } else {
          gather_edge(to, column, token, warp, lane);
        }
        arrive_after_copies(barrier);
        at.next(p.slots);
      }
    }
    wait_for_copies();
  }

  // One column at a time, a piece of 32 × 8 tokens after the other. missing: where column is -1, zeros.
  template <bool missing>
  __device__ void gather(u32 to, int column, const char* x, int warp, int lane) const {
    constexpr int kMine = kColumns / 4;
    const u32 first = to + static_cast<u32>(lane / 8) * kPanelBytes + static_cast<u32>(kMine * warp * 128) +
                      static_cast<u32>(lane % 8 << 4);
    const char* from = x + lane * 16;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int c = __shfl_sync(~0u, column, k);
      const u32 at = missing && c < 0 ? 0 : static_cast<u32>(c), bytes = missing && c < 0 ? 0 : 16;
      const u32 row = (first ^ static_cast<u32>(k % 8 << 4)) + static_cast<u32>(k * 128);
      const char* tokens = from + u64{at} * p.x_bytes;
#pragma unroll
      for (u32 turn = 0; turn < kTokens / 256; ++turn) {
        const u32 to_piece = row + turn * 4 * kPanelBytes;
        const char* from_piece = tokens + turn * 512;
        if constexpr (missing) {
          copy_16(to_piece, from_piece, bytes);
        } else {
          copy_16(to_piece, from_piece);
        }
      }
    }
  }

  // The same where tokens end.
  __device__ void gather_edge(u32 to, int column, int token, int warp, int lane) const {
    constexpr int kPieces = kTokens / 8, kMine = kColumns / 4;
#pragma unroll 1
    for (int i = lane; i < kMine * kPieces; i += 32) {
      const int k = kMine * warp + i / kPieces, piece = i % kPieces, left = p.tokens - token - piece * 8;
      const int c = __shfl_sync(~0u, column, i / kPieces);
      const u32 bytes = c < 0 || left <= 0 ? 0 : left >= 8 ? 16 : static_cast<u32>(left) * 2;
      const char* from = static_cast<const char*>(p.x);
      if (bytes > 0)
        from += u64{static_cast<u32>(c)} * p.x_bytes + static_cast<u32>(token + piece * 8) * sizeof(T);
      copy_16(to + static_cast<u32>(piece / 8) * kPanelBytes +
                  static_cast<u32>(k * 128 + ((piece % 8 ^ k % 8) << 4)),
              from, bytes);
    }
  }

  // The weights of a row's last step. What follows its last column in memory is another row's weights: zeros
  // instead.
  __device__ void load_last_weights(u32 to, int first_row, int step, int stop, int warp, int lane) const {
    constexpr int kPieces = kRows / 8, kMine = kColumns / 4, kAtOnce = 32 / kPieces;
    const int piece = lane % kPieces, k0 = kMine * warp + lane / kPieces;
    const T* from = static_cast<const T*>(p.values) + static_cast<std::int64_t>(step) * p.block_rows +
                    first_row + piece * 8;
    const u32 panel = to + static_cast<u32>(piece / 8) * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kMine; i += kAtOnce) {
      const int k = k0 + i;
      const bool exists = step + k < stop;
      copy_16(panel + static_cast<u32>(k * 128 + ((piece % 8 ^ k % 8) << 4)),
              from + (exists ? k : 0) * p.block_rows, exists ? 16 : 0);
    }
  }

  template <Activation kActivation>
  __device__ void multiply(u32 group, StoreLane out) {
    const u32 my_rows = kRows == 128 ? group : 0, my_tokens = kRows == 128 ? 0 : group;
    Turn at;
    int4 next_tile = read_tile(tile);
    while (tile < end) {
      const int4 t = next_tile;
      ++tile;
      next_tile = read_tile(tile);
      const int steps = (t.w - t.z + kColumns - 1) / kColumns;
      const int feature = t.x * kRows + static_cast<int>(my_rows) * 64;
      float2 bias{0, 0};
      if (p.bias != nullptr) {
        const int row = feature + 16 * out.warp + out.lane / 4;
        const T* b = static_cast<const T*>(p.bias);
        if (row < p.features) bias.x = static_cast<float>(b[row]);
        if (row + 8 < p.features) bias.y = static_cast<float>(b[row + 8]);
      }
      float d[128];  // 256 tokens
      for (int step = 0; step < steps; ++step) {
        const u32 from = slots + at.slot * Shape::kSlotBytes;
        wait(full(at.slot), at.parity);
        fence_async();  // gathered by ordinary copies
        const u64 a = operand(from + Shape::kXBytes + my_rows * kPanelBytes, kPanelBytes);
        const u64 b = operand(from + my_tokens * 4 * kPanelBytes, kPanelBytes);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < kColumns / 16; ++k) {
          wgmma<T, Major::mn, Major::mn>(d, a + k * kNext16<Major::mn>, b + k * kNext16<Major::mn>,
                                         step + k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        __syncwarp();
        if (out.lane == 0) arrive(empty(at.slot));
        at.next(p.slots);
      }
      if (steps == 0) {
#pragma unroll
        for (float& sum : d) sum = 0;
      }
      const int token = t.y * kTokens + static_cast<int>(my_tokens) * 256;
      store_tile<T, kActivation>(out, d, bias, &p.y, feature, token);
    }
    if (out.leads()) store_wait_all();
  }
};

template <class T, Activation kActivation, int kRows>
__global__ void __launch_bounds__(384, 1) tall_kernel(const __grid_constant__ TallParams p) {
  using Shape = TallShape<kRows>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ RingState ring;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&ring.full[i]), 128 + 1);
      barrier_init(shared_address(&ring.empty[i]), 8);
    }
    barrier_init_done();
  }
  __syncthreads();
  TallWarps<T, kRows> warps{p, slots, ring, __ldg(p.tile_range + blockIdx.x),
                            __ldg(p.tile_range + blockIdx.x + 1)};
  if (warp < 8) {
    take_registers<Shape::kMultiplyRegisters>();
    const auto group = static_cast<u32>(warp) / 4;
    const u32 y_buffers = slots + p.slots * Shape::kSlotBytes;
    warps.template multiply<kActivation>(
        group, {y_buffers + group * kStoreBuffers * kStoreBytes, group + 1, warp % 4, lane});
  } else {
    give_registers<Shape::kGatherRegisters>();
    warps.load(warp - 8, lane);
  }
}

}  // namespace rarefy::sm90
