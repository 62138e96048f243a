// One layer of a feed-forward network as a problem of linear, for kernels that run networks by linear's own.
#pragma once

#include "cpu/drivers.h"

namespace rarefy::cpu {

// Hidden features are floats; they lie where the kernel puts them.
inline Problem layer_problem(const Problem& p, const WeightSpec& weight, std::int64_t tokens) {
  const bool down = &weight == &p.down;
  Problem one = make_problem(Op::linear, weight.shape, tokens, DType::f32, Device::cpu, p.threads);
  one.weight = weight;
  if (down) {
    one.out = p.out;
    one.out_stride = p.out_stride;
    one.out_alignment = p.out_alignment;
    one.in_alignment = 16;
  } else {
    one.in = p.in;
    one.in_stride = p.in_stride;
    one.in_alignment = p.in_alignment;
  }
  one.bias = true;
  one.activation = Activation::none;
  return one;
}

// Some rows of a view; of one without data, none.
template <class View>
View rows_of(View view, std::int64_t first, std::int64_t rows) {
  if (view.data != nullptr) view.data = at(view, first, 0);
  view.rows = rows;
  return view;
}

}  // namespace rarefy::cpu
