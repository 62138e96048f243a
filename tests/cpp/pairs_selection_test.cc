// Which problems kernels of bf16 pairs take, and how they cut them into tasks.
#include <gtest/gtest.h>

#include <map>

#include "core/registry.h"
#include "cpu/pairs_blocking.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

TEST(PairsSelectionTest, SaysWhatItDoesNotTake) {
  const auto why_not = [](rarefy::Problem problem, const std::string& kernel = "") {
    problem.derived = kAnyDerived;
    for (const Candidate& candidate : explain(problem).candidates) {
      if (kernel.empty() ? candidate.kernel.family == "pairs" : candidate.kernel.name == kernel)
        return candidate.why_not;
    }
    return std::string("no such row");
  };
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 16, 1, 9}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 4, 1, 9}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 32, 32, 3}, 2, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 32, 32, 3}, 1, DType::bf16)),
            "takes at least 2 tokens; got 1");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 12, 1, 9}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 10, 1, 9}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 2, 1, 409}, 5, DType::bf16)),
            "takes blocks of at least 4 outputs, or a fifth of all; got 2 and 409 of 2048");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 2, 1, 410}, 5, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::grad_input, {64, 64, 16, 1, 9}, 5, DType::bf16)),
            "takes blocks of at least 4 columns, or 8 rows and 256 tokens, no multiple of 16 in a column; "
            "got 16x1 and 5");
  EXPECT_EQ(why_not(make_problem(Op::grad_input, {64, 64, 16, 1, 200}, 256, DType::bf16)),
            "takes blocks of at least 4 columns, or 8 rows and 256 tokens, no multiple of 16 in a column; "
            "got 16x1 and 256");
  EXPECT_EQ(why_not(make_problem(Op::grad_input, {64, 64, 8, 2, 52}, 256, DType::bf16)), "");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_input, {64, 64, 8, 1, 9}, 5, DType::bf16), "pairs_grad_input_columns"),
      "takes blocks of a multiple of 16 rows and one column; got 8x1");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_input, {64, 64, 16, 2, 9}, 5, DType::bf16), "pairs_grad_input_columns"),
      "takes blocks of a multiple of 16 rows and one column; got 16x2");
  EXPECT_EQ(
      why_not(make_problem(Op::grad_input, {64, 64, 16, 1, 9}, 5, DType::bf16), "pairs_grad_input_columns"),
      "");
  EXPECT_EQ(why_not(make_problem(Op::grad_weight, {64, 64, 16, 1, 9}, 32, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::grad_weight, {64, 64, 32, 32, 4}, 31, DType::bf16)),
            "takes at least 32 tokens; got 31");
  EXPECT_EQ(why_not(make_problem(Op::grad_weight, {64, 64, 4, 4, 9}, 32, DType::bf16)),
            "takes blocks of one column and a multiple of 16 rows, of as many columns and 8 rows or more, or "
            "one of 8 "
            "blocks; got 4x4, 9 of 256");
  EXPECT_EQ(why_not(make_problem(Op::grad_weight, {64, 64, 4, 4, 52}, 32, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 16, 1, 9}, 4, DType::bf16)),
            "takes at least 5 tokens; got 4");
  // A few tokens of what goes row by row as it is stored, where much is.
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 1, 1, 2000}, 1, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 1, 1, 1000}, 1, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 2, 1, 500}, 2, DType::bf16)),
            "takes at least 3 tokens; got 2");
  EXPECT_EQ(why_not(make_problem(Op::linear, {60, 60, 10, 10, 18}, 3, DType::bf16)), "");
  EXPECT_EQ(why_not(make_problem(Op::linear, {60, 60, 10, 10, 10}, 3, DType::bf16)),
            "takes at least 5 tokens; got 3");
  EXPECT_EQ(why_not(make_problem(Op::linear, {64, 64, 16, 1, 9}, 5, DType::f32)),
            "takes bf16 inputs and values, to bf16; f32, to f32, for inputs that may be rounded");
  // The portable twin is never chosen by itself.
  for (const std::int64_t tokens : {63, 64}) {
    const rarefy::Problem plain = make_problem(Op::linear, {64, 64, 16, 1, 9}, tokens, DType::bf16);
    for (const Candidate& candidate : explain(plain).candidates) {
      if (candidate.chosen) {
        EXPECT_NE(candidate.kernel.family, "pairs");
      }
      if (candidate.kernel.family == "pairs") {
        EXPECT_EQ(candidate.why_not,
                  tokens < 64 ? "without its packed weight, takes at least 64 tokens; got 63" : "");
      }
    }
  }
}

// Each panel's outputs once, whatever the cut; with a rest, each range of tasks (task_queue.h) has as many
// panels of its own and one part of the rest. `again` where a worker had another set with that part before.
TEST(PanelTasksTest, CoverEveryPanelAndShareTheRest) {
  for (const std::int64_t tokens : {5, 32, 33, 544, 1000}) {
    for (const std::int64_t threads : {1, 2, 3, 16}) {
      for (const cpu::PairsBlocking& b : {cpu::PairsBlocking{1, 1, 0}, {3, 1, 1}, {4, 5, 0}, {2, 3, 2}}) {
        const std::int64_t panels = (tokens + 31) / 32, rest = std::min(b.rest, panels);
        const cpu::PanelTasks tasks(tokens, b, threads);
        std::map<std::int64_t, std::int64_t> seen;  // parts of a panel
        std::vector<std::int64_t> own(static_cast<std::size_t>(threads)), shared(own);
        for (std::int64_t t = 0; t < tasks.count(); ++t) {
          for (const bool by_part : {false, true}) {
            const cpu::PanelTasks::Task task = tasks.task(t, by_part);
            EXPECT_EQ(task.parts, task.shared ? threads : b.splits);
            EXPECT_EQ(task.first % 32, 0);
            EXPECT_LE(task.tokens, b.panels * 32);
            EXPECT_LE(task.first + task.tokens, tokens);
            EXPECT_TRUE(task.tokens % 32 == 0 || task.first + task.tokens == tokens);
            for (std::int64_t m = task.first; m < task.first + task.tokens; m += 32) {
              EXPECT_EQ(task.shared, m / 32 >= panels - rest);
              seen[(m / 32 * 100 + task.part) * 2 + (by_part ? 1 : 0)] += 1;
            }
            const auto worker = static_cast<std::size_t>(((t + 1) * threads - 1) / tasks.count());
            const bool begins = t == tasks.count() * static_cast<std::int64_t>(worker) / threads;
            const cpu::PanelTasks::Task before = tasks.task(std::max<std::int64_t>(t - 1, 0), by_part);
            EXPECT_EQ(task.again, by_part && !begins && !task.shared && before.part == task.part) << t;
            if (by_part) continue;
            (task.shared ? shared : own)[worker] += task.shared ? 1 : (task.tokens + 31) / 32;
          }
        }
        EXPECT_EQ(seen.size(), 2 * static_cast<std::size_t>((panels - rest) * b.splits + rest * threads));
        for (const auto& [place, times] : seen) EXPECT_EQ(times, 1) << place;
        if (rest == 0 || (panels - rest) % threads != 0) continue;
        for (std::size_t w = 0; w < own.size(); ++w) {
          EXPECT_EQ(own[w], own[0]) << tokens << ' ' << threads;
          EXPECT_EQ(shared[w], 1);
        }
      }
    }
  }
}

// The model of the work, on a machine that is not this one: weights beyond L2 meet several panels, a few
// tokens are shared out by outputs.
TEST(PairsSelectionTest, ConfigurationsFollowTheProblem) {
  const auto config = [](std::int64_t tokens, int threads, std::string_view name = "amx_linear") {
    Machine machine;
    machine.l2 = 2 << 20;
    const Kernel* row = nullptr;
    for (const Kernel& kernel : registry()) {
      if (kernel.name == name) row = &kernel;
    }
    if (row == nullptr) return cpu::PairsBlocking{0, 0};  // not built for x86-64
    rarefy::Problem problem = make_problem(Op::linear, {3072, 768, 32, 1, 3072 * 768 / 64}, tokens,
                                           DType::bf16, Device::cpu, threads);
    return from_config<cpu::PairsBlocking>(row->configure(problem, machine));
  };
#if defined(__x86_64__)
  EXPECT_EQ(config(32, 1), (cpu::PairsBlocking{1, 1}));
  EXPECT_GE(config(2048, 1).panels, 4);
  EXPECT_EQ(config(32, 16).panels, 1);
  EXPECT_GE(config(32, 16).splits, 16);
  EXPECT_GE(config(512, 16).panels, 2);
  EXPECT_EQ(config(544, 2, "avx512_bf16_linear").rest, 1);
  EXPECT_EQ(config(512, 2, "avx512_bf16_linear").rest, 0);
#else
  EXPECT_EQ(config(32, 1).panels, 0);
#endif
}

}  // namespace
}  // namespace rarefy::test
