// 8×8 matrices of 16-bit elements between the registers of a warp and shared memory, and what is small beside
// wgmma: packing of pairs of sums, products of one warp.
#pragma once

#include "cuda/device/matrix.cuh"
#include "mbarrier.cuh"

namespace rarefy::sm90 {

using device::load_transposed;
using device::mma;
using device::pack;

// Stores four matrices transposed: lane l gives the address of row l % 8 of matrix l / 8 as it is in memory,
// and holds elements (2(l % 4), l / 4) and (2(l % 4) + 1, l / 4) of each.
__device__ inline void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Stores four matrices as they are: lane l gives the address of row l % 8 of matrix l / 8, and holds elements
// (l / 4, 2(l % 4)) and (l / 4, 2(l % 4) + 1) of each.
__device__ inline void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace rarefy::sm90
