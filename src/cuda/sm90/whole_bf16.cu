// The dense product of packed weights: bf16.
#include "cuda/sm90/whole_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_whole_bf16(Major w, Major x, const WholeConfig& config, int blocks,
                              const WholeParams& params, cudaStream_t stream) {
  return w == Major::k ? launch_whole_of<__nv_bfloat16, Major::k>(x, config, blocks, params, stream)
                       : launch_whole_of<__nv_bfloat16, Major::mn>(x, config, blocks, params, stream);
}

}  // namespace rarefy::sm90
