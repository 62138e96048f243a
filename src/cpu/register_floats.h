// How kernels on floats and doubles become rows of the registry: one function for each kind of kernel, a
// template over the table of its instruction set and over what the processor must have. register.cc says
// which tables there are.
#pragma once

#include <type_traits>

#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/linear_lanes.h"
#include "cpu/linear_pieces.h"
#include "cpu/linear_sell.h"
#include "cpu/pairs_blocking.h"

namespace rarefy::cpu {

// Kernels load and store three dtypes, each operand its own, and sum in float.
inline Reason supports_dtypes(const Problem& p) {
  for (const auto& [argument, dtype] : {std::pair{"inputs", p.in},
                                        {"values", p.weight.dtype},
                                        {"values", p.down.dtype},  // f32 where there are none
                                        {"values", p.gate.dtype},
                                        {"outputs", p.out}}) {
    if (!storage_of(dtype)) return cat("takes ", argument, " in f32, bf16 or f16; got ", name(dtype));
  }
  return {};
}

// The same, and int8 with scales, for which each layer's own kernel answers.
inline Reason supports_apart(const Problem& p) {
  Problem floats = p;
  for (WeightSpec* w : {&floats.weight, &floats.down, &floats.gate}) {
    if (w->scaling != Scaling::none) w->dtype = DType::f32;
  }
  return supports_dtypes(floats);
}

// What the processor must have (empty: nothing), then the kernel's own answer, which may ask for its table
// and for the machine.
template <const std::string_view& kFeature, auto kSupports, const auto&... kTable>
Reason supports(const Problem& p, const Machine& machine) {
  if (!kFeature.empty() && !machine.has(kFeature)) {
    const bool refused = kFeature.starts_with("amx") && machine.has("amx_refused");
    return cat("the processor lacks ", kFeature,
               refused ? ", as the operating system lends no tile registers" : "");
  }
  if constexpr (std::is_invocable_v<decltype(kSupports), decltype(kTable)..., const Problem&,
                                    const Machine&>) {
    return kSupports(kTable..., p, machine);
  } else {
    return kSupports(kTable..., p);
  }
}

// The same of kernels on floats: the dtypes, then the kernel's own answer.
template <const std::string_view& kFeature, auto kSupports, const auto&... kTable>
Reason supports_floats(const Problem& p, const Machine& machine) {
  Reason reason = supports<kFeature, supports_dtypes>(p, machine);
  return reason.empty() ? supports<kFeature, kSupports, kTable...>(p, machine) : reason;
}

template <const FewKernels& kKernels, const std::string_view& kFeature>
void add_few(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports_floats<kFeature, supports_few_by_fours, kKernels>,
      .run = [](const Call& call) { return run_linear_few(kKernels, call); },
      .yields = [](const Problem& p, const Machine& m) { return yields_few(kKernels, p, m); },
      .configure = configure_few,
      .fields = FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return few_workspace(kKernels, p, c); },
      .unheld = Unheld::runs,
      .derives_as = "columns_16",
      .prepared_size = few_prepared_size,
      .prepare = prepare_few,
  });
}

template <const FewKernels& kKernels, const std::string_view& kFeature>
void add_windows(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports_floats<kFeature, supports_windows, kKernels>,
      .run = [](const Call& call) { return run_windows(kKernels, call); },
      .configure = configure_few,
      .fields = FewSplit::kFields,
      .workspace = windows_workspace,
      .derives_as = "windows",
      .prepared_size = windows_prepared_size,
      .prepare = [](const Call& call, void* to) { return prepare_windows(kKernels, call, to); },
      .packed_size = windows_packed_size,
      .pack = [](const Call& call, void* to) { return pack_windows(kKernels, call, to); },
  });
}

// `held`: what is, which follows from the lanes.
template <const SellKernels& kKernels, const std::string_view& kFeature>
void add_sell(Registry& registry, std::string_view name, std::string_view held) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.few.family,
      .name = name,
      .supports = supports_floats<kFeature, supports_sell, kKernels>,
      .run = [](const Call& call) { return run_sell(kKernels, call); },
      .configure = configure_few,
      .fields = FewSplit::kFields,
      .workspace = [](const Problem& p, const Config&) { return sell_workspace(p); },
      .derives_as = held,
      .prepared_size = [](const Problem& p, const Config&) { return sell_prepared_size(kKernels, p); },
      .prepare = [](const Call& call, void* to) { return prepare_sell(kKernels, call, to); },
      .packed_size = [](const Problem& p, const Config&) { return sell_packed_size(p); },
      .pack = [](const Call& call, void* to) { return pack_sell(kKernels, call, to); },
  });
}

template <const Kernels& kKernels, const std::string_view& kFeature>
void add_in_place(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, supports_in_place, kKernels>,
      .run = [](const Call& call) { return run_in_place(kKernels, call); },
      .any_layout = true,
  });
}

template <const DoubleKernels& kKernels, const std::string_view& kFeature>
void add_doubles(Registry& registry, std::string_view linear, std::string_view grad_input,
                 std::string_view grad_weight) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = linear,
      .supports = supports<kFeature, supports_doubles, kKernels>,
      .run = [](const Call& call) { return run_doubles(kKernels, call); },
      .any_layout = true,
      .configure = configure_few,
      .fields = FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return doubles_workspace(kKernels, p, c); },
      .unheld = Unheld::runs,
      .derives_as = "columns_16",
      .prepared_size = doubles_prepared_size,
      .prepare = prepare_few,
  });
  registry.push_back({
      .op = Op::grad_input,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_input,
      .supports = supports<kFeature, supports_doubles, kKernels>,
      .run = [](const Call& call) { return run_doubles(kKernels, call); },
      .configure = configure_few,
      .fields = FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return doubles_workspace(kKernels, p, c); },
  });
  registry.push_back({
      .op = Op::grad_weight,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_weight,
      .supports = supports<kFeature, supports_grad_weight_doubles>,
      .run = [](const Call& call) { return run_grad_weight_doubles(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return configure_grad_weight_doubles(kKernels, p, m); },
      .fields = GradWeightTiling::kFields,
      .workspace = grad_weight_doubles_workspace,
  });
}

template <const Kernels& kKernels, const std::string_view& kFeature>
void add_bitmap(Registry& registry, std::string_view bitmap, std::string_view two_of_four) {
  for (const Format format : {Format::bitmap, Format::two_of_four}) {
    registry.push_back({
        .op = Op::linear,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = format == Format::bitmap ? bitmap : two_of_four,
        .supports = supports<kFeature, supports_dtypes>,
        .run = [](const Call& call) { return run_linear_bitmap(kKernels, call); },
        .format = format,
        .configure = configure_bitmap,
        .fields = BitmapSplit::kFields,
        .workspace = bitmap_workspace,
    });
  }
}

// Floats on lanes of outputs.
template <const LaneKernels& kKernels, const Kernels& kPanels, const std::string_view& kFeature>
void add_lanes(Registry& registry, std::string_view linear, std::string_view grad_input) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kPanels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports_floats<kFeature, supports_lanes, kKernels>,
        .run =
            [](const Call& call) {
              return run_lanes(kKernels, {&call, 1});
            },
        .run_together = op == Op::linear
                            ? +[](std::span<const Call> calls) { return run_lanes(kKernels, calls); }
                            : nullptr,
        .configure = configure_lanes,
        .fields = PairsBlocking::kFields,
        .candidates = lanes_candidates,
        .workspace = lanes_workspace,
    });
  }
}

// Blocks of few rows in tiles of X.
template <const Kernels& kKernels, const std::string_view& kFeature>
void add_pieces(Registry& registry, std::string_view linear, std::string_view grad_input,
                std::string_view prepared, std::string_view transposed) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports_floats<kFeature, supports_pieces, kKernels>,
        .run = [](const Call& call) { return run_pieces(kKernels, call); },
        .configure = [](const Problem& p, const Machine& m) { return configure_pieces(kKernels, p, m); },
        .fields = PiecesBlocking::kFields,
        .candidates = [](const Problem& p, const Machine& m) { return pieces_candidates(kKernels, p, m); },
        .workspace = [](const Problem& p, const Config& c) { return pieces_workspace(kKernels, p, c); },
        .unheld = Unheld::made,
        .derives_as = op == Op::linear ? prepared : transposed,
        .variant = pieces_variant,
        .prepared_size = pieces_prepared_size,
        .prepare = [](const Call& call, void* to) { return prepare_pieces(kKernels, call, to); },
    });
  }
}

// A panel through both layers; what that row declines goes to the other.
template <const Kernels& kKernels, const std::string_view& kFeature>
void add_feed_forward(Registry& registry, std::string_view chained, std::string_view apart) {
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = chained,
      .supports = supports_floats<kFeature, supports_feed_forward, kKernels>,
      .run = [](const Call& call) { return run_feed_forward(kKernels, call); },
      .yields = yields_feed_forward,
      .configure = [](const Problem& p, const Machine& m) { return configure_feed_forward(kKernels, p, m); },
      .fields = FeedForwardCut::kFields,
      .candidates = [](const Problem& p,
                       const Machine& m) { return feed_forward_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p, const Config& c) { return feed_forward_workspace(kKernels, p, c); },
  });
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = apart,
      .supports = supports<kFeature, supports_apart>,
      .run = [](const Call& call) { return run_feed_forward_apart(kKernels, call); },
      .configure = configure_feed_forward_apart,
      .fields = FeedForwardApart::kFields,
      .workspace = feed_forward_apart_workspace,
  });
}

template <const Kernels& kKernels, const std::string_view& kFeature, auto kSupports>
void add_grad_weight(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::grad_weight,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, kSupports>,
      .run = [](const Call& call) { return run_grad_weight(kKernels, call); },
      .configure = [](const Problem& p, const Machine& m) { return configure_grad_weight(kKernels, p, m); },
      .fields = GradWeightTiling::kFields,
      .workspace = [](const Problem& p, const Config& c) { return grad_weight_workspace(kKernels, p, c); },
  });
}

template <const Kernels& kKernels, const std::string_view& kFeature>
void add_products(Registry& registry, std::string_view linear, std::string_view grad_input,
                  std::string_view grad_weight) {
  const auto product = [](Op op, std::string_view name) -> Kernel {
    return {
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = name,
        .supports = supports<kFeature, supports_dtypes>,
        .run =
            [](const Call& call) {
              return run_product(kKernels, {&call, 1});
            },
        .run_together = op == Op::linear
                            ? +[](std::span<const Call> calls) { return run_product(kKernels, calls); }
                            : nullptr,
        .any_layout = op == Op::linear,
        .reads_columns = [](const Problem&,
                            const Config& c) { return from_config<Blocking>(c).scatter != 0; },
        .configure = [](const Problem& p, const Machine& m) { return configure_product(kKernels, p, m); },
        .fields = Blocking::kFields,
        .candidates = [](const Problem& p, const Machine& m) { return product_candidates(kKernels, p, m); },
        .workspace = [](const Problem& p, const Config& c) { return product_workspace(kKernels, p, c); },
    };
  };
  registry.push_back(product(Op::linear, linear));
  registry.push_back(product(Op::grad_input, grad_input));
  add_grad_weight<kKernels, kFeature, supports_dtypes>(registry, grad_weight);
}

}  // namespace rarefy::cpu
