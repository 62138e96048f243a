// The sm90 family in the registry.
#pragma once

#include "core/registry.h"

namespace rarefy::sm90 {

void add_rows(Registry& registry);

}  // namespace rarefy::sm90
