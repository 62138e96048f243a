// The CPU's kernels as rows, best first. All that were compiled in are listed; what the processor lacks is
// their reason.
#include <type_traits>

#include "core/message.h"
#include "cpu/cpuid.h"
#include "cpu/drivers.h"
#include "cpu/linear_lanes.h"
#include "cpu/linear_pieces.h"
#include "cpu/linear_quads.h"

namespace rarefy {

namespace {

// Kernels load and store three dtypes, each operand its own, and sum in float.
Reason supports_dtypes(const Problem& p) {
  for (const auto& [argument, dtype] : {std::pair{"inputs", p.in},
                                        {"values", p.weight.dtype},
                                        {"values", p.down.dtype},  // f32 where there are none
                                        {"values", p.gate.dtype},
                                        {"outputs", p.out}}) {
    if (!cpu::storage_of(dtype)) return cat("takes ", argument, " in f32, bf16 or f16; got ", name(dtype));
  }
  return {};
}

// What the processor must have (empty: nothing), then the kernel's own answer, which may ask for its table
// and for the machine.
template <const std::string_view& kFeature, auto kSupports, const auto&... kTable>
Reason supports(const Problem& p, const Machine& machine) {
  if (!kFeature.empty() && !machine.has(kFeature)) return cat("the processor lacks ", kFeature);
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

template <const cpu::FewKernels& kKernels, const std::string_view& kFeature>
void add_few(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports_floats<kFeature, cpu::supports_few, kKernels>,
      .run = [](const Call& call) { return cpu::run_linear_few(kKernels, call); },
      .configure = cpu::configure_few,
      .fields = cpu::FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return cpu::few_workspace(kKernels, p, c); },
      .unheld = Unheld::runs,
      .derives_as = "columns_16",
      .prepared_size = cpu::few_prepared_size,
      .prepare = cpu::prepare_few,
  });
}

template <const cpu::FewKernels& kKernels, const std::string_view& kFeature>
void add_windows(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports_floats<kFeature, cpu::supports_windows, kKernels>,
      .run = [](const Call& call) { return cpu::run_windows(kKernels, call); },
      .configure = cpu::configure_few,
      .fields = cpu::FewSplit::kFields,
      .workspace = cpu::windows_workspace,
      .derives_as = "windows",
      .prepared_size = cpu::windows_prepared_size,
      .prepare = [](const Call& call, void* to) { return cpu::prepare_windows(kKernels, call, to); },
      .packed_size = cpu::windows_packed_size,
      .pack = [](const Call& call, void* to) { return cpu::pack_windows(kKernels, call, to); },
  });
}

template <const cpu::Kernels& kKernels, const std::string_view& kFeature>
void add_in_place(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, cpu::supports_in_place, kKernels>,
      .run = [](const Call& call) { return cpu::run_in_place(kKernels, call); },
      .any_layout = true,
  });
}

template <const cpu::DoubleKernels& kKernels, const std::string_view& kFeature>
void add_doubles(Registry& registry, std::string_view linear, std::string_view grad_input,
                 std::string_view grad_weight) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = linear,
      .supports = supports<kFeature, cpu::supports_doubles, kKernels>,
      .run = [](const Call& call) { return cpu::run_doubles(kKernels, call); },
      .any_layout = true,
      .configure = cpu::configure_few,
      .fields = cpu::FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return cpu::doubles_workspace(kKernels, p, c); },
      .unheld = Unheld::runs,
      .derives_as = "columns_16",
      .prepared_size = cpu::doubles_prepared_size,
      .prepare = cpu::prepare_few,
  });
  registry.push_back({
      .op = Op::grad_input,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_input,
      .supports = supports<kFeature, cpu::supports_doubles, kKernels>,
      .run = [](const Call& call) { return cpu::run_doubles(kKernels, call); },
      .configure = cpu::configure_few,
      .fields = cpu::FewSplit::kFields,
      .workspace = [](const Problem& p, const Config& c) { return cpu::doubles_workspace(kKernels, p, c); },
  });
  registry.push_back({
      .op = Op::grad_weight,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_weight,
      .supports = supports<kFeature, cpu::supports_grad_weight_doubles>,
      .run = [](const Call& call) { return cpu::run_grad_weight_doubles(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return cpu::configure_grad_weight_doubles(kKernels, p, m); },
      .fields = cpu::GradWeightTiling::kFields,
      .workspace = cpu::grad_weight_doubles_workspace,
  });
}

template <const cpu::Kernels& kKernels, const std::string_view& kFeature>
void add_bitmap(Registry& registry, std::string_view bitmap, std::string_view two_of_four) {
  for (const Format format : {Format::bitmap, Format::two_of_four}) {
    registry.push_back({
        .op = Op::linear,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = format == Format::bitmap ? bitmap : two_of_four,
        .supports = supports<kFeature, supports_dtypes>,
        .run = [](const Call& call) { return cpu::run_linear_bitmap(kKernels, call); },
        .format = format,
        .configure = cpu::configure_bitmap,
        .fields = cpu::BitmapSplit::kFields,
        .workspace = cpu::bitmap_workspace,
    });
  }
}

// Floats on lanes of outputs.
template <const cpu::LaneKernels& kKernels, const cpu::Kernels& kPanels, const std::string_view& kFeature>
void add_lanes(Registry& registry, std::string_view linear, std::string_view grad_input) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kPanels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports_floats<kFeature, cpu::supports_lanes, kKernels>,
        .run =
            [](const Call& call) {
              return cpu::run_lanes(kKernels, {&call, 1});
            },
        .run_together = op == Op::linear
                            ? +[](std::span<const Call> calls) { return cpu::run_lanes(kKernels, calls); }
                            : nullptr,
        .configure = cpu::configure_lanes,
        .fields = cpu::PairsBlocking::kFields,
        .candidates = cpu::lanes_candidates,
        .workspace = cpu::lanes_workspace,
    });
  }
}

// Blocks of few rows in tiles of X.
template <const cpu::Kernels& kKernels, const std::string_view& kFeature>
void add_pieces(Registry& registry, std::string_view linear, std::string_view grad_input,
                std::string_view prepared, std::string_view transposed) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports_floats<kFeature, cpu::supports_pieces, kKernels>,
        .run = [](const Call& call) { return cpu::run_pieces(kKernels, call); },
        .configure = [](const Problem& p, const Machine& m) { return cpu::configure_pieces(kKernels, p, m); },
        .fields = cpu::PiecesBlocking::kFields,
        .candidates = [](const Problem& p,
                         const Machine& m) { return cpu::pieces_candidates(kKernels, p, m); },
        .workspace = [](const Problem& p, const Config& c) { return cpu::pieces_workspace(kKernels, p, c); },
        .unheld = Unheld::made,
        .derives_as = op == Op::linear ? prepared : transposed,
        .variant = cpu::pieces_variant,
        .prepared_size = cpu::pieces_prepared_size,
        .prepare = cpu::prepare_pieces,
    });
  }
}

// A panel through both layers; what that row declines goes to the other.
template <const cpu::Kernels& kKernels, const std::string_view& kFeature>
void add_feed_forward(Registry& registry, std::string_view chained, std::string_view apart) {
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = chained,
      .supports = supports_floats<kFeature, cpu::supports_feed_forward, kKernels>,
      .run = [](const Call& call) { return cpu::run_feed_forward(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return cpu::configure_feed_forward(kKernels, p, m); },
      .fields = cpu::FeedForwardCut::kFields,
      .candidates = [](const Problem& p,
                       const Machine& m) { return cpu::feed_forward_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p,
                      const Config& c) { return cpu::feed_forward_workspace(kKernels, p, c); },
  });
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = apart,
      .supports = supports<kFeature, supports_dtypes>,
      .run = [](const Call& call) { return cpu::run_feed_forward_apart(kKernels, call); },
      .configure = cpu::configure_feed_forward_apart,
      .fields = cpu::FeedForwardApart::kFields,
      .workspace = cpu::feed_forward_apart_workspace,
  });
}

template <const cpu::Kernels& kKernels, const std::string_view& kFeature, auto kSupports>
void add_grad_weight(Registry& registry, std::string_view name) {
  registry.push_back({
      .op = Op::grad_weight,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, kSupports>,
      .run = [](const Call& call) { return cpu::run_grad_weight(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return cpu::configure_grad_weight(kKernels, p, m); },
      .fields = cpu::GradWeightTiling::kFields,
      .workspace = [](const Problem& p,
                      const Config& c) { return cpu::grad_weight_workspace(kKernels, p, c); },
  });
}

template <const cpu::Kernels& kKernels, const std::string_view& kFeature>
void add(Registry& registry, std::string_view linear, std::string_view grad_input,
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
              return cpu::run_product(kKernels, {&call, 1});
            },
        .run_together = op == Op::linear
                            ? +[](std::span<const Call> calls) { return cpu::run_product(kKernels, calls); }
                            : nullptr,
        .any_layout = op == Op::linear,
        .configure = [](const Problem& p,
                        const Machine& m) { return cpu::configure_product(kKernels, p, m); },
        .fields = cpu::Blocking::kFields,
        .candidates = [](const Problem& p,
                         const Machine& m) { return cpu::product_candidates(kKernels, p, m); },
        .workspace = [](const Problem& p, const Config& c) { return cpu::product_workspace(kKernels, p, c); },
    };
  };
  registry.push_back(product(Op::linear, linear));
  registry.push_back(product(Op::grad_input, grad_input));
  add_grad_weight<kKernels, kFeature, supports_dtypes>(registry, grad_weight);
}

// Products in bf16 pairs, on packed weights.
template <const cpu::PairKernels& kKernels, const std::string_view& kFeature>
void add_pairs(Registry& registry, std::string_view linear, std::string_view grad_input,
               std::string_view grad_columns, std::string_view grad_weight, std::string_view feed_forward,
               std::string_view packed, std::string_view packed_transposed) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports<kFeature, cpu::supports_pairs, kKernels>,
        .run =
            [](const Call& call) {
              return cpu::run_pairs(kKernels, {&call, 1});
            },
        .run_together = op == Op::linear
                            ? +[](std::span<const Call> calls) { return cpu::run_pairs(kKernels, calls); }
                            : nullptr,
        .configure = [](const Problem& p, const Machine& m) { return cpu::configure_pairs(kKernels, p, m); },
        .fields = cpu::PairsBlocking::kFields,
        .candidates = [](const Problem& p,
                         const Machine& m) { return cpu::pairs_candidates(kKernels, p, m); },
        .workspace = [](const Problem& p, const Config& c) { return cpu::pairs_workspace(kKernels, p, c); },
        .unheld = Unheld::made,
        .derives_as = op == Op::linear ? packed : packed_transposed,
        .prepared_size = [](const Problem& p,
                            const Config&) { return cpu::pairs_prepared_size(kKernels, p); },
        .prepare = [](const Call& call, void* to) { return cpu::prepare_pairs(kKernels, call, to); },
        .packed_size = [](const Problem& p, const Config&) { return cpu::pairs_packed_size(kKernels, p); },
        .pack = [](const Call& call, void* to) { return cpu::pack_pairs_weight(kKernels, call, to); },
    });
  }
  registry.push_back({
      .op = Op::grad_input,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_columns,
      .supports = supports<kFeature, cpu::supports_spread>,
      .run = [](const Call& call) { return cpu::run_spread(kKernels, call); },
      .configure = cpu::configure_spread,
      .fields = cpu::SpreadBlocking::kFields,
      .workspace = cpu::spread_workspace,
  });
  registry.push_back({
      .op = Op::grad_weight,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = grad_weight,
      .supports = supports<kFeature, cpu::supports_grad_weight_pairs>,
      .run = [](const Call& call) { return cpu::run_grad_weight_pairs(kKernels, call); },
      .configure = cpu::configure_grad_weight_pairs,
      .fields = cpu::PairDotRanges::kFields,
      .workspace = cpu::grad_weight_pairs_workspace,
  });
  registry.push_back({
      .op = Op::feed_forward,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = feed_forward,
      .supports = supports<kFeature, cpu::supports_feed_forward_pairs, kKernels>,
      .run = [](const Call& call) { return cpu::run_feed_forward_pairs(kKernels, call); },
      .configure = [](const Problem& p,
                      const Machine& m) { return cpu::configure_feed_forward_pairs(kKernels, p, m); },
      .fields = cpu::FeedForwardSets::kFields,
      .candidates = [](const Problem& p,
                       const Machine& m) { return cpu::feed_forward_pairs_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p,
                      const Config& c) { return cpu::feed_forward_pairs_workspace(kKernels, p, c); },
      .derives_as = packed,
  });
}

// linear in int8, on packed weights.
template <const cpu::QuadKernels& kKernels, const std::string_view& kFeature>
void add_quads(Registry& registry, std::string_view name, std::string_view packed) {
  registry.push_back({
      .op = Op::linear,
      .device = Device::cpu,
      .family = kKernels.family,
      .name = name,
      .supports = supports<kFeature, cpu::supports_quads, kKernels>,
      .run =
          [](const Call& call) {
            return cpu::run_quads(kKernels, {&call, 1});
          },
      .run_together = [](std::span<const Call> calls) { return cpu::run_quads(kKernels, calls); },
      .configure = [](const Problem& p, const Machine& m) { return cpu::configure_quads(kKernels, p, m); },
      .fields = cpu::PairsBlocking::kFields,
      .candidates = [](const Problem& p, const Machine& m) { return cpu::quads_candidates(kKernels, p, m); },
      .workspace = [](const Problem& p, const Config& c) { return cpu::quads_workspace(kKernels, p, c); },
      .unheld = Unheld::made,
      .derives_as = packed,
      .prepared_size = [](const Problem& p, const Config&) { return cpu::quads_prepared_size(kKernels, p); },
      .prepare = [](const Call& call, void* to) { return cpu::prepare_quads(kKernels, call, to); },
      .packed_size = [](const Problem& p, const Config&) { return cpu::quads_packed_size(kKernels, p); },
      .pack = [](const Call& call, void* to) { return cpu::pack_quads_weight(kKernels, call, to); },
  });
}

// Scaled int8 values as floats, for the same family's kernels.
template <const cpu::Kernels& kKernels, const std::string_view& kFeature>
void add_scaled(Registry& registry, std::string_view linear, std::string_view grad_input) {
  for (const Op op : {Op::linear, Op::grad_input}) {
    registry.push_back({
        .op = op,
        .device = Device::cpu,
        .family = kKernels.family,
        .name = op == Op::linear ? linear : grad_input,
        .supports = supports<kFeature, cpu::supports_scaled>,
        .run = cpu::run_scaled,
        .configure = cpu::configure_scaled,
        .fields = cpu::ScaledWorkspace::kFields,
        .workspace = cpu::scaled_workspace,
        .unheld = Unheld::made,
        .derives_as = "scaled",
        .packed_size = cpu::scaled_packed_size,
        .pack = cpu::pack_scaled,
    });
  }
}

constexpr std::string_view kAny;
#if defined(__x86_64__)
constexpr std::string_view kHasAvx512 = "avx512";
constexpr std::string_view kHasAvx2 = "avx2";
constexpr std::string_view kHasAvxVnni = "avx_vnni";
constexpr std::string_view kHasAmx = "amx_bf16";
constexpr std::string_view kHasBf16 = "avx512_bf16_fast";
constexpr std::string_view kHasVnni = "avx512_vnni";
constexpr std::string_view kHasAmxInt8 = "amx_int8";
#elif defined(__aarch64__)
constexpr std::string_view kHasNeon = "neon";
#endif

}  // namespace

void register_cpu(Registry& registry) {
#if defined(__x86_64__)
  add_pairs<cpu::kAmx, kHasAmx>(registry, "amx_linear", "amx_grad_input", "amx_grad_input_columns",
                                "amx_grad_weight", "amx_feed_forward", "pairs_32", "pairs_32_transposed");
  add_grad_weight<cpu::kDotsBf16, kHasBf16, cpu::supports_grad_weight_dots>(registry,
                                                                            "avx512_bf16_grad_weight_dots");
  add_pairs<cpu::kAvx512Bf16, kHasBf16>(registry, "avx512_bf16_linear", "avx512_bf16_grad_input",
                                        "avx512_bf16_grad_input_columns", "avx512_bf16_grad_weight",
                                        "avx512_bf16_feed_forward", "pairs", "pairs_transposed");
  add_quads<cpu::kQuadsAmx, kHasAmxInt8>(registry, "amx_linear_int8", "quads");
  add_quads<cpu::kQuadsVnniRows, kHasVnni>(registry, "avx512_linear_int8_rows", "quad_lanes");
  add_quads<cpu::kQuadsVnni, kHasVnni>(registry, "avx512_linear_int8", "quad_lanes");
  add_quads<cpu::kQuadsAvxVnni, kHasAvxVnni>(registry, "avx_vnni_linear_int8", "quad_eights");
  add_quads<cpu::kQuadsAvx2, kHasAvx2>(registry, "avx2_linear_int8", "quad_eights");
  add_few<cpu::kFewBf16, kHasBf16>(registry, "avx512_bf16_linear_few");
  add_windows<cpu::kFewAvx512, kHasAvx512>(registry, "avx512_linear_windows");
  add_few<cpu::kFewAvx512, kHasAvx512>(registry, "avx512_linear_few");
  add_lanes<cpu::kLanesAvx512, cpu::kAvx512, kHasAvx512>(registry, "avx512_linear_lanes",
                                                         "avx512_grad_input_lanes");
  add_pieces<cpu::kAvx512, kHasAvx512>(registry, "avx512_linear_pieces", "avx512_grad_input_pieces", "pieces",
                                       "pieces_transposed");
  add_in_place<cpu::kAvx512, kHasAvx512>(registry, "avx512_linear_in_place");
  add<cpu::kAvx512, kHasAvx512>(registry, "avx512_linear", "avx512_grad_input", "avx512_grad_weight");
  add_doubles<cpu::kDoublesAvx512, kHasAvx512>(registry, "avx512_linear_doubles", "avx512_grad_input_doubles",
                                               "avx512_grad_weight_doubles");
  add_bitmap<cpu::kAvx512, kHasAvx512>(registry, "avx512_linear_bitmap", "avx512_linear_two_of_four");
  add_feed_forward<cpu::kAvx512, kHasAvx512>(registry, "avx512_feed_forward", "avx512_feed_forward_apart");
  add_scaled<cpu::kAvx512, kHasAvx512>(registry, "avx512_linear_scaled", "avx512_grad_input_scaled");
  add_few<cpu::kFewAvx2, kHasAvx2>(registry, "avx2_linear_few");
  add_lanes<cpu::kLanesAvx2, cpu::kAvx2, kHasAvx2>(registry, "avx2_linear_lanes", "avx2_grad_input_lanes");
  add_pieces<cpu::kAvx2, kHasAvx2>(registry, "avx2_linear_pieces", "avx2_grad_input_pieces", "pieces",
                                   "pieces_transposed");
  add_in_place<cpu::kAvx2, kHasAvx2>(registry, "avx2_linear_in_place");
  add<cpu::kAvx2, kHasAvx2>(registry, "avx2_linear", "avx2_grad_input", "avx2_grad_weight");
  add_doubles<cpu::kDoublesAvx2, kHasAvx2>(registry, "avx2_linear_doubles", "avx2_grad_input_doubles",
                                           "avx2_grad_weight_doubles");
  add_bitmap<cpu::kAvx2, kHasAvx2>(registry, "avx2_linear_bitmap", "avx2_linear_two_of_four");
  add_feed_forward<cpu::kAvx2, kHasAvx2>(registry, "avx2_feed_forward", "avx2_feed_forward_apart");
  add_scaled<cpu::kAvx2, kHasAvx2>(registry, "avx2_linear_scaled", "avx2_grad_input_scaled");
#elif defined(__aarch64__)
  add_pieces<cpu::kNeon, kHasNeon>(registry, "neon_linear_pieces", "neon_grad_input_pieces", "pieces",
                                   "pieces_transposed");
  add_in_place<cpu::kNeon, kHasNeon>(registry, "neon_linear_in_place");
  add<cpu::kNeon, kHasNeon>(registry, "neon_linear", "neon_grad_input", "neon_grad_weight");
  add_bitmap<cpu::kNeon, kHasNeon>(registry, "neon_linear_bitmap", "neon_linear_two_of_four");
  add_feed_forward<cpu::kNeon, kHasNeon>(registry, "neon_feed_forward", "neon_feed_forward_apart");
  add_scaled<cpu::kNeon, kHasNeon>(registry, "neon_linear_scaled", "neon_grad_input_scaled");
#endif
  add_pieces<cpu::kScalar, kAny>(registry, "scalar_linear_pieces", "scalar_grad_input_pieces", "pieces",
                                 "pieces_transposed");
  add_in_place<cpu::kScalar, kAny>(registry, "scalar_linear_in_place");
  add<cpu::kScalar, kAny>(registry, "scalar_linear", "scalar_grad_input", "scalar_grad_weight");
  add_doubles<cpu::kDoublesScalar, kAny>(registry, "scalar_linear_doubles", "scalar_grad_input_doubles",
                                         "scalar_grad_weight_doubles");
  add_bitmap<cpu::kScalar, kAny>(registry, "scalar_linear_bitmap", "scalar_linear_two_of_four");
  add_feed_forward<cpu::kScalar, kAny>(registry, "scalar_feed_forward", "scalar_feed_forward_apart");
  add_quads<cpu::kQuadsScalar, kAny>(registry, "scalar_linear_int8", "quads");
  add_scaled<cpu::kScalar, kAny>(registry, "scalar_linear_scaled", "scalar_grad_input_scaled");
  // After rows that take all that it takes: only who asks for it by name gets it.
  add_pairs<cpu::kPairsPortable, kAny>(registry, "pairs_linear", "pairs_grad_input",
                                       "pairs_grad_input_columns", "pairs_grad_weight", "pairs_feed_forward",
                                       "pairs_32", "pairs_32_transposed");
}

std::span<const RowKernels> row_kernels() {
#if defined(__x86_64__)
  static constexpr std::pair<const cpu::Kernels*, std::string_view> kUnits[] = {{&cpu::kAvx512, kHasAvx512},
                                                                                {&cpu::kAvx2, kHasAvx2}};
#elif defined(__aarch64__)
  static constexpr std::pair<const cpu::Kernels*, std::string_view> kUnits[] = {{&cpu::kNeon, kHasNeon}};
#else
  static constexpr std::array<std::pair<const cpu::Kernels*, std::string_view>, 0> kUnits;
#endif
  static const auto rows = [] {
    std::vector<RowKernels> list;
    for (const auto& [unit, feature] : kUnits) list.push_back({unit->family, feature, unit->softmax});
    return list;
  }();
  return rows;
}

const Machine& cpu_machine() {
  static const Machine machine = cpu::detect();
  return machine;
}

}  // namespace rarefy
