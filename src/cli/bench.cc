// rarefy bench: one product on random data, timed; median, spread and useful GFLOP/s.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cli/common.h"
#include "cli/problem.h"
#include "core/message.h"
#include "rarefy/backend.h"
#include "rarefy/executor.h"
#include "rarefy/version.h"

namespace rarefy::cli {

namespace {

using nlohmann::json;

constexpr std::string_view op = "bench";

struct Options {
  std::int64_t m = 512, n = 1024, k = 1024;
  std::string block = "16x16";
  double density = 0.5;
  std::string dtype = "f32";
  int threads = 0;
  std::string product = "linear";
  std::string impl;
  int repeats = 20;
  std::uint64_t seed = 0;
  bool as_json = false;
};

Status check(const Options& options, const BsrShape& shape) {
  constexpr std::int64_t kMost = std::int64_t{1} << 32;  // elements of any one matrix
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (options.m < 1 || options.n < 1 || options.k < 1 || options.m > kMost / std::max(options.n, options.k) ||
      options.n > kMost / options.k) {
    return invalid(op, cat("--m, --n, --k must be at least 1, and their products at most ", kMost),
                   cat(options.m, ", ", options.n, ", ", options.k));
  }
  if (!(options.density >= 0 && options.density <= 1)) {
    return invalid(op, "--density must be in [0, 1]", cat(options.density));
  }
  constexpr int kMostThreads = 1024;
  if (options.threads < 0 || options.threads > kMostThreads) {
    return invalid(op, cat("--threads must be in [0, ", kMostThreads, ']'), cat(options.threads));
  }
  constexpr int kMostRepeats = 1'000'000;  // each leaves a time in memory
  if (options.repeats < 1 || options.repeats > kMostRepeats) {
    return invalid(op, cat("--repeats must be in [1, ", kMostRepeats, ']'), cat(options.repeats));
  }
  return {};
}

Exit run(const Options& options) {
  const Op product = parse_op(options.product);
  const DType dtype = *parse_dtype(options.dtype);
  const auto block = parse_block(op, options.block);
  if (!block.ok()) return fail(block.status());
  const BsrShape shape{options.n, options.k, block->rows, block->cols, 0};
  if (Status status = check(options, shape); !status.ok()) return fail(status);
  if (!options.impl.empty()) {
    if (Status status = force_impl(options.impl); !status.ok()) return fail(status);
  }
  auto problem = random_problem(options.m, shape, options.density, dtype, options.seed);
  if (!problem.ok()) return fail(problem.status());
  ThreadPool pool(options.threads);
  Context context{pool.executor()};
  const Explanation chosen = explain(make_problem(product, problem->weight.pattern.shape(), options.m, dtype,
                                                  Device::cpu, context.executor.threads));
  if (chosen.kernel.empty())
    return fail(error(StatusCode::unsupported, op, "a kernel must fit", chosen.why_none));
  std::vector<std::byte> workspace(static_cast<std::size_t>(chosen.workspace) + 64);
  context.workspace = {workspace.data() + 64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64,
                       chosen.workspace};
  std::vector<double> seconds;
  constexpr int kWarmUp = 3;
  for (int i = 0; i < kWarmUp + options.repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    if (Status status = run_once(product, problem.value(), context); !status.ok()) return fail(status);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (i >= kWarmUp) seconds.push_back(elapsed.count());
  }
  std::sort(seconds.begin(), seconds.end());
  const std::size_t half = seconds.size() / 2;
  const double median = seconds.size() % 2 == 1 ? seconds[half] : (seconds[half - 1] + seconds[half]) / 2;
  const PlanView& plan = problem->weight.pattern.view();
  const double flop = 2.0 * static_cast<double>(options.m) * static_cast<double>(stored_elements(plan));
  const json all{{"op", options.product},
                 {"kernel", chosen.kernel},
                 {"config", chosen.config},
                 {"m", options.m},
                 {"n", options.n},
                 {"k", options.k},
                 {"block", options.block},
                 {"density", problem->weight.pattern.density()},
                 {"dtype", options.dtype},
                 {"threads", context.executor.threads},
                 {"repeats", options.repeats},
                 {"seed", options.seed},
                 {"median_ms", median * 1e3},
                 {"min_ms", seconds.front() * 1e3},
                 {"max_ms", seconds.back() * 1e3},
                 {"useful_gflops", flop / median * 1e-9},
                 {"cpu", backend_info().machine.cpu},
                 {"version", version()}};
  if (options.as_json) {
    print(all);
    return kOk;
  }
  std::printf("%s, %s (%s), M=%lld N=%lld K=%lld, block %s, density %.4f, %d threads, %s\n",
              options.product.c_str(), chosen.kernel.c_str(), chosen.config.c_str(),
              static_cast<long long>(options.m), static_cast<long long>(options.n),
              static_cast<long long>(options.k), options.block.c_str(), problem->weight.pattern.density(),
              context.executor.threads, options.dtype.c_str());
  std::printf("median %.4f ms (%.4f–%.4f, %d runs), %.1f useful GFLOP/s\n", median * 1e3,
              seconds.front() * 1e3, seconds.back() * 1e3, options.repeats, flop / median * 1e-9);
  return kOk;
}

}  // namespace

void add_bench(CLI::App& app, Exit& exit) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("bench", "Time one product of a random block-sparse layer on the CPU");
  const auto add = [&](const char* flag, auto& value, const char* text) {
    return command->add_option(flag, value, text)->capture_default_str();
  };
  add("--m", options->m, "Rows of X");
  add("--n", options->n, "out_features");
  add("--k", options->k, "in_features");
  add("--block", options->block, "Block shape, ROWSxCOLS");
  add("--density", options->density, "Stored blocks / all blocks, in [0, 1]");
  add("--dtype", options->dtype, "f64, f32, bf16, f16 or i8")->check(CLI::IsMember(dtype_names()));
  add("--threads", options->threads, "Threads; 0: one per hardware thread");
  add("--op", options->product, "linear, grad_input or grad_weight")
      ->check(CLI::IsMember(op_names(kProducts)));
  command->add_option("--impl", options->impl,
                      "Implementation, as in RAREFY_FORCE_IMPL; default: the first that fits");
  add("--repeats", options->repeats, "Timed runs, after 3 to warm up");
  add("--seed", options->seed, "Of the random data and pattern");
  command->add_flag("--json", options->as_json, "Print JSON");
  command->callback([options, &exit] { exit = run(*options); });
}

}  // namespace rarefy::cli
