// Products in int8 compiled for AVX-512 with VNNI.
#include "cpu/simd/avx512_vnni.h"
#include "cpu/simd/avx512_vnni_rows.h"

namespace rarefy::cpu {

namespace {

void none() {}

template <class E>
void multiply_panel(const LaneProduct& t) {
  if (t.next.half) return multiply_gathering<HalfLanes<E>>(t);
  multiply_gathering<E>(t);
}

void multiply_quad_lanes(const LaneProduct& t) {
  if (t.rows % Avx512::kWidth == 0) return multiply_panel<Avx512VnniLanes>(t);
  multiply_panel<Avx512VnniHalfLanes>(t);
}

template <int kTokens>
void multiply_few(const LaneProduct& t) {
  if (t.rows % Avx512::kWidth == 0) return multiply_gathering<FewLanes<Avx512VnniLanes, kTokens>>(t);
  multiply_gathering<FewLanes<Avx512VnniHalfLanes, kTokens>>(t);
}

template <int kTokens>
constexpr QuadFew kFew = {kTokens, FewQuads<Avx512VnniLanes, kTokens>::pack, multiply_few<kTokens>,
                          multiply_few_columns<Avx512VnniLanes, kTokens>};

}  // namespace

const QuadKernels kQuadsVnni = {.family = "avx512",
                                .tile_cycles = 550,
                                .rows = Avx512Half::kWidth,
                                .join = kTileRows,
                                .tokens = kPanelTokens,
                                .by_line = true,
                                .enter = none,
                                .leave = none,
                                .pack = pack_quads<Avx512Quads<Avx512VnniLanes, true>>,
                                .activate = activate_to_int8<Avx512>,
                                .lanes = multiply_quad_lanes,
                                .few = {kFew<4>, kFew<8>},
                                .many_tokens = &kQuadsVnniRows};

using Rows = Avx512Quads<Avx512VnniRows, true, 64>;

const QuadKernels kQuadsVnniRows = {.family = "avx512",
                                    .tile_cycles = 550,
                                    .rows = Avx512VnniRows::kRows,
                                    .join = Avx512VnniRows::kRows,
                                    .tokens = Rows::kTokens,
                                    .by_line = true,
                                    .fewest = Avx512VnniRows::fewest,
                                    .takes = "blocks of less than 32 outputs",
                                    .enter = none,
                                    .leave = none,
                                    .pack = pack_quads<Rows>,
                                    .activate = activate_to_int8<Avx512>,
                                    .few_rows = Avx512VnniRows::multiply,
                                    .few_tokens = &kQuadsVnni};

}  // namespace rarefy::cpu
