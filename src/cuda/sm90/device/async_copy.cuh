// 16-byte copies of single threads from global into shared memory (cp.async), for operands that are gathered.
#pragma once

#include "mbarrier.cuh"

namespace rarefy::sm90 {

// Reads `bytes` of 16 and fills the rest with zeros.
__device__ inline void copy_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline void copy_16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Arrives when this thread's copies so far have ended.
__device__ inline void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace rarefy::sm90
