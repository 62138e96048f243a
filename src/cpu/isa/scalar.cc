// The kernels compiled for the baseline of the architecture.
#include "cpu/simd/scalar.h"

#include "cpu/kernel_table.h"

namespace rarefy::cpu {

const Kernels kScalar = kernel_table<Scalar>("scalar", 2);

}  // namespace rarefy::cpu
