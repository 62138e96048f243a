// What CUDA wants beyond right numbers: data that move and plans that are made on the device, streams,
// graphs, devices, repeatable bits, which kernel is chosen, and errors without a GPU.
#include <gtest/gtest.h>

#include "core/move_blocks.h"
#include "cuda_checks.h"

namespace rarefy::test {
namespace {

constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

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
  const char* kernel = "";  // of linear, whatever is chosen for so small a layer
};

class CudaQueueTest : public CudaFamilyTest, public ::testing::WithParamInterface<QueueLayer> {
 protected:
  void SetUp() override {
    CudaFamilyTest::SetUp();
    set_family(GetParam().family);
    const std::string kernel = GetParam().kernel;
    if (!IsSkipped() && !kernel.empty()) force_.emplace("cuda:" + family_ + ',' + kernel + "()");
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
    ::testing::Values(
        QueueLayer{"simt", "simt", {300, 250, 270, 16, 16, 0.3, DType::bf16, false, 2}},
        QueueLayer{"sm80", "sm80", {300, 248, 320, 32, 32, 0.3, DType::bf16, false, 8}},
        QueueLayer{"sm80_float", "sm80", {300, 248, 320, 32, 64, 0.3, DType::f32, false, 8}},
        QueueLayer{"sm90_squares", "sm90", {300, 248, 320, 64, 64, 0.3, DType::bf16, false, 8}},
        QueueLayer{"sm90_tall", "sm90", {600, 376, 320, 128, 1, 0.3, DType::bf16, false, 8}, "sm90_tall"},
        QueueLayer{"sm90_tall_packed",
                   "sm90",
                   {600, 376, 320, 32, 1, 0.3, DType::bf16, false, 8},
                   "sm90_tall_packed"},
        QueueLayer{"sm90_small", "sm90", {300, 248, 320, 16, 16, 0.2, DType::bf16, false, 8}},
        QueueLayer{"sm90_decode", "sm90", {9, 256, 320, 32, 32, 0.3, DType::bf16, false, 8}},
        QueueLayer{"sm90_tall_decode", "sm90", {9, 256, 320, 32, 1, 0.3, DType::bf16, false, 8}}),
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

// The result of a token depends neither on the batch it is in nor on its place there: with simt, among more
// than 16, sm80, which has one kernel for all numbers of tokens, and with tall vectors.
TEST_P(CudaQueueTest, TokensDoNotDependOnTheBatch) {
  const std::string name = GetParam().name;
  const Problem problem = make_problem(GetParam().spec);
  if (name != "simt" && name != "sm80" && name != "sm80_float" && name != "sm90_tall" &&
      name != "sm90_tall_packed") {
    taken_ = 1;
    return;
  }
  Problem one = problem;
  one.spec.m = 17;
  const std::int64_t token = 211;
  one.x.assign(problem.x.begin() + token * problem.x_stride(),
               problem.x.begin() + (token + one.spec.m) * problem.x_stride());
  ProblemIn<DeviceBuffer> batch = make(problem);
  ProblemIn<DeviceBuffer> single = make(one);
  ASSERT_TRUE(takes(batch, Op::linear) && takes(single, Op::linear));
  expect_ok(batch.linear(Activation::none));
  expect_ok(single.linear(Activation::none));
  const std::vector<std::byte> all = batch.y().download();
  const std::vector<std::byte> row = single.y().download();
  const std::int64_t bytes = static_cast<std::int64_t>(row.size()) / one.spec.m;
  EXPECT_TRUE(std::equal(row.begin(), row.end(), all.begin() + token * bytes));
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
  const Problem problem = make_problem({1, 4, 4, 2, 2, 1.0, DType::f32, true, 0});
  float y[4];  // never read or written: no kernel runs
  const MatrixView x{problem.x.data(), DType::f32, 1, 4, 4, Device::cuda};
  const BsrView w{problem.pattern.view(), problem.values.data(), DType::f32, Device::cuda};
  const Status status =
      rarefy::linear(x, w, nullptr, Activation::none, {y, DType::f32, 1, 4, 4, Device::cuda});
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
