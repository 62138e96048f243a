// Products in int8 compiled for the baseline of the architecture.
#include "cpu/simd/quads_plain.h"
#include "cpu/simd/scalar.h"

namespace rarefy::cpu {

namespace {

struct Plain : QuadsPlain<Scalar> {
  static constexpr int kRows = 32, kLeast = kTileRows;
  static constexpr double kTileCycles = 20000;
};

}  // namespace

const QuadKernels kQuadsScalar = quad_table<Plain>("scalar");

}  // namespace rarefy::cpu
