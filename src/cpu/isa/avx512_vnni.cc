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
constexpr QuadFew kFew = {kTokens, FewQuads<Avx512VnniLanes, kTokens>::pack, multiply_few<kTokens>};

}  // namespace

const QuadKernels kQuadsVnni = {"avx512",
                                550,
                                Avx512Half::kWidth,
                                kTileRows,
                                kPanelTokens,
                                true,
                                nullptr,
                                none,
                                none,
                                pack_quads<Avx512Quads<Avx512VnniLanes, true>>,
                                nullptr,
                                nullptr,
                                multiply_quad_lanes,
                                nullptr,
                                {kFew<4>, kFew<8>}};

using Rows = Avx512Quads<Avx512VnniRows, true, 64>;

const QuadKernels kQuadsVnniRows = {
    "avx512", 550,  Avx512VnniRows::kRows, 1,       Rows::kTokens, true,    Avx512VnniRows::fewest,
    none,     none, pack_quads<Rows>,      nullptr, nullptr,       nullptr, Avx512VnniRows::multiply,
    {}};

}  // namespace rarefy::cpu
