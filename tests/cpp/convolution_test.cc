// Convolutions and their gradients: against plain loops over places in double.
#include "rarefy/convolution.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "product_checks.h"
#include "stored_matrix.h"

namespace rarefy {
namespace {

using test::decode, test::encode, test::expect_ok, test::Matrix;

constexpr DType kFloats[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

struct Case {
  Convolution sizes;
  std::int64_t n, r, c;
};
const Case kCases[] = {{{2, 7, 9, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 12, 4, 2},
                       {{1, 80, 71, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 8, 8, 1},  // several pieces
                       {{5, 30, 16, 8, 3, 5, 2, 1, 1, 1, 0, 1, 2, 1}, 8, 1, 1},
                       {{3, 9, 8, 3, 2, 3, 1, 2, 3, 2, 2, 0, 1, 4}, 5, 1, 3},  // dilated, ragged
                       {{2, 6, 6, 16, 1, 1, 2, 3, 1, 1, 0, 0, 0, 0}, 16, 16, 16},
                       {{1, 1, 1, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1}, 4, 2, 2},  // windows reach over all sides
                       {{0, 4, 4, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0}, 4, 2, 2}};

// Calls f(output place, n, kernel place · channels + channel, input element or −1) for each term.
template <class F>
void each_term(const Case& q, F&& f) {
  const Convolution& s = q.sizes;
  for (std::int64_t out = 0; out < s.images * s.out_rows() * s.out_cols(); ++out) {
    const std::int64_t image = out / (s.out_rows() * s.out_cols());
    const std::int64_t y = out / s.out_cols() % s.out_rows(), x = out % s.out_cols();
    for (std::int64_t k = 0; k < s.window(); ++k) {
      const std::int64_t place = k / s.channels;
      const std::int64_t row = y * s.stride_rows + place / s.kernel_cols * s.dilation_rows - s.top;
      const std::int64_t col = x * s.stride_cols + place % s.kernel_cols * s.dilation_cols - s.left;
      if (row < 0 || row >= s.rows || col < 0 || col >= s.cols) continue;
      f(out, k, ((image * s.rows + row) * s.cols + col) * s.channels + k % s.channels);
    }
  }
}

std::vector<double> whole_numbers(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> numbers(static_cast<std::size_t>(count));
  for (double& number : numbers) number = static_cast<double>(random() % 3) - 1;
  return numbers;
}

// One thread and three; small whole numbers, so that every sum is exact in every dtype.
TEST(ConvolutionTest, IsExactOnIntegersForwardAndBackward) {
  ThreadPool pool(3);
  for (const Case& q : kCases) {
    const Convolution& s = q.sizes;
    for (const DType dtype : kFloats) {
      const Matrix w(q.n, s.window(), q.r, q.c, dtype, 7, 0.3);
      const std::int64_t places = s.images * s.out_rows() * s.out_cols();
      const std::vector<double> x = whole_numbers(s.images * s.rows * s.cols * s.channels, 1),
                                dy = whole_numbers(places * q.n, 2), bias = whole_numbers(q.n, 3);
      std::vector<double> y(dy.size()), dx(x.size()), dw(w.dense.size());
      for (std::int64_t out = 0; out < places; ++out) {
        for (std::int64_t n = 0; n < q.n; ++n) y[out * q.n + n] = bias[n];
      }
      each_term(q, [&](std::int64_t out, std::int64_t k, std::int64_t in) {
        for (std::int64_t n = 0; n < q.n; ++n) {
          const double weight = w.dense[n * s.window() + k];
          y[out * q.n + n] += weight * x[in];
          dx[in] += weight * dy[out * q.n + n];
          dw[n * s.window() + k] += dy[out * q.n + n] * x[in];
        }
      });
      for (double& value : y) value = std::max(value, 0.0);
      const auto exact = [&](const std::vector<double>& numbers) {
        return decode(encode(numbers, dtype), dtype);
      };
      const std::vector<std::byte> images = encode(x, dtype), gradient = encode(dy, dtype),
                                   b = encode(bias, dtype);
      const ImagesView in{images.data(), dtype, s.rows * s.cols * s.channels, s.cols * s.channels,
                          s.channels};
      for (const Executor& executor : {Executor{}, pool.executor()}) {
        std::vector<std::byte> out(gradient.size()), back(images.size()), values(w.values.size());
        const Context context{executor};
        expect_ok(convolution("test", s, in, w.view(), b.data(), Activation::relu, out.data(), context));
        EXPECT_EQ(decode(out, dtype), exact(y)) << name(dtype) << ' ' << s.rows << 'x' << s.cols;
        expect_ok(convolution_grad_input("test", s, gradient.data(), dtype, w.view(), back.data(), context));
        EXPECT_EQ(decode(back, dtype), exact(dx)) << name(dtype) << ' ' << s.rows << 'x' << s.cols;
        expect_ok(
            convolution_grad_weight("test", s, gradient.data(), in, w.view().plan, values.data(), context));
        const std::vector<double> got = decode(values, dtype), want = exact(dw);
        w.each([&](std::size_t at, std::int64_t n, std::int64_t k) {
          EXPECT_EQ(got[at], want[static_cast<std::size_t>(n * s.window() + k)]);
        });
      }
    }
  }
}

// Images inside of larger ones, whose other elements nobody may read: NaN.
TEST(ConvolutionTest, ReadsStridesAndNothingElse) {
  const Convolution s{2, 5, 6, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1};
  const Matrix w(4, s.window(), 2, 1, DType::f32, 7, 0.5);
  const std::vector<double> x = whole_numbers(2 * 5 * 6 * 3, 1);
  const std::int64_t image = 600, row = 80, col = 7;
  std::vector<float> spread(1300, std::numeric_limits<float>::quiet_NaN()), close(x.begin(), x.end());
  for (std::int64_t i = 0; i < std::ssize(x); ++i)
    spread[i / 90 * image + i / 18 % 5 * row + i / 3 % 6 * col + i % 3] = static_cast<float>(x[i]);
  std::vector<float> a(2 * 5 * 6 * 4), b(a.size());
  expect_ok(convolution("test", s, {spread.data(), DType::f32, image, row, col}, w.view(), nullptr,
                        Activation::none, a.data()));
  expect_ok(convolution("test", s, {close.data(), DType::f32, 90, 18, 3}, w.view(), nullptr, Activation::none,
                        b.data()));
  EXPECT_EQ(a, b);
}

TEST(ConvolutionTest, BadSizesAreRefusedByName) {
  const Matrix w(4, 18, 2, 1, DType::f32, 7, 0.5);
  const std::vector<float> x(200);
  std::vector<float> y(400);
  const auto refused = [&](const Convolution& sizes, const char* part) {
    const Status status = convolution("op", sizes, {x.data(), DType::f32, 50, 10, 2}, w.view(), nullptr,
                                      Activation::none, y.data());
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status.message();
    EXPECT_FALSE(convolution_grad_input("op", sizes, x.data(), DType::f32, w.view(), y.data()).ok());
    EXPECT_FALSE(convolution_grad_weight("op", sizes, x.data(), {x.data()}, w.view().plan, y.data()).ok());
  };
  refused({1, 5, 5, 3, 3, 3}, "[op] weight must have 27 columns, kernel places times channels; got 18");
  refused({1, 2, 5, 2, 3, 3}, "a window must fit into an image with its padding; got 2 × 5");
  refused({1, 5, 5, 2, 3, 3, 0, 1}, "kernel, stride and dilation must be at least 1; got 0");
  refused({1, 5, 5, 2, 3, 3, 1, 1, 1, 1, -1}, "padding must not be negative; got -1");
  refused({-1, 5, 5, 2, 3, 3}, "sizes of x must not be negative; got -1 × 5 × 5 × 2");
}

}  // namespace
}  // namespace rarefy
