// The strip kernel, device side. One warp walks the plan: it reads this block's tiles and their steps ahead.
// Two warps load: for each step one brings 64 features of X for the tile's tokens, the other, packed behind
// one another, those 64 × 64 blocks of W that the tile's strips store there. A warpgroup for each strip
// multiplies: W is operand A, X is operand B. It skips steps where its strip stores nothing, and stores its
// 64 features of all tokens at the end.
#pragma once

#include <climits>

#include "cuda/sm90/device/wgmma_64.cuh"
#include "cuda/sm90/device/wgmma_columns.cuh"
#include "cuda/sm90/strip_shape.cuh"
#include "cuda/sm90/strip_walk.h"
#include "cuda/sm90/tile/exchange.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"
#include "cuda/sm90/tile_lists.cuh"
#include "cuda/sm90/token_order.h"

namespace rarefy::sm90 {

inline constexpr u32 kBlockBytes = 64 * 64 * 2;
inline constexpr int kBatches = 3;  // of eight steps, read ahead
inline constexpr int kTiles = 8;    // known ahead

struct StripParams {
  CUtensorMap x, x_last, w, y;
  LastTokens last;
  TileLists lists;     // of a cluster's token tiles
  const int4* groups;  // StripGroup
  const int* steps;    // four words each
  const void* bias;
  int features, tokens;  // of y
  int w_columns;         // 64-wide columns of a stored block
  int columns;           // 64-wide, of X
  Activation activation;
  bool whole;  // the strips of a tile are of one block row
  int split;   // kParts: thread blocks of a cluster
  int alone;   // … and, if not 0, how many strips of a group have a tile each
  u32 slots, w_slots;
};

inline constexpr u32 kAbsent = 0xFF;  // in a header: this strip stores nothing in this step

struct StripState {
  RingState ring;
  u32 header[kMaxSlots];  // byte s: the slot of W for strip s
  struct Tile {
    int steps;  // -1: there are no more tiles
    int token, strip[kMostGroup];
  } tile[kTiles];
  struct Batch {
    int x_row;      // -1: there are no more
    int words[32];  // lane 4j + r: word r of step j, -1 where the tile has nothing
  } batch[kBatches];
  // Barriers, in pairs: it is there, nobody reads it any more.
  alignas(8) u64 tile_full[kTiles], tile_empty[kTiles];
  alignas(8) u64 batch_full[kBatches], batch_empty[kBatches];
};

// kWhole: the strips of a tile store the same columns, as those of one block row do. kParts: a cluster's
// thread blocks have a part of a tile's steps each, and one tile.
template <int kStrips, int kTokens, int kCluster, bool kWhole, bool kParts>
struct StripWarps {
  using Shape = StripShape<kStrips, kTokens>;
  const StripParams& p;
  StripState& state;
  u32 x_ring, w_ring, rank;

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }

  // Lane 4j + r has word r of step j. Behind the last step there may be anything.
  __device__ int read_steps(const StripTile& t, int step, int lane) const {
    if (step + lane / 4 >= p.columns || lane % 4 > kStrips) return -1;
    if (t.part >= 0 && lane % 4 != 0 && lane % 4 != t.part + 1) return -1;
    return __ldg(p.steps + (static_cast<std::int64_t>(t.group) * p.columns + step) * 4 + lane);
  }

  // In how many of the steps from `step` to before `end` the tile's one strip stores something.
  __device__ int stored_steps(const StripTile& t, int step, int end, int lane) const {
    const int* words = p.steps + static_cast<std::int64_t>(t.group) * p.columns * 4 + t.part + 1;
    int count = 0;
    for (; step < end; step += 32) {
      const int block = step + lane < end ? __ldg(words + (step + lane) * 4) : -1;
      count += __popc(__ballot_sync(~0u, block >= 0));
    }
    return count;
  }

  __device__ void walk(int lane) {
    Turn batches, tiles;
    batches.parity = tiles.parity = 1;  // the first round is free
    const auto put_tile = [&](const StripState::Tile& tile) {
      wait(shared_address(&state.tile_empty[tiles.slot]), tiles.parity);
      if (lane == 0) {
        state.tile[tiles.slot] = tile;
        arrive(shared_address(&state.tile_full[tiles.slot]));
      }
      tiles.next(kTiles);
    };
    const auto put_batch = [&](int x_row, int word) {
      wait(shared_address(&state.batch_empty[batches.slot]), batches.parity);
      state.batch[batches.slot].words[lane] = word;
      if (lane == 0) state.batch[batches.slot].x_row = x_row;
      arrive(shared_address(&state.batch_full[batches.slot]));  // each lane for what it wrote
      batches.next(kBatches);
    };
    // Of a tile's steps the part-th of `parts`.
    const auto put_steps = [&](const StripTile& t, int token_tile, int part, int parts) {
      const int4 a = __ldg(p.groups + 2 * t.group), b = __ldg(p.groups + 2 * t.group + 1);  // StripGroup
      int step = a.x * part / parts;
      const int end = a.x * (part + 1) / parts;
      int word = read_steps(t, step, lane);
      StripState::Tile tile{end - step, token_tile * kTokens, {a.y, a.z, a.w}};
      if (t.part >= 0) {  // one strip alone
        tile.steps = parts > 1     ? stored_steps(t, step, end, lane)
                     : t.part == 0 ? b.x
                     : t.part == 1 ? b.y
                                   : b.z;
        if (t.part != 0) tile.strip[0] = -1;
        if (t.part != 1) tile.strip[1] = -1;
        if (t.part != 2) tile.strip[2] = -1;
      }
      put_tile(tile);
      if (tile.steps == 0) return;
#pragma unroll 1
      for (; step < end; step += 8) {
        const int this_word = step + lane / 4 < end ? word : -1;
        if (step + 8 < end) word = read_steps(t, step + 8, lane);
        put_batch(tile.token, this_word);
      }
    };
    if constexpr (kParts) {
      const int tile = static_cast<int>(blockIdx.x) / p.split, nth = tile / p.lists.token_tiles;
      const StripTile t = p.alone == 0 ? StripTile{nth, 0, -1} : StripTile{nth / p.alone, 0, nth % p.alone};
      put_steps(t, tile % p.lists.token_tiles, static_cast<int>(blockIdx.x) % p.split, p.split);
    } else {
      TileCursor cursor;
#pragma unroll 1
      while (cursor.next(p.lists, static_cast<int>(blockIdx.x) / kCluster)) {
        put_steps(unpack_tile(cursor.item.x),
                  p.lists.token_tile(cursor.nth()) * kCluster + static_cast<int>(rank), 0, 1);
      }
    }
    put_tile({-1, 0, {}});
    put_batch(-1, -1);
  }

  // The next eight steps: lane 4j + r gets word r of step j. False: there are no more.
  __device__ bool read_batch(Turn& from, int lane, int* word, int* x_row) const {
    wait(shared_address(&state.batch_full[from.slot]), from.parity);
    *word = state.batch[from.slot].words[lane];
    *x_row = __reduce_max_sync(~0u, state.batch[from.slot].x_row);  // uniform, as in multiply
    arrive(shared_address(&state.batch_empty[from.slot]));          // each lane for what it read
    from.next(kBatches);
    return *x_row >= 0;
  }

  // What lane `of` has, uniform: copies want their operands so.
  __device__ static int from_lane(int value, int of, int lane) {
    return __reduce_max_sync(~0u, lane == of ? value : INT_MIN);
  }

  // One warp brings X …
  __device__ void load_x(int lane) const {
    Turn at, from;
    at.parity = 1;  // the first round is free
    for (int word, x_row; read_batch(from, lane, &word, &x_row);) {
      const u32 stored = __ballot_sync(~0u, word >= 0 && lane % 4 != 0);
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        if ((stored >> (4 * j + 1) & 7) == 0) continue;
        const int column = from_lane(word, 4 * j, lane);
        wait(empty(at.slot), at.parity);
        if (lane == 0) {
          const bool last = p.last.is(x_row);
          arrive_expect(full(at.slot), last ? p.last.count * 128 : Shape::kSlotBytes);
          load_box(x_ring + at.slot * Shape::kSlotBytes, last ? &p.x_last : &p.x, column * 64, x_row,
                   full(at.slot));
        }
        __syncwarp();
        at.next(p.slots);
      }
    }
  }

  // … and one W, and says where it is. All that does not wait is made for eight steps at once.
  __device__ void load_w(int lane) const {
    constexpr u32 kPart = kBlockBytes / kCluster;  // each thread block of the cluster brings its rows to all
    RingSpace<> space{p.slots, p.w_slots};
    Turn at, from;
    u32 head = 0;  // the next slot of W
    const int r = lane % 4;
    for (int word, x_row; read_batch(from, lane, &word, &x_row);) {
      const u32 stored = __ballot_sync(~0u, word >= 0 && r != 0);
      const u32 present = stored >> (lane - r + 1) & 7, count = static_cast<u32>(__popc(present));
      u32 behind = count;  // blocks of this batch up to this step
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0u, behind, d);
        if (lane >= d) behind += other;
      }
      const u32 begin = (head + behind - count) % p.w_slots;
      head = (head + __shfl_sync(~0u, behind, 31)) % p.w_slots;
      const auto w_slot = [&](int strip) {
        const u32 slot = begin + static_cast<u32>(__popc(present & ((1u << strip) - 1)));
        return slot < p.w_slots ? slot : slot - p.w_slots;
      };
      u32 header = 0;
#pragma unroll
      for (int s = 0; s < kStrips; ++s) header |= (present >> s & 1 ? w_slot(s) : kAbsent) << (8 * s);
      const int block = max(word, 0), column = block % p.w_columns,
                row = block / p.w_columns * 64 + static_cast<int>(rank) * (64 / kCluster);
      const auto to = static_cast<int>(w_ring + w_slot(max(r - 1, 0)) * kBlockBytes + rank * kPart);
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        const u32 here = stored >> (4 * j + 1) & 7;
        if (here == 0) continue;
        const auto blocks = static_cast<u32>(__popc(here));
        space.take(blocks, empty(0), p.slots);
        const u32 barrier = full(at.slot);
        if (lane == 4 * j) {
          state.header[at.slot] = header;
          arrive_expect(barrier, blocks * kBlockBytes);
        }
        __syncwarp();
#pragma unroll
        for (int s = 0; s < kStrips; ++s) {
          if ((here >> s & 1) == 0) continue;
          const int its = 4 * j + 1 + s;
          const auto its_to = static_cast<u32>(from_lane(to, its, lane));
          const int its_column = from_lane(column, its, lane), its_row = from_lane(row, its, lane);
          if (lane != 0) continue;
          if constexpr (kCluster == 1) {
            load_box(its_to, &p.w, 0, its_column, its_row, barrier);
          } else {
            load_box_multicast(its_to, &p.w, 0, its_column, its_row, barrier, (1 << kCluster) - 1);
          }
        }
        __syncwarp();
        at.next(p.slots);
      }
    }
  }

  template <class T, Major kMajorW, bool kActivates>
  __device__ void multiply(int strip, StoreLane out) const {
    const int warp = out.warp, lane = out.lane;
    Turn at, tiles;
    int next_steps, next_token, next_feature;  // of the tile to come
    const auto read_tile = [&] {
      wait(shared_address(&state.tile_full[tiles.slot]), tiles.parity);
      // Reduced, so that the compiler knows them for the same in all lanes: the loop below stays in uniform
      // registers, where products want their operands.
      const StripState::Tile& tile = state.tile[tiles.slot];
      next_steps = __reduce_max_sync(~0u, tile.steps);
      next_token = __reduce_max_sync(~0u, tile.token);
      next_feature = __reduce_max_sync(~0u, tile.strip[strip]) * 64;  // negative: no strip for these warps
      arrive(shared_address(&state.tile_empty[tiles.slot]));          // each lane for what it read
      tiles.next(kTiles);
    };
    read_tile();
    while (next_steps >= 0) {
      const int steps = next_steps, token = next_token, feature = next_feature;
      float2 bias{0, 0};
      if (p.bias != nullptr && feature >= 0) {
        const int row = feature + 16 * warp + lane / 4;
        const T* b = static_cast<const T*>(p.bias);
        if (row < p.features) bias.x = static_cast<float>(b[row]);
        if (row + 8 < p.features) bias.y = static_cast<float>(b[row + 8]);
      }

      using Sums = float[Shape::kParts][Shape::kPart / 2];
      // The slot of this strip's block in a step that is there.
      const auto find_w = [&] {
        wait(full(at.slot), at.parity);
        // Read by the lane that will say so: the slot, header and all, is free once it has arrived.
        u32 header = 0;
        if (lane == 0) header = state.header[at.slot];
        return __shfl_sync(~0u, header, 0) >> (8 * strip) & 0xFF;
      };
      const auto queue_products = [&](Sums& d, u32 w_slot, u32 add) {
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
      };
      const auto release = [&](u32 slot) {
        if constexpr (kCluster == 1) {
          if (lane == 0) arrive(empty(slot));
        } else {
          if (lane < kCluster) arrive_remote(empty(slot), static_cast<u32>(lane) ^ rank);  // lane 0: here
        }
      };
      const auto leave = [&](Sums& d) {
        read_tile();
        int first = 0, end = kTokens;
        if constexpr (kParts) {
          const u32 its_rank = cluster_rank();
          if (feature >= 0) {
            exchange_tile<kTokens, kStrips * 128>(d, p.split, its_rank, x_ring, p.tokens - token);
          } else {
            watch_exchange();
          }
          const ShareOfTokens<kTokens> share(p.split, its_rank);
          first = share.first, end = share.end;
        }
        if (feature < 0) return;
        Activations<kActivates>{p.activation}.apply_to([&]<Activation activation>() {
#pragma unroll
          for (int part = 0; part < Shape::kParts; ++part) {
            store_tile<T, activation>(out, d[part], bias, &p.y, feature, token + part * Shape::kPart,
                                      first - part * Shape::kPart, end - part * Shape::kPart);
          }
        });
      };
      if constexpr (kWhole) {
        if (feature >= 0 && steps > 0) {  // products of a step are queued while those of the step before run
          Sums d;
          u32 before = 0;
          for (int step = 0; step < steps; ++step) {
            queue_products(d, find_w(), step > 0);
            wgmma_wait<1>();
            if (step > 0) release(before);
            before = at.slot;
            at.next(p.slots);
          }
          wgmma_wait<0>();
          release(before);
          leave(d);
          continue;
        }
      }
      Sums d;
      u32 add = 0;  // the first product overwrites d
      for (int step = 0; step < steps; ++step) {
        const u32 w_slot = find_w();
        if constexpr (!kWhole) {
          if (w_slot != kAbsent) {
            queue_products(d, w_slot, add);
            wgmma_wait<0>();
            add = 1;
          }
        }
        release(at.slot);
        at.next(p.slots);
      }
      if (add == 0) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
          for (float& sum : d[part]) sum = 0;
        }
      }
      leave(d);
    }
    if (out.leads()) store_wait_read<0>();  // they end with the kernel
  }
};

template <class T, bool kTransposed, bool kActivates, int kStrips, int kTokens, int kCluster, bool kWhole,
          bool kParts>
__global__ void __launch_bounds__(StripShape<kStrips, kTokens>::kThreads, 1)
    strip_kernel(const __grid_constant__ StripParams p) {
  using Shape = StripShape<kStrips, kTokens>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ StripState state;
  const u32 x_ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  if (threadIdx.x == 0) {
    prefetch_map(&p.x);
    prefetch_map(&p.x_last);
    prefetch_map(&p.w);
    prefetch_map(&p.y);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&state.ring.full[i]), 2);  // one who brings X, one W
      barrier_init(shared_address(&state.ring.empty[i]), 4 * kStrips * kCluster);
    }
    for (int i = 0; i < kTiles; ++i) {
      barrier_init(shared_address(&state.tile_full[i]), 1);
      barrier_init(shared_address(&state.tile_empty[i]), 4 * kStrips * 32);
    }
    for (int i = 0; i < kBatches; ++i) {
      barrier_init(shared_address(&state.batch_full[i]), 32);
      barrier_init(shared_address(&state.batch_empty[i]), 64);
    }
    barrier_init_done();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_sync();
  if (warp != 4 * kStrips + 2) begin_behind_kernels();  // what is walked was prepared

  const u32 w_ring = x_ring + p.slots * Shape::kSlotBytes, y_buffers = w_ring + p.w_slots * kBlockBytes;
  StripWarps<kStrips, kTokens, kCluster, kWhole, kParts> warps{p, state, x_ring, w_ring,
                                                               kCluster == 1 ? 0 : cluster_rank()};
  if (warp < 4 * kStrips) {
    take_registers<Shape::kMultiplyRegisters>();
    const auto strip = static_cast<u32>(warp) / 4;
    warps.template multiply<T, kTransposed ? Major::mn : Major::k, kActivates>(
        static_cast<int>(strip),
        {y_buffers + strip * kStoreBuffers * kStoreBytes, strip + 1, warp % 4, lane});
  } else {  // three warps of this warpgroup work
    give_registers<Shape::kOtherRegisters>();
    if (warp == 4 * kStrips) warps.load_x(lane);
    if (warp == 4 * kStrips + 1) warps.load_w(lane);
    if (warp == 4 * kStrips + 2) warps.walk(lane);
    if constexpr (kParts) watch_exchange();
  }
  if constexpr (kCluster > 1) {
    __syncwarp();
    cluster_sync();  // a peer may still write here
  }
}

}  // namespace rarefy::sm90
