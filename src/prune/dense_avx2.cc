// The loops of reconstruction, built for AVX2.
#include "prune/dense_loops.h"

namespace rarefy::prune {

extern const DenseKernels kDense_avx2;
const DenseKernels kDense_avx2 = kKernels;

}  // namespace rarefy::prune
