// The tall kernel, device side. Columns of a group of rows are rows of 128 (or 64) weights side by side in
// memory: operand A with M innermost. The same columns of X, by feature, are rows of tokens: operand B with N
// innermost. Four warps gather them, 16 bytes a copy; two warpgroups multiply and store.
#pragma once

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma_64.cuh"
#include "cuda/sm90/tall_tile.h"
#include "cuda/sm90/tile/exchange.cuh"
#include "cuda/sm90/tile/repair.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store_either.cuh"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {

struct TallParams {
  CUtensorMap w, y;
  TileLists lists;
  const int4* groups;  // of rows, its columns' first and end in col
  const int* col;
  const void *x, *values, *bias;
  std::int64_t x_tile;  // bytes between token tiles of X
  u32 x_bytes;          // between its features
  bool ragged;          // only the tokens of X themselves may be read, and they end within 16 bytes
  bool turned;          // by the kernel before this one, for it: nothing else can be waited for
  int tokens, features, block_rows;
  Activation activation;
  bool y_by_feature;
  u32 slots;
  int split;      // kSingle: thread blocks of a cluster that have a part of a tile's columns each
  int halves;     // … and tiles that share a group of rows
  Stored stored;  // where packed zeros may meet an Inf or a NaN of X; else no values
};

// A value that the compiler does not know the parts of, which it would add up again in each step.
template <class V>
__device__ inline V hidden(V v) {
  if constexpr (sizeof(V) == 8) {
    asm volatile("" : "+l"(v));
  } else {
    asm volatile("" : "+r"(v));
  }
  return v;
}

// This thread block's tiles, one after the other. Each gathering warp walks for itself, a tile ahead of its
// work: what it reads has arrived when it is wanted. One of them tells the multiplying warps. kSingle: it has
// one, or a part of it.
template <bool kSingle>
struct TallWalk {
  const TallParams& p;
  int columns;  // of a step
  TileCursor cursor;
  bool ended = false;

  struct Tile {
    int group, token_tile;  // -1: there are no more
    int first, end;         // columns, in col
  };
  __device__ Tile next() {
    if constexpr (kSingle) return ended ? Tile{-1, -1, 0, 0} : part();
    if (!cursor.next(p.lists, static_cast<int>(blockIdx.x))) return {-1, -1, 0, 0};
    const StripTile t = unpack_tile(cursor.item.x);
    const int4 group = load_ahead(p.groups + t.group);
    return {group.x, p.lists.token_tile(cursor.nth()), group.y, group.z};
  }
  // This thread block's part of its cluster's tile, in whole steps.
  __device__ Tile part() {
    ended = true;
    const int tile = static_cast<int>(blockIdx.x) / p.split, rank = static_cast<int>(blockIdx.x) % p.split;
    const int rows = tile / p.lists.token_tiles;
    const int4 group = load_ahead(p.groups + rows / p.halves);
    const int steps = (group.z - group.y + columns - 1) / columns;
    return {group.x * p.halves + rows % p.halves, tile % p.lists.token_tiles,
            group.y + steps * rank / p.split * columns,
            min(group.z, group.y + steps * (rank + 1) / p.split * columns)};
  }
};

inline constexpr int kTilesAhead = 4;  // known

struct TallState {
  RingState ring;
  int4 tile[kTilesAhead];  // its steps (-1: there are no more), group, token tile, products of its last step
  // Barriers, in pairs: it is there, nobody reads it any more.
  alignas(8) u64 tile_full[kTilesAhead], tile_empty[kTilesAhead];
};

template <class T, int kRows, int kTokens, int kColumns, bool kSingle>
struct TallWarps {
  using Walk = TallWalk<kSingle>;
  static constexpr TallTile kTile{kRows, kTokens, kColumns};
  static constexpr u32 kPanelBytes = kColumns * 128;  // 64 rows, or 64 tokens, of a step
  static constexpr u32 kXBytes = kTokens / 64 * kPanelBytes, kSlotBytes = kTile.slot_bytes();
  static constexpr int kUnit = kColumns == 128 ? 2 : 1;  // products of a row's last step
  const TallParams& p;
  u32 slots;  // address
  TallState& state;

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }

  // Each of four warps gathers a quarter of a step's columns, kPieces pieces of 16 bytes of each, kAtOnce
  // columns at a time. A warp is alone on its scheduler, so what counts are instructions one after another:
  // two to four a copy, and few around them.
  static constexpr int kMyColumns = kColumns / 4, kPieces = kTokens < 256 ? kTokens / 8 : 32,
                       kAtOnce = 32 / kPieces, kTurns = kMyColumns / kAtOnce;
  enum class Tokens { all, pieces, ragged };  // which are there: whole pieces, or a part of one

  __device__ void load(int warp, int lane) const {
    constexpr int kMine = kMyColumns;
    const u32 full = hidden(this->full(0)), empty = full + (this->empty(0) - this->full(0)),
              w_panel = kXBytes + static_cast<u32>(warp) * kPanelBytes;
    Turn at;
    at.parity = 1;  // the first round is free
    const auto read_column = [&](const typename Walk::Tile& t, int step) {
      const int i = step + kMine * warp + lane % kMine;
      return i < t.end ? __ldg(p.col + i) : -1;
    };
    Turn tiles;
    tiles.parity = 1;
    const auto put_tile = [&](const int4& tile) {
      if (warp != 0) return;
      wait(shared_address(&state.tile_empty[tiles.slot]), tiles.parity);
      if (lane == 0) {
        state.tile[tiles.slot] = tile;
        arrive(shared_address(&state.tile_full[tiles.slot]));
      }
      tiles.next(kTilesAhead);
    };
    Walk walk{p, kColumns, {}};
    typename Walk::Tile next_tile = walk.next();
    int next = read_column(next_tile, next_tile.first);
    wait_for_kernels();   // X is there
    launch_dependents();  // the next part of X may be, into a place that the part before this one had
    while (next_tile.token_tile >= 0) {
      const typename Walk::Tile t = next_tile;
      const int first_row = t.group * kRows % p.block_rows, token = t.token_tile * kTokens;
      // A tile without columns is a step of zeros.
      const int last = max(1, (t.end - t.first - 1) % kColumns + 1);
      const int last_products = (last + 16 * kUnit - 1) / (16 * kUnit) * kUnit;
      put_tile({max(1, (t.end - t.first + kColumns - 1) / kColumns), t.group, t.token_tile, last_products});
      const Tokens tokens = token + kTokens <= p.tokens ? Tokens::all
                            : p.ragged                  ? Tokens::ragged
                                                        : Tokens::pieces;
      const char* x = hidden(static_cast<const char*>(p.x) + t.token_tile * p.x_tile + lane % kPieces * 16);
      int column = next;
      next_tile = walk.next();
      int step = t.first;
      for (; step + kColumns <= t.end; step += kColumns) {
        next = read_column(t, step + kColumns);
        const u32 to = slots + at.slot * kSlotBytes, barrier = full + at.slot * 8;
        const char* columns[kTurns];  // of X, found before there is a place for them
#pragma unroll
        for (int k = 0; k < kTurns; ++k)
          columns[k] = column_of(x, __shfl_sync(~0u, column, k * kAtOnce + lane / kPieces));
        wait(empty + at.slot * 8, at.parity);
        if (warp < kRows / 64 && lane == 0) {
          if (warp == 0) arrive_expect(barrier, kSlotBytes - kXBytes);
          load_box(to + w_panel, &p.w, first_row + warp * 64, step, barrier);
        }
        gather_these<false>(tokens, to, columns, kColumns, token, warp, lane);
        arrive_after_copies(uniform(barrier));
        at.next(p.slots);
        column = next;
      }
      next = read_column(next_tile, next_tile.first);
      if (step < t.end || t.first == t.end) {
        const u32 to = slots + at.slot * kSlotBytes, barrier = full + at.slot * 8;
        const char* columns[kTurns];
#pragma unroll
        for (int k = 0; k < kTurns; ++k)
          columns[k] = column_of(x, max(0, __shfl_sync(~0u, column, k * kAtOnce + lane / kPieces)));
        wait(empty + at.slot * 8, at.parity);
        if (warp == 0 && lane == 0) arrive(barrier);
        if (kMine * warp < last_products * 16) {  // what is multiplied
          load_last_weights(to + kXBytes, first_row, step, t.end, warp, lane);
          gather_these<true>(tokens, to, columns, t.end - step - kMine * warp, token, warp, lane);
        }
        arrive_after_copies(uniform(barrier));
        at.next(p.slots);
      }
    }
    put_tile({-1, 0, 0, 0});
    device::wait_for_all_copies();
  }

  __device__ const char* column_of(const char* x, int column) const {
    return x + u64{static_cast<u32>(column)} * p.x_bytes;
  }

  template <bool missing>
  __device__ void gather_these(Tokens tokens, u32 to, const char* const (&columns)[kTurns], int count,
                               int token, int warp, int lane) const {
    if (tokens == Tokens::all) {
      gather<missing, Tokens::all>(to, columns, count, token, warp, lane);
    } else if (tokens == Tokens::pieces) {
      gather<missing, Tokens::pieces>(to, columns, count, token, warp, lane);
    } else {
      gather<missing, Tokens::ragged>(to, columns, count, token, warp, lane);
    }
  }

  // kAtOnce columns after the others. missing: `count` of them, then zeros. Of tokens that are not there
  // nothing is copied: what is multiplied in their place is what was there before.
  template <bool missing, Tokens tokens>
  __device__ void gather(u32 to, const char* const (&columns)[kTurns], int count, int token, int warp,
                         int lane) const {
    constexpr int kParts = kTokens / (8 * kPieces);  // of a column, 32 pieces each
    const int piece = lane % kPieces, column = lane / kPieces;
    const u32 first = to + static_cast<u32>(piece / 8) * kPanelBytes +
                      static_cast<u32>((kMyColumns * warp + column) * 128) +
                      static_cast<u32>((piece % 8 ^ column) << 4);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int left = p.tokens - token - 256 * part - 8 * piece;
      if (tokens != Tokens::all && left <= 0) continue;
      const u32 bytes = tokens == Tokens::ragged ? static_cast<u32>(min(8, left)) * 2 : 16;
#pragma unroll
      for (int k = 0; k < kTurns; ++k) {
        const u32 to_piece = (first ^ static_cast<u32>(k * kAtOnce % 8 << 4)) +
                             static_cast<u32>(k * kAtOnce * 128) + static_cast<u32>(part) * 4 * kPanelBytes;
        const char* from = columns[k] + part * 512;
        if constexpr (missing || tokens == Tokens::ragged) {
          copy_16(to_piece, from, missing && k * kAtOnce + column >= count ? 0 : bytes);
        } else {
          copy_16(to_piece, from);
        }
      }
    }
  }

  // The weights of a row's last step. What follows its last column in memory is another row's weights: zeros
  // instead.
  __device__ void load_last_weights(u32 to, int first_row, int step, int stop, int warp, int lane) const {
    constexpr int kOfColumn = kRows / 8, kStride = 32 / kOfColumn;  // pieces; columns at a time
    const int piece = lane % kOfColumn, k0 = kMyColumns * warp + lane / kOfColumn;
    const T* from = static_cast<const T*>(p.values) + static_cast<std::int64_t>(step) * p.block_rows +
                    first_row + piece * 8;
    const u32 panel = to + static_cast<u32>(piece / 8) * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kMyColumns; i += kStride) {
      const int k = k0 + i;
      const bool exists = step + k < stop;
      copy_16(panel + static_cast<u32>(k * 128 + ((piece % 8 ^ k % 8) << 4)),
              from + (exists ? k : 0) * p.block_rows, exists ? 16 : 0);
    }
  }

  template <bool kActivates>
  __device__ void multiply(u32 group, StoreLane out) const {
    const u32 my_rows = kRows == 128 ? group : 0, my_tokens = kTile.shares_tokens() ? group : 0;
    Turn at;
    Turn tiles;
    int next_steps, next_feature, next_token, next_last;  // of the tile to come
    const auto read_tile = [&] {
      wait(shared_address(&state.tile_full[tiles.slot]), tiles.parity);
      const int4 tile = state.tile[tiles.slot];
      next_steps = uniform(tile.x);
      next_feature = uniform(tile.y) * kRows + static_cast<int>(my_rows) * 64;
      next_token = uniform(tile.z) * kTokens + static_cast<int>(my_tokens) * kTile.mine();
      next_last = uniform(tile.w);
      arrive(shared_address(&state.tile_empty[tiles.slot]));  // each lane for what it read
      tiles.next(kTilesAhead);
    };
    read_tile();
    while (next_steps >= 0) {
      const int steps = next_steps, feature = next_feature, token = next_token, last = next_last;
      T biases[2] = {};
      if (p.bias != nullptr) {
        const int row = feature + 16 * out.warp + out.lane / 4;
        const T* b = static_cast<const T*>(p.bias);
        if (row < p.features) biases[0] = b[row];
        if (row + 8 < p.features) biases[1] = b[row + 8];
      }
      if constexpr (kTile.shares_tokens()) {
        if (token >= p.tokens) {  // these warps have nothing to do in the last tile
          for (int step = 0; step < steps; ++step) {
            wait(full(at.slot), at.parity);
            __syncwarp();
            if (out.lane == 0) arrive(empty(at.slot));
            at.next(p.slots);
          }
          read_tile();
          if constexpr (kSingle) {
            if (p.split > 1) watch_exchange();
          }
          continue;
        }
      }
      float d[1][kTile.mine() / 2];
      u32 before = 0;  // the slot of the step before
      const auto release = [&] {
        __syncwarp();
        if (out.lane == 0) arrive(empty(before));
      };
      const auto multiply_step = [&]<u32 kProducts>(int step) {
        const u32 from = slots + at.slot * kSlotBytes;
        wait(full(at.slot), at.parity);
        fence_async();  // gathered by ordinary copies
        const u64 a = operand(from + kXBytes + my_rows * kPanelBytes, kPanelBytes);
        const u64 b = operand(from + my_tokens * (kTile.mine() / 64) * kPanelBytes, kPanelBytes);
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < kProducts; ++k) {
          wgmma<T, Major::mn, Major::mn>(d[0], a + k * kNext16<Major::mn>, b + k * kNext16<Major::mn>,
                                         step + k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the step before has ended, and this one is on its way
        if (step > 0) release();
        before = at.slot;
        at.next(p.slots);
      };
      for (int step = 0; step < steps - 1; ++step) multiply_step.template operator()<kColumns / 16>(step);
      const int products = uniform(last);
      if (products == kUnit) {
        multiply_step.template operator()<kUnit>(steps - 1);
      } else if (kColumns == 32 || products == 2 * kUnit) {
        multiply_step.template operator()<2 * kUnit>(steps - 1);
      } else if (products == 3 * kUnit) {
        multiply_step.template operator()<3 * kUnit>(steps - 1);
      } else {
        multiply_step.template operator()<4 * kUnit>(steps - 1);
      }
      wgmma_wait<0>();
      release();
      read_tile();
      int first = 0, end = kTile.mine();  // of the tokens, what leaves here
      if constexpr (kSingle) {
        if (p.split > 1) {
          const u32 rank = cluster_rank();
          exchange_tile<kTile.mine(), 128 * kTile.warpgroups()>(d, p.split, rank, slots, p.tokens - token);
          const ShareOfTokens<kTile.mine()> share(p.split, rank);
          first = share.first, end = share.end;
        }
      }
      const float2 bias{static_cast<float>(biases[0]), static_cast<float>(biases[1])};
      const Activations<kActivates> activations{p.activation};
      activations.apply_to([&]<Activation activation>() {
        store_either<T, activation>(out, d[0], bias, &p.y, feature, token, p.y_by_feature, first, end);
      });
      if (p.stored.values != nullptr) {
        repair_if_nan(p.stored, static_cast<const T*>(p.bias), activations,
                      sum_of_tokens(d, p.tokens - token, out.lane), out, feature + 16 * out.warp,
                      token + first, end - first);
      }
    }
    if (out.leads()) store_wait_read<0>();  // they end with the kernel
  }
};

template <class T, bool kActivates, int kRows, int kTokens, int kColumns, bool kSingle>
__global__ void __launch_bounds__(TallTile{kRows, kTokens}.threads(),
                                  TallTile{kRows, kTokens}.warpgroups() == 2 ? 1 : 2)
    tall_kernel(const __grid_constant__ TallParams p) {
  constexpr TallTile kTile{kRows, kTokens, kColumns};
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ TallState state;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    prefetch_map(&p.w);
    prefetch_map(&p.y);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&state.ring.full[i]), 128 + 1);
      barrier_init(shared_address(&state.ring.empty[i]), 4 * kTile.warpgroups());
    }
    for (int i = 0; i < kTilesAhead; ++i) {
      barrier_init(shared_address(&state.tile_full[i]), 1);
      barrier_init(shared_address(&state.tile_empty[i]), 128 * kTile.warpgroups());
    }
    barrier_init_done();
  }
  __syncthreads();
  const TallWarps<T, kRows, kTokens, kColumns, kSingle> warps{p, slots, state};
  constexpr int kMultiplying = 4 * kTile.warpgroups();  // warps
  constexpr int kMultiplyRegisters = 200;  // with the gathering ones' as many as 168 for each of three
  if (warp < kMultiplying) {
    if constexpr (kTile.warpgroups() == 2) take_registers<kMultiplyRegisters>();
    if (!p.turned) wait_for_kernels();
    const auto group = static_cast<u32>(warp) / 4;
    const u32 y_buffers = slots + p.slots * kTile.slot_bytes();
    warps.template multiply<kActivates>(
        group, {y_buffers + group * kStoreBuffers * kStoreBytes, group + 1, warp % 4, lane});
  } else {
    if constexpr (kTile.warpgroups() == 2) give_registers<3 * 168 - 2 * kMultiplyRegisters>();
    warps.load(warp - kMultiplying, lane);
    if constexpr (kSingle) {
      if (p.split > 1) watch_exchange();
    }
  }
}

}  // namespace rarefy::sm90
