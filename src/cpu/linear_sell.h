// What runs linear for a few tokens on single elements held a lane for each row (sell.h, linear_sell.cc).
#pragma once

#include "cpu/drivers.h"
#include "cpu/sell_task.h"

namespace rarefy::cpu {

Reason supports_sell(const SellKernels& kernels, const Problem& problem);
std::int64_t sell_prepared_size(const SellKernels& kernels, const Problem& problem);
Status prepare_sell(const SellKernels& kernels, const Call& call, void* to);
std::int64_t sell_packed_size(const Problem& problem);
Status pack_sell(const SellKernels& kernels, const Call& call, void* to);
std::int64_t sell_workspace(const Problem& problem);
Status run_sell(const SellKernels& kernels, const Call& call);

}  // namespace rarefy::cpu
