// Products of a warpgroup (wgmma): D[64][n] += A[64][16] · B[16][n], both operands in shared memory, f32
// sums. An operand tile is 64 elements (128 bytes) wide and stored with the 128-byte swizzle that TMA writes;
// its rows run along M or N (k_major: 64 steps of the sum side by side) or along the sum (mn_major).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "mbarrier.cuh"

namespace rarefy::sm90 {

enum class Major : int { k = 0, mn = 1 };  // the immediate that wgmma takes

// Where an operand starts. Groups of eight 128-byte rows are 1024 bytes apart in both orders; tiles of 64
// along M or N are `tile_stride` bytes apart, which only mn_major operands wider than 64 look at.
__device__ inline u64 operand(u32 address, u32 tile_stride = 16) {
  return static_cast<u64>((address & 0x3FFFF) >> 4) | static_cast<u64>(tile_stride >> 4) << 16 |
         static_cast<u64>(1024 >> 4) << 32 | static_cast<u64>(1) << 62;
}

// The same from its parts. k_major: `next_8` bytes between groups of eight rows; without a swizzle eight rows
// of 16 bytes lie behind one another, and `next_k` bytes lead to the next eight steps of the sum.
enum class Swizzle : int { none = 0, b128 = 1, b64 = 2, b32 = 3 };
__host__ __device__ inline constexpr u64 operand_layout(Swizzle swizzle, u32 next_8, u32 next_k = 16) {
  return static_cast<u64>(next_k >> 4) << 16 | static_cast<u64>(next_8 >> 4) << 32 |
         static_cast<u64>(swizzle) << 62;
}
__device__ inline u64 operand_at(u64 layout, u32 address) {
  return layout | static_cast<u64>((address & 0x3FFFF) >> 4);
}

// What to add to an operand for the next 16 steps of the sum.
template <Major major>
inline constexpr u64 kNext16 = (major == Major::k ? 32 : 2048) >> 4;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// clang-format off
#define RAREFY_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define RAREFY_D16(i) RAREFY_D4(i), RAREFY_D4((i) + 4), RAREFY_D4((i) + 8), RAREFY_D4((i) + 12)
#define RAREFY_D64(i) RAREFY_D16(i), RAREFY_D16((i) + 16), RAREFY_D16((i) + 32), RAREFY_D16((i) + 48)

// add = 0 overwrites d.
template <Major a_major, Major b_major>
__device__ inline void wgmma_128(__nv_bfloat16 /*type*/, float (&d)[64], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n}"
      : RAREFY_D64(0)
      : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)));
}

template <Major a_major, Major b_major>
__device__ inline void wgmma_128(__half /*type*/, float (&d)[64], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n}"
      : RAREFY_D64(0)
      : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)));
}

template <Major a_major, Major b_major>
__device__ inline void wgmma_256(__nv_bfloat16 /*type*/, float (&d)[128], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, %131, %132;\n}"
      : RAREFY_D64(0), RAREFY_D64(64)
      : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)));
}

template <Major a_major, Major b_major>
__device__ inline void wgmma_256(__half /*type*/, float (&d)[128], u64 a, u64 b, u32 add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, %131, %132;\n}"
      : RAREFY_D64(0), RAREFY_D64(64)
      : "l"(a), "l"(b), "r"(add), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)));
}

#undef RAREFY_D64
#undef RAREFY_D16
#undef RAREFY_D4
// clang-format on

template <class T, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[64], u64 a, u64 b, u32 add) {
  wgmma_128<a_major, b_major>(T{}, d, a, b, add);
}
template <class T, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[128], u64 a, u64 b, u32 add) {
  wgmma_256<a_major, b_major>(T{}, d, a, b, add);
}

}  // namespace rarefy::sm90
