// Four floats: AArch64's Advanced SIMD, which every such processor has.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "cpu/simd/expand_table.h"

namespace rarefy::cpu {

struct Neon {
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 32;
  using Vec = float32x4_t;

  static Vec zero() { return vdupq_n_f32(0); }
  static Vec set1(float x) { return vdupq_n_f32(x); }
  static Vec load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Vec v) { vst1q_f32(p, v); }
  static Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
  static Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
  static Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
  static Vec max(Vec a, Vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b if either is NaN
  static Vec min(Vec a, Vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static Vec select_negative(Vec x, Vec if_negative, Vec otherwise) {
    return vbslq_f32(vcltzq_f32(x), if_negative, otherwise);
  }
  static Vec round(Vec x) { return vrndnq_f32(x); }
  static Vec scale(Vec v, Vec n) {
    const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(v, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  }
  static float sum(Vec v) { return vaddvq_f32(v); }
  static void sum4(Vec a, Vec b, Vec c, Vec d, float* out) {
    store(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }

  static Vec load_bf16(const std::uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
  static void store_bf16(std::uint16_t* p, Vec v) {  // to nearest even; NaN stays a (quiet) NaN
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16));
  }
  static Vec load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store_f16(std::uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

  // Which of 4 columns from k on a row of bits stores, and how many; the first lanes, spread to those, 0
  // elsewhere; a · b + c there for such an a, c elsewhere.
  struct Lanes {
    unsigned bits;
    uint32x4_t mask;
  };
  static Lanes lanes(const std::uint8_t* bits, std::int64_t k) {
    const unsigned stored = bits[k / 8] >> (k % 8) & 15U;
    constexpr std::uint32_t kBit[] = {1, 2, 4, 8};
    return {stored, vtstq_u32(vdupq_n_u32(stored), vld1q_u32(kBit))};
  }
  static int count(Lanes stored) { return kExpand<4>.count[stored.bits]; }
  static Vec expand(Vec v, Lanes stored) {
    std::uint32_t lane;
    __builtin_memcpy(&lane, kExpand<4>.lane[stored.bits], sizeof(lane));
    const uint8x16_t wide = vreinterpretq_u8_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(lane)))));
    // Lane i of four bytes is bytes 4 i … 4 i + 3.
    const uint32x4_t first = vmulq_n_u32(vreinterpretq_u32_u8(wide), 0x04040404U);
    const uint8x16_t bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x03020100U)));
    const uint8x16_t moved = vqtbl1q_u8(vreinterpretq_u8_f32(v), bytes);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(moved), stored.mask));
  }
  static Vec fma_in(Lanes stored, Vec a, Vec b, Vec c) {
    return vfmaq_f32(c, a, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(b), stored.mask)));
  }
  // Of each four of 8 columns of x two, for the 4 values whose positions begin at `codes`.
  static unsigned positions(const std::uint8_t* codes) { return *codes; }
  static Vec pick(const float* x, unsigned which) {
    const float two[] = {x[which & 3U], x[which >> 2 & 3U], x[4 + (which >> 4 & 3U)], x[4 + (which >> 6)]};
    return load(two);
  }

  static void transpose(Vec (&m)[kWidth]) {
    const auto even = [](Vec a, Vec b) { return vreinterpretq_f64_f32(vtrn1q_f32(a, b)); };
    const auto odd = [](Vec a, Vec b) { return vreinterpretq_f64_f32(vtrn2q_f32(a, b)); };
    const float64x2_t a = even(m[0], m[1]), b = odd(m[0], m[1]), c = even(m[2], m[3]), d = odd(m[2], m[3]);
    m[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
    m[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    m[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
    m[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
  }
};

}  // namespace rarefy::cpu
