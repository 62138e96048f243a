// Output helpers of the command line tool.
#include "cli/common.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "core/message.h"

namespace rarefy::cli {

Exit exit_code(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return kOk;
    case StatusCode::invalid_argument:
    case StatusCode::type_mismatch: return kBadInput;
    case StatusCode::unsupported:
    case StatusCode::out_of_memory:
    case StatusCode::io_error:
    case StatusCode::internal: return kCannot;
  }
  return kCannot;
}

namespace {

// Names come from files: nothing in them may reach the terminal as a command.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

template <class All>
std::vector<std::string> names_of(const All& all) {
  std::vector<std::string> names;
  for (const auto value : all) names.emplace_back(name(value));
  return names;
}

}  // namespace

Exit fail(const Status& status) {
  std::fprintf(stderr, "rarefy: %s\n", printable(status.message()).c_str());
  return exit_code(status.code());
}

void print(const nlohmann::ordered_json& json) {
  // Messages may quote bytes of a hostile file: replace what is not UTF-8 instead of throwing.
  const std::string text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  std::printf("%s\n", text.c_str());
}

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += printable(row[i]);
      line.append(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::printf("%s\n", line.c_str());
  }
}

std::string fixed(double value, int decimals) {
  char text[64];
  const int length = std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return {text, static_cast<std::size_t>(std::clamp(length, 0, 63))};
}

std::string bytes_text(std::int64_t bytes) {
  if (bytes < 1024) return cat(bytes, " B");
  auto value = static_cast<double>(bytes);
  const char* unit = "";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return cat(fixed(value, 1), ' ', unit);
}

std::vector<std::string> op_names(std::span<const Op> ops) { return names_of(ops); }
std::vector<std::string> dtype_names() { return names_of(kAllDTypes); }

Op parse_op(const std::string& text) {
  for (const Op op : kAllOps) {
    if (name(op) == text) return op;
  }
  return Op::linear;  // CLI11 lets no other name through
}

Result<BlockShape> parse_block(std::string_view op, const std::string& text) {
  BlockShape block;
  const char* end = text.data() + text.size();
  const auto rows = std::from_chars(text.data(), end, block.rows);
  const bool separated = rows.ec == std::errc() && rows.ptr != end && *rows.ptr == 'x';
  const auto cols = separated ? std::from_chars(rows.ptr + 1, end, block.cols) : rows;
  if (!separated || cols.ec != std::errc() || cols.ptr != end || block.rows < 1 || block.cols < 1) {
    return invalid(op, "--block must be ROWSxCOLS, each at least 1, such as 16x16", text);
  }
  return block;
}

}  // namespace rarefy::cli
