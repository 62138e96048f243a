// Checks and times the input gradient of tall vectors: every configuration, with the zeros and without.
#include "cuda/sm90/tall_grad_input.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

constexpr int kSms = 132, kSharedBytes = 227 * 1024;

template <class T>
Product problem_of(const Setup<T>& s) {
  Product p;
  p.transposed = true;
  p.dtype = kDType<T>;
  p.tokens = s.c.m;
  p.rows = s.c.n;
  p.cols = s.c.k;
  p.block_rows = s.c.r;
  p.block_cols = 1;
  p.blocks = s.pattern.blocks();
  p.x_stride = s.x_stride();
  p.y_stride = s.y_stride();
  return p;
}

// A pattern's index and what is prepared of it, on the device.
struct Prepared {
  Product problem;
  Buffer<std::int32_t> crow, col, ccol, row, perm, words;
  Prepared(const Product& p, const Pattern& pattern)
      : problem(p),
        crow(to_device(pattern.crow)),
        col(to_device(pattern.col)),
        ccol(to_device(pattern.ccol)),
        row(to_device(pattern.row)),
        perm(to_device(pattern.perm)),
        words(static_cast<std::size_t>(tall_input_words(p))) {
    make(nullptr);
    CHECK(cudaDeviceSynchronize());
  }
  void make(cudaStream_t stream) const {
    CHECK(prepare_tall_input(problem, crow.data(), col.data(), words.data(), stream));
  }
  template <class T>
  void run(const Setup<T>& s, const TallInputConfig& config, cudaStream_t stream) const {
    CHECK(launch_tall_input(problem, config, kSms,
                            {s.x.data(),
                             s.values.data(),
                             s.y.data(),
                             col.data(),
                             {problem, {ccol.data(), row.data(), perm.data()}, s.values.data()},
                             words.data()},
                            stream));
  }
};

template <class T>
bool check(const Case& c, bool integers, unsigned seed) {
  Setup<T> s(c, integers, seed);
  const Product p = problem_of(s);
  if (const std::string reason = tall_input_unsupported(p); !reason.empty()) {
    std::printf("%s: %s\n", describe(c).c_str(), reason.c_str());
    return false;
  }
  const Expected expected(s, integers, 200);
  const Prepared prepared(p, s.pattern);
  bool good = true;
  for (const TallInputCandidate& candidate : tall_input_candidates(p, kSms, kSharedBytes)) {
    if (!candidate.reason.empty() || !chosen_by_env(candidate.config.text())) continue;
    good &= expected.compare(s, "tall input " + candidate.config.text(),
                             [&] { prepared.run(s, candidate.config, nullptr); });
  }
  return good;
}

}  // namespace

bool check_tall_input(bool small) {
  std::vector<Case> cases;
  for (const std::int64_t r : {32, 64, 96, 128, 256}) {
    cases.push_back({true, 300, 3 * r - 24, 200, r, 1, .3});
    cases.push_back({true, 1, 2 * r, 40, r, 1, 1});
    cases.push_back({true, 77, 2 * r - 8, 1096, r, 1, 1});
    cases.push_back({true, 1500, 2 * r, 328, r, 1, .5});
    cases.push_back({true, 40, 75 * r, 72, r, 1, .2});
    cases.push_back({true, 513, 5 * r, 600, r, 1, .5, Kind::rows_half_empty});
    cases.push_back({true, 200, 9 * r, 1200, r, 1, .05, Kind::one_dense_row});
    cases.push_back({true, 333, 6 * r, 520, r, 1, .3});
    cases.back().specials = true;
    cases.push_back({true, 100, 2 * r, 64, r, 1, 0});
    cases[cases.size() - 4].pad = 8;
  }
  if (!small) cases.push_back({true, 8192, 4096, 4096, 128, 1, .1});
  bool good = true;
  unsigned seed = 900;
  for (const Case& c : cases) {
    good &= check<__nv_bfloat16>(c, false, seed++);
    good &= check<__nv_bfloat16>(c, true, seed++);
    good &= check<__half>(c, true, seed++);
  }
  std::printf("tall input: %zu cases, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

void time_tall_input(Report& report, Dense& dense, bool every_config) {
  using T = __nv_bfloat16;
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape& shape : {Shape{8192, 4096, 4096},
                             {8192, 14336, 4096},
                             {8192, 4096, 14336},
                             {4096, 3072, 768},
                             {2048, 11008, 4096},
                             {512, 4096, 4096}}) {
    const auto& [m, n, k] = shape;
    const bool main_shape = m == 8192 && n == 4096 && k == 4096;
    if (!main_shape && !every_config) continue;
    const Times t_dense = dense.linear(m, k, n);
    for (const std::int64_t r : {128, 64, 32}) {
      for (const double density : {.5, .25, .1}) {
        if (!wanted_case(case_name(m, n, k, r, density))) continue;
        const Setup<T> s({true, m, n, k, r, 1, density}, false, 7);
        const Product p = problem_of(s);
        const Prepared prepared(p, s.pattern);
        const double prepare_us = time_graph([&](cudaStream_t stream) { prepared.make(stream); }, 5).median;
        const std::string own = tall_input_best(p, kSms, kSharedBytes).config.text();
        for (const TallInputCandidate& candidate : tall_input_candidates(p, kSms, kSharedBytes)) {
          const std::string text = candidate.config.text();
          if (!candidate.reason.empty() || !chosen_by_env(text) || (!every_config && text != own)) continue;
          report.add({"grad_input", m, n, k, std::to_string(r) + "x1", density,
                      text == own ? "tall input, chosen" : "tall input", text,
                      time_graph([&](cudaStream_t stream) { prepared.run(s, candidate.config, stream); }, 11),
                      t_dense, candidate.microseconds, prepare_us});
        }
      }
    }
  }
}

}  // namespace bench
