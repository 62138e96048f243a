// Drives products in bf16 pairs (pairs.h). A task packs a set of panels of tokens and goes through a range of
// output blocks: the weights of one meet all panels of the set before the next one's turn, so that they come
// out of L3 or memory once a set. Weights are tiles of 16 outputs × 32 of the block row's stored columns,
// whatever their blocks were.
#include "cpu/linear_pairs.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/message.h"
#include "cpu/lane_task.h"
#include "cpu/pairs_weight.h"

namespace rarefy::cpu {

namespace {

PairsStored stored_of(const Call& call) {
  if (call.problem.op == Op::linear) return {operand(call, call.plan.col, nullptr, false), call.plan.crow};
  return {operand(call, call.plan.row, call.plan.perm, true), call.plan.ccol};
}

// So many tokens go by lanes of outputs: a panel that is not full costs what it holds. One vector of outputs
// has a load for each product: 32 tokens of 16×1 and 16×16 at .5 took .22 and .19 ms, by a panel .18 and .17
// (Zen 5).
bool takes_lanes(const PairKernels& kernels, const PairsShape& s, std::int64_t tokens) {
  const std::int64_t most = s.out_block == kTileRows ? 24 : kPanelTokens;
  return kernels.lanes != nullptr && s.out_block % kTileRows == 0 && !s.mixed() && tokens <= most;
}

// Up to 8 tokens may have a kernel of their own, for output blocks that are no block rows: panels of 4.
constexpr std::int64_t kFewPanels = 2;
std::int64_t few_size(const PairKernels& kernels, const PairsShape& s) {
  return kernels.few != nullptr && s.mixed() ? ceil_div(s.padded, kGroup) * kGroup * kFewTokens : 0;
}

// The working memory of a call: what all tasks read, and what each worker has.
struct Parts {
  float* bias;
  std::uint16_t* panels;
  std::uint16_t* gathered;
  std::uint16_t* few;
  std::uint32_t* unfinished;
  float* sums;
};

struct PairsLayout {
  std::int64_t shared, worker;  // bytes

  PairsLayout(const PairKernels& kernels, const PairsShape& s, const PairsBlocking& b) {
    Parts parts{};
    Room all;
    take_shared(all, s, parts);
    shared = all.bytes();
    Room own;
    take_worker(own, kernels, s, b, parts);
    worker = own.bytes();
  }
  static void take_shared(Room& room, const PairsShape& s, Parts& parts) {
    parts.bias = room.take<float>(s.out_features() + kGroup);
  }
  static void take_worker(Room& room, const PairKernels& kernels, const PairsShape& s, const PairsBlocking& b,
                          Parts& parts) {
    parts.panels = room.take<std::uint16_t>(b.panels * s.panel_size());
    parts.gathered =
        room.take<std::uint16_t>(std::max<std::int64_t>(kGatheredGroups * kGroupSize, 2 * kLaneRing));
    parts.few = room.take<std::uint16_t>(kFewPanels * few_size(kernels, s));
    parts.unfinished = room.take<std::uint32_t>(b.panels);
    parts.sums = room.take<float>(std::min(b.panels, s.near()) * s.sums_size());
  }
};

// Output blocks begin … end for up to 8 tokens; those with NaN or infinity are summed up anew, as ever.
void multiply_few(const PairsWeight& w, const Call& call, const Parts& parts, std::int64_t first,
                  std::int64_t tokens, std::int64_t begin, std::int64_t end) {
  const PairsShape& s = w.shape;
  const auto rows = static_cast<std::int32_t>(tokens);
  w.kernels.few_pack({at(call.x, first, 0), call.x.dtype == DType::f32, call.x.row_stride, rows,
                      static_cast<std::int32_t>(call.x.cols), static_cast<std::int32_t>(s.padded),
                      order_of(s.source), parts.few});
  *parts.unfinished = 0;
  const std::int64_t size = few_size(w.kernels, s);
  if (!w.kernels.finite(parts.few, ceil_div(tokens, kFewTokens) * size)) {
    pack_panels(w.kernels, s, call.x, first, tokens, parts.panels, s.panel_size());
    find_unfinished(w.kernels, s, parts.panels, s.panel_size(), tokens, parts.unfinished);
  }
  const auto finish = w.storing(call.out, first, parts.bias, call.activation);
  for (std::int64_t o = begin; o < end; o += s.finished()) {
    const std::int64_t blocks = std::min(s.finished(), end - o);
    w.kernels.few({w.packed + w.prepared.first[o] * s.tiles_size(),
                   w.prepared.offsets + w.prepared.first[o] * s.offsets(), s.source, w.prepared.first + o,
                   static_cast<std::int32_t>(blocks), rows, parts.few, size, parts.sums});
    for (std::int64_t b = 0; b < blocks; ++b) {
      w.sum_unfinished(o + b, parts.panels, *parts.unfinished, parts.sums + b * s.out_block * kPanelTokens);
    }
    finish(0, rows, o * s.out_block, blocks * s.out_block, parts.sums);
  }
}

// A part of the output blocks of every call, for a task's tokens.
void run_task(const PairKernels& kernels, std::span<const Call> calls, Parts parts,
              const PanelTasks::Task& task) {
  const std::int64_t first = task.first, tokens = task.tokens;
  bool packed = false;
  kernels.enter();
  for (const Call& call : calls) {
    const PairsShape s(kernels, call.problem);
    PairsWeight w(kernels, s, stored_of(call), call.derived);
    w.again = task.again && calls.size() == 1;
    const std::int64_t begin = w.begin_of(task.part, task.parts), end = w.begin_of(task.part + 1, task.parts);
    if (begin == end) continue;
    Room own(call.workspace);
    PairsLayout::take_shared(own, s, parts);
    if (tokens <= kFewPanels * kFewTokens && few_size(kernels, s) > 0 && call.problem.op == Op::linear) {
      multiply_few(w, call, parts, first, tokens, begin, end);
      continue;
    }
    if (!std::exchange(packed, true)) {
      pack_panels(kernels, s, call.problem.op == Op::linear ? call.x : call.dy, first, tokens, parts.panels,
                  s.panel_size());
      find_unfinished(kernels, s, parts.panels, s.panel_size(), tokens, parts.unfinished);
    }
    if (takes_lanes(kernels, s, tokens)) {
      LaneTask lanes(s, w.prepared, w.packed, {w.stored.begin, w.stored.w.index},
                     {parts.panels, parts.gathered, parts.sums}, {first, tokens},
                     {parts.bias, nullptr, nullptr, nullptr}, call, kernels.lanes);
      if (s.source == PairSource::columns) {
        lanes.columns(begin, end);
      } else {
        lanes.lines(begin, end);
      }
      continue;
    }
    w.multiply(parts.panels, s.panel_size(), tokens, parts.unfinished, begin, end, parts.gathered, parts.sums,
               w.storing(call.out, first, parts.bias, call.activation));
  }
  kernels.leave();
}

// Tokens from which packing the weight in the call pays: half a nanosecond an element, against 0.008 saved a
// token on Zen 4 and 0.013 on AMX.
constexpr std::int64_t kPackingTokens = 64;

// Up to so many tokens W is read as it is stored (few.h). A tile takes as long for 2 to 16 as for one: less
// than that for blocks of whole groups (AMX, 32×32: .25 ms for 4 tokens, .11 for 5), and for those that go
// row by row. 768→3072 on AMX, µs of 1 and 4 tokens, as stored and (5) on tiles: at .5 CSR 850, 1000 and 370,
// 3×5 660, 940 and 370, 10×10 284, 456 and 318, at .25 485, 579 and 361, 421, 614 and 354, 146, 281 and 259.
std::int64_t few_tokens(const PairKernels& kernels, const PairsShape& s, const Problem& p) {
  if (s.by_token()) return 1;
  if (p.op != Op::linear) return kFewTokens;
  const BsrShape& w = p.weight.shape;
  const std::int64_t rows = w.block_rows, cols = w.block_cols;
  const double density = s.density();
  if (few_size(kernels, s) > 0) {
    // Single weights out of memory are fewer bytes as they are (4096² at .25, × dense 2.9 and 1.25); one
    // token of long odd rows goes well by row (17×33, 768→3072 at .5 91 and 130 µs).
    if (rows * cols == 1) return density < 0.4 && s.tiles_bytes() > kCached ? kFewTokens : 0;
    return cols > 1 && cols % 2 == 1 && rows > 4 ? 1 : 0;
  }
  const bool by_row = (cols > 1 && !few_fills(kTileRows, rows, cols)) || (rows < 4 && rows * cols <= 4);
  if (kernels.rows < kTileRows || !by_row) return kFewTokens;
  const bool small = rows * cols < 64;
  if (rows * cols == 1) return density > 0.2 ? 0 : kFewTokens;  // holders derive one thing for all few tokens
  if (small && density > 0.4) return 0;
  return density > (small ? 0.2 : 0.4) ? 2 : kFewTokens;
}

// Lanes of two vectors of outputs, where two products start in a cycle (Zen 5): R×1 blocks' pairs are put
// together anew for each panel.
constexpr double kLanesCycles = 0.99, kLanesColumnsCycles = 1.08;  // of tile_cycles

PanelWork work_of(const PairKernels& kernels, const Problem& p, const Machine& machine) {
  const PairsShape s(kernels, p);
  PanelWork work{s.tiles(),      kernels.tile_cycles, static_cast<double>(s.panel_size()),
                 s.panel_size(), s.out_features(),    s.out_blocks};
  if (kernels.range != nullptr) {
    work.most = kNear;  // as many as read a block row at a time
    work.ahead = true;
  }
  if (takes_lanes(kernels, s, kPanelTokens) && is_zen5(machine)) {
    work.alone_cycles =
        work.tile_cycles * (s.source == PairSource::columns ? kLanesColumnsCycles : kLanesCycles);
  }
  return work;
}

}  // namespace

Reason supports_pairs(const PairKernels& kernels, const Problem& p) {
  if (Reason reason = takes_pairs(p, p.weight); !reason.empty()) return reason;
  const PairsShape s(kernels, p);
  if (Reason reason = takes_rows(kernels, s, p.op, p.tokens); !reason.empty()) return reason;
  if (s.panel_size() > std::numeric_limits<std::uint32_t>::max())
    return "takes less than 2^27 input features";
  const std::int64_t few = few_tokens(kernels, s, p);
  if (p.tokens <= few) return cat("takes at least ", few + 1, " tokens; got ", p.tokens);
  if (p.derived == 0 && p.tokens < kPackingTokens) {
    return cat("without its packed weight, takes at least ", kPackingTokens, " tokens; got ", p.tokens);
  }
  return {};
}

Config configure_pairs(const PairKernels& kernels, const Problem& problem, const Machine& machine) {
  return configure_panels(work_of(kernels, problem, machine), problem, machine);
}

std::vector<Config> pairs_candidates(const PairKernels& kernels, const Problem& problem,
                                     const Machine& machine) {
  return panel_candidates(work_of(kernels, problem, machine), problem, machine);
}

std::int64_t pairs_workspace(const PairKernels& kernels, const Problem& problem, const Config& config) {
  const PairsShape s(kernels, problem);
  const PairsLayout layout(kernels, s, from_config<PairsBlocking>(config));
  return layout.shared + problem.threads * layout.worker;
}

std::int64_t pairs_prepared_size(const PairKernels& kernels, const Problem& problem) {
  return Prepared(PairsShape(kernels, problem), nullptr).bytes;
}

std::int64_t pairs_packed_size(const PairKernels& kernels, const Problem& problem) {
  return PairsShape(kernels, problem).tiles_bytes();
}

Status prepare_pairs(const PairKernels& kernels, const Call& call, void* data) {
  const PairsStored stored = stored_of(call);
  prepare_groups(PairsShape(kernels, call.problem), stored.begin, stored.w.index, data);
  return {};
}

Status pack_pairs_weight(const PairKernels& kernels, const Call& call, void* packed) {
  pack_pairs(PairsShape(kernels, call.problem), stored_of(call), call.executor, call.derived.prepared,
             packed);
  return {};
}

Status run_pairs(const PairKernels& kernels, std::span<const Call> calls) {
  const Call& lead = calls.front();  // whose workspace has the panels of all
  const auto b = from_config<PairsBlocking>(lead.config);
  std::int64_t out_blocks = 0;
  for (const Call& call : calls) {
    const PairsShape s(kernels, call.problem);
    out_blocks += s.out_blocks;
    Parts shared{};
    Room all(call.workspace);
    PairsLayout::take_shared(all, s, shared);
    unpack_pairs_bias(call.bias, call.out.dtype, call.out.cols, s.out_features() + kGroup, shared.bias);
  }
  if (Status status = check_panels(kernels.family, b, out_blocks); !status.ok()) return status;
  const PairsShape s(kernels, lead.problem);
  const PairsLayout layout(kernels, s, b);
  for_each_part(lead, b, [&](int worker, const PanelTasks::Task& task) {
    Parts parts{};
    Room own(static_cast<char*>(lead.workspace) + layout.shared + worker * layout.worker);
    PairsLayout::take_worker(own, kernels, s, b, parts);
    run_task(kernels, calls, parts, task);
  });
  return {};
}

}  // namespace rarefy::cpu
