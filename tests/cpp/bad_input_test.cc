// Bad arguments of the core, one by one and by name: each gives a status with the right code, whose
// text has the form "[op] requirement; got value" and names argument and position, and writes nothing.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>

#include "memory.h"
#include "rarefy/backend.h"
#include "rarefy/convert.h"
#include "rarefy/linear.h"

namespace rarefy::test {
namespace {

using Ints = std::vector<std::int32_t>;

// A good layer: W (8, 12) in blocks of 2×3 (4 × 4 of them), 5 stored; x (3, 12), y (3, 8), all float.
struct Layer {
  Ints crow{0, 2, 2, 3, 5};
  Ints col{0, 3, 1, 0, 2};
  Pattern pattern = *Pattern::create({8, 12, 2, 3, 0}, crow, col);
  std::vector<float> values = std::vector<float>(30, 1), bias = std::vector<float>(8, 1);
  std::vector<float> x = std::vector<float>(36, 1), dy = std::vector<float>(24, 1);
  std::vector<float> y = std::vector<float>(64, -7), dx = std::vector<float>(64, -7);
  std::vector<float> dvalues = std::vector<float>(30, -7);

  MatrixView x_view() const { return {x.data(), DType::f32, 3, 12, 12}; }
  MatrixView dy_view() const { return {dy.data(), DType::f32, 3, 8, 8}; }
  BsrView w() const { return {pattern.view(), values.data()}; }
  MutableMatrixView y_view() { return {y.data(), DType::f32, 3, 8, 8}; }
  MutableMatrixView dx_view() { return {dx.data(), DType::f32, 3, 12, 12}; }

  bool untouched() const {
    for (const std::vector<float>* output : {&y, &dx, &dvalues}) {
      for (const float number : *output) {
        if (number != -7) return false;
      }
    }
    return true;
  }
};

template <class T>
Status status_of(const Result<T>& result) {
  return result.status();
}

Status pattern(const Ints& crow, const Ints& col, BsrShape shape = {8, 12, 2, 3, 0}) {
  return Pattern::create(shape, crow, col).status();
}

Status linear_with(Layer& l, const std::function<void(MatrixView&, BsrView&, MutableMatrixView&)>& change) {
  MatrixView x = l.x_view();
  BsrView w = l.w();
  MutableMatrixView y = l.y_view();
  change(x, w, y);
  return linear(x, w, l.bias.data(), Activation::none, y);
}

struct Case {
  const char* name;
  StatusCode code;
  const char* text;  // a part of the message
  std::function<Status(Layer&)> run;
};

constexpr StatusCode kValue = StatusCode::invalid_argument;
constexpr StatusCode kType = StatusCode::type_mismatch;
constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;

const Case kCases[] = {
    // Patterns.
    {"CrowTooShort", kValue, "[Pattern] crow_indices must have 5 elements for 4 block rows; got 4",
     [](Layer& l) {
       return pattern({0, 2, 2, 5}, l.col);
     }},
    {"CrowTooLong", kValue, "crow_indices must have 5 elements for 4 block rows; got 6",
     [](Layer& l) {
       return pattern({0, 2, 2, 3, 5, 5}, l.col);
     }},
    {"CrowEmpty", kValue, "crow_indices must have 5 elements", [](Layer& l) { return pattern({}, l.col); }},
    {"CrowFirstNotZero", kValue, "crow_indices[0] must be 0; got 1",
     [](Layer& l) {
       return pattern({1, 2, 2, 3, 5}, l.col);
     }},
    {"CrowLastTooSmall", kValue, "crow_indices[4] must be the length of col_indices, 5; got 4",
     [](Layer& l) {
       return pattern({0, 2, 2, 3, 4}, l.col);
     }},
    {"CrowLastTooLarge", kValue, "crow_indices[4] must be the length of col_indices, 5; got 6",
     [](Layer& l) {
       return pattern({0, 2, 2, 3, 6}, l.col);
     }},
    {"CrowDecreases", kValue, "crow_indices[3]=1 after crow_indices[2]=2",
     [](Layer& l) {
       return pattern({0, 2, 2, 1, 5}, l.col);
     }},
    {"CrowNegative", kValue, "crow_indices[1]=-1 after crow_indices[0]=0",
     [](Layer& l) {
       return pattern({0, -1, 2, 3, 5}, l.col);
     }},
    {"RowWithTooManyBlocks", kValue, "crow_indices[1]-crow_indices[0]=5",
     [](Layer& l) {
       return pattern({0, 5, 5, 5, 5}, l.col);
     }},
    {"ColTooLarge", kValue, "col_indices[2]=4 out of range for 4 block columns",
     [](Layer& l) {
       return pattern(l.crow, {0, 3, 4, 0, 2});
     }},
    {"ColNegative", kValue, "col_indices[0]=-1 out of range for 4 block columns",
     [](Layer& l) {
       return pattern(l.crow, {-1, 3, 1, 0, 2});
     }},
    {"ColUnsorted", kValue, "col_indices[4]=0 after 2 in block row 3",
     [](Layer& l) {
       return pattern(l.crow, {0, 3, 1, 2, 0});
     }},
    {"ColTwice", kValue, "col_indices[1]=3 after 3 in block row 0",
     [](Layer& l) {
       return pattern(l.crow, {3, 3, 1, 0, 2});
     }},
    {"ColWithoutColumns", kValue, "the number of stored blocks must be in [0, 0]; got 5",
     [](Layer& l) {
       return pattern(l.crow, l.col, {8, 0, 2, 3, 0});
     }},
    {"BlockRowsZero", kValue, "block_shape must be at least 1 in each dimension; got (0, 3)",
     [](Layer& l) {
       return pattern(l.crow, l.col, {8, 12, 0, 3, 0});
     }},
    {"BlockColsNegative", kValue, "block_shape must be at least 1 in each dimension; got (2, -3)",
     [](Layer& l) {
       return pattern(l.crow, l.col, {8, 12, 2, -3, 0});
     }},
    {"ShapeNegative", kValue, "shape must not be negative; got (-8, 12)",
     [](Layer& l) {
       return pattern(l.crow, l.col, {-8, 12, 2, 3, 0});
     }},
    {"ShapeBeyondInt32", kValue, "must be at most 2147483647",
     [](Layer& l) {
       return pattern(l.crow, l.col, {kHuge, 12, 2, 3, 0});
     }},
    {"BlocksThatOverflow", kValue, "the values must fit in memory; got 1 blocks of (2147483647, 2147483647)",
     [](Layer&) {
       return check_shape("test", {2147483647, 2147483647, 2147483647, 2147483647, 1});
     }},
    {"MoreBlocksThanFit", kValue, "the number of stored blocks must be in [0, 16]; got 17",
     [](Layer&) {
       return check_shape("test", {8, 12, 2, 3, 17});
     }},
    {"NegativeBlockCount", kValue, "the number of stored blocks must be in [0, 16]; got -1",
     [](Layer&) {
       return check_shape("test", {8, 12, 2, 3, -1});
     }},
    {"Int64ColTooLarge", kValue, "col_indices[0]=4294967296 out of range for 4 block columns",
     [](Layer&) {
       const std::array<std::int64_t, 5> crow{0, 1, 1, 1, 1};
       const std::array<std::int64_t, 1> col{1LL << 32};
       return check_indices("test", {8, 12, 2, 3, 1}, std::span<const std::int64_t>(crow),
                            std::span<const std::int64_t>(col));
     }},
    // Plans.
    {"PlanTooShort", kValue, "[test] plan must have",
     [](Layer& l) { return status_of(view_plan("test", l.pattern.shape(), l.pattern.plan().first(10))); }},
    {"PlanOfGarbage", kValue, "got something else",
     [](Layer& l) {
       return status_of(view_plan("test", l.pattern.shape(), Ints(l.pattern.plan().size(), 42)));
     }},
    {"PlanOfAnotherShape", kValue, "got a plan for shape (12, 8)",
     [](Layer& l) {
       const Pattern other = *Pattern::create({12, 8, 3, 2, 0}, l.crow, l.col);
       return status_of(view_plan("test", l.pattern.shape(), other.plan()));
     }},
    {"PlanWithoutRoom", kValue, "plan must have",
     [](Layer& l) {
       Ints words(3, -1);
       BsrShape shape = l.pattern.shape();
       const Status status = build_plan("test", shape, l.crow, l.col, words);
       EXPECT_EQ(words, Ints(3, -1));
       return status;
     }},
    {"DevicePlanTooLong", kValue, "plan must have",
     [](Layer& l) { return status_of(view_device_plan("test", l.pattern.shape(), l.crow.data(), 1000)); }},
    // linear.
    {"LinearInFeatures", kValue, "[linear] x must have 12 columns (in_features); got 11",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.cols = 11; }); }},
    {"LinearOutFeatures", kValue, "y must have 8 columns (out_features); got 7",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.cols = 7; }); }},
    {"LinearTokens", kValue, "y must have 3 rows, like x; got 2",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.rows = 2; }); }},
    {"LinearNullX", kValue, "x must point to its elements; got a null pointer",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.data = nullptr; }); }},
    {"LinearNullY", kValue, "y must point to its elements; got a null pointer",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.data = nullptr; }); }},
    {"LinearNullValues", kValue, "values must point to its elements; got a null pointer",
     [](Layer& l) { return linear_with(l, [](auto&, auto& w, auto&) { w.values = nullptr; }); }},
    {"LinearNullPlan", kValue, "plan must point to its index arrays; got a null pointer",
     [](Layer& l) { return linear_with(l, [](auto&, auto& w, auto&) { w.plan.col = nullptr; }); }},
    {"LinearNegativeRows", kValue, "x's shape must not be negative; got (-3, 12)",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.rows = -3; }); }},
    {"LinearNegativeStride", kValue, "x's row stride must not be negative; got -12",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.row_stride = -12; }); }},
    {"LinearStrideOverflows", kValue, "x must fit in memory; got shape (3, 12), row stride",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.row_stride = kHuge; }); }},
    {"LinearOverlappingRows", kValue, "y's rows must not overlap: row stride ≥ 8; got 7",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.row_stride = 7; }); }},
    {"LinearBroadcastOutput", kValue, "y's rows must not overlap: row stride ≥ 8; got 0",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.row_stride = 0; }); }},
    {"LinearMixedInputs", kType, "x and values must have one dtype; got f16 and f32",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.dtype = DType::f16; }); }},
    {"LinearOutputDtype", kType, "y must be f32 for f32 inputs; got bf16",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.dtype = DType::bf16; }); }},
    {"LinearInt8Output", kType, "y must be f32 or f64 for i8 inputs; got i8",
     [](Layer& l) {
       return linear_with(l, [](auto& x, auto& w, auto& y) { x.dtype = w.dtype = y.dtype = DType::i8; });
     }},
    {"LinearDevices", kType, "x must be on device cpu; got cuda",
     [](Layer& l) { return linear_with(l, [](auto& x, auto&, auto&) { x.device = Device::cuda; }); }},
    {"LinearOutputDevice", kType, "y must be on device cpu; got cuda",
     [](Layer& l) { return linear_with(l, [](auto&, auto&, auto& y) { y.device = Device::cuda; }); }},
    {"LinearInPlace", kValue, "y must not share memory with the inputs; got an overlap with x",
     [](Layer& l) { return linear_with(l, [&l](auto& x, auto&, auto&) { x.data = l.y.data() + 5; }); }},
    {"LinearOverValues", kValue, "got an overlap with values",
     [](Layer& l) { return linear_with(l, [&l](auto&, auto& w, auto&) { w.values = l.y.data() + 20; }); }},
    {"LinearOverBias", kValue, "got an overlap with bias",
     [](Layer& l) { return linear(l.x_view(), l.w(), l.y.data(), Activation::none, l.y_view()); }},
    // The gradients.
    {"GradInputOutFeatures", kValue, "[grad_input] dy must have 8 columns (out_features); got 12",
     [](Layer& l) { return grad_input(l.x_view(), l.w(), l.dx_view()); }},
    {"GradInputInFeatures", kValue, "dx must have 12 columns (in_features); got 8",
     [](Layer& l) {
       return grad_input(l.dy_view(), l.w(), {l.dx.data(), DType::f32, 3, 8, 8});
     }},
    {"GradInputTokens", kValue, "dx must have 3 rows, like dy; got 4",
     [](Layer& l) {
       return grad_input(l.dy_view(), l.w(), {l.dx.data(), DType::f32, 4, 12, 12});
     }},
    {"GradInputDtype", kType, "dx must be f32 for f32 inputs; got f64",
     [](Layer& l) {
       return grad_input(l.dy_view(), l.w(), {l.dx.data(), DType::f64, 3, 12, 12});
     }},
    {"GradInputInPlace", kValue, "dx must not share memory with the inputs; got an overlap with dy",
     [](Layer& l) {
       return grad_input({l.dx.data(), DType::f32, 3, 8, 8}, l.w(), l.dx_view());
     }},
    {"GradWeightTokens", kValue, "[grad_weight] x must have 3 rows, like dy; got 2",
     [](Layer& l) {
       return grad_weight(l.dy_view(), {l.x.data(), DType::f32, 2, 12, 12}, l.pattern.view(),
                          l.dvalues.data(), DType::f32);
     }},
    {"GradWeightFeatures", kValue, "x must have 12 columns (in_features); got 8",
     [](Layer& l) {
       return grad_weight(l.dy_view(), l.dy_view(), l.pattern.view(), l.dvalues.data(), DType::f32);
     }},
    {"GradWeightNull", kValue, "dvalues must point to its elements; got a null pointer",
     [](Layer& l) { return grad_weight(l.dy_view(), l.x_view(), l.pattern.view(), nullptr, DType::f32); }},
    {"GradWeightDtype", kType, "dvalues must be f32 for f32 inputs; got f16",
     [](Layer& l) {
       return grad_weight(l.dy_view(), l.x_view(), l.pattern.view(), l.dvalues.data(), DType::f16);
     }},
    // Conversion.
    {"DenseMaskTooShort", kValue, "[dense_to_bsr] block_mask must have 2 elements, one a block; got 1",
     [](Layer& l) {
       return status_of(dense_to_bsr(l.x_view(), {3, 6}, std::array<std::uint8_t, 1>{1}));
     }},
    {"DenseMaskOfTwo", kValue, "block_mask[1]=2",
     [](Layer& l) {
       return status_of(dense_to_bsr(l.x_view(), {3, 6}, std::array<std::uint8_t, 2>{1, 2}));
     }},
    {"DenseBlockOfZero", kValue, "block_shape must be at least 1",
     [](Layer& l) {
       return status_of(dense_to_bsr(l.x_view(), {3, 0}));
     }},
    {"DenseOfTheWrongShape", kValue, "dense must have shape (8, 12); got (3, 12)",
     [](Layer& l) { return bsr_to_dense(l.w(), l.dx_view()); }},
    {"DenseOfAnotherDtype", kType, "dense must be f32, like values; got f16",
     [](Layer& l) {
       return bsr_to_dense(l.w(), {l.y.data(), DType::f16, 8, 12, 12});
     }},
    {"DensityNaN", kValue, "[block_mask_by_norm] density must be in [0, 1]; got nan",
     [](Layer& l) {
       return status_of(block_mask_by_norm(l.x_view(), {1, 4}, std::numeric_limits<double>::quiet_NaN()));
     }},
    {"DensityNegative", kValue, "density must be in [0, 1]; got -0.1",
     [](Layer& l) {
       return status_of(block_mask_by_norm(l.x_view(), {1, 4}, -0.1));
     }},
    {"DensityAboveOne", kValue, "density must be in [0, 1]; got 1.5",
     [](Layer& l) {
       return status_of(block_mask_by_norm(l.x_view(), {1, 4}, 1.5));
     }},
    {"CsrColumn", kValue, "[csr_to_bsr] col_indices must be in [0, 3); got col_indices[1]=3",
     [](Layer&) {
       return status_of(csr_to_bsr({2, 3, {0, 1, 2}, {0, 3}, DType::i8, std::vector<std::byte>(2)}, {1, 1}));
     }},
    {"CsrValues", kValue, "values must have 8 bytes",
     [](Layer&) {
       return status_of(csr_to_csc({2, 3, {0, 1, 2}, {0, 2}, DType::f32, std::vector<std::byte>(7)}));
     }},
    {"CscRow", kValue, "[csc_to_csr] row_indices must be in [0, 2)",
     [](Layer&) {
       return status_of(csc_to_csr({2, 2, {0, 1, 1}, {2}, DType::i8, std::vector<std::byte>(1)}));
     }},
    {"CooRow", kValue, "[coo_to_csr] row_indices must be in [0, 2); got row_indices[1]=2",
     [](Layer&) {
       return status_of(coo_to_csr({2, 2, {0, 2}, {0, 0}, DType::i8, std::vector<std::byte>(2)}));
     }},
    {"CooLengths", kValue, "col_indices must have 2 elements, like row_indices; got 1",
     [](Layer&) {
       return status_of(coo_to_csr({2, 2, {0, 1}, {0}, DType::i8, std::vector<std::byte>(2)}));
     }},
    {"CooTwice", kValue, "entries must be distinct",
     [](Layer&) {
       return status_of(coo_to_csr({2, 2, {1, 0, 1}, {1, 0, 1}, DType::i8, std::vector<std::byte>(3)}));
     }},
};

class BadInputTest : public ::testing::TestWithParam<Case> {};

TEST_P(BadInputTest, IsAStatusAndWritesNothing) {
  Layer layer;
  const Status status = GetParam().run(layer);
  EXPECT_EQ(status.code(), GetParam().code) << status.message();
  EXPECT_NE(status.message().find(GetParam().text), std::string::npos) << status.message();
  EXPECT_EQ(status.message().front(), '[');
  EXPECT_NE(status.message().find("; got "), std::string::npos) << status.message();
  EXPECT_TRUE(layer.untouched());
}

INSTANTIATE_TEST_SUITE_P(Core, BadInputTest, ::testing::ValuesIn(kCases),
                         [](const auto& tested) { return tested.param.name; });

// The cases differ from this one in a single thing.
TEST(GoodInputTest, IsOk) {
  Layer l;
  EXPECT_TRUE(linear(l.x_view(), l.w(), l.bias.data(), Activation::none, l.y_view()).ok());
  EXPECT_TRUE(grad_input(l.dy_view(), l.w(), l.dx_view()).ok());
  EXPECT_TRUE(grad_weight(l.dy_view(), l.x_view(), l.pattern.view(), l.dvalues.data(), DType::f32).ok());
  EXPECT_EQ(l.y[0], 7);  // two blocks of three ones, and the bias
  EXPECT_FALSE(l.untouched());
}

}  // namespace
}  // namespace rarefy::test
