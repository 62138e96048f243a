// Products in int8 compiled for AMX, with AVX-512.
#include "cpu/simd/amx_quads.h"
#include "cpu/simd/few_quads.h"

namespace rarefy::cpu {

namespace {

constexpr QuadKernels by_output() {
  QuadKernels table =
      quad_table<AmxQuads>("amx", {4, FewQuads<AmxQuads, 4>::pack, FewQuads<AmxQuads, 4>::multiply});
  table.many_tokens = &kQuadsAmxTokens;
  return table;
}

constexpr QuadKernels by_token() {
  QuadKernels table = quad_table<AmxQuads>("amx");
  table.by_token = true;
  table.fewest = AmxQuads::fewest;
  table.takes = "blocks, sizes and densities that x as the first operand makes faster";
  table.few_tokens = &kQuadsAmx;
  return table;
}

}  // namespace

const QuadKernels kQuadsAmx = by_output();
const QuadKernels kQuadsAmxTokens = by_token();

}  // namespace rarefy::cpu
