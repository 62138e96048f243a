// rarefy info: what this build and machine can run, and what each product would use.
#include <cstdio>

#include "cli/common.h"
#include "rarefy/backend.h"

namespace rarefy::cli {

namespace {

using nlohmann::json;

struct Options {
  std::string block = "16x16";
  bool as_json = false;
};

constexpr std::string_view text(Device device) { return device == Device::cpu ? "cpu" : "cuda"; }

std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out.empty() ? "none" : out;
}

// One row for each product, device and dtype: the kernel that runs it, or why none does.
json selection(const BackendInfo& info, BlockShape block) {
  json rows = json::array();
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (device == Device::cuda && info.cuda_devices.empty()) continue;
    for (const Op op : kAllOps) {
      for (const DType dtype : kAllDTypes) {
        const auto kernel = selected_kernel(op, dtype, device, block.rows, block.cols);
        json row{{"op", name(op)}, {"device", text(device)}, {"dtype", name(dtype)}};
        row["kernel"] = kernel.ok() ? json(kernel->name) : json(nullptr);
        if (!kernel.ok()) row["reason"] = kernel.status().message();
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

json to_json(const BackendInfo& info, const Options& options, BlockShape block) {
  json kernels = json::array();
  for (const KernelInfo& kernel : info.kernels) {
    kernels.push_back({{"op", name(kernel.op)},
                       {"device", text(kernel.device)},
                       {"impl", kernel.impl},
                       {"name", kernel.name}});
  }
  return {{"version", info.version},           {"cpu", info.cpu},
          {"cpu_features", info.cpu_features}, {"cuda_built", info.cuda_built},
          {"cuda_devices", info.cuda_devices}, {"forced_impl", info.forced_impl},
          {"kernels", std::move(kernels)},     {"block", options.block},
          {"selected", selection(info, block)}};
}

Exit run(const Options& options) {
  const auto block = parse_block("info", options.block);
  if (!block.ok()) return fail(block.status());
  const BackendInfo info = backend_info();
  const json all = to_json(info, options, *block);
  if (options.as_json) {
    print(all);
    return kOk;
  }
  print_table({{"version", info.version},
               {"cpu", info.cpu},
               {"cpu features", joined(info.cpu_features)},
               {"cuda", info.cuda_built ? "built in" : "not in this build"},
               {"cuda devices", joined(info.cuda_devices)},
               {"RAREFY_FORCE_IMPL", info.forced_impl.empty() ? "not set" : info.forced_impl}});
  std::printf("\nIn use for %s blocks:\n", options.block.c_str());
  std::vector<std::vector<std::string>> rows{{"OP", "DEVICE", "DTYPE", "KERNEL"}};
  for (const json& row : all["selected"]) {
    rows.push_back(
        {row["op"], row["device"], row["dtype"], row[row["kernel"].is_null() ? "reason" : "kernel"]});
  }
  print_table(rows);
  return kOk;
}

}  // namespace

void add_info(CLI::App& app, Exit& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "What this build and machine can run, and what is in use");
  command->add_option("--block", options->block, "Block shape to choose kernels for")->capture_default_str();
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit] { exit = run(*options); });
}

}  // namespace rarefy::cli
