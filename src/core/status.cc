// Names of status codes, their text, and the library's version.
#include "rarefy/status.h"

#include "rarefy/version.h"

namespace rarefy {

std::string_view name(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return "ok";
    case StatusCode::invalid_argument: return "invalid_argument";
    case StatusCode::type_mismatch: return "type_mismatch";
    case StatusCode::unsupported: return "unsupported";
    case StatusCode::out_of_memory: return "out_of_memory";
    case StatusCode::io_error: return "io_error";
    case StatusCode::internal: return "internal";
  }
  return "?";
}

std::string Status::message() const {
  if (ok()) return {};
  return '[' + error_->op + "] " + error_->requirement + "; got " + error_->got;
}

const char* version() { return RAREFY_VERSION; }

}  // namespace rarefy
