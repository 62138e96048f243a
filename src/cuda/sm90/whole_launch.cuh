// Launch of the dense product for one element type; each type is a translation unit of its own.
#pragma once

#include <algorithm>

#include "cuda/shared_limit.h"
#include "cuda/sm90/whole.h"
#include "cuda/sm90/whole_kernel.cuh"

namespace rarefy::sm90 {

template <class T, Major kMajorW, Major kMajorX, Activation kActivation, int kTokens, bool kParts>
cudaError_t launch_whole_as(const WholeConfig& config, int blocks, const WholeParams& params,
                            cudaStream_t stream) {
  const auto kernel = whole_kernel<T, kMajorW, kMajorX, kActivation, kTokens, kParts>;
  static cuda::SharedLimit limit;
  const cudaError_t status = limit.allow(kernel, config.shared_bytes());
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(config.split), 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(WholeShape<kTokens>::kThreads);
  launch.dynamicSmemBytes = static_cast<std::size_t>(config.shared_bytes());
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = config.split > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

// Of X by feature there are no parts: whoever has few tokens turns them.
template <class T, Major kMajorW, Activation kActivation>
cudaError_t launch_whole_shape(Major x, const WholeConfig& c, int blocks, const WholeParams& params,
                               cudaStream_t stream) {
  const auto launch = [&]<Major kMajorX, int kTokens, bool kParts>() {
    return launch_whole_as<T, kMajorW, kMajorX, kActivation, kTokens, kParts>(c, blocks, params, stream);
  };
  const bool wide = c.tokens == 256;
  if (x == Major::mn) {
    if (c.split > 1) return cudaErrorInvalidConfiguration;
    return wide ? launch.template operator()<Major::mn, 256, false>()
                : launch.template operator()<Major::mn, 128, false>();
  }
  if (c.split > 1) {
    return wide ? launch.template operator()<Major::k, 256, true>()
                : launch.template operator()<Major::k, 128, true>();
  }
  return wide ? launch.template operator()<Major::k, 256, false>()
              : launch.template operator()<Major::k, 128, false>();
}

template <class T, Major kMajorW>
cudaError_t launch_whole_of(Major x, Activation activation, const WholeConfig& config, int blocks,
                            const WholeParams& params, cudaStream_t stream) {
  const auto launch = [&]<Activation kActivation>() {
    return launch_whole_shape<T, kMajorW, kActivation>(x, config, blocks, params, stream);
  };
  switch (activation) {
    case Activation::none: return launch.template operator()<Activation::none>();
    case Activation::relu: return launch.template operator()<Activation::relu>();
    case Activation::gelu_erf: return launch.template operator()<Activation::gelu_erf>();
    case Activation::gelu_tanh: return launch.template operator()<Activation::gelu_tanh>();
    case Activation::silu: return launch.template operator()<Activation::silu>();
  }
  return cudaErrorInvalidValue;
}

// One per translation unit.
cudaError_t launch_whole_bf16(Major w, Major x, Activation, const WholeConfig&, int blocks,
                              const WholeParams&, cudaStream_t);
cudaError_t launch_whole_f16(Major w, Major x, Activation, const WholeConfig&, int blocks, const WholeParams&,
                             cudaStream_t);

}  // namespace rarefy::sm90
