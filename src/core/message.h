// Builds texts and errors: "[op] requirement; got value".
#pragma once

#include <sstream>
#include <string>
#include <string_view>

#include "rarefy/status.h"

namespace rarefy {

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

inline Status error(StatusCode code, std::string_view op, std::string_view requirement,
                    std::string_view got) {
  return {code, op, requirement, got};
}

inline Status invalid(std::string_view op, std::string_view requirement, std::string_view got) {
  return error(StatusCode::invalid_argument, op, requirement, got);
}

inline Status mismatch(std::string_view op, std::string_view requirement, std::string_view got) {
  return error(StatusCode::type_mismatch, op, requirement, got);
}

}  // namespace rarefy
