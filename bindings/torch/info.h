// What this library was built with and would run, as JSON for Python's rarefy.backend_info().
#pragma once

#include <cstdint>
#include <string>

namespace rarefy::binding {

// The kernels selected are those for weights of this block shape.
std::string backend_info_json(std::int64_t block_rows, std::int64_t block_cols);

}  // namespace rarefy::binding
