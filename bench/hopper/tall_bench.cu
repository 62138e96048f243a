// Checks and times the tall kernel (linear for blocks of one column), X by feature and by token, and the
// transpose that the latter takes.
#include "cuda/sm90/tall.h"
#include "cuda/sm90/tall_columns.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

constexpr int kSms = 132, kSharedBytes = 227 * 1024;

template <class T>
TallColumns columns_of(const Setup<T>& s) {
  return TallColumns({false, kDType<T>, s.c.m, s.c.n, s.c.k, s.c.r, 1, s.pattern.blocks()});
}

bool packs(const Case& c) { return c.r % 64 != 0; }

// Of packed columns as what they are to the tall kernel.
template <class T>
TallProblem problem_of(const Setup<T>& s) {
  TallProblem p;
  p.dtype = kDType<T>;
  p.tokens = s.c.m;
  p.rows = s.c.n;
  p.cols = s.c.k;
  p.block_rows = packs(s.c) ? 64 : s.c.r;
  p.blocks = packs(s.c) ? columns_of(s).most : s.pattern.blocks();
  p.x_layout = s.c.x_by_feature ? Layout::by_feature : Layout::by_token;
  p.x_stride = s.x_stride();
  p.y_stride = s.y_stride();
  p.activation = s.c.activation;
  return p;
}

// A pattern's index, what is prepared of it, and workspace, on the device.
template <class T>
struct Prepared {
  TallColumns columns;
  TallConfig config;
  Buffer<std::int32_t> crow, col, words;
  Buffer<char> workspace, packed;
  Prepared(const Setup<T>& s, const TallProblem& problem)
      : columns(columns_of(s)),
        config(configure(problem, kSms, kSharedBytes)),
        crow(to_device(s.pattern.crow)),
        col(to_device(s.pattern.col)),
        words(static_cast<std::size_t>(columns.words + TallPlan(problem, config, kSms).words)),
        workspace(static_cast<std::size_t>(2 * problem.cols * turned_stride(problem.tokens + 4096))),
        packed(static_cast<std::size_t>(packs(s.c) ? columns.bytes() : 0)) {
    make(s, problem, nullptr);
    CHECK(cudaDeviceSynchronize());
  }
  const std::int32_t* plan() const { return words.data() + columns.words; }  // what the tall kernel walks
  ProductIndex stored() const { return {crow.data(), col.data(), nullptr}; }
  ProductIndex index(const Setup<T>& s) const { return packs(s.c) ? columns.index(words.data()) : stored(); }
  void make(const Setup<T>& s, const TallProblem& problem, cudaStream_t stream) const {
    if (packs(s.c)) CHECK(prepare(columns, stored(), words.data(), stream));
    CHECK(prepare(problem, config, kSms, index(s).offsets, words.data() + columns.words, stream));
  }
  void pack_values(const Setup<T>& s, cudaStream_t stream) const {
    if (packs(s.c)) CHECK(pack(columns, stored(), words.data(), s.values.data(), packed.data(), stream));
  }
  void run(const Setup<T>& s, const TallProblem& problem, cudaStream_t stream) const {
    TallOperands operands{s.x.data(), s.values.data(), index(s).others,  s.bias_or_null(),
                          s.y.data(), plan(),          workspace.data(), {}};
    if (packs(s.c)) {
      operands.values = packed.data();
      operands.stated = {columns.product, stored(), s.values.data()};
    }
    CHECK(launch(problem, config, kSms, operands, stream));
  }
};

template <class T>
bool check(const Case& c, bool integers, unsigned seed) {
  Setup<T> s(c, integers, seed);
  const TallProblem problem = problem_of(s);
  if (const std::string reason = unsupported(problem); !reason.empty()) {
    std::printf("%s: %s\n", describe(c).c_str(), reason.c_str());
    return false;
  }
  Prepared prepared(s, problem);
  prepared.pack_values(s, nullptr);
  const Expected expected(s, integers, 300);
  const auto right = [&] {
    return expected.compare(s, "tall " + prepared.config.text(), [&] { prepared.run(s, problem, nullptr); });
  };
  bool good = right();
  if (!c.x_by_feature) {  // many chunks, some begun while those before are multiplied
    prepared.config.chunk = 512;
    good &= right();
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
  for (const std::int64_t r : {32, 64, 96, 128, 192, 256}) {
    add(300, 768, 200, r, .3);
    add(777, 1000, 336, r, .2, Kind::rows_half_empty, Activation::none, true, 8);
    add(1100, 512, 96, r, .4, Kind::random, Activation::none, true);
    add(1, 512, 104, r, 1, Kind::random, Activation::none, true);
    add(513, 256, 104, r, 0, Kind::random, Activation::none, true);
    add(1025, 512, 600, r, .05, Kind::one_dense_row);
  }
  for (const std::int64_t tokens : {300, 1030}) {  // Inf and NaN where the other of a pair stores nothing
    add(tokens, 544, 200, 32, .3);
    cases.back().specials = true;
  }
  for (const Activation a :
       {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
    add(333, 256, 512, 128, .3, Kind::random, a, true);
  }
  if (!small) add(8192, 4096, 4096, 128, .1);
  if (!small) add(8192, 4096, 4096, 64, .1);
  if (!small) add(8192, 4096, 4096, 32, .25);
  bool good = true;
  unsigned seed = 200;
  for (const bool by_feature : {true, false}) {
    for (Case c : cases) {
      c.x_by_feature = by_feature;
      good &= check<__nv_bfloat16>(c, false, seed++);
      good &= check<__nv_bfloat16>(c, true, seed++);
      good &= check<__half>(c, false, seed++);
    }
  }
  std::printf("tall: %zu cases in two layouts, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

// The transpose beside a copy of as many bytes.
void time_transpose(Report& report) {
  struct Shape {
    std::int64_t rows, cols;
  };
  for (const auto& [rows, cols] :
       {Shape{8192, 4096}, {8192, 14336}, {4096, 768}, {2048, 4096}, {512, 4096}}) {
    const auto count = static_cast<std::size_t>(rows * cols);
    Buffer<__nv_bfloat16> from(count), to(count);
    fill(from.data(), count, 1, 1, false);
    const Times t = time_graph([&, r = rows, c = cols](cudaStream_t stream) {
      CHECK(transpose(from.data(), 2, r, c, c, to.data(), r, false, stream));
    });
    const Times copy = time_graph([&](cudaStream_t stream) {
      CHECK(cudaMemcpyAsync(to.data(), from.data(), count * 2, cudaMemcpyDeviceToDevice, stream));
    });
    Row row{"transpose", rows, 0, cols, "1x1", 1, "transpose", "beside a copy", t, copy};
    row.bytes = static_cast<double>(count) * 4;
    report.add(row);
  }
}

// 4096 → 14336 → 4096 as two launches: hidden features are stored by feature, as the second one reads them.
// Beside two products of cuBLAS with a GELU kernel in between; both without the GELU to see what it costs.
void time_networks(Report& report, Dense& dense, bool every_config) {
  const std::int64_t m = 8192, k = 4096, h = 14336;
  for (const Activation activation : {Activation::gelu_erf, Activation::none}) {
    const bool gelu = activation != Activation::none;
    if (!gelu && !every_config) continue;
    for (const std::int64_t r : {128, 64}) {
      for (const double density : {.5, .25, .1}) {
        const Times t_dense = dense.network(m, k, h, gelu);  // each time: clocks fall as the GPU warms up
        const Case up_case{false, m, h, k, r, 1, density, Kind::random, activation, false, 0, false};
        Case down_case = up_case;
        std::swap(down_case.n, down_case.k);
        down_case.activation = Activation::none;
        down_case.x_by_feature = true;
        const Setup<__nv_bfloat16> up(up_case, false, 7), down(down_case, false, 8);
        TallProblem first = problem_of(up);
        first.y_layout = Layout::by_feature;
        first.y_stride = m;
        const TallProblem second = problem_of(down);
        const Prepared first_prepared(up, first), second_prepared(down, second);
        const Times t = time_graph([&](cudaStream_t stream) {
          CHECK(launch(first, first_prepared.config, kSms,
                       {up.x.data(), up.values.data(), first_prepared.col.data(), nullptr, down.x.data(),
                        first_prepared.plan(), first_prepared.workspace.data()},
                       stream));
          second_prepared.run(down, second, stream);
        });
        report.add({"network", m, k, k, block_text(up_case), density,
                    gelu ? "tall; hidden by feature; GELU" : "tall; hidden by feature",
                    first_prepared.config.text(), t, t_dense,
                    predicted_microseconds(first, first_prepared.config, kSms) +
                        predicted_microseconds(second, second_prepared.config, kSms)});
      }
    }
  }
}

void time_tall(Report& report, Dense& dense, bool every_config) {
  time_transpose(report);
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape& shape : {Shape{8192, 4096, 4096},
                             {8192, 14336, 4096},
                             {8192, 4096, 14336},
                             {4096, 3072, 768},
                             {2048, 11008, 4096},
                             {512, 4096, 4096}}) {
    const Times t_dense = dense.linear(shape.m, shape.n, shape.k);
    const bool main_shape = shape.m == 8192 && shape.n == 4096 && shape.k == 4096;
    for (const std::int64_t r : {128, 64, 32}) {
      for (const double density : {.5, .25, .1, .05}) {
        for (const bool by_feature : {true, false}) {
          if (density == .05 && !every_config) continue;
          if (!wanted_case(case_name(shape.m, shape.n, shape.k, r, density))) continue;
          const Case c{false,   shape.m,      shape.n,          shape.k, r, 1,
                       density, Kind::random, Activation::none, false,   0, by_feature};
          Setup<__nv_bfloat16> s(c, false, 7);
          const TallProblem problem = problem_of(s);
          Prepared prepared(s, problem);
          const double prepare_us =
              time_graph([&](cudaStream_t stream) { prepared.make(s, problem, stream); }, 5).median;
          prepared.pack_values(s, nullptr);
          const double pack_us =
              r % 64 == 0
                  ? 0
                  : time_graph([&](cudaStream_t stream) { prepared.pack_values(s, stream); }, 5).median;
          if (main_shape) {
            Expected(s, false, 16).compare(s, "tall " + prepared.config.text(), [&] {
              prepared.run(s, problem, nullptr);
            });
          }
          const std::int64_t chosen = prepared.config.chunk;
          for (const std::int64_t chunk :
               {chosen, std::int64_t{4096}, std::int64_t{2048}, std::int64_t{1024}}) {
            if (chunk != chosen && (by_feature || !every_config)) continue;
            prepared.config.chunk = chunk;
            report.add({"linear", shape.m, shape.n, shape.k, block_text(c), density,
                        by_feature ? "tall (X by feature)" : "tall (X by token)", prepared.config.text(),
                        time_graph([&](cudaStream_t stream) { prepared.run(s, problem, stream); }), t_dense,
                        predicted_microseconds(problem, prepared.config, kSms), prepare_us, 0, pack_us});
          }
        }
      }
    }
  }
}

}  // namespace bench
