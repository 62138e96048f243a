// A few tokens of blocks whose rows are no whole vectors, compiled for AVX2 with FMA and F16C.
#include "cpu/simd/avx2.h"

#include "cpu/few_ragged.h"

namespace rarefy::cpu {

void few_ragged_avx2(const FewTask& task) { few_ragged<Avx2, Avx2>(task); }

}  // namespace rarefy::cpu
