// What the rows of this family share: problems of the core as the kernels' own, what several refuse, and a
// configuration of the strip kernel as the registry keeps it.
#pragma once

#include <algorithm>

#include "core/message.h"
#include "core/registry.h"
#include "cuda/simt/kernels.h"
#include "cuda/sm90/strips.h"

namespace rarefy::sm90 {

template <class P>
P product(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  P product{};
  product.transposed = p.op == Op::grad_input;
  product.dtype = p.in;
  product.tokens = p.tokens;
  product.rows = s.rows;
  product.cols = s.cols;
  product.block_rows = s.block_rows;
  product.block_cols = s.block_cols;
  product.blocks = s.nnzb;
  product.x_stride = p.in_stride;
  product.y_stride = p.out_stride;
  product.activation = p.activation;
  product.y_padded = p.out_padded;
  return product;
}

inline ProductIndex index_of(const Call& call) {
  const PlanView& plan = call.plan;
  return call.problem.op == Op::grad_input ? ProductIndex{plan.ccol, plan.row, plan.perm}
                                           : ProductIndex{plan.crow, plan.col, nullptr};
}

// linear of few tokens is bound by reading W, which simt_few_linear does as it is stored: up to 4, or up to
// 16 where 16 bytes of it lie along a row or down a column of a block; up to 8 where tiles of 128 rows are
// enough for half of the SMs (docs/design/hopper/fine.md).
inline Reason refuses_few(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  const bool pieces = s.block_cols % 8 == 0 || (s.block_cols == 1 && s.block_rows % 8 == 0);
  const bool tiles = s.block_cols == 1 && s.block_rows % 128 == 0 && s.rows >= 64 * 128;
  const std::int64_t most = !pieces ? 4 : tiles ? 8 : cuda::simt::kFewTokens;
  if (p.op != Op::linear || p.tokens > most) return {};
  return cat("leaves up to ", most, " tokens to kernels that read W in place; got ", p.tokens);
}

// What kernels for the weight gradient of fine blocks take, in us; fitted to an H100
// (docs/design/hopper/fine.md).
struct FineGradientTimes {
  double work, values;  // products of dense, 1e9; stored
  FineGradientTimes(const BsrShape& s, std::int64_t tokens)
      : work(static_cast<double>(tokens) * static_cast<double>(s.rows * s.cols) * 1e-9),
        values(static_cast<double>(tokens) * static_cast<double>(s.value_count())) {}
  double plain() const { return 15 + 1e-6 * values; }
  double whole() const { return 40 + 2.6 * work; }  // all of W's gradient, read out
  // Of columns of 64 that hold this share of W.
  double columns(double share) const { return 30 + (.44 + 3.5 * share) * work; }
};

// A product of few tokens, which is reading W: at .8 of the memory's nominal rate by default, in a chain
// (docs/design/hopper/decode.md).
inline double reading_microseconds(std::int64_t bytes, const rarefy::Machine& machine, double rate = .8) {
  return 1.9 + 1e6 * static_cast<double>(bytes) / (rate * machine.gpu.bandwidth);
}

inline Reason refuses_f32(const Problem& p) {
  if (p.in != DType::f32 || p.tf32) return {};
  return "multiplies f32 as tf32, where the call allows that";
}

inline Machine sm90_machine(const rarefy::Machine& machine) {
  return {machine.gpu.sms, static_cast<int>(machine.gpu.shared_memory)};
}

// Kernels are modelled alone, after a flush. One behind the other, as users call them, they take so much
// less: 3 us, and 3.8 where they read what was prepared before they wait for the one before.
inline constexpr double kChainSaves = 3.8, kLateChainSaves = 3;
inline double in_a_chain(double alone, double saves = kChainSaves) {
  return std::max(alone - saves, alone / 2);
}

// What the candidate of this config is predicted to take; 0 if there is none.
template <class Candidates, class ConfigOf>
double microseconds_of(const Candidates& candidates, const Config& config, const ConfigOf& config_of,
                       double saves = kChainSaves) {
  for (const auto& c : candidates) {
    if (c.reason.empty() && config_of(c.config) == config) return in_a_chain(c.microseconds, saves);
  }
  return 0;
}

// StripConfig as the registry keeps it; `sms` are the thread blocks that the GPU runs at once.
struct StripChoice {
  std::int64_t strips = 2, tokens = 256, cluster = 1, slots = 5, w_slots = 8, sms = 132, split = 1, alone = 0;
  static constexpr std::string_view kFields[] = {"strips",  "tokens", "cluster", "slots",
                                                 "w_slots", "sms",    "split",   "alone"};

  StripConfig config() const {
    const auto n = [](std::int64_t x) { return static_cast<int>(x); };
    return {n(strips), n(tokens), n(cluster), n(slots), n(w_slots), n(split), alone != 0};
  }
};

inline Config choice_of(const StripConfig& c, const rarefy::Machine& machine) {
  return to_config(StripChoice{c.strips, c.tokens, c.cluster, c.slots, c.w_slots, machine.gpu.sms, c.split,
                               c.alone ? 1 : 0});
}

}  // namespace rarefy::sm90
