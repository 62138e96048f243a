// What launches share: shared memory, early starts, clusters of thread blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/shared_limit.h"

namespace rarefy::sm90 {

struct KernelLaunch {
  std::int64_t blocks = 0;
  int threads = 0;
  int cluster = 1;  // blocks of a cluster
  int shared_bytes = 0;
  // It may start while the kernel before it ends: what it does not wait for (wait_for_kernels) is what was
  // prepared of the pattern alone.
  bool early = true;
};

template <auto kKernel, class Params>
cudaError_t launch_kernel(const KernelLaunch& of, const Params& params, cudaStream_t stream) {
  static cuda::SharedLimit limit;
  const cudaError_t status = limit.allow(kKernel, of.shared_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t launch{};
  if (of.early) {
    cudaLaunchAttribute& early = attributes[launch.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (of.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[launch.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(of.cluster), 1, 1};
  }
  launch.gridDim = dim3(static_cast<unsigned>(of.blocks));
  launch.blockDim = dim3(static_cast<unsigned>(of.threads));
  launch.dynamicSmemBytes = static_cast<std::size_t>(of.shared_bytes);
  launch.stream = stream;
  launch.attrs = attributes;
  return cudaLaunchKernelEx(&launch, kKernel, params);
}

}  // namespace rarefy::sm90
