// What the union kernel reads of a pattern, beside strip_walk.h: shared by the kernels that make it, the one
// that packs and the one that multiplies.
#pragma once

#include "cuda/sm90/strip_walk.h"

namespace rarefy::sm90 {

// Words of a step: four columns of 32 bytes of X (16 features; 8 of f32) as one box or as two, which pieces
// of W it has, and how many each strip had before: a strip's pieces follow one another, whatever group it is
// in.
enum StepWord {
  kStepBoxes,   // the first box, counted in boxes; from bit 16 on the second, or kNoBox
  kStepMask,    // bit 4s + k: strip s of the group has the piece of the step's column k; from bit 12 on what
                // strip 2 had
  kStepBefore,  // what strip 0 had; the next word: strip 1
};
inline constexpr int kStepPieces = 0xFFF;  // of kStepMask
inline constexpr int kNoBox = 0xFFFF;

// A piece: 64 rows × 32 bytes as the tensor cores read them without a swizzle. Rows of 16 bytes; eight of
// them are a core matrix of 128 bytes; two of these, side by side, are eight rows.
inline constexpr int kPieceBytes = 64 * 32;

// What the steps of a group cost together, in clocks of an SM: products of a piece with 256 tokens, or
// bytes of X (a column of 256 tokens) and of W from L2.
RAREFY_HOST_DEVICE inline int union_clocks(int steps, int columns, int pieces) {
  const int multiply = pieces * 128 + steps * 60, copy = columns * 195 + pieces * 49;
  const int clocks = 700 + (multiply > copy ? multiply : copy);
  return clocks > kEmptyClocks ? clocks : kEmptyClocks;
}

}  // namespace rarefy::sm90
