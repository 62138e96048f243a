// The kernel between those that prepare and those that read what was prepared.
#include "cuda/sm90/prepared.h"

namespace rarefy::sm90 {
namespace {
__global__ void prepared_kernel() {}
}  // namespace

cudaError_t prepared(cudaStream_t stream) {
  prepared_kernel<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace rarefy::sm90
