// Which kernel a problem gets, in which configuration, and that each configuration computes the same:
// what explain() says is what runs.
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "core/registry.h"
#include "cpu/drivers.h"
#include "cpu/pairs_blocking.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

// A machine that has everything, with this much L2.
Machine machine_with(std::int64_t l2) {
  Machine machine;
  machine.features = {"avx2", "avx512"};
  machine.l2 = l2;
  return machine;
}

// Null for instruction sets of other processors than this build's.
const Kernel* find_kernel(std::string_view name) {
  for (const Kernel& kernel : registry()) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

rarefy::Problem layer_problem(std::int64_t tokens, std::int64_t n, std::int64_t k, std::int64_t r,
                              std::int64_t c, double density, int threads = 1, DType dtype = DType::f32) {
  BsrShape shape{n, k, r, c, 0};
  shape.nnzb =
      static_cast<std::int64_t>(density * static_cast<double>(shape.row_count() * shape.col_count()));
  return make_problem(Op::linear, shape, tokens, dtype, Device::cpu, threads);
}

template <class T>
T config_for(const rarefy::Problem& problem, const Machine& machine, std::string_view family,
             std::string_view kernel) {
  const Choice choice = *choose_from(registry(), problem, machine, family);
  EXPECT_EQ(choice.kernel->name, kernel);
  return from_config<T>(choice.config);
}

TEST(SelectTest, SaysWhatIsCopied) {
  Explanation e = explain(layer_problem(512, 64, 64, 4, 4, 0.5));
  EXPECT_EQ(e.aligned_copies, 0) << "on the CPU";
  EXPECT_EQ(to_string(e).find("copies"), std::string::npos);
  e.aligned_copies = 1234;
  EXPECT_NE(to_string(e).find(", copies with aligned rows of 1234 bytes"), std::string::npos) << to_string(e);
}

TEST(SelectTest, EveryCandidateHasItsReason) {
  const Explanation e = explain(layer_problem(512, 64, 64, 4, 4, 0.5));
  ASSERT_FALSE(e.kernel.empty());
  int chosen = 0;
  for (const Candidate& candidate : e.candidates) {
    chosen += candidate.chosen ? 1 : 0;
    EXPECT_EQ(candidate.chosen, candidate.kernel.name == e.kernel);
    if (candidate.kernel.name.ends_with("_few")) {
      const bool lacks = candidate.why_not.find("the processor lacks") != std::string::npos;
      EXPECT_TRUE(lacks || candidate.why_not.find("takes 1 to 16 tokens; got 512") != std::string::npos)
          << candidate.why_not;
    }
  }
  EXPECT_EQ(chosen, 1);
  EXPECT_EQ(e.candidates.back().kernel.name, "ref_linear");  // kernels of other formats are not listed
  EXPECT_NE(to_string(e).find("* " + e.kernel + ": chosen, "), std::string::npos) << to_string(e);
}

TEST(SelectTest, AMachineThatLacksAnInstructionSetIsTheReason) {
  if (find_kernel("avx512_linear") == nullptr) GTEST_SKIP() << "a build without kernels for x86";
  Machine machine = machine_with(1 << 20);
  machine.features = {"avx2"};
  const rarefy::Problem problem = layer_problem(512, 64, 64, 4, 4, 0.5);
  EXPECT_EQ(choose_from(registry(), problem, machine, "")->kernel->name, "avx2_linear");
  const Status status = choose_from(registry(), problem, machine, "avx512").status();
  EXPECT_NE(status.message().find("avx512_linear: the processor lacks avx512"), std::string::npos)
      << status.message();
  machine.features.clear();
  EXPECT_EQ(choose_from(registry(), problem, machine, "")->kernel->name, "scalar_linear");
}

TEST(SelectTest, AnOperatingSystemThatLendsNoTilesIsTheReason) {
  if (find_kernel("amx_linear") == nullptr) GTEST_SKIP() << "a build without kernels for x86";
  Machine machine = machine_with(1 << 20);
  machine.features = {"avx2", "avx512", "amx_refused"};
  rarefy::Problem problem = layer_problem(512, 64, 64, 16, 16, 0.5);
  problem.weight.dtype = problem.in = problem.out = DType::bf16;
  EXPECT_EQ(choose_from(registry(), problem, machine, "")->kernel->family, "avx512");
  const std::string message(choose_from(registry(), problem, machine, "amx").status().message());
  const std::string_view said =
      "the processor lacks amx_bf16, as the operating system lends no tile registers";
  EXPECT_NE(message.find(said), std::string::npos) << message;
}

// Rows that fit: one that yields comes after those that do not, and before nothing.
TEST(SelectTest, ARowThatYieldsIsTheLastThatIsAsked) {
  const auto row = [](std::string_view name, Reason (*yields)(const rarefy::Problem&, const Machine&)) {
    return Kernel{
        .op = Op::linear,
        .device = Device::cpu,
        .family = "scalar",
        .name = name,
        .supports = [](const rarefy::Problem& p,
                       const Machine&) { return p.tokens > 100 ? Reason("too many tokens") : Reason(); },
        .run = [](const Call&) { return Status(); },
        .yields = yields};
  };
  const auto few = [](const rarefy::Problem& p, const Machine&) {
    return p.tokens < 10 ? Reason("leaves few tokens to others") : Reason();
  };
  const Registry both{row("first", few), row("second", nullptr)}, alone{row("first", few)};
  const auto chosen = [](const Registry& rows, std::int64_t tokens) {
    const auto choice = choose_from(rows, layer_problem(tokens, 64, 64, 4, 4, 0.5), Machine{}, "");
    return choice.ok() ? choice->kernel->name : "none";
  };
  EXPECT_EQ(chosen(both, 50), "first");
  EXPECT_EQ(chosen(both, 5), "second");
  EXPECT_EQ(chosen(alone, 5), "first");
  EXPECT_EQ(chosen(both, 200), "none");
}

TEST(SelectTest, AKernelThatIsForcedByNameGoesFirstWhereItFits) {
  const rarefy::Problem problem = layer_problem(512, 64, 64, 4, 4, 0.5);
  const std::string usual = explain(problem).kernel;
  EXPECT_NE(usual, "ref_linear");
  const Force force("ref_linear(),scalar_grad_input()");
  EXPECT_EQ(explain(problem).kernel, "ref_linear");
  EXPECT_EQ(choose(problem)->kernel->name, "ref_linear");
  const Force other("cpu:scalar,ref_linear()");  // of a family that is forced away
  EXPECT_EQ(explain(problem).kernel, "scalar_linear");
}

// The order of cpuid's answers against the processor's own list: kernels of this machine are never lost.
TEST(SelectTest, ThisProcessorsFamiliesAreTaken) {
  const Machine& machine = cpu_machine();
  const auto kernel = explain(layer_problem(512, 64, 64, 4, 4, 0.5)).kernel;
  if (machine.has("avx512")) {
    EXPECT_EQ(kernel, "avx512_linear");
  } else if (machine.has("avx2")) {
    EXPECT_EQ(kernel, "avx2_linear");
  } else if (machine.has("neon")) {
    EXPECT_EQ(kernel, "neon_linear");
  }
  EXPECT_GE(machine.cores, 1);
  EXPECT_NE(to_string(machine).find(machine.cpu), std::string::npos);
}

// Each way of working has problems that get it.
TEST(SelectTest, ConfigurationsFollowTheProblem) {
  if (find_kernel("avx512_linear") == nullptr) GTEST_SKIP() << "a build without kernels for x86";
  const Machine machine = machine_with(1 << 20);
  using cpu::Blocking;
  EXPECT_EQ(config_for<Blocking>(layer_problem(512, 768, 768, 1, 16, 0.5), machine, "avx512", "avx512_linear")
                .scatter,
            1);
  const auto square =
      config_for<Blocking>(layer_problem(512, 768, 768, 8, 8, 0.5), machine, "avx512", "avx512_linear");
  EXPECT_EQ(square.scatter, 0);
  EXPECT_EQ(square.tile_blocks, 96) << "one tile holds all of X";
  const auto wide =
      config_for<Blocking>(layer_problem(512, 768, 65536, 16, 16, 0.5), machine, "avx512", "avx512_linear");
  EXPECT_LT(wide.tile_blocks, 4096) << "several tiles";
  EXPECT_EQ(wide.panels, 4) << "W streams from memory: panels share it";
  // Woven sums: all of X, alone, up to the size of L2.
  const auto large =
      config_for<Blocking>(layer_problem(512, 4096, 4096, 4, 1, 0.5), machine, "avx512", "avx512_linear");
  EXPECT_EQ(large.tile_blocks, 4096);
  EXPECT_EQ(large.panels, 1) << "of 33 MB of W";
  // Outputs as lanes, where vectors of tokens would be partly empty: one panel a time while caches hold W.
  for (const std::int64_t columns : {1, 16}) {
    const auto lanes = config_for<cpu::PairsBlocking>(layer_problem(257, 768, 768, 32, columns, 0.5), machine,
                                                      "avx512", "avx512_linear_lanes");
    EXPECT_EQ(lanes.panels, 1);
    config_for<Blocking>(layer_problem(256, 768, 768, 32, columns, 0.5), machine, "avx512", "avx512_linear");
    config_for<cpu::PairsBlocking>(layer_problem(256, 768, 768, 32, columns, 0.5, 1, DType::bf16), machine,
                                   "avx512", "avx512_linear_lanes");
  }
  EXPECT_EQ(
      find_kernel("avx512_linear_lanes")->supports(layer_problem(512, 768, 768, 32, 1, 0.5), machine),
      "takes, of floats in rows of 2 blocks or more, tokens that leave more than a twentieth as many lanes "
      "empty; got 512");
  // Blocks that are packed in the call take tokens to pay for it; few outputs fill no vector of AVX-512.
  config_for<cpu::Blocking>(layer_problem(133, 768, 768, 32, 16, 0.5), machine, "avx512", "avx512_linear");
  config_for<cpu::Blocking>(layer_problem(20, 768, 768, 8, 1, 0.5), machine, "avx512", "avx512_linear");
  config_for<cpu::PairsBlocking>(layer_problem(20, 768, 768, 8, 1, 0.5), machine, "avx2",
                                 "avx2_linear_lanes");
  EXPECT_EQ(config_for<cpu::FewSplit>(layer_problem(1, 768, 768, 16, 16, 0.5, 2), machine, "avx512",
                                      "avx512_linear_few")
                .tasks,
            8);
  for (const std::int64_t side : {3000, 8000}) {  // 7 MB, 25 MB with indices
    EXPECT_EQ(config_for<cpu::FewSplit>(layer_problem(1, side, side, 1, 1, side == 3000 ? 0.1 : 0.05),
                                        machine, "avx512", "avx512_linear_few")
                  .stream,
              side == 8000 ? 1 : 0);
  }
}

// By fours where a Zen 4 and a Xeon were faster so; a Zen 5 was not measured.
TEST(SelectTest, MoreThanFourTokensGoByFoursWhereThatIsFaster) {
  const Kernel* few = find_kernel("avx512_linear_few");
  if (few == nullptr) GTEST_SKIP() << "not in this build";
  Machine zen4, zen5, xeon;
  zen4.features = {"avx2", "prefetch_l2", "avx512", "avx512_bf16_fast"};
  zen5.features = {"avx2", "avx512", "avx512_bf16_fast"};
  xeon.features = {"avx2", "avx512", "avx512_load_bound"};
  zen4.l1 = 32 << 10;
  zen5.l1 = xeon.l1 = 48 << 10;
  struct Case {
    std::int64_t rows, cols;
    // Tokens, of a Zen 4 and a Xeon each: with a weight in caches, and from memory.
    std::int64_t near, far, xeon_near, xeon_far;
    DType dtype = DType::f32;
  };
  for (const Case& c : {Case{16, 16, 12, 16, 8, 8},
                        {32, 32, 12, 16, 8, 8},
                        {64, 1, 4, 16, 4, 16},
                        {16, 1, 4, 4, 4, 4},
                        {8, 8, 8, 4, 8, 4},
                        {4, 1, 4, 4, 4, 4},
                        {1, 16, 6, 6, 8, 8},
                        {2, 2, 4, 8, 4, 8},
                        {1, 1, 4, 4, 4, 4},
                        {2, 2, 4, 8, 4, 8, DType::bf16},
                        {1, 1, 4, 12, 4, 12, DType::bf16},
                        {1, 16, 8, 12, 8, 12, DType::bf16},
                        {16, 16, 4, 4, 4, 8, DType::bf16},
                        {64, 1, 4, 4, 4, 16, DType::bf16},
                        {64, 64, 4, 4, 4, 8, DType::f16},
                        {32, 1, 4, 4, 4, 4, DType::f16}}) {
    for (const bool far : {false, true}) {
      const auto expect_most = [&](const Machine& machine, std::int64_t most) {
        for (const std::int64_t tokens : {std::int64_t{4}, most, most + 1}) {
          SCOPED_TRACE(::testing::Message() << c.rows << 'x' << c.cols << " M=" << tokens << " far=" << far
                                            << ' ' << machine.features.back());
          const rarefy::Problem p =
              layer_problem(tokens, far ? 4096 : 768, far ? 11008 : 1024, c.rows, c.cols, 0.5, 1, c.dtype);
          EXPECT_EQ(few->yields(p, machine).empty(), tokens <= most);
          if (tokens <= 4 || tokens > most || (c.dtype != DType::f32 && c.rows < 16)) continue;
          const auto split = config_for<cpu::FewSplit>(p, machine, "avx512", "avx512_linear_few");
          EXPECT_EQ(split.eight, machine.has("prefetch_l2") && !far ? 7 : 5);
        }
      };
      expect_most(zen4, far ? c.far : c.near);
      expect_most(xeon, far ? c.xeon_far : c.xeon_near);
      expect_most(zen5, 4);
    }
  }
  EXPECT_EQ(few->yields(layer_problem(13, 768, 1024, 16, 16, 0.5), zen4),
            "more than 12 tokens are faster as lanes; got 13");
  rarefy::Problem int8 = layer_problem(8, 2048, 2048, 32, 32, 0.5);
  int8.weight.dtype = DType::i8;
  int8.weight.scaling = Scaling::weight;
  const Kernel* scaled = find_kernel("avx512_linear_few_int8");
  EXPECT_EQ(scaled->yields(int8, zen4), "");
  EXPECT_NE(scaled->yields(int8, xeon), "");
  int8.tokens = 12;
  EXPECT_EQ(scaled->yields(int8, zen4), "");
  int8.tokens = 13;
  EXPECT_NE(scaled->yields(int8, zen4), "");
  const Kernel* pairs = find_kernel("avx512_bf16_linear_few");
  EXPECT_EQ(pairs->yields(layer_problem(8, 768, 1024, 8, 8, 0.5, 1, DType::bf16), zen4), "");
  EXPECT_NE(pairs->yields(layer_problem(8, 768, 1024, 16, 16, 0.5, 1, DType::bf16), zen4), "");
  EXPECT_EQ(pairs->yields(layer_problem(12, 768, 1024, 1, 16, 0.5, 1, DType::bf16), zen4), "");
  EXPECT_NE(pairs->yields(layer_problem(5, 768, 1024, 1, 16, 0.1, 1, DType::bf16), zen4), "");
}

// Half of a core's L2 holds the panels, whatever its size.
// x as digits of int8: whatever the number of tokens, as one packed weight serves all of them.
TEST(SelectTest, DigitsYieldToFloatsWhereTheyAreFaster) {
  const Kernel* kernel = find_kernel("avx512_linear_digits");
  if (kernel == nullptr) GTEST_SKIP() << "a build without kernels for x86";
  Machine zen4, xeon;
  zen4.features = {"avx2", "avx512", "avx512_vnni"};
  xeon.features = {"avx2", "avx512", "avx512_vnni", "amx_int8"};
  const auto yields = [&](BsrShape shape, const Machine& machine) {
    rarefy::Problem problem = make_problem(Op::linear, shape, 4, DType::f32);
    problem.weight.dtype = DType::i8;
    problem.weight.scaling = Scaling::weight;
    return kernel->yields(problem, machine);
  };
  const BsrShape quarter{3072, 768, 32, 1, 96 * 192};
  EXPECT_EQ(yields({4096, 4096, 32, 1, std::int64_t{128} * 410}, zen4), "");
  EXPECT_EQ(yields(quarter, xeon), "");
  EXPECT_EQ(yields(quarter, zen4),
            "less than 160 values for each input and output feature are faster as floats; got 589824 for 768 "
            "and 3072");
  EXPECT_EQ(yields({4096, 4096, 8, 1, std::int64_t{512} * 2048}, zen4),
            "blocks of a multiple of 16 outputs alone are faster than as floats; got 8");
}

TEST(SelectTest, PanelsFollowTheCache) {
  if (find_kernel("avx512_linear") == nullptr) GTEST_SKIP() << "a build without kernels for x86";
  std::int64_t last = 0;
  for (const std::int64_t l2 : {512 << 10, 1 << 20, 2 << 20}) {
    const rarefy::Problem problem = layer_problem(512, 768, 65536, 16, 16, 0.1);
    const auto blocking = config_for<cpu::Blocking>(problem, machine_with(l2), "avx512", "avx512_linear");
    const std::int64_t bytes = blocking.tile_blocks * 16 * blocking.vectors * 16 * blocking.panels * 4;
    EXPECT_LE(bytes, l2 / 2);
    EXPECT_GE(bytes, l2 / 8);
    EXPECT_GT(blocking.tile_blocks * blocking.vectors * blocking.panels, last);
    last = blocking.tile_blocks * blocking.vectors * blocking.panels;
  }
}

// Runs one layer under a kernel and configuration of one's choice, with values stored as in x or otherwise.
std::vector<std::byte> run_forced(const Problem& problem, const Kernel& kernel, const Config& config,
                                  const Executor& executor, std::optional<DType> stored = {}) {
  const ProblemSpec& s = problem.spec;
  const std::vector<std::byte> x = encode(problem.x, s.dtype),
                               values = encode(problem.values, stored.value_or(s.dtype)),
                               bias = encode(problem.bias, s.dtype);
  std::vector<std::byte> y(static_cast<std::size_t>(s.m * s.n) * size_of(s.dtype), kPoison);
  Call call;
  call.problem =
      make_problem(Op::linear, problem.pattern.shape(), s.m, s.dtype, Device::cpu, executor.threads);
  call.problem.weight.dtype = stored.value_or(s.dtype);
  call.config = config;
  call.x = {x.data(), s.dtype, s.m, s.k, problem.x_stride()};
  call.plan = problem.pattern.view();
  call.values = values.data();
  call.bias = bias.data();
  call.out = {y.data(), s.dtype, s.m, s.n, s.n};
  call.executor = executor;
  // Exactly as much as was asked for, between guards.
  const std::int64_t bytes = kernel.workspace == nullptr ? 0 : kernel.workspace(call.problem, config);
  constexpr std::int64_t kGuard = 64;
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes + 3 * kGuard), kPoison);
  std::byte* base = memory.data();
  while (reinterpret_cast<std::uintptr_t>(base) % 64 != 0) ++base;
  call.workspace = base + kGuard;
  expect_ok(kernel.run(call));
  for (std::int64_t i = 0; i < kGuard; ++i) {
    EXPECT_EQ(base[i], kPoison) << "before the workspace, " << to_string(kernel, config);
    EXPECT_EQ(base[kGuard + bytes + i], kPoison) << "after the workspace, " << to_string(kernel, config);
  }
  return y;
}

const Kernel& kernel_named(std::string_view name) {
  if (const Kernel* kernel = find_kernel(name)) return *kernel;
  throw std::runtime_error("no such kernel");
}

// Scatter and gather, one and several tiles, panels, pieces and groups: bit for bit what the reference
// has on integers, within the workspace that was asked for.
TEST(SelectTest, EveryConfigurationComputesTheSame) {
  ThreadPool pool(3);
  for (const auto& [r, c] : {std::pair<std::int64_t, std::int64_t>{4, 1}, {1, 16}, {3, 5}, {16, 16}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      ProblemSpec spec{70, 7 * r + 1, 13 * c + 1, r, c, 0.4, dtype, true, 2};
      const Problem problem = make_problem(spec);
      const std::vector<std::byte> want = run_forced(problem, kernel_named("ref_linear"), {}, {});
      for (const char* name : {"avx512_linear", "avx2_linear", "neon_linear", "scalar_linear"}) {
        if (find_kernel(name) == nullptr) continue;
        const Kernel& kernel = kernel_named(name);
        const rarefy::Problem asked = make_problem(Op::linear, problem.pattern.shape(), spec.m, dtype,
                                                   Device::cpu, pool.executor().threads);
        if (!kernel.supports(asked, cpu_machine()).empty()) continue;
        std::vector<Config> configs = kernel.candidates(asked, cpu_machine());
        ASSERT_GT(configs.size(), 4U);
        const Config base = kernel.configure(asked, cpu_machine());
        EXPECT_NE(std::find(configs.begin(), configs.end(), base), configs.end());
        for (const char* other :
             {"scatter=0 tile_blocks=1 panels=1", "scatter=0 tile_blocks=5 panels=3 splits=2",
              "scatter=0 group=2 asks=0", "scatter=1 panels=1 tile_blocks=3 splits=3",
              "scatter=0 vectors=1 panels=8 splits=4 tile_blocks=2"}) {
          configs.push_back(*parse_config(kernel, base, other));
        }
        for (const Config& config : configs) {
          EXPECT_EQ(run_forced(problem, kernel, config, pool.executor()), want)
              << name << ' ' << to_string(kernel, config) << " block " << r << 'x' << c;
        }
      }
    }
  }
}

// Sums long enough for several parts, of numbers whose sums depend on the order: the parts are the same
// however the work is cut, and when the values are stored in 16 bits.
TEST(SelectTest, LongSumsHaveTheSamePartsInEveryConfiguration) {
  ThreadPool pool(3);
  for (const auto& [r, c] :
       {std::pair<std::int64_t, std::int64_t>{4, 1}, {1, 1}, {1, 16}, {16, 16}, {3, 300}}) {
    for (const double density : {1.0, 0.4}) {
      const ProblemSpec spec{37, 7 * r + 1, 2100, r, c, density, DType::f32};
      Problem problem = make_problem(spec);
      problem.values = decode(encode(problem.values, DType::bf16), DType::bf16);
      for (const char* name : {"avx512_linear", "avx2_linear", "neon_linear", "scalar_linear"}) {
        if (find_kernel(name) == nullptr) continue;
        const Kernel& kernel = kernel_named(name);
        const rarefy::Problem asked = make_problem(Op::linear, problem.pattern.shape(), spec.m, DType::f32,
                                                   Device::cpu, pool.executor().threads);
        if (!kernel.supports(asked, cpu_machine()).empty()) continue;
        const Config base = kernel.configure(asked, cpu_machine());
        const auto want = run_forced(problem, kernel, base, pool.executor());
        for (const char* text :
             {"scatter=0 panels=1 splits=1", "scatter=0 vectors=1 tile_blocks=1 panels=3 splits=2",
              "scatter=0 tile_blocks=7 panels=1 group=2 asks=0", "scatter=0 tile_blocks=5 panels=2 asks=1",
              "scatter=1 panels=1 tile_blocks=3 splits=3", "scatter=1 panels=1 vectors=2 splits=1"}) {
          const Config config = *parse_config(kernel, base, text);
          for (const DType stored : {DType::f32, DType::bf16}) {
            EXPECT_EQ(run_forced(problem, kernel, config, pool.executor(), stored), want)
                << name << ' ' << text << " block " << r << 'x' << c << ", values " << rarefy::name(stored);
          }
        }
      }
    }
  }
}

// What has outputs as lanes adds in the order of what has tokens: the same bits, whichever a problem gets.
TEST(SelectTest, LanesOfOutputsHaveTheBitsOfLanesOfTokens) {
  ThreadPool pool(3);
  for (const auto& [r, c, tokens] : {std::array<std::int64_t, 3>{16, 1, 5},
                                     {32, 1, 13},
                                     {48, 1, 37},
                                     {32, 1, 70},
                                     {16, 16, 260},
                                     {32, 3, 257},
                                     {32, 1, 16},
                                     {16, 1, 11},
                                     {16, 16, 5},
                                     {16, 16, 11},
                                     {32, 32, 7},
                                     {48, 16, 10},
                                     {64, 64, 9}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Problem problem = make_problem({tokens, 3 * r + 5, 1100, r, c, 0.6, dtype, false, 3});
      for (const std::string family : {"avx512", "avx2"}) {
        if (find_kernel(family + "_linear_lanes") == nullptr) continue;
        const Kernel &lanes = kernel_named(family + "_linear_lanes"),
                     &gather = kernel_named(family + "_linear");
        const rarefy::Problem asked = make_problem(Op::linear, problem.pattern.shape(), tokens, dtype,
                                                   Device::cpu, pool.executor().threads);
        if (!lanes.supports(asked, cpu_machine()).empty()) continue;
        const auto want =
            run_forced(problem, gather, gather.configure(asked, cpu_machine()), pool.executor());
        for (const char* text : {"panels=1 splits=1", "panels=3 splits=2", "panels=2 splits=1 rest=2"}) {
          const Config config = *parse_config(lanes, lanes.configure(asked, cpu_machine()), text);
          EXPECT_EQ(run_forced(problem, lanes, config, pool.executor()), want)
              << family << ' ' << text << " block " << r << 'x' << c << ' ' << rarefy::name(dtype);
        }
      }
    }
  }
}

// A pattern whose work sits in few block rows: ranges are far longer than the average, and go piece by piece.
TEST(SelectTest, SkewedPatternsStayWithinTheWorkspace) {
  const BsrShape shape{400, 64, 4, 1, 0};
  std::vector<std::int32_t> crow{0}, col;
  for (int i = 0; i < 100; ++i) {
    for (int j = 0; j < (i == 99 ? 64 : 0); ++j) col.push_back(j);
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  Problem problem = make_problem({33, 400, 64, 4, 1, 1.0, DType::f32, true, 0});
  problem.pattern = *Pattern::create(shape, crow, col);
  problem.values.resize(static_cast<std::size_t>(problem.pattern.shape().value_count()));
  const std::vector<std::byte> want = run_forced(problem, kernel_named("ref_linear"), {}, {});
  const Kernel& kernel = kernel_named("scalar_linear");
  const rarefy::Problem asked =
      make_problem(Op::linear, problem.pattern.shape(), 33, DType::f32, Device::cpu, 1);
  const Config base = kernel.configure(asked, cpu_machine());
  for (const char* text :
       {"scatter=0 splits=10 tile_blocks=7", "scatter=1 panels=1 splits=10 tile_blocks=5"}) {
    EXPECT_EQ(run_forced(problem, kernel, *parse_config(kernel, base, text), {}), want) << text;
  }
}

// A row of several parts whose last entries lie in the first tiles: later tiles have nothing to add to it.
TEST(SelectTest, LongRowsMayEndBeforeTheLastTile) {
  const BsrShape shape{8, 3000, 4, 1, 0};
  std::vector<std::int32_t> crow{0, 1500, 4500}, col(4500);
  for (int i = 0; i < 4500; ++i) col[i] = i < 1500 ? i : i - 1500;
  Problem problem = make_problem({33, 8, 3000, 4, 1, 1.0, DType::f32, true, 2});
  problem.pattern = *Pattern::create(shape, crow, col);
  problem.values.resize(static_cast<std::size_t>(problem.pattern.shape().value_count()));
  const std::vector<std::byte> want = run_forced(problem, kernel_named("ref_linear"), {}, {});
  for (const char* name : {"avx512_linear", "avx2_linear", "neon_linear", "scalar_linear"}) {
    if (find_kernel(name) == nullptr) continue;
    const Kernel& kernel = kernel_named(name);
    const rarefy::Problem asked =
        make_problem(Op::linear, problem.pattern.shape(), 33, DType::f32, Device::cpu, 1);
    if (!kernel.supports(asked, cpu_machine()).empty()) continue;
    const Config base = kernel.configure(asked, cpu_machine());
    for (const char* text : {"scatter=0 tile_blocks=100 panels=1", "scatter=0 tile_blocks=700 panels=2",
                             "scatter=1 tile_blocks=100 panels=1"}) {
      EXPECT_EQ(run_forced(problem, kernel, *parse_config(kernel, base, text), {}), want)
          << name << ' ' << text;
    }
  }
}

TEST(SelectTest, ConfigurationsOutOfRangeAreRefused) {
  const Problem problem = make_problem({9, 8, 8, 4, 4, 1.0, DType::f32, true, 0});
  const Kernel& kernel = kernel_named("scalar_linear");
  const rarefy::Problem asked = make_problem(Op::linear, problem.pattern.shape(), 9, DType::f32);
  const Config base = kernel.configure(asked, cpu_machine());
  for (const char* text : {"vectors=0", "vectors=99", "panels=9", "splits=0", "splits=3", "tile_blocks=0",
                           "group=0", "scatter=2", "scatter=1 panels=2"}) {
    Call call;
    call.problem = asked;
    call.plan = problem.pattern.view();
    call.config = *parse_config(kernel, base, text);
    EXPECT_EQ(kernel.run(call).code(), StatusCode::invalid_argument) << text;
  }
  for (const char* text : {"vector=1", "vectors", "vectors=", "vectors=x", "=1"}) {
    EXPECT_FALSE(parse_config(kernel, base, text).ok()) << text;
  }
}

// What a caller gives is used; what it does not give is taken from the heap. The same result.
TEST(SelectTest, WorkspaceComesFromTheCaller) {
  const Problem problem = make_problem({40, 32, 32, 4, 4, 0.5, DType::f32, true, 0});
  const auto asked = make_problem(Op::linear, problem.pattern.shape(), 40, DType::f32);
  const Result<std::int64_t> size = workspace_size(asked);
  ASSERT_TRUE(size.ok());
  ASSERT_GT(*size, 0);
  const std::vector<std::byte> x = encode(problem.x, DType::f32), values = encode(problem.values, DType::f32);
  const auto run = [&](Workspace workspace) {
    std::vector<float> y(40 * 32);
    Context context;
    context.workspace = workspace;
    expect_ok(rarefy::linear({x.data(), DType::f32, 40, 32, 32},
                             {problem.pattern.view(), values.data(), DType::f32}, nullptr, Activation::none,
                             {y.data(), DType::f32, 40, 32, 32}, context));
    return y;
  };
  alignas(64) static std::byte memory[1 << 20];
  ASSERT_LE(*size, std::ssize(memory));
  std::fill(std::begin(memory), std::end(memory), kPoison);
  const std::vector<float> own = run({});
  EXPECT_TRUE(std::all_of(std::begin(memory), std::end(memory), [](std::byte b) { return b == kPoison; }));
  EXPECT_EQ(run({memory, *size}), own);
  EXPECT_FALSE(std::all_of(std::begin(memory), std::end(memory), [](std::byte b) { return b == kPoison; }));
  EXPECT_TRUE(std::all_of(memory + *size, std::end(memory), [](std::byte b) { return b == kPoison; }));
}

// f32 activations on 16-bit weights: each operand has its own dtype.
TEST(SelectTest, OperandsHaveTheirOwnDTypes) {
  const ProblemSpec spec{37, 22, 35, 4, 4, 0.5, DType::bf16, true, 0};
  const Problem problem = make_problem(spec);
  const std::vector<std::byte> values = encode(problem.values, DType::bf16),
                               x = encode(problem.x, DType::f32), dy = encode(problem.dy, DType::f32),
                               bias = encode(problem.bias, DType::f32);
  const BsrView w{problem.pattern.view(), values.data(), DType::bf16};
  const Host host{problem};
  const auto y_want = host.linear(problem.x, problem.values, &problem.bias, Activation::none);
  const auto dx_want = host.grad_input(problem.dy, problem.values);
  const auto dw_want = host.grad_weight(problem.dy, problem.x);
  for (const char* family : {"avx512", "avx2", "neon", "scalar", "ref"}) {
    const Kernel* kernel = find_kernel(std::string(family) + "_linear");
    if (kernel == nullptr || !kernel->supports(layer_problem(37, 22, 35, 4, 4, 0.5), cpu_machine()).empty()) {
      continue;
    }
    const Force force(family);
    for (const std::int64_t tokens : {3, 37}) {
      std::vector<float> y(static_cast<std::size_t>(tokens * 22)), dx(static_cast<std::size_t>(tokens * 35));
      expect_ok(rarefy::linear({x.data(), DType::f32, tokens, 35, 35}, w, bias.data(), Activation::none,
                               {y.data(), DType::f32, tokens, 22, 22}));
      expect_ok(rarefy::grad_input({dy.data(), DType::f32, tokens, 22, 22}, w,
                                   {dx.data(), DType::f32, tokens, 35, 35}));
      for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], y_want[i]) << family << ' ' << i;
      for (std::size_t i = 0; i < dx.size(); ++i) ASSERT_EQ(dx[i], dx_want[i]) << family << ' ' << i;
    }
    std::vector<bfloat16> dw(problem.values.size());
    expect_ok(rarefy::grad_weight({dy.data(), DType::f32, 37, 22, 22}, {x.data(), DType::f32, 37, 35, 35},
                                  problem.pattern.view(), dw.data(), DType::bf16));
    for (std::size_t i = 0; i < dw.size(); ++i)
      ASSERT_EQ(dw[i], to_bfloat16(dw_want[i])) << family << ' ' << i;
  }
}

// A repeated problem is looked up, and a change of what is forced is seen at once.
TEST(SelectTest, ChoicesAreRememberedUntilTheForceChanges) {
  const rarefy::Problem problem = layer_problem(64, 32, 32, 4, 4, 0.5);
  const std::string_view first = choose(problem)->kernel->name;
  EXPECT_EQ(choose(problem)->kernel->name, first);
  {
    const Force force("ref");
    EXPECT_EQ(choose(problem)->kernel->name, "ref_linear");
  }
  EXPECT_EQ(choose(problem)->kernel->name, first);
}

TEST(SelectTest, DerivedDataIsForWhoAsks) {
  const auto sizes = derived_sizes(layer_problem(64, 32, 32, 4, 4, 0.5));
  ASSERT_TRUE(sizes.ok());
  EXPECT_EQ(sizes->key, 0U) << "no kernel of this machine derives anything from such a weight";
  EXPECT_EQ(sizes->prepared + sizes->packed, 0);
}

}  // namespace
}  // namespace rarefy::test
