// The products in f64: the kernels of single elements for a few tokens (few_singles.h), of rows that meet X
// by feature (in_place.h), and of dot products over tokens (dot.h), on vectors of doubles.
#pragma once

#include "cpu/kernels.h"

namespace rarefy::cpu {

struct DoubleKernels {
  const char* family;
  std::int32_t width;                     // doubles in a vector
  std::int32_t least;                     // tokens of in_place
  void (*few)(const FewTaskOf<double>&);  // 1 to kFewTokens tokens, blocks of one element
  void (*in_place)(const InPlaceTaskOf<double>&);
  void (*dot)(const DotTaskOf<double>&);
};

// Tokens of a panel: four vectors of AVX-512, 1 MB of x with 4096 columns.
inline constexpr std::int64_t kDoublePanel = 32;

extern const DoubleKernels kDoublesScalar;
#if defined(__x86_64__)
extern const DoubleKernels kDoublesAvx2;
extern const DoubleKernels kDoublesAvx512;
#endif

}  // namespace rarefy::cpu
