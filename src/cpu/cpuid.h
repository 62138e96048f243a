// What the processor and the operating system offer, read once.
#pragma once

#include "rarefy/problem.h"

namespace rarefy::cpu {

// Features are clusters, as every machine with one of their parts has all: "avx2" is AVX2 + FMA + F16C,
// "avx512" is AVX-512 F + BW + DQ + VL; then "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8".
// "avx512_bf16_fast": vdpbf16ps at the rate of a float multiply-add, for twice the work; Intel's has a
// quarter. "avx512_load_bound": one load of 512 bits starts in a cycle, broadcasts included, for two FMAs
// (Ice Lake: FMAs and loads one to one run at half of the peak), so that lines asked for beside them cost
// FMAs. "prefetch_l2": AMD before Zen 5, where a software prefetch into L1 that comes from memory stands in
// the way of loads, and one into L2 does not.
Machine detect();

}  // namespace rarefy::cpu
