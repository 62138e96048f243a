// rarefy info: what this build and machine can run, and which kernel a problem gets and why.
#include <cmath>
#include <cstdio>

#include "cli/common.h"
#include "core/message.h"
#include "core/registry.h"
#include "io/info_json.h"
#include "rarefy/backend.h"

namespace rarefy::cli {

namespace {

constexpr std::string_view op = "info";

struct Options {
  std::string explain;  // a product, or empty
  std::string device = "cpu";
  std::int64_t m = 512, n = 1024, k = 1024;
  std::string block = "16x16";
  double density = 0.5;
  std::string dtype = "f32", values;
  int threads = 1;
  bool as_json = false;
};

// The problem of --explain and the options beside it.
Result<Problem> asked(const Options& options, BlockShape block) {
  BsrShape shape{options.n, options.k, block.rows, block.cols, 0};
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (!(options.density >= 0 && options.density <= 1)) {
    return invalid(op, "--density must be in [0, 1]", cat(options.density));
  }
  shape.nnzb = std::llround(options.density * static_cast<double>(shape.row_count() * shape.col_count()));
  const Device device = options.device == "cuda" ? Device::cuda : Device::cpu;
  Problem problem = make_problem(parse_op(options.explain), shape, options.m, *parse_dtype(options.dtype),
                                 device, options.threads);
  if (!options.values.empty()) problem.weight.dtype = *parse_dtype(options.values);
  if (Status status = check_problem(op, problem); !status.ok()) return status;
  return problem;
}

// One row for each product, device and dtype: the kernel that runs it, or why none does.
Json selection(const BackendInfo& info, BlockShape block, std::int64_t tokens) {
  const BsrShape shape{block.rows, block.cols, block.rows, block.cols, 1};
  Json rows = Json::array();
  for (const Device device : {Device::cpu, Device::cuda}) {
    if (device == Device::cuda && info.cuda_devices.empty()) continue;
    for (const Op product : kProducts) {
      for (const DType dtype : kAllDTypes) {
        rows.push_back(summary(explain(make_problem(product, shape, tokens, dtype, device)), info.forced));
      }
    }
  }
  return rows;
}

Json all_of(const BackendInfo& info, const Options& options, BlockShape block) {
  Json all = to_json(info);
  Json& kernels = all["kernels"] = Json::array();
  for (const KernelInfo& kernel : info.kernels) {
    kernels.push_back({{"op", name(kernel.op)},
                       {"device", name(kernel.device)},
                       {"family", kernel.family},
                       {"name", kernel.name}});
  }
  all["block"] = options.block;
  all["tokens"] = options.m;
  all["selected"] = selection(info, block, options.m);
  return all;
}

std::string joined(const Json& texts) {
  std::string out;
  for (const std::string text : texts) out += (out.empty() ? "" : ", ") + text;
  return out.empty() ? "none" : out;
}

Exit run(const Options& options) {
  const auto block = parse_block(op, options.block);
  if (!block.ok()) return fail(block.status());
  if (!options.explain.empty()) {
    const auto problem = asked(options, *block);
    if (!problem.ok()) return fail(problem.status());
    const Explanation e = explain(*problem);
    if (options.as_json) {
      print(to_json(e));
    } else {
      std::printf("%s", to_string(e).c_str());
    }
    return kOk;
  }
  if (options.m < 1) return fail(invalid(op, "--m must be at least 1", cat(options.m)));
  const BackendInfo info = backend_info();
  const Json all = all_of(info, options, *block);
  if (options.as_json) {
    print(all);
    return kOk;
  }
  print_table({{"version", info.version},
               {"machine", to_string(info.machine)},
               {"cuda", info.cuda_built ? "built in" : "not in this build"},
               {"cuda devices", joined(all["cuda_devices"])},
               {"forced", info.forced.empty() ? "nothing" : info.forced}});
  std::printf("\nIn use for %s blocks and %lld tokens (--explain says why):\n", options.block.c_str(),
              static_cast<long long>(options.m));
  std::vector<std::vector<std::string>> rows{{"OP", "DEVICE", "DTYPE", "KERNEL"}};
  for (const Json& row : all["selected"]) {
    rows.push_back({row["op"], row["device"], row["dtype"], row[row["kernel"].is_null() ? "why" : "kernel"]});
  }
  print_table(rows);
  return kOk;
}

}  // namespace

void add_info(CLI::App& app, Exit& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("info", "What this build and machine can run, and what is in use");
  const auto add = [&](const char* flag, auto& value, const char* text) {
    return command->add_option(flag, value, text)->capture_default_str();
  };
  command->add_option("--explain", options->explain, "Every kernel for one problem: chosen, or why not")
      ->check(CLI::IsMember(op_names()));
  add("--block", options->block, "Block shape, ROWSxCOLS");
  add("--m", options->m, "Rows of X");
  add("--n", options->n, "With --explain: out_features");
  add("--k", options->k, "With --explain: in_features");
  add("--density", options->density, "With --explain: stored blocks / all blocks");
  add("--dtype", options->dtype, "With --explain: of X")->check(CLI::IsMember(dtype_names()));
  add("--values", options->values, "With --explain: dtype of the stored values; default: that of X")
      ->check(CLI::IsMember(dtype_names()));
  add("--device", options->device, "With --explain: cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  add("--threads", options->threads, "With --explain: threads of the call");
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit] { exit = run(*options); });
}

}  // namespace rarefy::cli
