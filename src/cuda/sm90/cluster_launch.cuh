// What launches share: clusters of thread blocks, and an instantiation for each activation.
#pragma once

#include "cuda/shared_limit.h"
#include "cuda/sm90/tile/activation.cuh"
#include "rarefy/activation.h"

namespace rarefy::sm90 {

struct ClusterLaunch {
  int blocks = 0, threads = 0;
  int cluster = 1;  // blocks of a cluster
  int shared_bytes = 0;
};

// Without clusters it may start while the kernel before it ends, as kKernel begins behind that one
// (begin_behind_kernels). Clusters that start so lie badly among those that end: 512 tokens in parts took 3
// µs more.
template <auto kKernel, class Params>
cudaError_t launch_clusters(const ClusterLaunch& of, const Params& params, cudaStream_t stream) {
  static cuda::SharedLimit limit;
  const cudaError_t status = limit.allow(kKernel, of.shared_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute{};
  if (of.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(of.cluster), 1, 1};
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(of.blocks));
  launch.blockDim = dim3(static_cast<unsigned>(of.threads));
  launch.dynamicSmemBytes = static_cast<std::size_t>(of.shared_bytes);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, kKernel, params);
}

// f<activation>(), which returns a cudaError_t.
template <class F>
cudaError_t with_activation(rarefy::Activation activation, const F& f) {
  static_assert(kActivations == 5);
  switch (static_cast<device::Activation>(activation)) {
    case Activation::none: return f.template operator()<Activation::none>();
    case Activation::relu: return f.template operator()<Activation::relu>();
    case Activation::gelu_erf: return f.template operator()<Activation::gelu_erf>();
    case Activation::gelu_tanh: return f.template operator()<Activation::gelu_tanh>();
    case Activation::silu: return f.template operator()<Activation::silu>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace rarefy::sm90
