// Checks and times the gradient of stored blocks (grad_weight, blocks of 16 and more).
#include "cuda/sm90/block_gradient.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

const sm90::Machine kMachine{132, 227 * 1024};

struct GradientCase {
  std::int64_t m, n, k, r, c;
  double density;
  Kind kind = Kind::random;
  std::int64_t pad = 0;
  bool nan = false;  // one token of dY is NaN: so is the whole gradient, but not the padding
};

// Of sampled stored blocks, each element in double, and the sum of its terms' magnitudes.
template <class T>
__global__ void gradient_reference(GradientCase a, std::int64_t dy_stride, std::int64_t x_stride, const T* dy,
                                   const T* x, const int* block_row, const int* block_col, double* sum,
                                   double* size) {
  const std::int64_t i = blockIdx.y * std::int64_t{blockDim.x} + threadIdx.x;
  if (i >= a.r * a.c) return;
  const std::int64_t n = block_row[blockIdx.x] * a.r + i / a.c, k = block_col[blockIdx.x] * a.c + i % a.c;
  double s = 0, m = 0;
  if (n < a.n && k < a.k) {
    for (std::int64_t t = 0; t < a.m; ++t) {
      const double p = static_cast<double>(static_cast<float>(dy[t * dy_stride + n])) *
                       static_cast<double>(static_cast<float>(x[t * x_stride + k]));
      s += p;
      m += fabs(p);
    }
  }
  sum[blockIdx.x * a.r * a.c + i] = s;
  size[blockIdx.x * a.r * a.c + i] = m;
}

// Sums over the tokens, and of magnitudes.
template <class T>
__global__ void bias_reference(GradientCase a, std::int64_t dy_stride, const T* dy, double* sum,
                               double* size) {
  const std::int64_t n = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (n >= a.n) return;
  double s = 0, m = 0;
  for (std::int64_t t = 0; t < a.m; ++t) {
    const double v = static_cast<double>(static_cast<float>(dy[t * dy_stride + n]));
    s += v;
    m += fabs(v);
  }
  sum[n] = s;
  size[n] = m;
}

template <class T>
struct GradientSetup {
  GradientCase c;
  Pattern pattern;
  Buffer<T> dy, x, dvalues, dbias;
  Buffer<std::int32_t> crow, col;
  GradientProblem problem;
  Buffer<std::int32_t> list;
  Buffer<char> workspace;
  // With a list, or with none: then thread blocks find their tiles themselves.
  GradientOperands operands(const GradientConfig& config, bool prepared, bool bias = false) const {
    if (prepared) CHECK(prepare(problem, config, crow.data(), col.data(), list.data(), nullptr));
    return {dy.data(),        x.data(),       crow.data(),
            col.data(),       dvalues.data(), prepared ? list.data() : nullptr,
            workspace.data(), false,          bias ? dbias.data() : nullptr};
  }
  GradientSetup(const GradientCase& c, bool integers, unsigned seed)
      : c(c),
        pattern(make_pattern(c.n, c.k, c.r, c.c, c.density, c.kind, seed)),
        dy(static_cast<std::size_t>(c.m * (c.n + c.pad))),
        x(static_cast<std::size_t>(c.m * (c.k + c.pad))),
        dvalues(static_cast<std::size_t>(pattern.blocks() * c.r * c.c)),
        dbias(static_cast<std::size_t>(c.n)),
        crow(to_device(pattern.crow)),
        col(to_device(pattern.col)),
        problem{kDType<T>, c.m, c.n, c.k, c.r, c.c, pattern.blocks(), c.n + c.pad, c.k + c.pad},
        list(most([this](const GradientConfig& g) { return prepared_words(problem, g); })),
        workspace(most([this](const GradientConfig& g) { return workspace_bytes(problem, g); })) {
    fill(dy.data(), dy.size, seed + 1, 1, integers);
    fill(x.data(), x.size, seed + 2, 1, integers);
    if (c.nan)
      CHECK(
          cudaMemset(dy.data() + (c.m / 2) * (c.n + c.pad), 0xFF, static_cast<std::size_t>(c.n) * sizeof(T)));
  }

 private:
  template <class F>
  std::size_t most(F&& of) const {  // that any configuration asks for
    std::int64_t most = 1;
    for (const GradientCandidate& candidate : gradient_candidates(problem, kMachine))
      most = std::max(most, of(candidate.config));
    return static_cast<std::size_t>(most);
  }
};

// What would only be slower is right, too.
bool runs(const GradientCandidate& c) { return c.reason.empty() || c.reason == "other tiles fit better"; }

template <class T>
bool check(const GradientCase& c, bool integers, unsigned seed) {
  GradientSetup<T> s(c, integers, seed);
  char name[160];
  std::snprintf(name, sizeof name, "grad_weight M%ld N%ld K%ld b%ldx%ld d%g kind%d pad%ld nan%d", c.m, c.n,
                c.k, c.r, c.c, c.density, static_cast<int>(c.kind), c.pad, c.nan);
  if (!wanted_case(name)) return true;
  if (const std::string reason = unsupported(s.problem); !reason.empty()) {
    std::printf("%s: %s\n", name, reason.c_str());
    return false;
  }
  std::vector<int> samples(static_cast<std::size_t>(s.pattern.blocks())), block_row, block_col;
  std::iota(samples.begin(), samples.end(), 0);
  if (samples.size() > 48) std::shuffle(samples.begin(), samples.end() - 1, std::mt19937(seed));
  if (samples.size() > 48) samples.erase(samples.begin() + 47, samples.end() - 1);
  for (const int e : samples) {
    block_row.push_back(static_cast<int>(std::upper_bound(s.pattern.crow.begin(), s.pattern.crow.end(), e) -
                                         s.pattern.crow.begin()) -
                        1);
    block_col.push_back(s.pattern.col[static_cast<std::size_t>(e)]);
  }
  const auto rows = to_device(block_row), cols = to_device(block_col);
  const std::size_t block = static_cast<std::size_t>(c.r * c.c);
  Buffer<double> sum(samples.size() * block), size(sum.size);
  if (!samples.empty()) {
    gradient_reference<T>
        <<<dim3(static_cast<unsigned>(samples.size()), static_cast<unsigned>((block + 127) / 128)), 128>>>(
            c, s.problem.dy_stride, s.problem.x_stride, s.dy.data(), s.x.data(), rows.data(), cols.data(),
            sum.data(), size.data());
  }
  Buffer<double> bias_sum(static_cast<std::size_t>(c.n)), bias_size(bias_sum.size);
  bias_reference<T><<<static_cast<unsigned>((c.n + 127) / 128), 128>>>(c, s.problem.dy_stride, s.dy.data(),
                                                                       bias_sum.data(), bias_size.data());
  CHECK(cudaDeviceSynchronize());
  const std::vector<double> exact = sum.host(), magnitude = size.host(), bias_exact = bias_sum.host(),
                            bias_magnitude = bias_size.host();
  const double u_out = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
  bool good = true;
  std::vector<GradientCandidate> candidates = gradient_candidates(s.problem, kMachine);
  for (std::size_t i = 0, given = candidates.size(); i < given; ++i) {  // tiles in two launches, however few
    if (candidates[i].config.split == 1 || candidates[i].config.alone > 0) continue;
    candidates.push_back(candidates[i]);
    candidates.back().config.alone = 5;
    candidates.back().config.shared = 4;
  }
  for (const GradientCandidate& candidate : candidates) {
    if (!runs(candidate) || !chosen_by_env(candidate.config.text())) continue;
    const auto call = [&](bool prepared) {
      const bool bias = tiles_at_most(s.problem, candidate.config) > 0;
      CHECK(launch(s.problem, candidate.config, s.operands(candidate.config, prepared, bias), nullptr));
      CHECK(cudaDeviceSynchronize());
    };
    s.dvalues.poison();
    s.dbias.poison();
    call(true);
    const std::vector<T> dw = s.dvalues.host();
    const std::vector<T> db = s.dbias.host();
    const bool guards = s.dvalues.guards_intact() && s.dbias.guards_intact();
    std::int64_t wrong = 0, unwritten = 0;
    double worst = 0;
    for (std::size_t i = 0; i < samples.size(); ++i) {
      for (std::size_t j = 0; j < block; ++j) {
        const double got = static_cast<float>(dw[static_cast<std::size_t>(samples[i]) * block + j]);
        const double want = exact[i * block + j];
        const bool inside = block_row[i] * c.r + static_cast<std::int64_t>(j) / c.c < c.n &&
                            block_col[i] * c.c + static_cast<std::int64_t>(j) % c.c < c.k;
        if (!inside || (integers && !c.nan)) {
          wrong += !(got == static_cast<double>(static_cast<float>(T(static_cast<float>(want)))));
        } else if (c.nan) {
          wrong += got == got;
        } else {
          const double bound = 2 * (static_cast<double>(c.m) * 0x1p-24 * magnitude[i * block + j] +
                                    u_out * std::abs(want) + (u_out == 0x1p-11 ? 0x1p-25 : 0));
          worst = std::max(worst, std::abs(got - want) / bound);
          wrong += !(std::abs(got - want) <= bound);
        }
      }
    }
    for (const T& v : dw) {
      std::uint16_t bits;
      std::memcpy(&bits, &v, 2);
      unwritten += bits == 0xFFFF;
    }
    std::int64_t wrong_biases = 0;
    for (std::size_t n = 0; n < db.size() && tiles_at_most(s.problem, candidate.config) > 0; ++n) {
      const double got = static_cast<float>(db[n]), want = bias_exact[n];
      const double bound = integers ? u_out * std::abs(want)
                                    : u_out * std::abs(want) + c.m * 0x1p-24 * 1.1 * bias_magnitude[n] + 1e-7;
      wrong_biases += c.nan ? !std::isnan(got) : !(std::abs(got - want) <= bound);
    }
    call(candidate.config.wide < 64);
    const std::vector<T> again = s.dvalues.host();
    const bool same = dw.empty() || std::memcmp(again.data(), dw.data(), dw.size() * sizeof(T)) == 0;
    if (wrong > 0 || wrong_biases > 0 || (unwritten > 0 && !c.nan) || !guards || !same) {
      good = false;
      std::printf(
          "WRONG %s %s, %s: %ld of %zu wrong (worst %.2f of the bound), %ld unwritten, %ld biases, guards "
          "%d, repeat "
          "%d\n",
          name, integers ? "integers" : "reals", candidate.config.text().c_str(), wrong, exact.size(), worst,
          unwritten, wrong_biases, guards, same);
    }
  }
  return good;
}

// Every configuration, with tiles enough that thread blocks take several, and few that share their tokens.
bool repeats(int times) {
  bool good = true;
  for (const GradientCase& c : {GradientCase{1100, 1024, 1024, 128, 128, .25},
                                {1100, 2048, 4096, 64, 64, .3},
                                {1100, 1024, 1024, 32, 32, .3},
                                {1100, 1024, 1024, 16, 16, .3}}) {
    GradientSetup<__nv_bfloat16> s(c, false, 7);
    int configs = 0, unequal = 0;
    for (const GradientCandidate& candidate : gradient_candidates(s.problem, kMachine)) {
      if (!runs(candidate)) continue;
      ++configs;
      const bool bias = tiles_at_most(s.problem, candidate.config) > 0;
      std::vector<__nv_bfloat16> first, first_bias;
      for (int i = 0; i < times; ++i) {
        CHECK(launch(s.problem, candidate.config, s.operands(candidate.config, true, bias), nullptr));
        const std::vector<__nv_bfloat16> dw = s.dvalues.host(), db = s.dbias.host();
        if (i == 0) first = dw, first_bias = db;
        unequal += std::memcmp(first.data(), dw.data(), dw.size() * sizeof(dw[0])) != 0 ||
                   std::memcmp(first_bias.data(), db.data(), db.size() * sizeof(db[0])) != 0;
      }
    }
    std::printf("gradient: b%ld, %d configurations, %d repeats each, %d unequal\n", c.r, configs, times,
                unequal);
    good &= unequal == 0;
  }
  return good;
}

}  // namespace

bool check_gradient(bool small) {
  std::vector<GradientCase> cases;
  for (const auto& [r, c] : {std::pair{64, 64},
                             {128, 128},
                             {64, 128},
                             {128, 64},
                             {192, 64},
                             {32, 32},
                             {16, 16},
                             {16, 64},
                             {64, 32},
                             {48, 32},
                             {128, 16},
                             {32, 48},
                             {96, 96}}) {
    cases.push_back({300, 512, 768, r, c, .4});
    cases.push_back({777, 840, 1000, r, c, .2, Kind::rows_half_empty, 8});
    cases.push_back({70, 840, 1000, r, c, .5, Kind::random, 0, true});
  }
  cases.push_back({1, 512, 512, 64, 64, .5});
  cases.push_back({513, 320, 640, 64, 64, 1});
  cases.push_back({513, 320, 640, 64, 64, 0});
  cases.push_back({1025, 1024, 2048, 64, 64, .05, Kind::one_dense_row, 16});
  cases.push_back({300, 1024, 512, 32, 32, .05, Kind::one_dense_row, 16});
  cases.push_back({300, 1024, 512, 16, 16, 1});
  cases.push_back({300, 1024, 512, 16, 16, 0});
  cases.push_back({1100, 1056, 1024, 32, 32, .3, Kind::rows_half_empty});
  cases.push_back({600, 1056, 1024, 32, 32, .02, Kind::one_dense_row, 8});
  cases.push_back({70, 1056, 1000, 32, 16, .3, Kind::rows_half_empty, 0, true});
  if (!small) cases.push_back({8192, 4096, 4096, 128, 128, .1});
  if (!small) cases.push_back({8192, 4096, 4096, 32, 32, .1});
  if (!small) cases.push_back({8192, 4096, 4096, 16, 16, .25});
  if (!small) cases.push_back({8192, 4096, 4096, 64, 64, .25});
  bool good = true;
  unsigned seed = 300;
  for (const GradientCase& c : cases) {
    if (!wanted_case(case_name(c.m, c.n, c.k, c.r, c.density))) continue;
    good &= check<__nv_bfloat16>(c, false, seed++);
    good &= check<__nv_bfloat16>(c, true, seed++);
    good &= check<__half>(c, false, seed++);
  }
  if (!small) good &= repeats(1000);
  std::printf("gradient: %zu cases, every configuration, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

// One pattern's chosen configuration, or every one, with the bias gradient beside it.
void time_case(Report& report, const Times& t_dense, const GradientCase& c, bool every_config) {
  const std::string block = std::to_string(c.r) + "x" + std::to_string(c.c),
                    kernel = c.kind == Kind::random ? "gradient" : "gradient of half-empty rows";
  GradientSetup<__nv_bfloat16> s(c, false, 7);
  const std::string chosen = configure(s.problem, kMachine).text();
  for (const GradientCandidate& candidate : gradient_candidates(s.problem, kMachine)) {
    const bool is_chosen = candidate.config.text() == chosen;
    const bool main_shape = c.n == 4096 && c.k == 4096;
    if (!runs(candidate) || !chosen_by_env(candidate.config.text()) ||
        !(is_chosen || (every_config && (main_shape || candidate.reason.empty()))))
      continue;
    const GradientOperands operands = s.operands(candidate.config, true);
    const double prepare_us =
        time_graph(
            [&](cudaStream_t stream) {
              CHECK(prepare(s.problem, candidate.config, s.crow.data(), s.col.data(), s.list.data(), stream));
            },
            5)
            .median;
    const Times t = time_graph(
        [&](cudaStream_t stream) { CHECK(launch(s.problem, candidate.config, operands, stream)); });
    report.add({"grad_weight", c.m, c.n, c.k, block, c.density, kernel,
                candidate.config.text() + (is_chosen ? " *" : ""), t, t_dense, candidate.microseconds,
                prepare_us});
    if (!is_chosen) continue;
    const GradientOperands both = s.operands(candidate.config, true, true);
    const Times with_bias =
        time_graph([&](cudaStream_t stream) { CHECK(launch(s.problem, candidate.config, both, stream)); });
    report.add({"grad_weight+bias", c.m, c.n, c.k, block, c.density, kernel, candidate.config.text(),
                with_bias, t_dense, candidate.microseconds, prepare_us});
  }
}

void time_gradient(Report& report, Dense& dense, bool every_config) {
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape& shape : {Shape{8192, 4096, 4096},
                             {8192, 14336, 4096},
                             {8192, 4096, 14336},
                             {4096, 3072, 768},
                             {4096, 768, 3072},
                             {2048, 11008, 4096},
                             {512, 4096, 4096}}) {
    const Times t_dense = dense.grad_weight(shape.m, shape.n, shape.k);
    for (const std::int64_t b : {128, 64, 32, 16}) {
      for (const double density : {.5, .25, .1}) {
        for (const Kind kind : {Kind::random, Kind::rows_half_empty}) {
          const std::string name = case_name(shape.m, shape.n, shape.k, b, density);
          if (!wanted_case(name + (kind == Kind::random ? "" : " half")) ||
              (kind != Kind::random && (b > 32 || shape.n != shape.k)))
            continue;
          time_case(report, t_dense, {shape.m, shape.n, shape.k, b, b, density, kind}, every_config);
        }
      }
    }
  }
}

}  // namespace bench
