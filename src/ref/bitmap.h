// linear of a bitmap by the reference.
#pragma once

#include "core/registry.h"

namespace rarefy::ref {

Status linear_bitmap(const Call& call);

}  // namespace rarefy::ref
