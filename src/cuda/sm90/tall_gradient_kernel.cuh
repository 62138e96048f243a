// The weight gradient of tall vectors, device side. dY by token, 64 rows of W a panel, is operand A with M
// innermost; columns of X by feature, 64 (or 32) tokens a row, are operand B with the sum innermost. Four
// warps bring both, X 16 bytes a copy, as its columns lie anywhere; two warpgroups multiply, share their sums
// with the cluster's other thread blocks, and store. Of two block rows of 64 each warpgroup has one, and dY
// is two panels.
#pragma once

#include <climits>

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/wgmma_columns.cuh"
#include "cuda/sm90/tall_gradient_out.cuh"

namespace rarefy::sm90 {

template <class T, int kRows, int kSplit, int kPairs, TallSteps kKind>
struct TallGradientWarps : TallGradientOut<T, kRows, kSplit, kPairs, kKind> {
  using Shape = TallGradientShape<kRows, kPairs, kKind>;
  static constexpr int kColumns = Shape::kColumns, kTokens = Shape::kTokens;
  static constexpr bool kTurns = Shape::kTurns,
                        kWide = !Shape::kLong;  // a warpgroup has more than 256 columns
  using Out = TallGradientOut<T, kRows, kSplit, kPairs, kKind>;
  using Out::p, Out::state, Out::rank, Out::panel_row, Out::store, Out::keep_part, Out::add_parts;
  u32 slots, buffers;  // addresses

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }
  // Steps of all tokens, and those of an entry, of which the thread blocks of a cluster take every kSplit-th:
  // all read what the others read at about that time.
  __device__ int steps() const { return (p.tokens + kTokens - 1) / kTokens; }
  struct Steps {
    int begin, end;
  };
  __device__ Steps steps_of(int word) const {
    if (word == 0) return {0, steps()};
    const TilePart part(word);
    return {steps() * part.index / part.count, steps() * (part.index + 1) / part.count};
  }
  __device__ int my_first(int begin) const {
    return begin + static_cast<int>((rank - static_cast<u32>(begin)) & (kSplit - 1));
  }

  __device__ void put_tile(Turn& turn, const int4& tile, int lane) const {
    wait(shared_address(&state.tile_empty[turn.slot]), turn.parity);
    if (lane == 0) {
      state.tile[turn.slot] = tile;
      arrive(shared_address(&state.tile_full[turn.slot]));
    }
    turn.next(kGradientTiles);
  }

  // Made where it stands, not where it is wanted.
  __device__ static const char* piece_of(const char* x, u32 pieces) {
    const char* piece;
    asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(piece) : "r"(pieces), "l"(x));
    return piece;
  }

  // Where the rows begin of which this thread block's warp brings dY.
  __device__ int row_of_dy(int row_tile, int warp) const {
    return panel_row(row_tile, kPairs > 1 ? static_cast<int>(rank) : min(warp, Shape::kPanels - 1));
  }

  // Waits for a step's slot and asks for its dY.
  __device__ u32 begin_step(const Turn& at, int step, int dy_row, int warp, int lane) const {
    const u32 to = slots + at.slot * Shape::kSlotBytes, barrier = full(at.slot);
    wait(empty(at.slot), at.parity);
    if constexpr (kPairs > 1) {  // a panel each, for both
      static_assert(kPairs == 2);
      if (warp == 0 && lane == 0) {
        arrive_expect(barrier, Shape::kSlotBytes - Shape::kXBytes);
        load_box_multicast(to + Shape::kXBytes + rank * Shape::kPanelBytes, &p.dy, dy_row, step * kTokens,
                           barrier, 3);
      }
    } else if (warp < Shape::kPanels && lane == 0) {
      if (warp == 0) arrive_expect(barrier, Shape::kSlotBytes - Shape::kXBytes);
      load_box(to + Shape::kXBytes + static_cast<u32>(warp) * Shape::kPanelBytes, &p.dy, dy_row,
               step * kTokens, barrier);
    }
    return to;
  }

  // Four warps bring columns of X, kAtOnce of them with a copy of each lane: this one's row of those, and
  // which 16 bytes of it.
  static constexpr int kPieces = kTokens / 8, kAtOnce = 128 / kPieces, kCopies = kColumns / kAtOnce;
  struct Lane {
    int row, piece;
    u32 place;  // in the slot
    __device__ Lane(int warp, int lane) : row((32 * warp + lane) / kPieces), piece(lane % kPieces) {
      const int swizzled = kPieces == 8 ? piece ^ row % 8 : piece ^ row / 2 % 4;
      place = static_cast<u32>(row * kTokens * 2 + (swizzled << 4));
    }
    __device__ u32 place_of(int i) const { return place + static_cast<u32>(i * kAtOnce * kTokens * 2); }
  };
  __device__ u32 column_of(const int4& tile, const Lane& my, int i) const {  // behind the last one, the last
    const int column = __ldg(p.col + tile.y + min(kAtOnce * i + my.row, tile.z - 1));
    if constexpr (kTurns)
      return static_cast<u32>(column * kPieces + swizzled_piece(kPieces, column, my.piece));
    return static_cast<u32>(column) * p.x_pieces;
  }
  __device__ const char* pieces_of(const Lane& my, int step) const {
    return p.x + step * p.x_step + (kTurns ? 0 : my.piece * 16);
  }

  // Waits until X's tokens of a step have been turned; those before `ready` have been.
  __device__ void wait_for_x(int step, int& ready, int lane) const {
    while (ready <= step) {
      const int mine = ready + lane;
      const bool there = mine >= steps() || load_acquire(p.turn.counts + 1 + mine) == p.turn.boxes;
      const unsigned missing = ~__ballot_sync(~0u, there);
      if ((missing & 1) != 0) __nanosleep(64);
      ready += missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
      __syncwarp();
    }
  }

  // Tiles with more columns than kLeast - 1 copies bring, and no more than kMost do: so that few copies
  // depend on how many there are.
  template <int kLeast, int kMost>
  __device__ void load_steps(const int4& tile, int begin, int end, int warp, int lane, Turn& at,
                             int& ready) const {
    const Lane my(warp, lane);
    const int dy_row = row_of_dy(tile.x, warp), count = tile.z;
    const char* x = pieces_of(my, begin);
    u32 columns[kMost];       // where they begin in X
    const char* next[kMost];  // their next pieces: known before there is a place for them, if registers are
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      columns[i] = column_of(tile, my, i);
      if constexpr (Shape::kPiecesAhead) next[i] = piece_of(x, columns[i]);
    }
    wait_for_kernels();  // they may just have turned X
#pragma unroll 1
    for (int step = begin; step < end; step += kSplit) {
      if constexpr (Shape::kLong) wait_for_x(step, ready, lane);
      const u32 to = begin_step(at, step, dy_row, warp, lane);
      if constexpr (kTurns) {
        if (ready < steps()) {
          if (warp == 0 && lane == 0) state.turn.at_step(step);
          wait_for_x(step, ready, lane);
        }
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < kLeast || kAtOnce * i < count)
          copy_16(to + my.place_of(i), Shape::kPiecesAhead ? next[i] : piece_of(x, columns[i]));
      }
      arrive_after_copies(full(at.slot));
      x += p.x_step * kSplit;
#pragma unroll
      for (int i = 0; i < kMost && Shape::kPiecesAhead; ++i) next[i] = piece_of(x, columns[i]);
      at.next(p.slots);
    }
  }

  // The step in which X ends: what is behind its last token is zero, as dY is.
  __device__ void load_last_step(const int4& tile, int step, int warp, int lane, Turn& at) const {
    const Lane my(warp, lane);
    const u32 to = begin_step(at, step, row_of_dy(tile.x, warp), warp, lane);
    const int left = max(0, min(8, p.x_tokens - step * kTokens - my.piece * 8));
    const char* x = left > 0 ? pieces_of(my, step) : p.x;
#pragma unroll 1
    for (int i = 0; kAtOnce * i < tile.z; ++i)
      copy_16(to + my.place_of(i), piece_of(x, column_of(tile, my, i)), static_cast<u32>(left) * 2);
    arrive_after_copies(full(at.slot));
    at.next(p.slots);
  }

  __device__ void load_tile(const int4& tile, int warp, int lane, Turn& at, int& ready) const {
    const Steps its = steps_of(tile.w);
    const int begin = my_first(its.begin), whole = p.x_tokens / kTokens, end = min(its.end, whole);
    if (tile.z > 11 * kAtOnce) {
      load_steps<12, kCopies>(tile, begin, end, warp, lane, at, ready);
    } else if (tile.z > 4 * kAtOnce) {
      load_steps<5, 11>(tile, begin, end, warp, lane, at, ready);
    } else {
      load_steps<1, 4>(tile, begin, end, warp, lane, at, ready);
    }
    if constexpr (!kTurns) {
      if (whole >= its.begin && whole < its.end && (kSplit == 1 || whole % kSplit == static_cast<int>(rank)))
        load_last_step(tile, whole, warp, lane, at);
    } else if (warp == 0 && lane == 0) {
      state.turn.at_step(INT_MAX / 2);  // with its first tile nothing holds it back: results wait for it
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
    at.parity = tiles.parity = 1;                          // the first round is free
    int ready = kTurns ? p.turn.first / p.turn.boxes : 0;  // steps of X
    int block = static_cast<int>(blockIdx.x);
    if constexpr (Shape::kLong) {
      const int turners = turners_of(p.turn);
      ready = turners > 0 ? p.turn.first / p.turn.boxes : INT_MAX;
      block -= turners;
    }
    TileCursor cursor;  // each warp walks for itself
    while (cursor.next_item(p.lists, block / (kPairs > 1 ? kPairs : kSplit))) {
      const int4 tile = load_ahead(p.tiles + unpack_tile(cursor.item.x).group);
      if (tile.z == 0) continue;  // behind the last
      if constexpr (kPairs > 0) {
        const int2 window = load_ahead(p.windows + tile.y + rank);
        if (warp == 0) put_tile(tiles, {tile.x, window.x, window.y, tile.w}, lane);
        load_tile({tile.x, window.x, PairColumns(window.y).all(), tile.w}, warp, lane, at, ready);
      } else {
        if (warp == 0) put_tile(tiles, tile, lane);
        load_tile(tile, warp, lane, at, ready);
      }
    }
    if constexpr (kTurns) {
      if (warp == 0 && lane == 0) state.turn.at_step(INT_MAX / 2);
    }
    if (warp == 0) put_tile(tiles, {-1, 0, 0, 0}, lane);
    wait_for_kernels();
    device::wait_for_all_copies();
  }

  // A step's products: of 128 columns, and of kMore.
  template <int kMore>
  __device__ static void products(TallSums& sums, u64 a, u64 b, u32 add) {
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < kTokens / 16; ++k, a += kNext16<Major::mn>, b += kNext16<Major::k>) {
      const u32 adds = k == 0 ? add : 1;
      wgmma<T, Major::mn, Major::k>(sums.first, a, b, adds);
      if constexpr (kMore > 0) {
        wgmma_columns<T, kMore, Major::mn, Major::k>(sums.more, a, b + (128 * kTokens * 2 >> 4), adds);
      }
    }
    wgmma_commit();
  }

  // A slot may be filled again when all who read it have left it, in all thread blocks if each brings a
  // part of what they read.
  __device__ void leave_slot(u32 slot, int lane) const {
    __syncwarp();
    if constexpr (kPairs > 1) {
      if (lane < kPairs) arrive_remote(empty(slot), static_cast<u32>(lane));
    } else {
      if (lane == 0) arrive(empty(slot));
    }
  }

  // All steps of a tile. `at` goes on. kMore < 0: no columns.
  template <int kMore>
  __device__ void multiply_steps(TallSums& sums, Turn& at, int steps, u32 panel, u32 columns,
                                 int lane) const {
    constexpr u64 kXLayout =
        kTokens == 64 ? operand_layout(Swizzle::b128, 1024) : operand_layout(Swizzle::b64, 512);
    u32 before = 0;
    for (int step = 0; step < steps; ++step) {
      const u32 from = slots + at.slot * Shape::kSlotBytes;
      wait(full(at.slot), at.parity);
      fence_async();  // gathered by ordinary copies
      if constexpr (kMore >= 0) {
        products<kMore>(sums, operand(from + Shape::kXBytes + panel), operand_at(kXLayout, from + columns),
                        step > 0);
        wgmma_wait<1>();  // the step before has ended, and this one is on its way
      }
      if (step > 0) {
        leave_slot(before, lane);
      }
      before = at.slot;
      at.next(p.slots);
    }
    if constexpr (kMore >= 0) wgmma_wait<0>();
    if (steps > 0) leave_slot(before, lane);
  }

  __device__ void multiply(u32 group, int warp, int lane) const {
    // What products' operands are made of is known to be the same in all lanes, or they would be moved from
    // ordinary registers before each.
    const u32 panel = Shape::kPanels == 2 ? uniform(group) * Shape::kPanelBytes : 0;
    StoreLane out{buffers + group * 2 * kChunkBytes, group + 1, warp, lane};
    Turn at, tiles;
    int next_row, next_first, next_count, next_part;  // of the tile to come
    const auto read_tile = [&] {
      wait(shared_address(&state.tile_full[tiles.slot]), tiles.parity);
      const int4 tile = state.tile[tiles.slot];
      next_row = uniform(tile.x);
      next_first = uniform(tile.y);
      next_count = uniform(tile.z);
      next_part = uniform(tile.w);
      arrive(shared_address(&state.tile_empty[tiles.slot]));  // each lane for what it read
      tiles.next(kGradientTiles);
    };
    read_tile();
    while (next_row >= 0) {
      const int row_tile = next_row, first = next_first, count = next_count, part = next_part;
      const PairColumns pair(count);
      const Steps its = steps_of(part);
      const int my_steps = uniform((its.end - my_first(its.begin) + kSplit - 1) / kSplit);
      // Of 64 rows each warpgroup has half of the columns.
      const int half = kRows == 128 ? count : min(count, (count + 15) / 16 * 8);
      const int my_first = kPairs > 0     ? uniform(static_cast<int>(group) * pair.first)
                           : kRows == 128 ? 0
                                          : uniform(static_cast<int>(group) * half),
                mine = kPairs > 0     ? uniform(pair.both + (group == 0 ? pair.first : pair.second))
                       : kRows == 128 ? count
                                      : uniform(group == 0 ? half : count - half);
      const u32 columns = static_cast<u32>(my_first * kTokens * 2);
      TallSums sums;
#pragma unroll
      for (int i = 0; i < 144; ++i) *sums.of(i) = 0;  // no tokens in a share: sums of nothing
      const auto multiply_of = [&](auto more) {
        multiply_steps<decltype(more)::value>(sums, at, my_steps, panel, columns, lane);
      };
      if (kWide && mine > 128 + 144) {
        multiply_of(std::integral_constant<int, 160>{});
      } else if (kWide && mine > 128 + 136) {
        multiply_of(std::integral_constant<int, 144>{});
      } else if (kWide && mine > 128 + 128) {
        multiply_of(std::integral_constant<int, 136>{});
      } else if (mine > 128 + 96) {
        multiply_of(std::integral_constant<int, 128>{});
      } else if (mine > 128) {
        multiply_of(std::integral_constant<int, 96>{});
      } else if (mine > 0) {
        multiply_of(std::integral_constant<int, 0>{});
      } else {
        multiply_of(std::integral_constant<int, -1>{});
      }
      if constexpr (kSplit > 1) {
        exchange<kSplit, 4>([&](u32 i) { return sums.of(static_cast<int>(i) * 4); }, rank, slots,
                            kWide && mine > 256);
        cluster_sync();
      }
      read_tile();  // here: behind the loop's end ptxas would take lanes for divergent
      const auto leave = [&](auto&& of_chunk) {
        store(out, of_chunk, row_tile, first + my_first, mine, static_cast<int>(group));
      };
      if (part == 0) {
        leave([&](int chunk, float(&d)[16]) {
#pragma unroll
          for (int i = 0; i < 16; ++i) d[i] = sums.of(chunk * 16)[i];
        });
      } else if (keep_part(sums, TilePart(part), mine, static_cast<int>(group), out)) {
        leave([&](int chunk, float(&d)[16]) {
          add_parts(TilePart(part), static_cast<int>(group), out, chunk, d);
        });
      }
    }
    if (out.leads()) store_wait_read<0>();  // they end with the kernel
  }
};

template <class T, int kRows, int kSplit, int kPairs, TallSteps kKind>
__global__ void __launch_bounds__((TallGradientShape<kRows, kPairs, kKind>::kThreads), 1)
    tall_gradient_kernel(const __grid_constant__ TallGradientParams p) {
  using Shape = TallGradientShape<kRows, kPairs, kKind>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ TallGradientState state;
  const u32 slots = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if constexpr (Shape::kLong) {
    static_assert(Shape::kThreads == 32 * LastTokens::kWarps);
    if (static_cast<int>(blockIdx.x) < turners_of(p.turn)) {
      launch_dependents();
      LastTokens{p.turn, slots, warp, lane}.run();
      return;
    }
  }
  if (threadIdx.x == 0) {
    prefetch_map(&p.dy);
    prefetch_map(&p.out);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&state.ring.full[i]), 128 + 1);
      barrier_init(shared_address(&state.ring.empty[i]), kPairs > 1 ? 8 * kPairs : 8);
    }
    for (int i = 0; i < kGradientTiles; ++i) {
      barrier_init(shared_address(&state.tile_full[i]), 1);
      barrier_init(shared_address(&state.tile_empty[i]), 256);
    }
    if constexpr (Shape::kTurns) {
      if (p.turn.first < p.turn.end) prefetch_map(&p.turn.x);
      state.turn.init(p.turn.first / p.turn.boxes);
    }
    barrier_init_done();
  }
  if constexpr (kPairs > 1) {
    cluster_sync();  // barriers that another one arrives at
  } else {
    __syncthreads();
  }
  launch_dependents();
  const u32 rank = kSplit > 1 || kPairs > 1 ? cluster_rank() : 0;
  const TallGradientWarps<T, kRows, kSplit, kPairs, kKind> warps{
      {p, state, rank}, slots, slots + p.slots * Shape::kSlotBytes};
  if (warp < 8) {
    take_registers<Shape::kMultiplyRegisters>();
    warps.multiply(static_cast<u32>(warp) / 4, warp % 4, lane);
  } else if (!Shape::kTurns || warp < 12) {
    give_registers<Shape::kGatherRegisters>();
    warps.load(warp - 8, lane);
  } else {
    give_registers<Shape::kTurnRegisters>();
    TurnWarps<Shape::kTokens>{p.turn, state.turn, warps.buffers, warp - 12, lane}.run();
  }
  if constexpr (kPairs > 1) cluster_sync();  // nothing is on its way to one that has gone
}

}  // namespace rarefy::sm90
