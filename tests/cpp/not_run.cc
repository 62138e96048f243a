// The last line of the suite: which families of kernels no test ran here, as this machine or build lacks
// them. tests/machines.md has the last machine that ran each.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>

#include "core/registry.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

// What hardware lacks, in the words of `supports`; "" for what a problem lacks, or nothing does.
std::string lack(const Kernel& kernel) {
  if (kernel.device == Device::cuda && backend_info().cuda_devices.empty()) return "no NVIDIA GPU";
  const rarefy::Problem problem = make_problem(kernel.op, {16, 16, 16, 16, 1}, 8, DType::bf16, kernel.device);
  const Reason reason = kernel.supports(problem, machine_of(problem));
  const bool hardware = reason.starts_with("the processor lacks") || reason.starts_with("needs compute");
  return hardware ? std::string(reason) : "";
}

// "cpu:amx" and why it did not run. A family runs if one of its rows can.
std::map<std::string, std::string> not_run() {
  std::map<std::string, std::string> missing;
  for (const Kernel& kernel : registry()) {
    const std::string family = std::string(name(kernel.device)) + ':' + std::string(kernel.family);
    const std::string reason = lack(kernel);
    const auto known = missing.find(family);
    if (known == missing.end() || reason.empty()) missing[family] = reason;
  }
  for (const char* family :
       {"cpu:amx", "cpu:avx512_bf16", "cpu:avx512", "cpu:avx_vnni", "cpu:avx2", "cpu:neon", "cuda:sm90"}) {
    missing.try_emplace(family, "not in this build");
  }
  std::erase_if(missing, [](const auto& entry) { return entry.second.empty(); });
  return missing;
}

class SayWhatDidNotRun : public ::testing::Environment {
 public:
  void TearDown() override {
    if (::testing::UnitTest::GetInstance()->test_to_run_count() < 2) return;  // one alone
    std::string list;
    for (const auto& [family, reason] : not_run())
      list += (list.empty() ? "" : ", ") + family + " (" + reason + ")";
    std::cout << "Not run here: " << (list.empty() ? "nothing" : list) << '\n';
  }
};

const auto* const kEnvironment = ::testing::AddGlobalTestEnvironment(new SayWhatDidNotRun);

TEST(FamiliesTest, WhatDidNotRunIsWhatTheMachineLacks) {
  const auto missing = not_run();
  const std::string before = forced_impl();
  for (const std::string& family : cpu_impls()) EXPECT_FALSE(missing.contains("cpu:" + family)) << family;
  for (const auto& [family, reason] : missing) {
    EXPECT_EQ(force_impl(family).ok(), reason != "not in this build") << family << ": " << reason;
  }
  EXPECT_TRUE(force_impl(before).ok());
}

}  // namespace
}  // namespace rarefy::test
