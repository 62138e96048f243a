// The reference of feed_forward.
#pragma once

#include "core/registry.h"

namespace rarefy::ref {

std::int64_t feed_forward_workspace(const Problem& problem, const Config& config);
Status feed_forward(const Call& call);

}  // namespace rarefy::ref
