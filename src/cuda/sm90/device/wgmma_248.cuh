// Products of a warpgroup (wgmma.cuh) with 248 columns, of bf16 and f16: a little less than a tile of 256,
// where 33 tiles fill the rounds of all SMs and 32 do not.
#pragma once

#include "wgmma.cuh"

namespace rarefy::sm90 {

// clang-format off
#define RAREFY_SUMS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define RAREFY_SUMS_12(i) RAREFY_SUMS_4(i), RAREFY_SUMS_4((i) + 4), RAREFY_SUMS_4((i) + 8)
#define RAREFY_SUMS_16(i) RAREFY_SUMS_12(i), RAREFY_SUMS_4((i) + 12)
#define RAREFY_SUMS_48(i) RAREFY_SUMS_16(i), RAREFY_SUMS_16((i) + 16), RAREFY_SUMS_16((i) + 32)
#define RAREFY_PRODUCT(type) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %126, 0;\nwgmma.mma_async.sync.aligned.m64n248k16.f32." type " {" \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123" \
      "}, %124, %125, p, 1, 1, %127, %128;\n}" \
               : RAREFY_SUMS_48(0), RAREFY_SUMS_48(48), RAREFY_SUMS_16(96), RAREFY_SUMS_12(112) \
               : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)))
// clang-format on

// Of the first 124 sums of d; add = 0 overwrites them.
template <class T, Major a_major, Major b_major, int sums>
__device__ inline void wgmma_248(float (&d)[sums], u64 a, u64 b, u32 add) {
  static_assert(sums >= 124);
  if constexpr (std::is_same_v<T, __half>) {
    RAREFY_PRODUCT("f16.f16");
  } else {
    RAREFY_PRODUCT("bf16.bf16");
  }
}

#undef RAREFY_PRODUCT
#undef RAREFY_SUMS_48
#undef RAREFY_SUMS_16
#undef RAREFY_SUMS_12
#undef RAREFY_SUMS_4

}  // namespace rarefy::sm90
