// The kernels on doubles compiled for AVX-512.
#include "cpu/simd/avx512_doubles.h"

#include "cpu/double_kernels.h"

namespace rarefy::cpu {

const DoubleKernels kDoublesAvx512 = double_kernels<Avx512Doubles, Avx512DoublesHalf>("avx512");

}  // namespace rarefy::cpu
