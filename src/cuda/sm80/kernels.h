// The sm80 family's kernels, host side, on what cp.async brings: mma.sync for bf16 and f16, blocks whose
// sides are multiples of 16; true f32, multiples of 32. Matrices by token. Nothing is derived of a weight.
#pragma once

#include <cuda_runtime_api.h>

#include "core/registry.h"

namespace rarefy::cuda::sm80 {

void add_rows(Registry& registry);

cudaError_t launch_product(const Call& call);   // linear and grad_input
cudaError_t launch_gradient(const Call& call);  // grad_weight
cudaError_t launch_float_product(const Call& call);
// `shares` of the tokens, each summed for itself; more than one want workspace for as many values.
cudaError_t launch_float_gradient(const Call& call, int shares);

}  // namespace rarefy::cuda::sm80
