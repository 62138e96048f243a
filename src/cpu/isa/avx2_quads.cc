// Products in int8 compiled for AVX2.
#include "cpu/simd/avx2_quads.h"

namespace rarefy::cpu {

const QuadKernels kQuadsAvx2 = quad_table<Avx2Quads>("avx2");

}  // namespace rarefy::cpu
