// The union kernel: bf16.
#include "cuda/sm90/union_launch.cuh"

namespace rarefy::sm90 {

cudaError_t launch_union_bf16(const UnionConfig& config, int blocks, const UnionParams& params,
                              cudaStream_t stream) {
  return launch_union_of<__nv_bfloat16>(config, blocks, params, stream);
}

}  // namespace rarefy::sm90
