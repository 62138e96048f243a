// Products of two sparse matrices, softmax over what is stored, integers: against plain loops in double.
#include "rarefy/sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "product_checks.h"
#include "stored_matrix.h"

namespace rarefy {
namespace {

using test::encode, test::decode, test::expect_ok, test::Matrix;

std::vector<double> multiply(const Matrix& a, const Matrix& b) {
  const std::int64_t m = a.shape().rows, k = a.shape().cols, n = b.shape().cols;
  std::vector<double> c(static_cast<std::size_t>(m * n));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t s = 0; s < k; ++s) {
      for (std::int64_t j = 0; j < n; ++j) {
        c[static_cast<std::size_t>(i * n + j)] +=
            a.dense[static_cast<std::size_t>(i * k + s)] * b.dense[static_cast<std::size_t>(s * n + j)];
      }
    }
  }
  return c;
}

// By the order of a whole plan and by sorting a row plan, on one thread and on three, rectangular and ragged,
// with entries for one bucket of columns and for several.
TEST(TransposeTest, MovesEveryElement) {
  ThreadPool pool(3);
  struct Case {
    std::int64_t rows, cols, r, c;
    double density;
  };
  for (const Case& q : {Case{700, 900, 1, 1, 0.3},
                        {900, 700, 1, 1, 0.01},
                        {3000, 1500, 1, 1, 0.05},
                        {65, 43, 4, 3, 0.5},
                        {64, 48, 8, 8, 1.0},
                        {5, 6, 1, 1, 0.0}}) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i8}) {
      const Matrix a(q.rows, q.cols, q.r, q.c, dtype, 3, q.density);
      const BsrShape& s = a.shape();
      const PlanView whole = a.view().plan;
      for (const PlanView& plan : {whole, PlanView{s, whole.crow, whole.col}}) {
        for (const Executor& executor : {Executor{}, pool.executor()}) {
          const BsrShape turned{s.cols, s.rows, s.block_cols, s.block_rows, s.nnzb};
          std::vector<std::int32_t> words(static_cast<std::size_t>(row_plan_size(turned)));
          std::vector<std::byte> moved(a.values.size());
          const auto bytes = static_cast<int>(size_of(dtype));
          expect_ok(transpose("test", plan, a.values.data(), bytes, words, moved.data(), executor));
          const PlanView got = *view_row_plan("test", turned, words);
          // As a weight whose elements are those of `a` at their places.
          const std::vector<double> values = decode(moved, dtype);
          std::vector<double> dense(a.dense.size());
          for (std::int64_t i = 0; i < turned.row_count(); ++i) {
            for (std::int32_t e = got.crow[i] + 1; e < got.crow[i + 1]; ++e)
              EXPECT_GT(got.col[e], got.col[e - 1]);
          }
          test::each_stored(got, [&](std::size_t at, std::int64_t k, std::int64_t n) {
            if (k < s.cols && n < s.rows) dense[static_cast<std::size_t>(n * s.cols + k)] = values[at];
          });
          EXPECT_EQ(dense, a.dense) << q.rows << 'x' << q.cols << ' ' << name(dtype);
        }
      }
    }
  }
}

// Against a stable sort: the widest buckets, one column a bucket, rows that are empty, full, or hold one
// entry, a column that has most of the entries; long runs, in buckets of 256 columns and fewer.
TEST(TransposeTest, IsAStableSortByColumn) {
  struct Case {
    std::int64_t rows, cols, per_row, full_rows, full_column;
  };
  ThreadPool pool(3);
  for (const Case& q : {Case{70000, 300000, 1, 0, -1},  // a row and a column in its bucket: 33 bits; 32
                        {65536, 300000, 1, 0, -1},
                        {40, 120000, 800, 1, -1},
                        {5000, 40, 20, 4, -1},
                        {90000, 5000, 1, 0, 4999},
                        {3, 40000, 40000, 3, -1},
                        {400, 1000, 300, 9, 999},
                        {20000, 130, 60, 1, -1}}) {
    std::mt19937 random(7);
    std::vector<std::int32_t> crow{0}, col;
    for (std::int64_t i = 0; i < q.rows; ++i) {
      std::set<std::int32_t> columns;
      const bool full = i >= q.rows - q.full_rows;
      for (std::int64_t n = 0; n < (full ? q.cols : i % 3 == 0 ? 0 : q.per_row); ++n) {
        columns.insert(static_cast<std::int32_t>(full ? n : static_cast<std::int64_t>(random()) % q.cols));
      }
      if (q.full_column >= 0) columns.insert(static_cast<std::int32_t>(q.full_column));
      col.insert(col.end(), columns.begin(), columns.end());
      crow.push_back(static_cast<std::int32_t>(col.size()));
    }
    const BsrShape shape{q.rows, q.cols, 1, 1, std::ssize(col)},
        turned{q.cols, q.rows, 1, 1, std::ssize(col)};
    struct Entry {
      std::int32_t column, row, position;
    };
    std::vector<Entry> want;
    for (std::int32_t i = 0; i < q.rows; ++i) {
      for (std::int32_t e = crow[i]; e < crow[i + 1]; ++e) want.push_back({col[e], i, e});
    }
    std::ranges::stable_sort(want, {}, &Entry::column);
    std::vector<std::int32_t> values(col.size());
    std::iota(values.begin(), values.end(), 0);
    std::vector<std::int32_t> rows(static_cast<std::size_t>(row_plan_size(shape)));
    expect_ok(build_row_plan("test", shape, crow, col, rows));
    for (const Executor& executor : {Executor{}, pool.executor()}) {
      std::vector<std::int32_t> words(static_cast<std::size_t>(row_plan_size(turned)), -1), moved(col.size());
      expect_ok(transpose("test", *view_row_plan("test", shape, rows), values.data(), 4, words, moved.data(),
                          executor));
      const PlanView got = *view_row_plan("test", turned, words);
      ASSERT_EQ(got.crow[0], 0);
      std::int32_t e = 0;
      for (std::int32_t c = 0; c < q.cols; ++c) {
        for (; e < got.crow[c + 1]; ++e) {
          const Entry& entry = want[static_cast<std::size_t>(e)];
          ASSERT_TRUE(entry.column == c && entry.row == got.col[e] && entry.position == moved[e])
              << q.rows << ' ' << e;
        }
      }
      EXPECT_EQ(e, std::ssize(col));
    }
    const Result<Pattern> pattern = Pattern::create(shape, crow, col);  // its transposed index is the same
    ASSERT_TRUE(pattern.ok()) << pattern.status().message();
    for (std::size_t e = 0; e < want.size(); ++e) {
      ASSERT_EQ(pattern->view().row[e], want[e].row);
      ASSERT_EQ(pattern->view().perm[e], want[e].position);
    }
  }
}

TEST(TransposeTest, RefusesOtherSizes) {
  const Matrix a(6, 8, 2, 2, DType::f32, 3);
  std::vector<std::int32_t> words(3);
  std::vector<std::byte> moved(a.values.size());
  EXPECT_FALSE(transpose("test", a.view().plan, a.values.data(), 4, words, moved.data()).ok());
  words.resize(static_cast<std::size_t>(row_plan_size({8, 6, 2, 2, a.shape().nnzb})));
  EXPECT_FALSE(transpose("test", a.view().plan, a.values.data(), 3, words, moved.data()).ok());
}

constexpr DType kFloats[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

// Sums of small integers are exact in every dtype's sums; ragged edges, blocks of single elements, long rows.
TEST(SparseProductTest, IsExactOnIntegersInEveryDType) {
  ThreadPool pool(3);
  struct Case {
    std::int64_t m, k, n, r, s, c;
    double density;
  };
  for (const Case& q : {Case{70, 33, 45, 1, 1, 1, 0.4},
                        {67, 33, 41, 4, 2, 3, 0.4},
                        {9, 20, 20000, 1, 1, 1, 0.01},
                        {40, 33, 29, 1, 3, 1, 0.4},
                        {33, 40, 37, 16, 8, 16, 1.0},
                        {5, 6, 7, 2, 2, 2, 0.0}}) {
    for (const DType dtype : kFloats) {
      const Matrix a(q.m, q.k, q.r, q.s, dtype, 1, q.density), b(q.k, q.n, q.s, q.c, dtype, 2, q.density);
      const Result<SparseProduct> product = sparse_product("test", a.view(), b.view(), pool.executor());
      ASSERT_TRUE(product.ok()) << product.status().message();
      std::vector<std::int32_t> words(static_cast<std::size_t>(row_plan_size(product->shape)));
      std::vector<std::byte> values(static_cast<std::size_t>(product->shape.value_count()) * size_of(dtype),
                                    std::byte{0x7f});
      expect_ok(write_product("test", a.view(), b.view(), *product, words, values.data(), pool.executor()));
      const PlanView found = *view_row_plan("test", product->shape, words);
      const auto pattern =
          Pattern::create({q.m, q.n, q.r, q.c, product->shape.nnzb},
                          {found.crow, static_cast<std::size_t>(found.shape.row_count() + 1)},
                          {found.col, static_cast<std::size_t>(found.shape.nnzb)});
      ASSERT_TRUE(pattern.ok()) << pattern.status().message();  // sorted and distinct
      std::vector<std::byte> sampled(values.size(), std::byte{0x7f});
      expect_ok(
          sampled_product("test", a.view(), b.view(), pattern->view(), sampled.data(), pool.executor()));
      EXPECT_EQ(sampled, values);
      Matrix c = a;  // for each() over the product
      c.problem.pattern = *pattern;
      const std::vector<double> got = decode(values, dtype), want = multiply(a, b);
      std::set<std::size_t> inside;
      std::size_t nonzero = 0;
      c.each([&](std::size_t at, std::int64_t i, std::int64_t j) {
        const double exact = want[static_cast<std::size_t>(i * q.n + j)];
        EXPECT_EQ(got[at], decode(encode(std::vector<double>{exact}, dtype), dtype)[0]) << i << ", " << j;
        inside.insert(at);
        nonzero += exact != 0 ? 1U : 0U;
      });
      for (std::size_t at = 0; at < got.size(); ++at) {
        if (inside.contains(at)) continue;
        EXPECT_EQ(got[at], 0) << "padding";
      }
      std::size_t all = 0;
      for (const double exact : want) all += exact != 0 ? 1U : 0U;
      EXPECT_EQ(nonzero, all);  // nothing that differs from zero is missing
    }
  }
}

// A pattern that is not the product's: only what it stores is computed, in any order of threads.
TEST(SparseProductTest, IsSampledByAnyPattern) {
  const Matrix a(60, 31, 1, 1, DType::f64, 1), b(31, 44, 1, 1, DType::f64, 2),
      c(60, 44, 1, 1, DType::f64, 3, 0.3);
  std::vector<double> values(static_cast<std::size_t>(c.shape().value_count()));
  expect_ok(sampled_product("test", a.view(), b.view(), c.view().plan, values.data()));
  const std::vector<double> want = multiply(a, b);
  c.each([&](std::size_t at, std::int64_t i, std::int64_t j) {
    EXPECT_EQ(values[at], want[static_cast<std::size_t>(i * 44 + j)]);
  });
}

TEST(SparseProductTest, OperandsThatDoNotFitAreNamed) {
  const Matrix a(8, 6, 2, 3, DType::f32, 1), b(6, 4, 3, 2, DType::f32, 2), wide(7, 4, 3, 2, DType::f32, 2),
      other(6, 4, 2, 2, DType::f32, 2), halves(6, 4, 3, 2, DType::bf16, 2);
  double values[64];
  const auto message = [&](const Matrix& right, const PlanView& c) {
    return sampled_product("op", a.view(), right.view(), c, values).message();
  };
  EXPECT_EQ(message(wide, b.view().plan), "[op] b must have 6 rows, as a has columns; got 7");
  EXPECT_EQ(message(other, b.view().plan),
            "[op] blocks of b must have 3 rows, as those of a have columns; got 2");
  EXPECT_EQ(message(b, b.view().plan),
            "[op] the pattern must be of 8 × 4 in blocks of 2 × 2; got 6 × 4 in blocks of 3 × 2");
  const Matrix c(8, 4, 2, 2, DType::f32, 3);
  EXPECT_EQ(message(halves, c.view().plan), "[op] a and b must have one dtype; got f32 and bf16");
  EXPECT_EQ(sparse_product("op", a.view(), wide.view()).status().message(),
            "[op] b must have 6 rows, as a has columns; got 7");
  const Result<SparseProduct> product = sparse_product("op", a.view(), b.view());
  ASSERT_TRUE(product.ok());
  std::vector<std::int32_t> few(3);
  EXPECT_EQ(write_product("op", a.view(), b.view(), *product, few, values).message(),
            "[op] a row plan must have " + std::to_string(row_plan_size(product->shape)) +
                " elements for this pattern; got 3");
}

// Under each family that has its own loops over rows, and under plain loops.
template <class F>
void for_each_family(F&& f) {
  const std::string before = forced_impl();
  for (const char* family : {"cpu:ref", "cpu:avx2", "cpu:avx512", "cpu:neon", ""}) {
    if (!force_impl(family).ok()) continue;  // of another processor's build
    SCOPED_TRACE(family);
    f();
  }
  expect_ok(force_impl(before));
}

struct SoftmaxCase {
  std::int64_t rows, cols, r, c;
  double density;
};

// Blocks with padding, rows of single elements, and rows of several parts with a part of a vector left.
constexpr SoftmaxCase kSoftmaxCases[] = {
    {29, 37, 4, 8, 0.5}, {29, 37, 1, 1, 0.5}, {6, 5003, 2, 1027, 0.9}, {5, 6007, 1, 1, 0.8}};

void expect_softmax(const SoftmaxCase& c, DType dtype, const Executor& executor) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto rows = static_cast<std::size_t>(c.rows);
  Matrix w(c.rows, c.cols, c.r, c.c, dtype, 5, c.density);
  std::vector<double> v = w.problem.values;
  w.each([&](std::size_t at, std::int64_t n, std::int64_t k) {
    v[at] = n == 3 || (n == 4 && k % 2 == 0) ? -kInfinity : v[at] / 4;
  });
  w.values = encode(v, dtype);
  v = decode(w.values, dtype);
  std::vector<std::byte> out(w.values.size(), std::byte{0x7f});
  expect_ok(stored_softmax("test", w.view(), out.data(), executor));
  std::vector<double> got = decode(out, dtype), sums(rows), most(rows, -kInfinity), want(v.size());
  w.each([&](std::size_t at, std::int64_t n, std::int64_t) { most[n] = std::max(most[n], v[at]); });
  w.each([&](std::size_t at, std::int64_t n, std::int64_t) {
    if (most[n] > -kInfinity) sums[n] += want[at] = std::exp(v[at] - most[n]);
  });
  const double unit = std::ldexp(1.0, dtype == DType::f64   ? -53
                                      : dtype == DType::f32 ? -24
                                      : dtype == DType::f16 ? -11
                                                            : -8);
  w.each([&](std::size_t at, std::int64_t n, std::int64_t) {
    if (sums[n] > 0) want[at] /= sums[n];
  });
  // Floats: v − max is rounded, up to 16 of it; exp is within an ulp or two; sums of up to 1,024 in lanes of
  // four and more, or one by one in blocks; a division, a rounding. Subnormals of 16 bits, and e⁻⁸⁷.
  const double terms = static_cast<double>(std::min<std::int64_t>(c.c, 1024));
  const double wide = dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  for (std::size_t at = 0; at < got.size(); ++at) {
    EXPECT_NEAR(got[at], want[at], (16 + terms) * wide * want[at] + unit * want[at] + 0x1p-25);
  }
  std::vector<std::byte> gradient(out.size(), std::byte{0x7f});
  const std::vector<std::byte> g = encode(w.problem.values, dtype);
  expect_ok(stored_softmax_gradient("test", {w.view().plan, out.data(), dtype}, g.data(), gradient.data()));
  const std::vector<double> dv = decode(gradient, dtype);
  std::vector<double> inner(rows);
  w.each([&](std::size_t at, std::int64_t n, std::int64_t) { inner[n] += got[at] * w.problem.values[at]; });
  w.each([&](std::size_t at, std::int64_t n, std::int64_t) {
    const double exact = got[at] * (w.problem.values[at] - inner[n]);
    EXPECT_NEAR(dv[at], exact, 2 * unit * std::fabs(exact) + 1e-5 * got[at] + 0x1p-25);
  });
}

TEST(StoredSoftmaxTest, IsThatOfTheStoredElements) {
  ThreadPool pool(2);
  for_each_family([&] {
    for (const SoftmaxCase& c : kSoftmaxCases) {
      for (const DType dtype : kFloats) expect_softmax(c, dtype, pool.executor());
    }
  });
}

TEST(StoredSoftmaxTest, NaNAndInfinitySpoilTheirRowsAlone) {
  for_each_family([&] {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const std::int64_t cols : {5, 50}) {  // a part of a vector, and several vectors
        Matrix w(6, cols, 1, 1, DType::f32, 5, 1.0);
        auto* values = reinterpret_cast<float*>(w.values.data());
        values[cols + 2] = bad;
        std::vector<float> out(w.problem.values.size());
        expect_ok(stored_softmax("test", w.view(), out.data()));
        w.each([&](std::size_t at, std::int64_t n, std::int64_t) { EXPECT_EQ(std::isnan(out[at]), n == 1); });
      }
    }
  });
}

TEST(StoredSoftmaxTest, FarBelowTheLargestIsNothing) {
  for_each_family([&] {
    Matrix w(1, 40, 1, 1, DType::f32, 5, 1.0);
    auto* values = reinterpret_cast<float*>(w.values.data());
    std::fill_n(values, 40, -1000.0F);
    values[17] = 3e38F;
    std::vector<float> out(40);
    expect_ok(stored_softmax("test", w.view(), out.data()));
    for (int at = 0; at < 40; ++at) EXPECT_EQ(out[at], at == 17 ? 1.0F : 0.0F);
  });
}

template <class U>
void expect_integers(const Matrix& w, U scale) {
  const std::int64_t m = 7, n = w.shape().rows, k = w.shape().cols;
  std::vector<U> values, x(static_cast<std::size_t>(m * k)), bias(static_cast<std::size_t>(n)),
      y(static_cast<std::size_t>(m * n));
  for (const double v : w.problem.values)
    values.push_back(static_cast<U>(static_cast<std::int64_t>(v)) * scale);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<U>(i * 2654435761U);
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<U>(0 - i * 40503U);
  for (const Activation activation : {Activation::none, Activation::relu}) {
    expect_ok(integer_linear("test", sizeof(U), x.data(), m, w.view().plan, values.data(), bias.data(),
                             activation, y.data()));
    std::vector<U> want(y.size());
    for (std::int64_t t = 0; t < m; ++t) {
      for (std::int64_t r = 0; r < n; ++r) want[static_cast<std::size_t>(t * n + r)] = bias[r];
      w.each([&](std::size_t at, std::int64_t r, std::int64_t c) {
        U& sum = want[static_cast<std::size_t>(t * n + r)];
        sum = static_cast<U>(sum + std::uint64_t{x[t * k + c]} * values[at]);
      });
    }
    if (activation == Activation::relu) {
      for (U& v : want) v = static_cast<std::make_signed_t<U>>(v) < 0 ? U{0} : v;
    }
    EXPECT_EQ(y, want);
  }
}

TEST(IntegerLinearTest, WrapsAround) {
  const Matrix w(22, 35, 4, 3, DType::f64, 9);
  expect_integers<std::uint8_t>(w, 31);
  expect_integers<std::uint16_t>(w, 8191);
  expect_integers<std::uint32_t>(w, 0x3fffffffU);
  expect_integers<std::uint64_t>(w, 0x3fffffffffffffffU);
}

TEST(IntegerLinearTest, RefusesWhatIntegersDoNotHave) {
  const Matrix w(2, 2, 1, 1, DType::f64, 9);
  std::int64_t none[8] = {};
  EXPECT_EQ(integer_linear("op", 4, none, 1, w.view().plan, none, nullptr, Activation::silu, none).message(),
            "[op] activation of integers must be none or relu; got silu");
  EXPECT_EQ(integer_linear("op", 3, none, 1, w.view().plan, none, nullptr, Activation::none, none).message(),
            "[op] integers must have 1, 2, 4 or 8 bytes; got 3");
}

}  // namespace
}  // namespace rarefy
