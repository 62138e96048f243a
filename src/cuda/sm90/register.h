// The sm90 family in the registry.
#pragma once

#include "core/registry.h"

namespace rarefy::sm90 {

void add_rows(Registry& registry);
void add_tall_rows(Registry& registry);           // tall_rows.cc
void add_tall_packed_rows(Registry& registry);    // tall_packed_rows.cc
void add_tall_backward_rows(Registry& registry);  // tall_backward_rows.cc
void add_whole_rows(Registry& registry);          // whole_rows.cc
void add_gradient_rows(Registry& registry);       // gradient_rows.cc

// What all its kernels want of a machine and of dtypes.
Reason supports_family(const Problem& problem, const rarefy::Machine& machine);

// cuBLAS's product of as many features and tokens, in 16 bits; 0: it cannot say.
double dense_microseconds(const Problem& problem, const rarefy::Machine& machine);

}  // namespace rarefy::sm90
