// Bitmaps: their plan, the way from CSR and back, and linear by every family that this machine has.
#include "rarefy/bitmap.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/registry.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

using Words = std::vector<std::int32_t>;
using Bits = std::vector<std::uint8_t>;

Bits bits_of(const Pattern& pattern) {
  const BsrShape& s = pattern.shape();
  Bits bits(static_cast<std::size_t>(s.rows * mask_row_bytes(s.cols)));
  expect_ok(bitmap_of("test", pattern.view(), bits));
  return bits;
}

Words plan_of(std::int64_t rows, std::int64_t cols, const Bits& bits) {
  Words plan(static_cast<std::size_t>(bitmap_plan_size(rows, cols)));
  const auto stored = build_bitmap_plan("test", rows, cols, bits, plan);
  expect_ok(stored.status());
  return plan;
}

std::vector<std::string> families() {
  rarefy::Problem asked = make_problem(Op::linear, {8, 16, 1, 1, 5}, 3, DType::f32);
  asked.weight.format = Format::bitmap;
  std::vector<std::string> families;
  for (const Candidate& candidate : explain(asked).candidates) {
    if (candidate.why_not.empty()) families.push_back(candidate.kernel.family);
  }
  return families;
}

struct Spec {
  std::int64_t m, n, k;
  double density = 0.5;
  DType dtype = DType::f32, stored = DType::f32;
  bool integers = false;
  std::int64_t stride = 3;
  Layout x_layout = Layout::by_token;
  bool two_of_four = false;
};

// A random layer and its result, in memory that ends where a page does.
class Sample {
 public:
  explicit Sample(const Spec& s, unsigned seed = 1) : spec(s), problem(make_problem(as_problem(s), seed)) {
    if (s.two_of_four) {
      std::mt19937 random(seed);
      std::vector<std::int32_t> crow{0}, col;
      for (std::int64_t n = 0; n < s.n; ++n) {
        for (std::int32_t k = 0; k < s.k; k += 4) {
          const auto first = static_cast<std::int32_t>(random() % 3);
          col.push_back(k + first);
          col.push_back(k + first + 1 + static_cast<std::int32_t>(random() % (3U - first)));
        }
        crow.push_back(static_cast<std::int32_t>(col.size()));
      }
      problem.pattern = *Pattern::create({s.n, s.k, 1, 1, 0}, crow, col);
      problem.values.resize(col.size(), 1);
    }
    bits = bits_of(problem.pattern);
    problem.values = decode(encode(problem.values, s.stored), s.stored);
  }

  // (M, N) of the dtype of x, rows spec.stride apart beyond N.
  std::vector<double> linear(Activation activation = Activation::none, bool bias = true, int threads = 1) {
    std::vector<double> y;
    expect_ok(run(y, activation, bias, threads));
    return y;
  }
  Status run(std::vector<double>& y, Activation activation = Activation::none, bool bias = true,
             int threads = 1) {
    const std::vector<double> x = laid_out();
    const HostBuffer in = upload(x, spec.dtype), w = upload(problem.values, spec.stored);
    const HostBuffer b = upload(problem.bias, spec.dtype);
    const Words words = plan_of(spec.n, spec.k, bits);
    const HostBuffer plan = HostBuffer::upload(std::span<const std::int32_t>(words));
    const std::int64_t y_stride = spec.n + 3;
    Guarded<HostBuffer> out(static_cast<std::size_t>(spec.m * y_stride) * size_of(spec.dtype));
    auto view = view_bitmap_plan("test", spec.n, spec.k,
                                 {static_cast<const std::int32_t*>(plan.data()), words.size()});
    expect_ok(view.status());
    const bool by_token = spec.x_layout == Layout::by_token;
    ThreadPool pool(threads);
    Context context{pool.executor()};
    const Status status =
        rarefy::linear({in.data(), spec.dtype, spec.m, spec.k, by_token ? problem.x_stride() : 1, Device::cpu,
                        by_token ? 1 : spec.m},
                       {*view, w.data(), spec.stored}, bias ? b.data() : nullptr, activation,
                       {out.data(), spec.dtype, spec.m, spec.n, y_stride}, context);
    if (!status.ok()) return status;
    const std::vector<double> got = decode(out.download(), spec.dtype);
    for (std::int64_t m = 0; m < spec.m; ++m) {
      const auto row = got.begin() + m * y_stride;
      y.insert(y.end(), row, row + spec.n);
      for (std::int64_t gap = spec.n; gap < y_stride; ++gap) EXPECT_TRUE(std::isnan(row[gap]));
    }
    return {};
  }

  void expect_right(Activation activation = Activation::none) {
    const std::vector<double> y = linear(activation);
    const Host host{problem};
    const auto abs_bias = absolute(problem.bias);
    const std::vector<double> value = host.linear(problem.x, problem.values, &problem.bias, activation);
    const std::vector<double> argument =
        host.linear(problem.x, problem.values, &problem.bias, Activation::none);
    const std::vector<double> magnitude =
        host.linear(absolute(problem.x), absolute(problem.values), &abs_bias, Activation::none);
    const std::vector<double> terms = problem.stored_per_row();
    const std::vector<double> rounded = decode(encode(value, spec.dtype), spec.dtype);
    for (std::size_t e = 0; e < y.size(); ++e) {
      SCOPED_TRACE(::testing::Message() << '(' << e / spec.n << ", " << e % spec.n << ')');
      if (spec.integers) {
        ASSERT_TRUE(same(y[e], rounded[e])) << y[e] << " for " << rounded[e];
        continue;
      }
      const double count = terms[e % static_cast<std::size_t>(spec.n)] + 1;
      const double bound = 1.2 * (gamma(count, accumulator(spec.dtype)) + gamma(count, 0x1p-53)) *
                               magnitude[e] * (1 + storing(spec.dtype)) +
                           activation_error(activation, argument[e], value[e], accumulator(spec.dtype)) +
                           storing(spec.dtype) * std::abs(value[e]) +
                           (spec.dtype == DType::f16 ? 0x1p-25 : 0);
      ASSERT_LE(std::abs(y[e] - value[e]), bound);
    }
  }

  Spec spec;
  Problem problem;
  Bits bits;

 private:
  static ProblemSpec as_problem(const Spec& s) {
    return {s.m, s.n, s.k, 1, 1, s.two_of_four ? 1 : s.density, s.dtype, s.integers, s.stride};
  }
  static HostBuffer upload(const std::vector<double>& numbers, DType dtype) {
    const std::vector<std::byte> bytes = encode(numbers, dtype);
    return HostBuffer::upload(std::span<const std::byte>(bytes));
  }
  std::vector<double> laid_out() const {
    std::vector<double> x = problem.x;
    // Rows end where memory does, not where the stride of the next row would.
    if (problem.x_stride() > 0)
      x.resize(static_cast<std::size_t>((spec.m - 1) * problem.x_stride() + spec.k));
    if (spec.x_layout == Layout::by_token) return x;
    std::vector<double> turned(static_cast<std::size_t>(spec.m * spec.k));
    for (std::int64_t m = 0; m < spec.m; ++m) {
      for (std::int64_t k = 0; k < spec.k; ++k) {
        turned[static_cast<std::size_t>(k * spec.m + m)] =
            problem.x[static_cast<std::size_t>(m * problem.x_stride() + k)];
      }
    }
    return turned;
  }
};

class BitmapFamilyTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(All, BitmapFamilyTest, ::testing::ValuesIn(families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(BitmapFamilyTest, IntegersExactly) {
  const Force force(GetParam());
  for (const double density : {0.0, 0.1, 0.5, 1.0}) {
    for (const std::int64_t m : {1, 2, 3, 4, 5, 8, 9, 15, 16, 33}) {
      SCOPED_TRACE(::testing::Message() << "density " << density << ", M = " << m);
      Sample({m, 37, 83, density, DType::f32, DType::f32, true}).expect_right();
    }
  }
}

TEST_P(BitmapFamilyTest, EveryWidth) {
  const Force force(GetParam());
  for (const std::int64_t k : {1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 770, 1540}) {
    for (const std::int64_t n : {1, 2, 4, 5}) {
      SCOPED_TRACE(::testing::Message() << n << " × " << k);
      Sample({2, n, k, 0.5, DType::f32, DType::f32, true}).expect_right();
      Sample({9, n, k, 0.9, DType::f32, DType::f32, true}).expect_right();
    }
  }
}

TEST_P(BitmapFamilyTest, RealsWithinTheBound) {
  const Force force(GetParam());
  for (const std::int64_t m : {1, 4, 7, 40}) {
    SCOPED_TRACE(m);
    Sample({m, 70, 1000}).expect_right();
    Sample({m, 70, 100, 0.25}).expect_right(Activation::gelu_erf);
    Sample({m, 70, 100, 0.25}).expect_right(Activation::silu);
  }
}

TEST_P(BitmapFamilyTest, DTypes) {
  const Force force(GetParam());
  for (const auto& [dtype, stored] : {std::pair{DType::bf16, DType::bf16},
                                      {DType::f16, DType::f16},
                                      {DType::f32, DType::bf16},
                                      {DType::f32, DType::f16}}) {
    SCOPED_TRACE(::testing::Message() << name(dtype) << ", values " << name(stored));
    Sample({3, 37, 83, 0.5, dtype, stored, true}).expect_right();
    Sample({9, 37, 150, 0.5, dtype, stored}).expect_right();
  }
}

TEST_P(BitmapFamilyTest, StridesLayoutsAndNoBias) {
  const Force force(GetParam());
  Sample broadcast({5, 20, 70, 0.5, DType::f32, DType::f32, true, -1});
  broadcast.expect_right();
  const Sample again({6, 20, 70});
  Sample layer = again;
  const std::vector<double> with = layer.linear(), without = layer.linear(Activation::none, false);
  for (std::size_t e = 0; e < with.size(); ++e) {
    EXPECT_NEAR(with[e] - layer.problem.bias[e % 20], without[e], 1e-5);
  }
}

TEST_P(BitmapFamilyTest, SameBitsOnAnyNumberOfThreads) {
  const Force force(GetParam());
  for (const std::int64_t m : {1, 6, 70}) {
    Sample layer({m, 131, 1700});
    const std::vector<double> one = layer.linear();
    for (const int threads : {2, 3, 7}) {
      EXPECT_EQ(one, layer.linear(Activation::none, true, threads)) << threads << " threads, M = " << m;
    }
  }
}

Spec two_of_four(Spec spec) {
  spec.two_of_four = true;
  return spec;
}

TEST_P(BitmapFamilyTest, TwoOfFour) {
  const Force force(GetParam());
  for (const std::int64_t k : {4, 8, 12, 28, 32, 36, 60, 64, 68, 124, 128, 768, 780, 1600}) {
    for (const std::int64_t m : {1, 2, 3, 4, 5, 9, 16}) {
      SCOPED_TRACE(::testing::Message() << k << " columns, M = " << m);
      Sample layer(two_of_four({m, 9, k, 0.5, DType::f32, DType::f32, true}));
      EXPECT_EQ(plan_of(9, k, layer.bits)[4], 1);
      layer.expect_right();
    }
  }
  for (const DType stored : {DType::f32, DType::bf16, DType::f16}) {
    Sample(two_of_four({3, 40, 1028, 0.5, DType::f32, stored})).expect_right(Activation::gelu_tanh);
    Sample(two_of_four({37, 40, 516, 0.5, DType::f32, stored})).expect_right();
  }
  Sample(two_of_four({3, 40, 132, 0.5, DType::f16, DType::f16})).expect_right();
  Sample layer(two_of_four({2, 131, 1732}));
  EXPECT_EQ(layer.linear(), layer.linear(Activation::none, true, 5));
  // NaN and infinity: in what is not stored they do not matter, in a neighbouring row neither.
  Sample marked(two_of_four({5, 24, 100, 0.5, DType::f32, DType::f32, true}));
  for (std::int64_t m = 0; m < 5; ++m) {
    marked.problem.x[static_cast<std::size_t>(m * marked.problem.x_stride() + 7 * m)] =
        m % 2 == 0 ? kInfinity : std::nan("");
  }
  marked.problem.values[50] = std::nan("");  // row 1's first
  marked.problem.values[99] = kInfinity;     // its last
  marked.expect_right();
}

// One of the groups with one, three, or a column more: positions would not do.
TEST(BitmapTest, TwoOfFourIsSeenWhereItIs) {
  Sample layer(two_of_four({1, 3, 64}));
  EXPECT_EQ(plan_of(3, 64, layer.bits)[4], 1);
  const auto seen = [](Bits bits, std::size_t at, std::uint8_t byte) {
    bits.at(at) = byte;
    return plan_of(3, 64, bits)[4];
  };
  EXPECT_EQ(seen(layer.bits, 23, 0x13), 0);
  EXPECT_EQ(seen(layer.bits, 0, 0x7c), 0);
  EXPECT_EQ(seen(layer.bits, 9, 0x00), 0);
  EXPECT_EQ(seen(layer.bits, 9, 0x93), 1);
  EXPECT_EQ(plan_of(1, 6, {0x33})[4], 0);
  EXPECT_EQ(plan_of(1, 5, {0x13})[4], 0);
  EXPECT_EQ(plan_of(0, 4, {})[4], 0);
}

// A token has the same bits in any batch of up to two, and in any of more.
TEST_P(BitmapFamilyTest, TokensDoNotDependOnTheBatch) {
  const Force force(GetParam());
  for (const bool pairs : {false, true}) {
    Spec spec{13, 50, 1600, 0.5, DType::f32, DType::f32, false, 0};
    spec.two_of_four = pairs;
    Sample layer(spec);
    const auto first = [&](std::int64_t m) {
      Sample some = layer;
      some.spec.m = some.problem.spec.m = m;
      some.problem.x.resize(static_cast<std::size_t>(m * 1600));
      return some.linear();
    };
    const std::vector<double> all = layer.linear(), two = first(2), one = first(1);
    EXPECT_TRUE(std::equal(one.begin(), one.end(), two.begin()));
    for (const std::int64_t m : {3, 4, 5, 8, 9, 12}) {
      const std::vector<double> some = first(m);
      EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << m;
    }
  }
}

// What is not stored meets no x, and what is passes NaN and infinity on.
TEST_P(BitmapFamilyTest, NanAndInfinityWhereSomethingIsStored) {
  const Force force(GetParam());
  for (const std::int64_t m : {1, 3, 8, 20}) {
    Sample layer({m, 40, 130, 0.5, DType::f32, DType::f32, true});
    for (std::int64_t token = 0; token < m; ++token) {
      auto* row = layer.problem.x.data() + token * layer.problem.x_stride();
      row[token % 130] = token % 3 == 0 ? kInfinity : token % 3 == 1 ? -kInfinity : std::nan("");
      row[129] = std::nan("");
    }
    layer.expect_right();
    layer.problem.values.at(layer.problem.values.size() / 2) = kInfinity;
    layer.problem.values.back() = std::nan("");
    layer.expect_right();
  }
}

TEST_P(BitmapFamilyTest, ForcedConfigurationsGiveTheSame) {
  const std::string family = GetParam();
  if (family == "ref") GTEST_SKIP() << "has no configuration";
  for (const std::int64_t m : {1, 2, 21}) {
    Sample layer({m, 77, 900, 0.5, DType::f32, DType::f32, true});
    for (const std::string config :
         {"ranges=1 groups=1 rows=1 ask=0", "ranges=9 groups=2 rows=5 ask=1",
          "ranges=77 groups=3 rows=300 ask=2", "ranges=200 groups=40 rows=2 ask=3",
          "ranges=2 groups=1 rows=4 ask=3 apart=1", "ranges=100 groups=3 rows=7 ask=0 apart=1"}) {
      SCOPED_TRACE(config);
      const Force force(family + "," + family + "_linear_bitmap(" + config + ")");
      layer.expect_right();
    }
  }
}

// Rows of two of four that are read together lie side by side or apart, in pieces that are not all whole.
TEST_P(BitmapFamilyTest, RowsApartHaveTheSameBits) {
  const std::string family = GetParam();
  if (family == "ref") GTEST_SKIP() << "has no configuration";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t rows : {1, 3, 4, 10, 77}) {
      SCOPED_TRACE(rows);
      Sample layer(two_of_four({1, rows, 1732, 0.5, dtype, dtype}));
      const auto with = [&](const std::string& config) {
        const Force force(family + "," + family + "_linear_two_of_four(" + config + ")");
        layer.expect_right();
        return layer.linear();
      };
      const std::vector<double> together = with("ranges=1 groups=1 rows=4 ask=0 apart=0");
      EXPECT_EQ(with("ranges=1 groups=1 rows=4 ask=3 apart=1"), together);
      EXPECT_EQ(with("ranges=3 groups=1 rows=4 ask=3 apart=1"), together);
    }
  }
}

TEST_P(BitmapFamilyTest, ConfigsThatNameNothingAreRefused) {
  const std::string family = GetParam();
  if (family == "ref") GTEST_SKIP() << "has no configuration";
  Sample layer({2, 16, 64, 0.5, DType::f32, DType::f32, true});
  for (const auto& [config, why] :
       {std::pair<std::string, std::string>{
            "rows=0", "ranges, groups and rows of the config must be at least 1; got 1, 1 and 0"},
        {"ask=4", "ask of the config must be in [0, 3]; got 4"},
        {"apart=2", "apart of the config must be 0 or 1; got 2"}}) {
    const Force force(family + "," + family + "_linear_bitmap(" + config + ")");
    std::vector<double> y;
    const Status status = layer.run(y);
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  }
}

TEST(BitmapTest, FamiliesAreThoseOfTheProducts) {
  const auto expected = [] {
    std::vector<std::string> all;
    for (const std::string& family : cpu_impls()) {
      if (family == "avx512" || family == "avx2" || family == "neon" || family == "scalar" || family == "ref")
        if (std::find(all.begin(), all.end(), family) == all.end()) all.push_back(family);
    }
    return all;
  }();
  EXPECT_EQ(families(), expected);
}

// Kernels of other formats never see a bitmap, nor those of bitmaps blocks; doubles go to the reference.
TEST(BitmapTest, FormatsGoToTheirOwnKernels) {
  rarefy::Problem asked = make_problem(Op::linear, {8, 16, 1, 1, 5}, 3, DType::f32);
  EXPECT_EQ(explain(asked).kernel.find("bitmap"), std::string::npos);
  asked.weight.format = Format::bitmap;
  EXPECT_NE(explain(asked).kernel.find("bitmap"), std::string::npos);
  EXPECT_NE(to_string(asked).find("linear bitmap 8x16"), std::string::npos);
  for (const Candidate& candidate : explain(asked).candidates) {
    EXPECT_NE(candidate.kernel.name.find("bitmap"), std::string::npos) << candidate.kernel.name;
  }
  asked.weight.format = Format::two_of_four;
  EXPECT_NE(explain(asked).kernel.find("two_of_four"), std::string::npos);
  EXPECT_NE(to_string(asked).find("linear 2:4 8x16"), std::string::npos);
  asked.weight.format = Format::bitmap;
  asked.in = asked.out = DType::f64;
  EXPECT_EQ(explain(asked).kernel, "ref_linear_bitmap");
  asked.op = Op::grad_input;
  EXPECT_TRUE(explain(asked).kernel.empty());
}

TEST(BitmapTest, DoublesAndMatricesByFeature) {
  Sample({5, 20, 70, 0.5, DType::f64, DType::f64}).expect_right();
  Spec by_feature{5, 20, 70, 0.5, DType::f32, DType::f32, true};
  by_feature.x_layout = Layout::by_feature;
  Sample(by_feature).expect_right();
}

TEST(BitmapTest, ColumnsComeBack) {
  for (const auto& [n, k, pairs] : {std::tuple{1, 1, false},
                                    {5, 64, false},
                                    {9, 65, false},
                                    {30, 200, false},
                                    {30, 200, true},
                                    {3, 4, true}}) {
    Spec spec{1, n, k, 0.4};
    spec.two_of_four = pairs;
    const Pattern pattern = Sample(spec).problem.pattern;
    const Words words = plan_of(n, k, bits_of(pattern));
    const auto view = view_bitmap_plan("test", n, k, words);
    expect_ok(view.status());
    EXPECT_EQ(view->shape, pattern.shape());
    EXPECT_EQ(view->two_of_four, pairs);
    EXPECT_TRUE(std::equal(pattern.crow_indices().begin(), pattern.crow_indices().end(), view->crow));
    Words columns(static_cast<std::size_t>(view->shape.nnzb));
    expect_ok(bitmap_columns("test", *view, columns));
    EXPECT_TRUE(std::equal(columns.begin(), columns.end(), pattern.col_indices().begin()));
  }
}

TEST(BitmapTest, EmptyMatrices) {
  for (const auto& [n, k] : {std::pair{0, 5}, {5, 0}, {0, 0}}) {
    const Words words = plan_of(n, k, Bits(static_cast<std::size_t>(n * mask_row_bytes(k))));
    const auto view = view_bitmap_plan("test", n, k, words);
    expect_ok(view.status());
    const std::vector<float> x(10, 1), bias(5, 2);
    std::vector<float> y(10, 9);
    expect_ok(linear({x.data(), DType::f32, 2, k, k}, {*view, nullptr}, bias.data(), Activation::none,
                     {y.data(), DType::f32, 2, n, n}));
    EXPECT_EQ(std::vector<float>(y.begin(), y.begin() + 2 * n), std::vector<float>(2 * n, 2));
  }
}

// What is refused says where.
TEST(BitmapTest, BadBits) {
  const auto message = [](std::int64_t n, std::int64_t k, Bits bits, std::int64_t words) {
    Words plan(static_cast<std::size_t>(words));
    return build_bitmap_plan("op", n, k, bits, plan).status().message();
  };
  const std::int64_t size = bitmap_plan_size(3, 13);
  EXPECT_EQ(message(3, 13, {0xff, 0x1f, 0, 0x20, 0, 0}, size),
            "[op] bits past column 13 must be 0; got bitmap[1, 1] with bit 5");
  EXPECT_EQ(message(3, 13, {0, 0, 0, 0, 0, 0x80}, size),
            "[op] bits past column 13 must be 0; got bitmap[2, 1] with bit 7");
  EXPECT_EQ(message(3, 13, {0, 0, 0, 0, 0}, size), "[op] bitmap must have 6 elements; got 5");
  EXPECT_EQ(message(3, 13, Bits(6), size - 1),
            "[op] plan must have " + std::to_string(size) + " elements; got " + std::to_string(size - 1));
  EXPECT_NE(message(-1, 13, {}, size).find("[op] "), std::string::npos);
}

TEST(BitmapTest, BadPlansAndCalls) {
  const Bits bits{0xff, 0x1f, 0, 0, 1, 0};
  Words plan = plan_of(3, 13, bits);
  const auto refused = [&](std::int64_t n, std::int64_t k, const Words& words) {
    return view_bitmap_plan("op", n, k, words).status().message();
  };
  EXPECT_NE(refused(13, 3, plan), "");
  EXPECT_NE(refused(3, 14, plan), "");
  EXPECT_NE(refused(3, 13, Words(plan.begin(), plan.end() - 1)), "");
  const Words dense(plan.size(), 7);
  EXPECT_EQ(refused(3, 13, dense), "[op] plan must be a bitmap's of a matrix of 3 × 13; got " +
                                       std::to_string(plan.size()) + " words of something else");

  const BitmapView w{*view_bitmap_plan("op", 3, 13, plan), nullptr};
  const std::vector<float> x(26), values(14);
  std::vector<float> y(6);
  const auto call = [&](const BitmapView& weight, std::int64_t k, void* out, DType dtype = DType::f32) {
    return linear({x.data(), DType::f32, 2, k, k}, weight, nullptr, Activation::none, {out, dtype, 2, 3, 3})
        .message();
  };
  EXPECT_EQ(call(w, 13, y.data()), "[linear] values must point to their elements; got a null pointer");
  BitmapView whole = w;
  whole.values = values.data();
  EXPECT_EQ(call(whole, 12, y.data()), "[linear] x must have 13 columns (in_features); got 12");
  EXPECT_EQ(call(whole, 13, const_cast<float*>(values.data())),
            "[linear] y must not share memory with the inputs; got an overlap with values");
  EXPECT_EQ(call(whole, 13, plan.data() + plan.size() - 6),
            "[linear] y must not share memory with the inputs; got an overlap with plan");
  EXPECT_EQ(call(whole, 13, y.data(), DType::f64), "[linear] y must be f32 for f32 x; got f64");
  whole.plan.bits = nullptr;
  EXPECT_EQ(call(whole, 13, y.data()), "[linear] plan must point to its rows and bits; got a null pointer");
  whole.plan.shape.block_rows = whole.plan.shape.block_cols = 2;
  EXPECT_EQ(call(whole, 13, y.data()), "[linear] a bitmap must be of blocks of 1x1; got 2x2");
  Words blocks(1);
  EXPECT_EQ(bitmap_columns("op", w.plan, blocks).message(), "[op] col_indices must have 14 elements; got 1");
  const Pattern square = make_problem({1, 4, 4, 2, 2}).pattern;
  EXPECT_EQ(bitmap_of("op", square.view(), {}).message(), "[op] a bitmap must be of blocks of 1x1; got 2x2");
}

}  // namespace
}  // namespace rarefy::test
