// Checks that all of src/prune shares.
#pragma once

#include <string_view>

#include "rarefy/prune.h"

namespace rarefy::prune {

// Everything about scores and units; returns the number of units, of each row of units where counts are of
// those.
Result<std::int64_t> check(std::string_view op, const PruneScores& scores, const PruneUnits& units);

Status check_units(std::string_view op, const MatrixView& matrix, const PruneUnits& units);

Status no_memory(std::string_view op);

}  // namespace rarefy::prune
