// A SAX handler that builds a JSON value and stops at the first thing that the file formats rule out.
#include "io/json.h"

#include <algorithm>
#include <vector>

#include "core/message.h"

namespace rarefy {

namespace {

using nlohmann::json;

class StrictBuilder final : public nlohmann::json_sax<json> {
 public:
  explicit StrictBuilder(std::size_t max_depth) : max_depth_(max_depth) {}

  json root;
  std::string problem;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(number_integer_t) override { return refuse("a negative number"); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t, const string_t&) override {
    return refuse("a number that is no unsigned 64-bit integer");
  }
  bool string(string_t& value) override {
    return in_array() ? refuse("a string in an array") : add(std::move(value));
  }
  bool binary(binary_t&) override { return refuse("binary data"); }

  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override {
    return stack_.empty() ? refuse("an array at the top") : open(json::array());
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (stack_.back()->contains(name)) return refuse(cat("the key ", quote(name), " twice"));
    key_ = std::move(name);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    return refuse(cat("a syntax error at byte ", position));
  }

 private:
  bool in_array() const { return !stack_.empty() && stack_.back()->is_array(); }

  bool refuse(std::string text) {
    problem = std::move(text);
    return false;
  }

  // Objects are node-based and arrays hold numbers only: the pointers in stack_ stay valid.
  json& place(json value) {
    if (stack_.empty()) return root = std::move(value);
    if (!in_array()) return (*stack_.back())[std::move(key_)] = std::move(value);
    stack_.back()->push_back(std::move(value));
    return stack_.back()->back();
  }

  bool add(json value) {
    if (stack_.empty()) return refuse("a scalar at the top");
    place(std::move(value));
    return true;
  }

  bool open(json container) {
    if (in_array()) return refuse("an array of arrays or objects");
    if (stack_.size() == max_depth_) return refuse(cat("more than ", max_depth_, " levels"));
    stack_.push_back(&place(std::move(container)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  std::size_t max_depth_;
  std::vector<json*> stack_;
  std::string key_;
};

}  // namespace

Result<json> parse_strict_json(std::string_view op, std::string_view what, std::string_view text,
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
