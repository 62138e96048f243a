// The strip kernel: linear, bf16.
#include "cuda/sm90/strip_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_linear_bf16(const StripConfig& config, int clusters, const StripParams& params,
                               cudaStream_t stream) {
  return launch_strips_of<__nv_bfloat16, false>(config, clusters, params, stream);
}

}  // namespace rarefy::sm90
