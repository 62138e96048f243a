// The union kernel, device side: blocks of 16 and 32 as strips of 64 rows. A strip is 64 / unit neighbouring
// or similar *unit rows* (16 or 32 features of Y); where one of them stores a 16-wide column, the strip has a
// *piece*: 64 × 16 weights, packed, zeros where the others store nothing. A step is 64 features of X that the
// strips of a group want, in one box or two; a byte of the step's mask says which strip has which of its four
// pieces. Roles of warps, walk and ring are those of the strip kernel.
// f32 is multiplied as tf32; its columns are 8 features wide, its steps 32: all is bytes here, and as many.
//
// Zeros times Inf or NaN would be NaN where nothing is stored. A NaN among the sums gives that away: then the
// tile's NaNs are computed again from stored blocks alone (repair), so results are exact whatever X holds,
// and what is finite pays one addition for each sum.
#pragma once

#include <climits>

#include "cuda/sm90/device/wgmma_64.cuh"
#include "cuda/sm90/device/wgmma_columns.cuh"
#include "cuda/sm90/strip_shape.cuh"
#include "cuda/sm90/tile/exchange.cuh"
#include "cuda/sm90/tile/repair.cuh"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/tile/store.cuh"
#include "cuda/sm90/tile/walk.cuh"
#include "cuda/sm90/token_order.h"
#include "cuda/sm90/union_walk.h"

namespace rarefy::sm90 {

struct UnionParams {
  CUtensorMap x, x_last, y;
  LastTokens last;
  WalkParams walk;
  const unsigned char* w;  // pieces, packed; of f32 rounded to tf32
  const int4* units;       // of each strip: its unit rows, -1: none
  const void* bias;
  Activation activation;
  Stored stored;
  int features;  // of y
  int log_unit;
  u32 slots, pieces;  // of the ring
  int buffers;        // for results, of each strip
  // X of a step: one box of all its features, or two of half of them, `box_bytes` apart; which pieces want
  // which.
  u32 box_bytes, last_bytes, first_box, second_box;
  int box_width;  // features
  u64 x_layout;
};

// What a strip multiplies in a step, made by a loading warp: how many pieces (3 bits), which
// columns of X the first three want (2 bits each; a fourth wants the last), where they begin in the ring
// (from bit 16 on).
__device__ inline u32 strip_header(u32 mask, int strip, u32 head, u32 ring) {
  const u32 its = mask >> (4 * strip) & 0xF;
  u32 piece = head + static_cast<u32>(__popc(mask & ((1u << (4 * strip)) - 1)));
  if (piece >= ring) piece -= ring;
  u32 header = static_cast<u32>(__popc(its)) | piece << 16;
  u32 left = its;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    header |= (static_cast<u32>(__ffs(static_cast<int>(left)) - 1) & 3) << (3 + 2 * k);
    left &= left - 1;
  }
  return header;
}

struct UnionState {
  RingState ring;
  u32 header[kMaxSlots][4];  // of each strip: what it multiplies
  WalkState walk;
};

// kParts: a cluster's thread blocks have a part of a tile's steps each, and one tile. kPair: 2 of them have a
// group each; either brings X of half of the tokens to both, so that they take the same steps at one time.
template <int kStrips, int kTokens, bool kParts, int kPair>
struct UnionWarps {
  using Shape = StripShape<kStrips, kTokens>;
  const UnionParams& p;
  UnionState& state;
  u32 x_ring, w_ring, rank;

  __device__ u32 full(u32 slot) const { return shared_address(&state.ring.full[slot]); }
  __device__ u32 empty(u32 slot) const { return shared_address(&state.ring.empty[slot]); }

  // Words of a step (union_walk.h): one strip alone wants its four bits of the mask.
  __device__ void walk(int lane) const {
    sm90::walk<kParts>(
        p.walk, state.walk, kTokens, lane,
        [](int part, int r, int word) {
          if (part < 0 || word < 0 || r != kStepMask) return word;
          return word & (0xF << 4 * part | ~kStepPieces);
        },
        [](int part, const int4& step) { return (step.y >> 4 * part & 0xF) != 0; });  // kStepMask
  }
  // Which pieces the step has whose words this lane has one of, 0 where there is no step.
  __device__ static int pieces_of(int mask_word) { return mask_word < 0 ? 0 : mask_word & kStepPieces; }
  // Steps that are taken: the other thread block of a pair may have pieces where this one has none.
  __device__ static bool taken(int mask_word) {
    return kPair > 1 ? mask_word >= 0 : pieces_of(mask_word) != 0;
  }

  // One warp brings X …
  __device__ void load_x(int lane) const {
    Turn at, from;
    at.parity = 1;  // the first round is free
    for (;;) {
      int x_row;
      const int word = state.walk.read_batch(from, lane, &x_row);
      if (x_row < 0) return;
      const u32 wanted = __ballot_sync(~0u, lane % 4 == kStepMask && taken(word));
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        if ((wanted >> (4 * j + kStepMask) & 1) == 0) continue;
        // By reduction, so that they are uniform: copies want their operands so.
        const auto word_of = [&](int r) {
          return __reduce_max_sync(~0u, lane == 4 * j + r ? word : INT_MIN);
        };
        const auto mask = static_cast<u32>(word_of(kStepMask));
        const auto both = static_cast<u32>(word_of(kStepBoxes));
        const int boxes[2] = {static_cast<int>(both & 0xFFFF), static_cast<int>(both >> 16)};
        const bool want[2] = {kPair > 1 || (mask & p.first_box) != 0,
                              kPair > 1 ? boxes[1] != kNoBox : (mask & p.second_box) != 0};
        const u32 barrier = full(at.slot), to = x_ring + at.slot * Shape::kSlotBytes;
        wait(empty(at.slot), at.parity);
        if (kPair > 1 && lane == 0) {
          arrive_expect(barrier, (want[1] ? 2 : 1) * p.box_bytes);
          const u32 mine = rank * (p.box_bytes / kPair);
          const int row = x_row + static_cast<int>(rank) * (kTokens / kPair);
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            if (want[i])
              load_box_multicast(to + i * p.box_bytes + mine, &p.x, boxes[i] * p.box_width, row, barrier, 3);
          }
        } else if (lane == 0) {
          const bool last = p.last.is(x_row);
          arrive_expect(barrier,
                        ((want[0] ? 1u : 0u) + (want[1] ? 1u : 0u)) * (last ? p.last_bytes : p.box_bytes));
#pragma unroll
          for (u32 i = 0; i < 2; ++i) {
            if (want[i])
              load_box(to + i * p.box_bytes, last ? &p.x_last : &p.x, boxes[i] * p.box_width, x_row, barrier);
          }
        }
        __syncwarp();
        at.next(p.slots);
      }
    }
  }

  // … and two the pieces, of strip 0 and of the others, and say what to multiply. All that does not wait is
  // made for eight steps at once: lane 4j + r knows the header of strip r in step j and copies its pieces, in
  // two parts where the ring ends among them.
  __device__ void load_pieces(int lane, bool of_first) const {
    RingSpace<4> space{p.slots, p.pieces};
    Turn at, from;
    u32 head = 0;  // where the next piece goes in the ring
    const int r = lane % 4;
    const bool mine = of_first ? r == 0 : r > 0 && r < kStrips;
    for (;;) {
      int x_row, strip_first;
      const int word = state.walk.read_batch(from, lane, &x_row, &strip_first);
      if (x_row < 0) return;
      const int mask_word = __shfl_sync(~0u, word, lane - r + kStepMask);
      const int before = __shfl_sync(~0u, word, lane - r + kStepBefore + min(r, 1));
      const auto mask = static_cast<u32>(pieces_of(mask_word));
      const u32 wanted = __ballot_sync(~0u, taken(mask_word));
      const auto count = static_cast<u32>(__popc(mask));
      u32 behind = count;  // pieces of this batch up to this step
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(~0u, behind, d);
        if (lane >= d) behind += other;
      }
      const u32 begin = (head + behind - count) % p.pieces;
      head = (head + __shfl_sync(~0u, behind, 31)) % p.pieces;
      const u32 header = strip_header(mask, r, begin, p.pieces);
      const auto own = mine ? static_cast<u32>(__popc(mask >> 4 * r & 0xF)) : 0;
      const u32 own_begin = header >> 16, first = min(own, p.pieces - own_begin);  // up to the ring's end
      const unsigned char* source =
          p.w + std::int64_t{strip_first + (r < 2 ? before : mask_word >> 12)} * kPieceBytes;
#pragma unroll 1
      for (int j = 0; j < 8; ++j) {
        if ((wanted >> (4 * j) & 1) == 0) continue;
        space.take(__reduce_max_sync(~0u, lane == 4 * j ? count : 0), empty(0), p.slots);
        const u32 barrier = full(at.slot);
        if (lane / 4 == j) {
          if (mine) {  // each arrives for what it wrote
            state.header[at.slot][r] = header;
            arrive_expect(barrier, own * kPieceBytes);
          }
          if (first > 0) load_bytes(w_ring + own_begin * kPieceBytes, source, first * kPieceBytes, barrier);
          if (own > first)
            load_bytes(w_ring, source + first * kPieceBytes, (own - first) * kPieceBytes, barrier);
        }
        __syncwarp();
        at.next(p.slots);
      }
    }
  }

  // The products of a step with `count` pieces: straight code that ends with all of them done, or ptxas would
  // wait after each.
  template <class T, int count>
  __device__ static void products(float (&d)[Shape::kParts][Shape::kPart / 2], const u64 (&a)[4],
                                  const u64 (&b)[4], u64 part_stride, u32 add) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        wgmma<T, Major::k, Major::k>(d[part], a[k], b[k] + static_cast<u64>(part) * part_stride,
                                     k == 0 ? add : 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  template <class T, bool kActivates>
  __device__ void multiply(int strip, StoreLane out) const {
    constexpr u64 kPieceLayout = operand_layout(Swizzle::none, 256, 128);
    const Activations<kActivates> activations{p.activation};
    const int warp = out.warp, lane = out.lane;
    // In units of 16 bytes: tokens of an instruction apart; how much farther the second half of a step's
    // features is.
    const auto part_stride = static_cast<u64>(Shape::kPart * p.box_width * static_cast<int>(sizeof(T)) >> 4);
    const u32 second_more = p.second_box == 0 ? 0 : (p.box_bytes >> 4) - 4;
    const u32 x_slots = (x_ring & 0x3FFFF) >> 4, w_pieces = (w_ring & 0x3FFFF) >> 4;
    Turn at, tiles;
    WalkState::Tile next = state.walk.read_tile(tiles, strip, lane);
    while (next.steps >= 0) {
      const int steps = next.steps, token = next.token, mine = next.strip[0];
      // Lane i knows the first feature of the strip's i-th unit row.
      int box = -1;
      if (mine >= 0) box = __ldg(reinterpret_cast<const int*>(p.units + mine) + lane % 4);
      box = box < 0 ? -1 : box << p.log_unit;
      const int unit_row = __shfl_sync(~0u, box, 16 * warp >> p.log_unit);
      const int row16 = unit_row < 0 ? -1 : unit_row + (16 * warp & ((1 << p.log_unit) - 1));
      float2 bias{0, 0};
      if (p.bias != nullptr && row16 >= 0) {
        const int row = row16 + lane / 4;
        const T* b = static_cast<const T*>(p.bias);
        if (row < p.features) bias.x = static_cast<float>(b[row]);
        if (row + 8 < p.features) bias.y = static_cast<float>(b[row + 8]);
      }

      float d[Shape::kParts][Shape::kPart / 2];
      u32 add = 0;  // the first product overwrites d
      for (int step = 0; step < steps; ++step) {
        wait(full(at.slot), at.parity);
        // Read by the lane that will say so: the slot, header and all, is free once it has arrived.
        u32 header = 0;
        if (lane == 0) header = state.header[at.slot][strip];
        header = __reduce_max_sync(~0u, header);
        const u32 count = header & 7;
        if (count != 0) {
          u32 piece = header >> 16;
          const u32 x = x_slots + at.slot * (Shape::kSlotBytes >> 4);
          u64 a[4], b[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            a[k] = kPieceLayout | (w_pieces + piece * (kPieceBytes >> 4));
            if (++piece == p.pieces) piece = 0;
            const u32 column = k == 3 ? 3 : header >> (3 + 2 * k) & 3;
            b[k] = p.x_layout | (x + column * 2 + (column >> 1) * second_more);
          }
          if (count == 4) {
            products<T, 4>(d, a, b, part_stride, add);
          } else if (count == 3) {
            products<T, 3>(d, a, b, part_stride, add);
          } else if (count == 2) {
            products<T, 2>(d, a, b, part_stride, add);
          } else {
            products<T, 1>(d, a, b, part_stride, add);
          }
          add = 1;
        }
        if constexpr (kPair > 1) {
          if (lane < kPair) arrive_remote(empty(at.slot), static_cast<u32>(lane) ^ rank);  // lane 0: here
        } else {
          if (lane == 0) arrive(empty(at.slot));
        }
        at.next(p.slots);
      }
      next = state.walk.read_tile(tiles, strip, lane);
      if (add == 0) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
          for (float& sum : d[part]) sum = 0;
        }
      }
      int first = 0, end = kTokens;  // of the tokens, what leaves here
      if constexpr (kParts) {
        const ShareOfTokens<kTokens> share(p.walk.split, rank);
        first = share.first, end = share.end;
        if (mine >= 0) {
          exchange_tile<kTokens, kStrips * 128>(d, p.walk.split, rank, x_ring, p.stored.tokens - token);
        } else {
          watch_exchange();
        }
      }
      if (mine < 0) continue;
      Boxes boxes{p.log_unit + static_cast<int>(sizeof(T)) / 2 - 4, box};
      if (boxes.log_wide > 3) {  // 64 features of f32: two boxes
        boxes = {3, lane < 2 ? unit_row + 32 * lane : -1};
      }
      activations.apply_to([&]<Activation activation>() {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          store_tile<T, activation>(out, d[part], bias, &p.y, boxes, token + part * Shape::kPart,
                                    first - part * Shape::kPart, end - part * Shape::kPart);
        }
      });
      repair_if_nan(p.stored, static_cast<const T*>(p.bias), activations,
                    sum_of_tokens(d, p.stored.tokens - token, lane), out, row16, token + first, end - first);
    }
    if (out.warp == 0) store_wait_read<0>();  // they end with the kernel
  }
};

template <class T, bool kActivates, int kStrips, int kTokens, bool kParts, int kPair>
__global__ void __launch_bounds__(StripShape<kStrips, kTokens>::kThreads, 1)
    union_kernel(const __grid_constant__ UnionParams p) {
  using Shape = StripShape<kStrips, kTokens>;
  extern __shared__ unsigned char dynamic_shared[];
  __shared__ UnionState state;
  const u32 x_ring = (shared_address(dynamic_shared) + 1023) & ~1023u;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;

  if (threadIdx.x == 0) {
    prefetch_map(&p.x);
    prefetch_map(&p.x_last);
    prefetch_map(&p.y);
    for (u32 i = 0; i < p.slots; ++i) {
      barrier_init(shared_address(&state.ring.full[i]), kStrips + 1);
      barrier_init(shared_address(&state.ring.empty[i]), 4 * kStrips * kPair);
    }
    state.walk.init(4 * kStrips, 3);
    barrier_init_done();
  }
  __syncthreads();
  if constexpr (kPair > 1) cluster_sync();              // barriers that another one arrives at
  if (warp != 4 * kStrips + 2) begin_behind_kernels();  // what is walked was prepared

  const u32 w_ring = x_ring + p.slots * Shape::kSlotBytes, y_buffers = w_ring + p.pieces * kPieceBytes,
            y_bytes = static_cast<u32>(p.buffers) * kStoreBytes;
  UnionWarps<kStrips, kTokens, kParts, kPair> warps{p, state, x_ring, w_ring,
                                                    kParts || kPair > 1 ? cluster_rank() : 0};
  if (warp < 4 * kStrips) {
    take_registers<Shape::kMultiplyRegisters>();
    const auto strip = static_cast<u32>(warp) / 4;
    warps.template multiply<T, kActivates>(
        static_cast<int>(strip), {y_buffers + strip * y_bytes, strip + 1, warp % 4, lane, p.buffers});
  } else {
    give_registers<Shape::kOtherRegisters>();
    if (warp == 4 * kStrips) warps.load_x(lane);
    if (warp == 4 * kStrips + 1 || warp == 4 * kStrips + 3) warps.load_pieces(lane, warp == 4 * kStrips + 1);
    if (warp == 4 * kStrips + 2) warps.walk(lane);
    if constexpr (kParts) watch_exchange();
  }
  if constexpr (kPair > 1) {
    __syncwarp();
    cluster_sync();  // a peer may still write here
  }
}

}  // namespace rarefy::sm90
