// Times linear of scaled int8 values, x rounded in the call, on weights packed ahead, beside the same blocks
// in bf16 and the roof of rarefy_peak: `rarefy_int8_bench [threads] [seconds a case]`, one CSV row a case.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "rarefy/rarefy.h"

namespace {

using namespace rarefy;

struct Case {
  std::int64_t tokens, rows, cols, block_rows, block_cols;
  double density;
};

// The best of many calls, in seconds; both take turns, as the machine's clock moves. One thread's are those
// of the processor, which others may use in between.
std::pair<double, double> best_of(auto first, auto second, int threads, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto now = [&] {
    timespec time{};
    ::clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const auto timed = [&](auto& call) {
    const double start = now();
    call();
    return now() - start;
  };
  std::pair best(1e9, 1e9);
  for (const auto end = Clock::now() + std::chrono::duration<double>(seconds); Clock::now() < end;) {
    best.first = std::min(best.first, timed(first));
    best.second = std::min(best.second, timed(second));
  }
  return best;
}

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// A weight with what its kernel derives, and the call.
struct Layer {
  BsrView view;
  Problem problem;
  std::vector<std::byte> prepared, packed;

  void derive() {
    const auto sizes = derived_sizes(problem);
    must(sizes.status());
    if (sizes->key == 0) return;
    prepared.resize(static_cast<std::size_t>(sizes->prepared) + 64);
    packed.resize(static_cast<std::size_t>(sizes->packed) + 64);
    const auto aligned = [](std::vector<std::byte>& bytes) {
      return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(bytes.data()) + 63) / 64 * 64);
    };
    must(prepare(problem, view.plan, aligned(prepared)));
    must(pack(problem, view, aligned(prepared), aligned(packed)));
    view.derived = {sizes->key, aligned(prepared), aligned(packed), sizes->prepared, sizes->packed};
  }
};

void run(const Case& c, Context context, int threads, double seconds) {
  std::mt19937 random(1);
  std::bernoulli_distribution stored(c.density);
  const BsrShape grid{c.rows, c.cols, c.block_rows, c.block_cols, 0};
  std::vector<std::int32_t> crow{0}, col;
  for (std::int64_t i = 0; i < grid.row_count(); ++i) {
    for (std::int64_t j = 0; j < grid.col_count(); ++j) {
      if (stored(random)) col.push_back(static_cast<std::int32_t>(j));
    }
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  BsrShape shape = grid;
  shape.nnzb = static_cast<std::int64_t>(col.size());
  const Pattern pattern = *Pattern::create(shape, crow, col);
  const auto count = static_cast<std::size_t>(shape.value_count());
  std::vector<std::int8_t> bytes(count);
  std::vector<bfloat16> halves(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
    halves[i] = to_bfloat16(static_cast<float>(bytes[i]));
  }
  const std::vector<float> scales(static_cast<std::size_t>(c.rows), 0.01F);
  std::vector<float> x(static_cast<std::size_t>(c.tokens * c.cols)),
      y(static_cast<std::size_t>(c.tokens * c.rows));
  std::normal_distribution<float> normal;
  for (float& number : x) number = normal(random);
  std::vector<bfloat16> x16(x.size()), y16(y.size());
  std::transform(x.begin(), x.end(), x16.begin(), [](float number) { return to_bfloat16(number); });

  Layer int8{{pattern.view(), bytes.data(), DType::i8},
             make_problem(Op::linear, shape, c.tokens, DType::f32),
             {},
             {}};
  int8.view.scaling = int8.problem.weight.scaling = Scaling::dynamic;
  int8.view.scales = scales.data();
  int8.problem.weight.dtype = DType::i8;
  int8.problem.threads = threads;
  int8.derive();
  Layer bf16{{pattern.view(), halves.data(), DType::bf16},
             make_problem(Op::linear, shape, c.tokens, DType::bf16),
             {},
             {}};
  bf16.problem.threads = threads;
  bf16.derive();
  std::vector<std::byte> memory(256 << 20);
  context.workspace = {memory.data(), static_cast<std::int64_t>(memory.size())};
  const auto [a, b] = best_of(
      [&] {
        must(linear({x.data(), DType::f32, c.tokens, c.cols, c.cols}, int8.view, nullptr, Activation::none,
                    {y.data(), DType::f32, c.tokens, c.rows, c.rows}, context));
      },
      [&] {
        must(linear({x16.data(), DType::bf16, c.tokens, c.cols, c.cols}, bf16.view, nullptr, Activation::none,
                    {y16.data(), DType::bf16, c.tokens, c.rows, c.rows}, context));
      },
      threads, seconds);
  const double useful = 2e-9 * static_cast<double>(c.tokens) * static_cast<double>(count);
  std::printf("%lld,%lld,%lld,%lldx%lld,%g,%d,%.4f,%.1f,%.4f,%.1f\n", static_cast<long long>(c.tokens),
              static_cast<long long>(c.rows), static_cast<long long>(c.cols),
              static_cast<long long>(c.block_rows), static_cast<long long>(c.block_cols), c.density, threads,
              a * 1e3, useful / a, b * 1e3, useful / b);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.3;
  if (threads < 1 || !(seconds > 0)) {
    std::fprintf(stderr, "usage: rarefy_int8_bench [threads] [seconds a case]\n");
    return 2;
  }
  ThreadPool pool(threads);
  const Context here{threads == 1 ? Executor{} : pool.executor()};
  std::printf("M,N,K,block,density,threads,int8_ms,int8_gops,bf16_ms,bf16_gflops\n");
  for (const auto& [rows, cols] :
       {std::pair<std::int64_t, std::int64_t>{3072, 768}, {768, 3072}, {4096, 4096}}) {
    for (const double density : {0.5, 0.25, 0.1}) {
      for (const auto& [r, c] :
           {std::pair<std::int64_t, std::int64_t>{32, 1}, {64, 1}, {16, 16}, {32, 32}, {64, 64}}) {
        run({512, rows, cols, r, c, density}, here, threads, seconds);
      }
    }
  }
  run({16, 3072, 768, 32, 1, 0.5}, here, threads, seconds);
  return 0;
}
