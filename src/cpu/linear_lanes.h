// What runs linear and grad_input in floats on lanes of outputs (lanes.h, linear_lanes.cc).
#pragma once

#include "core/registry.h"
#include "cpu/lanes.h"

namespace rarefy::cpu {

Reason supports_lanes(const LaneKernels& kernels, const Problem& problem, const Machine& machine);
Config configure_lanes(const Problem& problem, const Machine& machine);
std::vector<Config> lanes_candidates(const Problem& problem, const Machine& machine);
std::int64_t lanes_workspace(const Problem& problem, const Config& config);
Status run_lanes(const LaneKernels& kernels, std::span<const Call> calls);  // of linear, several on one x

}  // namespace rarefy::cpu
