// Checks and times the strip kernel (linear and grad_input, blocks of 64 and more).
#include <chrono>
#include "cuda/sm90/strips.h"

#include "cuda/sm90/tensor_map.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

const sm90::Machine kMachine{132, 227 * 1024};

template <class T>
StripProblem problem_of(const Setup<T>& s) {
  StripProblem p;
  p.transposed = s.c.transposed;
  p.dtype = kDType<T>;
  p.tokens = s.c.m;
  p.rows = s.c.n;
  p.cols = s.c.k;
  p.block_rows = s.c.r;
  p.block_cols = s.c.c;
  p.blocks = s.pattern.blocks();
  p.x_stride = s.x_stride();
  p.y_stride = s.y_stride();
  p.activation = s.c.activation;
  return p;
}

// A pattern's index, what is prepared of it, and a counter, on the device: for any number of tokens.
struct Prepared {
  Buffer<std::int32_t> offsets, others, entries, words;
  bool transposed;
  Prepared(const StripProblem& problem, const Pattern& p)
      : offsets(to_device(problem.transposed ? p.ccol : p.crow)),
        others(to_device(problem.transposed ? p.row : p.col)),
        entries(to_device(p.perm)),
        words(static_cast<std::size_t>(StripPlan(problem, kMachine.sms).words)),
        transposed(problem.transposed) {
    make(problem, nullptr);
    CHECK(cudaDeviceSynchronize());
  }
  void make(const StripProblem& problem, cudaStream_t stream) const {
    CHECK(prepare(problem, kMachine.sms,
                  {offsets.data(), others.data(), transposed ? entries.data() : nullptr}, words.data(),
                  stream));
  }
};

template <class T>
void run(const Setup<T>& s, const Prepared& prepared, const StripProblem& problem, const StripConfig& config,
         cudaStream_t stream) {
  CHECK(launch(problem, config, kMachine.sms,
               {s.x.data(), s.values.data(), s.bias_or_null(), s.y.data(), prepared.words.data()}, stream));
}

// Every configuration of one case; false if one is wrong.
template <class T>
bool check(const Case& c, bool integers, unsigned seed) {
  Setup<T> s(c, integers, seed);
  const StripProblem problem = problem_of(s);
  if (const std::string reason = unsupported(problem); !reason.empty()) {
    std::printf("%s: %s\n", describe(c).c_str(), reason.c_str());
    return false;
  }
  const Prepared prepared(problem, s.pattern);
  const Expected expected(s, integers, 300);
  bool good = true;
  for (const StripCandidate& candidate : strip_candidates(problem, kMachine)) {
    if (!candidate.reason.empty() || !chosen_by_env(candidate.config.text())) continue;
    good &= expected.compare(s, candidate.config.text(),
                             [&] { run(s, prepared, problem, candidate.config, nullptr); });
  }
  return good;
}

}  // namespace

bool check_strips(bool small) {
  std::vector<Case> cases;
  for (const bool transposed : {false, true}) {
    for (const auto& [r, c] : {std::pair{64, 64}, {128, 128}, {64, 128}, {128, 64}, {192, 64}}) {
      cases.push_back({transposed, 300, 512, 384, r, c, .4});
    }
    cases.push_back({transposed, 1, 512, 512, 64, 64, .5, Kind::random, Activation::none, true});
    cases.push_back(
        {transposed, 777, 1000, 840, 64, 64, .3, Kind::rows_half_empty, Activation::none, true, 8});
    cases.push_back({transposed, 513, 320, 640, 64, 64, 1, Kind::random, Activation::none, true});
    cases.push_back({transposed, 257, 320, 640, 64, 64, 0, Kind::random, Activation::none, true});
    cases.push_back(
        {transposed, 1025, 1024, 2048, 64, 64, .05, Kind::one_dense_row, Activation::none, false, 16});
    if (!small) cases.push_back({transposed, 4096, 4096, 4096, 128, 128, .1});
    if (!small) cases.push_back({transposed, 8192, 4096, 4096, 64, 64, .25});
  }
  for (const Activation a :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    cases.push_back({false, 333, 512, 512, 64, 64, .3, Kind::random, a, true});
  }
  bool good = true;
  unsigned seed = 1;
  for (const Case& c : cases) {
    good &= check<__nv_bfloat16>(c, false, seed++);
    good &= check<__nv_bfloat16>(c, true, seed++);
    good &= check<__half>(c, false, seed++);
  }
  std::printf("strips: %zu cases, every configuration, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

void time_strips(Report& report, Dense& dense, bool every_config) {
  struct Shape {
    std::int64_t m, n, k;
    bool transposed;
  };
  for (const Shape& shape : {Shape{8192, 4096, 4096, false},
                             {8192, 4096, 4096, true},
                             {8192, 14336, 4096, false},
                             {8192, 4096, 14336, false},
                             {4096, 3072, 768, false},
                             {4096, 768, 3072, false},
                             {2048, 11008, 4096, false},
                             {512, 4096, 4096, false}}) {
    if (const char* only = std::getenv("TOKENS"); only != nullptr && std::atoll(only) != shape.m) continue;
    const bool main_shape = shape.m == 8192 && shape.n == 4096 && shape.k == 4096;
    // dX = dY W is a product of (M, N) and (N, K).
    const Times t_dense =
        shape.transposed ? dense.linear(shape.m, shape.k, shape.n) : dense.linear(shape.m, shape.n, shape.k);
    struct Which {
      std::int64_t b;
      double density;
      Kind kind = Kind::random;
    };
    std::vector<Which> all;
    for (const std::int64_t b : {128, 64}) {
      for (const double density : {.5, .25, .1}) all.push_back({b, density});
      if (!main_shape || shape.transposed) continue;
      for (const double density : {.25, .1}) {  // skewed
        all.push_back({b, density, Kind::one_dense_row});
        all.push_back({b, density, Kind::rows_half_empty});
      }
    }
    for (const auto& [b, density, kind] : all) {
      const char* name = kind == Kind::random          ? "strips"
                         : kind == Kind::one_dense_row ? "strips (one dense row)"
                                                       : "strips (half of the rows empty)";
      Case c{shape.transposed, shape.m, shape.n, shape.k, b, b, density, kind};
      Setup<__nv_bfloat16> s(c, false, 7);
      const StripProblem problem = problem_of(s);
      const Prepared prepared(problem, s.pattern);
      const double prepare_us =
          time_graph([&](cudaStream_t stream) { prepared.make(problem, stream); }, 5).median;
      const std::string chosen = configure(problem, kMachine).text();
      for (const StripCandidate& candidate : strip_candidates(problem, kMachine)) {
        const bool is_chosen = candidate.config.text() == chosen;
        if (!candidate.reason.empty() || !chosen_by_env(candidate.config.text()) ||
            !(is_chosen || (every_config && (main_shape || shape.m <= 512) && !shape.transposed)))
          continue;
        if (main_shape) {
          const Expected expected(s, false, 16);
          expected.compare(s, candidate.config.text(),
                           [&] { run(s, prepared, problem, candidate.config, nullptr); });
        }
        const Times t =
            time_graph([&](cudaStream_t stream) { run(s, prepared, problem, candidate.config, stream); });
        report.add({shape.transposed ? "grad_input" : "linear", shape.m, shape.n, shape.k, block_text(c),
                    density, name, candidate.config.text() + (is_chosen ? " *" : ""), t, t_dense,
                    candidate.microseconds, prepare_us});
      }
    }
  }
}

namespace {
__global__ void empty_kernel() {}
}  // namespace

// What the host needs to queue a call, µs: a tensor map, an empty kernel, a strip product.
void time_host() {
  using Clock = std::chrono::steady_clock;
  const auto each = [](const char* what, int calls, auto&& call) {
    double best = 1e9;
    for (int round = 0; round < 20; ++round) {
      CHECK(cudaDeviceSynchronize());
      const auto begin = Clock::now();
      for (int i = 0; i < calls; ++i) call();
      best = std::min(best, std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / calls);
    }
    CHECK(cudaDeviceSynchronize());
    std::printf("host: %s %.2f us\n", what, best);
  };
  Case c;
  c.m = 256;
  c.n = c.k = 1024;
  Setup<__nv_bfloat16> s(c, false, 7);
  const StripProblem problem = problem_of(s);
  const Prepared prepared(problem, s.pattern);
  const StripConfig config = configure(problem, kMachine);
  CUtensorMap map;
  TensorShape shape;
  shape.size[0] = shape.size[1] = 1024;
  shape.stride[0] = 2048;
  shape.box[0] = shape.box[1] = 64;
  each("a tensor map", 100, [&] { CHECK(make_tensor_map(&map, DType::bf16, s.x.data(), shape)); });
  each("an empty kernel", 100, [&] { empty_kernel<<<1, 32>>>(); });
  each("cudaGetDevice", 100, [&] {
    int device;
    CHECK(cudaGetDevice(&device));
  });
  each("a strip product", 100, [&] { run(s, prepared, problem, config, nullptr); });
}

}  // namespace bench
