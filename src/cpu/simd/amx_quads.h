// Products in int8 on AMX's tiles: those of amx.h with another instruction. Both of its operands have a sign.
#pragma once

#include "cpu/simd/amx.h"
#include "cpu/simd/avx512_quads.h"

namespace rarefy::cpu {

struct Int8Tiles {
  template <int kSums, int kA, int kB>
  [[gnu::always_inline]] static void dot() {
    tile::dot_int8<kSums, kA, kB>();
  }
};

struct AmxQuads : Avx512Quads<AmxQuads, false> {
  static constexpr int kRangeOutputs = 64;  // whose rows of Y, in f32, are 256 bytes: 32 at once took longer
  static constexpr double kTileCycles = Amx::kTileCycles;

  static void enter() { Amx::enter(); }
  static void leave() { Amx::leave(); }

  static void range(const PairRange& t) { multiply_range<AmxQuads, Int8Tiles>(t); }
};

}  // namespace rarefy::cpu
