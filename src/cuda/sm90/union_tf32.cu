// The union kernel: f32, multiplied as tf32.
#include "cuda/sm90/union_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_union_tf32(const UnionConfig& config, int blocks, const UnionParams& params,
                              cudaStream_t stream) {
  return launch_union_of<float>(config, blocks, params, stream);
}

}  // namespace rarefy::sm90
