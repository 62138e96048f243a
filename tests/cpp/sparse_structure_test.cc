// Sums, parts, joins and values on another pattern: against dense matrices, exactly.
#include "rarefy/sparse_structure.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "product_checks.h"
#include "stored_matrix.h"

namespace rarefy {
namespace {

using test::decode, test::encode, test::expect_ok, test::Matrix;

constexpr DType kFloats[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

struct Sizes {
  std::int64_t rows, cols, r, c;
  double density;
};
const Sizes kSizes[] = {{700, 900, 1, 1, 0.3}, {90, 7, 1, 1, 0.02}, {65, 43, 4, 3, 0.5}, {64, 48, 8, 8, 1.0},
                        {40, 64, 1, 16, 0.4},  {5, 6, 1, 1, 0.0},   {0, 6, 1, 1, 0.0},   {6, 0, 2, 2, 0.0}};

// What a function wrote: a row plan, and values of some dtype.
struct Written {
  BsrShape shape;
  std::vector<std::int32_t> words;
  std::vector<std::byte> values;

  Written(const BsrShape& s, DType dtype)
      : shape(s),
        words(static_cast<std::size_t>(row_plan_size(s)), -1),
        values(static_cast<std::size_t>(s.value_count()) * size_of(dtype), std::byte{0x5a}) {}

  PlanView plan() const {
    const auto view = view_row_plan("test", shape, words);
    EXPECT_TRUE(view.ok()) << view.status().message();
    return *view;
  }

  // Also that columns ascend, and padding is zero.
  std::vector<double> dense(DType dtype) const {
    const PlanView p = plan();
    const std::vector<double> all = decode(values, dtype);
    std::vector<double> result(static_cast<std::size_t>(shape.rows * shape.cols));
    for (std::int64_t i = 0; i < shape.row_count(); ++i) {
      for (std::int32_t e = p.crow[i] + 1; e < p.crow[i + 1]; ++e) EXPECT_GT(p.col[e], p.col[e - 1]);
    }
    test::each_stored(p, [&](std::size_t at, std::int64_t n, std::int64_t k) {
      if (n < shape.rows && k < shape.cols) {
        result[static_cast<std::size_t>(n * shape.cols + k)] = all[at];
      } else {
        EXPECT_EQ(all[at], 0);
      }
    });
    return result;
  }
};

std::vector<double> sum(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

template <class F>
void on_one_thread_and_three(F&& f) {
  ThreadPool pool(3);
  f(Executor{});
  f(pool.executor());
}

TEST(SparseSumTest, StoresWhatEitherDoes) {
  on_one_thread_and_three([](const Executor& executor) {
    for (const Sizes& q : kSizes) {
      for (const DType dtype : kFloats) {
        const Matrix a(q.rows, q.cols, q.r, q.c, dtype, 3, q.density),
            b(q.rows, q.cols, q.r, q.c, dtype, 4, q.density);
        const auto rows = sum_rows("test", a.view().plan, b.view().plan, executor);
        ASSERT_TRUE(rows.ok()) << rows.status().message();
        Written out(rows->shape, dtype);
        expect_ok(write_sum("test", a.view(), b.view(), *rows, out.words, out.values.data(), executor));
        EXPECT_EQ(out.dense(dtype), sum(a.dense, b.dense)) << q.rows << 'x' << q.cols << ' ' << name(dtype);
        // No block more: those of the union.
        std::int64_t both = 0;
        const PlanView pa = a.view().plan, pb = b.view().plan;
        for (std::int64_t i = 0; i < pa.shape.row_count(); ++i) {
          for (std::int32_t e = pa.crow[i]; e < pa.crow[i + 1]; ++e)
            both += std::binary_search(pb.col + pb.crow[i], pb.col + pb.crow[i + 1], pa.col[e]);
        }
        EXPECT_EQ(rows->shape.nnzb, a.shape().nnzb + b.shape().nnzb - both);
        // Back to what one of them stores: the sum there.
        Written back(a.shape(), dtype);
        expect_ok(on_pattern("test", out.plan(), out.values.data(), static_cast<int>(size_of(dtype)),
                             a.view().plan, {}, back.values.data(), executor));
        const std::vector<double> got = decode(back.values, dtype);
        a.each([&](std::size_t at, std::int64_t n, std::int64_t k) {
          const auto place = static_cast<std::size_t>(n * q.cols + k);
          EXPECT_EQ(got[at], a.dense[place] + b.dense[place]);
        });
      }
    }
  });
}

// Values that are stored alone keep their bits, NaN and the sign of zero; sums of infinities are NaN.
TEST(SparseSumTest, KeepsWhatIsAlone) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::int32_t crow_a[] = {0, 4}, col_a[] = {0, 2, 4, 6}, crow_b[] = {0, 4}, col_b[] = {1, 2, 4, 7};
  const float a[] = {-0.0F, inf, -0.0F, nan}, b[] = {-0.0F, -inf, -0.0F, inf};
  const auto pa = Pattern::create({1, 8, 1, 1, 4}, crow_a, col_a),
             pb = Pattern::create({1, 8, 1, 1, 4}, crow_b, col_b);
  const BsrView x{pa->view(), a, DType::f32}, y{pb->view(), b, DType::f32};
  const auto rows = sum_rows("test", x.plan, y.plan);
  Written out(rows->shape, DType::f32);
  expect_ok(write_sum("test", x, y, *rows, out.words, out.values.data()));
  const std::vector<double> got = decode(out.values, DType::f32);
  ASSERT_EQ(got.size(), 6U);  // columns 0, 1, 2, 4, 6, 7
  for (const std::size_t at : {0U, 1U, 3U}) EXPECT_TRUE(got[at] == 0 && std::signbit(got[at])) << at;
  EXPECT_TRUE(std::isnan(got[2]) && std::isnan(got[4]));
  EXPECT_EQ(got[5], inf);
}

TEST(SparseSumTest, IntegersWrapAround) {
  const std::int32_t crow[] = {0, 2}, col[] = {0, 1};
  const auto pattern = Pattern::create({1, 2, 1, 1, 2}, crow, col);
  const std::int8_t a[] = {127, -128}, b[] = {1, -128};
  const BsrView x{pattern->view(), a, DType::i8}, y{pattern->view(), b, DType::i8};
  const auto rows = sum_rows("test", x.plan, y.plan);
  Written out(rows->shape, DType::i8);
  expect_ok(write_sum("test", x, y, *rows, out.words, out.values.data(), {}, 1));
  EXPECT_EQ(decode(out.values, DType::i8), (std::vector<double>{-128, 0}));
  EXPECT_FALSE(write_sum("test", x, y, *rows, out.words, out.values.data()).ok());  // int8 is no float
}

TEST(SparseSumTest, AddsToDense) {
  on_one_thread_and_three([](const Executor& executor) {
    for (const Sizes& q : kSizes) {
      for (const DType dtype : kFloats) {
        const Matrix a(q.rows, q.cols, q.r, q.c, dtype, 3, q.density), b(q.rows, q.cols, 1, 1, dtype, 4, 1.0);
        std::vector<std::byte> x = encode(b.dense, dtype), y(x.size());
        const MatrixView from{x.data(), dtype, q.rows, q.cols, q.cols};
        expect_ok(add_dense("test", from, a.view(), {y.data(), dtype, q.rows, q.cols, q.cols}, executor));
        EXPECT_EQ(decode(y, dtype), sum(a.dense, b.dense));
        expect_ok(add_dense("test", from, a.view(), {x.data(), dtype, q.rows, q.cols, q.cols}, executor));
        EXPECT_EQ(x, y);  // in place
      }
    }
  });
}

TEST(SparsePartTest, SlicesAtEdgesOfBlocks) {
  on_one_thread_and_three([](const Executor& executor) {
    for (const Sizes& q : kSizes) {
      const Matrix a(q.rows, q.cols, q.r, q.c, DType::f32, 3, q.density);
      const auto edge = [](std::int64_t part, std::int64_t size, std::int64_t block) {
        return std::min(size, part * size / 4 / block * block);
      };
      for (const auto& [first, last] : {std::pair{0, 4}, {1, 3}, {2, 4}, {1, 1}, {4, 4}}) {
        const auto end = [&](int part, std::int64_t size, std::int64_t block) {
          return part == 4 ? size : edge(part, size, block);
        };
        const Range rows{end(first, q.rows, q.r), end(last, q.rows, q.r)};
        const Range cols{edge(1, q.cols, q.c), end(last, q.cols, q.c)};
        const auto stored = slice_rows("test", a.view().plan, rows, cols, executor);
        ASSERT_TRUE(stored.ok()) << stored.status().message();
        Written out(stored->shape, DType::f32);
        expect_ok(write_slice("test", a.view().plan, a.values.data(), 4, rows, cols, *stored, out.words,
                              out.values.data(), executor));
        std::vector<double> want;
        for (std::int64_t n = rows.begin; n < rows.end; ++n) {
          const auto row = a.dense.begin() + n * q.cols;
          want.insert(want.end(), row + cols.begin, row + cols.end);
        }
        EXPECT_EQ(out.dense(DType::f32), want) << q.rows << 'x' << q.cols << ' ' << first << ' ' << last;
        // The way of its gradient: to the whole pattern, zero outside of the slice.
        Written whole(a.shape(), DType::f32);
        expect_ok(on_pattern("test", out.plan(), out.values.data(), 4, a.view().plan,
                             {-rows.begin / q.r, -cols.begin / q.c}, whole.values.data(), executor));
        const std::vector<double> got = decode(whole.values, DType::f32);
        a.each([&](std::size_t at, std::int64_t n, std::int64_t k) {
          const bool inside = n >= rows.begin && n < rows.end && k >= cols.begin && k < cols.end;
          EXPECT_EQ(got[at], inside ? a.dense[static_cast<std::size_t>(n * q.cols + k)] : 0);
        });
      }
    }
  });
}

TEST(SparsePartTest, JoinsAndComesApart) {
  on_one_thread_and_three([](const Executor& executor) {
    for (const Side side : {Side::below, Side::beside}) {
      for (const DType dtype : {DType::f64, DType::bf16, DType::i8}) {
        const bool below = side == Side::below;
        std::vector<Matrix> parts;
        for (const std::int64_t size : {12, 40, 0, 7}) {  // the last is ragged
          const std::int64_t rows = below ? size : 37, cols = below ? 37 : size;
          parts.emplace_back(rows, cols, 4, 4, dtype, 3 + static_cast<unsigned>(size), 0.5);
        }
        std::vector<PlanView> plans;
        std::vector<const void*> values;
        for (const Matrix& part : parts) {
          plans.push_back(part.view().plan);
          values.push_back(part.values.data());
        }
        const auto shape = joined_shape("test", plans, side);
        ASSERT_TRUE(shape.ok()) << shape.status().message();
        const auto bytes = static_cast<int>(size_of(dtype));
        Written out(*shape, dtype);
        expect_ok(join("test", plans, values, bytes, side, out.words, out.values.data(), executor));
        const std::vector<double> whole = out.dense(dtype);
        std::int64_t start = 0;
        for (const Matrix& part : parts) {
          const BsrShape& s = part.shape();
          for (std::int64_t n = 0; n < s.rows; ++n) {
            for (std::int64_t k = 0; k < s.cols; ++k) {
              const std::int64_t row = n + (below ? start : 0), col = k + (below ? 0 : start);
              ASSERT_EQ(whole[static_cast<std::size_t>(row * shape->cols + col)],
                        part.dense[static_cast<std::size_t>(n * s.cols + k)]);
            }
          }
          const Offset offset{below ? start / 4 : 0, below ? 0 : start / 4};
          std::vector<std::byte> back(part.values.size());
          expect_ok(on_pattern("test", out.plan(), out.values.data(), bytes, part.view().plan, offset,
                               back.data(), executor));
          const std::vector<double> got = decode(back, dtype);
          part.each([&](std::size_t at, std::int64_t n, std::int64_t k) {
            ASSERT_EQ(got[at], part.dense[static_cast<std::size_t>(n * s.cols + k)]);
          });
          start += below ? s.rows : s.cols;
        }
      }
    }
  });
}

TEST(SparseStructureTest, BadInputIsRefusedByName) {
  const Matrix a(8, 12, 4, 4, DType::f32, 3), b(8, 16, 4, 4, DType::f32, 3), c(8, 12, 2, 4, DType::f32, 3),
      d(6, 12, 4, 4, DType::f32, 3);
  const auto text = [](const Status& status) { return std::string(status.message()); };
  const auto refused = [&](const Status& status, const char* part) {
    EXPECT_FALSE(status.ok());
    EXPECT_NE(text(status).find(part), std::string::npos) << text(status);
  };
  refused(sum_rows("op", a.view().plan, b.view().plan).status(),
          "[op] b must be 8 × 12 in blocks of 4 × 4, as a is; got 8 × 16");
  refused(sum_rows("op", a.view().plan, c.view().plan).status(), "got 8 × 12 in blocks of 2 × 4");
  refused(slice_rows("op", a.view().plan, {0, 9}, {0, 12}).status(),
          "rows must be a range within 0 … 8; got 0 … 9");
  refused(slice_rows("op", a.view().plan, {-4, 8}, {0, 12}).status(), "got -4 … 8");
  refused(slice_rows("op", a.view().plan, {0, 8}, {2, 12}).status(),
          "columns must begin and end at a multiple of the block's 4; got 2");
  const PlanView wide[] = {a.view().plan, b.view().plan}, cut[] = {d.view().plan, a.view().plan},
                 blocks[] = {a.view().plan, c.view().plan};
  refused(joined_shape("op", wide, Side::below).status(), "matrices[1] must have 12 columns; got 16");
  refused(joined_shape("op", cut, Side::below).status(),
          "matrices[0] must end at a multiple of the block's 4; got 6");
  refused(joined_shape("op", cut, Side::beside).status(), "matrices[1] must have 6 rows; got 8");
  refused(joined_shape("op", blocks, Side::below).status(), "must be in blocks of 4 × 4; got 2 × 4");
  refused(joined_shape("op", {}, Side::below).status(), "at least one matrix; got 0");
  std::vector<std::int32_t> words(3);
  std::vector<std::byte> out(a.values.size());
  const auto rows = sum_rows("op", a.view().plan, a.view().plan);
  refused(write_sum("op", a.view(), a.view(), *rows, words, out.data()), "a row plan must have");
  refused(on_pattern("op", a.view().plan, a.values.data(), 4, c.view().plan, {}, out.data()),
          "the pattern must be in blocks of 4 × 4; got 2 × 4");
  refused(on_pattern("op", a.view().plan, a.values.data(), 3, a.view().plan, {}, out.data()),
          "an element must have 1, 2, 4 or 8 bytes; got 3");
  std::vector<float> dense(8 * 12);
  const MatrixView x{dense.data(), DType::f32, 8, 12, 12};
  refused(add_dense("op", x, b.view(), {dense.data(), DType::f32, 8, 12, 12}),
          "dense must be 8 × 16, by rows");
  refused(add_dense("op", x, a.view(), {dense.data(), DType::f32, 8, 12, 4}),
          "must not overlap; got 4 apart");
  refused(add_dense("op", x, a.view(), {dense.data(), DType::f64, 8, 12, 12}), "must have one dtype");
}

}  // namespace
}  // namespace rarefy
