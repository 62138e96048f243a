// Checks of reconstruction problems.
#pragma once

#include <string_view>

#include "rarefy/prune_reconstruct.h"

namespace rarefy::prune {

Status check_problem(std::string_view op, const Reconstruction& problem, const double* matrix);

}  // namespace rarefy::prune
