// A kernel of one's own: `linear` in float32 for blocks of one column, written to be read.
#pragma once

#include "core/registry.h"

namespace example {

// Adds the kernel to a registry, ahead of what is there.
void register_columns(rarefy::Registry& registry);

}  // namespace example
