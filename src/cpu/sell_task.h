// What is held of short rows and how a kernel is called for them (sell.h).
#pragma once

#include "cpu/kernels.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kSellRows = 256;  // that are sorted
// Elements of a row; groups with a longer one are not held.
inline constexpr std::int32_t kSellLongest = 2048;
inline constexpr std::uint16_t kSellNotHeld = 0xffff;
inline constexpr std::int64_t kSellRoom = 16;  // columns that can be read past the last

// y[m][lane] = Σ of W's row · x[m] for 1, 2 or 4 tokens and groups begin … end, all of which are held.
struct SellTask {
  const float* values;  // step after step
  const void* columns;  // the same, of 16 bits if narrow
  bool narrow;
  const std::int32_t* first;    // element of each group
  const std::uint16_t* length;  // of each group's rows, descending
  std::int64_t begin, end;
  const float* x;
  std::int64_t x_stride;
  std::int32_t tokens;
  float* y;  // from group `begin` on
  std::int64_t y_stride;
};

// The tables of an instruction set: sums of held groups, and of rows as they lie.
struct SellKernels {
  const FewKernels& few;
  std::int32_t lanes;
  void (*multiply)(const SellTask&);
};
extern const SellKernels kSellAvx512, kSellAvx2;

}  // namespace rarefy::cpu
