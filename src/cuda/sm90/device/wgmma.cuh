// Products of a warpgroup (wgmma): D[64][n] += A[64][16] · B[16][n], of f32 as tf32 A[64][8] · B[8][n], both
// operands in shared memory, f32 sums. An operand tile is 128 bytes (64 elements, 32 of f32) wide and stored
// with the 128-byte swizzle that TMA writes; its rows run along M or N (k_major: 64 steps of the sum side by
// side) or along the sum (mn_major).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

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

// What to add to an operand for the next 16 (f32: 8) steps of the sum.
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
#define RAREFY_FIRST_64 \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RAREFY_NEXT_64 \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RAREFY_WGMMA_128(type, majors) \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128" type " {" RAREFY_FIRST_64 \
      "}, %64, %65, p, 1, 1" majors ";\n}"
#define RAREFY_WGMMA_256(type, majors) \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256" type " {" RAREFY_FIRST_64 \
      ", " RAREFY_NEXT_64 "}, %128, %129, p, 1, 1" majors ";\n}"
// clang-format on

// add = 0 overwrites d. f32 is multiplied as tf32: both k_major, in shared memory rounded already.
template <class T, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[64], u64 a, u64 b, u32 add) {
  constexpr int kA = static_cast<int>(a_major), kB = static_cast<int>(b_major);
  if constexpr (std::is_same_v<T, float>) {
    static_assert(a_major == Major::k && b_major == Major::k);
    asm volatile(RAREFY_WGMMA_128("k8.f32.tf32.tf32", "") : RAREFY_D64(0) : "l"(a), "l"(b), "r"(add));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(RAREFY_WGMMA_128("k16.f32.f16.f16", ", %67, %68")
                 : RAREFY_D64(0)
                 : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB));
  } else {
    asm volatile(RAREFY_WGMMA_128("k16.f32.bf16.bf16", ", %67, %68")
                 : RAREFY_D64(0)
                 : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB));
  }
}

template <class T, Major a_major, Major b_major>
__device__ inline void wgmma(float (&d)[128], u64 a, u64 b, u32 add) {
  constexpr int kA = static_cast<int>(a_major), kB = static_cast<int>(b_major);
  if constexpr (std::is_same_v<T, float>) {
    static_assert(a_major == Major::k && b_major == Major::k);
    asm volatile(RAREFY_WGMMA_256("k8.f32.tf32.tf32", "")
                 : RAREFY_D64(0), RAREFY_D64(64)
                 : "l"(a), "l"(b), "r"(add));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(RAREFY_WGMMA_256("k16.f32.f16.f16", ", %131, %132")
                 : RAREFY_D64(0), RAREFY_D64(64)
                 : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB));
  } else {
    asm volatile(RAREFY_WGMMA_256("k16.f32.bf16.bf16", ", %131, %132")
                 : RAREFY_D64(0), RAREFY_D64(64)
                 : "l"(a), "l"(b), "r"(add), "n"(kA), "n"(kB));
  }
}

// tf32 with A in registers: D[64][128] += A[64][8] · B[8][128]. A lane of warp w has of A rows 16w + lane / 4
// (a[0], a[2]) and eight more (a[1], a[3]) at steps lane % 4 and, a[2] and a[3], four more.
__device__ inline void wgmma_tf32(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" RAREFY_FIRST_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1;"
               : RAREFY_D64(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef RAREFY_WGMMA_256
#undef RAREFY_WGMMA_128
#undef RAREFY_NEXT_64
#undef RAREFY_FIRST_64
#undef RAREFY_D64
#undef RAREFY_D16
#undef RAREFY_D4

}  // namespace rarefy::sm90
