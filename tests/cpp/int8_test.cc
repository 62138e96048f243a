// Scaled int8 values, with x rounded to int8 (dynamic) and as it is: by every family that this machine has,
// against sums of whole numbers made here. What rounding makes of numbers at the edges: int8_numbers_test.cc.
#include "core/registry.h"
#include "int8_checks.h"

namespace rarefy::test::int8 {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, Int8Test, ::testing::ValuesIn(all_forced()), [](const auto& tested) {
  return tested.param.family + (tested.param.scaling == Scaling::dynamic ? "_dynamic" : "_weight");
});

TEST_P(Int8Test, EveryBlockShape) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {
      {16, 1}, {32, 1},  {48, 1},  {64, 1},  {128, 1}, {16, 2},  {32, 3},  {16, 4},
      {32, 8}, {16, 16}, {48, 16}, {32, 32}, {64, 64}, {16, 96}, {16, 31}, {160, 33}};
  for (const auto& [rows, cols] : blocks) {
    for (const bool integers : {true, false}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        check({37, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, 0.4, dtype, integers, 3});
      }
      check({64, 3 * rows, 7 * cols, rows, cols, 0.3, DType::f32, integers, 0});
    }
  }
}

// Rows that are joined to 16: with columns that some of them store, that all do, and none.
TEST_P(Int8Test, BlocksOfFourAndEightRows) {
  for (const std::int64_t rows : {4, 8}) {
    for (const std::int64_t cols : {1, 3, 4, 8, 64}) {
      for (const double density : {0.05, 0.5, 1.0}) {
        for (const std::int64_t tokens : {1, 6, 8, 11, 70}) {
          check({tokens, 9 * rows + 3, 5 * cols + cols / 2, rows, cols, density, DType::f32, true, 1});
        }
        check({33, 12 * rows, 300 * cols / 16 + 1, rows, cols, density, DType::bf16, false, 0});
      }
    }
  }
}

// Rows that are joined as no whole number of products: few and many tokens, columns by fours and not.
TEST_P(Int8Test, BlocksOfAnyRows) {
  for (const std::int64_t rows : {1, 2, 3, 5, 6, 7, 10, 12, 31, 33}) {
    for (const std::int64_t cols : {1, 2, 4, 5, 8, 64}) {
      for (const double density : {0.05, 0.5}) {
        for (const std::int64_t tokens : {1, 3, 7, 20, 45, 70}) {
          check({tokens, 7 * rows + rows / 2, 6 * cols + cols / 2, rows, cols, density, DType::f32, true, 1});
        }
      }
      check({33, 37 * rows, 300 * cols / 16 + 1, rows, cols, 0.3, DType::bf16, false, 0});
    }
  }
  check({65, 70, 2100, 1, 1, 0.3, DType::f32, true, 0});
  check({65, 70, 2100, 2, 4, 0.1, DType::f32, true, 0});
  check({9, 40, 60, 3, 4, 0.0, DType::f32, true, 0});
}

// What is derived once serves any number of tokens: values are gone when they are multiplied. But a few
// tokens that stay as they are read the values, for which AVX-512 and AVX2 have kernels.
TEST_P(Int8Test, DerivedOnceForAnyNumberOfTokens) {
  if (GetParam().family == "ref") GTEST_SKIP() << "derives nothing";
  const Force force(GetParam().family);
  for (const auto& [rows, cols] : {std::pair{16, 1}, {4, 4}, {32, 1}, {24, 1}, {1, 1}, {3, 5}}) {
    for (const std::int64_t tokens : {1, 4, 6, 12, 20, 40, 100}) {
      const Layer layer({tokens, 110, 90, rows, cols, 0.4, DType::f32, true, 0});
      LinearRun run(layer, GetParam().scaling, {}, false);
      run.derive(4096);
      const bool reads = tokens <= 4 && GetParam().scaling == Scaling::weight &&
                         (GetParam().family == "avx512" || GetParam().family == "avx2");
      EXPECT_EQ(run.uses_derived(tokens), !reads);
      if (!reads) run.forget_values();
      expect_ok(run.linear());
      expect_linear(layer, GetParam().scaling, run.y());
    }
  }
}

// Weight-only values as they are, four tokens at a time.
TEST(Int8FewTest, MoreThanFourTokensGoByFours) {
  for (const std::string family : {"avx512", "avx2"}) {
    if (!backend_info().machine.has(family)) continue;
    for (const auto& [rows, cols] : {std::pair{32, 32}, {16, 1}, {4, 1}, {8, 8}, {1, 1}}) {
      for (const std::int64_t tokens : {5, 8, 11, 16}) {
        for (const std::string piece : {"1", "3"}) {
          SCOPED_TRACE(::testing::Message() << family << ' ' << rows << 'x' << cols << " M=" << tokens);
          const Layer layer(
              {tokens, 4 * rows + rows / 2, 7 * cols + 40, rows, cols, 0.5, DType::f32, tokens % 2 == 0});
          const Force force(family + ',' + family + "_linear_few_int8(piece=" + piece + ')');
          LinearRun run(layer, Scaling::weight, {}, false);
          EXPECT_FALSE(run.uses_derived(tokens));
          expect_ok(run.linear());
          expect_linear(layer, Scaling::weight, run.y());
        }
      }
    }
  }
}

// Outputs that fill half a vector, and an odd number of halves.
TEST_P(Int8Test, HalvesOfVectors) {
  for (const std::int64_t rows : {24, 56}) {
    for (const std::int64_t cols : {1, 3, 4, 8, 64}) {
      for (const std::int64_t tokens : {1, 3, 5, 8, 11, 33, 70}) {
        check({tokens, 3 * rows + 3, 5 * cols + cols / 2, rows, cols, 0.6, DType::f32, true, 1});
        check({tokens, 4 * rows, 300 * cols / 16 + 1, rows, cols, 0.5, DType::bf16, false, 0});
      }
    }
    check({33, 2 * rows, 2100, rows, 1, 0.9, DType::f32, true, 0});
  }
}

TEST_P(Int8Test, EveryNumberOfTokens) {
  for (const std::int64_t tokens :
       {0, 1, 2, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130, 300}) {
    check({tokens, 70, 90, 32, 1, 0.5, DType::f32, true, tokens % 2});
    check({tokens, 90, 70, 16, 4, 0.5, DType::bf16, false, 1});
  }
}

// Up to 4 and 8 tokens have lines of their own, and a token or two several sets of sums, that take lines in
// turn: blocks, and lines put together, of every remainder.
TEST_P(Int8Test, LinesOfFewTokens) {
  for (std::int64_t tokens = 1; tokens <= 9; ++tokens) {
    for (const std::int64_t rows : {16, 32, 48}) {
      for (const std::int64_t cols : {4, 8, 12, 20, 24, 32}) {
        check({tokens, 3 * rows - 1, 7 * cols, rows, cols, 0.6, DType::f32, true, 0});
      }
      for (const std::int64_t features : {3, 9, 17, 22, 31, 150}) {
        check({tokens, 2 * rows, features, rows, 1, 1.0, DType::f32, true, 0});
      }
    }
  }
}

// More groups than a chunk has, last groups of every number of lines, and patterns without any.
TEST_P(Int8Test, GroupsAndChunks) {
  for (std::int64_t columns = 1; columns <= 131; ++columns) {
    check({33, 32, columns, 32, 1, 1.0, DType::f32, true, 0});
    check({20, 16, 4 * columns, 16, 4, 1.0, DType::f32, true, 0});
  }
  for (const std::int64_t columns : {511, 512, 513, 1023, 1025, 2100}) {
    check({40, 80, columns, 32, 1, 0.9, DType::f32, true, 0});
    check({40, 80, columns, 64, 1, 1.0, DType::bf16, false, 0});
    check({40, 80, columns, 32, 32, 0.9, DType::f32, true, 0});
    check({40, 128, columns, 64, 64, 0.9, DType::f32, false, 0});
  }
  for (const double density : {0.0, 0.02, 1.0}) {
    check({70, 90, 80, 32, 1, density, DType::f32, true, 2});
    check({70, 90, 80, 16, 16, density, DType::f32, true, 2});
  }
  check({5, 70, 0, 16, 1, 0.0, DType::f32, true, 2});
  check({5, 0, 90, 16, 1, 0.0, DType::f32, true, 2});
}

TEST_P(Int8Test, OnSeveralThreadsAndPackedInTheCall) {
  ThreadPool pool(3);
  for (const bool derived : {true, false}) {
    check({300, 500, 300, 32, 1, 0.3, DType::f32, true, 0}, pool.executor(), derived);
    check({70, 600, 377, 64, 1, 0.3, DType::bf16, false, 1}, pool.executor(), derived);
    check({33, 1024, 512, 16, 16, 0.2, DType::f32, false, 0}, pool.executor(), derived);
  }
}

// Bits do not depend on threads, nor on the batch that a token is in.
TEST_P(Int8Test, TheSameBitsInEveryBatchAndOnEveryThread) {
  const Force force(GetParam().family);
  for (const std::int64_t cols : {1, 4, 32}) {
    const Layer layer({200, 130, 600, 32, cols, 0.4, DType::f32, false, 0});
    const auto run = [&](std::int64_t first, std::int64_t count, int threads) {
      Layer some = layer;
      some.spec.m = count;
      some.x.assign(layer.x.begin() + first * layer.x_stride(),
                    layer.x.begin() + (first + count) * layer.x_stride());
      ThreadPool pool(threads);
      LinearRun one(some, GetParam().scaling, pool.executor());
      expect_ok(one.linear());
      return one.bytes();
    };
    const std::vector<std::byte> all = run(0, 200, 1);
    for (const int threads : {2, 5}) EXPECT_EQ(run(0, 200, threads), all);
    const auto row = static_cast<std::ptrdiff_t>(all.size()) / 200;
    // Weight-only is the floats' kernels, up to 16 tokens maybe those for a few.
    const std::int64_t least = GetParam().scaling == Scaling::weight ? 17 : 5;
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, least}, {17, 17}, {63, 40}}) {
      const std::vector<std::byte> part = run(first, count, 2);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first * row)) << first << ' ' << count;
    }
  }
}

TEST_P(Int8Test, EveryConfigurationComputesTheSame) {
  if (GetParam().scaling != Scaling::dynamic || GetParam().family == "ref") return;
  ThreadPool pool(3);
  for (const char* config : {"panels=1 splits=1 rest=0", "panels=3 splits=2 rest=0",
                             "panels=16 splits=5 rest=0", "panels=2 splits=1 rest=2"}) {
    const Force force(GetParam().family + "," + GetParam().family + "_linear_int8(" + config + ")");
    const Layer layer({150, 170, 200, 32, 1, 0.4, DType::f32, true, 0});
    LinearRun run(layer, GetParam().scaling, pool.executor());
    expect_ok(run.linear());
    expect_linear(layer, GetParam().scaling, run.y());
  }
  const Force force(GetParam().family + "," + GetParam().family + "_linear_int8(panels=0)");
  const Layer layer({150, 170, 200, 32, 1, 0.4});
  EXPECT_NE(LinearRun(layer, GetParam().scaling, {}, false).linear().message().find("panels and splits"),
            std::string::npos);
}

// Panels of 64 tokens, of which the last one holds any number, for every source of features.
TEST_P(Int8Test, BlocksOfFewOutputsAndManyTokens) {
  const Force force(GetParam().family);
  for (const auto& [rows, cols] :
       {std::pair{4, 1}, {4, 4}, {8, 1}, {8, 8}, {12, 1}, {16, 1}, {16, 16}, {4, 64}, {20, 4}}) {
    for (const std::int64_t m : {12, 17, 47, 48, 64, 81, 130}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Layer layer({m, 170, 205, rows, cols, 0.4, dtype, true, 0});
        LinearRun run(layer, GetParam().scaling);
        expect_ok(run.linear());
        expect_linear(layer, GetParam().scaling, run.y());
      }
    }
  }
}

// Panels too long for L1, in parts; outputs that leave in several turns, the last one partly there.
TEST_P(Int8Test, PartsOfPanelsOfManyTokens) {
  const Force force(GetParam().family);
  for (const auto& [rows, cols] : {std::pair{4, 1}, {8, 4}, {16, 64}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Spec spec{70, 150, 1700, rows, cols, 0.6, dtype, true, 0};
      const Layer layer(spec);
      LinearRun run(layer, GetParam().scaling);
      expect_ok(run.linear());
      const std::vector<double> sums = run.y();
      expect_linear(layer, GetParam().scaling, sums);
      spec.activation = Activation::relu;
      const Layer activated(spec);
      LinearRun relu(activated, GetParam().scaling);
      expect_ok(relu.linear());
      const std::vector<double> got = relu.y();
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], std::max(sums[i], 0.0)) << i;
    }
  }
}

// A layer keeps what it holds when another family is forced: that one reads it alike, or not at all.
TEST_P(Int8Test, OnWhatAnotherFamilyDerived) {
  if (GetParam().scaling != Scaling::dynamic) GTEST_SKIP() << "digits hold what int8 holds";
  const auto check_pair = [](const std::string& derives, const std::string& runs) {
    for (const auto& [rows, cols] : {std::pair{4, 1}, {4, 4}, {6, 6}, {10, 10}, {16, 1}, {32, 32}}) {
      for (const std::int64_t tokens : {1, 40}) {
        SCOPED_TRACE(derives + ", then " + runs + ", " + std::to_string(rows) + " rows");
        const Layer layer({tokens, 110, 90, rows, cols, 0.4, DType::f32, true, 0});
        LinearRun run(layer, Scaling::dynamic, {}, false);
        {
          const Force force(derives);
          run.derive(tokens);
        }
        const Force force(runs);
        expect_ok(run.linear());
        expect_linear(layer, Scaling::dynamic, run.y());
      }
    }
  };
  for (const std::string& other : families_of(Scaling::dynamic)) {
    check_pair(GetParam().family, other);
    check_pair(other, GetParam().family);
  }
}

TEST_P(Int8Test, ConfigurationsOfBlocksOfFewOutputs) {
  const std::string& family = GetParam().family;
  if (GetParam().scaling != Scaling::dynamic || !(family.starts_with("avx"))) {
    GTEST_SKIP() << "has no kernel for them";
  }
  ThreadPool pool(3);
  for (const char* config : {"panels=1 splits=1 rest=0", "panels=2 splits=3 rest=0",
                             "panels=16 splits=5 rest=0", "panels=2 splits=2 rest=1"}) {
    const Force force(family + "," + family + "_linear_int8_rows(" + config + ")");
    for (const std::int64_t cols : {1, 4, 64}) {
      const Layer layer({150, 170, 2000, 4, cols, 0.4, DType::f32, true, 0});
      LinearRun run(layer, GetParam().scaling, pool.executor());
      expect_ok(run.linear());
      expect_linear(layer, GetParam().scaling, run.y());
    }
  }
}

// x as the first operand of AMX's products: whole groups, halves put side by side, an odd number of them, and
// weights multiplied as if dense; outputs that leave by less than 128, and output blocks that store nothing.
TEST_P(Int8Test, SumsByToken) {
  if (GetParam().scaling != Scaling::dynamic || GetParam().family != "amx") {
    GTEST_SKIP() << "amx_linear_int8_tokens alone";
  }
  const std::string kernel = "amx_linear_int8_tokens";
  const Force force("amx");
  ThreadPool pool(3);
  const auto check_tokens = [&](Spec spec, bool takes) {
    const Layer layer(spec);
    rarefy::Problem problem = make_problem(Op::linear, layer.pattern.shape(), spec.m, spec.dtype);
    problem.weight.dtype = DType::i8;
    problem.weight.scaling = Scaling::dynamic;
    for (const Candidate& candidate : explain(problem).candidates) {
      if (candidate.kernel.name != kernel) continue;
      EXPECT_EQ(candidate.why_not.empty(), takes) << candidate.why_not;
    }
    LinearRun run(layer, Scaling::dynamic, pool.executor());
    expect_ok(run.linear());
    const std::vector<double> sums = run.y();
    expect_linear(layer, Scaling::dynamic, sums);
    spec.activation = Activation::relu;
    const Layer activated(spec);
    LinearRun relu(activated, Scaling::dynamic);
    expect_ok(relu.linear());
    const std::vector<double> got = relu.y();
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(sums[i])) continue;  // poison, between rows
      ASSERT_EQ(got[i], std::max(sums[i], 0.0)) << i;
    }
  };
  for (const auto& [rows, cols] : {std::pair{32, 32}, {64, 64}, {96, 32}, {32, 96}, {64, 160}, {160, 64}}) {
    for (const double density : {0.05, 0.5, 1.0}) {
      for (const std::int64_t m : {5, 16, 17, 33, 70, 300}) {
        check_tokens(
            {m, 3 * rows + rows / 2 + 1, 5 * cols + cols / 2 + 1, rows, cols, density, DType::f32, true},
            true);
      }
      check_tokens({130, 4 * rows, 3 * cols, rows, cols, density, DType::bf16, true, 0}, true);
    }
  }
  for (const auto& [rows, cols] : {std::pair{4, 1}, {8, 4}, {16, 1}, {16, 16}, {32, 1}, {48, 3}, {112, 5}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::int64_t m : {96, 133}) check_tokens({m, 400, 150, rows, cols, 0.9, dtype, true}, true);
      check_tokens({100, 5 * rows + 3, 700, rows, cols, 0.8, dtype, true, 0}, true);
    }
  }
  check_tokens({5, 400, 150, 4, 1, 0.9, DType::f32, true}, true);
  check_tokens({100, 400, 1500, 32, 1, 0.1, DType::f32, true}, false);
  check_tokens({4, 400, 150, 32, 32, 0.5, DType::f32, true}, false);
}

// dX of the scaled values, whatever x was rounded to.
TEST_P(Int8Test, GradInput) {
  const bool has = GetParam().scaling == Scaling::weight || GetParam().family == "ref";
  if (!has) return;
  const Layer layer({20, 70, 50, 16, 4, 0.4, DType::f32, true, 0});
  const Force force(GetParam().family);
  const LinearRun run(layer, GetParam().scaling);
  std::vector<float> dy(20 * 70), dx(20 * 50);
  for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(i % 5) - 2;
  expect_ok(rarefy::grad_input({dy.data(), DType::f32, 20, 70, 70}, run.weight(),
                               {dx.data(), DType::f32, 20, 50, 50}));
  std::vector<double> expected(dx.size());
  const PlanView plan = layer.pattern.view();
  for (std::int64_t i = 0; i < layer.pattern.shape().row_count(); ++i) {
    for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      for (std::int64_t r = 0; r < std::min<std::int64_t>(16, 70 - i * 16); ++r) {
        for (std::int64_t c = 0; c < std::min<std::int64_t>(4, 50 - plan.col[e] * 4); ++c) {
          const double w = layer.values[static_cast<std::size_t>((e * 16 + r) * 4 + c)] *
                           layer.scales[static_cast<std::size_t>(i * 16 + r)];
          for (std::int64_t m = 0; m < 20; ++m) {
            expected[static_cast<std::size_t>(m * 50 + plan.col[e] * 4 + c)] +=
                w * dy[static_cast<std::size_t>(m * 70 + i * 16 + r)];
          }
        }
      }
    }
  }
  for (std::size_t i = 0; i < dx.size(); ++i) ASSERT_EQ(dx[i], expected[i]) << i;
}

TEST(Int8SelectionTest, SaysWhatItDoesNotTake) {
  const auto why_not = [](rarefy::Problem problem, const std::string& kernel) {
    problem.weight.dtype = DType::i8;
    for (const Candidate& candidate : explain(problem).candidates) {
      if (candidate.kernel.name == kernel) return candidate.why_not;
    }
    return std::string("no such row");
  };
  const auto asked = [](BsrShape shape, DType in, Scaling scaling) {
    rarefy::Problem problem = make_problem(Op::linear, shape, 9, in);
    problem.weight.scaling = scaling;
    return problem;
  };
  const std::string kernel = "scalar_linear_int8";
  EXPECT_EQ(why_not(asked({64, 64, 16, 1, 9}, DType::f32, Scaling::dynamic), kernel), "");
  EXPECT_EQ(why_not(asked({64, 64, 12, 1, 9}, DType::f32, Scaling::dynamic), kernel), "");
  EXPECT_EQ(why_not(asked({6500, 64, 65, 1, 9}, DType::f32, Scaling::dynamic), kernel), "");
  EXPECT_EQ(why_not(asked({64, 64, 16, 1, 9}, DType::f16, Scaling::dynamic), kernel),
            "takes inputs and outputs in f32 or bf16; got f16 and f16");
  EXPECT_EQ(why_not(asked({64, 64, 16, 1, 9}, DType::f32, Scaling::weight), kernel),
            "takes int8 values with scales, for x rounded to int8");
  EXPECT_EQ(why_not(asked({64, 1 << 17, 16, 1, 9}, DType::f32, Scaling::dynamic), kernel),
            "takes less than 131072 input features");
#if defined(__x86_64__)
  const std::string rows = "avx512_linear_int8_rows";
  if (cpu_machine().has("avx512_vnni")) {
    const bool two = cpu_machine().l1 >= 48 << 10;
    EXPECT_EQ(why_not(asked({64, 64, 4, 1, 9}, DType::f32, Scaling::dynamic), rows),
              "takes at least " + std::string(two ? "13" : "12") + " tokens with blocks of 4 outputs; got 9");
    EXPECT_EQ(why_not(asked({64, 64, 8, 4, 9}, DType::f32, Scaling::dynamic), rows),
              two ? "" : "takes at least 20 tokens with blocks of 8 outputs; got 9");
    EXPECT_EQ(why_not(asked({64, 64, 32, 1, 9}, DType::f32, Scaling::dynamic), rows),
              "takes blocks of less than 32 outputs; got 32×1 with 9 of 128");
  }
  if (cpu_machine().has("avx2")) {
    EXPECT_EQ(why_not(asked({64, 64, 4, 1, 9}, DType::f32, Scaling::dynamic), "avx2_linear_int8_rows"),
              "takes at least 12 tokens with blocks of 4 outputs; got 9");
    EXPECT_EQ(why_not(asked({64, 64, 8, 1, 9}, DType::f32, Scaling::dynamic), "avx2_linear_int8_rows"),
              "takes blocks whose rows are no multiple of 8, where joining costs; got 8×1 with 9 of 512");
  }
#endif
  EXPECT_EQ(why_not(asked({64, 64, 16, 1, 9}, DType::f32, Scaling::dynamic), "scalar_linear_scaled"),
            "takes x as it is, not rounded");
  EXPECT_EQ(why_not(asked({64, 64, 16, 1, 9}, DType::f32, Scaling::none), "scalar_linear_scaled"),
            "takes int8 values with scales");
}

TEST(Int8ArgumentsTest, AreChecked) {
  const Layer layer({4, 16, 8, 16, 4, 1.0, DType::f32, true, 0});
  const LinearRun run(layer, Scaling::dynamic);
  std::vector<double> wide(64);
  std::vector<float> x(32), y(64);
  const auto linear = [&](const BsrView& w) {
    return rarefy::linear({x.data(), DType::f32, 4, 8, 8}, w, nullptr, Activation::none,
                          {y.data(), DType::f32, 4, 16, 16});
  };
  const auto expect_refused = [](const Status& status, const std::string& text) {
    EXPECT_EQ(status.message(), text);
  };
  expect_ok(linear(run.weight()));
  BsrView w = run.weight();
  w.scales = nullptr;
  expect_refused(linear(w), "[linear] scales must point to their elements; got a null pointer");
  w = run.weight();
  w.scaling = Scaling::none;
  expect_refused(linear(w), "[linear] scales must come with a scaling; got none");
  w = run.weight();
  w.scaling = static_cast<Scaling>(7);
  expect_refused(linear(w), "[linear] scaling must be one of rarefy/problem.h; got 7");
  w = run.weight();
  w.dtype = DType::f32;
  std::vector<float> values(layer.values.size());
  w.values = values.data();
  expect_refused(linear(w), "[linear] values with scales must be i8; got f32");
  w = run.weight();
  w.scales = y.data();
  EXPECT_NE(linear(w).message().find("overlap with scales"), std::string::npos);
  expect_refused(rarefy::linear({wide.data(), DType::f64, 4, 8, 8}, run.weight(), nullptr, Activation::none,
                                {wide.data() + 32, DType::f64, 1, 16, 16}),
                 "[linear] y must have 4 rows, like x; got 1");
  std::vector<double> out(64);
  expect_refused(rarefy::linear({wide.data(), DType::f64, 4, 8, 8}, run.weight(), nullptr, Activation::none,
                                {out.data(), DType::f64, 4, 16, 16}),
                 "[linear] x must be f32, bf16 or f16 for values with scales; got f64");
  for (const float bad : {0.0F, -1.0F, kNan, kInfinity}) {
    const std::vector<float> scales{1, bad, bad};
    const std::string message = check_scales("test", scales).message();
    EXPECT_EQ(message.rfind("[test] scales must be finite and above 0; got scales[1]=", 0), 0U) << message;
  }
  expect_ok(check_scales("test", layer.scales));
}

}  // namespace
}  // namespace rarefy::test::int8
