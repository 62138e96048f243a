// Strict reading of the little JSON that Rarefy's files hold, and writing of its strings. The values are of
// our own: those of the JSON library allocate when they are destroyed, and end the process where that fails.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "rarefy/status.h"

namespace rarefy {

struct JsonValue;

using JsonObject = std::map<std::string, std::unique_ptr<JsonValue>>;
using JsonNumbers = std::vector<std::uint64_t>;  // the only arrays there are

struct JsonValue {
  std::variant<JsonObject, std::string, std::uint64_t, JsonNumbers> value;

  const JsonObject* object() const { return std::get_if<JsonObject>(&value); }
  const std::string* string() const { return std::get_if<std::string>(&value); }
  const std::uint64_t* number() const { return std::get_if<std::uint64_t>(&value); }
  const JsonNumbers* numbers() const { return std::get_if<JsonNumbers>(&value); }

  const char* type_name() const;
  std::string text() const;  // for messages, cut short
};

// Parses an object of at most `max_depth` levels that holds nothing but objects, strings, unsigned
// integers and arrays of unsigned integers. Refuses duplicate keys, which JSON libraries drop.
Result<JsonObject> parse_strict_json(std::string_view op, std::string_view what, std::string_view text,
                                     std::size_t max_depth);

// Text as a JSON string, with its quotes; empty where it is not UTF-8.
std::string json_string(std::string_view text);

// Numbers as a JSON array: [1,2].
std::string json_array(const std::vector<std::int64_t>& numbers);

// The parts in a row, for names and files: cat is for messages, which it cuts short when memory is out.
std::string join(std::initializer_list<std::string_view> parts);

// A name from a file, fit for a message: quoted, escaped, shortened.
std::string quote(std::string_view text);

}  // namespace rarefy
