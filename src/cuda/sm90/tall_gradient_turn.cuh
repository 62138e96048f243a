// X by token turned by the weight gradient of tall vectors itself, into workspace, where all gather from. One
// warpgroup of each thread block takes boxes of X from a counter, in order of the tokens (TurnWarps); or
// thread blocks of their own turn the last tokens (LastTokens). Who turns a box waits for no other thread
// block with it, so none waits for one that is not running.
#pragma once

#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/device/tma.cuh"
#include "cuda/sm90/tall_gradient.h"
#include "cuda/sm90/tile/ring.cuh"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {

struct TurnParams {
  CUtensorMap x;          // by token
  CUtensorMap panels;     // of LastTokens: `to`
  char* to;               // panels, as `transpose` makes them, swizzled
  int* counts;            // boxes taken, and of each panel those that are there
  int boxes, first, end;  // boxes of a panel; those from first to end are turned here
  int turners;            // thread blocks that do nothing else, if the plan says so: LastTokens
  const int* turns_last;
};

// Thread blocks that turn the last tokens and have no tiles.
__device__ inline int turners_of(const TurnParams& p) {
  return p.turners > 0 && __ldg(p.turns_last) != 0 ? p.turners : 0;
}

struct TurnState {
  static constexpr u32 kBuffers = 4;
  alignas(8) u64 full[kBuffers], turned[kBuffers], empty[kBuffers], over;
  int box[kBuffers], panel[kBuffers];  // what is in them; box -1: there are no more
  int step;                            // that this thread block gathers

  __device__ void init(int first_step) {
    for (u32 i = 0; i < kBuffers; ++i) {
      barrier_init(shared_address(&full[i]), 1);
      barrier_init(shared_address(&turned[i]), 2);
      barrier_init(shared_address(&empty[i]), 1);
    }
    barrier_init(shared_address(&over), 1);
    step = first_step;
  }
  // By one thread; those who ask for boxes read it now and then, and any of its values will do (racecheck
  // reports the two).
  __device__ void at_step(int its) {
    volatile int* own = &step;
    *own = max(*own, its);
  }
};

__device__ inline int load_acquire(const int* from) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Of four warps two turn, one asks for boxes and one sends them: a fence waits for all that its thread has in
// flight, so that one thread for all of it had one box in 1.5 µs.
template <int kTokens>
struct TurnWarps {
  static constexpr int kFeatures = TurnedX::features(kTokens), kPieces = kTokens / 8;
  static constexpr u32 kBuffers = TurnState::kBuffers;
  const TurnParams& p;
  TurnState& state;
  u32 buffers;  // address
  int warp, lane;

  __device__ u32 full(u32 buffer) const { return shared_address(&state.full[buffer]); }
  __device__ u32 turned(u32 buffer) const { return shared_address(&state.turned[buffer]); }
  __device__ u32 empty(u32 buffer) const { return shared_address(&state.empty[buffer]); }

  // One thread. A box is taken no more than so many panels ahead of what is gathered here, which is in L2 yet
  // then; fewer have others wait.
  static constexpr int kAhead = 32;
  __device__ int take() const { return p.first + atomicAdd(p.counts, TurnedX::kTogether); }
  __device__ bool may_take(int panel) const {
    return panel <= *static_cast<volatile int*>(&state.step) + kAhead;
  }
  __device__ void ask() const {
    Turn at;
    at.parity = 1;  // the first round is free
    for (int box = take(); box < p.end;) {
      int panel = box / p.boxes, feature = box % p.boxes * kFeatures, next = 0;
      const int end = min(box + TurnedX::kTogether, p.end);
      const bool early = may_take(panel);
      if (early) next = take();  // while these are on their way
#pragma unroll 1
      for (; box < end; ++box) {
        wait(empty(at.slot), at.parity);
        state.box[at.slot] = box;
        state.panel[at.slot] = panel;
        arrive_expect(full(at.slot), TurnedX::kBytes);
        load_box(buffers + at.slot * TurnedX::kBytes, &p.x, feature, panel * kTokens, full(at.slot));
        at.next(kBuffers);
        feature += kFeatures;
        if (feature == p.boxes * kFeatures) feature = 0, ++panel;
      }
      if (!early) {
#pragma unroll 1
        while (!may_take(panel)) __nanosleep(200);
        next = take();
      }
      box = next;
    }
    wait(empty(at.slot), at.parity);
    state.box[at.slot] = -1;
    arrive(full(at.slot));
  }

  // Two warps: each box where it lies. Matrix i of a warp is 8 features × 32 tokens.
  __device__ void turn() const {
    for (Turn at;; at.next(kBuffers)) {
      const u32 buffer = buffers + at.slot * TurnedX::kBytes;
      wait(full(at.slot), at.parity);
      const bool over = state.box[at.slot] < 0;
      if (!over) {
        u32 v[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int eight = kTokens == 32 ? 4 * warp + i : 2 * warp + i / 2,
                    token = kTokens == 32 ? lane : i % 2 * 32 + lane;
          const int place =
              kTokens == 32 ? token * 8 + (eight ^ token % 8) : token * 4 + (eight ^ token / 2 % 4);
          load_transposed(buffer + static_cast<u32>(place) * 16, v[i]);
        }
        named_barrier(3, 64);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int feature = (kTokens == 32 ? 4 * warp + i : 2 * warp + i / 2) * 8 + lane % 8,
                    piece = kTokens == 32 ? lane / 8 : i % 2 * 4 + lane / 8;
          const int place = feature * kPieces + swizzled_piece(kPieces, feature, piece);
          store_matrices(buffer + static_cast<u32>(place) * 16, v[i][0], v[i][1], v[i][2], v[i][3]);
        }
        fence_async();
      }
      __syncwarp();
      if (lane == 0) arrive(turned(at.slot));
      if (over) return;
    }
  }

  // One thread. Boxes on their way are told of together, as one fence for each was half of the time: those of
  // two panels, or when no other comes for a while.
  __device__ void send() const {
    constexpr int kPatience = 16;
    int first_panel = 0, of_first = 0, panel = 0, untold = 0;
    const auto tell = [&] {
      if (untold == 0) return;
      store_wait_all();
      __threadfence();
      atomicAdd(p.counts + 1 + first_panel, of_first);
      if (untold > of_first) atomicAdd(p.counts + 1 + panel, untold - of_first);
      untold = of_first = 0;
    };
    int before = -1;  // the buffer that is still being read
    const auto release = [&] {
      if (before >= 0) arrive(empty(static_cast<u32>(before)));
      before = -1;
    };
    for (Turn at;; at.next(kBuffers)) {
      bool there = test(turned(at.slot), at.parity);
      if (!there) {
        store_wait_read<0>();
        release();
      }
      for (int i = 0; i < kPatience && !there; ++i) {
        __nanosleep(64);
        there = test(turned(at.slot), at.parity);
      }
      if (!there) {
        tell();
        wait(turned(at.slot), at.parity);
      }
      const int box = state.box[at.slot], its = state.panel[at.slot];
      if (box < 0) break;
      if (untold > of_first && its != panel) tell();
      if (untold == 0) first_panel = its;
      if (its == first_panel) ++of_first;
      panel = its;
      ++untold;
      store_bytes(p.to + std::int64_t{box} * TurnedX::kBytes, buffers + at.slot * TurnedX::kBytes,
                  TurnedX::kBytes);
      store_commit();
      store_wait_read<1>();
      release();
      before = static_cast<int>(at.slot);
    }
    tell();
    arrive(shared_address(&state.over));  // results may leave through the buffers
  }

  __device__ void run() const {
    if (warp < 2) {
      turn();
      return;
    }
    wait_for_kernels();  // the counts are zero
    if (lane == 0) {
      if (warp == 2) {
        ask();
      } else {
        send();
      }
    }
    __syncwarp();
  }
};

// The last tokens, turned by the first thread blocks, which have no tiles: SMs that tiles leave over. Each
// warp is on its own, with two boxes of 64 features × 64 tokens in turn; what it writes is told when the next
// box has been turned. They wait for none of this kernel, and begin before those who wait for them.
struct LastTokens {
  static constexpr int kSide = 64, kWarps = 12;
  static constexpr u32 kBytes = kSide * kSide * 2, kAll = 2 * kWarps * (kBytes + 8);
  const TurnParams& p;
  u32 shared;  // address of kAll bytes, a multiple of 1024
  int warp, lane;

  __device__ u32 buffer(u32 i) const { return shared + (static_cast<u32>(warp) * 2 + i) * kBytes; }
  __device__ u32 full(u32 i) const {
    return shared + 2 * kWarps * kBytes + (static_cast<u32>(warp) * 2 + i) * 8;
  }
  __device__ void ask(int box, u32 i) const {
    arrive_expect(full(i), kBytes);
    load_box(buffer(i), &p.x, box % p.boxes * kSide, box / p.boxes * kSide, full(i));
  }
  __device__ void tell(int box) const {
    __threadfence();
    atomicAdd(p.counts + 1 + box / p.boxes, 1);
  }

  __device__ void turn(u32 buffer) const {
    const auto place = [&](int row, int piece) {  // as copies of boxes swizzle them
      return buffer + static_cast<u32>(row * 128 + ((piece ^ row % 8) << 4));
    };
    u32 v[16][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) load_transposed(place(i % 2 * 32 + lane, i / 2), v[i]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i)
      store_matrices(place(i / 2 * 8 + lane % 8, i % 2 * 4 + lane / 8), v[i][0], v[i][1], v[i][2], v[i][3]);
    fence_async();
    __syncwarp();
  }

  __device__ void run() const {
    const int stride = p.turners * kWarps;
    int box = p.first + static_cast<int>(blockIdx.x) * kWarps + warp, before = -1;
    if (lane == 0) {
      barrier_init(full(0), 1);
      barrier_init(full(1), 1);
      barrier_init_done();
    }
    __syncwarp();
    wait_for_kernels();  // the counts are zero
    if (lane == 0 && box < p.end) ask(box, 0);
    u32 at = 0, parity = 0;
    for (; box < p.end; box += stride) {
      if (lane == 0 && box + stride < p.end) {
        store_wait_read<0>();
        ask(box + stride, at ^ 1);
      }
      wait(full(at), parity);
      turn(buffer(at));
      if (lane == 0) {
        store_box(&p.panels, 0, box * kSide, buffer(at));
        store_commit();
        if (before >= 0) {
          store_wait<1>();
          tell(before);
        }
      }
      before = box;
      parity ^= at;
      at ^= 1;
    }
    if (lane == 0 && before >= 0) {
      store_wait_all();
      tell(before);
    }
  }
};

}  // namespace rarefy::sm90
