// Barriers in shared memory that count arrivals and the bytes of bulk copies (mbarrier), named barriers, and
// what a cluster of thread blocks needs. Addresses are 32-bit shared-window addresses.
#pragma once

#include "cuda/device/shared_address.cuh"

namespace rarefy::sm90 {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

using device::load_shared;
using device::load_shared_4;
using device::shared_address;
using device::store_shared;

__device__ inline void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the last barrier_init, by the thread that made them; then a block (and cluster) barrier.
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and adds `bytes` to what bulk copies have to bring before the phase ends.
__device__ inline void arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier of thread block `rank` of the cluster. Releases no ordinary writes: at cluster
// scope that would cost a MEMBAR.ALL.GPU, and a slot's readers (tensor cores, which have finished) wrote
// nothing.
__device__ inline void arrive_remote(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity has ended. Acquiring at cluster scope would drop the whole L1 each
// time.
__device__ inline void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Whether it has ended.
__device__ inline bool test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Barrier 1 … 15 of `threads` threads; 0 is __syncthreads.
__device__ inline void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Is counted there, and goes on.
__device__ inline void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// As named_barrier; true when it is for any of the threads.
__device__ inline bool named_barrier_any(u32 id, u32 threads, bool mine) {
  u32 any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.aligned.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(mine))
      : "memory");
  return any != 0;
}

__device__ inline u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A float in the shared memory of thread block `rank`, at what `address` is here.
__device__ inline float load_remote(u32 address, u32 rank) {
  float value;
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n}"
      : "=f"(value)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

// Four floats into the shared memory of thread block `rank`, where `address` is here; a cluster barrier makes
// them visible.
__device__ inline void store_remote_4(u32 address, u32 rank, float a, float b, float c, float d) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}" ::"r"(address),
      "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}

// Moves registers between the warpgroups of a block; every warp of a warpgroup calls it.
template <int registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Between kernels of a stream that may overlap (programmatic launches): the next one may start; all before
// this one has ended.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ inline void wait_for_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Where a kernel has made ready what it needs of no other one: barriers, places of tensor maps.
__device__ inline void begin_behind_kernels() {
  wait_for_kernels();
  launch_dependents();
}

// Makes ordinary writes to shared memory visible to tensor cores and bulk copies.
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace rarefy::sm90
