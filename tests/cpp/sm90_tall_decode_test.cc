// linear of tall vectors for up to 32 tokens on an H100 or H200 (tall_decode.h): results, every way to cut W,
// kernels that start early. What it takes and refuses on the host: sm90_plan_test.cc.
#include <gtest/gtest.h>

#include <string>

#include "cuda/sm90/tall_decode.h"
#include "sm90_checks.h"

namespace rarefy::test {
namespace {

class Sm90TallDecodeTest : public Sm90Test {};

TEST_F(Sm90TallDecodeTest, MatchHost) {
  for (const std::int64_t rows : {16, 32, 48, 64, 96, 128, 192}) {
    for (const std::int64_t tokens : {1, 2, 4, 5, 8, 9, 16, 17, 31, 32}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        check({tokens, 9 * rows - 5, 1096, rows, 1, 0.4, dtype, tokens % 2 == 0, 8}, "sm90_tall_decode");
      }
    }
  }
  check({3, 2048, 4096, 128, 1, 0.1, DType::bf16, true, 0}, "sm90_tall_decode");
  check({20, 320, 8192, 32, 1, 0.5, DType::bf16, true, 0}, "sm90_tall_decode");
  check({7, 256, 64, 64, 1, 0.03, DType::bf16, true, 0}, "sm90_tall_decode");  // rows that store nothing
  check({7, 256, 64, 64, 1, 0, DType::bf16, true, 0}, "sm90_tall_decode");
}

// Every way to cut W among warps gives the sums of the default one, up to their order.
TEST_F(Sm90TallDecodeTest, WIsCutInEveryWay) {
  for (const std::int64_t tokens : {3, 7, 13, 27}) {
    const Problem problem = make_problem({tokens, 640, 904, 128, 1, 0.6, DType::bf16, true, 0});
    ProblemIn<DeviceBuffer> gpu(problem);
    const sm90::TallDecodeProblem host{DType::bf16, tokens, 640, 904, 128, 1};
    int ways = 0;
    for (const sm90::TallDecodeCandidate& candidate : sm90::tall_decode_candidates(host)) {
      if (!candidate.reason.empty()) continue;
      ++ways;
      const std::string config = "sm90_tall_decode(" + candidate.config.text() + ')';
      SCOPED_TRACE(config);
      const Force force("cuda:sm90," + config);
      gpu.poison();
      expect_ok(gpu.linear(Activation::none));
      expect_linear(problem, gpu);
    }
    EXPECT_GE(ways, 40);
  }
}

// x of columns that a row does not store is infinite or no number.
TEST_F(Sm90TallDecodeTest, WhatIsNotStoredMeetsNoX) {
  const Force force("cuda:sm90");
  for (const std::int64_t tokens : {3, 8, 16, 30}) {
    Problem problem = make_problem({tokens, 128, 504, 64, 1, 0.2, DType::bf16, true, 0});
    add_specials(problem);
    ProblemIn<DeviceBuffer> gpu(problem);
    ASSERT_EQ(explain(gpu.problem(Op::linear)).kernel, "sm90_tall_decode");
    gpu.poison();
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
  }
}

// Tokens do not depend on how many there are.
TEST_F(Sm90TallDecodeTest, TokensDoNotDependOnTheBatch) {
  const Force force("cuda:sm90");
  const Problem problem = make_problem({32, 384, 1000, 128, 1, 0.5, DType::bf16, false, 0});
  const auto run = [&](std::int64_t first, std::int64_t count) {
    const Problem some = of_tokens(problem, first, count);
    ProblemIn<DeviceBuffer> one(some);
    EXPECT_EQ(explain(one.problem(Op::linear)).kernel, "sm90_tall_decode");
    expect_ok(one.linear(Activation::silu));
    return one.y().download();
  };
  const std::vector<std::byte> all = run(0, 32);
  const auto row = std::ssize(all) / 32;
  for (const std::int64_t count : {1, 4, 5, 8, 9, 17}) {
    for (const std::int64_t first : {std::int64_t{0}, 32 - count}) {
      const std::vector<std::byte> part = run(first, count);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + first * row))
          << count << " from " << first;
    }
  }
}

// A kernel that may start while the one before ends sees all that this one wrote, and nobody writes the
// workspace while it is read: 64 layers, each reading what the last one left, as if each had been waited for.
TEST_F(Sm90TallDecodeTest, InAChain) {
  Problem problem = make_problem({32, 1024, 1024, 64, 1, 0.5, DType::bf16, false, 0});
  for (double& value : problem.values) value /= 16;  // so that numbers neither grow nor vanish
  ProblemIn<DeviceBuffer> gpu(problem);
  const DeviceBuffer room(32 * 1024 * 2);
  Context context;
  context.workspace = {room.data(), static_cast<std::int64_t>(room.bytes())};
  const auto run = [&](int tokens, const std::string& config, bool wait) {
    const Force force("cuda:sm90," + config);
    const DeviceBuffer first = DeviceBuffer::upload<std::byte>(encode(problem.x, DType::bf16)),
                       second(first.bytes());
    for (int layer = 0; layer < 64; ++layer) {
      const DeviceBuffer& from = layer % 2 == 0 ? first : second;
      const DeviceBuffer& to = layer % 2 == 0 ? second : first;
      expect_ok(linear({from.data(), DType::bf16, tokens, 1024, 1024, Device::cuda}, gpu.weight(), gpu.bias(),
                       Activation::silu, {to.data(), DType::bf16, tokens, 1024, 1024, Device::cuda},
                       context));
      if (wait) require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    return first.download();
  };
  for (const int tokens : {4, 8, 16, 32}) {
    for (const char* config : {"sm90_tall_decode(late=0)", "sm90_tall_decode(late=1)",
                               "sm90_tall_decode(rows=32 warps=8 split=4 late=0)"}) {
      SCOPED_TRACE(::testing::Message() << config << " M=" << tokens);
      EXPECT_EQ(run(tokens, config, false), run(tokens, config, true));
    }
  }
}

}  // namespace
}  // namespace rarefy::test
