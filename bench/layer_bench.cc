// Times one layer on weights packed ahead, in a process of its own, so that two builds can take turns:
//   rarefy_layer_bench f32|bf16|bf16x|int8 linear|grad_input|grad_weight M N K RxC density [seconds]
//   [threads]
// prints the best call in ms, useful GFLOP/s, and the kernel. bf16x is f32 inputs that may be rounded to the
// values' bf16, int8 f32 inputs rounded token by token. One
// thread's time is the processor's, which others may use in between. RAREFY_FORCE_IMPL picks another kernel.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string_view>
#include <vector>

#include "rarefy/rarefy.h"

namespace {

using namespace rarefy;

void must(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

// Memory that begins with a cache line, as tensors do: Y's vectors would be cut in two else.
class Aligned {
 public:
  explicit Aligned(std::size_t bytes, bool zero = true)
      : data_(::operator new (bytes + 64, std::align_val_t{64})) {
    if (zero) std::memset(data_, 0, bytes);
  }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { ::operator delete (data_, std::align_val_t{64}); }
  void* data() const { return data_; }

 private:
  void* data_;
};

void fill(void* data, DType dtype, std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < count; ++i) {
    if (dtype == DType::f32) static_cast<float*>(data)[i] = normal(random);
    if (dtype == DType::bf16) static_cast<bfloat16*>(data)[i] = to_bfloat16(normal(random));
    if (dtype == DType::i8)
      static_cast<std::int8_t*>(data)[i] = static_cast<std::int8_t>(random() % 255 - 127);
  }
}

double now(int threads) {
  timespec time{};
  ::clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

int main(int argc, char** argv) {
  long rows = 0, cols = 0;
  const std::string_view type = argc > 1 ? argv[1] : "", product = argc > 2 ? argv[2] : "";
  const std::int64_t tokens = argc > 3 ? std::atol(argv[3]) : 0, n = argc > 4 ? std::atol(argv[4]) : 0,
                     k = argc > 5 ? std::atol(argv[5]) : 0;
  const double density = argc > 7 ? std::atof(argv[7]) : 0, seconds = argc > 8 ? std::atof(argv[8]) : 0.2;
  const int threads = argc > 9 ? std::atoi(argv[9]) : 1;
  const bool known = (type == "f32" || type == "bf16" || type == "bf16x" || type == "int8") &&
                     (product == "linear" || product == "grad_input" || product == "grad_weight");
  if (argc < 8 || !known || tokens < 1 || n < 1 || k < 1 || threads < 1 ||
      std::sscanf(argv[6], "%ldx%ld", &rows, &cols) != 2) {
    std::fprintf(
        stderr,
        "usage: rarefy_layer_bench f32|bf16|bf16x|int8 linear|grad_input|grad_weight M N K RxC density "
        "[seconds] [threads]\n");
    return 2;
  }
  const Op op = product == "linear" ? Op::linear : product == "grad_input" ? Op::grad_input : Op::grad_weight;
  const DType x_dtype = type == "bf16" ? DType::bf16 : DType::f32;
  const DType dtype = type == "int8" ? DType::i8 : type == "bf16x" ? DType::bf16 : x_dtype;

  std::mt19937 random(1);
  std::bernoulli_distribution stored(density);
  BsrShape shape{n, k, rows, cols, 0};
  std::vector<std::int32_t> crow{0}, col;
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    for (std::int64_t j = 0; j < shape.col_count(); ++j) {
      if (stored(random)) col.push_back(static_cast<std::int32_t>(j));
    }
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  shape.nnzb = static_cast<std::int64_t>(col.size());
  const auto pattern = Pattern::create(shape, crow, col);
  must(pattern.status());
  const std::int64_t count = shape.value_count();
  const Aligned values(static_cast<std::size_t>(count) * 4), gradient(static_cast<std::size_t>(count) * 4);
  const Aligned x(static_cast<std::size_t>(tokens * k) * 4), y(static_cast<std::size_t>(tokens * n) * 4);
  const Aligned bias(static_cast<std::size_t>(n) * 4), scales(static_cast<std::size_t>(n) * 4);
  fill(values.data(), dtype, count, random);
  fill(x.data(), x_dtype, tokens * k, random);
  fill(y.data(), x_dtype, tokens * n, random);
  fill(bias.data(), x_dtype, n, random);
  std::fill_n(static_cast<float*>(scales.data()), n, 0.01F);

  BsrView weight{pattern->view(), values.data(), dtype};
  Problem problem = make_problem(op, shape, tokens, x_dtype);
  problem.weight.dtype = dtype;
  problem.threads = threads;
  weight.rounds_x = problem.weight.rounds_x = type == "bf16x";
  if (type == "int8") {
    weight.scaling = problem.weight.scaling = Scaling::dynamic;
    weight.scales = static_cast<const float*>(scales.data());
  }
  const auto sizes = derived_sizes(problem);
  must(sizes.status());
  const Aligned prepared(static_cast<std::size_t>(sizes->prepared)),
      packed(static_cast<std::size_t>(sizes->packed));
  if (op != Op::grad_weight && sizes->key != 0) {
    must(prepare(problem, weight.plan, prepared.data()));
    must(pack(problem, weight, prepared.data(), packed.data()));
    weight.derived = {sizes->key, prepared.data(), packed.data(), sizes->prepared, sizes->packed};
    problem.derived = sizes->key;
  }
  const Explanation explained = explain(problem);
  const Aligned memory(static_cast<std::size_t>(512) << 20, false);  // touched as far as it is used
  ThreadPool pool(threads);
  Context context{threads == 1 ? Executor{} : pool.executor()};
  context.workspace = {static_cast<std::byte*>(memory.data()), std::int64_t{512} << 20};
  const auto call = [&] {
    switch (op) {
      case Op::linear:
        return linear({x.data(), x_dtype, tokens, k, k}, weight, bias.data(), Activation::none,
                      {y.data(), x_dtype, tokens, n, n}, context);
      case Op::grad_input:
        return grad_input({y.data(), x_dtype, tokens, n, n}, weight, {x.data(), x_dtype, tokens, k, k},
                          context);
      default:
        return grad_weight({y.data(), x_dtype, tokens, n, n}, {x.data(), x_dtype, tokens, k, k}, weight.plan,
                           gradient.data(), x_dtype, context);
    }
  };
  must(call());
  double best = 1e9;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  do {
    const double start = now(threads);
    must(call());
    best = std::min(best, now(threads) - start);
  } while (std::chrono::steady_clock::now() < end);
  std::printf("%.4f %.1f %s\n", best * 1e3,
              2e-9 * static_cast<double>(tokens) * static_cast<double>(count) / best,
              explained.kernel.c_str());
}
