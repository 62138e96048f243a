// feed_forward by `gather` on float panels: how it is cut, its workspace, and the run.
#include "cpu/feed_forward.h"

#include <array>

#include "core/message.h"
#include "cpu/blocking.h"

namespace rarefy::cpu {

namespace {

class FloatMultiply {
 public:
  using Element = float;
  static constexpr bool kInPlace = true;

  FloatMultiply(const Kernels& kernels, const Problem& p) : k_(kernels), part_terms_(part_terms(p)) {}

  void pack(const MatrixView& x, std::int64_t first, std::int32_t rows, std::int64_t features,
            std::int64_t lanes, float* to) const {
    k_.pack({{at(x, first, 0), x.row_stride, rows, static_cast<std::int32_t>(x.cols), storage(x.dtype)},
             to,
             static_cast<std::int32_t>(lanes)});
    std::fill(to + x.cols * lanes, to + features * lanes, 0.0F);
  }

  void product(const ChainedProduct& p, const float* in, std::int32_t vectors, float* sums,
               float* unpacked) const {
    const float* start = p.start == nullptr ? nullptr : p.start + std::int64_t{p.out_begin} * p.w.out_block;
    k_.gather({p.w, p.entry_begin, p.entry_end, p.out_begin, p.out_end, in, p.red_begin, sums, start, vectors,
               unpacked, part_entries(p.w.red_block, part_terms_), p.row, p.total, p.total_step});
  }

 private:
  const Kernels& k_;
  std::int32_t part_terms_;
};

// Cycles to activate one hidden feature of a token: an exponential, a division, a polynomial.
constexpr double kActivate = 1.5;
// Cycles of a weight on its way from L3, once a panel: two matrices pass by, and wide panels ask for them
// less often.
constexpr double kStream = 0.35;
// AMD's cores with 48 KB of L1 need no more than cycles_per_weight counts, fitted there (Zen 5, 32×1 at .5,
// 768→3072: panels of 3 vectors 13.7 ms, of 4 16.2).
double stream_of(const Machine& machine) { return is_zen5(machine) ? 0 : kStream; }

// Cycles of a round of tasks that all wait for.
constexpr double kBarrier = 10'000;

double weights(const WeightSpec& w) { return static_cast<double>(w.shape.value_count()); }

// Calls visit(cut, cost in cycles) for all that are weighed.
template <class F>
void for_each_cut(const Kernels& kernels, const Problem& p, const Machine& machine, F&& visit) {
  const FeedForwardSizes s(p);
  const auto per_weight = [&](const WeightSpec& w, int vectors) {
    BlockingProblem b;
    b.out_block = w.shape.block_rows;
    b.red_block = w.shape.block_cols;
    b.width = kernels.width;
    b.registers = kernels.registers;
    return cycles_per_weight(b, vectors, false) + stream_of(machine);
  };
  const auto sliced = [&](std::int64_t features) {  // equal ones, so that the last is no sliver
    const std::int64_t slices = std::max<std::int64_t>(1, (s.hidden + features - 1) / features);
    const std::int64_t even = (s.hidden + slices - 1) / slices;
    return std::max(s.granule, (even + s.granule - 1) / s.granule * s.granule);
  };
  for (int vectors = 1; vectors <= kernels.max_vectors; ++vectors) {
    const std::int64_t lanes = static_cast<std::int64_t>(vectors) * kernels.width;
    const std::int64_t panels = std::max<std::int64_t>(1, (p.tokens + lanes - 1) / lanes);
    const auto lane_count = static_cast<double>(lanes);
    const double first = weights(p.weight) * per_weight(p.weight, vectors) +
                         (s.gated ? weights(p.gate) * per_weight(p.gate, vectors) : 0) +
                         static_cast<double>(s.hidden) * lane_count * kActivate;
    const double second =
        weights(p.down) * per_weight(p.down, vectors) + static_cast<double>(s.out) * lane_count * kMove;
    const double pack = static_cast<double>(s.in) * lane_count * kMove;
    // X and a slice fill L2 together; y is touched once a slice, and weights pass by.
    const std::int64_t room = 2 * panel_floats(machine) / lanes - s.in;
    const std::int64_t features = sliced(std::max(room, 2 * FeedForwardSizes::kStored));
    const std::int64_t slices = (s.hidden + features - 1) / features;
    const double waiting = static_cast<double>((slices - 1) * s.out) * lane_count * 0.15;
    const std::int64_t rounds = (panels + p.threads - 1) / p.threads;
    visit(FeedForwardCut{vectors, features, 1},
          static_cast<double>(rounds) * (pack + first + second + waiting));
    if (p.threads == 1) continue;
    for (std::int64_t splits = 2; splits <= 4 * p.threads; ++splits) {
      const std::int64_t part = sliced((s.hidden + splits - 1) / splits);
      if (part * (splits - 1) >= s.hidden) break;  // a part would be empty
      const std::int64_t turns = (panels * splits + p.threads - 1) / p.threads;
      const auto apart = static_cast<double>(turns);
      const auto share = static_cast<double>(splits);
      const double shared = static_cast<double>(s.hidden) * lane_count * 0.3;  // written and read, in L3
      visit(FeedForwardCut{vectors, part, splits},
            apart * (pack + (first + second + shared) / share) + kBarrier);
    }
  }
}

// A forced configuration may be anything.
Status check_cut(const Kernels& kernels, const FeedForwardSizes& s, const FeedForwardCut& cut) {
  const auto refuse = [&](std::string_view requirement, std::int64_t got) {
    return invalid(kernels.family, requirement, cat(got));
  };
  if (cut.vectors < 1 || cut.vectors > kernels.max_vectors) {
    return refuse(cat("vectors of the config must be in [1, ", kernels.max_vectors, ']'), cut.vectors);
  }
  if (cut.features < 1 || cut.features % s.granule != 0) {
    return refuse(cat("features of the config must be a multiple of ", s.granule), cut.features);
  }
  const std::int64_t most = std::max<std::int64_t>(1, s.hidden);
  if (cut.splits < 1 || cut.splits > most) {
    return refuse(cat("splits of the config must be in [1, ", most, ']'), cut.splits);
  }
  if (cut.splits > 1 && cut.splits * cut.features < s.hidden) {
    return refuse("features of the config must be at least hidden features / splits", cut.features);
  }
  return {};
}

}  // namespace

// A panel reads both weights, linear a part of one for panel after panel. One thread of a Zen 5, f32,
// 2048→5632 at .5, 23 MB each: 15.3, 30.7, 58 ms of 128, 256 and 512 tokens, apart 14.7, 28.4, 53; of 64 7.8
// and 8.5. At .25, 11.5 MB, 13.7 and 14.8 of 256.
Reason yields_feed_forward(const Problem& p, const Machine& /*machine*/) {
  constexpr std::int64_t kTokens = 128;
  if (p.tokens < kTokens) return {};
  const bool gated = p.gate != WeightSpec{};
  for (const WeightSpec* w : {&p.weight, &p.down, gated ? &p.gate : &p.down}) {
    if (weights(*w) * static_cast<double>(size_of(w->dtype)) > kStreamed)
      return "layers of more than 16 MB are faster one after the other";
  }
  return {};
}

// Where each block row of a weight fills registers; elsewhere linear has better kernels.
Reason supports_feed_forward(const Kernels& kernels, const Problem& p) {
  constexpr std::int64_t kRows = 4;
  const bool gated = p.gate != WeightSpec{};
  const std::array weights{&p.weight, &p.down, gated ? &p.gate : &p.weight};
  bool few = p.tokens <= kFewTokens && kernels.few_takes != nullptr;
  for (const WeightSpec* w : weights) {
    if (w->shape.block_rows < kRows) {
      return cat("takes blocks of at least ", kRows, " rows; got ", w->shape.block_rows, 'x',
                 w->shape.block_cols);
    }
    few = few && kernels.few_takes(w->shape.block_rows, w->shape.block_cols);
  }
  if (few) return cat("takes more than ", kFewTokens, " tokens; got ", p.tokens);
  return {};
}

Config configure_feed_forward(const Kernels& kernels, const Problem& problem, const Machine& machine) {
  return to_config(
      cheapest<FeedForwardCut>([&](auto&& visit) { for_each_cut(kernels, problem, machine, visit); }));
}

std::vector<Config> feed_forward_candidates(const Kernels& kernels, const Problem& problem,
                                            const Machine& machine) {
  std::vector<Config> configs;
  for_each_cut(kernels, problem, machine,
               [&](const FeedForwardCut& cut, double) { configs.push_back(to_config(cut)); });
  return configs;
}

std::int64_t feed_forward_workspace(const Kernels& kernels, const Problem& problem, const Config& config) {
  const auto cut = from_config<FeedForwardCut>(config);
  const FeedForwardSizes sizes(problem);
  if (!check_cut(kernels, sizes, cut).ok()) return 0;  // the run refuses it
  const FeedForwardMemory<FloatMultiply> memory(kernels, problem, sizes, cut, nullptr);
  return memory.shared + problem.threads * memory.worker;
}

Status run_feed_forward(const Kernels& kernels, const Call& call) {
  const auto cut = from_config<FeedForwardCut>(call.config);
  if (Status status = check_cut(kernels, FeedForwardSizes(call.problem), cut); !status.ok()) return status;
  FeedForwardDriver<FloatMultiply>(kernels, call, cut).run();
  return {};
}

}  // namespace rarefy::cpu
