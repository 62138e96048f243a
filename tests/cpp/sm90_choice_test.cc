// Which of Hopper's kernels a problem gets, and how long it is said to take. Runs without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "core/aligned_rows.h"
#include "core/registry.h"
#include "rarefy/linear.h"

namespace rarefy {
namespace {

Machine hopper() {  // an H200
  Machine machine;
  machine.gpu.arch = 90, machine.gpu.sms = 132, machine.gpu.shared_memory = 227 << 10;
  machine.gpu.bandwidth = 4.8e12;
  return machine;
}

Problem problem_of(Op op, std::int64_t tokens, BsrShape shape, double density, DType dtype = DType::bf16) {
  shape.nnzb =
      static_cast<std::int64_t>(density * static_cast<double>(shape.row_count() * shape.col_count()));
  Problem p = make_problem(op, shape, tokens, dtype, Device::cuda);
  p.derived = kAnyDerived;
  return p;
}

// A few blocks of thin shapes are columns, many are unions, whatever the number of tokens; gradients of few
// tokens are a plain kernel's, of wide blocks columns of the transpose.
TEST(Sm90Rows, TheFasterKernelIsChosen) {
  const auto chosen = [&](Op op, std::int64_t tokens, std::int64_t rows, std::int64_t cols, double density) {
    const rarefy::Problem p = problem_of(op, tokens, {4096, 4096, rows, cols, 0}, density);
    return choose_from(registry(), p, hopper(), "")->kernel->name;
  };
  for (const std::int64_t tokens : {33, 64, 8192}) {
    EXPECT_EQ(chosen(Op::linear, tokens, 16, 1, 0.1), "sm90_tall_packed");
    EXPECT_EQ(chosen(Op::linear, tokens, 64, 4, 0.25), "sm90_tall_packed");
    EXPECT_EQ(chosen(Op::linear, tokens, 32, 1, 0.25), "sm90_tall_packed");
    EXPECT_EQ(chosen(Op::linear, tokens, 32, 1, 0.5), "sm90_whole_linear");
    EXPECT_EQ(chosen(Op::linear, tokens, 64, 1, 0.5), "sm90_tall");
    EXPECT_EQ(chosen(Op::linear, tokens, 64, 1, 0.75), "sm90_tall") << "networks want what it prepares";
    EXPECT_EQ(chosen(Op::linear, tokens, 8, 8, 0.05), "sm90_tall_packed");
    EXPECT_EQ(chosen(Op::linear, tokens, 8, 8, 0.25), "sm90_whole_linear");
    EXPECT_EQ(chosen(Op::linear, tokens, 24, 24, 0.05), "sm90_tall_packed");
    EXPECT_EQ(chosen(Op::linear, tokens, 1, 1, 0.1), "sm90_whole_linear");
    EXPECT_EQ(chosen(Op::linear, tokens, 32, 32, 0.25), "sm90_unions_linear");
    EXPECT_EQ(chosen(Op::linear, tokens, 64, 64, 1), "sm90_strips_linear");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 128, 1, 0.5), "sm90_whole_grad_input");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 64, 1, 0.25), "sm90_whole_grad_input");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 64, 1, 0.1), "sm90_tall_grad_input");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 16, 1, 0.1), "sm90_whole_grad_input");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 16, 1, 0.05), "sm90_tall_packed_grad_input");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 8, 8, 0.02), "sm90_tall_packed_transposed");
    EXPECT_EQ(chosen(Op::grad_input, tokens, 32, 32, 0.25), "sm90_unions_grad_input");
  }
  EXPECT_EQ(chosen(Op::linear, 4, 16, 1, 0.1), "sm90_tall_decode");
  EXPECT_EQ(chosen(Op::linear, 16, 128, 1, 0.5), "sm90_tall_decode");
  EXPECT_EQ(chosen(Op::linear, 32, 32, 1, 0.5), "sm90_tall_decode");
  EXPECT_EQ(chosen(Op::linear, 32, 64, 1, 0.5), "sm90_tall") << "which takes less of large weights";
  EXPECT_EQ(chosen(Op::linear, 16, 16, 1, 0.5), "sm90_tall_decode");
  EXPECT_EQ(chosen(Op::linear, 17, 16, 1, 0.5), "sm90_whole_linear");
  EXPECT_EQ(chosen(Op::linear, 4, 8, 8, 0.1), "simt_few_linear");
  // W whole is less work than many small blocks, where it is what is held.
  EXPECT_EQ(chosen(Op::linear, 1, 8, 8, 0.25), "simt_few_linear");
  EXPECT_EQ(chosen(Op::linear, 8, 8, 8, 0.5), "sm90_whole_linear");
  EXPECT_EQ(chosen(Op::linear, 16, 8, 8, 0.25), "sm90_whole_linear");
  EXPECT_EQ(chosen(Op::linear, 2, 4, 4, 0.5), "sm90_whole_linear");
  EXPECT_EQ(chosen(Op::linear, 1, 1, 1, 0.5), "sm90_whole_linear");
  EXPECT_EQ(chosen(Op::linear, 1, 1, 1, 0.05), "simt_few_linear");
  EXPECT_EQ(chosen(Op::grad_weight, 8, 8, 8, 0.1), "simt_grad_weight");
  EXPECT_EQ(chosen(Op::grad_weight, 8192, 4, 4, 0.25), "sm90_whole_gradient");
  EXPECT_EQ(chosen(Op::grad_weight, 8192, 16, 1, 0.1), "sm90_tall_packed_gradient");
  EXPECT_EQ(chosen(Op::grad_weight, 8192, 32, 1, 0.25), "sm90_tall_packed_gradient");
  EXPECT_EQ(chosen(Op::grad_weight, 8192, 32, 1, 0.5), "sm90_whole_gradient");
  EXPECT_EQ(chosen(Op::grad_weight, 8192, 64, 1, 0.5), "sm90_tall_gradient");
  EXPECT_EQ(chosen(Op::grad_weight, 8192, 32, 32, 0.1), "sm90_block_gradient");
}

// Rows that are no multiple of 16 bytes: the same kernels, on copies; what is held is the same, too.
TEST(Sm90Rows, RowsThatAreNotAlignedAreCopied) {
  for (const Op op : kProducts) {
    for (const auto& [rows, cols] :
         {std::pair<std::int64_t, std::int64_t>{64, 64}, {16, 16}, {8, 8}, {128, 1}}) {
      const Problem even = problem_of(op, 4096, {1000, 776, rows, cols, 0}, 0.25),
                    odd = problem_of(op, 4096, {1001, 777, rows, cols, 0}, 0.25);
      const auto as_it_is = choose_from(registry(), even, hopper(), ""),
                 copied = choose_from(registry(), odd, hopper(), "");
      EXPECT_FALSE(as_it_is->aligns_rows);
      EXPECT_TRUE(copied->aligns_rows);
      EXPECT_EQ(copied->kernel->name, as_it_is->kernel->name);
      EXPECT_EQ(copied->derived.key, as_it_is->derived.key);
      EXPECT_EQ(aligned_rows_bytes(odd), 4096 * (1024 + 832) * 2);
    }
  }
  Problem p = problem_of(Op::linear, 4096, {1000, 777, 64, 64, 0}, 0.25);
  EXPECT_EQ(aligned_rows_bytes(p), 4096 * 832 * 2) << "y stays";
  p.out_alignment = 4;
  EXPECT_EQ(aligned_rows_bytes(p), 4096 * (832 + 1024) * 2);
  p.weight_alignment = 4;  // which no copy changes
  EXPECT_FALSE(choose_from(registry(), p, hopper(), "")->aligns_rows);
  p = problem_of(Op::linear, 4096, {1000, 776, 16, 16, 0}, 0.25);
  p.in_stride = 0;  // one row for all tokens, which TMA has no way to read
  EXPECT_EQ(choose_from(registry(), p, hopper(), "")->kernel->name, "sm90_unions_linear");
  EXPECT_EQ(aligned_rows_bytes(p), 4096 * 832 * 2);
  p = problem_of(Op::linear, 4, {1000, 777, 64, 64, 0}, 0.25);
  EXPECT_EQ(choose_from(registry(), p, hopper(), "")->kernel->name, "simt_few_linear");
}

// Copies of large matrices are made some tokens at a time, whose product is what kernels are asked about.
TEST(Sm90Rows, LargeCopiesAreMadeInParts) {
  const auto of = [](Op op, std::int64_t tokens, std::int64_t rows, std::int64_t cols) {
    return problem_of(op, tokens, {rows, cols, 64, 64, 0}, 0.25);
  };
  const Problem words = of(Op::linear, 8192, 50257, 768);  // 823 MB of y; x stays
  EXPECT_EQ(with_aligned_rows(words).tokens, 2048);
  EXPECT_EQ(aligned_rows_bytes(words), 2048 * 50304 * 2);
  EXPECT_EQ(aligned_rows_microseconds(words, 50), 4 * (52 + 2048 * 50304 * 2 / 1.5e6));
  EXPECT_EQ(with_aligned_rows(of(Op::grad_input, 8192, 50257, 768)).tokens, 2048);
  EXPECT_EQ(with_aligned_rows(of(Op::grad_weight, 8192, 50257, 768)).tokens, 8192)
      << "a sum over all of them";
  EXPECT_EQ(with_aligned_rows(of(Op::linear, 8192, 4097, 4095)).tokens, 8192) << "not large";
  Problem by_feature = words;
  by_feature.out_layout = Layout::by_feature, by_feature.out_stride = 8193;
  EXPECT_EQ(with_aligned_rows(by_feature).tokens, 8192);
}

struct Measured {
  Op op;
  std::int64_t tokens, in, out, block_rows, block_cols;
  double density, microseconds, dense;
};

// An H200, bench/results/nvidia-h200-132-cores/2026-11-28-31389d4-reached.csv. All 454 rows of that file
// which kernels say something about: the speedup is off by 7.3 % in the median, a quarter by more than 13.
// 8×8 is an H100's (2026-11-28-abb2362-fine.csv; its weight gradient: docs/design/hopper/whole.md), 128
// tokens are of 2026-11-29-6b305da-shapes.csv, 16 of 2026-11-29-a7ca0ba-reached.csv, weight gradients of
// 768→3072 and 2048→5632 of docs/design/hopper/grad_weight.md.
TEST(Sm90Predicted, TimesAreThoseMeasured) {
  for (const Measured& m : {Measured{Op::linear, 8192, 4096, 4096, 128, 128, 0.5, 182.3, 323.9},
                            {Op::linear, 8192, 4096, 4096, 64, 64, 0.25, 125.3, 379.8},
                            {Op::linear, 8192, 4096, 4096, 32, 32, 0.1, 103.4, 370.6},
                            {Op::linear, 4096, 768, 3072, 32, 32, 0.25, 18.8, 30.6},
                            {Op::linear, 512, 4096, 4096, 64, 64, 0.5, 22.9, 22.6},
                            {Op::linear, 1, 4096, 14336, 64, 64, 0.25, 8.9, 29.5},
                            {Op::linear, 8192, 4096, 4096, 128, 1, 0.25, 157.9, 354.1},
                            {Op::linear, 8192, 4096, 4096, 8, 8, 0.25, 328, 333},
                            {Op::grad_input, 8192, 4096, 4096, 16, 16, 0.5, 370.6, 387.7},
                            {Op::grad_input, 8192, 4096, 4096, 64, 1, 0.25, 342.3, 358.7},
                            {Op::grad_input, 8192, 4096, 4096, 128, 1, 0.1, 170.4, 354.3},
                            {Op::grad_weight, 8192, 4096, 4096, 128, 128, 0.5, 196.3, 381.6},
                            {Op::grad_weight, 8192, 4096, 14336, 32, 32, 0.25, 876.6, 1369.9},
                            {Op::grad_weight, 8192, 4096, 4096, 8, 8, 0.25, 349, 336},
                            {Op::linear, 128, 8192, 8192, 128, 128, 0.5, 27.6, 38.7},
                            {Op::linear, 128, 8192, 8192, 64, 64, 0.25, 21.3, 38.5},
                            {Op::grad_weight, 128, 8192, 8192, 128, 128, 0.5, 38.2, 52.2},
                            {Op::grad_weight, 128, 8192, 8192, 32, 32, 0.5, 107.0, 50.7},
                            {Op::linear, 16, 4096, 14336, 64, 64, 0.1, 4.9, 32.8},
                            {Op::linear, 16, 14336, 4096, 16, 16, 0.25, 10.9, 32.6},
                            {Op::grad_weight, 4096, 768, 3072, 128, 128, 0.25, 17.8, 27.5},
                            {Op::grad_weight, 4096, 768, 3072, 64, 64, 0.25, 18.3, 27.5}}) {
    const Problem p = problem_of(m.op, m.tokens, {m.out, m.in, m.block_rows, m.block_cols, 0}, m.density);
    const auto choice = choose_from(registry(), p, hopper(), "");
    ASSERT_TRUE(choice.ok());
    ASSERT_NE(choice->kernel->microseconds, nullptr) << choice->kernel->name;
    EXPECT_NEAR(choice->kernel->microseconds(p, choice->config, hopper()) / m.microseconds, 1, 0.3)
        << to_string(p);
    EXPECT_NEAR(dense_microseconds(p, hopper()) / m.dense, 1, 0.2) << to_string(p);
  }
}

// Few tiles are shared as was fastest of all ways: what many rounds wait for would have whole tiles by four.
TEST(Sm90Predicted, WeightGradientsOfFewTilesAreHalvedByTwo) {
  const auto config_of = [](std::int64_t tokens, const BsrShape& shape, double density) {
    const auto choice =
        choose_from(registry(), problem_of(Op::grad_weight, tokens, shape, density), hopper(), "");
    return to_string(*choice->kernel, choice->config);
  };
  for (const std::int64_t tokens : {2048, 4096, 8192}) {
    for (const BsrShape& shape : {BsrShape{3072, 768, 128, 128, 0}, {768, 3072, 128, 128, 0}})
      EXPECT_EQ(config_of(tokens, shape, 0.25).find("split=2 wide=64 strips=2 pairs=0 even=0 most=2 "), 0);
  }
  // Rows that store one to four blocks go together in pairs.
  EXPECT_EQ(
      config_of(4096, {3072, 768, 64, 64, 0}, 0.1).find("split=4 wide=64 strips=1 pairs=1 even=0 most=4 "),
      0);
}

TEST(Sm90Predicted, OthersSayNothing) {
  const BsrShape shape{4096, 4096, 64, 64, 0};
  EXPECT_EQ(dense_microseconds(problem_of(Op::linear, 512, shape, 0.5, DType::f32), hopper()), 0);
  Machine ampere = hopper();
  ampere.gpu.arch = 80;
  EXPECT_EQ(dense_microseconds(problem_of(Op::linear, 512, shape, 0.5), ampere), 0);
  const Explanation on_cpu = explain(make_problem(Op::linear, {64, 64, 4, 4, 32}, 8, DType::f32));
  EXPECT_EQ(on_cpu.microseconds, 0);
  EXPECT_EQ(on_cpu.dense_microseconds, 0);
}

// Any config may be forced.
TEST(Sm90Predicted, NothingIsSaidOfConfigsThatNameNothing) {
  for (const auto& [rows, cols] : {std::pair{64, 64}, {32, 32}, {128, 1}, {16, 1}, {8, 8}}) {
    const Problem p = problem_of(Op::linear, 512, {4096, 4096, rows, cols, 0}, 0.1);
    const auto choice = choose_from(registry(), p, hopper(), "");
    ASSERT_TRUE(choice.ok());
    const Kernel& kernel = *choice->kernel;
    EXPECT_GT(kernel.microseconds(p, choice->config, hopper()), 0) << kernel.name;
    for (std::size_t field = 0; field < kernel.fields.size(); ++field) {
      for (const std::int64_t value : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40}) {
        Config other = choice->config;
        other.value[field] = value;
        const double us = kernel.microseconds(p, other, hopper());
        EXPECT_TRUE(us >= 0 && std::isfinite(us)) << kernel.name << ' ' << kernel.fields[field];
        if (kernel.fields[field] == "sms") {
          EXPECT_EQ(us, 0) << kernel.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace rarefy
