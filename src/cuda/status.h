// What a CUDA call returned, as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include "rarefy/problem.h"
#include "rarefy/status.h"

namespace rarefy::cuda {

Status launch_status(std::string_view op, cudaError_t launched);

}  // namespace rarefy::cuda
