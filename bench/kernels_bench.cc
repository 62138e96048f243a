// Micro-benchmarks of the public API with Google Benchmark: each product under each CPU
// implementation, and what happens around them (plans, conversion, files). GFLOP/s are useful ones.
//   build/…/bench/rarefy_kernels_bench --benchmark_filter=linear/avx512
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

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

// One product under one implementation, on one thread.
void run_product(benchmark::State& state, Op op, const std::string& impl, BlockShape block) {
  ::setenv("RAREFY_FORCE_IMPL", impl.c_str(), 1);
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
    }
    if (!status.ok()) return state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
  const double flop = 2.0 * kTokens * static_cast<double>(w.plan.shape.value_count());
  state.counters["FLOP"] = benchmark::Counter(flop, benchmark::Counter::kIsIterationInvariantRate);
  ::unsetenv("RAREFY_FORCE_IMPL");
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

void add_products() {
  std::set<std::string> impls;
  for (const KernelInfo& kernel : backend_info().kernels) {
    if (kernel.device == Device::cpu) impls.insert(kernel.impl);
  }
  for (const Op op : kAllOps) {
    for (const std::string& impl : impls) {
      for (const BlockShape block : {BlockShape{1, 1}, {4, 1}, {1, 16}, {16, 16}}) {
        const std::string shape = std::to_string(block.rows) + 'x' + std::to_string(block.cols);
        const std::string title = std::string(name(op)) + '/' + impl + '/' + shape;
        benchmark::RegisterBenchmark(title.c_str(),
                                     [=](benchmark::State& state) { run_product(state, op, impl, block); });
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
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
