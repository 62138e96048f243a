// Launch of the union kernel for one element type; each type is a translation unit of its own.
#pragma once

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/union_kernel.cuh"
#include "cuda/sm90/unions.h"

namespace rarefy::sm90 {

// The tile shapes that are compiled; union_candidates lists the same.
template <class T, bool kActivates>
cudaError_t launch_union_shape(const UnionConfig& c, int blocks, const UnionParams& params,
                               cudaStream_t stream) {
  const auto is = [&](int strips, int tokens) { return c.strips == strips && c.tokens == tokens; };
  const auto run_parts = [&]<int kStrips, int kTokens, bool kParts, int kPair = 1>() {
    return launch_kernel<union_kernel<T, kActivates, kStrips, kTokens, kParts, kPair>>(
        {blocks, StripShape<kStrips, kTokens>::kThreads, c.split * c.pair, c.shared_bytes()}, params, stream);
  };
  const auto run = [&]<int kStrips, int kTokens>() {
    return c.split > 1 ? run_parts.template operator()<kStrips, kTokens, true>()
                       : run_parts.template operator()<kStrips, kTokens, false>();
  };
  if (c.pair == 2) {
    if (!is(3, 256) || c.split > 1) return cudaErrorInvalidConfiguration;
    return run_parts.template operator()<3, 256, false, 2>();
  }
  if (is(2, 256)) return run.template operator()<2, 256>();
  if (is(3, 256)) return run.template operator()<3, 256>();
  if (is(2, 128)) return run.template operator()<2, 128>();
  if (is(3, 128)) return run.template operator()<3, 128>();
  if constexpr (!std::is_same_v<T, float>) {  // of 192 tokens there are no parts (parts_fit)
    if (is(2, 192)) return run_parts.template operator()<2, 192, false>();
    if (is(3, 192)) return run_parts.template operator()<3, 192, false>();
    if (is(2, 64)) return run.template operator()<2, 64>();
    if (is(3, 64)) return run.template operator()<3, 64>();
  }
  return cudaErrorInvalidConfiguration;
}

template <class T>
cudaError_t launch_union_of(const UnionConfig& config, int blocks, const UnionParams& params,
                            cudaStream_t stream) {
  return with_activations(params.activation, [&]<bool kActivates>() {
    return launch_union_shape<T, kActivates>(config, blocks, params, stream);
  });
}

// One per translation unit.
cudaError_t launch_union_bf16(const UnionConfig&, int blocks, const UnionParams&, cudaStream_t);
cudaError_t launch_union_f16(const UnionConfig&, int blocks, const UnionParams&, cudaStream_t);
cudaError_t launch_union_tf32(const UnionConfig&, int blocks, const UnionParams&, cudaStream_t);

}  // namespace rarefy::sm90
