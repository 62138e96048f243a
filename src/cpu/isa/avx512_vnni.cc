// Products in int8 compiled for AVX-512 with VNNI.
#include "cpu/simd/avx512_vnni.h"

namespace rarefy::cpu {

namespace {

void none() {}

}  // namespace

const QuadKernels kQuadsVnni = {"avx512", 550,     Avx512Half::kWidth,
                                none,     none,    pack_quads<Avx512Quads<true>>,
                                nullptr,  nullptr, multiply_quad_lanes};

}  // namespace rarefy::cpu
