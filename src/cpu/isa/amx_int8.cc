// Products in int8 compiled for AMX, with AVX-512.
#include "cpu/simd/amx_quads.h"
#include "cpu/simd/few_quads.h"

namespace rarefy::cpu {

const QuadKernels kQuadsAmx =
    quad_table<AmxQuads>("amx", FewQuads<AmxQuads>::pack, FewQuads<AmxQuads>::multiply);

}  // namespace rarefy::cpu
