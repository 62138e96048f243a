// The kernels compiled for AArch64's Advanced SIMD.
#include "cpu/simd/neon.h"

#include "cpu/kernel_table.h"

namespace rarefy::cpu {

const Kernels kNeon = kernel_table<Neon>("neon", 4);

}  // namespace rarefy::cpu
