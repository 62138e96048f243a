// Launch of the union kernel for one element type; each type is a translation unit of its own.
#pragma once

#include "cuda/shared_limit.h"
#include "cuda/sm90/union_kernel.cuh"
#include "cuda/sm90/unions.h"

namespace rarefy::sm90 {

// The tile shapes that are compiled; union_candidates lists the same.
template <class T, Activation kActivation>
cudaError_t launch_union_shape(const UnionConfig& c, int blocks, const UnionParams& params,
                               cudaStream_t stream) {
  const auto is = [&](int strips, int tokens) { return c.strips == strips && c.tokens == tokens; };
  const auto run_parts = [&]<int kStrips, int kTokens, bool kParts>() {
    const auto kernel = union_kernel<T, kActivation, kStrips, kTokens, kParts>;
    static cuda::SharedLimit limit;
    const cudaError_t status = limit.allow(kernel, c.shared_bytes());
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(c.split), 1, 1};
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(static_cast<unsigned>(blocks));
    launch.blockDim = dim3(StripShape<kStrips, kTokens>::kThreads);
    launch.dynamicSmemBytes = static_cast<std::size_t>(c.shared_bytes());
    launch.stream = stream;
    launch.attrs = &cluster;
    launch.numAttrs = c.split > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&launch, kernel, params);
  };
  const auto run = [&]<int kStrips, int kTokens>() {
    return c.split > 1 ? run_parts.template operator()<kStrips, kTokens, true>()
                       : run_parts.template operator()<kStrips, kTokens, false>();
  };
  if (is(2, 256)) return run.template operator()<2, 256>();
  if (is(3, 256)) return run.template operator()<3, 256>();
  if (is(2, 128)) return run.template operator()<2, 128>();
  if (is(3, 128)) return run.template operator()<3, 128>();
  return cudaErrorInvalidConfiguration;
}

template <class T>
cudaError_t launch_union_of(Activation activation, const UnionConfig& config, int blocks,
                            const UnionParams& params, cudaStream_t stream) {
  switch (activation) {
    case Activation::none: return launch_union_shape<T, Activation::none>(config, blocks, params, stream);
    case Activation::relu: return launch_union_shape<T, Activation::relu>(config, blocks, params, stream);
    case Activation::gelu_erf:
      return launch_union_shape<T, Activation::gelu_erf>(config, blocks, params, stream);
    case Activation::gelu_tanh:
      return launch_union_shape<T, Activation::gelu_tanh>(config, blocks, params, stream);
    case Activation::silu: return launch_union_shape<T, Activation::silu>(config, blocks, params, stream);
  }
  return cudaErrorInvalidValue;
}

// One per translation unit.
cudaError_t launch_union_bf16(device::Activation, const UnionConfig&, int blocks, const UnionParams&,
                              cudaStream_t);
cudaError_t launch_union_f16(device::Activation, const UnionConfig&, int blocks, const UnionParams&,
                             cudaStream_t);
cudaError_t launch_union_tf32(device::Activation, const UnionConfig&, int blocks, const UnionParams&,
                              cudaStream_t);

}  // namespace rarefy::sm90
