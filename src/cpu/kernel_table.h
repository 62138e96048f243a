// One row of the table of kernels: the templates, instantiated for one instruction set.
#pragma once

#include "cpu/dot.h"
#include "cpu/gather.h"
#include "cpu/panel.h"
#include "cpu/scatter.h"

namespace rarefy::cpu {

template <class I>
constexpr Kernels kernel_table(const char* impl, std::int32_t max_vectors) {
  return {impl,      I::kWidth,  max_vectors, I::kRegisters, pack<I>,    store<I>,
          gather<I>, scatter<I>, dot<I>,      unpack<I>,     round_to<I>};
}

}  // namespace rarefy::cpu
