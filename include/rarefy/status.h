// How the core reports failure: a Status of {code, op, requirement, got}, rendered once, on demand, as
// "[op] requirement; got value".
// The core never prints, never aborts and throws nothing to its callers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "rarefy/export.h"

namespace rarefy {

enum class StatusCode : std::uint8_t {
  ok,
  invalid_argument,  // a shape, an index, a range: Python's ValueError
  type_mismatch,     // a dtype or a device: Python's TypeError
  unsupported,       // valid, but this build or machine has no kernel for it
  out_of_memory,
  io_error,  // a file that cannot be opened, read or written; wrong contents are invalid_argument
  internal,  // a bug in Rarefy or in a driver
};

RAREFY_API std::string_view name(StatusCode code);

// Small and free to pass on while all is well. Making one never throws: without memory for its text it is
// out_of_memory.
class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  RAREFY_API Status(StatusCode code, std::string_view op, std::string_view requirement, std::string_view got);

  bool ok() const { return error_ == nullptr; }
  StatusCode code() const { return ok() ? StatusCode::ok : error_->code; }
  std::string_view op() const { return ok() ? std::string_view() : error_->op; }
  std::string_view requirement() const { return ok() ? std::string_view() : error_->requirement; }
  std::string_view got() const { return ok() ? std::string_view() : error_->got; }
  RAREFY_API std::string message() const;  // empty when ok

  // The same, in the name of the caller's operation.
  Status in(std::string_view op) const { return ok() ? *this : Status(code(), op, requirement(), got()); }

 private:
  struct Error {
    StatusCode code;
    std::string op, requirement, got;
  };
  static const std::shared_ptr<const Error> no_memory_;
  std::shared_ptr<const Error> error_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : state_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T& value() & { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  const T* operator->() const { return &value(); }
  const T& operator*() const& { return value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace rarefy
