// Checks and times the weight gradient of tall vectors, X by token and by feature.
#include "cuda/sm90/tall_gradient.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;
using T = __nv_bfloat16;

constexpr int kSms = 132, kSharedBytes = 227 * 1024;

// Rows that store as many columns each, evenly spread: what rows of random ones are compared with.
Pattern even_pattern(std::int64_t n, std::int64_t k, std::int64_t r, std::int64_t each) {
  Pattern p = make_pattern(n, k, r, 1, 0, Kind::random, 1);
  const std::int64_t rows = (n + r - 1) / r;
  p.crow.assign(1, 0);
  p.col.clear();
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(k));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), std::mt19937(static_cast<unsigned>(row)));
    std::sort(all.begin(), all.begin() + each);
    p.col.insert(p.col.end(), all.begin(), all.begin() + each);
    p.crow.push_back(static_cast<std::int32_t>(p.col.size()));
  }
  return p;
}

// What is run: what `configure` chooses, or with so many shares of the tokens, or tiles of pairs of rows with
// so many thread blocks in a cluster, or of 64 rows in long steps, with so many thread blocks that turn a
// part of X.
struct Way {
  int split = 0, pairs = 0;
  bool long_steps = false;
  int turners = 0;
  bool chosen() const { return split + pairs == 0; }
};
constexpr Way kWays[] = {{0, 0},       {1, 0},          {2, 0},          {4, 0},
                         {1, 1},       {1, 2},          {1, 0, true},    {2, 0, true},
                         {4, 0, true}, {1, 0, true, 3}, {2, 0, true, 2}, {4, 0, true, 8}};

TallGradientConfig chosen(const TallGradientProblem& problem, const Way& way, int columns = 0) {
  TallGradientConfig c = configure(problem, kSms, kSharedBytes);
  if (!way.chosen()) {
    if (c.pairs != way.pairs || c.long_steps != way.long_steps) c.columns = 1000;
    if (way.long_steps) c.rows = 64, c.turns = way.turners > 0 ? 2 : 0;
    c.turners = way.turners, c.last = way.turners > 0 ? 20 : 0;
    c.long_steps = way.long_steps;
    c.split = way.split;
    c.pairs = way.pairs;
    c.columns = std::min(c.columns, c.most_columns());
    c.slots = 0;
    c.slots = std::min(8, (kSharedBytes - 512 - c.shared_bytes()) / c.slot_bytes());
  }
  if (columns > 0) c.columns = columns * c.most_columns() / TallGradientConfig::kMost / 8 * 8;
  return c;
}

struct Operands {
  TallGradientProblem problem;
  TallGradientConfig config;
  Buffer<T> dy, x, dvalues;
  Buffer<std::int32_t> crow, col, words;
  Buffer<char> workspace;
  Operands(const Pattern& pattern, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t r,
           bool by_feature, const Way& way)
      : problem{DType::bf16,
                m,
                n,
                k,
                r,
                pattern.blocks(),
                n,
                by_feature ? m : k,
                by_feature ? Layout::by_feature : Layout::by_token},
        config(chosen(problem, way)),
        dy(static_cast<std::size_t>(m * n)),
        x(static_cast<std::size_t>(m * k)),
        dvalues(static_cast<std::size_t>(pattern.blocks() * r)),
        crow(to_device(pattern.crow)),
        col(to_device(pattern.col)),
        words(static_cast<std::size_t>(TallGradientPlan(problem, config).words)),
        workspace(static_cast<std::size_t>(sm90::workspace(problem, config))) {
    fill(dy.data(), dy.size, 2, 1, false);
    fill(x.data(), x.size, 3, 1, false);
    make(nullptr);
    CHECK(cudaDeviceSynchronize());
  }
  void make(cudaStream_t stream) const {
    CHECK(prepare(problem, config, crow.data(), col.data(), words.data(), stream));
  }
  void run(cudaStream_t stream) const {
    CHECK(launch(problem, config,
                 {dy.data(), x.data(), col.data(), dvalues.data(), words.data(), workspace.data()}, stream));
  }
};

// All stored elements in double, and the sums of their terms' magnitudes: a thread each.
template <class E>
__global__ void tall_gradient_reference(TallGradientProblem p, std::int64_t x_token, std::int64_t x_feature,
                                        const E* dy, const E* x, const int* block_row, const int* col,
                                        double* sum, double* size) {
  const std::int64_t i = blockIdx.y * std::int64_t{blockDim.x} + threadIdx.x, e = blockIdx.x;
  if (i >= p.block_rows) return;
  const std::int64_t n = block_row[e] * p.block_rows + i;
  double s = 0, m = 0;
  for (std::int64_t t = 0; t < p.tokens && n < p.rows; ++t) {
    const double v = static_cast<double>(static_cast<float>(dy[t * p.dy_stride + n])) *
                     static_cast<double>(static_cast<float>(x[t * x_token + col[e] * x_feature]));
    s += v;
    m += fabs(v);
  }
  sum[e * p.block_rows + i] = s;
  size[e * p.block_rows + i] = m;
}

struct TallGradientCase {
  std::int64_t m, n, k, r;
  double density;
  Kind kind = Kind::random;
};

// Both layouts, every number of shares, tiles of every width, X turned by the kernel and before: integers
// exactly, reals within their bounds, padding zero, guards intact, the same bits twice. What lies between
// rows, and behind X's last token, is NaN.
template <class E>
bool check(const TallGradientCase& c, bool by_feature, bool integers, unsigned seed) {
  const Pattern pattern = make_pattern(c.n, c.k, c.r, 1, c.density, c.kind, seed);
  const std::int64_t x_stride = by_feature ? (c.m + 15) / 8 * 8 : (c.k + 15) / 8 * 8,
                     dy_stride = (c.n + 15) / 8 * 8;
  const TallGradientProblem p{kDType<E>, c.m,      c.n,
                              c.k,       c.r,      pattern.blocks(),
                              dy_stride, x_stride, by_feature ? Layout::by_feature : Layout::by_token};
  Buffer<E> dy(static_cast<std::size_t>(c.m * dy_stride)),
      x(static_cast<std::size_t>((by_feature ? c.k : c.m) * x_stride)),
      dvalues(static_cast<std::size_t>(pattern.blocks() * c.r));
  fill(dy.data(), dy.size, seed + 1, 1, integers);
  fill(x.data(), x.size, seed + 2, 1, integers);
  const auto end_rows = [](Buffer<E>& b, std::int64_t rows, std::int64_t stride, std::int64_t used) {
    CHECK(cudaMemset2D(b.data() + used, static_cast<std::size_t>(stride) * sizeof(E), 0xFF,
                       static_cast<std::size_t>(stride - used) * sizeof(E), static_cast<std::size_t>(rows)));
  };
  end_rows(dy, c.m, dy_stride, c.n);
  end_rows(x, by_feature ? c.k : c.m, x_stride, by_feature ? c.m : c.k);
  std::vector<int> block_row;
  for (std::size_t i = 0; i + 1 < pattern.crow.size(); ++i)
    block_row.insert(block_row.end(), static_cast<std::size_t>(pattern.crow[i + 1] - pattern.crow[i]),
                     static_cast<int>(i));
  const auto rows = to_device(block_row), crow = to_device(pattern.crow), col = to_device(pattern.col);
  Buffer<double> sum(dvalues.size), size(dvalues.size);
  if (pattern.blocks() > 0)
    tall_gradient_reference<E>
        <<<dim3(static_cast<unsigned>(pattern.blocks()), static_cast<unsigned>((c.r + 63) / 64)), 64>>>(
            p, by_feature ? 1 : x_stride, by_feature ? x_stride : 1, dy.data(), x.data(), rows.data(),
            col.data(), sum.data(), size.data());
  CHECK(cudaDeviceSynchronize());
  const std::vector<double> exact = sum.host(), magnitude = size.host();
  const double u = std::is_same_v<E, __half> ? 0x1p-11 : 0x1p-8;
  bool good = true;
  for (const Way& way : kWays) {
    if (way.pairs > 0 && c.r != 64) continue;
    for (const int columns : {0, 64, 128, 136, 224, 248, 264, 272, 288}) {
      if (way.pairs > 0 && columns > 0 && columns < TallPairs::kLeastColumns) continue;
      if (way.chosen() && columns > 0) continue;
      TallGradientConfig config = chosen(p, way, columns);
      if (!config.long_steps && (way.chosen() || columns % 16 == 0)) config.turns = 2;
      if (!valid(p, config)) std::printf("invalid %s\n", config.text().c_str());
      Buffer<std::int32_t> words(static_cast<std::size_t>(TallGradientPlan(p, config).words));
      Buffer<char> workspace(static_cast<std::size_t>(sm90::workspace(p, config)));
      CHECK(prepare(p, config, crow.data(), col.data(), words.data(), nullptr));
      std::vector<E> first;
      std::int64_t wrong = 0, unequal = 0;
      for (int turn = 0; turn < 2; ++turn) {
        dvalues.poison();
        CHECK(launch(p, config,
                     {dy.data(), x.data(), col.data(), dvalues.data(), words.data(), workspace.data()},
                     nullptr));
        CHECK(cudaDeviceSynchronize());
        const std::vector<E> got = dvalues.host();
        if (turn == 1)
          unequal = got.empty() ? 0 : std::memcmp(got.data(), first.data(), got.size() * sizeof(E)) != 0;
        first = got;
      }
      for (std::size_t i = 0; i < first.size(); ++i) {
        const double got = static_cast<float>(first[i]), want = exact[i];
        const double bound =
            integers ? 0
                     : 2 * (static_cast<double>(c.m) * 0x1p-24 * magnitude[i] + u * std::abs(want) + 0x1p-25);
        wrong += integers ? !(got == static_cast<double>(static_cast<float>(E(static_cast<float>(want)))))
                          : !(std::abs(got - want) <= bound);
      }
      if (wrong > 0 || unequal > 0 || !dvalues.guards_intact() || !workspace.guards_intact()) {
        good = false;
        std::printf("WRONG tall gradient M%ld N%ld K%ld %ldx1 d%g %s %s %s: %ld of %zu wrong, unequal %ld\n",
                    c.m, c.n, c.k, c.r, c.density, by_feature ? "by feature" : "by token",
                    integers ? "integers" : "reals", config.text().c_str(), wrong, exact.size(), unequal);
      }
    }
  }
  return good;
}

}  // namespace

bool check_tall_gradient(bool small) {
  std::vector<TallGradientCase> cases;
  for (const std::int64_t r : {32, 64, 96, 128, 256}) {
    cases.push_back({300, 3 * r - 20, 200, r, .3});
    cases.push_back({1, 2 * r, 40, r, 1});
    cases.push_back({77, 2 * r - 8, 1096, r, 1});
    cases.push_back({1500, 2 * r, 328, r, .5});
    cases.push_back({40, 150 * r, 72, r, .2});
    cases.push_back({513, 5 * r, 600, r, .5, Kind::rows_half_empty});
    cases.push_back({200, 9 * r, 1200, r, .05, Kind::one_dense_row});
    cases.push_back({100, 2 * r, 64, r, 0});
    cases.push_back({400, 140 * r, 320, r, .1, Kind::one_dense_row});
  }
  if (!small) cases.push_back({8192, 4096, 4096, 128, .1});
  bool good = true;
  unsigned seed = 400;
  for (const TallGradientCase& c : cases) {
    if (!wanted_case(case_name(c.m, c.n, c.k, c.r, c.density))) continue;
    for (const bool by_feature : {false, true}) {
      good &= check<__nv_bfloat16>(c, by_feature, false, seed++);
      good &= check<__nv_bfloat16>(c, by_feature, true, seed++);
      good &= check<__half>(c, by_feature, true, seed++);
    }
  }
  std::printf("tall gradient: %zu cases in two layouts, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

void time_tall_gradient(Report& report, Dense& dense, bool every_config) {
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape& s : {Shape{8192, 4096, 4096},
                         {8192, 14336, 4096},
                         {8192, 4096, 14336},
                         {4096, 3072, 768},
                         {2048, 11008, 4096},
                         {512, 4096, 4096}}) {
    const bool main_shape = s.m == 8192 && s.n == 4096 && s.k == 4096;
    if (!main_shape && !every_config) continue;
    const Times t_dense = dense.grad_weight(s.m, s.n, s.k);
    for (const std::int64_t r : {128, 64, 32}) {
      for (const double density : {.5, .25, .1}) {
        if (!wanted_case(case_name(s.m, s.n, s.k, r, density))) continue;
        const auto each = static_cast<std::int64_t>(density * static_cast<double>(s.k) + .5);
        const Pattern random = make_pattern(s.n, s.k, r, 1, density, Kind::random, 7);
        const Pattern alike = even_pattern(s.n, s.k, r, each);
        const Pattern dense_row = make_pattern(s.n, s.k, r, 1, density, Kind::one_dense_row, 7);
        for (const auto& [pattern, what] :
             {std::pair{&random, ""}, {&alike, " (rows alike)"}, {&dense_row, " (one dense row)"}}) {
          if (pattern != &random && !main_shape) continue;
          for (const bool by_feature : {false, true}) {
            for (const Way& way : kWays) {
              if (!way.chosen() && (!every_config || !main_shape)) continue;
              if (way.pairs > 0 && r != 64) continue;
              const Operands o(*pattern, s.m, s.n, s.k, r, by_feature, way);
              if (!chosen_by_env(o.config.text())) continue;
              const double prepare_us = time_graph([&](cudaStream_t stream) { o.make(stream); }, 5).median;
              report.add({"grad_weight", s.m, s.n, s.k, std::to_string(r) + "x1", density,
                          std::string(by_feature ? "tall gradient (X by feature)" : "tall gradient") + what,
                          o.config.text(), time_graph([&](cudaStream_t stream) { o.run(stream); }), t_dense,
                          0, prepare_us});
            }
          }
        }
      }
    }
  }
}

}  // namespace bench
