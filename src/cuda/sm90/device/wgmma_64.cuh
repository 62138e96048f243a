// Products of a warpgroup (wgmma.cuh) with 64 columns, of bf16 and f16.
#pragma once

#include "wgmma.cuh"

namespace rarefy::sm90 {

// clang-format off
#define RAREFY_SUMS_8(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), \
                         "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define RAREFY_PRODUCT(type) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
               "%32, %33, p, 1, 1, %35, %36;\n}" \
               : RAREFY_SUMS_8(0), RAREFY_SUMS_8(8), RAREFY_SUMS_8(16), RAREFY_SUMS_8(24) \
               : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)))
// clang-format on

// add = 0 overwrites d.
template <class T, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[32], u64 a, u64 b, u32 add) {
  if constexpr (std::is_same_v<T, __half>) {
    RAREFY_PRODUCT("f16.f16");
  } else {
    RAREFY_PRODUCT("bf16.bf16");
  }
}

#undef RAREFY_PRODUCT
#undef RAREFY_SUMS_8

}  // namespace rarefy::sm90
