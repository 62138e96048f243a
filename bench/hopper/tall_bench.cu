// Checks and times the tall kernel (linear for blocks of one column, X by feature).
#include <chrono>

#include "cuda/sm90/tall.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

constexpr int kSms = 132, kSharedBytes = 227 * 1024;

template <class T>
TallProblem problem_of(const Setup<T>& s) {
  TallProblem p;
  p.dtype = kDType<T>;
  p.tokens = s.c.m;
  p.rows = s.c.n;
  p.cols = s.c.k;
  p.block_rows = s.c.r;
  p.blocks = s.pattern.blocks();
  p.x_stride = s.x_stride();
  p.y_stride = s.y_stride();
  p.activation = s.c.activation;
  return p;
}

template <class T>
bool check(const Case& c, bool integers, unsigned seed) {
  Setup<T> s(c, integers, seed);
  const TallProblem problem = problem_of(s);
  if (const std::string reason = unsupported(problem); !reason.empty()) {
    std::printf("%s: %s\n", describe(c).c_str(), reason.c_str());
    return false;
  }
  const auto col = to_device(s.pattern.col);
  const Expected expected(s, integers, 300);
  bool good = true;
  for (const TallCandidate& candidate : tall_candidates(problem, kSms, kSharedBytes)) {
    if (!candidate.reason.empty() || !chosen_by_env(candidate.config.text())) continue;
    const TallPlan plan = prepare(problem, candidate.config, kSms, s.pattern.crow.data());
    const auto words = to_device(plan.words);
    good &= expected.compare(s, "tall " + candidate.config.text(), [&] {
      CHECK(launch(problem, candidate.config, plan,
                   {s.x.data(), s.values.data(), col.data(), s.bias_or_null(), s.y.data(), words.data()},
                   nullptr));
    });
  }
  return good;
}

}  // namespace

bool check_tall(bool small) {
  std::vector<Case> cases;
  const auto add = [&](std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t r, double density,
                       Kind kind = Kind::random, Activation activation = Activation::none, bool bias = false,
                       std::int64_t pad = 0) {
    cases.push_back({false, m, n, k, r, 1, density, kind, activation, bias, pad, true});
  };
  for (const std::int64_t r : {64, 128, 192, 256}) {
    add(300, 768, 200, r, .3);
    add(777, 1000, 333, r, .2, Kind::rows_half_empty, Activation::none, true, 8);
    add(1, 512, 100, r, 1, Kind::random, Activation::none, true);
    add(513, 256, 100, r, 0, Kind::random, Activation::none, true);
    add(1025, 512, 600, r, .05, Kind::one_dense_row);
  }
  for (const Activation a :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    add(333, 256, 512, 128, .3, Kind::random, a, true);
  }
  if (!small) add(8192, 4096, 4096, 128, .1);
  if (!small) add(8192, 4096, 4096, 64, .1);
  bool good = true;
  unsigned seed = 200;
  for (const Case& c : cases) {
    good &= check<__nv_bfloat16>(c, false, seed++);
    good &= check<__nv_bfloat16>(c, true, seed++);
    good &= check<__half>(c, false, seed++);
  }
  std::printf("tall: %zu cases, every configuration, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

void time_tall(Report& report, Dense& dense, bool every_config) {
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape& shape :
       {Shape{8192, 4096, 4096}, {8192, 14336, 4096}, {8192, 4096, 14336}, {4096, 3072, 768}}) {
    const Times t_dense = dense.linear(shape.m, shape.n, shape.k);
    for (const std::int64_t r : {128, 64}) {
      for (const double density : {.5, .25, .1, .05}) {
        const Case c{false,   shape.m,      shape.n,          shape.k, r, 1,
                     density, Kind::random, Activation::none, false,   0, true};
        Setup<__nv_bfloat16> s(c, false, 7);
        const TallProblem problem = problem_of(s);
        const auto col = to_device(s.pattern.col);
        const std::string chosen = configure(problem, kSms, kSharedBytes).text();
        for (const TallCandidate& candidate : tall_candidates(problem, kSms, kSharedBytes)) {
          const bool is_chosen = candidate.config.text() == chosen;
          if (!candidate.reason.empty() || !(is_chosen || every_config)) continue;
          const auto start = std::chrono::steady_clock::now();
          const TallPlan plan = prepare(problem, candidate.config, kSms, s.pattern.crow.data());
          const double prepare_us =
              std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
          const auto words = to_device(plan.words);
          const auto call = [&](cudaStream_t stream) {
            CHECK(launch(problem, candidate.config, plan,
                         {s.x.data(), s.values.data(), col.data(), nullptr, s.y.data(), words.data()},
                         stream));
          };
          if (shape.n == 4096 && shape.k == 4096) {
            Expected(s, false, 16).compare(s, "tall " + candidate.config.text(), [&] { call(nullptr); });
          }
          report.add({"linear", shape.m, shape.n, shape.k, block_text(c), density, "tall",
                      candidate.config.text() + (is_chosen ? " *" : ""), time_graph(call), t_dense,
                      candidate.microseconds, prepare_us});
        }
      }
    }
  }
}

}  // namespace bench
