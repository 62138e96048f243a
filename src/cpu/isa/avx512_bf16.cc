// Products in bf16 pairs compiled for AVX-512 with BF16.
#include "cpu/simd/avx512_few_pairs.h"
#include "cpu/simd/avx512_pair_dots.h"
#include "cpu/simd/avx512_pair_lanes.h"
#include "cpu/simd/avx512_pairs.h"

namespace rarefy::cpu {

const PairKernels kAvx512Bf16 = pair_table<Avx512Bf16>("avx512_bf16", multiply_pair_lanes);
const Kernels kDotsBf16 = pair_dots_table("avx512_bf16");
const FewKernels kFewBf16 = {"avx512_bf16", kAvx512, few_pairs, few_pairs_take, true, nullptr, turn<Avx512>};

}  // namespace rarefy::cpu
