// What the subcommands share: exit codes, output, and the registration of each.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rarefy/convert.h"
#include "rarefy/problem.h"
#include "rarefy/status.h"

namespace rarefy::cli {

// The exit codes; `rarefy --help` lists them too.
enum Exit : int {
  kOk = 0,
  kBadInput = 1,  // a file or a value is not what it must be
  kUsage = 2,     // unknown or malformed arguments
  kCannot = 3,    // unsupported on this machine, out of memory, or the system cannot read or write
};

Exit exit_code(StatusCode code);

// Prints the message to stderr and gives the exit code.
Exit fail(const Status& status);

void print(const nlohmann::ordered_json& json);

// Left-aligned columns with a header line; numbers are text already.
void print_table(const std::vector<std::vector<std::string>>& rows);

std::string bytes_text(std::int64_t bytes);     // "12.3 MiB"
std::string fixed(double value, int decimals);  // "0.500"

// What options take, in the core's order and by its names; parse_op takes one of them.
std::vector<std::string> op_names(std::span<const Op> ops = kAllOps);
std::vector<std::string> dtype_names();
Op parse_op(const std::string& text);

// "16x16" → rows and columns.
Result<BlockShape> parse_block(std::string_view op, const std::string& text);

// Each adds its subcommand; what it runs stores its exit code in `exit`.
void add_info(CLI::App& app, Exit& exit);
void add_inspect(CLI::App& app, Exit& exit);
void add_verify(CLI::App& app, Exit& exit);
void add_convert(CLI::App& app, Exit& exit);
void add_bench(CLI::App& app, Exit& exit);
void add_completion(CLI::App& app, Exit& exit);  // of the commands that were added, and itself

}  // namespace rarefy::cli
