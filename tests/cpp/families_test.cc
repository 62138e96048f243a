// Which families this machine runs, and what forcing one, or its configuration, does.
#include <fstream>
#include <set>

#include "product_families.h"

namespace rarefy::test {
namespace {

TEST_P(ProductsTest, AreTheOnesForced) {
  const Force force(GetParam());
  for (const Op op : kAllOps) {
    const Explanation chosen = explain(make_problem(op, {4, 4, 4, 4, 1}, 1024, DType::f32));
    EXPECT_EQ(chosen.kernel, GetParam() + "_" + std::string(name(op))) << to_string(chosen);
  }
  if (GetParam() == "avx512" || GetParam() == "avx2") {
    const auto chosen = [](std::int64_t rows, std::int64_t cols, std::int64_t tokens) {
      return explain(make_problem(Op::linear, {rows, cols, rows, cols, 1}, tokens, DType::f32)).kernel;
    };
    EXPECT_EQ(chosen(16, 16, 4), GetParam() + "_linear_few");
    if (GetParam() == "avx512") {
      EXPECT_EQ(chosen(16, 1, 9), "avx512_linear_lanes");
    }
    EXPECT_EQ(chosen(16, 16, 17), GetParam() + "_linear");
    EXPECT_EQ(chosen(4, 1, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(4, 4, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(1, 1, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(2, 2, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(3, 5, 1), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(3, 1, 4), GetParam() + "_linear_few");
    EXPECT_EQ(chosen(1025, 1, 1), GetParam() + "_linear");
    for (const auto& [rows, cols] : {std::pair{2, 5}, {12, 6}, {1, 17}}) {
      EXPECT_EQ(chosen(rows, cols, 4), GetParam() + "_linear_few");
      EXPECT_EQ(chosen(rows, cols, 16), GetParam() + "_linear");
    }
  }
}

// What /proc/cpuinfo says the machine has, not what the library found: every family is there, for every
// product, best first.
TEST(FamiliesTest, AreAllThatThisMachineRuns) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  bool amd = false;
  while (std::getline(cpuinfo, line) && line.rfind("flags", 0) != 0) {
    amd = amd || line.find("AuthenticAMD") != std::string::npos;
  }
  if (line.rfind("flags", 0) != 0) GTEST_SKIP() << "/proc/cpuinfo has no flags";
  const auto has = [&](std::initializer_list<const char*> flags) {
    return std::all_of(flags.begin(), flags.end(), [&](const char* flag) {
      return (line + ' ').find(std::string(" ") + flag + ' ') != std::string::npos;
    });
  };
#if defined(__aarch64__)  // where it is no option; under qemu-user, cpuinfo is the host's
  constexpr bool neon = true, avx2 = false;
#else
  constexpr bool neon = false;
  const bool avx2 = has({"avx2", "fma", "f16c", "bmi1"});
#endif
  const bool avx512 = avx2 && has({"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  const bool bf16 = avx512 && has({"avx512_bf16"}) && amd;
  const bool amx = avx512 && has({"amx_tile", "amx_bf16"});
  for (const Op op : kAllOps) {
    std::vector<std::string> expected, found;
    const bool pairs = op != Op::grad_weight;
    const bool chain = op == Op::feed_forward;
    const bool lanes = op == Op::linear || op == Op::grad_input;
    const auto expect = [&](const char* family, bool there, const char* suffix = "") {
      if (there) expected.push_back(std::string(family) + '_' + std::string(name(op)) + suffix);
    };
    expect("amx", amx && pairs);
    expect("avx512_bf16", bf16 && op == Op::linear, "_few");
    expect("avx512_bf16", bf16 && pairs);
    expect("avx512", avx512 && op == Op::linear, "_few");
    expect("avx512", avx512 && lanes, "_lanes");
    expect("avx512", avx512);
    expect("avx512", avx512 && chain, "_apart");
    expect("avx2", avx2 && op == Op::linear, "_few");
    expect("avx2", avx2 && lanes, "_lanes");
    expect("avx2", avx2);
    expect("avx2", avx2 && chain, "_apart");
    expect("neon", neon);
    expect("neon", neon && chain, "_apart");
    expect("scalar", true);
    expect("scalar", chain, "_apart");
    expect("pairs", pairs);
    expect("ref", true);
    std::set<std::string> fit;  // with few tokens or many, or enough to pack for
    for (const std::int64_t tokens : {1, 8, op == Op::linear ? 300 : 8}) {
      rarefy::Problem problem = make_problem(op, {16, 16, 16, 16, 1}, tokens, DType::bf16);
      problem.derived = kAnyDerived;
      for (const Candidate& candidate : explain(problem).candidates) {
        if (candidate.why_not.empty()) fit.insert(candidate.kernel.name);
      }
    }
    for (const KernelInfo& kernel : backend_info().kernels) {
      if (kernel.op == op && fit.count(kernel.name) != 0) found.push_back(kernel.name);
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(ForcedImplTest, AnUnknownOneIsAnError) {
  const std::string before = forced_impl();
  for (const char* text : {"abacus", "cpu:abacus", "gpu:ref", "cuda:ref", "cpu:ref,abacus", ":", "cpu:"}) {
    const Status status = force_impl(text);
    EXPECT_EQ(status.code(), StatusCode::unsupported) << text;
    EXPECT_NE(status.message().find("RAREFY_FORCE_IMPL"), std::string::npos) << status.message();
    EXPECT_EQ(forced_impl(), before);
  }
}

// Forcing one device's family leaves the other's choice alone; a family alone goes to its own device.
TEST(ForcedImplTest, IsPerDevice) {
  const auto chosen = [](Device device) {
    return explain(make_problem(Op::linear, {8, 8, 4, 4, 1}, 64, DType::f32, device)).kernel;
  };
  const std::string cuda = chosen(Device::cuda);
  for (const char* text : {"cpu:scalar", "scalar"}) {
    expect_ok(force_impl(text));
    EXPECT_EQ(chosen(Device::cpu), "scalar_linear");
    EXPECT_EQ(chosen(Device::cuda), cuda);
  }
  if (backend_info().cuda_built) {
    expect_ok(force_impl("cpu:ref,cuda:simt"));
    EXPECT_EQ(chosen(Device::cpu), "ref_linear");
    EXPECT_EQ(chosen(Device::cuda), "simt_linear");
  }
  expect_ok(force_impl(""));
  EXPECT_EQ(chosen(Device::cuda), cuda);
}

// Tuning choices in parentheses: of that kernel alone, beside families, and refused when they cannot be.
TEST(ForcedImplTest, Configurations) {
  const auto asked = make_problem(Op::linear, {64, 64, 4, 4, 128}, 64, DType::f32);
  const std::string own = [&] {
    const Force force("scalar");
    return explain(asked).config;
  }();
  ASSERT_EQ(own.find("vectors=1 "), std::string::npos) << own;
  {
    const Force force("scalar,scalar_linear(vectors=1 splits=2)");
    EXPECT_NE(explain(asked).config.find("vectors=1 "), std::string::npos) << explain(asked).config;
    EXPECT_NE(explain(asked).config.find("splits=2 "), std::string::npos);
    const Problem problem = make_problem({64, 64, 64, 4, 4, 0.5, DType::f32, true, 0});
    ProblemIn<HostBuffer> run(problem);
    expect_ok(run.linear(Activation::none));
    expect_linear(problem, run);
  }
  {
    const Force force("scalar,scalar_linear(vectors=99)");
    const Problem problem = make_problem({64, 64, 64, 4, 4, 0.5, DType::f32, true, 0});
    ProblemIn<HostBuffer> run(problem);
    EXPECT_EQ(run.linear(Activation::none).code(), StatusCode::invalid_argument);
  }
  for (const char* text :
       {"scalar_linear(vector=1)", "scalar_linear(vectors=x)", "linear(vectors=1)", "scalar_linear("}) {
    EXPECT_EQ(force_impl(text).code(), StatusCode::unsupported) << text;
  }
  const Force force("scalar");
  EXPECT_EQ(explain(asked).config, own);
}

// A family that exists but cannot have the problem: the message says why, and nothing is written.
TEST(ForcedImplTest, OneThatDoesNotFitIsAnError) {
  const Problem problem = make_problem({3, 4, 4, 2, 2, 1.0, DType::f64, true, 0});
  ProblemIn<HostBuffer> run(problem);
  const Force force("scalar");
  const Status status = run.linear(Activation::silu);
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_NE(status.message().find("scalar_linear: takes inputs in f32, bf16 or f16; got f64"),
            std::string::npos)
      << status.message();
  const std::vector<std::byte> y = run.y().download();
  EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](std::byte b) { return b == kPoison; }));
}

}  // namespace
}  // namespace rarefy::test
