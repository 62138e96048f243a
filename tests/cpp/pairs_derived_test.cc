// What kernels of bf16 pairs derive from a weight: made ahead or in the call, refused where it does not fit.
#include "pairs_checks.h"

namespace rarefy::test {
namespace {

// Weights that nobody holds packed are packed in the call: by the driver, or ahead of it for who holds the
// rest.
TEST_P(PairsTest, PackedInTheCall) {
  ThreadPool pool(3);
  const Force force(GetParam());
  using Block = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [rows, cols] :
       {Block{32, 1}, {16, 16}, {16, 32}, {4, 1}, {8, 8}, {24, 1}, {12, 24}, {6, 6}}) {
    for (const bool integers : {true, false}) {
      for (const std::int64_t tokens : {20, 100}) {  // without anything at hand, 20 are another kernel's
        const Problem problem = make_problem({tokens, 170, 200, rows, cols, 0.4, DType::bf16, integers, 1});
        ProblemIn<HostBuffer> run(problem, pool.executor());
        run.hold_prepared_alone();
        expect_ok(run.linear(Activation::none));
        expect_linear(problem, run);
      }
      const Problem problem = make_problem({100, 170, 200, rows, cols, 0.4, DType::bf16, integers, 1});
      ProblemIn<HostBuffer> run(problem, pool.executor());
      expect_ok(run.linear(Activation::none));
      expect_linear(problem, run);
      if (cols == 1) continue;
      expect_ok(run.grad_input());
      expect_grad_input(problem, run);
    }
  }
}

// What a caller holds for another kernel, or of another version, is no kernel's: it is not read, and what is
// lacking is made. Also for f32, whose kernels derive nothing.
TEST_P(PairsTest, DerivedDataOfOthersIsNotRead) {
  const std::vector<std::byte> garbage(1 << 20, std::byte{0x7f});
  const auto bytes = static_cast<std::int64_t>(garbage.size());
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const Force force(dtype == DType::bf16 ? GetParam() : std::string());
    for (const std::int64_t tokens : {3, 100}) {
      if (dtype == DType::bf16 && tokens == 3) continue;  // another family's
      const Problem problem = make_problem({tokens, 170, 200, 32, 1, 0.4, dtype, false, 1});
      ProblemIn<HostBuffer> run(problem);
      BsrView w = run.weight();
      const auto product = [&] {
        std::vector<std::byte> y(static_cast<std::size_t>(tokens) * 170 * size_of(dtype));
        expect_ok(linear(run.x_view(), w, run.bias(), Activation::none, {y.data(), dtype, tokens, 170, 170}));
        return y;
      };
      const std::vector<std::byte> want = product();
      for (const std::uint64_t key : {std::uint64_t{12345}, kAnyDerived}) {
        w.derived = {key, garbage.data(), garbage.data(), bytes, bytes};
        EXPECT_EQ(product(), want) << tokens << " tokens, " << name(dtype) << ", key " << key;
      }
    }
  }
}

// A layer keeps what it holds when another family is forced: that one reads it alike, or not at all.
TEST_P(PairsTest, OnWhatAnotherFamilyDerived) {
  const auto check_pair = [](const std::string& derives, const std::string& runs) {
    using Block = std::pair<std::int64_t, std::int64_t>;
    for (const auto& [rows, cols] : {Block{32, 1}, {16, 16}, {4, 1}, {8, 8}, {24, 1}, {10, 10}, {32, 32}}) {
      SCOPED_TRACE(derives + ", then " + runs + ", " + std::to_string(rows) + 'x' + std::to_string(cols));
      const Problem problem = make_problem({100, 170, 200, rows, cols, 0.4, DType::bf16, false, 1});
      ProblemIn<HostBuffer> run(problem);
      const BsrView alone = run.weight();
      run.hold_derived();
      BsrView held;
      {
        const Force force(derives);
        held = run.weight();
      }
      const Force force(runs);
      const auto product = [&](const BsrView& w) {
        std::vector<std::byte> y(100 * 170 * 2);
        expect_ok(
            linear(run.x_view(), w, run.bias(), Activation::none, {y.data(), DType::bf16, 100, 170, 170}));
        return y;
      };
      EXPECT_EQ(product(held), product(alone));
    }
  };
  for (const std::string& other : pair_families()) {
    check_pair(GetParam(), other);
    check_pair(other, GetParam());
  }
}

TEST_P(PairsTest, DerivedDataThatIsTooSmallIsRefused) {
  const Force force(GetParam());
  const Problem problem = make_problem({100, 170, 200, 32, 1, 0.4, DType::bf16, false, 1});
  ProblemIn<HostBuffer> run(problem);
  run.hold_derived();
  std::vector<std::byte> y(100 * 170 * 2);
  for (const bool packed : {false, true}) {
    BsrView w = run.weight();
    (packed ? w.derived.packed_bytes : w.derived.prepared_bytes) -= 1;
    const Status status =
        linear(run.x_view(), w, run.bias(), Activation::none, {y.data(), DType::bf16, 100, 170, 170});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find(packed ? "derived.packed must have" : "derived.prepared must have"),
              std::string::npos)
        << status.message();
  }
}

}  // namespace
}  // namespace rarefy::test
