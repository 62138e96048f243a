// One row of the table of doubles.h: the templates, instantiated for one instruction set.
#pragma once

#include "cpu/dot.h"
#include "cpu/doubles.h"
#include "cpu/few_singles.h"
#include "cpu/in_place.h"

namespace rarefy::cpu {

template <class I>
void few_doubles(const FewTaskOf<double>& task) {
  switch (task.tokens) {  // f32: as wide as sums are
    case 1: return few_singles<I, Storage::f32, 1>(task);
    case 2: return few_singles<I, Storage::f32, 2>(task);
    case 3: return few_singles<I, Storage::f32, 3>(task);
    case 4: return few_singles<I, Storage::f32, 4>(task);
    default: return;
  }
}

template <class I, class Narrow>
void in_place_doubles(const InPlaceTaskOf<double>& task) {
  task.tokens < I::kWidth ? in_place<Narrow>(task) : in_place<I>(task);
}

// Narrow: for fewer columns than I has lanes.
template <class I, class Narrow = I>
constexpr DoubleKernels double_kernels(const char* family) {
  return {family, I::kWidth, Narrow::kWidth, few_doubles<I>, in_place_doubles<I, Narrow>, dot<I>};
}

}  // namespace rarefy::cpu
