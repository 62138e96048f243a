// Launch of the tall kernel for one element type; each type is a translation unit of its own.
#pragma once

#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tall.h"
#include "cuda/sm90/tall_kernel.cuh"

namespace rarefy::sm90 {

// after: the launch is behind a transpose, or a copy, that lets it start early.
template <class T, bool kActivates, TallTile kTile, bool kSingle>
cudaError_t launch_tall_tile(const TallConfig& c, int groups, bool after, const TallParams& params,
                             cudaStream_t stream) {
  const std::int64_t tiles = std::int64_t{groups} * params.halves * params.lists.token_tiles;
  return launch_kernel<tall_kernel<T, kActivates, kTile.rows, kTile.tokens, kTile.columns, kSingle>>(
      {.blocks = kSingle ? tiles * c.split : params.lists.clusters,
       .threads = kTile.threads(),
       .cluster = c.split,
       .shared_bytes = c.shared_bytes(),
       .early = after || c.split == 1},  // clusters alone were not measured so
      params, stream);
}

// The config's tile of those that are compiled.
template <class T, bool kActivates, bool kSingle, std::size_t i = 0>
cudaError_t launch_tall_tiles(const TallConfig& c, int groups, bool after, const TallParams& params,
                              cudaStream_t stream) {
  constexpr std::span kTiles = tall_tiles(kSingle);
  if constexpr (i == kTiles.size()) {
    return cudaErrorInvalidConfiguration;
  } else {
    return c.tile == kTiles[i]
               ? launch_tall_tile<T, kActivates, kTiles[i], kSingle>(c, groups, after, params, stream)
               : launch_tall_tiles<T, kActivates, kSingle, i + 1>(c, groups, after, params, stream);
  }
}

template <class T>
cudaError_t launch_tall_of(const TallConfig& c, int groups, bool after, const TallParams& params,
                           cudaStream_t stream) {
  return with_activations(params.activation, [&]<bool kActivates>() {
    return c.single() ? launch_tall_tiles<T, kActivates, true>(c, groups, after, params, stream)
                      : launch_tall_tiles<T, kActivates, false>(c, groups, after, params, stream);
  });
}

// One per translation unit.
cudaError_t launch_tall_bf16(const TallConfig&, int groups, bool after, const TallParams&, cudaStream_t);
cudaError_t launch_tall_f16(const TallConfig&, int groups, bool after, const TallParams&, cudaStream_t);

}  // namespace rarefy::sm90
