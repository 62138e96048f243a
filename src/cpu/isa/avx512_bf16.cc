// Products in bf16 pairs compiled for AVX-512 with BF16.
#include "cpu/simd/avx512_few_groups.h"
#include "cpu/simd/avx512_few_pairs.h"
#include "cpu/simd/avx512_pair_dots.h"
#include "cpu/simd/avx512_pair_lanes.h"
#include "cpu/simd/avx512_pairs.h"

namespace rarefy::cpu {

namespace {

constexpr PairKernels with_few() {
  PairKernels table = pair_table<Avx512Bf16>("avx512_bf16", multiply_pair_lanes);
  table.few_pack = Avx512FewGroups::pack;
  table.few = Avx512FewGroups::multiply;
  return table;
}

}  // namespace

const PairKernels kAvx512Bf16 = with_few();
const Kernels kDotsBf16 = pair_dots_table("avx512_bf16");
const FewKernels kFewBf16 = {"avx512_bf16", kAvx512, few_pairs, few_pairs_take, true, nullptr, turn<Avx512>};

}  // namespace rarefy::cpu
