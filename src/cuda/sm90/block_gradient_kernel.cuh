// The gradient of stored blocks, device side: dW = dYᵀ X. Tokens are the sum, so both operands lie with them
// outermost: strips of dY are operand A, panels of X side by side operand B, wherever in X they come from.
// f32 is multiplied as tf32, which wants the sum innermost: so X is transposed first, and dY goes by way of
// registers. Four warps bring both, two warpgroups multiply and store; where nobody shares a tile's tokens a
// thread block takes one tile after the other, and the next one's panels come while this one's results leave.
#pragma once

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma.cuh"
#include "cuda/sm90/gradient_slots.cuh"
#include "cuda/sm90/tile/exchange.cuh"

namespace rarefy::sm90 {

template <class T, int kWide, int kSplit>
struct GradientWarps {
  using Tile = GradientTile<kWide>;
  using State = GradientState<kWide, kSplit>;
  static constexpr bool kTf32 = sizeof(T) == 4, kQueue = State::kQueue;
  static constexpr int kTokens = 128 / sizeof(T);                     // of a step
  static constexpr u32 kXBytes = kWide * 128, kDyBytes = kCellBytes;  // panels
  // X that has been transposed is read by feature: tokens lie side by side.
  static constexpr bool kTransposed = kTf32 || kWide == 16;
  static constexpr Major kXMajor = kTransposed ? Major::k : Major::mn;
  static constexpr int kInCell = 64 / kWide;  // panels
  static constexpr int kWords = sizeof(Tile) / sizeof(int);
  const GradientParams& p;
  u32 slots;  // address
  State& state;
  u32 rank;  // in the cluster

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }
  __device__ bool sums_dy() const { return !kTf32 && p.dbias != nullptr; }
  // Whether dY comes in units of 32 features rather than in panels of 64. f32's boxes are as narrow anyway.
  __device__ static bool loads_units(const Tile& tile) { return kWide < 64 && (kTf32 || tile.apart != 0); }
  __device__ int share(u32 of_rank) const {  // where its steps begin
    const int steps = (p.tokens + kTokens - 1) / kTokens;
    return steps * static_cast<int>(of_rank) / kSplit;
  }

  // What goes on does not wait for those before the first launch, which has waited before this one could
  // start.
  __device__ void start() const {
    if (p.goes_on) {
      launch_dependents();
    } else {
      begin_behind_kernels();
    }
  }

  // By all threads: the first tile, where it is not read in a queue, and the barriers. False: there is none.
  __device__ bool begin() const {
    if (p.list == nullptr && !p.goes_on) wait_for_kernels();  // nothing was prepared
    const int self = static_cast<int>(threadIdx.x);
    if (self < kMaxSlots) {
      barrier_init(full(self), 1);
      // Lanes that read it, or warps; and the loading warps, if they do.
      barrier_init(empty(self), (kTf32 ? 256 : 8) + (sums_dy() ? 4 : 0));
      if (self < State::kTiles) {
        barrier_init(shared_address(&state.tile_full[self]), kWords);
        barrier_init(shared_address(&state.tile_empty[self]), 256);
      }
      barrier_init_done();
    }
    const int index = p.list_index(static_cast<int>(blockIdx.x) / kSplit);
    if constexpr (kWide == 64) {
      if (p.list == nullptr) find_tile(p, index, state.tile[State::kTiles - 1]);
    }
    if (!kQueue && p.list != nullptr && self < kWords) {
      reinterpret_cast<int*>(&state.tile[0])[self] = __ldg(p.list + index * kWords + self);
    }
    __syncthreads();
    return kQueue || state.tile[0].x_panels > 0;  // the same in all blocks of the cluster
  }

  // What a loading warp knows of a tile. `feature`: where this lane's panel begins.
  struct Job {
    int x_panels, dy_panels, feature;
    u32 sums;
    const Tile& tile;
  };

  // A lane of one of four warps for each panel of X, then for each unit of dY. A warp's copies are issued one
  // after another.
  __device__ static int panel_of(int warp, int lane) { return lane * 4 + warp; }

  // A lane's word of a queue's tile, which others look up by shuffles; behind the last one 0.
  __device__ int word_of(int tile, int lane) const {
    if (tile >= p.tiles || lane >= kWords) return 0;
    return __ldg(p.list + p.list_index(tile) * kWords + lane);
  }
  __device__ Job job_of(int word, const Tile& tile, int warp, int lane) const {
    const auto at = [&](int index) { return __shfl_sync(~0u, word, index); };
    return {at(0), at(1), at(3 + min(panel_of(warp, lane), Tile::kPanels - 1)), static_cast<u32>(at(2)),
            tile};
  }

  __device__ void load(int warp, int lane) const {
    SlotTurn at, summed;
    at.parities = ~0u;  // the first round is free
    if constexpr (kQueue) {
      // Tiles lie in order of their cost: there and back, so that who had a dear one gets a cheap one.
      int round = 0;
      const auto next_word = [&] {
        const int first = round * p.tile_blocks, mine = static_cast<int>(blockIdx.x);
        return word_of(first + (round++ % 2 == 0 ? mine : p.tile_blocks - 1 - mine), lane);
      };
      int word = 0;
      if (p.list != nullptr) {
        word = next_word();
      } else {  // the only one
        if (lane < kWords) word = reinterpret_cast<const int*>(&state.tile[1])[lane];
        named_barrier(4, 128);
      }
      start();
      Turn turn;
      turn.parity = 1;
      for (;;) {
        const Job job = job_of(word, state.tile[turn.slot], warp, lane);
        if (warp == 0) put_tile(turn, word, lane);
        turn.next(State::kTiles);
        if (job.x_panels <= 0) break;
        word = p.list != nullptr ? next_word() : 0;
        load_tile(job, at, summed, warp, lane);
      }
    } else {
      start();
      const Tile& tile = state.tile[0];
      const int panel = min(panel_of(warp, lane), Tile::kPanels - 1);
      load_tile({tile.x_panels, tile.dy_panels, tile.feature[panel], tile.sums, tile}, at, summed, warp,
                lane);
    }
    if (p.goes_on) wait_for_kernels();
  }

  // Tells the multiplying warps of a tile.
  __device__ void put_tile(const Turn& turn, int word, int lane) const {
    wait(shared_address(&state.tile_empty[turn.slot]), turn.parity);
    if (lane >= kWords) return;
    reinterpret_cast<int*>(&state.tile[turn.slot])[lane] = word;
    arrive(shared_address(&state.tile_full[turn.slot]));  // each lane for what it wrote
  }

  __device__ void load_tile(const Job& job, SlotTurn& at, SlotTurn& summed, int warp, int lane) const {
    const int panel = panel_of(warp, lane);
    const GradientSlots ring(job.x_panels, job.dy_panels, kXBytes);
    const int unit = panel - job.x_panels;
    const bool of_x = unit < 0, apart = loads_units(job.tile);
    const bool loads = unit < job.dy_panels * Tile::kUnits && (of_x || apart || unit % Tile::kUnits == 0);
    const u32 place = of_x ? static_cast<u32>(panel) * kXBytes
                           : ring.dy_at + static_cast<u32>(unit) * (kDyBytes / Tile::kUnits);
    const CUtensorMap* const map = of_x ? &p.x : apart ? &p.dy_units : &p.dy;
    const bool by_feature = of_x && kTransposed;
    const u32 to_sum = sums_dy() ? uniform(job.sums) : 0;
    if (at.changes(ring)) {
      for (u32 slot = 0; slot < kMaxSlots; ++slot) wait(empty(slot), at.parities >> slot & 1);
    }
    summed.changes(ring);
    PanelSums<T> sums(to_sum, apart, warp, lane);
    const u32 sums_at = slots + ring.dy_at + static_cast<u32>(to_sum == 0 ? 0 : sums.mine()) * kDyBytes;
    const auto leave_slot = [&](u32 slot) {
      __syncwarp();
      if (lane == 0) arrive(empty(slot));
    };
    const auto sum_step = [&] {
      wait(full(summed.slot), summed.parity());
      if constexpr (!kTf32) sums.add(sums_at + summed.slot * ring.bytes);
      leave_slot(summed.slot);
      summed.next(ring.count);
    };
    const int first = share(rank), last = share(rank + 1);
    const int ahead = static_cast<int>(ring.count) - 1;  // steps that are being loaded while one is summed
    for (int step = first; step < last; ++step) {
      wait(empty(at.slot), at.parity());
      if (warp == 0 && lane == 0) arrive_expect(full(at.slot), ring.bytes);
      __syncwarp();
      if (loads) {
        const u32 to = slots + at.slot * ring.bytes + place;
        load_box(to, map, by_feature ? step * kTokens : job.feature,
                 by_feature ? job.feature : step * kTokens, full(at.slot));
        if (kTf32 && kWide == 64 && !of_x)
          load_box(to + 4096, &p.dy, job.feature + 32, step * kTokens, full(at.slot));
      }
      if (sums_dy()) {
        if (to_sum == 0) {
          leave_slot(at.slot);
          summed.next(ring.count);
        } else if (step - first >= ahead) {
          sum_step();
        }
      }
      at.next(ring.count);
    }
    if constexpr (!kTf32) {
      for (int left = to_sum == 0 ? 0 : min(last - first, ahead); left > 0; --left) sum_step();
      sums.sums.add_lanes();
    }
    __syncwarp();
    if constexpr (kSplit > 1) cluster_sync();
    if constexpr (!kTf32) {
      if (to_sum != 0 && lane < 8) sums.template leave<kSplit>(slots + kBiasAt, static_cast<int>(rank));
      __syncwarp();
    }
    if constexpr (kSplit > 1) cluster_sync();
    if constexpr (!kTf32) {
      if (to_sum == 0) return;
      if (kSplit == 1) named_barrier(4, 128);
      if (rank == 0) sums.finish(p, job.tile, slots + kBiasAt, kSplit);
      if (kSplit == 1) named_barrier(4, 128);  // the next ones may take their place
    }
  }

  __device__ void multiply(int warp, int lane) const {  // of the eight
    start();
    SlotTurn at;
    if constexpr (kQueue) {
      for (Turn turn;; turn.next(State::kTiles)) {
        wait(shared_address(&state.tile_full[turn.slot]), turn.parity);
        const Tile& tile = state.tile[turn.slot];
        if (uniform(tile.x_panels) <= 0) break;
        multiply_tile(tile, at, warp, lane);
        arrive(shared_address(&state.tile_empty[turn.slot]));  // each lane for what it read
      }
    } else {
      multiply_tile(state.tile[0], at, warp, lane);
    }
  }

  __device__ void multiply_tile(const Tile& tile, SlotTurn& at, int warp, int lane) const {
    const GradientSlots ring(uniform(tile.x_panels), uniform(tile.dy_panels), kXBytes);
    at.changes(ring);
    const int group = warp / 4;
    const int a0 = uniform(tile.a[2 * group]), a1 = uniform(tile.a[2 * group + 1]),
              b0 = uniform(tile.b[2 * group]), b1 = uniform(tile.b[2 * group + 1]);
    float d[2][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) d[0][i] = d[1][i] = 0;
    const bool apart = !kTf32 && loads_units(tile);
    const auto steps = [&](auto halves) {
      constexpr int kHalves = decltype(halves)::value;
      if constexpr (kWide < 64 && !kTf32 && kHalves > 0) {
        if (apart) {
          multiply_steps<kHalves, true>(d, ring, at, {a0, a1}, {b0, b1}, warp, lane);
          return;
        }
      }
      multiply_steps<kHalves, false>(d, ring, at, {a0, a1}, {b0, b1}, warp, lane);
    };
    if (a1 >= 0) {
      steps(std::integral_constant<int, 2>{});
    } else if (a0 >= 0) {
      steps(std::integral_constant<int, 1>{});
    } else {
      steps(std::integral_constant<int, 0>{});
    }
    if constexpr (kSplit > 1) exchange<kSplit>([&](u32 i) { return &d[i / 16][i % 16 * 4]; }, rank, slots);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i * kSplit / 4 != static_cast<int>(rank) || (i < 2 ? a0 : a1) < 0) continue;
      store_cell(tile, i, &d[i / 2][i % 2 * 32], warp, lane);
    }
  }

  struct Two {
    int of[2];
  };

  // All steps of a tile: the products of the warpgroup's quarters, of dY's panels a and X's from b on.
  // kApart: a panel of dY is two units, whose tokens have 64 bytes each.
  template <int kHalves, bool kApart>
  __device__ void multiply_steps(float (&d)[2][64], const GradientSlots& ring, SlotTurn& at, const Two& a,
                                 const Two& b, int warp, int lane) const {
    // Operands of the first slot, but for their constant upper halves. Reduced, so that the compiler keeps
    // them and does not make them anew in each step.
    constexpr bool kNarrow = kWide == 32 && !kTransposed;  // rows of 64 bytes
    constexpr u64 kA = kApart ? operand_layout(Swizzle::b64, 512, kDyBytes / 2)
                              : operand_layout(Swizzle::b128, 1024),
                  kB = kNarrow ? operand_layout(Swizzle::b64, 512, kXBytes)
                               : operand_layout(Swizzle::b128, 1024, kTransposed ? 16 : kXBytes);
    constexpr u64 kNextA = kNext16<Major::mn> / (kApart ? 2 : 1),
                  kNextB = kNext16<kXMajor> / (kNarrow ? 2 : 1);
    const auto low = [&](u64 layout, u32 place) {
      return uniform(static_cast<int>(operand_at(layout, slots + place)));
    };
    const int a_low[2] = {low(kA, ring.dy_at + static_cast<u32>(max(a.of[0], 0)) * kDyBytes),
                          low(kA, ring.dy_at + static_cast<u32>(max(a.of[1], 0)) * kDyBytes)},
              b_low[2] = {low(kB, static_cast<u32>(max(b.of[0], 0)) * kXBytes),
                          low(kB, static_cast<u32>(max(b.of[1], 0)) * kXBytes)};
    // Products of a step are queued while those of the step before run; but not of three slots, which had
    // better be free one step sooner, and not where a step's registers are operands.
    const bool queued = !kTf32 && ring.count > 3;
    const WordRows rows(warp % 4, lane);
    u32 from = at.slot * (ring.bytes / 16), before = 0;  // where the slot begins, in pieces of 16 bytes; the
                                                         // slot to be left next
    const auto release = [&] {
      __syncwarp();
      if (kTf32 || lane == 0) arrive(empty(before));
    };
    const int first = share(rank), last = share(rank + 1);
    for (int step = first; step < last; ++step) {
      wait(full(at.slot), at.parity());
      u64 its_a[2], its_b[2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        its_a[half] = kA >> 32 << 32 | (static_cast<u32>(a_low[half]) + from);
        its_b[half] = kB >> 32 << 32 | (static_cast<u32>(b_low[half]) + from);
      }
      if constexpr (kTf32) {
        u32 words[2][4][4];  // A
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const u32 dy = slots + ring.dy_at + static_cast<u32>(a.of[half]) * kDyBytes + from * 16;
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
            wgmma_tf32(d[half], words[half][k], its_b[half] + k * kNextB);
        }
      } else {
        if constexpr (kHalves > 0) wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            wgmma<T, Major::mn, kXMajor>(d[half], its_a[half] + k * kNextA, its_b[half] + k * kNextB, 1);
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
      at.next(ring.count);
      from = at.slot == 0 ? 0 : from + ring.bytes / 16;
    }
    if constexpr (kHalves > 0) wgmma_wait<0>();
    if (queued && last > first) release();
  }

  // The sums of cell i of this warpgroup to where their blocks are.
  __device__ void store_cell(const Tile& tile, int i, float* sums, int warp, int lane) const {
    const int group = warp / 4, cell = 4 * group + i, quarter = 2 * group + i / 2;
    const WordRows rows(warp % 4, lane);
    const auto row = [&](int h) {  // of the cell: the lane has two
      return kTf32 ? rows.feature(h) : 16 * (warp % 4) + lane / 4 + 8 * h;
    };
    // Where a weight goes; null: nowhere.
    const auto place_of = [&](int r, int column) -> T* {
      const int offset =
          kWide == 64 ? tile.offset[cell] : tile.offset[cell * Tile::kPieces + r / 16 * 4 + column / 16];
      const int inside = kWide == 64 ? r * p.block_cols + column : r % 16 * p.block_cols + column % 16;
      return offset < 0 ? nullptr : static_cast<T*>(p.dvalues) + std::int64_t{offset} * 8 + inside;
    };
    const int dy_panel = tile.a[quarter];
    const auto beyond = [&](int r) { return tile.row_feature(dy_panel, r) >= p.rows; };
    const bool ends = beyond(31) || beyond(63);
#pragma unroll
    for (int panel = 0; panel < kInCell; ++panel) {
      const int index = tile.b[quarter] + i % 2 * kInCell + panel;
      const int k0 = tile.feature[min(index, Tile::kPanels - 1)];
      if (k0 + kWide <= p.cols && !ends) continue;
      const bool no_row[2] = {beyond(row(0)), beyond(row(1))};
#pragma unroll
      for (int j = 0; j < kWide / 2; ++j) {  // padding is zero, whatever dY has
        const int k = k0 + j / 4 * 8 + 2 * (lane % 4) + j % 2;
        if (k >= p.cols || no_row[j % 4 / 2]) sums[panel * (kWide / 2) + j] = 0;
      }
    }
    if (p.accumulate) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const T* from = place_of(row(j % 2), j / 2 * 8 + 2 * (lane % 4));
        if (from == nullptr) continue;
        const float2 more = load_two(from);
        sums[2 * j] += more.x;
        sums[2 * j + 1] += more.y;
      }
    }
    if constexpr (kTf32) {  // from registers: lanes write whole sectors of 32 bytes
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        T* to = place_of(row(j % 2), j / 2 * 8 + 2 * (lane % 4));
        if (to != nullptr) *reinterpret_cast<float2*>(to) = {sums[2 * j], sums[2 * j + 1]};
      }
    } else {
      // 16 rows of 32 columns at a time, whose pieces of 16 bytes are placed so that eight rows of one piece
      // meet in no bank, nor do four pieces of two rows.
      const u32 stage = slots + kStageAt<kSplit> + static_cast<u32>(warp) * kStageBytes;
      const auto place = [&](int r, int piece) {
        return stage + static_cast<u32>(r * 64 + ((piece ^ r / 2 % 4) << 4));
      };
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {  // matrices: rows 0 and 8, columns 8j and 8j + 8
          const float* s = sums + 16 * half + 4 * j;
          store_matrices(place(lane % 16, j + lane / 16), pack<T>(s[0], s[1]), pack<T>(s[2], s[3]),
                         pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
        }
        __syncwarp();
#pragma unroll
        for (int r = lane / 4; r < 16; r += 8) {
          T* to = place_of(16 * (warp % 4) + r, 32 * half + lane % 4 * 8);
          if (to != nullptr) *reinterpret_cast<float4*>(to) = load_shared_4(place(r, lane % 4));
        }
        __syncwarp();
      }
    }
  }
};

template <class T, int kWide, int kSplit>
__global__ void __launch_bounds__(kTileThreads, 1) gradient_kernel(const __grid_constant__ GradientParams p) {
  constexpr std::size_t kFinding = kWide == 64 ? 256 : 0;  // find_tile's
  static_assert(kSharedBytes + sizeof(GradientState<kWide, kSplit>) + kFinding <= 227 * 1024);
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ GradientState<kWide, kSplit> state;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (sizeof(T) == 2) {
    if (static_cast<int>(blockIdx.x) >= p.tile_blocks) {
      wait_for_kernels();
      sum_unstored<T>(p, static_cast<int>(blockIdx.x) - p.tile_blocks,
                      static_cast<int>(gridDim.x) - p.tile_blocks, reinterpret_cast<float*>(dynamic_shared));
      return;
    }
  }
  if (threadIdx.x == 0) {
    prefetch_map(&p.dy);
    prefetch_map(&p.x);
  }
  const GradientWarps<T, kWide, kSplit> warps{p, (shared_address(dynamic_shared) + 1023) & ~1023u, state,
                                              kSplit == 1 ? 0 : cluster_rank()};
  if (!warps.begin()) {
    wait_for_kernels();  // so that this launch ends behind those before, whoever has a tile
    return;
  }
  if (warp >= 8) {
    give_registers<72>();
    warps.load(warp - 8, lane);
  } else {
    take_registers<216>();
    warps.multiply(warp, lane);
  }
}

}  // namespace rarefy::sm90
