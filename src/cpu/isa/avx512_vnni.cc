// Products in int8 compiled for AVX-512 with VNNI.
#include "cpu/simd/avx512_quads.h"

namespace rarefy::cpu {

const QuadKernels kQuadsVnni = quad_table<Avx512Vnni>("avx512");

}  // namespace rarefy::cpu
