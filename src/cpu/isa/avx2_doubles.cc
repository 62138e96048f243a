// The kernels on doubles compiled for AVX2 with FMA.
#include "cpu/simd/avx2_doubles.h"

#include "cpu/double_kernels.h"

namespace rarefy::cpu {

const DoubleKernels kDoublesAvx2 = double_kernels<Avx2Doubles>("avx2");

}  // namespace rarefy::cpu
