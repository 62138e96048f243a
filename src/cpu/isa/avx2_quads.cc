// Products in int8 compiled for AVX2.
#include "cpu/simd/avx2_quads.h"

namespace rarefy::cpu {

namespace {

void none() {}

template <class E>
void multiply_panel(const LaneProduct& t) {
  if (t.next.half) return multiply_gathering<HalfLanes<E>>(t);
  multiply_gathering<E>(t);
}

template <class E, bool kUnsigned, int kTokens>
constexpr QuadFew kFew = {kTokens, Avx2FewQuads<kUnsigned, kTokens>::pack,
                          multiply_gathering<FewLanes<E, kTokens>>, multiply_few_columns<E, kTokens>};

template <class E, bool kUnsigned>
constexpr QuadKernels table(const char* family, double tile_cycles) {
  return {.family = family,
          .tile_cycles = tile_cycles,
          .rows = Avx2::kWidth,
          .join = Avx2::kWidth,
          .tokens = kPanelTokens,
          .by_line = true,
          .complements = !kUnsigned,
          .enter = none,
          .leave = none,
          .pack = pack_quads<Avx2Quads<kUnsigned>>,
          .activate = activate_to_int8<Avx2>,
          .lanes = multiply_panel<E>,
          .few = {kFew<E, kUnsigned, 4>, kFew<E, kUnsigned, 8>}};
}

}  // namespace

const QuadKernels kQuadsAvx2 = table<Avx2QuadLanes, false>("avx2", 1300);
const QuadKernels kQuadsAvxVnni = table<Avx2VnniLanes, true>("avx_vnni", 650);

}  // namespace rarefy::cpu
