// The walking warp: it goes through its thread block's tiles, reads what was prepared of their steps ahead,
// and hands both on, so that the loading and the multiplying warps see only what to do next. Tiles and steps:
// strip_walk.h.
#pragma once

#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile_lists.cuh"

namespace rarefy::sm90 {

inline constexpr int kBatches = 3;  // of eight steps, read ahead
inline constexpr int kTiles = 8;    // known ahead

struct WalkParams {
  TileLists lists;
  const int4* groups;  // StripGroup, two each
  const int* steps;    // four words each
  int columns;         // room for steps of a group
  int split = 1;  // more than 1: a cluster's thread blocks have a part of a tile's steps each, and one tile
  int alone = 0;  // … and, if not 0, how many strips of a group have a tile each
  const int4* first = nullptr;  // of each group: what its strips' steps count from
  int pair = 1;  // 2: thread blocks of a cluster have a group each, one behind the other, with the same steps
};

struct WalkState {
  struct Tile {
    int steps;  // -1: there are no more tiles
    int token, strip[kMostGroup];
  } tile[kTiles];
  struct Batch {
    int x_row;              // -1: there are no more
    int first[kMostGroup];  // of the tile's strips
    int words[32];          // lane 4j + r: word r of step j, -1 where the tile has nothing
  } batch[kBatches];
  // Barriers, in pairs: it is there, nobody reads it any more.
  alignas(8) u64 tile_full[kTiles], tile_empty[kTiles];
  alignas(8) u64 batch_full[kBatches], batch_empty[kBatches];

  __device__ void init(u32 multiplying_warps, u32 loading_warps) {
    for (int i = 0; i < kTiles; ++i) {
      barrier_init(shared_address(&tile_full[i]), 1);
      barrier_init(shared_address(&tile_empty[i]), multiplying_warps);
    }
    for (int i = 0; i < kBatches; ++i) {
      barrier_init(shared_address(&batch_full[i]), 32);
      barrier_init(shared_address(&batch_empty[i]), 32 * loading_warps);
    }
  }

  // The next tile, for the warps that multiply `strip`; all lanes get the same.
  __device__ Tile read_tile(Turn& turn, int strip, int lane) {
    wait(shared_address(&tile_full[turn.slot]), turn.parity);
    // Reduced, so that the compiler knows them for the same in all lanes: the loop of products stays in
    // uniform registers, where products want their operands.
    const Tile& from = tile[turn.slot];
    Tile t;
    t.steps = __reduce_max_sync(~0u, from.steps);
    t.token = __reduce_max_sync(~0u, from.token);
    t.strip[0] = __reduce_max_sync(~0u, from.strip[strip]);  // negative: none for these warps
    __syncwarp();                                            // all have read it
    if (lane == 0) arrive(shared_address(&tile_empty[turn.slot]));
    turn.next(kTiles);
    return t;
  }

  // This lane's word of the next eight steps, and the row of X, negative when there are no more; `first`:
  // where strip lane % 4 begins.
  __device__ int read_batch(Turn& turn, int lane, int* x_row, int* first = nullptr) {
    wait(shared_address(&batch_full[turn.slot]), turn.parity);
    const int word = batch[turn.slot].words[lane];
    if (first != nullptr) *first = batch[turn.slot].first[min(lane % 4, kMostGroup - 1)];
    *x_row = __reduce_max_sync(~0u, batch[turn.slot].x_row);  // uniform, as above
    arrive(shared_address(&batch_empty[turn.slot]));  // each lane for what it read: racecheck follows that
    turn.next(kBatches);
    return word;
  }
};

// A token tile is `tokens` high, and this thread block's begins `first_token` behind its first. `keep(part,
// r, word)` is what a tile wants of word r of a step's four, -1 if nothing; `part`: the one strip that it
// multiplies, or negative; `stores(part, step)`: whether that one stores something. kParts: a cluster's
// thread blocks have a part of a tile's steps each, and one tile.
template <bool kParts, class Keep, class Stores>
__device__ void walk(const WalkParams& p, WalkState& state, int tokens, int lane, Keep&& keep,
                     Stores&& stores) {
  Turn batches, tiles;
  batches.parity = tiles.parity = 1;  // the first round is free
  const auto put_tile = [&](const WalkState::Tile& tile) {
    wait(shared_address(&state.tile_empty[tiles.slot]), tiles.parity);
    if (lane == 0) {
      state.tile[tiles.slot] = tile;
      arrive(shared_address(&state.tile_full[tiles.slot]));
    }
    tiles.next(kTiles);
  };
  const auto put_batch = [&](int x_row, int first, int word) {
    wait(shared_address(&state.batch_empty[batches.slot]), batches.parity);
    state.batch[batches.slot].words[lane] = word;
    if (lane < kMostGroup) state.batch[batches.slot].first[lane] = first;
    if (lane == 0) state.batch[batches.slot].x_row = x_row;
    arrive(shared_address(&state.batch_full[batches.slot]));  // each lane for what it wrote
    batches.next(kBatches);
  };
  // Lane 4j + r has word r of step j. Behind the last step there may be anything.
  const auto read_steps = [&](const StripTile& t, int step) {
    if (step + lane / 4 >= p.columns) return -1;
    return __ldg(p.steps + (static_cast<std::int64_t>(t.group) * p.columns + step) * 4 + lane);
  };
  // In how many steps from the first to before `end` the tile's one strip stores something.
  const auto stored_steps = [&](const StripTile& t, int first, int end) {
    const auto* its = reinterpret_cast<const int4*>(p.steps) + static_cast<std::int64_t>(t.group) * p.columns;
    int count = 0;
    for (; first < end; first += 32) {
      const bool stored = first + lane < end && stores(t.part, __ldg(its + first + lane));
      count += __popc(__ballot_sync(~0u, stored));
    }
    return count;
  };
  const int cluster = static_cast<int>(blockIdx.x) / p.pair, rank = static_cast<int>(blockIdx.x) % p.pair;
  // Of a tile's steps the part-th of `parts`.
  const auto put_steps = [&](StripTile t, int token_tile, int part, int parts) {
    t.group = t.group * p.pair + rank;
    const int4 a = __ldg(p.groups + 2 * t.group), b = __ldg(p.groups + 2 * t.group + 1);  // StripGroup
    int step = a.x * part / parts;
    const int end = a.x * (part + 1) / parts;
    int word = read_steps(t, step), first = 0;
    if (p.first != nullptr && lane < kMostGroup)
      first = __ldg(reinterpret_cast<const int*>(p.first + t.group) + lane);
    WalkState::Tile tile{end - step, token_tile * tokens, {a.y, a.z, a.w}};
    if (t.part >= 0) {  // one strip alone
      if (parts > 1) {
        tile.steps = stored_steps(t, step, end);
      } else if (p.pair == 1) {
        tile.steps = t.part == 0 ? b.x : t.part == 1 ? b.y : b.z;
      }
#pragma unroll
      for (int s = 0; s < kMostGroup; ++s) {
        if (t.part != s) tile.strip[s] = -1;
      }
    }
    put_tile(tile);
    if (tile.steps == 0) return;
#pragma unroll 1
    for (; step < end; step += 8) {
      const int this_word = keep(t.part, lane % 4, step + lane / 4 < end ? word : -1);
      if (step + 8 < end) word = read_steps(t, step + 8);
      put_batch(tile.token, first, this_word);
    }
  };
  if constexpr (kParts) {
    const int tile = static_cast<int>(blockIdx.x) / p.split, nth = tile / p.lists.token_tiles;
    const StripTile t = p.alone == 0 ? StripTile{nth, 0, -1} : StripTile{nth / p.alone, 0, nth % p.alone};
    put_steps(t, tile % p.lists.token_tiles, static_cast<int>(blockIdx.x) % p.split, p.split);
  } else {
    TileCursor cursor;
#pragma unroll 1
    while (cursor.next(p.lists, cluster)) {
      const StripTile t = unpack_tile(cursor.item.x);
      put_steps(t, p.lists.token_tile(cursor.nth()), 0, 1);
    }
  }
  put_tile({-1, 0, {}});
  put_batch(-1, 0, -1);
}

}  // namespace rarefy::sm90
