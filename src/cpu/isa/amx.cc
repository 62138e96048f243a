// Products in bf16 pairs compiled for AMX, with AVX-512 and its BF16.
#include "cpu/simd/amx.h"

namespace rarefy::cpu {

const PairKernels kAmx = pair_table<Amx>("amx");

}  // namespace rarefy::cpu
