// What kernels for a few tokens have alike: the levels of their sums, and how much of W is under way.
#pragma once

#include "cpu/asked.h"

namespace rarefy::cpu {

// Bytes of W under way where its blocks are read from beginning to end: asked for far ahead (from memory 6 KB
// took up to a quarter longer), near (from caches 14 KB take 4 to 12 % longer), and where x is a second
// stream (14 KB took 15 % longer). The elements that one pass of slices after the other goes through, while
// the next as many come. Indices under way: their lines come once in 16 entries, and x waits for them (L3: 10
// to 20 %).
inline constexpr std::int64_t kFewAhead = 14336, kFewNear = 4096, kFewFourAhead = 6144;
inline constexpr std::int64_t kFewChunk = 4 << 10;
inline constexpr std::int32_t kFewIndices = 256;

// Sums in three levels, so that their errors are no larger than those of a dense product, which has as many
// lanes for one output as a block of 16×1 has outputs: so many vectors of W make a part, in registers; so
// many of these are added up beside it; and what comes of that, onto y. Whole vectors have the lanes.
inline constexpr std::int32_t kFewPart = 16, kFewParts = 8;

// Slices are vectors of a block, or rows of it where those are whole vectors. Few of them have several sets
// of sums, entries in turn, as an FMA takes four cycles and two start in each: the same for any number of
// tokens.
template <class I>
constexpr int few_sets(std::int64_t slices) {
  return slices >= 4 ? 1 : slices >= 2 || I::kRegisters < 32 ? 2 : 4;
}

}  // namespace rarefy::cpu
