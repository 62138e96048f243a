// rarefy verify FILE: every check of the format, data included; OK or the first thing that is wrong.
#include <cstdio>

#include "cli/common.h"
#include "rarefy/bsr_file.h"

namespace rarefy::cli {

namespace {

struct Options {
  std::string path;
  bool as_json = false;
};

Exit run(const Options& options) {
  const auto file = read_bsr_file(options.path);
  if (options.as_json) {
    nlohmann::json all{{"file", options.path}, {"ok", file.ok()}};
    if (file.ok()) {
      all["sparse_weights"] = file->weights.size();
      all["tensors"] = file->tensors.size();
    } else {
      all["error"] = file.status().message();
    }
    print(all);
  }
  if (!file.ok()) return fail(file.status());
  if (!options.as_json) {
    std::printf("OK: %zu sparse weights, %zu other tensors\n", file->weights.size(), file->tensors.size());
  }
  return kOk;
}

}  // namespace

void add_verify(CLI::App& app, Exit& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("verify", "Check a safetensors file: header, patterns, padding, metadata");
  command->add_option("FILE", options->path, "A safetensors file, dense or bsr-v1")->required();
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit] { exit = run(*options); });
}

}  // namespace rarefy::cli
