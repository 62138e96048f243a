// The kernels compiled for AVX-512.
#include "cpu/simd/avx512.h"
#include "cpu/simd/avx512_half.h"
#include "cpu/simd/avx512_windows.h"

#include "cpu/kernel_table.h"
#include "cpu/lane_kernels.h"
#include "cpu/sell.h"
#include "cpu/windows.h"

namespace rarefy::cpu {

const Kernels kAvx512 = kernel_table<Avx512, Avx512Half>("avx512", 4);
namespace {
constexpr WindowKernels kWindows = {windows<Avx512>, make_steps, take_values};
}  // namespace
const FewKernels kFewAvx512 = {"avx512",          kAvx512,      few<Avx512>, few_takes<Avx512>,      false,
                               few_ragged_avx512, turn<Avx512>, &kWindows,   few_takes_eight<Avx512>};
const SellKernels kSellAvx512 = {kFewAvx512, Avx512::kWidth, sell<Avx512>};
const LaneKernels kLanesAvx512 = {kAvx512, multiply_lanes<Avx512>};

}  // namespace rarefy::cpu
