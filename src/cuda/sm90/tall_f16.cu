// The tall kernel: f16.
#include "cuda/sm90/tall_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_tall_f16(const TallConfig& config, int groups, bool after, const TallParams& params,
                            cudaStream_t stream) {
  return launch_tall_of<__half>(config, groups, after, params, stream);
}

}  // namespace rarefy::sm90
