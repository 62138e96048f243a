// Drives products in bf16 pairs (pairs.h). A task packs a set of panels of tokens and goes through a range of
// output blocks: the weights of one meet all panels of the set before the next one's turn, so that they come
// out of L3 or memory once a set. Weights are tiles of 16 outputs × 32 of the block row's stored columns,
// whatever their blocks were.
#include "cpu/linear_pairs.h"

#include <algorithm>
#include <limits>

#include "core/message.h"
#include "cpu/pairs_weight.h"

namespace rarefy::cpu {

namespace {

// Of what a call derives for itself.
std::int64_t own_bytes(const PairsShape& s) { return Prepared(s, nullptr).bytes + s.tiles_bytes(); }

PairsStored stored_of(const Call& call) {
  if (call.problem.op == Op::linear) return {operand(call, call.plan.col, nullptr, false), call.plan.crow};
  return {operand(call, call.plan.row, call.plan.perm, true), call.plan.ccol};
}

// The working memory of a call: what all tasks read, and what each worker has.
struct Parts {
  float* bias;
  std::uint16_t* panels;
  std::uint16_t* gathered;
  std::uint32_t* unfinished;
  float* sums;
};

struct PairsLayout {
  std::int64_t shared, worker;  // bytes

  PairsLayout(const PairsShape& s, const PairsBlocking& b) {
    Parts parts{};
    Room all;
    take_shared(all, s, parts);
    shared = all.bytes();
    Room own;
    take_worker(own, s, b, parts);
    worker = own.bytes();
  }
  static void take_shared(Room& room, const PairsShape& s, Parts& parts) {
    parts.bias = room.take<float>(s.out_features() + kGroup);
  }
  static void take_worker(Room& room, const PairsShape& s, const PairsBlocking& b, Parts& parts) {
    parts.panels = room.take<std::uint16_t>(b.panels * s.panel_size());
    parts.gathered = room.take<std::uint16_t>(kGatheredGroups * kGroupSize);
    parts.unfinished = room.take<std::uint32_t>(b.panels);
    parts.sums = room.take<float>(std::min(b.panels, kNear) * s.sums_size());
  }
};

// Output blocks begin … end for tokens first … first + tokens.
void run_task(const PairsWeight& w, const Call& call, const Parts& parts, std::int64_t first,
              std::int64_t tokens, std::int64_t begin, std::int64_t end) {
  const PairsShape& s = w.shape;
  w.kernels.enter();
  pack_panels(w.kernels, s, call.problem.op == Op::linear ? call.x : call.dy, first, tokens, parts.panels,
              s.panel_size());
  find_unfinished(w.kernels, s, parts.panels, s.panel_size(), tokens, parts.unfinished);
  w.multiply(
      parts.panels, s.panel_size(), tokens, parts.unfinished, begin, end, parts.gathered, parts.sums,
      [&](std::int64_t m, std::int32_t rows, std::int64_t block, std::int64_t stop, const float* sums) {
        const std::int64_t from = block * s.out_block;
        w.kernels.store({sums, parts.bias + from, call.activation,
                         reinterpret_cast<std::uint16_t*>(at(call.out, first + m, from)), call.out.row_stride,
                         rows,
                         static_cast<std::int32_t>(std::min(stop * s.out_block, call.out.cols) - from)});
      });
  w.kernels.leave();
}

// Cycles, measured (docs/design/cpu_kernels.md): packing and storing an element, and a byte of W out of L3.
constexpr double kPack = 0.3, kStore = 0.35, kWeightByte = 0.1;
constexpr std::int64_t kMostSet = 16;

// Tokens from which packing the weight in the call pays: half a nanosecond an element, against 0.008 saved a
// token on Zen 4 and 0.013 on AMX.
constexpr std::int64_t kPackingTokens = 64;

template <class F>
void for_each_blocking(const PairKernels& kernels, const Problem& p, const Machine& machine, F&& visit) {
  const PairsShape s(kernels, p);
  const double tiles = s.tiles();
  const auto out = static_cast<double>(s.out_features());
  const std::int64_t all = std::max<std::int64_t>(1, ceil_div(p.tokens, kPanelTokens));
  const std::int64_t fit = panel_floats(machine) * 2 / s.panel_size();
  const std::int64_t most = std::clamp<std::int64_t>(fit, 1, std::min(all, kMostSet));
  for (std::int64_t panels = 1; panels <= most; ++panels) {
    const std::int64_t sets = ceil_div(all, panels);
    const double pack = static_cast<double>(panels * s.panel_size()) * kPack;
    const double work =
        tiles * (static_cast<double>(panels) * kernels.tile_cycles + 2 * kTileSize * kWeightByte) +
        out * static_cast<double>(panels * kPanelTokens) * kStore;
    for (std::int64_t splits = 1; splits <= std::min<std::int64_t>(4 * p.threads, s.out_blocks); ++splits) {
      const std::int64_t rounds = ceil_div(sets * splits, p.threads);
      visit(PairsBlocking{panels, splits},
            static_cast<double>(rounds) * (pack + work / static_cast<double>(splits)));
    }
  }
}

}  // namespace

Reason supports_pairs(const PairKernels& kernels, const Problem& p) {
  if (p.in != DType::bf16 || p.weight.dtype != DType::bf16 || p.out != DType::bf16) {
    return "takes bf16 inputs and values alone, to bf16";
  }
  const PairsShape s(kernels, p);
  if (Reason reason = takes_rows(s.row_block); !reason.empty()) return reason;
  if (s.panel_size() > std::numeric_limits<std::uint32_t>::max())
    return "takes less than 2^27 input features";
  if (p.tokens <= kFewTokens) return cat("takes more than ", kFewTokens, " tokens; got ", p.tokens);
  if (p.derived == 0 && p.tokens < kPackingTokens) {
    return cat("without its packed weight, takes at least ", kPackingTokens, " tokens; got ", p.tokens);
  }
  return {};
}

Config configure_pairs(const PairKernels& kernels, const Problem& problem, const Machine& machine) {
  return to_config(
      cheapest<PairsBlocking>([&](auto&& visit) { for_each_blocking(kernels, problem, machine, visit); }));
}

std::vector<Config> pairs_candidates(const PairKernels& kernels, const Problem& problem,
                                     const Machine& machine) {
  std::vector<Config> all;
  for_each_blocking(kernels, problem, machine,
                    [&](const PairsBlocking& b, double) { all.push_back(to_config(b)); });
  return all;
}

std::int64_t pairs_workspace(const PairKernels& kernels, const Problem& problem, const Config& config) {
  const PairsShape s(kernels, problem);
  const PairsLayout layout(s, from_config<PairsBlocking>(config));
  return (problem.derived == 0 ? own_bytes(s) : 0) + layout.shared + problem.threads * layout.worker;
}

std::int64_t pairs_prepared_size(const PairKernels& kernels, const Problem& problem) {
  return Prepared(PairsShape(kernels, problem), nullptr).bytes;
}

std::int64_t pairs_packed_size(const PairKernels& kernels, const Problem& problem) {
  return PairsShape(kernels, problem).tiles_bytes();
}

Status prepare_pairs(const PairKernels& kernels, const Call& call, void* data) {
  prepare_pairs(PairsShape(kernels, call.problem), stored_of(call), data);
  return {};
}

Status pack_pairs_weight(const PairKernels& kernels, const Call& call, void* packed) {
  pack_pairs(PairsShape(kernels, call.problem), stored_of(call), call.executor, call.derived.prepared,
             packed);
  return {};
}

Status run_pairs(const PairKernels& kernels, const Call& given) {
  const auto b = from_config<PairsBlocking>(given.config);
  const PairsShape s(kernels, given.problem);
  if (b.panels < 1 || b.panels > 4096 || b.splits < 1 || b.splits > std::max<std::int64_t>(1, s.out_blocks)) {
    return invalid(kernels.family,
                   cat("panels and splits of the config must be in [1, 4096] and [1, ", s.out_blocks, ']'),
                   cat(b.panels, " and ", b.splits));
  }
  Call call = given;
  auto* memory = static_cast<char*>(call.workspace);
  if (call.derived.packed == nullptr) {
    char* packed = memory + Prepared(s, nullptr).bytes;
    call.derived.prepared = memory;
    call.derived.packed = packed;
    prepare_pairs(s, stored_of(call), memory);
    pack_pairs(s, stored_of(call), call.executor, memory, packed);
    memory += own_bytes(s);
  }
  const PairsLayout layout(s, b);
  Parts shared{};
  Room all(memory);
  PairsLayout::take_shared(all, s, shared);
  unpack_pairs_bias(call.bias, call.out.cols, s.out_features() + kGroup, shared.bias);
  const std::int64_t tokens = b.panels * kPanelTokens;
  const std::int64_t sets = ceil_div(call.problem.tokens, tokens);
  const PairsWeight weight(kernels, s, stored_of(call), call.derived);
  call.executor.parallel_for(sets * b.splits, [&](std::int64_t t, int worker) {
    const std::int64_t first = t / b.splits * tokens;
    const std::int64_t part = t % b.splits;
    const std::int32_t from = weight.begin_of(part, b.splits), to = weight.begin_of(part + 1, b.splits);
    if (from == to) return;
    Parts parts = shared;
    Room own(memory + layout.shared + worker * layout.worker);
    PairsLayout::take_worker(own, s, b, parts);
    run_task(weight, call, parts, first, std::min(tokens, call.problem.tokens - first), from, to);
  });
  return {};
}

}  // namespace rarefy::cpu
