// What is prepared of a pattern is read by products before they wait for the kernel before them.
#pragma once

#include <cuda_runtime_api.h>

namespace rarefy::sm90 {

// Behind the kernels that prepare: queues an empty one, which starts when all that they wrote is in memory,
// as a product may start before that is said of the kernel that it follows.
cudaError_t prepared(cudaStream_t stream);

}  // namespace rarefy::sm90
