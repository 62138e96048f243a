// Strict reading of the little JSON that Rarefy's files hold.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "rarefy/status.h"

namespace rarefy {

// Parses an object of at most `max_depth` levels that holds nothing but objects, strings, unsigned
// integers and arrays of unsigned integers. Refuses duplicate keys, which JSON libraries drop.
Result<nlohmann::json> parse_strict_json(std::string_view op, std::string_view what, std::string_view text,
                                         std::size_t max_depth);

// A name from a file, fit for a message: quoted, escaped, shortened.
std::string quote(std::string_view text);

}  // namespace rarefy
