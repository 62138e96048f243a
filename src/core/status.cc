// Names of status codes, their text, and the library's version.
#include "rarefy/status.h"

#include <new>

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

// Made when the library is loaded, while there still is memory.
const std::shared_ptr<const Status::Error> Status::no_memory_ = std::make_shared<const Error>(Error{
    StatusCode::out_of_memory, "rarefy", "the text of an error must fit in memory", "an allocation failure"});

Status::Status(StatusCode code, std::string_view op, std::string_view requirement, std::string_view got) {
  try {
    error_ = std::make_shared<const Error>(
        Error{code, std::string(op), std::string(requirement), std::string(got)});
  } catch (const std::bad_alloc&) {
    error_ = no_memory_;
  }
}

std::string Status::message() const {
  if (ok()) return {};
  return '[' + error_->op + "] " + error_->requirement + "; got " + error_->got;
}

const char* version() { return RAREFY_VERSION; }

}  // namespace rarefy
