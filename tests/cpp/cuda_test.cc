// The CUDA kernels against the host's products in double, and what a queue of GPU work needs beyond
// right numbers: streams, graphs, devices, repeatable bits, and errors without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>

#include "core/move_blocks.h"
#include "cuda_device.h"
#include "product_checks.h"
#include "rarefy/feed_forward.h"

namespace rarefy::test {
namespace {

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

bool runs_sm90() { return backend_info().cuda_devices[0].arch == 90; }
bool runs_sm80() { return backend_info().cuda_devices[0].arch >= 80; }

std::string text_of(const ProblemSpec& spec) {
  std::ostringstream text;
  text << name(spec.dtype) << " M=" << spec.m << " N=" << spec.n << " K=" << spec.k << " block "
       << spec.block_rows << 'x' << spec.block_cols << " density " << spec.density << " stride "
       << spec.stride << ", x " << name(spec.x_layout) << ", y " << name(spec.y_layout)
       << (spec.integers ? ", integers" : "");
  return text.str();
}

// A family, forced. simt takes every problem; another family leaves out what it says it cannot have, and a
// test in which nothing is left fails. Callers hold what its kernels derive from a weight.
class CudaFamilyTest : public CudaTest {
 protected:
  void set_family(const std::string& family) {
    if (IsSkipped()) return;
    if (family == "sm90" && !runs_sm90()) GTEST_SKIP() << "no GPU of compute capability 9.0";
    if (family == "sm80" && !runs_sm80()) GTEST_SKIP() << "no GPU of compute capability 8.0";
    family_ = family;
    force_.emplace("cuda:" + family);
  }
  void TearDown() override {
    if (!IsSkipped()) {
      EXPECT_GT(taken_, 0) << family_ << " takes nothing of this";
    }
    force_.reset();
  }

  ProblemIn<DeviceBuffer> make(const Problem& problem) const {
    ProblemIn<DeviceBuffer> gpu(problem);
    if (family_ != "simt") gpu.hold_derived(4096);  // as a front does, for whatever tokens come
    return gpu;
  }
  bool takes(const ProblemIn<DeviceBuffer>& gpu, Op op, Activation activation = Activation::none) {
    rarefy::Problem asked = gpu.problem(op);
    asked.bias = op == Op::linear;
    asked.activation = activation;
    asked.derived = kAnyDerived;
    const bool takes = !explain(asked).kernel.empty();
    EXPECT_TRUE(takes || family_ != "simt") << to_string(explain(asked));
    taken_ += takes ? 1 : 0;
    return takes;
  }
  void check_products(const ProblemSpec& spec) {
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu = make(problem);
    if (takes(gpu, Op::linear)) {
      expect_ok(gpu.linear(Activation::none));
      expect_linear(problem, gpu);
    }
    if (takes(gpu, Op::grad_input)) {
      expect_ok(gpu.grad_input());
      expect_grad_input(problem, gpu);
    }
    if (problem.pattern.shape().nnzb == 0 || takes(gpu, Op::grad_weight)) {
      expect_ok(gpu.grad_weight());
      expect_grad_weight(problem, gpu);
    }
  }

  std::string family_;
  int taken_ = 0;
  std::optional<Force> force_;
};

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};
constexpr Layout kLayouts[] = {Layout::by_token, Layout::by_feature};

struct Blocks {
  const char* family;
  std::int64_t rows, cols;
};

class CudaProductsTest : public CudaFamilyTest, public ::testing::WithParamInterface<Blocks> {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family(GetParam().family);
  }
};

TEST_P(CudaProductsTest, MatchHost) {
  const auto [family, rows, cols] = GetParam();
  // N and K are no multiples of anything, or of eight, with rows 16 bytes apart, for kernels that want it;
  // with 2 block columns the last one is padded.
  const std::int64_t n = 5 * rows + rows / 2 + 1, k = 6 * cols + cols / 2 + 1;
  for (const DType dtype : kDTypes) {
    for (const double density : {0.0, 0.3, 1.0}) {
      check_products({33, n, k, rows, cols, density, dtype, false, 3});
      check_products({77, (n + 7) / 8 * 8, (k + 7) / 8 * 8, rows, cols, density, dtype, true, 8});
      check_products({1, 3 * rows, 2 * cols, rows, cols, density, dtype, true, 0});
      check_products({131, 9 * rows - rows / 3, 2 * cols - cols / 3, rows, cols, density, dtype, true, -1});
    }
  }
}

// Each of x (and dx) and y (and dy) by token and by feature.
TEST_P(CudaProductsTest, EveryLayout) {
  const auto [family, rows, cols] = GetParam();
  for (const DType dtype : kDTypes) {
    for (const Layout x : kLayouts) {
      for (const Layout y : kLayouts) {
        check_products({67, 2 * rows + 2, 3 * cols + 1, rows, cols, 0.5, dtype, true, 3, x, y});
        check_products({80, 3 * rows, 24 * cols, rows, cols, 0.4, dtype, false, 8, x, y});
        check_products({16, 3 * rows, 24 * cols, rows, cols, 0.4, dtype, true, 8, x, y});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cuda, CudaProductsTest,
    ::testing::Values(Blocks{"simt", 1, 1}, Blocks{"simt", 1, 7}, Blocks{"simt", 7, 1}, Blocks{"simt", 2, 2},
                      Blocks{"simt", 4, 1}, Blocks{"simt", 4, 4}, Blocks{"simt", 3, 5}, Blocks{"simt", 8, 16},
                      Blocks{"simt", 16, 16}, Blocks{"simt", 17, 33}, Blocks{"simt", 32, 32},
                      Blocks{"simt", 64, 64}, Blocks{"simt", 70, 130}, Blocks{"sm80", 16, 16},
                      Blocks{"sm80", 32, 32}, Blocks{"sm80", 64, 64}, Blocks{"sm80", 16, 64},
                      Blocks{"sm80", 128, 16}, Blocks{"sm80", 48, 32}, Blocks{"sm80", 96, 80},
                      Blocks{"sm80", 96, 64}, Blocks{"sm90", 16, 16}, Blocks{"sm90", 32, 32},
                      Blocks{"sm90", 64, 64}, Blocks{"sm90", 128, 64}, Blocks{"sm90", 64, 128},
                      Blocks{"sm90", 32, 1}, Blocks{"sm90", 64, 1}, Blocks{"sm90", 96, 1},
                      Blocks{"sm90", 128, 1}, Blocks{"sm90", 192, 1}),
    [](const auto& tested) {
      return std::string(tested.param.family) + '_' + std::to_string(tested.param.rows) + 'x' +
             std::to_string(tested.param.cols);
    });

// What is special about a problem, for every family.
class CudaProductTest : public CudaFamilyTest, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family(GetParam());
  }
  bool simt() const { return GetParam() == "simt"; }
};

INSTANTIATE_TEST_SUITE_P(Cuda, CudaProductTest, ::testing::Values("simt", "sm80", "sm90"),
                         [](const auto& tested) { return tested.param; });

TEST_P(CudaProductTest, BlockLargerThanTheMatrix) {
  for (const DType dtype : kDTypes) {
    check_products({5, 7, 9, 40, 50, 1.0, dtype, true, 2});
    check_products({50, 40, 56, 64, 64, 1.0, dtype, true, 8});
    check_products({50, 40, 16, 128, 1, 1.0, dtype, true, 8});
  }
}

// Natively or by the core, the same: what is there, padding too, and the gradient.
TEST_P(CudaProductTest, AddsToAGradient) {
  for (const DType dtype : kDTypes) {
    for (const auto& [rows, cols] : {std::pair{16, 16}, {64, 64}, {128, 64}, {5, 3}}) {
      for (const bool integers : {true, false}) {
        const ProblemSpec spec{150, 5 * rows - 8 * (rows > 8), 6 * cols, rows, cols, 0.4, dtype, integers, 8};
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu = make(problem);
        if (takes(gpu, Op::grad_weight)) expect_accumulated(problem, gpu);
      }
    }
  }
}

TEST_P(CudaProductTest, LongSums) {
  for (const DType dtype : kDTypes) {
    if (simt()) check_products({1030, 48, 2000, 16, 16, 0.5, dtype, false, 0});
    check_products({1030, 64, 2048, 64, 64, 0.5, dtype, false, 0});
    check_products({520, 64, 2048, 64, 1, 0.5, dtype, false, 0});
  }
}

TEST_P(CudaProductTest, MoreTokensThanTheGridIsHigh) {
  if (simt()) {
    check_products({65535 * 64 + 70, 5, 2, 5, 1, 1.0, DType::f16, true, -1});
  } else if (GetParam() == "sm80") {
    check_products({65535 * 8 + 72, 8, 8, 16, 16, 1.0, DType::f16, true, 0});
  } else {
    check_products({65535 * 8 + 72, 8, 8, 64, 1, 1.0, DType::f16, true, 0});
  }
}

TEST_P(CudaProductTest, Activations) {
  for (const DType dtype : kDTypes) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      for (const ProblemSpec& spec : {ProblemSpec{65, 40, 50, 4, 4, 0.4, dtype, false, 1},
                                      ProblemSpec{5, 192, 256, 64, 64, 0.5, dtype, false, 8},
                                      ProblemSpec{200, 192, 256, 64, 64, 0.5, dtype, false, 8},
                                      ProblemSpec{200, 256, 120, 128, 1, 0.5, dtype, false, 8},
                                      ProblemSpec{200, 192, 120, 64, 1, 0.5, dtype, false, 8,
                                                  Layout::by_feature, Layout::by_feature}}) {
        SCOPED_TRACE(std::string(name(activation)) + ' ' + text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu = make(problem);
        if (!takes(gpu, Op::linear, activation)) continue;
        expect_ok(gpu.linear(activation));
        expect_activation(problem, gpu, activation, !simt());
      }
    }
  }
}

TEST_P(CudaProductTest, EmptyBatch) {
  const Problem problem = make_problem({0, 192, 128, 64, 64, 0.5, DType::bf16, true, 0});
  ProblemIn<DeviceBuffer> gpu = make(problem);
  expect_ok(gpu.linear(Activation::none));
  expect_ok(gpu.grad_input());
  if (!simt()) force_.emplace("cuda:simt");  // Hopper's kernels want tokens
  taken_ = 1;
  expect_ok(gpu.grad_weight());
  for (const double number : decode(gpu.dvalues().download(), DType::bf16)) EXPECT_EQ(number, 0);
}

// A NaN in x reaches every y whose row has a block there, and nothing else; padding stays zero.
TEST_P(CudaProductTest, NanPassesThroughAndNotFurther) {
  for (const DType dtype : kDTypes) {
    for (const ProblemSpec& spec : {ProblemSpec{40, 21, 22, 4, 5, 0.4, dtype, true, 0},
                                    ProblemSpec{40, 200, 240, 64, 64, 0.4, dtype, true, 0},
                                    ProblemSpec{40, 200, 240, 128, 1, 0.4, dtype, true, 0}}) {
      SCOPED_TRACE(text_of(spec));
      Problem problem = make_problem(spec);
      const auto last_k = static_cast<std::size_t>(spec.k - 1), k = static_cast<std::size_t>(spec.k);
      const auto n = static_cast<std::size_t>(spec.n);
      problem.x[7 * k + last_k] = std::numeric_limits<double>::quiet_NaN();  // token 7, in the padded column
      problem.x[9 * k + 3] = std::numeric_limits<double>::infinity();
      problem.dy[11 * n + n - 1] = std::numeric_limits<double>::quiet_NaN();  // in the padded block row
      ProblemIn<DeviceBuffer> gpu = make(problem);
      const bool all[] = {takes(gpu, Op::linear), takes(gpu, Op::grad_input), takes(gpu, Op::grad_weight)};
      if (all[0]) expect_ok(gpu.linear(Activation::none));
      if (all[1]) expect_ok(gpu.grad_input());
      if (all[2]) expect_ok(gpu.grad_weight());
      expect_same_or_nan(problem, gpu, all);
    }
  }
}

// The Hopper family, for the problems that it takes; callers hold what its kernels derive from a weight.
class Sm90Test : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    if (!runs_sm90()) GTEST_SKIP() << "no GPU of compute capability 9.0";
  }

  // `kernel` is what linear must get.
  static void check(const ProblemSpec& spec, std::string_view kernel) {
    SCOPED_TRACE(text_of(spec));
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu(problem);
    gpu.hold_derived(kernel == "sm90_decode" ? 0 : 4096);  // as a front does, for whatever tokens come
    rarefy::Problem asked = gpu.problem(Op::linear);
    asked.bias = true;
    asked.derived = kAnyDerived;
    ASSERT_EQ(explain(asked).kernel, kernel) << to_string(explain(asked));
    const Force force("cuda:sm90");
    expect_ok(gpu.linear(Activation::none));
    expect_linear(problem, gpu);
    asked = gpu.problem(Op::grad_input);
    asked.derived = kAnyDerived;
    if (explain(asked).kernel.empty()) return;
    expect_ok(gpu.grad_input());
    expect_grad_input(problem, gpu);
  }
};

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

TEST_F(Sm90Test, GradWeight) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{64, 64},  {128, 128}, {64, 128}, {192, 64},
                                                          {128, 64}, {32, 32},   {16, 16},  {16, 64},
                                                          {64, 48},  {48, 32}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool integers : {false, true}) {
        // Empty and full rows; few tokens and many, in shares; more block rows than threads.
        for (const ProblemSpec& spec :
             {ProblemSpec{300, 9 * r, 13 * c, r, c, 0.3, dtype, integers, 8},
              ProblemSpec{1, 5 * r - 24, 3 * c - 40, r, c, 0.6, dtype, integers, 8},
              ProblemSpec{1500, 2 * r, 5 * c - 8, r, c, 1.0, dtype, integers, 16}}) {
          const Problem problem = make_problem(spec);
          ProblemIn<DeviceBuffer> gpu(problem);
          const Force force("cuda:sm90");
          expect_ok(gpu.grad_weight());  // thread blocks find their tiles, or the call makes a list of them
          const std::vector<std::byte> found = gpu.dvalues().download();
          gpu.poison();
          gpu.hold_derived(4096);  // the caller has the list
          expect_ok(gpu.grad_weight());
          expect_grad_weight(problem, gpu);
          EXPECT_EQ(gpu.dvalues().download(), found);
        }
      }
    }
  }
  const Problem problem = make_problem({80, 64 * 500, 128, 64, 64, 0.5, DType::bf16, true, 0});
  ProblemIn<DeviceBuffer> gpu(problem);
  const Force force("cuda:sm90");
  expect_ok(gpu.grad_weight());
  expect_grad_weight(problem, gpu);
}

// Both gradients of tall vectors: few tokens and many, in every number of shares; rows of no, few and more
// columns than a tile has, for each number of products; more tiles than thread blocks, so that some are
// parts; edges. Held or made for the call, the same bits. X by token and by feature.
TEST_F(Sm90Test, TallGradients) {
  for (const std::int64_t r : {32, 64, 96, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const ProblemSpec& spec :
           {ProblemSpec{300, 3 * r - 24, 200, r, 1, 0.3, dtype, true, 8},
            ProblemSpec{1, 2 * r, 40, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{77, 2 * r - 8, 1096, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{400, 2 * r, 496, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{400, 2 * r, 288, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{1500, 2 * r, 328, r, 1, 0.5, dtype, false, 16},
            ProblemSpec{r <= 64 ? 200 : 40, 150 * r, 72, r, 1, 0.2, dtype, true, 0}}) {
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu(problem);
        const auto run = [&] {
          const Force force("cuda:sm90");
          gpu.poison();
          expect_ok(gpu.grad_weight());
          expect_grad_weight(problem, gpu);
          expect_ok(gpu.grad_input());
          expect_grad_input(problem, gpu);
          return std::pair{gpu.dvalues().download(), gpu.dx().download()};
        };
        const auto made = run();

        ProblemSpec by_feature = spec;
        by_feature.x_layout = Layout::by_feature;
        // Columns in pieces of 16 bytes, and what lies between them NaN; rows of dY as well.
        by_feature.stride = 8 + (8 - spec.m % 8) % 8;
        by_feature.n -= by_feature.stride % 8;
        const Problem other = make_problem(by_feature);
        ProblemIn<DeviceBuffer> in_place(other);
        const auto check_every_width = [&](const Problem& host, ProblemIn<DeviceBuffer>& device) {
          std::vector<double> first;
          for (const char* config : {"split=1 columns=288", "split=2 columns=264", "split=4 columns=272",
                                     "split=1 columns=248", "split=2 columns=288", "split=4 columns=64"}) {
            SCOPED_TRACE(config);
            const Force force("cuda:sm90,sm90_tall_gradient(" + std::string(config) + ')');
            device.poison();
            expect_ok(device.grad_weight());
            const std::vector<double> found = decode(device.dvalues().download(), dtype);
            if (first.empty() || !spec.integers) expect_grad_weight(host, device);
            if (first.empty()) first = found;
            EXPECT_TRUE(!spec.integers || found == first);
          }
        };
        check_every_width(problem, gpu);
        check_every_width(other, in_place);
        gpu.hold_derived(4096);
        EXPECT_EQ(run(), made);
      }
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
        SCOPED_TRACE(std::string(name(activation)) + ' ' + text_of(problem.spec));
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
  for (const auto& [block, tokens] : {std::pair{64, 3}, {64, 13}, {32, 5}, {16, 16}}) {
    const Problem problem =
        make_problem({tokens, 5 * block, 9 * block, block, block, 0.6, DType::bf16, true, 0});
    ProblemIn<DeviceBuffer> gpu(problem);
    for (const int rows : {16, 32, 64}) {
      if (rows > block || (rows == 64 && tokens <= 8)) continue;
      for (const int warps : {4, 8}) {
        for (const int split : {1, 2, 4, 8}) {
          const int loads = split <= 2 && tokens <= 8 ? 16 : 8;
          const std::string config = "sm90_decode(rows=" + std::to_string(rows) +
                                     " warps=" + std::to_string(warps) + " split=" + std::to_string(split) +
                                     " loads=" + std::to_string(loads) +
                                     " late=" + std::to_string(rows / 16 % 2) + ')';
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
  Problem problem = make_problem({4, 1024, 1024, 32, 32, 0.5, DType::bf16, false, 0});
  for (double& value : problem.values) value /= 16;  // so that numbers neither grow nor vanish
  ProblemIn<DeviceBuffer> gpu(problem);
  const auto run = [&](const std::string& config, bool wait) {
    const Force force("cuda:sm90," + config);
    const DeviceBuffer first = DeviceBuffer::upload<std::byte>(encode(problem.x, DType::bf16)),
                       second(first.bytes());
    for (int layer = 0; layer < 64; ++layer) {
      const DeviceBuffer& from = layer % 2 == 0 ? first : second;
      const DeviceBuffer& to = layer % 2 == 0 ? second : first;
      expect_ok(linear({from.data(), DType::bf16, 4, 1024, 1024, Device::cuda}, gpu.weight(), gpu.bias(),
                       Activation::silu, {to.data(), DType::bf16, 4, 1024, 1024, Device::cuda}));
      if (wait) require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    return first.download();
  };
  for (const char* config : {"sm90_decode(late=0)", "sm90_decode(late=1)", "sm90_decode(loads=8 late=0)",
                             "sm90_decode(split=4 late=0)"}) {
    SCOPED_TRACE(config);
    EXPECT_EQ(run(config, false), run(config, true));
  }
}

// X in place and transposed first; every number of groups and tiles; ragged edges; more rows than a round.
TEST_F(Sm90Test, Tall) {
  for (const std::int64_t r : {64, 128, 192, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Layout x : kLayouts) {
        for (const Layout y : kLayouts) {
          for (const double density : {0.0, 0.3, 1.0}) {
            check({136, 4 * r - 8, 80, r, 1, density, dtype, true, 8, x, y}, "sm90_tall");
          }
          check({520, 3 * r - 24, 328, r, 1, 0.3, dtype, false, 8, x, y}, "sm90_tall");
          // TMA writes whole pieces of 16 bytes: tokens that end a row of Y come in eights.
          const bool by_token = x == Layout::by_token && y == Layout::by_token;
          check({by_token ? 1 : 8, 2 * r - 8, 40, r, 1, 0.5, dtype, true, 8, x, y}, "sm90_tall");
        }
      }
    }
  }
}

// A network of two such layers is its layers, bit for bit: hidden features are rounded between them.
TEST_F(Sm90Test, TallNetworks) {
  const Force force("cuda:sm90");
  const DeviceBuffer workspace(64 << 20);
  Context context;
  context.workspace = {workspace.data(), 64 << 20};
  for (const std::int64_t tokens : {1, 40, 301}) {
    for (const std::int64_t r : {64, 128}) {
      for (const Layout x : kLayouts) {
        if (x == Layout::by_feature && tokens % 8 != 0) continue;
        const Problem up = make_problem({tokens, 384, 136, r, 1, 0.4, DType::bf16, false, 0, x});
        const Problem down = make_problem({tokens, 200, 384, r, 1, 0.4, DType::bf16, false, 0}, 2);
        ProblemIn<DeviceBuffer> first(up), second(down);
        first.hold_derived(4096);
        second.hold_derived(4096);
        const auto rows = [&](const DeviceBuffer& out, std::int64_t cols) {
          return MutableMatrixView{out.data(), DType::bf16, tokens, cols, cols, Device::cuda};
        };
        const auto room = [&](std::int64_t cols) {
          DeviceBuffer buffer(static_cast<std::size_t>(tokens * cols * 2));
          buffer.fill(kPoison);  // initcheck does not see what TMA writes, and hidden is read
          return buffer;
        };
        const DeviceBuffer hidden = room(384), apart = room(200), together = room(200);
        expect_ok(linear(first.x_view(), first.weight(), first.bias(), Activation::gelu_erf,
                         rows(hidden, 384), context));
        expect_ok(linear(rows(hidden, 384), second.weight(), second.bias(), Activation::none,
                         rows(apart, 200), context));
        expect_ok(feed_forward(
            first.x_view(),
            {{first.weight(), first.bias()}, {second.weight(), second.bias()}, Activation::gelu_erf, {}},
            rows(together, 200), context));
        EXPECT_EQ(together.download(), apart.download()) << tokens << ' ' << r << ' ' << name(x);
      }
    }
  }
}

TEST_F(Sm90Test, TallOfManyTokens) {
  for (const std::int64_t tokens : {255, 257, 1281, 4100}) {
    check({tokens, 384, 96, 128, 1, 0.4, DType::bf16, true, 8}, "sm90_tall");
    check({tokens, 320, 96, 64, 1, 0.1, DType::bf16, true, 8}, "sm90_tall");
  }
  check({40000, 64, 32, 64, 1, 0.6, DType::bf16, true, 0}, "sm90_tall");
  check({600, 64 * 300, 64, 64, 1, 0.5, DType::f16, true, 0}, "sm90_tall");
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

// Blocks of every alignment move as on the host; sources out of range give zeros and read nothing.
TEST_F(CudaTest, BlocksMove) {
  for (const std::int64_t block : {1, 2, 6, 4, 12, 16, 1024}) {
    const std::int64_t before = 500, after = 700;
    std::vector<std::int64_t> source;
    for (std::int64_t i = 0; i < after; ++i)
      source.push_back(i % 7 == 3 ? -1 : i % 11 == 5 ? before + i : i / 2);
    std::vector<std::byte> from(static_cast<std::size_t>(before * block)), want;
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 37 % 251 + 1);
    for (const std::int64_t s : source) {
      for (std::int64_t b = 0; b < block; ++b) {
        want.push_back(s < 0 || s >= before ? std::byte{} : from[static_cast<std::size_t>(s * block + b)]);
      }
    }
    const DeviceBuffer on_from = DeviceBuffer::upload<std::byte>(from);
    const DeviceBuffer on_source = DeviceBuffer::upload<std::int64_t>(source);
    const DeviceBuffer to(want.size());
    expect_ok(move_device_blocks("test", static_cast<const std::byte*>(on_from.data()), before,
                                 static_cast<const std::int64_t*>(on_source.data()), after, block,
                                 static_cast<std::byte*>(to.data()), {}));
    EXPECT_EQ(to.download(), want) << block;
  }
}

// The plan that the device makes is the host's, word for word; so are the errors.
TEST_F(CudaTest, PlansAreBuiltOnTheDevice) {
  const auto build = [](const BsrShape& shape, const std::vector<std::int32_t>& crow,
                        const std::vector<std::int32_t>& col, std::vector<std::int32_t>* words) {
    const DeviceBuffer on_crow = DeviceBuffer::upload<std::int32_t>(crow);
    const DeviceBuffer on_col = DeviceBuffer::upload<std::int32_t>(col);
    const DeviceBuffer plan(static_cast<std::size_t>(plan_size(shape)) * sizeof(std::int32_t));
    const DeviceBuffer workspace(64 << 20);
    Context context;
    context.workspace = {workspace.data(), 64 << 20};
    const auto span = [](const DeviceBuffer& b) {
      return std::span(static_cast<std::int32_t*>(b.data()), b.bytes() / sizeof(std::int32_t));
    };
    const Status status = build_device_plan("test", shape, span(on_crow), span(on_col), span(plan), context);
    if (status.ok()) {
      const std::vector<std::byte> bytes = plan.download();
      words->resize(bytes.size() / sizeof(std::int32_t));
      std::memcpy(words->data(), bytes.data(), bytes.size());
    }
    return status;
  };
  for (const ProblemSpec& spec :
       {ProblemSpec{1, 300, 500, 4, 1, 0.3}, ProblemSpec{1, 5, 7, 2, 3, 1.0},
        ProblemSpec{1, 64, 64, 8, 8, 0.0}, ProblemSpec{1, 4096, 4096, 16, 16, 0.2}}) {
    const Problem problem = make_problem(spec);
    std::vector<std::int32_t> got;
    const auto to_vector = [](std::span<const std::int32_t> s) { return std::vector(s.begin(), s.end()); };
    expect_ok(build(problem.pattern.shape(), to_vector(problem.pattern.crow_indices()),
                    to_vector(problem.pattern.col_indices()), &got));
    EXPECT_EQ(got, to_vector(problem.pattern.plan())) << spec.n << 'x' << spec.k;
  }
  const BsrShape shape{6, 8, 2, 2, 5};
  const std::vector<std::int32_t> crow{0, 2, 2, 5}, col{1, 3, 0, 2, 3};
  std::vector<std::int32_t> unused;
  expect_ok(build(shape, crow, col, &unused));
  const auto same_error = [&](std::vector<std::int32_t> bad_crow, std::vector<std::int32_t> bad_col) {
    const Status host = check_indices("test", shape, bad_crow, bad_col);
    ASSERT_FALSE(host.ok());
    EXPECT_EQ(build(shape, bad_crow, bad_col, &unused).message(), host.message());
  };
  same_error({1, 2, 2, 5}, col);
  same_error({0, 3, 2, 5}, col);
  same_error({0, 2, 2, 4}, col);
  same_error({0, -2, 2, 5}, col);
  same_error({0, 2147483647, 2, 5}, col);
  same_error({0, 5, 5, 5}, col);
  same_error(crow, {1, 3, 0, 2, 4});
  same_error(crow, {1, 3, -1, 2, 3});
  same_error(crow, {1, 1, 0, 2, 3});
  same_error(crow, {1, 3, 0, 3, 2});
}

// Layers whose products make up what a family runs.
struct QueueLayer {
  const char *name, *family;
  ProblemSpec spec;
};

class CudaQueueTest : public CudaFamilyTest, public ::testing::WithParamInterface<QueueLayer> {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family(GetParam().family);
  }
  // Everything the products wrote, run on `stream`.
  std::vector<std::byte> run(ProblemIn<DeviceBuffer>& gpu, cudaStream_t stream) {
    gpu.poison();
    enqueue(gpu, stream);
    return results(gpu, stream);
  }
  void enqueue(ProblemIn<DeviceBuffer>& gpu, cudaStream_t stream) {
    if (takes(gpu, Op::linear, Activation::gelu_erf))
      expect_ok(gpu.linear(Activation::gelu_erf, true, stream));
    if (takes(gpu, Op::grad_input)) expect_ok(gpu.grad_input(stream));
    if (takes(gpu, Op::grad_weight)) expect_ok(gpu.grad_weight(stream));
  }
  static std::vector<std::byte> results(ProblemIn<DeviceBuffer>& gpu, cudaStream_t stream) {
    require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::vector<std::byte> all = gpu.y().download();
    for (Guarded<DeviceBuffer>* output : {&gpu.dx(), &gpu.dvalues()}) {
      const std::vector<std::byte> bytes = output->download();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Cuda, CudaQueueTest,
    ::testing::Values(QueueLayer{"simt", "simt", {300, 250, 270, 16, 16, 0.3, DType::bf16, false, 2}},
                      QueueLayer{"sm80", "sm80", {300, 248, 320, 32, 32, 0.3, DType::bf16, false, 8}},
                      QueueLayer{"sm80_float", "sm80", {300, 248, 320, 32, 64, 0.3, DType::f32, false, 8}},
                      QueueLayer{"sm90_squares", "sm90", {300, 248, 320, 64, 64, 0.3, DType::bf16, false, 8}},
                      QueueLayer{"sm90_tall", "sm90", {600, 376, 320, 128, 1, 0.3, DType::bf16, false, 8}},
                      QueueLayer{
                          "sm90_tall_pairs", "sm90", {600, 376, 320, 32, 1, 0.3, DType::bf16, false, 8}},
                      QueueLayer{"sm90_small", "sm90", {300, 248, 320, 16, 16, 0.2, DType::bf16, false, 8}},
                      QueueLayer{"sm90_decode", "sm90", {9, 256, 320, 32, 32, 0.3, DType::bf16, false, 8}}),
    [](const auto& tested) { return tested.param.name; });

// A stream that does not wait for the default one.
struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { require(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

TEST_P(CudaQueueTest, RepeatedRunsAreBitwiseEqual) {
  std::vector<ProblemSpec> specs{GetParam().spec};
  if (family_ == "simt") {
    for (const std::int64_t block : {1, 4, 32})
      specs.push_back({300, 250, 270, block, block, 0.3, DType::f32, false, 2});
  }
  for (const ProblemSpec& spec : specs) {
    const Problem problem = make_problem(spec);
    ProblemIn<DeviceBuffer> gpu = make(problem);
    const std::vector<std::byte> first = run(gpu, nullptr);
    for (int repeat = 0; repeat < 100; ++repeat) ASSERT_EQ(run(gpu, nullptr), first) << repeat;
  }
}

// The result of a token depends neither on the batch it is in nor on its place there: with simt and sm80,
// which have one kernel for all numbers of tokens, and with tall vectors.
TEST_P(CudaQueueTest, TokensDoNotDependOnTheBatch) {
  const std::string name = GetParam().name;
  const Problem problem = make_problem(GetParam().spec);
  if (name != "simt" && name != "sm80" && name != "sm80_float" && name != "sm90_tall" &&
      name != "sm90_tall_pairs") {
    taken_ = 1;
    return;
  }
  Problem one = problem;
  one.spec.m = 1;
  const std::int64_t token = 211;
  one.x.assign(problem.x.begin() + token * problem.x_stride(),
               problem.x.begin() + (token + 1) * problem.x_stride());
  ProblemIn<DeviceBuffer> batch = make(problem);
  ProblemIn<DeviceBuffer> single = make(one);
  ASSERT_TRUE(takes(batch, Op::linear) && takes(single, Op::linear));
  expect_ok(batch.linear(Activation::none));
  expect_ok(single.linear(Activation::none));
  const std::vector<std::byte> all = batch.y().download();
  const std::vector<std::byte> row = single.y().download();
  EXPECT_TRUE(
      std::equal(row.begin(), row.end(), all.begin() + token * static_cast<std::int64_t>(row.size())));
}

TEST_P(CudaQueueTest, OtherStream) {
  const Problem problem = make_problem(GetParam().spec);
  ProblemIn<DeviceBuffer> gpu = make(problem);
  const Stream stream;
  EXPECT_EQ(run(gpu, stream.handle), run(gpu, nullptr));
}

TEST_P(CudaQueueTest, GraphReplayEqualsEager) {
  const Problem problem = make_problem(GetParam().spec);
  ProblemIn<DeviceBuffer> gpu = make(problem);
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  // Captured before the first eager run: nothing of a launch may need a warm-up, but what callers hold.
  if (family_ != "simt") run(gpu, nullptr);
  require(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  enqueue(gpu, stream.handle);
  require(cudaStreamEndCapture(stream.handle, &graph), "cudaStreamEndCapture");
  require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    gpu.poison();
    require(cudaGraphLaunch(executable, stream.handle), "cudaGraphLaunch");
    const std::vector<std::byte> replayed = results(gpu, stream.handle);
    EXPECT_EQ(replayed, run(gpu, nullptr));
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

TEST_P(CudaQueueTest, SecondDevice) {
  int count = 0;
  require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count < 2) GTEST_SKIP() << "one NVIDIA GPU only";
  const Problem problem = make_problem(GetParam().spec);
  const auto run_on = [&](int device) {
    require(cudaSetDevice(device), "cudaSetDevice");
    ProblemIn<DeviceBuffer> gpu = make(problem);
    const Stream stream;
    return run(gpu, stream.handle);
  };
  const std::vector<std::byte> second = run_on(1);
  EXPECT_EQ(second, run_on(0));
}

TEST_F(CudaTest, KernelsAreChosen) {
  const BackendInfo info = backend_info();
  ASSERT_FALSE(info.cuda_devices.empty());
  const DeviceInfo& gpu = info.cuda_devices[0];
  EXPECT_NE(to_string(gpu).find(" (sm_"), std::string::npos) << to_string(gpu);
  EXPECT_GT(gpu.sms, 0);
  EXPECT_GT(gpu.shared_memory, 32 << 10);
  EXPECT_GT(gpu.bandwidth, 1e10);
  for (const Op op : kProducts) {
    for (const DType dtype : kDTypes) {
      const Explanation e = explain(make_problem(op, {16, 16, 16, 16, 1}, 64, dtype, Device::cuda));
      // The one kernel for such blocks that wants nothing derived of the weight.
      const bool sm90 = op == Op::grad_weight && size_of(dtype) == 2 && runs_sm90();
      const std::string family = size_of(dtype) == 2 && runs_sm80() ? "sm80_" : "simt_";
      EXPECT_EQ(e.kernel, sm90 ? "sm90_block_gradient" : family + std::string(name(op))) << to_string(e);
    }
  }
}

// The only test that wants no GPU: a launch that cannot happen is a status, nothing else.
TEST(CudaErrorTest, LaunchWithoutGpuIsAStatus) {
  const std::string reason = no_gpu();
  if (reason.empty()) GTEST_SKIP() << "there is an NVIDIA GPU";
  EXPECT_TRUE(backend_info().cuda_built);
  EXPECT_TRUE(backend_info().cuda_devices.empty());
  const Problem problem = make_problem({3, 4, 4, 2, 2, 1.0, DType::f32, true, 0});
  float y[12];  // never read or written: no kernel runs
  const MatrixView x{problem.x.data(), DType::f32, 3, 4, 4, Device::cuda};
  const BsrView w{problem.pattern.view(), problem.values.data(), DType::f32, Device::cuda};
  const Status status =
      rarefy::linear(x, w, nullptr, Activation::none, {y, DType::f32, 3, 4, 4, Device::cuda});
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_EQ(status.message().rfind("[linear] the CUDA kernel must launch; got cudaError", 0), 0U)
      << status.message();
}

TEST(CudaErrorTest, Int8IsRefused) {
  const Explanation e = explain(make_problem(Op::linear, {4, 4, 4, 4, 1}, 8, DType::i8, Device::cuda));
  EXPECT_EQ(e.kernel, "");
  EXPECT_NE(e.why_none.find("simt_linear: takes f64, f32, bf16 or f16; got i8"), std::string::npos)
      << e.why_none;
}

}  // namespace
}  // namespace rarefy::test
