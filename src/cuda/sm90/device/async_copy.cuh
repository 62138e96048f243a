// Copies of 16 bytes to shared memory that a thread starts and does not wait for; barriers can.
#pragma once

#include "cuda/device/async_copy.cuh"
#include "mbarrier.cuh"

namespace rarefy::sm90 {

using device::copy_16;

// Arrives when this thread's copies so far have ended.
__device__ inline void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace rarefy::sm90
