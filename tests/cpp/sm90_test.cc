// The Hopper kernels of square blocks, of few tokens and their activations against the host's products in
// double.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "sm90_checks.h"

namespace rarefy::test {
namespace {

TEST_F(Sm90Test, Strips) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{64, 64}, {128, 128}, {64, 128}, {192, 64}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const double density : {0.0, 0.3, 1.0}) {
        check({130, 4 * r, 5 * c, r, c, density, dtype, true, 0}, "sm90_strips_linear");
        check({513, 5 * r - 24, 3 * c - 40, r, c, density, dtype, false, 8}, "sm90_strips_linear");
      }
      check({17, 9 * r, 2 * c, r, c, 0.4, dtype, true, 16}, "sm90_strips_linear");
      check({2000, 11 * r, 7 * c, r, c, 0.2, dtype, true, 0}, "sm90_strips_linear");
    }
  }
}

// Tokens in every sum of lists, ragged; more of them than the lists have; more groups than a round; one
// strip.
TEST_F(Sm90Test, StripsOfManyTokens) {
  for (const std::int64_t tokens : {255, 257, 770, 1281, 1800, 4100}) {
    check({tokens, 320, 448, 64, 64, 0.4, DType::bf16, true, 0}, "sm90_strips_linear");
    check({tokens, 384, 256, 128, 128, 0.1, DType::bf16, true, 8}, "sm90_strips_linear");
  }
  check({40000, 64, 128, 64, 64, 0.6, DType::bf16, true, 0}, "sm90_strips_linear");
  check({600, 64 * 300, 128, 64, 64, 0.5, DType::f16, true, 0}, "sm90_strips_linear");
  check({300, 128 * 150, 64, 128, 64, 0.3, DType::f16, true, 0}, "sm90_strips_linear");
}

// Lists of tiles are of 1, 2, 4 … token tiles: what is left out of them, and the last tokens' own boxes of X.
TEST_F(Sm90Test, AnyNumberOfTokenTiles) {
  for (std::int64_t tiles = 1; tiles <= 11; ++tiles) {
    for (const std::int64_t rows : {256, 1536}) {
      const std::int64_t tokens = 128 * tiles - (tiles % 3) * 61;
      check({tokens, rows, 128, 64, 64, 0.5, DType::bf16, true, 0}, "sm90_strips_linear");
      check({tokens, rows, 128, 32, 32, 0.5, DType::bf16, true, 0}, "sm90_unions_linear");
      check({tokens, rows, 128, 64, 1, 0.3, DType::bf16, true, 0}, "sm90_tall");
      check({2 * tokens, rows, 128, 128, 1, 0.3, DType::bf16, true, 0}, "sm90_tall");
    }
  }
}

// The first call of a thread, as autograd's: no context is current there before.
TEST_F(Sm90Test, ThreadsOfTheirOwn) {
  for (const std::int64_t block_cols : {64, 1}) {
    const Problem problem = make_problem({130, 256, 128, 64, block_cols, 0.5, DType::bf16, true, 0});
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    expect_ok(gpu.linear(Activation::none));  // what is derived, and workspace, are there
    expect_ok(gpu.grad_input());
    expect_ok(gpu.grad_weight());
    gpu.poison();
    const Force force("cuda:sm90");
    std::thread([&] { expect_ok(gpu.linear(Activation::none)); }).join();
    std::thread([&] { expect_ok(gpu.grad_input()); }).join();
    std::thread([&] { expect_ok(gpu.grad_weight()); }).join();
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    expect_linear(problem, gpu);
    expect_grad_input(problem, gpu);
    expect_grad_weight(problem, gpu);
  }
}

// Every finite number through each activation, in both ways out of a tile: relative errors, also in the
// tails.
TEST_F(Sm90Test, ActivationsOfAllNumbers) {
  const Force force("cuda:sm90");
  for (const DType dtype : {DType::bf16, DType::f16}) {
    std::vector<std::byte> bytes;
    for (unsigned bits = 0; bits < 1u << 16; ++bits) {
      const unsigned exponent = dtype == DType::f16 ? 0x7C00 : 0x7F80;
      if ((bits & exponent) == exponent) continue;
      bytes.push_back(static_cast<std::byte>(bits & 0xFF));
      bytes.push_back(static_cast<std::byte>(bits >> 8));
    }
    const std::vector<double> numbers = decode(bytes, dtype);
    for (const std::int64_t block_cols : {64, 1}) {
      Problem problem =
          make_problem({std::ssize(numbers) / 64, 64, 64, 64, block_cols, 1.0, dtype, false, 0});
      problem.x = numbers;
      problem.bias.assign(64, 0);
      for (std::size_t i = 0; i < 64 * 64; ++i) problem.values[i] = i / 64 == i % 64;
      ProblemIn<DeviceBuffer> gpu(problem);
      gpu.hold_derived(4096);
      for (const Activation activation :
           {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
        SCOPED_TRACE(text_of(problem.spec) << ' ' << name(activation));
        gpu.poison();
        expect_ok(gpu.linear(activation));
        const std::vector<double> got = decode(gpu.y().download(), dtype),
                                  exact = Host{problem}.linear(numbers, problem.values, nullptr, activation);
        for (std::size_t i = 0; i < numbers.size(); ++i) {
          const double bound = storing(dtype) * std::abs(exact[i]) * (1 + 0x1p-10) +
                               pairs_activation_error(activation, exact[i], dtype) +
                               (dtype == DType::f16 ? 0x1.01p-25 : kTail);
          ASSERT_LE(std::abs(got[i] - exact[i]), bound) << numbers[i] << ": " << got[i];
        }
      }
    }
  }
}

// −∞ is NaN but for ReLU; ∞ and NaN stay.
TEST_F(Sm90Test, ActivationsOfInfinity) {
  const Force force("cuda:sm90");
  const double inf = std::numeric_limits<double>::infinity();
  for (const std::int64_t block_cols : {64, 1}) {
    Problem problem = make_problem({24, 64, 64, 64, block_cols, 1.0, DType::bf16, true, 0});
    problem.x.assign(problem.x.size(), 0);
    problem.bias.assign(64, 0);
    for (double& value : problem.values) value = 1;
    const double numbers[] = {inf, -inf, std::nan("")};
    for (std::size_t t = 0; t < 3; ++t) problem.x[t * 64 + 5] = numbers[t];
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(4096);
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      SCOPED_TRACE(name(activation));
      expect_ok(gpu.linear(activation));
      const std::vector<double> got = decode(gpu.y().download(), DType::bf16);
      EXPECT_EQ(got[7], inf);
      if (activation == Activation::relu) {
        EXPECT_EQ(got[64 + 7], 0);
      } else {
        EXPECT_TRUE(std::isnan(got[64 + 7]));
      }
      EXPECT_TRUE(std::isnan(got[128 + 7]));
      EXPECT_EQ(got[192 + 7], 0);
    }
  }
}

TEST_F(Sm90Test, Decode) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{16, 16}, {32, 32}, {64, 64}, {128, 64}, {16, 48}};
  for (const auto& [r, c] : blocks) {
    for (const std::int64_t tokens : {1, 2, 7, 8, 9, 16}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        check({tokens, 9 * r - 5, 6 * c - 8, r, c, 0.4, dtype, tokens % 2 == 0, 8}, "sm90_decode");
      }
    }
  }
  check({1, 4096, 2048, 32, 32, 0.25, DType::bf16, true, 0}, "sm90_decode");
  check({8, 320, 1024, 32, 256, 0.5, DType::bf16, true, 0}, "sm90_decode");
}

// Every way to cut W among warps gives the sums of the default one, up to their order.
TEST_F(Sm90Test, DecodeIsCutInEveryWay) {
  for (const auto& [block, tokens] : {std::pair{64, 3}, {64, 7}, {64, 13}, {32, 5}, {32, 16}, {16, 16}}) {
    const Problem problem =
        make_problem({tokens, 5 * block, 9 * block, block, block, 0.6, DType::bf16, true, 0});
    ProblemIn<DeviceBuffer> gpu(problem);
    for (const int rows : {16, 32}) {
      if (rows > block) continue;
      for (const int warps : {2, 4, 8}) {
        for (const int split : {0, 1, 2, 4, 8}) {  // 0: by way of shared memory
          if (split == 0 && (tokens <= 4 || block < 32 || warps != 8)) continue;
          if (split == 0 && rows == 16 && (block < 64 || tokens > 8)) continue;
          const int loads = split > 0 && split <= 2 && tokens <= 8 ? 16 : 8;
          const std::string config =
              "sm90_decode(rows=" + std::to_string(rows) + " warps=" + std::to_string(warps) +
              " split=" + std::to_string(std::max(split, 1)) + " loads=" + std::to_string(loads) +
              " shared=" + std::to_string(split == 0 ? 1 : 0) + " late=" + std::to_string(rows / 16 % 2) +
              ')';
          SCOPED_TRACE(config);
          const Force force("cuda:sm90," + config);
          gpu.poison();
          expect_ok(gpu.linear(Activation::none));
          expect_linear(problem, gpu);
        }
      }
    }
  }
}

// A kernel that may start while the one before ends sees all that this one wrote: 64 layers, each reading
// what the last one left, as if each had been waited for.
TEST_F(Sm90Test, DecodeInAChain) {
  Problem problem = make_problem({8, 1024, 1024, 32, 32, 0.5, DType::bf16, false, 0});
  for (double& value : problem.values) value /= 16;  // so that numbers neither grow nor vanish
  ProblemIn<DeviceBuffer> gpu(problem);
  const auto run = [&](int tokens, const std::string& config, bool wait) {
    const Force force("cuda:sm90," + config);
    const DeviceBuffer first = DeviceBuffer::upload<std::byte>(encode(problem.x, DType::bf16)),
                       second(first.bytes());
    for (int layer = 0; layer < 64; ++layer) {
      const DeviceBuffer& from = layer % 2 == 0 ? first : second;
      const DeviceBuffer& to = layer % 2 == 0 ? second : first;
      expect_ok(linear({from.data(), DType::bf16, tokens, 1024, 1024, Device::cuda}, gpu.weight(), gpu.bias(),
                       Activation::silu, {to.data(), DType::bf16, tokens, 1024, 1024, Device::cuda}));
      if (wait) require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    return first.download();
  };
  for (const auto& [tokens, config] : {std::pair{4, "sm90_decode(late=0)"},
                                       {4, "sm90_decode(late=1)"},
                                       {4, "sm90_decode(loads=8 late=0)"},
                                       {4, "sm90_decode(split=4 late=0)"},
                                       {8, "sm90_decode(rows=32 warps=8 split=1 loads=8 shared=1 late=0)"},
                                       {8, "sm90_decode(rows=32 warps=8 split=1 loads=8 shared=1 late=1)"}}) {
    SCOPED_TRACE(config);
    EXPECT_EQ(run(tokens, config, false), run(tokens, config, true));
  }
}

// What is prepared follows from the weight alone; another kernel's is in nobody's way.
TEST_F(Sm90Test, DerivedDataServesAnyTokens) {
  const BsrShape shape{256, 256, 64, 64, 8};
  rarefy::Problem asked = make_problem(Op::linear, shape, 300, DType::bf16, Device::cuda);
  const auto first = derived_sizes(asked);
  ASSERT_TRUE(first.ok() && first->key != 0) << to_string(explain(asked));
  asked.tokens = 3000;
  asked.bias = true;
  asked.activation = Activation::relu;
  EXPECT_EQ(derived_sizes(asked)->key, first->key);
  EXPECT_EQ(derived_sizes(asked)->prepared, first->prepared);
  asked.derived = first->key;
  EXPECT_EQ(explain(asked).kernel, "sm90_strips_linear") << to_string(explain(asked));
  asked.tokens = 3;
  EXPECT_EQ(explain(asked).kernel, "sm90_decode") << to_string(explain(asked));
  asked = make_problem(Op::grad_input, shape, 3000, DType::bf16, Device::cuda);
  asked.derived = first->key;
  EXPECT_EQ(explain(asked).kernel, "sm80_grad_input") << to_string(explain(asked));
}

}  // namespace
}  // namespace rarefy::test
