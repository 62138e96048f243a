// Launches of the kernel of the tall vectors' weight gradient; what tiles of pairs have in a file of their
// own.
#pragma once

#include <algorithm>

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tall_gradient_kernel.cuh"

namespace rarefy::sm90 {

// What X is gathered from: itself, by feature; what another kernel has made of it; or what that one has
// begun.
enum class Gathered { itself, transposed, turned };

template <class T, int kRows, int kSplit, int kPairs, TallSteps kKind>
cudaError_t launch_tiles(const TallGradientConfig& config, const TallGradientParams& params, Gathered x,
                         cudaStream_t stream) {
  constexpr int kCluster = kPairs > 0 ? kPairs : kSplit;
  const int turners = params.turn.turners;
  return launch_kernel<tall_gradient_kernel<T, kRows, kSplit, kPairs, kKind>>(
      {.blocks = std::int64_t{params.lists.clusters} * kCluster,
       .threads = TallGradientShape<kRows, kPairs, kKind>::kThreads,
       .cluster = kCluster,
       .shared_bytes = std::max(config.shared_bytes(), turners > 0 ? 1024 + int{LastTokens::kAll} : 0),
       .early = kCluster == 1 || x != Gathered::itself},  // while X is being turned
      params, stream);
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
