// The `simt` family: plain kernels for every dtype, block shape and architecture, so that the faster
// families leave no hole. Each queues one kernel on the call's stream, waits for nothing and allocates
// nothing, and returns what the launch returned.
#pragma once

#include <cuda_runtime_api.h>

#include "core/registry.h"

namespace rarefy::cuda::simt {

// Rows of W (grad_input: columns) that a thread block's tile has: 1, 4, 16 or 32.
struct TileChoice {
  std::int64_t rows = 1;
  static constexpr std::string_view kFields[] = {"tile_rows"};
};

// Warps that share a block row, with up to kFewTokens: 1 to 16.
struct FewChoice {
  std::int64_t warps = 1;
  static constexpr std::string_view kFields[] = {"warps"};
};
inline constexpr std::int64_t kFewTokens = 16;
FewChoice configure_few(const Problem& problem, int sms);
std::int64_t few_workspace(const Problem& problem);

cudaError_t launch_few(const Call& call, int warps);
cudaError_t launch_linear(const Call& call);
cudaError_t launch_grad_input(const Call& call);
cudaError_t launch_grad_weight(const Call& call);

void add_rows(Registry& registry);

}  // namespace rarefy::cuda::simt
