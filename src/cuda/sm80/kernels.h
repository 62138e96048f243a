// The sm80 family's kernels, host side: mma.sync on what cp.async brings, for bf16 and f16, blocks whose
// sides are multiples of 16, matrices by token. Nothing is derived of a weight.
#pragma once

#include <cuda_runtime_api.h>

#include "core/registry.h"

namespace rarefy::cuda::sm80 {

void add_rows(Registry& registry);

cudaError_t launch_product(const Call& call);   // linear and grad_input
cudaError_t launch_gradient(const Call& call);  // grad_weight

}  // namespace rarefy::cuda::sm80
