// Random patterns and data.
#include "cli/problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "core/message.h"

namespace rarefy::cli {

namespace {

// A dense matrix of random elements of this dtype: normal floats, or any int8.
std::vector<std::byte> random_values(std::int64_t count, DType dtype, std::mt19937_64& random) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  std::normal_distribution<float> normal;
  const auto fill = [&](auto* out, auto make) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = make();
  };
  void* out = bytes.data();
  switch (dtype) {
    case DType::f64:
      fill(static_cast<double*>(out), [&] { return static_cast<double>(normal(random)); });
      break;
    case DType::f32: fill(static_cast<float*>(out), [&] { return normal(random); }); break;
    case DType::bf16: fill(static_cast<bfloat16*>(out), [&] { return to_bfloat16(normal(random)); }); break;
    case DType::f16: fill(static_cast<float16*>(out), [&] { return to_float16(normal(random)); }); break;
    case DType::i8:
      fill(static_cast<std::int8_t*>(out), [&] { return static_cast<std::int8_t>(random()); });
      break;
  }
  return bytes;
}

// Exactly round(density · blocks) blocks, anywhere.
Result<Pattern> random_pattern(const BsrShape& shape, double density, std::mt19937_64& random) {
  std::vector<std::int64_t> blocks(static_cast<std::size_t>(shape.row_count() * shape.col_count()));
  std::iota(blocks.begin(), blocks.end(), std::int64_t{0});
  std::shuffle(blocks.begin(), blocks.end(), random);
  blocks.resize(static_cast<std::size_t>(std::llround(density * static_cast<double>(blocks.size()))));
  std::sort(blocks.begin(), blocks.end());
  std::vector<std::int32_t> crow(static_cast<std::size_t>(shape.row_count() + 1)), col;
  for (const std::int64_t block : blocks) {
    ++crow[static_cast<std::size_t>(block / shape.col_count() + 1)];
    col.push_back(static_cast<std::int32_t>(block % shape.col_count()));
  }
  std::partial_sum(crow.begin(), crow.end(), crow.begin());
  return Pattern::create(shape, crow, col);
}

}  // namespace

Result<Problem> random_problem(std::int64_t m, const BsrShape& shape, double density, DType dtype,
                               std::uint64_t seed) {
  std::mt19937_64 random(seed);
  auto pattern = random_pattern(shape, density, random);
  if (!pattern.ok()) return pattern.status();
  const std::int64_t count = pattern->shape().value_count();
  const DType out = dtype == DType::i8 ? DType::f32 : dtype;
  const auto zeros = [&](std::int64_t size) {
    return std::vector<std::byte>(static_cast<std::size_t>(size) * size_of(out));
  };
  return Problem{m,
                 {std::move(pattern).value(), dtype, random_values(count, dtype, random)},
                 out,
                 random_values(m * shape.cols, dtype, random),
                 zeros(m * shape.rows),
                 random_values(m * shape.rows, dtype, random),
                 zeros(m * shape.cols),
                 zeros(count)};
}

Status run_once(Op product, Problem& problem, const Context& context) {
  const BsrView weight = problem.weight.view();
  const BsrShape& shape = weight.plan.shape;
  const auto view = [&](std::vector<std::byte>& bytes, DType dtype, std::int64_t cols) {
    return MutableMatrixView{bytes.data(), dtype, problem.m, cols, cols};
  };
  const MutableMatrixView x = view(problem.x, weight.dtype, shape.cols);
  const MutableMatrixView dy = view(problem.dy, weight.dtype, shape.rows);
  switch (product) {
    case Op::linear:
      return linear(x, weight, nullptr, Activation::none, view(problem.y, problem.out_dtype, shape.rows),
                    context);
    case Op::grad_input:
      return grad_input(dy, weight, view(problem.dx, problem.out_dtype, shape.cols), context);
    case Op::grad_weight:
      return grad_weight(dy, x, weight.plan, problem.dvalues.data(), problem.out_dtype, context);
    case Op::feed_forward: break;
  }
  return error(StatusCode::unsupported, name(product), "must be a product of one weight", name(product));
}

std::int64_t stored_elements(const PlanView& plan) {
  const BsrShape& shape = plan.shape;
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    const std::int64_t rows = std::min(shape.block_rows, shape.rows - i * shape.block_rows);
    for (std::int64_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      count += rows * std::min(shape.block_cols, shape.cols - plan.col[e] * shape.block_cols);
    }
  }
  return count;
}

}  // namespace rarefy::cli
