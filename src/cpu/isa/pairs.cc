// Products in bf16 pairs compiled for the baseline of the architecture.
#include "cpu/simd/pairs_portable.h"

namespace rarefy::cpu {

const PairKernels kPairsPortable = pair_table<PairsPortable>("pairs");

}  // namespace rarefy::cpu
