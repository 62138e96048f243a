// What the warps of the tall vectors' weight gradient know, and the way out of a tile: sums of shares and
// parts of the tokens, and results. Of two block rows of 64 they leave column by column, as their places in
// the values are no neighbours.
#pragma once

#include "cuda/sm90/device/warp.cuh"
#include "cuda/sm90/tall_gradient_turn.cuh"
#include "cuda/sm90/tile/exchange.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {

struct TallGradientParams {
  CUtensorMap dy, out;  // out: [stored column][row of the block]
  TileLists lists;
  const int4* tiles;  // row tile, first stored column, how many, and if it is a part: TilePart
  const int* col;
  // Of pairs of rows: tiles are PairRows, first window, a number of columns, TilePart; col: the plan's.
  const int2* windows;
  const int* targets;   // of the first row's results; those of the second row's follow after
  std::int64_t second;  // so many
  const char* x;        // by feature
  u32 x_pieces;         // of 16 bytes, from one feature to the next
  std::int64_t x_step;  // bytes from one step's tokens to the next's
  void* dvalues;
  int* part_counts;   // of each shared tile, thread block of a cluster and warpgroup: parts that are there
  float4* part_sums;  // of each part
  int tokens, rows, block_rows, tiles_of_block;
  int x_tokens;  // that rows of X have: zeros behind the last token up to a whole step, or it ends there
  u32 slots;
  TurnParams turn;  // of X by token
};

// A tile's entry that is a part of its tokens, in a word; 0: it is the whole tile.
struct TilePart {
  int index, count, tile;  // which of how many, of which shared tile
  __device__ TilePart(int its_index, int of_count, int its_tile)
      : index(its_index), count(of_count), tile(its_tile) {}
  __device__ explicit TilePart(int word) : index(word & 0xFF), count(word >> 8 & 0xFF), tile(word >> 16) {}
  __device__ int word() const { return index | count << 8 | tile << 16; }
};

// turns: X is by token, and one warpgroup more turns it. long_steps: of 64 tokens, for 64 rows.
enum class TallSteps { plain, turns, long_steps };

template <int kRows, int kPairs, TallSteps kKind>
struct TallGradientShape {
  static constexpr bool kTurns = kKind == TallSteps::turns, kLong = kKind == TallSteps::long_steps;
  static_assert(!kLong || (kRows == 64 && kPairs == 0));
  static constexpr int kColumns = kPairs > 0 ? TallPairs::kMostGathered
                                  : kLong    ? TallGradientConfig::kMostOfLong
                                             : (kRows == 128 ? 1 : 2) * TallGradientConfig::kMost;
  static constexpr int kPanels = kRows == 128 || kPairs > 0 ? 2 : 1;  // of dY
  static constexpr int kTokens = kRows == 128 || kLong ? 64 : 32;     // of a step
  static constexpr u32 kPanelBytes = kTokens * 128;                   // of dY, 64 rows of W
  static constexpr u32 kXBytes = kColumns * kTokens * 2, kSlotBytes = kXBytes + kPanels * kPanelBytes;
  static constexpr int kThreads = kTurns ? 512 : 384, kTurnRegisters = 32;
  static constexpr int kMultiplyRegisters = kTurns ? 200 : kLong ? 184 : 208;
  // Addresses of a step's pieces of X are made before there is a place for it; others have no registers left.
  static constexpr bool kPiecesAhead = kKind == TallSteps::plain;
  static constexpr int kGatherRegisters =
      (kTurns ? 4 * 128 - kTurnRegisters : 3 * 168) - 2 * kMultiplyRegisters;
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
  TurnState turn;
  int4 tile[kGradientTiles];  // row tile (-1: there are no more), first column, how many, part
  alignas(8) u64 tile_full[kGradientTiles], tile_empty[kGradientTiles];
  int parts_before[2];  // of each warpgroup's tile
};

// kPairs > 0: of tiles of two block rows of 64; so many thread blocks of a cluster share their rows of dY.
template <class T, int kRows, int kSplit, int kPairs, TallSteps kKind>
struct TallGradientOut {
  using Shape = TallGradientShape<kRows, kPairs, kKind>;
  const TallGradientParams& p;
  TallGradientState& state;
  u32 rank;  // in the cluster

  // Where 64 rows of a tile begin in W, and the tile in its block.
  __device__ int panel_row(int row_tile, int panel) const {
    if constexpr (kPairs > 0) return PairRows::row(row_tile, panel) * 64;
    return row_tile / p.tiles_of_block * p.block_rows + first_in_block(row_tile) + panel * 64;
  }
  __device__ int first_in_block(int row_tile) const { return row_tile % p.tiles_of_block * kRows; }

  // 32 columns of which this thread block of the cluster has the sums, and stores.
  __device__ bool my_chunk(int chunk) const {
    return kSplit == 1 || min(chunk / 2, 3) * kSplit / 4 == static_cast<int>(rank);
  }

  // Four of a thread's sums of a part, in memory.
  __device__ float4* sums_of(const TilePart& part, int index, int group, const StoreLane& out,
                             int piece) const {
    int at = part.tile * part.count + index;
    if constexpr (kPairs > 1) at = at * kPairs + static_cast<int>(rank);
    return p.part_sums + (at * 2 + group) * (36 * 128) + piece * 128 + out.warp * 32 + out.lane;
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
    const int panel = Shape::kPanels == 2 ? group : 0;
    const int in_block = kPairs > 0 ? 0 : first_in_block(row_tile) + panel * 64;
    const int row = panel_row(row_tile, panel) + 16 * out.warp + out.lane / 4;
    // Of pairs, where the warp's four columns of each 16 go: read at once, as each would wait for memory.
    int targets[3] = {-1, -1, -1};
    if constexpr (kPairs > 0) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int column = (i * 8 + out.lane / 4) * 16 + out.warp * 4 + out.lane % 4;
        if (column < count) targets[i] = __ldg(p.targets + group * p.second + first + column);
      }
    }
    if constexpr (Shape::kTurns) wait(shared_address(&state.turn.over), 0);  // its boxes were in the buffers
    const bool inside[2] = {row < p.rows, row + 8 < p.rows};                 // of W
#pragma unroll
    for (int chunk = 0; chunk < 9; ++chunk) {
      if (!my_chunk(chunk)) continue;
      const int left = count - chunk * 32;
      if (left <= 0) break;
      if constexpr (kPairs == 0) {
        if (out.leads()) store_wait_read<1>();
      }
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
      if constexpr (kPairs > 0) {  // 128 bytes each, anywhere
        named_barrier(out.barrier, 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int sixteen = chunk * 2 + i;
          const int to = __shfl_sync(~0u, targets[sixteen / 8], sixteen % 8 * 4 + out.lane / 8);
          if (to < 0) continue;
          const int column = i * 16 + out.warp * 4 + out.lane / 8, piece = out.lane % 8;
          *reinterpret_cast<float4*>(static_cast<T*>(p.dvalues) + std::int64_t{to} * 64 + piece * 8) =
              load_shared_4(buffer + static_cast<u32>(column * 128 + ((piece ^ column % 8) << 4)));
        }
        continue;
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

}  // namespace rarefy::sm90
