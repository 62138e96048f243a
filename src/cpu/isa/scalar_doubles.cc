// The kernels on doubles compiled for the baseline of the architecture.
#include "cpu/simd/scalar_doubles.h"

#include "cpu/double_kernels.h"

namespace rarefy::cpu {

const DoubleKernels kDoublesScalar = double_kernels<ScalarDoubles>("scalar");

}  // namespace rarefy::cpu
