// A SAX handler that builds our JSON values and stops at the first thing that the file formats rule out.
#include "io/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/message.h"

namespace rarefy {

namespace {

using nlohmann::json;

class StrictBuilder final : public nlohmann::json_sax<json> {
 public:
  explicit StrictBuilder(std::size_t max_depth) : max_depth_(max_depth) {}

  JsonObject root;
  std::string problem;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(number_integer_t) override { return refuse("a negative number"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (array_ == nullptr) return add({value});
    array_->push_back(value);
    return true;
  }
  bool number_float(number_float_t, const string_t&) override {
    return refuse("a number that is no unsigned 64-bit integer");
  }
  bool string(string_t& value) override {
    return array_ != nullptr ? refuse("a string in an array") : add({std::move(value)});
  }
  bool binary(binary_t&) override { return refuse("binary data"); }

  bool start_object(std::size_t) override {
    if (array_ != nullptr) return refuse("an array of arrays or objects");
    if (objects_.size() == max_depth_) return refuse(cat("more than ", max_depth_, " levels"));
    objects_.push_back(objects_.empty() ? &root : std::get_if<JsonObject>(&place({JsonObject()}).value));
    return true;
  }
  bool start_array(std::size_t) override {
    if (objects_.empty()) return refuse("an array at the top");
    if (array_ != nullptr) return refuse("an array of arrays or objects");
    if (objects_.size() == max_depth_) return refuse(cat("more than ", max_depth_, " levels"));
    array_ = std::get_if<JsonNumbers>(&place({JsonNumbers()}).value);
    return true;
  }
  bool end_object() override {
    objects_.pop_back();
    return true;
  }
  bool end_array() override {
    array_ = nullptr;
    return true;
  }

  bool key(string_t& name) override {
    if (objects_.back()->contains(name)) return refuse(cat("the key ", quote(name), " twice"));
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    return refuse(cat("a syntax error at byte ", position));
  }

 private:
  bool refuse(std::string text) {
    problem = std::move(text);
    return false;
  }

  // Under the last key of the innermost object.
  JsonValue& place(JsonValue value) {
    auto owned = std::make_unique<JsonValue>(std::move(value));
    return *objects_.back()->emplace(std::move(key_), std::move(owned)).first->second;
  }

  bool add(JsonValue value) {
    if (objects_.empty()) return refuse("a scalar at the top");
    place(std::move(value));
    return true;
  }

  std::size_t max_depth_;
  std::vector<JsonObject*> objects_;  // open ones, the innermost last; their addresses do not change
  JsonNumbers* array_ = nullptr;      // the open one, which is innermost
  std::string key_;
};

}  // namespace

const char* JsonValue::type_name() const {
  static constexpr const char* kNames[] = {"object", "string", "number", "array"};
  return kNames[value.index()];
}

std::string JsonValue::text() const {
  constexpr std::size_t kShown = 8;
  if (string() != nullptr) return quote(*string());
  if (number() != nullptr) return std::to_string(*number());
  if (numbers() == nullptr) return "an object";
  std::string out = "[";
  for (std::size_t i = 0; i < std::min(numbers()->size(), kShown); ++i) {
    out += (i == 0 ? "" : ",") + std::to_string((*numbers())[i]);
  }
  return out + (numbers()->size() > kShown ? ",…]" : "]");
}

Result<JsonObject> parse_strict_json(std::string_view op, std::string_view what, std::string_view text,
                                     std::size_t max_depth) {
  // The library would skip a byte order mark, and take a NUL for the end and what follows for nothing.
  if (!text.starts_with('{')) {
    return invalid(
        op, cat(what, " must start with '{'"),
        text.empty() ? std::string("nothing") : cat("byte ", int{static_cast<unsigned char>(text[0])}));
  }
  if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
    return invalid(op, cat(what, " must be JSON"), cat("a NUL at byte ", nul));
  }
  StrictBuilder builder(max_depth);
  if (!json::sax_parse(text.begin(), text.end(), &builder)) {
    return invalid(op, cat(what, " must be JSON objects of strings and unsigned integers"), builder.problem);
  }
  return std::move(builder.root);
}

std::string json_string(std::string_view text) {
  try {
    return json(std::string(text)).dump();
  } catch (const json::exception&) {  // not UTF-8
    return {};
  }
}

std::string json_array(const std::vector<std::int64_t>& numbers) {
  std::string out = "[";
  for (const std::int64_t number : numbers) {
    if (out.size() > 1) out += ',';
    out += std::to_string(number);
  }
  return out + ']';
}

std::string join(std::initializer_list<std::string_view> parts) {
  std::string out;
  for (const std::string_view part : parts) out += part;
  return out;
}

std::string quote(std::string_view text) {
  constexpr std::size_t kLongest = 96;
  constexpr char kHex[] = "0123456789abcdef";
  std::size_t length = std::min(text.size(), kLongest);
  while (length < text.size() && length > 0 && (text[length] & 0xc0) == 0x80) --length;  // whole UTF-8 only
  std::string out = "\"";
  for (const char c : text.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  out += length < text.size() ? "…\"" : "\"";
  return out;
}

}  // namespace rarefy
