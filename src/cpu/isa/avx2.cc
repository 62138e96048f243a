// The kernels compiled for AVX2 with FMA and F16C.
#include "cpu/simd/avx2.h"

#include "cpu/kernel_table.h"
#include "cpu/lane_kernels.h"
#include "cpu/sell.h"

namespace rarefy::cpu {

const Kernels kAvx2 = kernel_table<Avx2>("avx2", 3);
const FewKernels kFewAvx2 = {"avx2", kAvx2, few<Avx2>, few_takes<Avx2>, false, few_ragged_avx2};
const SellKernels kSellAvx2 = {kFewAvx2, Avx2::kWidth, sell<Avx2>};
const LaneKernels kLanesAvx2 = {kAvx2, multiply_lanes<Avx2>};

}  // namespace rarefy::cpu
