// The CPU's kernels as rows, best first. All that were compiled in are listed; what the processor lacks is
// their reason.
#include "cpu/cpuid.h"
#include "cpu/register_floats.h"
#include "cpu/register_packed.h"

namespace rarefy {

namespace {

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
  using namespace cpu;
#if defined(__x86_64__)
  add_pairs<kAmx, kHasAmx>(registry, "amx_linear", "amx_grad_input", "amx_grad_input_columns",
                           "amx_grad_weight", "amx_feed_forward", "pairs_32", "pairs_32_transposed");
  add_grad_weight<kDotsBf16, kHasBf16, supports_grad_weight_dots>(registry, "avx512_bf16_grad_weight_dots");
  add_few<kFewBf16, kHasBf16>(registry, "avx512_bf16_linear_few");
  add_pairs<kAvx512Bf16, kHasBf16>(registry, "avx512_bf16_linear", "avx512_bf16_grad_input",
                                   "avx512_bf16_grad_input_columns", "avx512_bf16_grad_weight",
                                   "avx512_bf16_feed_forward", "pairs", "pairs_transposed");
  add_quads<kQuadsAmxTokens, kHasAmxInt8>(registry, "amx_linear_int8_tokens", "quads");
  add_quads<kQuadsAmx, kHasAmxInt8>(registry, "amx_linear_int8", "quads");
  add_quads<kQuadsVnniRows, kHasVnni>(registry, "avx512_linear_int8_rows", "quad_lanes");
  add_quads<kQuadsVnni, kHasVnni>(registry, "avx512_linear_int8", "quad_lanes");
  add_quads<kQuadsAvxVnniRows, kHasAvxVnni>(registry, "avx_vnni_linear_int8_rows", "quad_eights");
  add_quads<kQuadsAvxVnni, kHasAvxVnni>(registry, "avx_vnni_linear_int8", "quad_eights");
  add_quads<kQuadsAvx2Rows, kHasAvx2>(registry, "avx2_linear_int8_rows", "quad_eights_split");
  add_quads<kQuadsAvx2, kHasAvx2>(registry, "avx2_linear_int8", "quad_eights_split");
  add_digits<kQuadsAmxTokens, kAvx512, kHasAmxInt8>(registry, "amx_linear_digits_tokens", "quads");
  add_digits<kQuadsAmx, kAvx512, kHasAmxInt8>(registry, "amx_linear_digits", "quads");
  add_digits<kQuadsVnniRows, kAvx512, kHasVnni>(registry, "avx512_linear_digits_rows", "quad_lanes");
  add_digits<kQuadsVnni, kAvx512, kHasVnni>(registry, "avx512_linear_digits", "quad_lanes");
  add_digits<kQuadsAvxVnni, kAvx2, kHasAvxVnni>(registry, "avx_vnni_linear_digits", "quad_eights");
  add_feed_forward_quads<kQuadsAmx, kHasAmxInt8>(registry, "amx_feed_forward_int8", "quads");
  add_feed_forward_quads<kQuadsVnni, kHasVnni>(registry, "avx512_feed_forward_int8", "quad_lanes");
  add_feed_forward_quads<kQuadsAvxVnni, kHasAvxVnni>(registry, "avx_vnni_feed_forward_int8", "quad_eights");
  add_feed_forward_quads<kQuadsAvx2, kHasAvx2>(registry, "avx2_feed_forward_int8", "quad_eights_split");
  add_windows<kFewAvx512, kHasAvx512>(registry, "avx512_linear_windows");
  add_sell<kSellAvx512, kHasAvx512>(registry, "avx512_linear_sell", "sell_16");
  add_few<kFewAvx512, kHasAvx512>(registry, "avx512_linear_few");
  add_lanes<kLanesAvx512, kAvx512, kHasAvx512>(registry, "avx512_linear_lanes", "avx512_grad_input_lanes");
  add_pieces<kAvx512, kHasAvx512>(registry, "avx512_linear_pieces", "avx512_grad_input_pieces", "pieces",
                                  "pieces_transposed");
  add_in_place<kAvx512, kHasAvx512>(registry, "avx512_linear_in_place");
  add_products<kAvx512, kHasAvx512>(registry, "avx512_linear", "avx512_grad_input", "avx512_grad_weight");
  add_doubles<kDoublesAvx512, kHasAvx512>(registry, "avx512_linear_doubles", "avx512_grad_input_doubles",
                                          "avx512_grad_weight_doubles");
  add_bitmap<kAvx512, kHasAvx512>(registry, "avx512_linear_bitmap", "avx512_linear_two_of_four");
  add_feed_forward<kAvx512, kHasAvx512>(registry, "avx512_feed_forward", "avx512_feed_forward_apart");
  add_few_scaled<kFewAvx512, kHasAvx512>(registry, "avx512_linear_few_int8");
  add_scaled<kAvx512, kHasAvx512>(registry, "avx512_linear_scaled", "avx512_grad_input_scaled");
  add_sell<kSellAvx2, kHasAvx2>(registry, "avx2_linear_sell", "sell_8");
  add_few<kFewAvx2, kHasAvx2>(registry, "avx2_linear_few");
  add_lanes<kLanesAvx2, kAvx2, kHasAvx2>(registry, "avx2_linear_lanes", "avx2_grad_input_lanes");
  add_pieces<kAvx2, kHasAvx2>(registry, "avx2_linear_pieces", "avx2_grad_input_pieces", "pieces",
                              "pieces_transposed");
  add_in_place<kAvx2, kHasAvx2>(registry, "avx2_linear_in_place");
  add_products<kAvx2, kHasAvx2>(registry, "avx2_linear", "avx2_grad_input", "avx2_grad_weight");
  add_doubles<kDoublesAvx2, kHasAvx2>(registry, "avx2_linear_doubles", "avx2_grad_input_doubles",
                                      "avx2_grad_weight_doubles");
  add_bitmap<kAvx2, kHasAvx2>(registry, "avx2_linear_bitmap", "avx2_linear_two_of_four");
  add_feed_forward<kAvx2, kHasAvx2>(registry, "avx2_feed_forward", "avx2_feed_forward_apart");
  add_few_scaled<kFewAvx2, kHasAvx2>(registry, "avx2_linear_few_int8");
  add_scaled<kAvx2, kHasAvx2>(registry, "avx2_linear_scaled", "avx2_grad_input_scaled");
#elif defined(__aarch64__)
  add_pieces<kNeon, kHasNeon>(registry, "neon_linear_pieces", "neon_grad_input_pieces", "pieces",
                              "pieces_transposed");
  add_in_place<kNeon, kHasNeon>(registry, "neon_linear_in_place");
  add_products<kNeon, kHasNeon>(registry, "neon_linear", "neon_grad_input", "neon_grad_weight");
  add_bitmap<kNeon, kHasNeon>(registry, "neon_linear_bitmap", "neon_linear_two_of_four");
  add_feed_forward<kNeon, kHasNeon>(registry, "neon_feed_forward", "neon_feed_forward_apart");
  add_scaled<kNeon, kHasNeon>(registry, "neon_linear_scaled", "neon_grad_input_scaled");
#endif
  add_pieces<kScalar, kAny>(registry, "scalar_linear_pieces", "scalar_grad_input_pieces", "pieces",
                            "pieces_transposed");
  add_in_place<kScalar, kAny>(registry, "scalar_linear_in_place");
  add_products<kScalar, kAny>(registry, "scalar_linear", "scalar_grad_input", "scalar_grad_weight");
  add_doubles<kDoublesScalar, kAny>(registry, "scalar_linear_doubles", "scalar_grad_input_doubles",
                                    "scalar_grad_weight_doubles");
  add_bitmap<kScalar, kAny>(registry, "scalar_linear_bitmap", "scalar_linear_two_of_four");
  add_feed_forward<kScalar, kAny>(registry, "scalar_feed_forward", "scalar_feed_forward_apart");
  add_quads<kQuadsScalar, kAny>(registry, "scalar_linear_int8", "quads_plain");
  add_feed_forward_quads<kQuadsScalar, kAny>(registry, "scalar_feed_forward_int8", "quads_plain");
  add_scaled<kScalar, kAny>(registry, "scalar_linear_scaled", "scalar_grad_input_scaled");
  // After rows that take all that it takes: only who asks for it by name gets it.
  add_pairs<kPairsPortable, kAny>(registry, "pairs_linear", "pairs_grad_input", "pairs_grad_input_columns",
                                  "pairs_grad_weight", "pairs_feed_forward", "pairs_32",
                                  "pairs_32_transposed");
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
