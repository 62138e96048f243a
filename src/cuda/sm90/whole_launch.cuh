// Launch of the dense product for one element type; each type is a translation unit of its own.
#pragma once

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/whole.h"
#include "cuda/sm90/whole_kernel.cuh"

namespace rarefy::sm90 {

// Of X by feature there are no parts and no tiles for few tokens: whoever has these turns them. Widths
// between are for X by token, in whole tiles, without an activation (a megabyte of kernels).
template <class T, Major kMajorW, bool kActivates>
cudaError_t launch_whole_shape(Major x, const WholeConfig& c, int blocks, const WholeParams& params,
                               cudaStream_t stream) {
  const auto launch = [&]<Major kMajorX, int kTokens, bool kSingle, int kFeatures = 128>() {
    return launch_kernel<whole_kernel<T, kMajorW, kMajorX, kActivates, kFeatures, kTokens, kSingle>>(
        {blocks, WholeShape<kFeatures, kTokens>::kThreads, c.split, c.shared_bytes()}, params, stream);
  };
  constexpr int kWide = WholeConfig::kWide, kHalf = WholeConfig::kHalf;
  const bool wide = c.tokens == kWide;
  if (x == Major::mn) {
    if (c.single()) return cudaErrorInvalidConfiguration;
    return wide ? launch.template operator()<Major::mn, kWide, false>()
                : launch.template operator()<Major::mn, kHalf, false>();
  }
  if (c.features == 64) {
    return c.tokens == WholeConfig::kFew ? launch.template operator()<Major::k, WholeConfig::kFew, true, 64>()
                                         : launch.template operator()<Major::k, kHalf, true, 64>();
  }
  if (c.split > 1) {
    return wide ? launch.template operator()<Major::k, kWide, true>()
                : launch.template operator()<Major::k, kHalf, true>();
  }
  if (wide) return launch.template operator()<Major::k, kWide, false>();
  if (c.tokens == kHalf) return launch.template operator()<Major::k, kHalf, false>();
  if constexpr (!kActivates) {
    if (c.tokens == 208) return launch.template operator()<Major::k, 208, false>();
    if (c.tokens == 192) return launch.template operator()<Major::k, 192, false>();
    if (c.tokens == 160) return launch.template operator()<Major::k, 160, false>();
  }
  return cudaErrorInvalidConfiguration;
}

template <class T, Major kMajorW>
cudaError_t launch_whole_of(Major x, const WholeConfig& config, int blocks, const WholeParams& params,
                            cudaStream_t stream) {
  return with_activations(params.activation, [&]<bool kActivates>() {
    return launch_whole_shape<T, kMajorW, kActivates>(x, config, blocks, params, stream);
  });
}

// One per translation unit.
cudaError_t launch_whole_bf16(Major w, Major x, const WholeConfig&, int blocks, const WholeParams&,
                              cudaStream_t);
cudaError_t launch_whole_f16(Major w, Major x, const WholeConfig&, int blocks, const WholeParams&,
                             cudaStream_t);

}  // namespace rarefy::sm90
