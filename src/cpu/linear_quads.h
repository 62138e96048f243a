// What runs linear in int8 (linear_quads.cc), beside the drivers of bf16 pairs, whose configurations it has.
#pragma once

#include "cpu/linear_pairs.h"
#include "cpu/quads.h"

namespace rarefy::cpu {

// Scaling::dynamic: x is rounded to int8, too.
Reason supports_quads(const QuadKernels& kernels, const Problem& problem, const Machine& machine);
Config configure_quads(const QuadKernels& kernels, const Problem& problem, const Machine& machine);
std::vector<Config> quads_candidates(const QuadKernels& kernels, const Problem& problem,
                                     const Machine& machine);
PanelWork quads_work(const QuadKernels& kernels, const Problem& problem);
std::int64_t quads_prepared_size(const QuadKernels& kernels, const Problem& problem);
Status prepare_quads(const QuadKernels& kernels, const Call& call, void* data);
std::int64_t quads_workspace(const QuadKernels& kernels, const Problem& problem, const Config& config);
std::int64_t quads_packed_size(const QuadKernels& kernels, const Problem& problem);
Status pack_quads_weight(const QuadKernels& kernels, const Call& call, void* data);
Status run_quads(const QuadKernels& kernels, std::span<const Call> calls);  // several on one x

// feed_forward on weights that linear's rows packed (feed_forward_quads.cc).
struct FeedForwardQuads {
  std::int64_t tokens = 64;                                // of a task
  std::int64_t up_many = 0, down_many = 0, gate_many = 0;  // 1: a layer goes by the kernels for many tokens
  static constexpr std::string_view kFields[] = {"tokens", "up_many", "down_many", "gate_many"};
};
Reason supports_feed_forward_quads(const QuadKernels& kernels, const Problem& problem,
                                   const Machine& machine);
Config configure_feed_forward_quads(const QuadKernels& kernels, const Problem& problem,
                                    const Machine& machine);
std::vector<Config> feed_forward_quads_candidates(const QuadKernels& kernels, const Problem& problem,
                                                  const Machine& machine);
std::int64_t feed_forward_quads_workspace(const QuadKernels& kernels, const Problem& problem,
                                          const Config& config);
Status run_feed_forward_quads(const QuadKernels& kernels, const Call& call);

// Scaling::weight by the same kernels: x as three digits of int8 (linear_digits.cc), on what quads hold.
Reason supports_digits(const QuadKernels& kernels, const Problem& problem, const Machine& machine);
Reason yields_digits(const Problem& problem, const Machine& machine);
Config configure_digits(const QuadKernels& kernels, const Problem& problem, const Machine& machine);
std::vector<Config> digits_candidates(const QuadKernels& kernels, const Problem& problem,
                                      const Machine& machine);
std::int64_t digits_workspace(const QuadKernels& kernels, const Problem& problem, const Config& config);
Status run_digits(const QuadKernels& kernels, const Kernels& floats, const Call& call);

// Scaling::weight: by the float kernels, on values that pack scales to floats (linear_scaled.cc).
struct ScaledWorkspace {
  std::int64_t workspace = 0;  // bytes that linear's float kernel may use
  static constexpr std::string_view kFields[] = {"workspace"};
};
Reason supports_scaled(const Problem& problem);
Config configure_scaled(const Problem& problem, const Machine& machine);
std::int64_t scaled_workspace(const Problem& problem, const Config& config);
std::int64_t scaled_packed_size(const Problem& problem, const Config& config);
Status pack_scaled(const Call& call, void* packed);
Status run_scaled(const Call& call);

}  // namespace rarefy::cpu
