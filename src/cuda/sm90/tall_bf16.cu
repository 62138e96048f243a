// The tall kernel: bf16.
#include "cuda/sm90/tall_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_tall_bf16(const TallConfig& config, int groups, bool after, const TallParams& params,
                             cudaStream_t stream) {
  return launch_tall_of<__nv_bfloat16>(config, groups, after, params, stream);
}

}  // namespace rarefy::sm90
