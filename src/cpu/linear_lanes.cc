// Drives linear and grad_input on lanes of outputs (lanes.h) in floats. The values of a column of a block
// must lie side by side, as outputs do: those of R×1 blocks do for linear, those of R×C blocks for
// grad_input; linear packs other blocks in the call. Sums are made in the order of linear.cc's kernels, so
// bits are the same.
#include "cpu/linear_lanes.h"

#include <algorithm>
#include <utility>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/pairs_blocking.h"

namespace rarefy::cpu {

namespace {

// Tokens from which it pays to pack blocks in the call: about a cycle an element, two for 32 tokens; and what
// is packed then is memory of the call.
constexpr std::int64_t kPackingTokens = 256;
constexpr std::int64_t kMostPacked = 4 << 20;  // floats

// Up to here blocks of whole vectors are turned in registers, with as many shuffles as 4 tokens are products,
// where a vector of tokens is 16 whatever it holds.
constexpr std::int64_t kTurnedTokens = 11, kTurned = 16;

// Bytes of W asked for ahead where it comes from memory: 5 tokens of 4096² in 16×16 at .5, one thread of a
// Zen 5, took 2.1 ms when it was the next block, and take 1.0. Where it does not they would take 7 % more.
constexpr std::int64_t kFarAhead = 14336;

constexpr std::int64_t kFewBlocks = 2;  // of an output block, on average

// Whether vectors of tokens are at most a twentieth empty.
bool fills_vectors(std::int64_t tokens, std::int64_t width) {
  return 20 * (ceil_div(tokens, width) * width - tokens) <= tokens;
}

// Where one vector of outputs waits for x, a load for each product. 16×1 at .5, Zen 5: 24 tokens .39 ms, .31
// by `gather`.
bool waits_for_loads(const Kernels& panels, const Machine& machine) {
  return panels.width == 16 && starts_two(machine);
}

struct Shape : ProductShape {
  std::int64_t tokens;

  explicit Shape(const Problem& p) : ProductShape(p), tokens(p.tokens) {}

  bool packs() const { return !transposed && red_block > 1 && !turns(); }
  bool turns() const {
    return !transposed && tokens <= kTurnedTokens && red_block % kTurned == 0 && out_block % kTurned == 0;
  }
  std::int64_t panel_size() const { return red_blocks * red_block * kLaneTokens; }  // floats
  std::int64_t values() const { return entries * out_block * red_block; }
};

// The working memory: what all tasks read, and each worker's panels.
struct Parts {
  float *start, *packed, *panels;
};

struct Layout {
  std::int64_t shared, worker;  // bytes

  Layout(const Shape& s, const PairsBlocking& b) {
    Parts parts{};
    Room all, own;
    take_shared(all, s, parts);
    take_worker(own, s, b, parts);
    shared = all.bytes();
    worker = own.bytes();
  }
  static void take_shared(Room& room, const Shape& s, Parts& parts) {
    parts.start = room.take<float>(s.out_blocks * s.out_block);
    parts.packed = room.take<float>(s.packs() ? s.values() : 0);
  }
  static void take_worker(Room& room, const Shape& s, const PairsBlocking& b, Parts& parts) {
    parts.panels = room.take<float>(b.panels * s.panel_size());
  }
};

PanelWork work_of(const Problem& p) {
  constexpr double kTileCycles = 540;  // 16 outputs × 16 features × 32 tokens
  const Shape s(p);
  const auto size = static_cast<double>(s.panel_size());
  return {static_cast<double>(s.values()) / (16 * 16),
          kTileCycles,
          size,
          std::max<std::int64_t>(1, 2 * s.panel_size()),
          s.out_blocks * s.out_block,
          s.out_blocks,
          streamed_byte(4.0 * static_cast<double>(s.values()))};
}

// Blocks of R×C, by rows, as [C][R] floats.
void pack_blocks(const Kernels& kernels, const Call& call, const Shape& s, float* to) {
  const std::int64_t block = s.out_block * s.red_block;
  const DType dtype = call.problem.weight.dtype;
  const auto* values = static_cast<const char*>(call.values);
  call.executor.parallel_for(s.out_blocks, [&](std::int64_t o, int) {
    for (std::int64_t e = call.plan.crow[o]; e < call.plan.crow[o + 1]; ++e) {
      kernels.pack(
          {{values + e * block * static_cast<std::int64_t>(size_of(dtype)), s.red_block,
            static_cast<std::int32_t>(s.out_block), static_cast<std::int32_t>(s.red_block), storage(dtype)},
           to + e * block,
           static_cast<std::int32_t>(s.out_block)});
    }
  });
}

class Task {
 public:
  Task(const LaneKernels& kernels, const Call& call, const Shape& s, const Parts& parts)
      : kernels_(kernels),
        call_(call),
        s_(s),
        parts_(parts),
        in_(s.transposed ? call.dy : call.x),
        begin_(s.transposed ? call.plan.ccol : call.plan.crow),
        index_(s.transposed ? call.plan.row : call.plan.col) {
    t_.storage = s.packs() ? Storage::f32 : storage(call.problem.weight.dtype);
    t_.run = static_cast<std::int32_t>(s.red_block);
    t_.rows = static_cast<std::int32_t>(s.out_block);
    t_.part = part_entries(t_.run);
    t_.first = t_.last = true;
    t_.by_row = s.turns();
    const bool streams = static_cast<double>(s.entries * block_bytes()) > kStreamed;
    t_.ahead = (streams ? std::max<std::int64_t>(1, kFarAhead / block_bytes()) : 1) * block_bytes();
    t_.activation = call.activation;
    t_.out = storage(call.out.dtype);
    t_.row_stride = call.out.row_stride;
  }

  void pack(std::int64_t first, std::int64_t tokens) const {
    for (std::int64_t m = 0; m < tokens; m += kLaneTokens) pack(first + m, rows(tokens, m), panel(m));
  }

  // The first output block of a part of them, as in linear.cc.
  std::int64_t begin_of(std::int64_t part, std::int64_t parts) const {
    return begin_of_part(begin_, s_.out_blocks, s_.red_block, 12, part, parts);
  }

  // Output blocks begin … end for tokens first … first + tokens.
  void run(std::int64_t first, std::int64_t tokens, std::int64_t begin, std::int64_t end) {
    for (std::int64_t o = begin; o < end; ++o) {
      const std::int64_t from = o * s_.out_block;
      const auto* values = static_cast<const char*>(s_.packs() ? parts_.packed : call_.values);
      t_.w = s_.transposed ? values : values + begin_[o] * block_bytes();
      t_.perm = s_.transposed ? call_.plan.perm + begin_[o] : nullptr;
      t_.index = index_ + begin_[o];
      t_.blocks = begin_[o + 1] - begin_[o];
      t_.start = parts_.start + from;
      t_.cols = static_cast<std::int32_t>(std::min(s_.out_block, call_.out.cols - from));
      for (std::int64_t m = 0; m < tokens; m += kLaneTokens) {
        t_.panel = panel(m);
        t_.tokens = rows(tokens, m);
        t_.y = at(call_.out, first + m, from);
        kernels_.multiply(t_);
      }
    }
  }

 private:
  static std::int32_t rows(std::int64_t tokens, std::int64_t m) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(kLaneTokens, tokens - m));
  }
  float* panel(std::int64_t m) const { return parts_.panels + m / kLaneTokens * s_.panel_size(); }
  std::int64_t block_bytes() const {
    return s_.out_block * s_.red_block * (t_.storage == Storage::f32 ? 4 : 2);
  }
  // Features past the edge become 0.
  void pack(std::int64_t first, std::int32_t tokens, float* to) const {
    kernels_.panels.pack(
        {{at(in_, first, 0), in_.row_stride, tokens, static_cast<std::int32_t>(in_.cols), storage(in_.dtype)},
         to,
         kLaneTokens});
    std::fill(to + in_.cols * kLaneTokens, to + s_.panel_size(), 0.0F);
  }

  const LaneKernels& kernels_;
  const Call& call_;
  const Shape& s_;
  const Parts& parts_;
  const MatrixView& in_;
  const std::int32_t *begin_, *index_;
  LaneProduct t_{};
};

}  // namespace

Reason supports_lanes(const LaneKernels& kernels, const Problem& p, const Machine& machine) {
  const Shape s(p);
  if (s.out_block % kernels.panels.width != 0) {
    return cat("takes blocks of a multiple of ", kernels.panels.width, " outputs; got ", s.out_block);
  }
  // linear.cc's woven sums are faster then (32×1 at a density of 0.05, 512 tokens, Zen 4: 1.31 and 1.18 ms),
  // unless rows have so few blocks that little can stand between or within them (Zen 5, GFLOP/s here and
  // there: 1.2 blocks of 32×32 207 and 183, 2.4 of 16×16 172 and 202).
  const std::int64_t width = kernels.panels.width;
  const bool loads = waits_for_loads(kernels.panels, machine) && !s.packs();
  // One vector of tokens is 9 loads for 8 products there: two of outputs have 14 for 24.
  const bool one = loads && p.tokens <= width && s.out_block % (2 * width) == 0;
  if (p.weight.dtype == DType::f32 && p.out == DType::f32 && fills_vectors(p.tokens, width) && !one &&
      s.entries >= kFewBlocks * s.out_blocks) {
    return cat("takes, of floats in rows of ", kFewBlocks,
               " blocks or more, tokens that leave more than a twentieth as many lanes empty; got ",
               p.tokens);
  }
  if (p.tokens <= kFewTokens) return cat("takes more than ", kFewTokens, " tokens; got ", p.tokens);
  if (s.panel_size() > panel_floats(machine)) return "takes panels that fit half of L2";
  if (loads && s.out_block == width && 4 * p.tokens > 3 * width) {
    return cat("takes, of blocks of ", width, " outputs, at most ", 3 * width / 4, " tokens; got ", p.tokens);
  }
  if (s.turns() && width < kTurned) return cat("turns blocks of several columns by vectors of ", kTurned);
  if (s.packs() && p.tokens < kPackingTokens) {
    return cat("packs blocks of several columns for at least ", kPackingTokens, " tokens; got ", p.tokens);
  }
  if (s.packs() && s.values() > kMostPacked) return cat("packs at most ", kMostPacked, " values in a call");
  return {};
}

Config configure_lanes(const Problem& problem, const Machine& machine) {
  return configure_panels(work_of(problem), problem, machine);
}

std::vector<Config> lanes_candidates(const Problem& problem, const Machine& machine) {
  return panel_candidates(work_of(problem), problem, machine);
}

std::int64_t lanes_workspace(const Problem& problem, const Config& config) {
  const Layout layout(Shape(problem), from_config<PairsBlocking>(config));
  return layout.shared + problem.threads * layout.worker;
}

Status run_lanes(const LaneKernels& kernels, std::span<const Call> calls) {
  const Call& lead = calls.front();  // whose workspace has the panels of all
  const auto b = from_config<PairsBlocking>(lead.config);
  std::int64_t out_blocks = 0;
  for (const Call& call : calls) {
    const Shape s(call.problem);
    out_blocks += s.out_blocks;
    Parts shared{};
    Room all(call.workspace);
    Layout::take_shared(all, s, shared);
    std::fill_n(shared.start, s.out_blocks * s.out_block, 0.0F);
    if (call.bias != nullptr) {
      unpack_bias(kernels.panels, call.out.dtype, call.bias, call.out.cols, shared.start);
    }
    if (s.packs()) pack_blocks(kernels.panels, call, s, shared.packed);
  }
  if (Status status = check_panels(kernels.panels.family, b, out_blocks); !status.ok()) return status;
  const Shape lead_shape(lead.problem);
  const Layout layout(lead_shape, b);
  for_each_part(lead, b, [&](int worker, const PanelTasks::Task& part) {
    Parts parts{};
    Room own(static_cast<char*>(lead.workspace) + layout.shared + worker * layout.worker);
    Layout::take_worker(own, lead_shape, b, parts);
    bool packed = false;
    for (const Call& call : calls) {
      const Shape s(call.problem);
      Room shared(call.workspace);
      Layout::take_shared(shared, s, parts);
      Task task(kernels, call, s, parts);
      const std::int64_t begin = task.begin_of(part.part, part.parts),
                         end = task.begin_of(part.part + 1, part.parts);
      if (begin == end) continue;
      if (!std::exchange(packed, true)) task.pack(part.first, part.tokens);
      task.run(part.first, part.tokens, begin, end);
    }
  });
  return {};
}

}  // namespace rarefy::cpu
