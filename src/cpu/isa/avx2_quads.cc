// Products in int8 compiled for AVX2.
#include "cpu/simd/avx2_quad_rows.h"

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
constexpr QuadKernels lanes(const char* family, double tile_cycles, const QuadKernels& many) {
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
          .few = {kFew<E, kUnsigned, 4>, kFew<E, kUnsigned, 8>},
          .many_tokens = &many};
}

template <bool kUnsigned>
constexpr QuadKernels rows(const char* family, double tile_cycles, const QuadKernels& few) {
  using Rows = Avx2QuadRows<kUnsigned>;
  return {.family = family,
          .tile_cycles = tile_cycles,
          .rows = Rows::kRows,
          .join = Rows::kRows,
          .tokens = kPanelTokens,
          .by_line = true,
          .complements = !kUnsigned,
          .fewest = Rows::fewest,
          .takes = "blocks whose rows are no multiple of 8, where joining costs",
          .enter = none,
          .leave = none,
          .pack = pack_quads<Avx2Quads<kUnsigned>>,
          .activate = activate_to_int8<Avx2>,
          .few_rows = Rows::multiply,
          .few_tokens = &few};
}

}  // namespace

const QuadKernels kQuadsAvx2 = lanes<Avx2QuadLanes, false>("avx2", 1300, kQuadsAvx2Rows);
const QuadKernels kQuadsAvx2Rows = rows<false>("avx2", 1300, kQuadsAvx2);
const QuadKernels kQuadsAvxVnni = lanes<Avx2VnniLanes, true>("avx_vnni", 650, kQuadsAvxVnniRows);
const QuadKernels kQuadsAvxVnniRows = rows<true>("avx_vnni", 650, kQuadsAvxVnni);

}  // namespace rarefy::cpu
