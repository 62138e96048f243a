// What is in flight between the loading warp and the multiplying warpgroups: a ring of steps, each with a
// slot for X, and a ring of blocks of W, of which a step of the strip kernel takes as many as it needs.
#pragma once

#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

inline constexpr int kMaxSlots = 8;

struct RingState {
  alignas(8) u64 full[kMaxSlots];   // X and W of the step are there
  alignas(8) u64 empty[kMaxSlots];  // nobody reads them any more
};

// A place in the ring: a slot, and the parity of the round.
struct Turn {
  u32 slot = 0, parity = 0;
  __device__ void next(u32 slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// What the loading warp knows of free space. All its lanes hold the same.
template <u32 kBits = 2>
struct RingSpace {
  static_assert(kMaxSlots * kBits <= 32);
  u32 slots, w_slots;  // free ones
  u32 counts = 0;      // blocks of W of the steps in flight, kBits each, the latest lowest
  u32 in_flight = 0;
  Turn oldest;

  // Waits until there is room for a step with `blocks` blocks of W, and takes it.
  __device__ void take(u32 blocks, u32 empty, u32 ring_slots) {
    while (slots == 0 || w_slots < blocks) {
      wait(empty + oldest.slot * 8, oldest.parity);
      oldest.next(ring_slots);
      --in_flight;
      w_slots += counts >> (kBits * in_flight) & ((1u << kBits) - 1);
      ++slots;
    }
    counts = counts << kBits | blocks;
    ++in_flight;
    --slots;
    w_slots -= blocks;
  }
};

}  // namespace rarefy::sm90
