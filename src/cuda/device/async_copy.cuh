// Copies of 16 bytes from global to shared memory that a thread starts and does not wait for (cp.async).
// Addresses in shared memory are 32-bit shared-window addresses.
#pragma once

#include "shared_address.cuh"

namespace rarefy::device {

// Reads `bytes` of 16 and fills the rest with zeros.
__device__ inline void copy_16(std::uint32_t to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline void copy_16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// This thread's copies so far are a group; waits until all but the last `pending` groups have ended.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace rarefy::device
