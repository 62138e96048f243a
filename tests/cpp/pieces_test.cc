// linear and grad_input of blocks of few rows on pieces of rows (pieces.h): chosen where they should be, the
// bits of gather, exact integers on patterns of every kind, within exactly the memory that is asked for.
#include <gtest/gtest.h>

#include "core/registry.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

const Kernel* kernel_named(std::string_view name) {
  for (const Kernel& kernel : registry()) {
    if (kernel.name == name && kernel.format == Format::bsr) return &kernel;
  }
  return nullptr;
}

// Memory of exactly so many bytes, from a multiple of 64 on, between guards.
class Memory {
 public:
  explicit Memory(std::int64_t bytes)
      : bytes_(bytes), all_(static_cast<std::size_t>(bytes + 3 * kGuard), kPoison), base_(all_.data()) {
    while (reinterpret_cast<std::uintptr_t>(base_) % kGuard != 0) ++base_;
  }
  void* data() { return base_ + kGuard; }
  std::vector<std::byte> bytes() const { return {base_ + kGuard, base_ + kGuard + bytes_}; }
  bool intact() const {
    return std::all_of(base_, base_ + kGuard, [](std::byte b) { return b == kPoison; }) &&
           std::all_of(base_ + kGuard + bytes_, base_ + 2 * kGuard + bytes_,
                       [](std::byte b) { return b == kPoison; });
  }

 private:
  static constexpr std::int64_t kGuard = 64;
  std::int64_t bytes_;
  std::vector<std::byte> all_;
  std::byte* base_;
};

// linear or grad_input by one kernel and configuration; what it prepares is made for this call.
std::vector<std::byte> run(Op op, const Problem& problem, const Kernel& kernel, const std::string& text,
                           const Executor& executor, DType stored, Activation activation = Activation::none) {
  const ProblemSpec& s = problem.spec;
  const std::vector<std::byte> x = encode(problem.x, s.dtype), dy = encode(problem.dy, s.dtype),
                               values = encode(problem.values, stored), bias = encode(problem.bias, s.dtype);
  const std::int64_t cols = op == Op::linear ? s.n : s.k, stride = cols + 3;
  std::vector<std::byte> out(static_cast<std::size_t>(s.m * stride) * size_of(s.dtype), kPoison);
  Call call;
  call.problem = make_problem(op, problem.pattern.shape(), s.m, s.dtype, Device::cpu, executor.threads);
  call.problem.weight.dtype = stored;
  const Config base = kernel.configure(call.problem, cpu_machine());
  call.config = text.empty() ? base : *parse_config(kernel, base, text);
  if (op == Op::linear) {
    call.x = {x.data(), s.dtype, s.m, s.k, problem.x_stride()};
    call.bias = bias.data();
    call.activation = activation;
  } else {
    call.dy = {dy.data(), s.dtype, s.m, s.n, problem.y_stride()};
  }
  call.plan = problem.pattern.view();
  call.values = values.data();
  call.out = {out.data(), s.dtype, s.m, cols, stride};
  call.executor = executor;
  const bool prepares = kernel.prepare != nullptr;
  Memory prepared(prepares ? kernel.prepared_size(call.problem, call.config) : 0);
  if (prepares) {
    expect_ok(kernel.prepare(call, prepared.data()));
    call.derived.prepared = prepared.data();
  }
  const std::vector<std::byte> made = prepared.bytes();
  Memory workspace(kernel.workspace(call.problem, call.config));
  call.workspace = workspace.data();
  expect_ok(kernel.run(call));
  EXPECT_TRUE(prepared.intact() && workspace.intact()) << to_string(kernel, call.config);
  EXPECT_EQ(prepared.bytes(), made) << "only read";
  return out;
}

class PiecesTest : public ::testing::TestWithParam<std::string> {
 protected:
  const Kernel& kernel(Op op, bool pieces) const {
    return *kernel_named(GetParam() + "_" + std::string(name(op)) + (pieces ? "_pieces" : ""));
  }
};

std::vector<std::string> families() {
  std::vector<std::string> found;
  for (const std::string& family : cpu_impls()) {
    if (kernel_named(family + "_linear_pieces") != nullptr) found.push_back(family);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Cpu, PiecesTest, ::testing::ValuesIn(families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(PiecesTest, AreChosenForBlocksOfFewRows) {
  const Force force(GetParam());
  const auto chosen = [](Op op, std::int64_t rows, std::int64_t cols, double density, std::int64_t tokens) {
    const auto nnzb = static_cast<std::int64_t>(density * 3072 * 768 / static_cast<double>(rows * cols));
    return explain(make_problem(op, {3072, 768, rows, cols, nnzb}, tokens, DType::f32)).kernel;
  };
  for (const Op op : {Op::linear, Op::grad_input}) {
    const std::string plain = GetParam() + "_" + std::string(name(op)), pieces = plain + "_pieces";
    for (const std::int64_t tokens : {5, 16, 512}) {
      EXPECT_EQ(chosen(op, 1, 1, 0.35, tokens), pieces);
      EXPECT_EQ(chosen(op, 1, 1, 0.1, tokens), pieces);
      EXPECT_EQ(chosen(op, 2, 2, 0.35, tokens), pieces);
      EXPECT_EQ(chosen(op, 1, 1, 0.001, tokens), plain) << "pieces of one element";
      const std::string squares = chosen(op, 4, 4, 0.35, tokens);
      const bool fours = op == Op::linear && tokens <= 8 && squares == GetParam() + "_linear_few";
      if (!fours) {
        EXPECT_EQ(squares, plain) << tokens;
      }
    }
  }
  EXPECT_NE(chosen(Op::linear, 1, 1, 0.35, 4), GetParam() + "_linear_pieces");
  EXPECT_EQ(chosen(Op::linear, 4, 1, 0.35, 512), GetParam() + "_linear");
}

// Sums of several parts, whose order counts; tokens and features that fill no vector, tile or range; values
// in 16 bits; every cut.
TEST_P(PiecesTest, HaveTheBitsOfGather) {
  ThreadPool pool(3);
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 2}, {2, 1}, {2, 2}}) {
    for (const double density : {0.15, 0.7, 1.0}) {
      for (const auto& [op, tokens, dtype] : {std::tuple{Op::linear, 5, DType::f32},
                                              {Op::linear, 70, DType::f32},
                                              {Op::linear, 133, DType::bf16},
                                              {Op::grad_input, 37, DType::f32},
                                              {Op::grad_input, 70, DType::f16}}) {
        const bool linear = op == Op::linear;  // the reduction is long
        const Problem problem = make_problem(
            {tokens, linear ? 39 : 951, linear ? 951 : 39, rows, cols, density, dtype, false, 3});
        for (const DType stored : {DType::f32, DType::bf16}) {
          const auto want = run(op, problem, kernel(op, false), "scatter=0", {}, stored, Activation::silu);
          for (const std::string text :
               {"", "columns=1 rows=1 splits=1", "columns=7 rows=5 splits=3", "vectors=1",
                "vectors=2 columns=100 rows=13 splits=2", "columns=144 rows=1024 splits=1", "by_piece=1",
                "by_piece=1 columns=7 rows=5 splits=3", "by_piece=1 vectors=2 columns=144 rows=1024"}) {
            if (!linear && text.starts_with("by_piece")) continue;
            EXPECT_EQ(run(op, problem, kernel(op, true), text, pool.executor(), stored, Activation::silu),
                      want)
                << name(op) << ' ' << text << " block " << rows << 'x' << cols << " density " << density
                << ' ' << rarefy::name(dtype) << ' ' << rarefy::name(stored);
          }
        }
      }
    }
  }
}

// A copy of all values is not made where it would be large and few panels read it; never of what is turned.
TEST_P(PiecesTest, LargeValuesOf16BitsBecomeFloatsByPiece) {
  const Force force(GetParam());
  const auto config = [](DType dtype, std::int64_t n, std::int64_t tokens) {
    return explain(make_problem(Op::linear, {n, 4096, 2, 2, n * 512}, tokens, dtype)).config;
  };
  EXPECT_NE(config(DType::f16, 11008, 24).find("by_piece=1"), std::string::npos);
  for (const std::string& all :
       {config(DType::f16, 11008, 2000), config(DType::f16, 1024, 24), config(DType::f32, 11008, 24)})
    EXPECT_NE(all.find("by_piece=0"), std::string::npos) << all;
  const Problem problem = make_problem({20, 40, 300, 1, 1, 0.5, DType::f32});
  const Force refused(GetParam() + ',' + GetParam() + "_grad_input_pieces(by_piece=1)");
  ProblemIn<HostBuffer> one(problem);
  EXPECT_NE(
      one.grad_input().message().find("by_piece of the config must be 0 for the transposed product; got 1"),
      std::string::npos);
}

// Patterns that a random one never is; integers, exactly.
TEST_P(PiecesTest, TakePatternsOfEveryKind) {
  constexpr std::int64_t kRows = 150, kCols = 1001;
  using Stores = bool (*)(std::int64_t row, std::int64_t col);
  const Stores patterns[] = {
      [](std::int64_t, std::int64_t) { return false; },
      [](std::int64_t row, std::int64_t) { return row == 77; },
      [](std::int64_t, std::int64_t col) { return col == kCols - 1; },
      [](std::int64_t row, std::int64_t col) { return row == 0 || col == 0; },
      [](std::int64_t row, std::int64_t col) { return row % 10 == 9 && col % 3 != 1; },
      [](std::int64_t row, std::int64_t col) { return col < 7 * row; },  // every length
      [](std::int64_t row, std::int64_t col) { return row % 2 == 0 && col >= 600; },
      [](std::int64_t row, std::int64_t col) {
        return col < 432 + row - 75;
      },  // about where a second part begins
  };
  ThreadPool pool(2);
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {2, 2}}) {
    for (const Stores stores : patterns) {
      for (const bool tall : {false, true}) {  // and its transpose
        const std::int64_t n = (tall ? kCols : kRows) * rows, k = (tall ? kRows : kCols) * cols;
        std::vector<std::int32_t> crow{0}, col;
        for (std::int64_t i = 0; i < n / rows; ++i) {
          for (std::int64_t j = 0; j < k / cols; ++j) {
            if (tall ? stores(j, i) : stores(i, j)) col.push_back(static_cast<std::int32_t>(j));
          }
          crow.push_back(static_cast<std::int32_t>(col.size()));
        }
        Problem problem = make_problem({21, n, k, rows, cols, 1.0, DType::f32, true, 3});
        problem.pattern =
            *Pattern::create({n, k, rows, cols, static_cast<std::int64_t>(col.size())}, crow, col);
        problem.values.resize(static_cast<std::size_t>(problem.pattern.shape().value_count()));
        for (const Op op : {Op::linear, Op::grad_input}) {
          const auto want = run(op, problem, kernel(op, false), "scatter=0", {}, DType::f32);
          for (const char* text : {"", "columns=33 rows=50 splits=2", "columns=100 rows=1 splits=7"}) {
            EXPECT_EQ(run(op, problem, kernel(op, true), text, pool.executor(), DType::f32), want)
                << name(op) << ' ' << text << " pattern " << &stores - patterns << " tall " << tall;
          }
        }
      }
    }
  }
}

// Through the library, held and not: the bound, and what is prepared for some tokens serves others.
TEST_P(PiecesTest, KeepTheBoundAndServeAllTokens) {
  const Force force(GetParam());
  ThreadPool pool(2);
  for (const std::int64_t tokens : {6, 48, 200}) {
    for (const bool held : {false, true}) {
      const Problem problem = make_problem({tokens, 300, 260, 1, 1, 0.3, DType::f32, false, 3});
      ProblemIn<HostBuffer> one(problem, pool.executor());
      if (held) one.hold_derived(64);
      expect_ok(one.linear(Activation::none));
      expect_ok(one.grad_input());
      expect_linear(problem, one);
      expect_grad_input(problem, one);
    }
  }
}

// NaN and infinity reach what stores something for them, and nothing else: padded columns and tokens do not.
TEST_P(PiecesTest, NanMeetsOnlyWhatIsStored) {
  const Force force(GetParam());
  Problem problem = make_problem({45, 90, 300, 1, 1, 0.3, DType::f32, true, 3});
  for (const std::int64_t token : {0, 17, 44}) {
    problem.x[static_cast<std::size_t>(token * problem.x_stride())] = kNan;
    problem.x[static_cast<std::size_t>(token * problem.x_stride() + 299)] = kInfinity;
    problem.dy[static_cast<std::size_t>(token * problem.y_stride() + 89)] = kNan;
  }
  ProblemIn<HostBuffer> one(problem);
  expect_ok(one.linear(Activation::none));
  expect_ok(one.grad_input());
  expect_same_or_nan(problem, one, {true, true, false});
}

TEST_P(PiecesTest, RefuseConfigurations) {
  const Problem problem = make_problem({45, 90, 300, 1, 1, 0.3, DType::f32, true, 3});
  for (const auto& [text, what] : {std::pair<std::string, std::string>{"columns=0", "columns and rows"},
                                   {"columns=289", "columns and rows"},
                                   {"rows=0", "columns and rows"},
                                   {"rows=1025", "columns and rows"},
                                   {"vectors=5", "vectors and splits"},
                                   {"splits=91 rows=1", "vectors and splits"},
                                   {"splits=0", "vectors and splits"}}) {
    const Force force("cpu:" + GetParam() + "," + GetParam() + "_linear_pieces(" + text + ")");
    ProblemIn<HostBuffer> one(problem);
    const Status status = one.linear(Activation::none);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << text;
    EXPECT_NE(status.message().find(what), std::string::npos) << status.message();
  }
}

// Matrices without a side have no tile to cut; sums of nothing are the bias.
TEST_P(PiecesTest, LeaveWhatStoresNothingToOthers) {
  const Force force(GetParam());
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{8, 0}, {0, 8}, {0, 0}, {8, 8}}) {
    for (const Op op : {Op::linear, Op::grad_input}) {
      EXPECT_EQ(explain(make_problem(op, {n, k, 1, 1, 0}, 16, DType::f32)).kernel.find("pieces"),
                std::string::npos);
    }
  }
  const Pattern pattern = *Pattern::create({3, 0, 1, 1, 0}, std::vector<std::int32_t>(4), {});
  const float none = 0, bias[] = {1, -2, 3};
  std::vector<float> y(3 * 6, 7);
  expect_ok(linear({&none, DType::f32, 6, 0, 0}, {pattern.view(), &none, DType::f32}, bias, Activation::none,
                   {y.data(), DType::f32, 6, 3, 3}, {}));
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], bias[i % 3]);
}

// Counted in 32 bits: a configuration that makes more is refused before anything is written.
TEST_P(PiecesTest, RefuseMorePiecesThanCanBeCounted) {
  Call call;
  call.problem = make_problem(Op::linear, {1 << 16, 1 << 16, 1, 1, 1}, 16, DType::f32);
  const Kernel& pieces = kernel(Op::linear, true);
  call.config = *parse_config(pieces, pieces.configure(call.problem, cpu_machine()), "columns=1");
  EXPECT_NE(pieces.prepare(call, nullptr).message().find("fewer than 2^31 pieces"), std::string::npos);
}

TEST_P(PiecesTest, GiveTheSameBitsOnAnyThreads) {
  const Problem problem = make_problem({45, 900, 700, 1, 1, 0.4, DType::f32, true, 3});
  for (const Op op : {Op::linear, Op::grad_input}) {
    std::vector<std::vector<std::byte>> outputs;
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      outputs.push_back(run(op, problem, kernel(op, true), "rows=64", pool.executor(), DType::f32));
      EXPECT_EQ(outputs.back(), outputs.front()) << threads;
    }
  }
}

}  // namespace
}  // namespace rarefy::test
