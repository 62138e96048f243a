// The rarefy command. Results go to stdout, errors to stderr as "[op] requirement; got value".
//
// Exit codes:
//   0  done
//   1  bad input: a file or a value is not what it must be
//   2  usage: unknown or malformed arguments
//   3  cannot: not supported here, out of memory, or a file cannot be opened, read or written
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <system_error>

#include "cli/common.h"
#include "core/message.h"
#include "rarefy/version.h"

namespace {

using rarefy::cli::Exit;

// Output that nobody can have read is a failure: a full disk shows when the buffers are flushed.
Exit flushed(Exit exit) {
  errno = 0;
  const bool written = std::cout.flush().good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (written || exit != rarefy::cli::kOk) return exit;
  return rarefy::cli::fail(rarefy::error(rarefy::StatusCode::io_error, "rarefy",
                                         "the standard output must be writable",
                                         errno != 0 ? std::generic_category().message(errno) : "an error"));
}

}  // namespace

// Only building the list of commands is outside the try: that fails when nothing else would work.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  CLI::App app{"Block-sparse weights: look at them, check them, convert them, time them.", "rarefy"};
  app.footer(
      "Exit codes:\n"
      "  0  done\n"
      "  1  bad input: a file or a value is not what it must be\n"
      "  2  usage: unknown or malformed arguments\n"
      "  3  cannot: not supported here, out of memory, or a file cannot be opened, read or written");
  app.set_version_flag("--version", rarefy::version());
  app.require_subcommand(1);

  Exit exit = rarefy::cli::kOk;
  rarefy::cli::add_info(app, exit);
  rarefy::cli::add_inspect(app, exit);
  rarefy::cli::add_verify(app, exit);
  rarefy::cli::add_convert(app, exit);
  rarefy::cli::add_bench(app, exit);
  rarefy::cli::add_completion(app, exit);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return flushed(app.exit(problem) == 0 ? rarefy::cli::kOk : rarefy::cli::kUsage);  // 0: --help, --version
  } catch (const std::exception& problem) {
    return rarefy::cli::fail(rarefy::error(rarefy::StatusCode::out_of_memory, "rarefy",
                                           "the system must have the memory and threads asked for",
                                           problem.what()));
  }
  return flushed(exit);
}
