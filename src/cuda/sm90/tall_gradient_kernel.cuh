// The weight gradient of tall vectors, device side. dY by token, 64 rows of W a panel, is operand A with M
// innermost; columns of X by feature, 64 (or 32) tokens a row, are operand B with the sum innermost. Four
// warps bring both, X 16 bytes a copy, as its columns lie anywhere; two warpgroups multiply, share their sums
// with the cluster's other thread blocks, and store.
#pragma once

#include "cuda/sm90/device/async_copy.cuh"
#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/device/wgmma_columns.cuh"
#include "cuda/sm90/gradient_exchange.cuh"
#include "cuda/sm90/tall_gradient.h"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {

struct TallGradientParams {
  CUtensorMap dy, out;  // out: [stored column][row of the block]
  TileLists lists;
  const int4* tiles;  // row tile, first stored column, how many, and if it is a part: TilePart
  const int* col;
  const char* x;        // by feature
  u32 x_pieces;         // of 16 bytes, from one feature to the next
  std::int64_t x_step;  // bytes from one step's tokens to the next's
  void* dvalues;
  int* part_counts;   // of each shared tile, thread block of a cluster and warpgroup: parts that are there
  float4* part_sums;  // of each part
  int tokens, rows, block_rows, tiles_of_block;
  int x_tokens;  // that rows of X have: zeros behind the last token up to a whole step, or it ends there
  u32 slots;
};

// A tile's entry that is a part of its tokens, in a word; 0: it is the whole tile.
struct TilePart {
  int index, count, tile;  // which of how many, of which shared tile
  __device__ TilePart(int its_index, int of_count, int its_tile)
      : index(its_index), count(of_count), tile(its_tile) {}
  __device__ explicit TilePart(int word) : index(word & 0xFF), count(word >> 8 & 0xFF), tile(word >> 16) {}
  __device__ int word() const { return index | count << 8 | tile << 16; }
};

template <int kRows>
struct TallGradientShape {
  static constexpr int kColumns = (kRows == 128 ? 1 : 2) * TallGradientConfig::kMost;
  static constexpr int kTokens = kRows == 128 ? 64 : 32;  // of a step: as many as leave four slots
  static constexpr u32 kPanelBytes = kTokens * 128;       // of dY, 64 rows of W
  static constexpr u32 kXBytes = kColumns * kTokens * 2, kSlotBytes = kXBytes + kRows / 64 * kPanelBytes;
  static constexpr int kMultiplyRegisters = 208;
  static constexpr int kGatherRegisters = 3 * 168 - 2 * kMultiplyRegisters;
};

inline constexpr int kGradientTiles = 2;      // known ahead to those that multiply
inline constexpr u32 kChunkBytes = 32 * 128;  // 32 columns on their way out; two of them for a warpgroup

// A warpgroup's sums of 64 rows: of 128 columns, and up to 160 more.
struct TallSums {
  float first[64], more[80];
  __device__ float* of(int i) { return i < 64 ? first + i : more + (i - 64); }
};

struct TallGradientState {
  RingState ring;
  int4 tile[kGradientTiles];  // row tile (-1: there are no more), first column, how many, part
  alignas(8) u64 tile_full[kGradientTiles], tile_empty[kGradientTiles];
  int parts_before[2];  // of each warpgroup's tile
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

  // Made where it stands, not where it is wanted.
  __device__ static const char* piece_of(const char* x, u32 pieces) {
    const char* piece;
    asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(piece) : "r"(pieces), "l"(x));
    return piece;
  }

  // Waits for a step's slot and asks for its dY.
  __device__ u32 begin_step(const Turn& at, int step, int first_row, int warp, int lane) const {
    const u32 to = slots + at.slot * Shape::kSlotBytes, barrier = full(at.slot);
    wait(empty(at.slot), at.parity);
    if (warp < kRows / 64 && lane == 0) {
      if (warp == 0) arrive_expect(barrier, Shape::kSlotBytes - Shape::kXBytes);
      load_box(to + Shape::kXBytes + static_cast<u32>(warp) * Shape::kPanelBytes, &p.dy,
               first_row + warp * 64, step * kTokens, barrier);
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
    return static_cast<u32>(__ldg(p.col + tile.y + min(kAtOnce * i + my.row, tile.z - 1))) * p.x_pieces;
  }
  __device__ const char* pieces_of(const Lane& my, int step) const {
    return p.x + step * p.x_step + my.piece * 16;
  }

  // Tiles with more columns than kLeast - 1 copies bring, and no more than kMost do: so that few copies
  // depend on how many there are.
  template <int kLeast, int kMost>
  __device__ void load_steps(const int4& tile, int begin, int end, int warp, int lane, Turn& at) const {
    const Lane my(warp, lane);
    const int n0 = first_row(tile.x), count = tile.z;
    const char* x = pieces_of(my, begin);
    u32 columns[kMost];       // where they begin in X
    const char* next[kMost];  // their next pieces: known before there is a place for them
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      columns[i] = column_of(tile, my, i);
      next[i] = piece_of(x, columns[i]);
    }
    wait_for_kernels();  // X may just have been transposed
#pragma unroll 1
    for (int step = begin; step < end; step += kSplit) {
      const u32 to = begin_step(at, step, n0, warp, lane);
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i < kLeast || kAtOnce * i < count) copy_16(to + my.place_of(i), next[i]);
      }
      arrive_after_copies(full(at.slot));
      x += p.x_step * kSplit;
#pragma unroll
      for (int i = 0; i < kMost; ++i) next[i] = piece_of(x, columns[i]);
      at.next(p.slots);
    }
  }

  // The step in which X ends: what is behind its last token is zero, as dY is.
  __device__ void load_last_step(const int4& tile, int step, int warp, int lane, Turn& at) const {
    const Lane my(warp, lane);
    const u32 to = begin_step(at, step, first_row(tile.x), warp, lane);
    const int left = max(0, min(8, p.x_tokens - step * kTokens - my.piece * 8));
    const char* x = left > 0 ? pieces_of(my, step) : p.x;
#pragma unroll 1
    for (int i = 0; kAtOnce * i < tile.z; ++i)
      copy_16(to + my.place_of(i), piece_of(x, column_of(tile, my, i)), static_cast<u32>(left) * 2);
    arrive_after_copies(full(at.slot));
    at.next(p.slots);
  }

  __device__ void load_tile(const int4& tile, int warp, int lane, Turn& at) const {
    const Steps its = steps_of(tile.w);
    const int begin = my_first(its.begin), whole = p.x_tokens / kTokens, end = min(its.end, whole);
    if (tile.z > 11 * kAtOnce) {
      load_steps<12, kCopies>(tile, begin, end, warp, lane, at);
    } else if (tile.z > 4 * kAtOnce) {
      load_steps<5, 11>(tile, begin, end, warp, lane, at);
    } else {
      load_steps<1, 4>(tile, begin, end, warp, lane, at);
    }
    if (whole >= its.begin && whole < its.end && whole % kSplit == static_cast<int>(rank))
      load_last_step(tile, whole, warp, lane, at);
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
    TileCursor cursor;             // each warp walks for itself
    while (cursor.next(p.lists, static_cast<int>(blockIdx.x) / kSplit)) {
      const int4 tile = load_ahead(p.tiles + unpack_tile(cursor.item.x).group);
      if (tile.z == 0) continue;  // behind the last
      if (warp == 0) put_tile(tiles, tile, lane);
      load_tile(tile, warp, lane, at);
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
        __syncwarp();
        if (lane == 0) arrive(empty(before));
      }
      before = at.slot;
      at.next(p.slots);
    }
    if constexpr (kMore >= 0) wgmma_wait<0>();
    __syncwarp();
    if (steps > 0 && lane == 0) arrive(empty(before));
  }

  __device__ void multiply(u32 group, int warp, int lane) const {
    // What products' operands are made of is known to be the same in all lanes, or they would be moved from
    // ordinary registers before each.
    const u32 panel = kRows == 128 ? uniform(group) * Shape::kPanelBytes : 0;
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
      const Steps its = steps_of(part);
      const int my_steps = uniform((its.end - my_first(its.begin) + kSplit - 1) / kSplit);
      // Of 64 rows each warpgroup has half of the columns.
      const int half = kRows == 128 ? count : min(count, (count + 15) / 16 * 8);
      const int my_first = kRows == 128 ? 0 : uniform(static_cast<int>(group) * half),
                mine = kRows == 128 ? count : uniform(group == 0 ? half : count - half);
      const u32 columns = static_cast<u32>(my_first * kTokens * 2);
      TallSums sums;
#pragma unroll
      for (int i = 0; i < 144; ++i) *sums.of(i) = 0;  // no tokens in a share: sums of nothing
      const auto multiply_of = [&](auto more) {
        multiply_steps<decltype(more)::value>(sums, at, my_steps, panel, columns, lane);
      };
      if (mine > 128 + 144) {
        multiply_of(std::integral_constant<int, 160>{});
      } else if (mine > 128 + 136) {
        multiply_of(std::integral_constant<int, 144>{});
      } else if (mine > 128 + 128) {
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
        exchange<kSplit, 4>([&](u32 i) { return sums.of(static_cast<int>(i) * 4); }, rank, slots, mine > 256);
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
    if (out.leads()) store_wait_all();
  }

  // 32 columns of which this thread block of the cluster has the sums, and stores.
  __device__ bool my_chunk(int chunk) const {
    return min(chunk / 2, 3) * kSplit / 4 == static_cast<int>(rank);
  }

  // Four of a thread's sums of a part, in memory.
  __device__ float4* sums_of(const TilePart& part, int index, int group, const StoreLane& out,
                             int piece) const {
    return p.part_sums + ((part.tile * part.count + index) * 2 + group) * (36 * 128) + piece * 128 +
           out.warp * 32 + out.lane;
  }

  // The sums of a tile's part wait in memory for those of the others. Whether this was the last one.
  __device__ bool keep_part(TallSums& sums, const TilePart& part, int columns, int group,
                            const StoreLane& out) const {
    wait_for_kernels();  // one of them has set the counts to 0
#pragma unroll
    for (int chunk = 0; chunk < 9; ++chunk) {
      if (!my_chunk(chunk) || chunk * 32 >= columns) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* d = sums.of(chunk * 16 + 4 * j);
        *sums_of(part, part.index, group, out, chunk * 4 + j) = {d[0], d[1], d[2], d[3]};
      }
    }
    __threadfence();
    named_barrier(out.barrier, 128);
    if (out.leads())
      state.parts_before[group] =
          atomicAdd(p.part_counts + (part.tile * 4 + static_cast<int>(rank)) * 2 + group, 1);
    named_barrier(out.barrier, 128);
    __threadfence();
    return state.parts_before[group] == part.count - 1;
  }

  // The sums of all parts of a chunk, in order of the tokens.
  __device__ void add_parts(const TilePart& part, int group, const StoreLane& out, int chunk,
                            float (&d)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) d[i] = 0;
#pragma unroll 1
    for (int first = 0; first < part.count; first += 2) {
      float4 of_part[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first + i < part.count)
            of_part[i][j] = __ldcg(sums_of(part, first + i, group, out, chunk * 4 + j));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first + i < part.count) add_4(d + 4 * j, of_part[i][j]);
        }
      }
    }
  }

  // 32 columns at a time, those that this thread block has the sums of (of_chunk makes them); whole ones by
  // TMA, which leaves out what lies behind the block's last row.
  template <class Sums>
  __device__ void store(StoreLane& out, Sums&& of_chunk, int row_tile, int first, int count,
                        int group) const {
    const int panel = kRows == 128 ? group * 64 : 0, in_block = first_in_block(row_tile) + panel;
    const int row = first_row(row_tile) + panel + 16 * out.warp + out.lane / 4;
    const bool inside[2] = {row < p.rows, row + 8 < p.rows};  // of W
#pragma unroll
    for (int chunk = 0; chunk < 9; ++chunk) {
      if (!my_chunk(chunk)) continue;
      const int left = count - chunk * 32;
      if (left <= 0) break;
      if (out.leads()) store_wait_read<1>();
      named_barrier(out.barrier, 128);
      const u32 buffer = out.buffers + out.turn * kChunkBytes;
      out.turn ^= 1;
      float d[16];
      of_chunk(chunk, d);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // matrix i: columns 8(j + i / 2) …, rows 16 · warp + 8(i % 2) …
          const float* pair = d + (j + i / 2) * 4 + i % 2 * 2;
          v[i] = inside[i % 2] ? pack<T>(pair[0], pair[1]) : 0;
        }
        const int column = (j + out.lane / 16) * 8 + out.lane % 8, piece = 2 * out.warp + out.lane / 8 % 2;
        store_transposed(buffer + static_cast<u32>(column * 128 + ((piece ^ column % 8) << 4)), v[0], v[1],
                         v[2], v[3]);
      }
      fence_async();
      named_barrier(out.barrier, 128);
      const int at = first + chunk * 32;
      if (out.leads()) {
        if (left >= 32) store_box(&p.out, in_block, at, buffer);
        store_commit();  // of what is left nothing, so that each buffer has a group
      }
      if (left >= 32) continue;
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
