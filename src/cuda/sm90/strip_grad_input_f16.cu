// The strip kernel: grad_input, f16.
#include "cuda/sm90/strip_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_grad_input_f16(const StripConfig& config, int clusters, const StripParams& params,
                                  cudaStream_t stream) {
  return launch_strips_of<__half, true>(config, clusters, params, stream);
}

}  // namespace rarefy::sm90
