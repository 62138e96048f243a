// Several weights on one x (run_linears): the bits of one call each, by every family; one workspace says that
// they ran together.
#include <cstring>

#include "core/products.h"
#include "feed_forward_problem.h"

namespace rarefy::test {
namespace {

// What provides workspace, and how often it was asked.
struct Provider {
  std::vector<std::vector<std::byte>> memory;
  static void* provide(void* self, std::int64_t bytes) {
    auto& memory = static_cast<Provider*>(self)->memory;
    memory.emplace_back(static_cast<std::size_t>(bytes) + 64);
    const auto at = reinterpret_cast<std::uintptr_t>(memory.back().data());
    return reinterpret_cast<void*>((at + 63) / 64 * 64);
  }
};

class TogetherTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Runs three weights on one x, of `hidden`, `hidden` and n rows, in one call and one by one; says how often
  // the one call asked for workspace.
  static std::size_t check(Spec spec, bool derived, Executor executor = {}) {
    spec.hidden = spec.k;  // so that the third takes the same x
    SCOPED_TRACE(::testing::Message()
                 << GetParam() << ' ' << name(spec.dtype) << " M=" << spec.m << " K=" << spec.k << " block "
                 << spec.blocks[0].first << 'x' << spec.blocks[0].second);
    const Layers layers(spec);
    Chain run(layers, executor);
    const Force force(GetParam());
    if (derived) run.hold_derived();
    const std::array views{run.layer(0), run.layer(1), run.layer(2)};
    const std::array y{run.view(run.up, spec.hidden), run.view(run.gate, spec.hidden),
                       run.view(run.y, spec.n)};
    Provider provider;
    const Context context{executor, nullptr, {nullptr, 0, Provider::provide, &provider}};
    expect_ok(run_linears(run.x_view(), views, y, context));
    for (std::size_t i = 0; i < y.size(); ++i) {
      Guarded<HostBuffer> alone(static_cast<std::size_t>(spec.m * y[i].row_stride) * size_of(spec.dtype));
      const MutableMatrixView view = run.view(alone, y[i].cols);
      expect_ok(run_linear(run.x_view(), views[i].weight, views[i].bias, Activation::none, view, context));
      for (std::int64_t m = 0; m < spec.m; ++m) {
        const auto row = [&](const MutableMatrixView& of) {
          return static_cast<const std::byte*>(of.data) +
                 static_cast<std::size_t>(m * of.row_stride) * size_of(spec.dtype);
        };
        const auto bytes = static_cast<std::size_t>(y[i].cols) * size_of(spec.dtype);
        EXPECT_EQ(std::memcmp(row(y[i]), row(view), bytes), 0) << "weight " << i << ", token " << m;
      }
    }
    return provider.memory.size() - y.size();
  }
};

std::vector<std::string> families() {
  std::vector<std::string> all = cpu_impls();
  for (const char* pairs : {"avx512_bf16", "amx", "pairs"}) {
    rarefy::Problem asked = make_problem(Op::linear, {16, 2, 16, 2, 1}, 8, DType::bf16);
    asked.derived = kAnyDerived;
    for (const Candidate& candidate : explain(asked).candidates) {
      if (candidate.kernel.family == pairs && candidate.why_not.empty()) all.emplace_back(pairs);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, TogetherTest, ::testing::ValuesIn(families()),
                         [](const auto& tested) { return tested.param; });

TEST_P(TogetherTest, GivesTheBitsOfOneByOne) {
  ThreadPool pool(3);
  const bool pairs = GetParam() == "avx512_bf16" || GetParam() == "amx" || GetParam() == "pairs";
  for (const auto& [rows, cols] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                                   {1, 16},
                                   {4, 1},
                                   {4, 4},
                                   {8, 1},
                                   {16, 1},
                                   {16, 16},
                                   {32, 1},
                                   {32, 32},
                                   {17, 9}}) {
    if (pairs && rows != 4 && rows != 8 && rows % 16 != 0) continue;
    for (const std::int64_t tokens : {1, 5, 12, 33, 70, 300}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        if (pairs && (dtype == DType::f32 || tokens < 5)) continue;
        const Spec spec{tokens, 96, 96, 50, all_of(rows, cols), 0.4, dtype};
        check(spec, pairs);
        check(spec, pairs, pool.executor());
      }
    }
  }
}

// Long rows, in several tiles of X where L2 is small, and few rows for many tasks.
TEST_P(TogetherTest, LongRowsAndFewOfThem) {
  ThreadPool pool(8);
  const bool pairs = GetParam() == "avx512_bf16" || GetParam() == "amx" || GetParam() == "pairs";
  const DType dtype = pairs ? DType::bf16 : DType::f32;
  check({40, 2500, 2500, 3, all_of(4, 1), 0.02, dtype}, pairs, pool.executor());
  check({40, 64, 64, 4, all_of(4, 4), 0.5, dtype}, pairs, pool.executor());
  check({40, 64, 64, 4, all_of(4, 4), 0.0, dtype}, pairs);
}

TEST_P(TogetherTest, PacksOnce) {
  if (GetParam() == "ref") GTEST_SKIP() << "packs nothing";
  const bool pairs = GetParam() == "avx512_bf16" || GetParam() == "amx" || GetParam() == "pairs";
  const DType dtype = pairs ? DType::bf16 : DType::f32;
  for (const std::int64_t rows : {4, 16, 32}) {
    EXPECT_EQ(check({64, 96, 96, 50, all_of(rows, 1), 0.4, dtype}, pairs), 1U) << rows;
  }
}

// Weights that different kernels take, or that miss what a kernel derives, run one by one.
TEST(TogetherSelectionTest, OneByOneWhereKernelsDiffer) {
  const Layers layers({64, 96, 96, 96, {{{16, 16}, {4, 1}, {1, 1}}}, 0.4, DType::f32});
  const Chain run(layers);
  const std::array views{run.layer(0), run.layer(1), run.layer(2)};
  const std::array y{run.view(run.up, 96), run.view(run.gate, 96), run.view(run.y, 96)};
  Provider provider;
  expect_ok(run_linears(run.x_view(), views, y, {{}, nullptr, {nullptr, 0, Provider::provide, &provider}}));
  EXPECT_EQ(provider.memory.size(), 3U);
}

}  // namespace
}  // namespace rarefy::test
