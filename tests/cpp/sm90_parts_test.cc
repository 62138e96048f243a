// Few tiles in parts: the thread blocks of a cluster have a part of a tile's steps each and add their sums.
// Every kernel that does so, in every number of parts, whether it would choose them or not.
#include <gtest/gtest.h>

#include <limits>

#include "sm90_checks.h"

namespace rarefy::test {
namespace {

struct Case {
  std::string_view linear, grad_input;
  std::int64_t r, c;
  bool tf32 = false;
  std::string more{};  // of the config
  std::string tokens() const {
    for (const std::string_view tokens : {"64", "128", "256", "512"}) {
      if (more.find("tokens=" + std::string(tokens)) != std::string::npos) return "_" + std::string(tokens);
    }
    return "";
  }
  std::vector<int> splits = {2, 3, 4};
};

class Sm90PartsTest : public Sm90Test, public ::testing::WithParamInterface<Case> {
 protected:
  static std::string forced(int split) {
    const Case& its = GetParam();
    const std::string config = its.more + " split=" + std::to_string(split) + ')';
    std::string text = "cuda:sm90," + std::string(its.linear) + '(' + config;
    // The tall vectors' grad_input has tiles for all SMs.
    const bool parts = its.grad_input != "sm90_tall_grad_input";
    return text + ',' + std::string(its.grad_input) + '(' + (parts ? config : ")");
  }
  static ProblemSpec spec_of(std::int64_t m, std::int64_t n, std::int64_t k, double density, DType dtype,
                             bool integers) {
    ProblemSpec spec{m, n, k, GetParam().r, GetParam().c, density, dtype, integers, 8};
    if (GetParam().tf32) spec.dtype = DType::f32;
    spec.tf32 = GetParam().tf32;
    return spec;
  }
  static Kernels kernels(int split) { return {GetParam().linear, GetParam().grad_input, "", forced(split)}; }
};

// Ragged edges; fewer steps than parts, none at all; one tile and several; parts of the tokens that are
// behind the last one.
TEST_P(Sm90PartsTest, MatchHost) {
  for (const int split : GetParam().splits) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const double density : {0.0, 0.3, 1.0}) {
        check_products(spec_of(130, 5 * 64 - 8, 600, density, dtype, true), kernels(split));
      }
      check_products(spec_of(40, 3 * 128 + 64, 1000, 0.3, dtype, false), kernels(split));
      check_products(spec_of(513, 200, 1480, 0.2, dtype, true), kernels(split));
      check_products(spec_of(17, 64, 72, 0.5, dtype, true), kernels(split));
      check_products(spec_of(256, 72, 2000, 0.4, dtype, false), kernels(split));
    }
  }
}

TEST_P(Sm90PartsTest, AbsentBlocksAreSkippedWhateverXHolds) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (GetParam().tf32) GTEST_SKIP() << "NaN and Inf of f32 are what Sm90Tf32Test asks about";
  for (const int split : GetParam().splits) {
    const Force force(forced(split));
    const ProblemSpec spec = spec_of(300, 272, 336, 0.2, DType::bf16, true);
    Problem problem = make_problem(spec);
    add_specials(problem);
    std::fill_n(problem.x.begin() + 7 * spec.k, spec.k, nan);  // a token of nothing else
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    expect_ok(gpu.linear(Activation::none));
    expect_ok(gpu.grad_input());
    expect_ok(gpu.grad_weight());
    expect_same_or_nan(problem, gpu);
  }
}

TEST_P(Sm90PartsTest, Activations) {
  for (const Activation activation : {Activation::relu, Activation::gelu_erf, Activation::silu}) {
    const Force force(forced(4));
    const Problem problem = make_problem(spec_of(200, 192, 320, 0.3, DType::bf16, false));
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    expect_ok(gpu.linear(activation));
    expect_activation(problem, gpu, activation);
  }
}

TEST_P(Sm90PartsTest, RepeatsAreEqual) {
  const Force force(forced(4));
  const Problem problem = make_problem(spec_of(100, 320, 1024, 0.3, DType::bf16, false));
  ProblemIn<DeviceBuffer> gpu(problem);
  gpu.hold_derived(4096);
  expect_equal_repeats(gpu, Op::linear);
}

INSTANTIATE_TEST_SUITE_P(
    Sm90, Sm90PartsTest,
    ::testing::Values(
        Case{"sm90_strips_linear", "sm90_strips_grad_input", 64, 64, false,
             "cluster=1 tokens=128 slots=4 w_slots=12"},
        Case{"sm90_strips_linear",
             "sm90_strips_grad_input",
             64,
             64,
             false,
             "cluster=1 tokens=256 slots=3 w_slots=9",
             {2, 4}},  // sums of thirds have no room
        Case{"sm90_strips_linear", "sm90_strips_grad_input", 128, 128, false,
             "cluster=1 tokens=128 slots=4 w_slots=12"},
        Case{"sm90_strips_linear", "sm90_strips_grad_input", 128, 128, false,
             "cluster=1 strips=2 tokens=256 slots=4 w_slots=8"},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 16, 16},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 32, 32},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 8, 8},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 16, 16, false, "alone=1"},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 32, 32, true, "alone=1"},
        Case{"sm90_strips_linear", "sm90_strips_grad_input", 64, 64, false,
             "cluster=1 tokens=128 slots=4 w_slots=12 alone=1"},
        Case{"sm90_strips_linear", "sm90_strips_grad_input", 128, 128, false,
             "cluster=1 strips=2 tokens=256 slots=4 w_slots=8 alone=1"},
        Case{"sm90_strips_linear", "sm90_strips_grad_input", 64, 64, false,
             "cluster=1 tokens=64 slots=8 w_slots=14"},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 16, 16, false,
             "tokens=64 slots=6 pieces=56 alone=1"},
        Case{"sm90_unions_linear", "sm90_unions_grad_input", 32, 32, true},
        Case{"sm90_tall", "sm90_tall_grad_input", 128, 1},
        Case{"sm90_tall", "sm90_tall_grad_input", 64, 1, false, "tokens=256 columns=64 slots=4"},
        Case{"sm90_tall", "sm90_tall_grad_input", 128, 1, false,
             "tile_rows=128 tokens=128 columns=64 slots=6"},
        Case{"sm90_tall", "sm90_tall_grad_input", 128, 1, false, "tile_rows=64 tokens=64 columns=64 slots=5"},
        Case{"sm90_tall_packed", "sm90_tall_packed_transposed", 16, 1, false,
             "tokens=256 columns=64 slots=4"},
        Case{"sm90_tall_packed", "sm90_tall_packed_transposed", 16, 1, false,
             "tokens=128 columns=128 slots=4"},
        Case{"sm90_tall_packed", "sm90_tall_packed_transposed", 16, 1, false,
             "tokens=64 columns=128 slots=6"},
        Case{"sm90_tall_packed", "sm90_tall_packed_transposed", 128, 4, false,
             "tokens=256 columns=64 slots=4"}),
    [](const auto& tested) {
      const Case& its = tested.param;
      return std::string(its.linear) + '_' + std::to_string(its.r) + 'x' + std::to_string(its.c) +
             (its.tf32 ? "_tf32" : "") + its.tokens() +
             (its.more.find("alone") != std::string::npos ? "_alone" : "");
    });

// Every tile of tall vectors, whole and in parts; X and Y in either layout, tokens that end within a piece of
// 16 bytes.
TEST_F(Sm90Test, TallTiles) {
  for (const std::int64_t r : {64, 128, 192, 256}) {
    for (const char* tile :
         {"tile_rows=64 tokens=64 columns=64 slots=5", "tile_rows=64 tokens=64 columns=128 slots=6",
          "tile_rows=64 tokens=128 columns=64 slots=3", "tile_rows=64 tokens=128 columns=128 slots=4",
          "tile_rows=64 tokens=256 columns=64 slots=4", "tile_rows=64 tokens=512 columns=32 slots=5",
          "tile_rows=128 tokens=64 columns=128 slots=4", "tile_rows=128 tokens=128 columns=64 slots=6",
          "tile_rows=128 tokens=256 columns=64 slots=4"}) {
      const bool wide = std::string_view(tile).find("tile_rows=128") != std::string_view::npos;
      const bool lists = std::string_view(tile).find("tokens=512") != std::string_view::npos;
      if ((wide || lists) && (r % 128 == 0) != wide) continue;
      for (const int split : {1, 2, 4}) {
        if (lists && split > 1) continue;
        for (const std::int64_t tokens : {33, 64, 135, 264, 520}) {
          for (const Layout x : kLayouts) {
            for (const Layout y : kLayouts) {
              const bool in_eights = y == Layout::by_feature && tokens % 8 != 0;
              const ProblemSpec spec{tokens, 3 * r - 8, 264, r, 1, 0.4, DType::bf16, true, 8, x, y};
              if (in_eights || (x == Layout::by_feature && tokens % 8 != 0 && split != 1)) continue;
              SCOPED_TRACE(testing::Message() << text_of(spec) << " " << tile);
              const Problem problem = make_problem(spec);
              ProblemIn<DeviceBuffer> gpu(problem);
              gpu.hold_derived(4096);
              const Force force("cuda:sm90,sm90_tall(split=" + std::to_string(split) + ' ' + tile + ')');
              expect_ok(gpu.linear(Activation::none));
              expect_linear(problem, gpu);
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

// X and Y by feature, of tall vectors alone; what is chosen where tiles are few, and where they are not.
TEST_F(Sm90Test, PartsOfTallTiles) {
  for (const std::int64_t r : {64, 128}) {
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        for (const int split : {2, 3, 4}) {
          const ProblemSpec spec{264, 200, 1000, r, 1, 0.4, DType::bf16, true, 8, x, y};
          SCOPED_TRACE(text_of(spec));
          const Problem problem = make_problem(spec);
          ProblemIn<DeviceBuffer> gpu(problem);
          gpu.hold_derived(4096);
          const Force force(
              "cuda:sm90,sm90_tall(tokens=256 columns=64 slots=4 split=" + std::to_string(split) + ')');
          expect_ok(gpu.linear(Activation::none));
          expect_linear(problem, gpu);
        }
      }
    }
  }
  const auto config = [](std::int64_t m, std::int64_t n, std::int64_t r, std::int64_t c) {
    BsrShape shape{n, 14336, r, c, 0};
    shape.nnzb = shape.row_count() * shape.col_count() / 4;
    rarefy::Problem asked = make_problem(Op::linear, shape, m, DType::bf16, Device::cuda);
    asked.derived = kAnyDerived;
    return explain(asked).config;
  };
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{128, 1}, {128, 128}, {32, 32}}) {
    EXPECT_EQ(config(64, 2048, r, c).find("split=1"), std::string::npos) << config(64, 2048, r, c);
    EXPECT_NE(config(8192, 2048, r, c).find("split=1"), std::string::npos) << config(8192, 2048, r, c);
  }
}

}  // namespace
}  // namespace rarefy::test
