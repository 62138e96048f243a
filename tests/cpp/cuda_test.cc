// The CUDA kernels against the host's products in double, and what a queue of GPU work needs beyond
// right numbers: streams, graphs, devices, repeatable bits, and errors without a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cuda_device.h"
#include "product_checks.h"

namespace rarefy::test {
namespace {

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

void check_products(const ProblemSpec& spec) {
  SCOPED_TRACE(::testing::Message() << name(spec.dtype) << " M=" << spec.m << " N=" << spec.n << " K="
                                    << spec.k << " block " << spec.block_rows << 'x' << spec.block_cols
                                    << " density " << spec.density << " stride " << spec.stride);
  const Problem problem = make_problem(spec);
  ProblemIn<DeviceBuffer> gpu(problem);
  expect_ok(gpu.linear(Activation::none));
  expect_ok(gpu.grad_input());
  expect_ok(gpu.grad_weight());
  expect_products(problem, gpu);
}

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

struct Blocks {
  std::int64_t rows, cols;
};

class CudaProductsTest : public CudaTest, public ::testing::WithParamInterface<Blocks> {};

TEST_P(CudaProductsTest, MatchHost) {
  const auto [rows, cols] = GetParam();
  for (const DType dtype : kDTypes) {
    for (const double density : {0.0, 0.3, 1.0}) {
      // N and K are no multiples of anything; with 2 block columns the last one is padded.
      check_products(
          {33, 5 * rows + rows / 2 + 1, 6 * cols + cols / 2 + 1, rows, cols, density, dtype, false, 3});
      check_products({1, 3 * rows, 2 * cols, rows, cols, density, dtype, true, 0});
      check_products({131, 9 * rows - rows / 3, 2 * cols - cols / 3, rows, cols, density, dtype, true, -1});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaProductsTest,
                         ::testing::Values(Blocks{1, 1}, Blocks{1, 7}, Blocks{7, 1}, Blocks{2, 2},
                                           Blocks{4, 1}, Blocks{4, 4}, Blocks{3, 5}, Blocks{8, 16},
                                           Blocks{16, 16}, Blocks{17, 33}, Blocks{32, 32}, Blocks{64, 64},
                                           Blocks{70, 130}),
                         [](const auto& tested) {
                           return std::to_string(tested.param.rows) + "x" + std::to_string(tested.param.cols);
                         });

using CudaProductTest = CudaTest;

TEST_F(CudaProductTest, BlockLargerThanTheMatrix) {
  for (const DType dtype : kDTypes) check_products({5, 7, 9, 40, 50, 1.0, dtype, true, 2});
}

TEST_F(CudaProductTest, LongSums) {
  for (const DType dtype : kDTypes) check_products({1030, 48, 2000, 16, 16, 0.5, dtype, false, 0});
}

TEST_F(CudaProductTest, MoreTokensThanTheGridIsHigh) {
  check_products({65535 * 64 + 70, 5, 2, 5, 1, 1.0, DType::f16, true, -1});
}

TEST_F(CudaProductTest, Activations) {
  for (const DType dtype : kDTypes) {
    for (const Activation activation :
         {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu}) {
      SCOPED_TRACE(::testing::Message() << name(activation) << ' ' << name(dtype));
      const ProblemSpec spec{65, 40, 50, 4, 4, 0.4, dtype, false, 1};
      const Problem problem = make_problem(spec);
      ProblemIn<DeviceBuffer> gpu(problem);
      expect_ok(gpu.linear(activation));
      expect_activation(problem, gpu, activation);
    }
  }
}

TEST_F(CudaProductTest, EmptyBatch) {
  const Problem problem = make_problem({0, 20, 30, 4, 4, 0.5, DType::f32, true, 0});
  ProblemIn<DeviceBuffer> gpu(problem);
  expect_ok(gpu.linear(Activation::none));
  expect_ok(gpu.grad_input());
  expect_ok(gpu.grad_weight());
  for (const double number : decode(gpu.dvalues().download(), DType::f32)) EXPECT_EQ(number, 0);
}

// A NaN in x reaches every y whose row has a block there, and nothing else; padding stays zero.
TEST_F(CudaProductTest, NanPassesThroughAndNotFurther) {
  for (const DType dtype : kDTypes) {
    SCOPED_TRACE(name(dtype));
    const ProblemSpec spec{40, 21, 22, 4, 5, 0.4, dtype, true, 0};
    Problem problem = make_problem(spec);
    problem.x[7 * 22 + 21] = std::numeric_limits<double>::quiet_NaN();  // token 7, in the padded block column
    problem.x[9 * 22 + 3] = std::numeric_limits<double>::infinity();
    problem.dy[11 * 21 + 20] = std::numeric_limits<double>::quiet_NaN();  // in the padded block row
    ProblemIn<DeviceBuffer> gpu(problem);
    expect_ok(gpu.linear(Activation::none));
    expect_ok(gpu.grad_input());
    expect_ok(gpu.grad_weight());
    expect_same_or_nan(problem, gpu);
  }
}

class CudaQueueTest : public CudaTest {
 protected:
  // Everything the three products wrote, run on `stream`.
  static std::vector<std::byte> run(ProblemIn<DeviceBuffer>& gpu, cudaStream_t stream) {
    gpu.poison();
    enqueue(gpu, stream);
    return results(gpu, stream);
  }
  static void enqueue(ProblemIn<DeviceBuffer>& gpu, cudaStream_t stream) {
    expect_ok(gpu.linear(Activation::gelu_erf, true, stream));
    expect_ok(gpu.grad_input(stream));
    expect_ok(gpu.grad_weight(stream));
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

constexpr ProblemSpec kLayer{300, 250, 270, 16, 16, 0.3, DType::bf16, false, 2};

// A stream that does not wait for the default one.
struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { require(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

TEST_F(CudaQueueTest, RepeatedRunsAreBitwiseEqual) {
  for (const std::int64_t block : {1, 4, 16, 32}) {
    const Problem problem = make_problem({300, 250, 270, block, block, 0.3, DType::f32, false, 2});
    ProblemIn<DeviceBuffer> gpu(problem);
    const std::vector<std::byte> first = run(gpu, nullptr);
    for (int repeat = 0; repeat < 100; ++repeat) ASSERT_EQ(run(gpu, nullptr), first) << repeat;
  }
}

// The result of a token depends neither on the batch it is in nor on its place there.
TEST_F(CudaQueueTest, TokensDoNotDependOnTheBatch) {
  const Problem problem = make_problem(kLayer);
  Problem one = problem;
  one.spec.m = 1;
  const std::int64_t token = 211;
  one.x.assign(problem.x.begin() + token * problem.x_stride(),
               problem.x.begin() + (token + 1) * problem.x_stride());
  ProblemIn<DeviceBuffer> batch(problem);
  ProblemIn<DeviceBuffer> single(one);
  expect_ok(batch.linear(Activation::none));
  expect_ok(single.linear(Activation::none));
  const std::vector<std::byte> all = batch.y().download();
  const std::vector<std::byte> row = single.y().download();
  EXPECT_TRUE(
      std::equal(row.begin(), row.end(), all.begin() + token * static_cast<std::int64_t>(row.size())));
}

TEST_F(CudaQueueTest, OtherStream) {
  const Problem problem = make_problem(kLayer);
  ProblemIn<DeviceBuffer> gpu(problem);
  const Stream stream;
  EXPECT_EQ(run(gpu, stream.handle), run(gpu, nullptr));
}

TEST_F(CudaQueueTest, GraphReplayEqualsEager) {
  const Problem problem = make_problem(kLayer);
  ProblemIn<DeviceBuffer> gpu(problem);
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  // Captured before the first eager run: nothing of a launch may need a warm-up.
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

TEST_F(CudaQueueTest, SecondDevice) {
  int count = 0;
  require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (count < 2) GTEST_SKIP() << "one NVIDIA GPU only";
  const Problem problem = make_problem(kLayer);
  const auto run_on = [&](int device) {
    require(cudaSetDevice(device), "cudaSetDevice");
    ProblemIn<DeviceBuffer> gpu(problem);
    const Stream stream;
    return run(gpu, stream.handle);
  };
  const std::vector<std::byte> second = run_on(1);
  EXPECT_EQ(second, run_on(0));
}

TEST_F(CudaQueueTest, KernelsAreChosen) {
  const BackendInfo info = backend_info();
  ASSERT_FALSE(info.cuda_devices.empty());
  const DeviceInfo& gpu = info.cuda_devices[0];
  EXPECT_NE(to_string(gpu).find(" (sm_"), std::string::npos) << to_string(gpu);
  EXPECT_GT(gpu.sms, 0);
  EXPECT_GT(gpu.shared_memory, 32 << 10);
  EXPECT_GT(gpu.bandwidth, 1e10);
  for (const Op op : kAllOps) {
    for (const DType dtype : kDTypes) {
      const Explanation e = explain(make_problem(op, {16, 16, 16, 16, 1}, 64, dtype, Device::cuda));
      EXPECT_EQ(e.kernel, "simt_" + std::string(name(op))) << to_string(e);
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
  EXPECT_NE(e.why_none.find("simt_linear: takes f64, f32, bf16 or f16; got i8"), std::string::npos) << e.why_none;
}

}  // namespace
}  // namespace rarefy::test
