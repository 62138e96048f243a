// What every kernel's test has: it is chosen where it should be, integers come out exactly, reals stay
// within the bound of docs/numerics.md, and odd shapes, strides, padding and NaN are no exception.
#include "column_linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "rarefy/rarefy.h"

namespace {

using namespace rarefy;

constexpr float kPoison = -12345.0F;

struct Case {
  std::int64_t tokens, rows, cols, block_rows;
  double density;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return std::to_string(c.tokens) + "_tokens_" + std::to_string(c.rows) + "x" + std::to_string(c.cols) +
         "_blocks_of_" + std::to_string(c.block_rows);
}

// A random layer; with `integers`, every sum is exact in float.
struct Layer {
  BsrMatrix weight;
  std::vector<float> x, bias;
  std::int64_t x_stride;
};

Layer make_layer(const Case& c, bool integers) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return integers ? std::round(2 * normal(random)) : normal(random); };
  const auto fill = [&](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = draw();
    return values;
  };
  const std::vector<float> dense = fill(c.rows * c.cols);
  const MatrixView view{dense.data(), DType::f32, c.rows, c.cols, c.cols};
  const BlockShape block{c.block_rows, 1};
  const auto mask = block_mask_by_norm(view, block, c.density);
  auto weight = dense_to_bsr(view, block, mask.value());
  const std::int64_t stride = c.cols + 3;  // rows of X need not touch
  return {std::move(weight).value(), fill(c.tokens * stride), fill(c.rows), stride};
}

// The call that linear() would make of this layer, up to kernel and configuration.
Call call_of(const Layer& layer, Activation activation, const Context& context, std::vector<float>& y) {
  const BsrShape& shape = layer.weight.pattern.shape();
  const std::int64_t tokens = static_cast<std::int64_t>(layer.x.size()) / layer.x_stride;
  const std::int64_t stride = shape.rows + 2;
  y.assign(static_cast<std::size_t>(tokens * stride), kPoison);
  Call call;
  call.problem = make_problem(Op::linear, shape, tokens, DType::f32, Device::cpu, context.executor.threads);
  call.problem.weight.dtype = layer.weight.dtype;
  call.problem.activation = activation;
  call.x = {layer.x.data(), DType::f32, tokens, shape.cols, layer.x_stride};
  call.plan = layer.weight.pattern.view();
  call.values = layer.weight.values.data();
  call.bias = layer.bias.data();
  call.activation = activation;
  call.out = {y.data(), DType::f32, tokens, shape.rows, stride};
  call.executor = context.executor;
  return call;
}

// Runs the first kernel of the list that fits, with guard elements after each row of Y.
std::vector<float> run(const Registry& kernels, const Layer& layer, Activation activation,
                       const Context& context, std::string_view forced = {}) {
  std::vector<float> y;
  Call call = call_of(layer, activation, context, y);
  const auto choice = choose_from(kernels, call.problem, cpu_machine(), forced);
  if (!choice.ok()) throw std::runtime_error(choice.status().message());
  call.config = choice->config;
  std::vector<std::byte> workspace(static_cast<std::size_t>(choice->workspace));
  call.workspace = workspace.data();
  EXPECT_TRUE(choice->kernel->run(call).ok());
  std::vector<float> result;
  for (std::int64_t m = 0; m < call.x.rows; ++m) {
    const auto row = y.begin() + m * call.out.row_stride;
    result.insert(result.end(), row, row + call.out.cols);
    EXPECT_EQ(row[call.out.cols], kPoison) << "wrote past row " << m;
    EXPECT_EQ(row[call.out.cols + 1], kPoison) << "wrote past row " << m;
  }
  return result;
}

// The real registry is built once and never changes: a test adds its kernels to a copy.
Registry with_columns() {
  Registry copy = registry();
  example::register_columns(copy);
  return copy;
}

class AddAKernel : public testing::TestWithParam<Case> {};

TEST_P(AddAKernel, IsExactOnIntegers) {
  const Layer layer = make_layer(GetParam(), true);
  for (const Activation activation : {Activation::none, Activation::relu}) {
    EXPECT_EQ(run(with_columns(), layer, activation, {}), run(registry(), layer, activation, {}, "ref"));
  }
}

TEST_P(AddAKernel, StaysWithinTheBoundOnReals) {
  const Layer layer = make_layer(GetParam(), false);
  const BsrShape& shape = layer.weight.pattern.shape();
  Layer magnitudes = layer;  // |X| |W|ᵀ + |b|
  for (float& v : magnitudes.x) v = std::fabs(v);
  for (float& v : magnitudes.bias) v = std::fabs(v);
  auto* values = reinterpret_cast<float*>(magnitudes.weight.values.data());
  for (std::int64_t i = 0; i < shape.value_count(); ++i) values[i] = std::fabs(values[i]);
  const std::vector<float> got = run(with_columns(), layer, Activation::none, {});
  const std::vector<float> want = run(registry(), layer, Activation::none, {}, "ref");
  const std::vector<float> scale = run(registry(), magnitudes, Activation::none, {}, "ref");
  const double terms = static_cast<double>(shape.col_count()) + 2;  // at most, bias and result included
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(std::fabs(got[i] - want[i]), terms * 0x1p-24 * scale[i] + 0x1p-24 * std::fabs(want[i])) << i;
  }
}

TEST_P(AddAKernel, GivesTheSameBitsOnAnyNumberOfThreads) {
  const Layer layer = make_layer(GetParam(), false);
  ThreadPool pool(3);
  EXPECT_EQ(run(with_columns(), layer, Activation::relu, {pool.executor()}),
            run(with_columns(), layer, Activation::relu, {}));
}

INSTANTIATE_TEST_SUITE_P(Shapes, AddAKernel,
                         testing::Values(Case{1, 8, 8, 4, 0.5},
                                         Case{5, 30, 17, 4, 0.3},  // a padded last block row
                                         Case{3, 7, 9, 1, 0.6}, Case{2, 16, 5, 16, 1.0},
                                         Case{4, 12, 6, 4, 0.0}),  // nothing is stored
                         name_of);

TEST(AddAKernel, IsChosenForItsShapesOnly) {
  const Registry copy = with_columns();
  const auto chosen = [&](std::int64_t block_cols, DType dtype, std::string_view forced) {
    const Problem problem = make_problem(Op::linear, {8, 8, 4, block_cols, 1}, 64, dtype);
    return std::string(choose_from(copy, problem, cpu_machine(), forced)->kernel->name);
  };
  EXPECT_EQ(chosen(1, DType::f32, ""), "columns_linear");
  EXPECT_NE(chosen(2, DType::f32, ""), "columns_linear");
  EXPECT_NE(chosen(1, DType::bf16, ""), "columns_linear");
  EXPECT_EQ(chosen(1, DType::f32, "ref"), "ref_linear");
}

// The configuration follows from the problem alone, prints, and can be another one.
TEST(AddAKernel, HasAConfiguration) {
  const Registry copy = with_columns();
  const Problem problem = make_problem(Op::linear, {8, 8, 4, 1, 1}, 64, DType::f32, Device::cpu, 2);
  const Choice choice = *choose_from(copy, problem, cpu_machine(), "");
  EXPECT_EQ(to_string(*choice.kernel, choice.config), "tokens=8");
  const auto other = parse_config(*choice.kernel, choice.config, "tokens=3");
  ASSERT_TRUE(other.ok());

  const Layer layer = make_layer({7, 30, 17, 4, 0.3}, false);
  std::vector<float> y;
  Call call = call_of(layer, Activation::relu, {}, y);
  call.config = *other;
  ASSERT_TRUE(choice.kernel->run(call).ok());
  const std::vector<float> want = run(copy, layer, Activation::relu, {});
  for (std::int64_t m = 0; m < 7; ++m) {
    for (std::int64_t n = 0; n < 30; ++n) EXPECT_EQ(y[m * 32 + n], want[m * 30 + n]);
  }
  call.config = *parse_config(*choice.kernel, choice.config, "tokens=0");
  EXPECT_EQ(choice.kernel->run(call).code(), StatusCode::invalid_argument);
}

// 16-bit values: only for callers that hold the packed weight, and then equal to the reference.
TEST(AddAKernel, RunsOnItsPackedWeight) {
  const Registry copy = with_columns();
  Layer layer = make_layer({5, 30, 17, 4, 0.4}, true);
  const auto* floats = reinterpret_cast<const float*>(layer.weight.values.data());
  const std::int64_t count = layer.weight.pattern.shape().value_count();
  std::vector<std::byte> halves(static_cast<std::size_t>(2 * count));
  for (std::int64_t i = 0; i < count; ++i) {
    reinterpret_cast<bfloat16*>(halves.data())[i] = to_bfloat16(floats[i]);
  }
  layer.weight.values = halves;
  layer.weight.dtype = DType::bf16;
  const std::vector<float> want = run(copy, layer, Activation::none, {}, "ref");

  std::vector<float> y;
  Call call = call_of(layer, Activation::none, {}, y);
  EXPECT_NE(choose_from(copy, call.problem, cpu_machine(), "")->kernel->name, "columns_packed_linear");
  call.problem.derived = 1;  // another kernel's
  EXPECT_NE(choose_from(copy, call.problem, cpu_machine(), "")->kernel->name, "columns_packed_linear");
  call.problem.derived = kAnyDerived;
  const Choice choice = *choose_from(copy, call.problem, cpu_machine(), "");
  ASSERT_EQ(choice.kernel->name, "columns_packed_linear");
  EXPECT_NE(choice.derived.key, 0U);
  call.config = choice.config;
  std::vector<std::byte> packed(static_cast<std::size_t>(choice.derived.packed));
  ASSERT_TRUE(choice.kernel->pack(call, packed.data()).ok());
  call.derived = {choice.derived.key, nullptr, packed.data()};
  call.problem.derived = choice.derived.key;
  EXPECT_EQ(choose_from(copy, call.problem, cpu_machine(), "")->kernel->name, "columns_packed_linear");
  ASSERT_TRUE(choice.kernel->run(call).ok());
  for (std::int64_t m = 0; m < 5; ++m) {
    for (std::int64_t n = 0; n < 30; ++n) EXPECT_EQ(y[m * 32 + n], want[m * 30 + n]);
  }
}

// A row that refuses no caller is eligible with nothing and with another's: it does without, in workspace of
// another size, or the core packs ahead of it.
TEST(AddAKernel, MayHaveNoPackedWeightAtHand) {
  Registry copy = with_columns();
  const auto columns = std::find_if(copy.begin(), copy.end(),
                                    [](const Kernel& k) { return k.name == "columns_packed_linear"; });
  columns->unheld = Unheld::runs;
  columns->workspace = [](const Problem& p, const Config&) { return std::int64_t{p.derived == 0 ? 64 : 8}; };
  Problem problem = make_problem(Op::linear, {8, 8, 4, 1, 1}, 64, DType::f32, Device::cpu, 2);
  problem.weight.dtype = DType::bf16;
  problem.derived = kAnyDerived;
  const Choice with = *choose_from(copy, problem, cpu_machine(), "");
  ASSERT_EQ(with.kernel->name, "columns_packed_linear");
  EXPECT_EQ(with.workspace, 8);
  const std::uint64_t key = with.derived.key;
  for (const auto& [derived, bytes] : {std::pair{key, 8}, {key ^ 2, 64}, {0, 64}}) {
    problem.derived = derived;
    const Choice choice = *choose_from(copy, problem, cpu_machine(), "");
    EXPECT_EQ(choice.kernel->name, "columns_packed_linear");
    EXPECT_EQ(choice.workspace, bytes);
    EXPECT_EQ(made_in_call(choice, derived == key, derived == key).bytes(), 0);
  }
  columns->unheld = Unheld::made;
  const Choice choice = *choose_from(copy, problem, cpu_machine(), "");
  EXPECT_EQ(choice.derived.packed, 4 * 4);  // a block of floats
  EXPECT_EQ(made_in_call(choice, false, false).bytes(), 256);
  EXPECT_EQ(made_in_call(choice, true, false).packed, 256);
  EXPECT_EQ(made_in_call(choice, true, true).bytes(), 0);
}

TEST(AddAKernel, PassesNaNOn) {
  Layer layer = make_layer({1, 8, 4, 4, 1.0}, true);
  layer.x[2] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> y = run(with_columns(), layer, Activation::relu, {});
  for (std::size_t n = 0; n < 8; ++n) EXPECT_TRUE(std::isnan(y[n])) << n;
}

}  // namespace
