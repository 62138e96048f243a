// Threads, registers and sums of a thread block that multiplies two or three strips of 64 rows: the strip
// kernel and the union kernel.
#pragma once

#include "cuda/sm90/device/mbarrier.cuh"

namespace rarefy::sm90 {

// A thread's share of the register file by role. ptxas refuses a single instruction with more registers than
// the launch allows each thread (65536 / threads), but hands out as many as setmaxnreg takes: three
// warpgroups work with products of up to 192 tokens at a time, and not with one of 256.
template <int kStrips, int kTokens>
struct StripShape {
  static constexpr int kThreads = (kStrips + 1) * 128;
  static constexpr u32 kSlotBytes = kTokens * 64 * 2;                           // X of a step
  static constexpr int kPart = kStrips == 3 && kTokens == 256 ? 128 : kTokens;  // tokens of one instruction
  static constexpr int kParts = kTokens / kPart;
  // Together as many as the launch gives: 3 × 168 and 4 × 128. One more, and taking them waits for ever.
  static constexpr int kOtherRegisters = kStrips == 2 ? 40 : 32;
  static constexpr int kMultiplyRegisters = kStrips == 2 ? 232 : 160;
  static_assert(kStrips * kMultiplyRegisters + kOtherRegisters == (kStrips + 1) * (65536 / kThreads / 8 * 8));
};

}  // namespace rarefy::sm90
