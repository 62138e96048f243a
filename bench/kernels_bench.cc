// Micro-benchmarks with Google Benchmark on one thread: each product under each CPU family, each
// configuration that a kernel could have chosen, kernels alone (X packed, Y not stored), and what happens
// around them (plans, conversion, files). GFLOP/s are useful ones.
//   build/…/bench/rarefy_kernels_bench --benchmark_filter=linear/avx512
//   build/…/bench/rarefy_kernels_bench --benchmark_filter=config/avx512_linear/4x1
//   build/…/bench/rarefy_kernels_bench --benchmark_filter=alone/gather
#include <benchmark/benchmark.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/registry.h"
#include "cpu/drivers.h"
#include "rarefy/rarefy.h"

namespace {

using namespace rarefy;

constexpr std::int64_t kTokens = 256, kOut = 768, kIn = 768;

// A random layer with half of its blocks, and its inputs.
struct Layer {
  std::vector<float> x, y, dense;
  BsrMatrix weight;

  static Layer make(BlockShape block, double density) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::int64_t count) {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& v : values) v = normal(random);
      return values;
    };
    std::vector<float> dense = fill(kOut * kIn);
    const MatrixView view{dense.data(), DType::f32, kOut, kIn, kIn};
    const auto mask = block_mask_by_norm(view, block, density);
    auto weight = dense_to_bsr(view, block, mask.value());
    return {fill(kTokens * kIn), fill(kTokens * kOut), std::move(dense), std::move(weight).value()};
  }
};

void count_flop(benchmark::State& state, const BsrShape& shape) {
  const double flop = 2.0 * kTokens * static_cast<double>(shape.value_count());
  state.counters["FLOP"] = benchmark::Counter(flop, benchmark::Counter::kIsIterationInvariantRate);
}

// One product under one family.
void run_product(benchmark::State& state, Op op, const std::string& family, BlockShape block) {
  if (const Status status = force_impl("cpu:" + family); !status.ok()) {
    return state.SkipWithError(status.message().c_str());
  }
  Layer layer = Layer::make(block, 0.5);
  const BsrView w = layer.weight.view();
  const MatrixView x{layer.x.data(), DType::f32, kTokens, kIn, kIn};
  const MatrixView dy{layer.y.data(), DType::f32, kTokens, kOut, kOut};
  std::vector<float> out(static_cast<std::size_t>(kTokens * kOut + w.plan.shape.value_count()));
  const MutableMatrixView y{out.data(), DType::f32, kTokens, kOut, kOut};
  const MutableMatrixView dx{out.data(), DType::f32, kTokens, kIn, kIn};
  for (auto _ : state) {
    Status status;
    switch (op) {
      case Op::linear: status = linear(x, w, nullptr, Activation::none, y); break;
      case Op::grad_input: status = grad_input(dy, w, dx); break;
      case Op::grad_weight: status = grad_weight(dy, x, w.plan, out.data(), DType::f32); break;
      case Op::feed_forward: break;  // not asked for
    }
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
  count_flop(state, w.plan.shape);
  if (const Status status = force_impl(""); !status.ok()) state.SkipWithError(status.message().c_str());
}

// `linear` under one kernel and one of its configurations.
void run_config(benchmark::State& state, const Kernel& kernel, const Config& config, BlockShape block) {
  Layer layer = Layer::make(block, 0.5);
  const BsrView w = layer.weight.view();
  std::vector<float> y(static_cast<std::size_t>(kTokens * kOut));
  Call call;
  call.problem = make_problem(Op::linear, w.plan.shape, kTokens, DType::f32);
  call.config = config;
  call.x = {layer.x.data(), DType::f32, kTokens, kIn, kIn};
  call.plan = w.plan;
  call.values = w.values;
  call.out = {y.data(), DType::f32, kTokens, kOut, kOut};
  std::vector<float> workspace(static_cast<std::size_t>(kernel.workspace(call.problem, config) / 4 + 16));
  call.workspace = workspace.data() + 16 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64 / 4;
  for (auto _ : state) {
    if (Status status = kernel.run(call); !status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
  count_flop(state, w.plan.shape);
}

// The gather kernel on one packed panel, its sums left in the panel: what packing and storing do not touch.
void run_gather(benchmark::State& state, const cpu::Kernels& kernels, BlockShape block, int vectors) {
  Layer layer = Layer::make(block, 0.5);
  const BsrView w = layer.weight.view();
  const std::int64_t lanes = std::int64_t{vectors} * kernels.width;
  const BsrShape& shape = w.plan.shape;
  std::vector<float> memory(static_cast<std::size_t>((kIn + 2 * kOut) * lanes + kOut + 16));
  float* x = memory.data() + 16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64 / 4;
  float* y = x + kIn * lanes;
  const std::vector<float> start(static_cast<std::size_t>(kOut));
  std::copy_n(layer.x.data(), std::min<std::int64_t>(kIn * lanes, std::ssize(layer.x)), x);
  Call call;
  call.problem = make_problem(Op::linear, shape, lanes, DType::f32);
  call.plan = w.plan;
  call.values = w.values;
  const cpu::GatherTask task{cpu::operand(call, w.plan.col, nullptr, false),
                             w.plan.crow,
                             w.plan.crow + 1,
                             0,
                             static_cast<std::int32_t>(shape.row_count()),
                             x,
                             0,
                             y,
                             start.data(),
                             vectors,
                             nullptr,
                             cpu::part_entries(static_cast<std::int32_t>(shape.block_cols)),
                             w.plan.crow,
                             y + kOut * lanes,
                             0};
  for (auto _ : state) {
    kernels.gather(task);
    benchmark::ClobberMemory();
  }
  const double flop = 2.0 * static_cast<double>(lanes * shape.value_count());
  state.counters["FLOP"] = benchmark::Counter(flop, benchmark::Counter::kIsIterationInvariantRate);
}

void bench_plan(benchmark::State& state) {
  const Layer layer = Layer::make({4, 1}, 0.5);
  const Pattern& pattern = layer.weight.pattern;
  std::vector<std::int32_t> plan(static_cast<std::size_t>(plan_size(pattern.shape())));
  for (auto _ : state) {
    const Status status =
        build_plan("bench", pattern.shape(), pattern.crow_indices(), pattern.col_indices(), plan);
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
}

void bench_dense_to_bsr(benchmark::State& state) {
  const Layer layer = Layer::make({16, 16}, 0.5);
  const MatrixView dense{layer.dense.data(), DType::f32, kOut, kIn, kIn};
  for (auto _ : state) {
    auto weight = dense_to_bsr(dense, {16, 16});
    if (!weight.ok()) return state.SkipWithError(weight.status().message().c_str());
    benchmark::DoNotOptimize(weight);
  }
}

void bench_parse_file(benchmark::State& state) {
  BsrFile file;
  file.weights.emplace("fc.weight", Layer::make({4, 1}, 0.5).weight);
  const auto bytes = serialize_bsr_file(file);
  if (!bytes.ok()) return state.SkipWithError(bytes.status().message().c_str());
  for (auto _ : state) {
    auto parsed = parse_bsr_file(*bytes);
    if (!parsed.ok()) return state.SkipWithError(parsed.status().message().c_str());
    benchmark::DoNotOptimize(parsed);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes->size()));
}

std::string text_of(BlockShape block) {
  return std::to_string(block.rows) + 'x' + std::to_string(block.cols);
}

constexpr BlockShape kBlocks[] = {{1, 1}, {4, 1}, {1, 16}, {16, 16}};

void add_products() {
  for (const Op op : kProducts) {
    const Problem problem = make_problem(op, {kOut, kIn, 16, 16, 1152}, kTokens, DType::f32);
    for (const Candidate& candidate : explain(problem).candidates) {
      if (!candidate.why_not.empty()) continue;
      const std::string family = candidate.kernel.family;
      for (const BlockShape block : kBlocks) {
        const std::string title = std::string(name(op)) + '/' + family + '/' + text_of(block);
        benchmark::RegisterBenchmark(title.c_str(),
                                     [=](benchmark::State& state) { run_product(state, op, family, block); });
      }
    }
  }
}

void add_configs() {
  for (const Kernel& kernel : registry()) {
    if (kernel.op != Op::linear || kernel.device != Device::cpu || kernel.candidates == nullptr) continue;
    for (const BlockShape block : kBlocks) {
      const BsrShape shape{kOut, kIn, block.rows, block.cols, kOut * kIn / block.rows / block.cols / 2};
      const Problem problem = make_problem(Op::linear, shape, kTokens, DType::f32);
      if (!kernel.supports(problem, cpu_machine()).empty()) continue;
      for (const Config& config : kernel.candidates(problem, cpu_machine())) {
        const std::string title =
            "config/" + std::string(kernel.name) + '/' + text_of(block) + '/' + to_string(kernel, config);
        benchmark::RegisterBenchmark(title.c_str(), [&kernel, config, block](benchmark::State& state) {
          run_config(state, kernel, config, block);
        });
      }
    }
  }
}

void add_alone() {
  std::vector<const cpu::Kernels*> tables{&cpu::kScalar};
#if defined(__x86_64__)
  if (cpu_machine().has("avx2")) tables.push_back(&cpu::kAvx2);
  if (cpu_machine().has("avx512")) tables.push_back(&cpu::kAvx512);
#endif
  for (const cpu::Kernels* kernels : tables) {
    for (const BlockShape block : {BlockShape{1, 1}, {4, 1}, {4, 4}, {16, 1}, {16, 16}, {32, 32}}) {
      for (int vectors = 1; vectors <= kernels->max_vectors; ++vectors) {
        const std::string title = std::string("alone/gather/") + kernels->family + '/' + text_of(block) +
                                  "/vectors=" + std::to_string(vectors);
        benchmark::RegisterBenchmark(
            title.c_str(), [=](benchmark::State& state) { run_gather(state, *kernels, block, vectors); });
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::RegisterBenchmark("build_plan/4x1", bench_plan);
  benchmark::RegisterBenchmark("dense_to_bsr/16x16", bench_dense_to_bsr);
  benchmark::RegisterBenchmark("parse_bsr_file/4x1", bench_parse_file);
  add_products();
  add_configs();
  add_alone();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
