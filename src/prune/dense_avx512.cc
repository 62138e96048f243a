// The loops of reconstruction, built for AVX512.
#include "prune/dense_loops.h"

namespace rarefy::prune {

extern const DenseKernels kDense_avx512;
const DenseKernels kDense_avx512 = kKernels;

}  // namespace rarefy::prune
