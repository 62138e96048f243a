// The CUDA back end in the registry: what its kernels accept, and what a failed launch says.
#include <cuda_runtime_api.h>

#include "core/message.h"
#include "core/registry.h"
#include "cuda/kernels.h"

namespace rarefy {
namespace {

bool is_float(DType dtype) { return dtype != DType::i8; }

Status launch_status(Op op, cudaError_t launched) {
  if (launched == cudaSuccess) return {};
  cudaGetLastError();  // it is reported here: not once more by the caller's next CUDA call
  const auto code = [&] {
    switch (launched) {
      case cudaErrorNoDevice:
      case cudaErrorInsufficientDriver:
      case cudaErrorNoKernelImageForDevice: return StatusCode::unsupported;
      case cudaErrorMemoryAllocation: return StatusCode::out_of_memory;
      default: return StatusCode::internal;
    }
  }();
  return error(code, name(op), "the CUDA kernel must launch",
               cat(cudaGetErrorName(launched), ": ", cudaGetErrorString(launched)));
}

// What the registry calls for one product.
template <Op op, auto launch, class Args>
Status run(const Args& args, const Context& context) {
  return launch_status(op, launch(args, static_cast<cudaStream_t>(context.stream)));
}

}  // namespace

void register_cuda(Registry& registry) {
  registry.linear.push_back({"cuda", "cuda_linear", Device::cuda,
                             [](const LinearArgs& args) { return is_float(args.w.dtype); },
                             run<Op::linear, cuda::launch_linear, LinearArgs>});
  registry.grad_input.push_back({"cuda", "cuda_grad_input", Device::cuda,
                                 [](const GradInputArgs& args) { return is_float(args.w.dtype); },
                                 run<Op::grad_input, cuda::launch_grad_input, GradInputArgs>});
  registry.grad_weight.push_back({"cuda", "cuda_grad_weight", Device::cuda,
                                  [](const GradWeightArgs& args) { return is_float(args.dtype); },
                                  run<Op::grad_weight, cuda::launch_grad_weight, GradWeightArgs>});
}

bool cuda_built() { return true; }

// Initialises the driver, after which a forked child cannot use CUDA: not for the time of an import.
std::vector<std::string> cuda_devices() {
  std::vector<std::string> devices;
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);  // fails without a driver, a GPU or permission
  for (int device = 0; status == cudaSuccess && device < count; ++device) {
    cudaDeviceProp properties{};
    status = cudaGetDeviceProperties(&properties, device);
    if (status == cudaSuccess) {
      devices.push_back(cat(properties.name, " (sm_", properties.major, properties.minor, ')'));
    }
  }
  if (status != cudaSuccess) cudaGetLastError();
  return devices;
}

}  // namespace rarefy
