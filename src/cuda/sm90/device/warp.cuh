// What the lanes of a warp know of each other.
#pragma once

#include "mbarrier.cuh"  // u32

namespace rarefy::sm90 {

// A number that is the same in all lanes, and known to the compiler for it: what it makes of it stays in
// uniform registers.
__device__ inline int uniform(int x) { return __reduce_max_sync(~0u, x); }
__device__ inline u32 uniform(u32 x) { return __reduce_max_sync(~0u, x); }

}  // namespace rarefy::sm90
