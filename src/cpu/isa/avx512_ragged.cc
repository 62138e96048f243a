// A few tokens of blocks whose rows are no whole vectors, compiled for AVX-512.
#include "cpu/simd/avx512.h"
#include "cpu/simd/avx512_half.h"

#include "cpu/few_ragged.h"

namespace rarefy::cpu {

void few_ragged_avx512(const FewTask& task) { few_ragged<Avx512, Avx512Half>(task); }

}  // namespace rarefy::cpu
