// The three products on the device: each queues one kernel on `stream`, which waits for nothing and
// allocates nothing, and returns what the launch returned.
#pragma once

#include <cuda_runtime_api.h>

#include "core/registry.h"

namespace rarefy::cuda {

cudaError_t launch_linear(const LinearArgs& args, cudaStream_t stream);
cudaError_t launch_grad_input(const GradInputArgs& args, cudaStream_t stream);
cudaError_t launch_grad_weight(const GradWeightArgs& args, cudaStream_t stream);

}  // namespace rarefy::cuda
