// Launch of the strip kernel for one element type; each type and direction is a translation unit of its own.
#pragma once

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/strip_kernel.cuh"
#include "cuda/sm90/strips.h"

namespace rarefy::sm90 {

template <class T, bool kTransposed, bool kActivates, int kStrips, int kTokens, int kCluster, bool kWhole,
          bool kParts = false>
cudaError_t launch_strips(const StripConfig& config, int clusters, const StripParams& params,
                          cudaStream_t stream) {
  const int cluster = kCluster * params.split;
  return launch_kernel<strip_kernel<T, kTransposed, kActivates, kStrips, kTokens, kCluster, kWhole, kParts>>(
      {clusters * cluster, StripShape<kStrips, kTokens>::kThreads, cluster, config.shared_bytes()}, params,
      stream);
}

// The tile shapes that are compiled; strip_candidates lists the same.
template <class T, bool kTransposed, bool kActivates>
cudaError_t launch_shape(const StripConfig& c, int clusters, const StripParams& params, cudaStream_t stream) {
  const auto is = [&](int strips, int tokens, int cluster) {
    return c.strips == strips && c.tokens == tokens && c.cluster == cluster;
  };
  const auto launch_wide = [&](auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    if (c.tokens == 192)
      return launch_strips<T, kTransposed, kActivates, 2, 192, 1, kWhole>(c, clusters, params, stream);
    if (c.tokens == 128)
      return launch_strips<T, kTransposed, kActivates, 2, 128, 1, kWhole>(c, clusters, params, stream);
    if (c.tokens == 64)
      return launch_strips<T, kTransposed, kActivates, 2, 64, 1, kWhole>(c, clusters, params, stream);
    return c.cluster == 1
               ? launch_strips<T, kTransposed, kActivates, 2, 256, 1, kWhole>(c, clusters, params, stream)
               : launch_strips<T, kTransposed, kActivates, 2, 256, 2, kWhole>(c, clusters, params, stream);
  };
  if (c.split > 1) {
    const auto launch_parts = [&]<int kStrips, int kTokens>() {
      return launch_strips<T, kTransposed, kActivates, kStrips, kTokens, 1, false, true>(c, clusters, params,
                                                                                         stream);
    };
    if (is(2, 256, 1)) return launch_parts.template operator()<2, 256>();
    if (is(3, 256, 1)) return launch_parts.template operator()<3, 256>();
    if (is(2, 128, 1)) return launch_parts.template operator()<2, 128>();
    if (is(3, 128, 1)) return launch_parts.template operator()<3, 128>();
    if (is(2, 64, 1)) return launch_parts.template operator()<2, 64>();
    if (is(3, 64, 1)) return launch_parts.template operator()<3, 64>();
    return cudaErrorInvalidConfiguration;
  }
  if (is(2, 256, 1) || is(2, 256, 2) || is(2, 192, 1) || is(2, 128, 1) || is(2, 64, 1))
    return params.whole ? launch_wide(std::true_type{}) : launch_wide(std::false_type{});
  if (is(3, 256, 1))
    return launch_strips<T, kTransposed, kActivates, 3, 256, 1, false>(c, clusters, params, stream);
  if (is(3, 192, 1))
    return launch_strips<T, kTransposed, kActivates, 3, 192, 1, false>(c, clusters, params, stream);
  if (is(3, 128, 1))
    return launch_strips<T, kTransposed, kActivates, 3, 128, 1, false>(c, clusters, params, stream);
  if (is(3, 64, 1))
    return launch_strips<T, kTransposed, kActivates, 3, 64, 1, false>(c, clusters, params, stream);
  return cudaErrorInvalidConfiguration;
}

template <class T, bool kTransposed>
cudaError_t launch_strips_of(const StripConfig& config, int clusters, const StripParams& params,
                             cudaStream_t stream) {
  return with_activations(params.activation, [&]<bool kActivates>() {
    if constexpr (kTransposed && kActivates) {
      return cudaErrorInvalidValue;
    } else {
      return launch_shape<T, kTransposed, kActivates>(config, clusters, params, stream);
    }
  });
}

// One per translation unit.
cudaError_t launch_linear_bf16(const StripConfig&, int clusters, const StripParams&, cudaStream_t);
cudaError_t launch_linear_f16(const StripConfig&, int clusters, const StripParams&, cudaStream_t);
cudaError_t launch_grad_input_bf16(const StripConfig&, int clusters, const StripParams&, cudaStream_t);
cudaError_t launch_grad_input_f16(const StripConfig&, int clusters, const StripParams&, cudaStream_t);

}  // namespace rarefy::sm90
