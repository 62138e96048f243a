// Launches of the kernel of the tall vectors' weight gradient; what tiles of pairs have in a file of their
// own.
#pragma once

#include "cuda/shared_limit.h"
#include "cuda/sm90/tall_gradient_kernel.cuh"

namespace rarefy::sm90 {

// What X is gathered from: itself, by feature; what another kernel has made of it; or what that one has
// begun.
enum class Gathered { itself, transposed, turned };

template <class T, int kRows, int kSplit, int kPairs, bool kTurns>
cudaError_t launch_kernel(const TallGradientConfig& config, const TallGradientParams& params, Gathered x,
                          cudaStream_t stream) {
  const auto kernel = tall_gradient_kernel<T, kRows, kSplit, kPairs, kTurns>;
  static cuda::SharedLimit limit;
  const cudaError_t status = limit.allow(kernel, config.shared_bytes());
  if (status != cudaSuccess) return status;
  constexpr unsigned kCluster = kPairs > 0 ? kPairs : kSplit;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // while X is being turned
  attributes[0].val.programmaticStreamSerializationAllowed = x == Gathered::itself ? 0 : 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(params.lists.clusters) * kCluster);
  launch.blockDim = dim3(TallGradientShape<kRows, kPairs, kTurns>::kThreads);
  launch.dynamicSmemBytes = static_cast<std::size_t>(config.shared_bytes());
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = kCluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

// Tiles of pairs of rows: what of the plan they alone have, and their kernel.
cudaError_t prepare_pairs(const TallGradientProblem& problem, const TallGradientConfig& config,
                          const std::int32_t* crow, const std::int32_t* col, std::int32_t* words,
                          cudaStream_t stream);
template <class T>
cudaError_t launch_pairs(const TallGradientConfig& config, const TallGradientParams& params, Gathered x,
                         cudaStream_t stream);
extern template cudaError_t launch_pairs<__half>(const TallGradientConfig&, const TallGradientParams&,
                                                 Gathered, cudaStream_t);
extern template cudaError_t launch_pairs<__nv_bfloat16>(const TallGradientConfig&, const TallGradientParams&,
                                                        Gathered, cudaStream_t);

}  // namespace rarefy::sm90
