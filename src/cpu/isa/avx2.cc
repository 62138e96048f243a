// The kernels compiled for AVX2 with FMA and F16C.
#include "cpu/simd/avx2.h"

#include "cpu/kernel_table.h"

namespace rarefy::cpu {

const Kernels kAvx2 = kernel_table<Avx2>("avx2", 3);

}  // namespace rarefy::cpu
