// How kernels on packed weights become rows of the registry: bf16 in pairs, int8 in fours, and scaled int8 as
// floats.
#pragma once

#include "cpu/linear_quads.h"
#include "cpu/register_floats.h"

namespace rarefy::cpu {

// Products in bf16 pairs, on packed weights.
template <const PairKernels& kKernels, const std::string_view& kFeature>
void add_pairs(Registry& registry, std::string_view linear, std::string_view grad_input,
               std::string_view grad_columns, std::string_view grad_weight, std::string_view feed_forward,
               std::string_view packed, std::string_view packed_transposed) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports<kFeature, supports_pairs, kKernels>,
        .run =
            [](const Call& call) {
              return run_pairs(kKernels, {&call, 1});
            },
        .run_together = op == Op::linear
                            ? +[](std::span<const Call> calls) { return run_pairs(kKernels, calls); }
                            : nullptr,
        .configure = [](const Problem& p, const Machine& m) { return configure_pairs(kKernels, p, m); },
        .fields = PairsBlocking::kFields,
        .candidates = [](const Problem& p, const Machine& m) { return pairs_candidates(kKernels, p, m); },
        .workspace = [](const Problem& p, const Config& c) { return pairs_workspace(kKernels, p, c); },
        .unheld = Unheld::made,
        .derives_as = op == Op::linear ? packed : packed_transposed,
        .prepared_size = [](const Problem& p, const Config&) { return pairs_prepared_size(kKernels, p); },
        .prepare = [](const Call& call, void* to) { return prepare_pairs(kKernels, call, to); },
        .packed_size = [](const Problem& p, const Config&) { return pairs_packed_size(kKernels, p); },
        .pack = [](const Call& call, void* to) { return pack_pairs_weight(kKernels, call, to); },
    });
  }
  registry.push_back({
      .op = Op::grad_input,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_columns,
      .supports = supports<kFeature, supports_spread>,
      .run = [](const Call& call) { return run_spread(kKernels, call); },
      .configure = configure_spread,
      .fields = SpreadBlocking::kFields,
      .workspace = spread_workspace,
  });
  registry.push_back({
      .op = Op::grad_weight,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_weight,
      .supports = supports<kFeature, supports_grad_weight_pairs, kKernels>,
      .run = [](const Call& call) { return run_grad_weight_pairs(kKernels, call); },
      .configure = configure_grad_weight_pairs,
      .fields = PairDotRanges::kFields,
      .workspace = grad_weight_pairs_workspace,
  });
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = feed_forward,
      .supports = supports<kFeature, supports_feed_forward_pairs, kKernels>,
      .run = [](const Call& call) { return run_feed_forward_pairs(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return configure_feed_forward_pairs(kKernels, p, m); },
      .fields = FeedForwardSets::kFields,
      .candidates = [](const Problem& p,
                       const Machine& m) { return feed_forward_pairs_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p,
                      const Config& c) { return feed_forward_pairs_workspace(kKernels, p, c); },
      .derives_as = packed,
  });
}

// linear in int8, on packed weights.
template <const QuadKernels& kKernels, const std::string_view& kFeature>
void add_quads(Registry& registry, std::string_view name, std::string_view packed) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, supports_quads, kKernels>,
      .run =
          [](const Call& call) {
            return run_quads(kKernels, {&call, 1});
          },
      .run_together = [](std::span<const Call> calls) { return run_quads(kKernels, calls); },
      .configure = [](const Problem& p, const Machine& m) { return configure_quads(kKernels, p, m); },
      .fields = PairsBlocking::kFields,
      .candidates = [](const Problem& p, const Machine& m) { return quads_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p, const Config& c) { return quads_workspace(kKernels, p, c); },
      .unheld = Unheld::made,
      .derives_as = packed,
      .prepared_size = [](const Problem& p, const Config&) { return quads_prepared_size(kKernels, p); },
      .prepare = [](const Call& call, void* to) { return prepare_quads(kKernels, call, to); },
      .packed_size = [](const Problem& p, const Config&) { return quads_packed_size(kKernels, p); },
      .pack = [](const Call& call, void* to) { return pack_quads_weight(kKernels, call, to); },
  });
}

// linear of the same weights with x as it is, on what they hold.
template <const QuadKernels& kKernels, const Kernels& kFloats, const std::string_view& kFeature>
void add_digits(Registry& registry, std::string_view name, std::string_view packed) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, supports_digits, kKernels>,
      .run = [](const Call& call) { return run_digits(kKernels, kFloats, call); },
      .yields = yields_digits,
      .configure = [](const Problem& p, const Machine& m) { return configure_digits(kKernels, p, m); },
      .fields = PairsBlocking::kFields,
      .candidates = [](const Problem& p, const Machine& m) { return digits_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p, const Config& c) { return digits_workspace(kKernels, p, c); },
      .derives_as = packed,
      .prepared_size = [](const Problem& p, const Config&) { return quads_prepared_size(kKernels, p); },
      .prepare = [](const Call& call, void* to) { return prepare_quads(kKernels, call, to); },
      .packed_size = [](const Problem& p, const Config&) { return quads_packed_size(kKernels, p); },
      .pack = [](const Call& call, void* to) { return pack_quads_weight(kKernels, call, to); },
  });
}

// Networks of two layers whose weights linear's rows hold as `packed`.
template <const QuadKernels& kKernels, const std::string_view& kFeature>
void add_feed_forward_quads(Registry& registry, std::string_view name, std::string_view packed) {
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, supports_feed_forward_quads, kKernels>,
      .run = [](const Call& call) { return run_feed_forward_quads(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return configure_feed_forward_quads(kKernels, p, m); },
      .fields = FeedForwardQuads::kFields,
      .candidates = [](const Problem& p,
                       const Machine& m) { return feed_forward_quads_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p,
                      const Config& c) { return feed_forward_quads_workspace(kKernels, p, c); },
      .derives_as = packed,
  });
}

// Scaled int8 values as they are, for a few tokens: a quarter of a float layer's bytes.
template <const FewKernels& kKernels, const std::string_view& kFeature>
void add_few_scaled(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, supports_few_scaled, kKernels>,
      .run = [](const Call& call) { return run_linear_few(kKernels, call); },
      .yields = [](const Problem& p, const Machine& m) { return yields_few(kKernels, p, m); },
      .configure = configure_few,
      .fields = FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return few_workspace(kKernels, p, c); },
  });
}

// The same as floats, for the same family's kernels.
template <const Kernels& kKernels, const std::string_view& kFeature>
void add_scaled(Registry& registry, std::string_view linear, std::string_view grad_input) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports<kFeature, supports_scaled>,
        .run = run_scaled,
        .configure = configure_scaled,
        .fields = ScaledWorkspace::kFields,
        .workspace = scaled_workspace,
        .unheld = Unheld::made,
        .derives_as = "scaled",
        .packed_size = scaled_packed_size,
        .pack = pack_scaled,
    });
  }
}

}  // namespace rarefy::cpu
