// Checks and times the union kernel: linear and grad_input, blocks of 16 and 32, and finer ones.
#include "cuda/sm90/unions.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

const sm90::Machine kMachine{132, 227 * 1024};

template <class T>
UnionProblem problem_of(const Setup<T>& s) {
  UnionProblem p;
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

// What is prepared of a pattern and packed of values, on the device.
struct Prepared {
  UnionLayouts layouts;
  Buffer<std::int32_t> offsets, others, entries, words;
  Buffer<char> packed;
  bool transposed;
  Prepared(const UnionProblem& problem, const UnionLayouts& layouts, const Pattern& p, const void* values)
      : layouts(layouts),
        offsets(to_device(problem.transposed ? p.ccol : p.crow)),
        others(to_device(problem.transposed ? p.row : p.col)),
        entries(to_device(p.perm)),
        words(static_cast<std::size_t>(UnionPlan(problem, kMachine.sms).words)),
        packed(static_cast<std::size_t>(UnionPlan(problem, kMachine.sms).packed_bytes())),
        transposed(problem.transposed) {
    make(problem, nullptr);
    fill_packed(problem, values, nullptr);
    CHECK(cudaDeviceSynchronize());
  }
  ProductIndex index() const {
    return {offsets.data(), others.data(), transposed ? entries.data() : nullptr};
  }
  void make(const UnionProblem& problem, cudaStream_t stream) const {
    CHECK(prepare(problem, layouts, kMachine.sms, index(), words.data(), stream));
  }
  void fill_packed(const UnionProblem& problem, const void* values, cudaStream_t stream) const {
    CHECK(pack(problem, kMachine.sms, index(), words.data(), values, packed.data(), stream));
  }
  bool guards_intact() const { return words.guards_intact() && packed.guards_intact(); }
};

template <class T>
void run(const Setup<T>& s, const Prepared& prepared, const UnionProblem& problem, const UnionConfig& config,
         cudaStream_t stream) {
  CHECK(launch(problem, config, kMachine.sms,
               {s.x.data(), s.values.data(), prepared.index(), s.bias_or_null(), s.y.data(),
                prepared.words.data(), prepared.packed.data()},
               stream));
}

// Every layout and configuration of one case; false if one is wrong.
template <class T>
bool check(const Case& c, bool integers, unsigned seed) {
  Setup<T> s(c, integers, seed);
  const UnionProblem problem = problem_of(s);
  if (const std::string reason = unsupported(problem); !reason.empty()) {
    std::printf("%s: %s\n", describe(c).c_str(), reason.c_str());
    return false;
  }
  const Expected expected(s, integers, 300);
  bool good = true;
  for (const UnionLayouts& layouts : all_union_layouts(problem)) {
    const Prepared prepared(problem, layouts, s.pattern, s.values.data());
    for (const UnionCandidate& candidate : union_candidates(problem, layouts, kMachine)) {
      if (!candidate.reason.empty() || !chosen_by_env(candidate.config.text())) continue;
      good &= expected.compare(s, candidate.config.text(),
                               [&] { run(s, prepared, problem, candidate.config, nullptr); });
    }
    if (!prepared.guards_intact()) {
      std::printf("WRONG %s: prepare or pack wrote outside\n", describe(c).c_str());
      good = false;
    }
  }
  return good;
}

// The same bits `times` times.
bool repeats(int times) {
  bool good = true;
  for (const std::int64_t b : {16, 32}) {
    Setup<__nv_bfloat16> s({false, 1100, 1024, 1024, b, b, .3}, false, 5);
    const UnionProblem problem = problem_of(s);
    const Prepared prepared(problem, layouts_of(problem), s.pattern, s.values.data());
    const UnionConfig config = configure(problem, kMachine);
    std::vector<__nv_bfloat16> first;
    int unequal = 0;
    for (int i = 0; i < times; ++i) {
      run(s, prepared, problem, config, nullptr);
      const std::vector<__nv_bfloat16> y = s.y.host();
      if (i == 0) first = y;
      unequal += std::memcmp(first.data(), y.data(), y.size() * sizeof(y[0])) != 0;
    }
    std::printf("unions: b%ld, %d repeats, %d unequal\n", b, times, unequal);
    good &= unequal == 0;
  }
  return good;
}

}  // namespace

bool check_unions(bool small) {
  std::vector<Case> cases;
  const auto none = Activation::none;
  for (const bool transposed : {false, true}) {
    for (const std::int64_t b : {16, 32}) {
      Case specials{transposed, 130, 200, 264, b, b, .3, Kind::random, none, true, 8};
      specials.specials = !transposed;
      cases.push_back(specials);
      if (small) continue;
      specials = {transposed, 530, 600, 520, b, b, .3, Kind::random, none, true, 8};
      specials.specials = true;
      cases.push_back(specials);
      cases.push_back({transposed, 1, 512, 512, b, b, .5, Kind::random, none, true});
      cases.push_back({transposed, 777, 1000, 840, b, b, .3, Kind::rows_half_empty, none, true, 8});
      cases.push_back({transposed, 513, 320, 640, b, b, 1, Kind::random, none, true});
      cases.push_back({transposed, 257, 320, 640, b, b, 0, Kind::random, none, true});
      cases.push_back({transposed, 1025, 1024, 2048, b, b, .05, Kind::one_dense_row, none, false, 16});
      cases.push_back({transposed, 8192, 4096, 4096, b, b, .25});
    }
    if (small) continue;
    for (const auto& [r, c] : {std::pair{16, 64}, {64, 16}, {32, 64}, {48, 16}, {32, 96}}) {
      cases.push_back({transposed, 300, 528, 400, r, c, .4});
    }
    for (const auto& [r, c] : {std::pair{8, 8}, {1, 1}, {16, 1}, {12, 20}, {64, 4}}) {
      cases.push_back({transposed, 300, 528, 400, r, c, .2, Kind::random, none, true, 8});
      cases.back().specials = true;
    }
  }
  for (const Activation a :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    if (!small) cases.push_back({false, 333, 512, 512, 32, 32, .3, Kind::random, a, true});
  }
  bool good = true;
  unsigned seed = 1;
  for (const Case& c : cases) {
    good &= check<__nv_bfloat16>(c, true, seed++);
    if (small) continue;
    good &= check<__nv_bfloat16>(c, false, seed++);
    good &= check<__half>(c, false, seed++);
  }
  if (!small) good &= repeats(1000);
  std::printf("unions: %zu cases, every layout and configuration, %s\n", cases.size(),
              good ? "all right" : "WRONG");
  return good;
}

void time_unions(Report& report, Dense& dense, bool every_config) {
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
                             {2048, 4096, 4096, false},
                             {1024, 4096, 4096, false},
                             {512, 4096, 4096, false},
                             {512, 4096, 4096, true},
                             {256, 4096, 4096, false}}) {
    const bool main_shape = shape.m == 8192 && shape.n == 4096 && shape.k == 4096;
    if (std::getenv("MAIN") != nullptr && !main_shape) continue;
    // dX = dY W is a product of (M, N) and (N, K).
    const Times t_dense =
        shape.transposed ? dense.linear(shape.m, shape.k, shape.n) : dense.linear(shape.m, shape.n, shape.k);
    struct Which {
      std::int64_t r, c;
      double density;
      Kind kind = Kind::random;
    };
    std::vector<Which> all;
    for (const std::int64_t b : {32, 16}) {
      for (const double density : {.5, .25, .1}) all.push_back({b, b, density});
      if (!main_shape || shape.transposed || std::getenv("MAIN") != nullptr) continue;
      for (const double density : {.25, .1}) {  // skewed
        all.push_back({b, b, density, Kind::one_dense_row});
        all.push_back({b, b, density, Kind::rows_half_empty});
      }
    }
    if (main_shape) {
      for (const auto& [r, c] : {std::pair{8, 8}, {16, 1}, {4, 4}, {1, 1}, {64, 4}}) {
        for (const double density : {.25, .1, .02}) all.push_back({r, c, density});
      }
    }
    for (const auto& [r, c, density, kind] : all) {
      const char* name = kind == Kind::random          ? "unions"
                         : kind == Kind::one_dense_row ? "unions (one dense row)"
                                                       : "unions (half of the rows empty)";
      if (!wanted_case(case_name(shape.m, shape.n, shape.k, r, density))) continue;
      Case its{shape.transposed, shape.m, shape.n, shape.k, r, c, density, kind};
      Setup<__nv_bfloat16> s(its, false, 7);
      const UnionProblem problem = problem_of(s);
      const std::string chosen = configure(problem, kMachine).text();
      const bool every = every_config && !shape.transposed && kind == Kind::random;
      for (const UnionLayouts& layouts :
           every ? all_union_layouts(problem) : std::vector{layouts_of(problem)}) {
        const Prepared prepared(problem, layouts, s.pattern, s.values.data());
        const double prepare_us =
            time_graph([&](cudaStream_t stream) { prepared.make(problem, stream); }, 5).median;
        const double pack_us =
            time_graph([&](cudaStream_t stream) { prepared.fill_packed(problem, s.values.data(), stream); },
                       5)
                .median;
        for (const UnionCandidate& candidate : union_candidates(problem, layouts, kMachine)) {
          const bool is_chosen = candidate.config.text() == chosen;
          if (!candidate.reason.empty() || !chosen_by_env(candidate.config.text()) || !(is_chosen || every))
            continue;
          if (main_shape) {
            const Expected expected(s, false, 16);
            expected.compare(s, candidate.config.text(),
                             [&] { run(s, prepared, problem, candidate.config, nullptr); });
          }
          const Times t =
              time_graph([&](cudaStream_t stream) { run(s, prepared, problem, candidate.config, stream); });
          report.add({shape.transposed ? "grad_input" : "linear", shape.m, shape.n, shape.k, block_text(its),
                      density, name, candidate.config.text() + (is_chosen ? " *" : ""), t, t_dense,
                      candidate.microseconds, prepare_us, 0, pack_us});
        }
      }
    }
  }
}

}  // namespace bench
