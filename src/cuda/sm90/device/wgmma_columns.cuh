// Products of a warpgroup (wgmma.cuh) with a number of columns that is no power of two, of bf16 and f16.
#pragma once

#include "wgmma.cuh"

namespace rarefy::sm90 {

// clang-format off
#define RAREFY_SUMS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define RAREFY_SUMS_16(i) RAREFY_SUMS_4(i), RAREFY_SUMS_4((i) + 4), RAREFY_SUMS_4((i) + 8), RAREFY_SUMS_4((i) + 12)
#define RAREFY_SUMS_48 RAREFY_SUMS_16(0), RAREFY_SUMS_16(16), RAREFY_SUMS_16(32)
#define RAREFY_SUMS_64 RAREFY_SUMS_48, RAREFY_SUMS_16(48)
#define RAREFY_SUMS_68 RAREFY_SUMS_64, RAREFY_SUMS_4(64)
#define RAREFY_SUMS_72 RAREFY_SUMS_68, RAREFY_SUMS_4(68)
#define RAREFY_SUMS_80 RAREFY_SUMS_72, RAREFY_SUMS_4(72), RAREFY_SUMS_4(76)
#define RAREFY_SUMS_96 RAREFY_SUMS_80, RAREFY_SUMS_16(80)
#define RAREFY_SUMS_104 RAREFY_SUMS_96, RAREFY_SUMS_4(96), RAREFY_SUMS_4(100)
#define RAREFY_SUMS_124 RAREFY_SUMS_104, RAREFY_SUMS_16(104), RAREFY_SUMS_4(120)
#define RAREFY_NAMES_48 \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define RAREFY_NAMES_64 RAREFY_NAMES_48 \
      ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RAREFY_NAMES_68 RAREFY_NAMES_64 ", %64, %65, %66, %67"
#define RAREFY_NAMES_72 RAREFY_NAMES_68 ", %68, %69, %70, %71"
#define RAREFY_NAMES_80 RAREFY_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define RAREFY_NAMES_96 RAREFY_NAMES_80 \
      ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RAREFY_NAMES_104 RAREFY_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define RAREFY_NAMES_124 RAREFY_NAMES_104 \
      ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117" \
      ", %118, %119, %120, %121, %122, %123"
// sums: 68 of 136 columns; the others: how the operands behind them are numbered.
#define RAREFY_PRODUCT(type, columns, sums, a, b, add, a_major, b_major) \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type \
      " {" RAREFY_NAMES_##sums "}, " a ", " b ", p, 1, 1, " a_major ", " b_major ";\n}"
#define RAREFY_PRODUCTS(columns, sums, ...) \
  if constexpr (kColumns == columns && std::is_same_v<T, __half>) \
    asm volatile(RAREFY_PRODUCT("f16.f16", columns, sums, __VA_ARGS__) \
                 : RAREFY_SUMS_##sums : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB)); \
  if constexpr (kColumns == columns && !std::is_same_v<T, __half>) \
    asm volatile(RAREFY_PRODUCT("bf16.bf16", columns, sums, __VA_ARGS__) \
                 : RAREFY_SUMS_##sums : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB))
// clang-format on

// D[64][kColumns] of the first sums of d; add = 0 overwrites them.
template <class T, int kColumns, Major a_major, Major b_major, int sums>
__device__ inline void wgmma_columns(float (&d)[sums], u64 a, u64 b, u32 add) {
  constexpr int kA = static_cast<int>(a_major), kB = static_cast<int>(b_major);
  static_assert(kColumns == 96 || kColumns == 128 || kColumns == 136 || kColumns == 144 || kColumns == 160 ||
                kColumns == 192 || kColumns == 208 || kColumns == 248);
  static_assert(2 * sums >= kColumns);
  RAREFY_PRODUCTS(96, 48, "%48", "%49", "%50", "%51", "%52");
  RAREFY_PRODUCTS(128, 64, "%64", "%65", "%66", "%67", "%68");
  RAREFY_PRODUCTS(136, 68, "%68", "%69", "%70", "%71", "%72");
  RAREFY_PRODUCTS(144, 72, "%72", "%73", "%74", "%75", "%76");
  RAREFY_PRODUCTS(160, 80, "%80", "%81", "%82", "%83", "%84");
  RAREFY_PRODUCTS(192, 96, "%96", "%97", "%98", "%99", "%100");
  RAREFY_PRODUCTS(208, 104, "%104", "%105", "%106", "%107", "%108");
  RAREFY_PRODUCTS(248, 124, "%124", "%125", "%126", "%127", "%128");
}

// wgmma.cuh's, of 192 columns.
template <class T, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[96], u64 a, u64 b, u32 add) {
  wgmma_columns<T, 192, a_major, b_major>(d, a, b, add);
}

#undef RAREFY_PRODUCTS
#undef RAREFY_PRODUCT
#undef RAREFY_NAMES_124
#undef RAREFY_NAMES_104
#undef RAREFY_NAMES_96
#undef RAREFY_NAMES_80
#undef RAREFY_NAMES_72
#undef RAREFY_NAMES_68
#undef RAREFY_NAMES_64
#undef RAREFY_NAMES_48
#undef RAREFY_SUMS_124
#undef RAREFY_SUMS_104
#undef RAREFY_SUMS_96
#undef RAREFY_SUMS_80
#undef RAREFY_SUMS_72
#undef RAREFY_SUMS_68
#undef RAREFY_SUMS_64
#undef RAREFY_SUMS_48
#undef RAREFY_SUMS_16
#undef RAREFY_SUMS_4

}  // namespace rarefy::sm90
