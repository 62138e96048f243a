// Products in int8 compiled for AMX, with AVX-512.
#include "cpu/simd/amx_quads.h"
#include "cpu/simd/few_quads.h"

namespace rarefy::cpu {

const QuadKernels kQuadsAmx =
    quad_table<AmxQuads>("amx", {4, FewQuads<AmxQuads, 4>::pack, FewQuads<AmxQuads, 4>::multiply});

}  // namespace rarefy::cpu
