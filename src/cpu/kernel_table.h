// One row of the table of kernels: the templates, instantiated for one instruction set.
#pragma once

#include "cpu/bitmap.h"
#include "cpu/digits.h"
#include "cpu/dot.h"
#include "cpu/few.h"
#include "cpu/gather.h"
#include "cpu/in_place.h"
#include "cpu/narrow.h"
#include "cpu/panel.h"
#include "cpu/piece_lists.h"
#include "cpu/pieces.h"
#include "cpu/scatter.h"
#include "cpu/softmax.h"
#include "cpu/strips.h"
#include "cpu/woven.h"

namespace rarefy::cpu {

// Narrow: what meets few tokens in place.
template <class I, class Narrow = I>
constexpr Kernels kernel_table(const char* family, std::int32_t max_vectors) {
  Kernels table{};
  table.family = family;
  table.width = I::kWidth;
  table.max_vectors = max_vectors;
  table.registers = I::kRegisters;
  table.pack = pack<I>;
  table.store = store<I>;
  table.gather = gather<I>;
  table.scatter = scatter<I>;
  table.pieces = pieces<I>;
  table.list_pieces = list_pieces<I>;
  table.dot = dot<I>;
  if constexpr (I::kWidth >= 8) {  // below, there are few idle lanes to win back
    table.few_takes = few_takes<I>;
    table.woven = woven<I>;
    table.strips = strips<I>;
  }
  if constexpr (I::kWidth == 16) {
    table.narrow = narrow<I>;
    table.narrow_takes = narrow_takes<I>;
  }
  table.in_place = in_place<I, Narrow>;
  table.in_place_least = CountsLanes<I> ? 1 : I::kWidth;
  table.bitmap = bitmap<I>;
  table.two_of_four = two_of_four<I>;
  table.activate = activate_all<I>;
  table.apply_gate = apply_gate<I>;
  table.unpack = unpack<I>;
  table.round = round_to<I>;
  table.softmax = softmax_row<I>;
  table.digit = digit<I>;
  table.join_digits = join_digits<I>;
  return table;
}

}  // namespace rarefy::cpu
