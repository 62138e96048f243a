// Products in int8 compiled for AVX-512 with VNNI.
#include "cpu/simd/avx512_vnni.h"

namespace rarefy::cpu {

namespace {

void none() {}

void multiply_quad_lanes(const LaneProduct& t) {
  if (t.rows % Avx512::kWidth == 0) return multiply_quad_lanes_of<Avx512VnniLanes>(t);
  multiply_quad_lanes_of<Avx512VnniHalfLanes>(t);
}

void multiply_few(const LaneProduct& t) {
  if (t.rows % Avx512::kWidth == 0) return multiply_quad_lanes_of<FewLanes<Avx512VnniLanes>>(t);
  multiply_quad_lanes_of<FewLanes<Avx512VnniHalfLanes>>(t);
}

}  // namespace

const QuadKernels kQuadsVnni = {"avx512",
                                550,
                                Avx512Half::kWidth,
                                none,
                                none,
                                pack_quads<Avx512Quads<Avx512VnniLanes, true>>,
                                nullptr,
                                nullptr,
                                multiply_quad_lanes,
                                FewQuads<Avx512VnniLanes>::pack,
                                multiply_few};

}  // namespace rarefy::cpu
