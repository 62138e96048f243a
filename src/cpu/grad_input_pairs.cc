// Drives grad_input of R×1 blocks in bf16 pairs (pairs.h): a task goes through the block rows with the sums
// of some panels of tokens in L2, a range of columns of W. A block row of dY is packed as it comes up, in L1;
// its blocks are multiplied as they are stored, and added to the sums of their columns.
#include <algorithm>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/linear_pairs.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kMostSpread = 8;  // panels that share a block row's weights in L1
// The same where L2 keeps W, so that it is better used for the sums, which are wanted for each block row
// (AMX, 768→3072 32×1 at .1 2.15 → 1.63 ms; at .5, whose W is 2.4 MB, a tenth slower).
constexpr std::int64_t kNearSpread = 2;

// Columns of one range, in whole tiles of what is stored.
std::int64_t columns_of_range(const Problem& p, const SpreadBlocking& b) {
  return ceil_div(ceil_div(p.weight.shape.cols, b.splits), kGroup) * kGroup;
}

std::int32_t padded_rows(const BsrShape& s) {
  return static_cast<std::int32_t>(ceil_div(s.block_rows, kGroup) * kGroup);
}

struct SpreadParts {
  float* zeros;  // a bias, for all workers
  float* sums;
  std::uint16_t* dy;

  static SpreadParts take(Room& shared, Room& own, const Problem& p, const SpreadBlocking& b) {
    SpreadParts parts{};
    const std::int64_t columns = columns_of_range(p, b);
    parts.zeros = shared.take<float>(columns);
    parts.sums = own.take<float>(b.panels * columns * kPanelTokens);
    parts.dy = own.take<std::uint16_t>(padded_rows(p.weight.shape) * kPanelTokens);
    return parts;
  }
};

// Block rows of dY for some panels, onto the sums of columns `begin` … `end`.
void spread(const PairKernels& kernels, const Call& call, const SpreadParts& parts, std::int64_t token,
            std::int64_t tokens, std::int64_t begin, std::int64_t end) {
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  const auto rows = static_cast<std::int32_t>(s.block_rows);
  for (std::int64_t block = 0; block < s.row_count(); ++block) {
    const std::int32_t* from =
        std::lower_bound(plan.col + plan.crow[block], plan.col + plan.crow[block + 1], begin);
    const std::int32_t* to = std::lower_bound(from, plan.col + plan.crow[block + 1], end);
    if (from == to) continue;
    const std::int64_t n = block * s.block_rows;
    for (std::int64_t m = 0; m < tokens; m += kPanelTokens) {
      kernels.pack({at(call.dy, token + m, n), false, call.dy.row_stride,
                    static_cast<std::int32_t>(std::min<std::int64_t>(kPanelTokens, tokens - m)),
                    static_cast<std::int32_t>(std::min(s.block_rows, s.rows - n)), padded_rows(s),
                    PairOrder::paired, parts.dy});
      kernels.spread({static_cast<const std::uint16_t*>(call.values) + (from - plan.col) * s.block_rows, from,
                      static_cast<std::int32_t>(to - from), rows, parts.dy,
                      parts.sums + (m / kPanelTokens * (end - begin) - begin) * kPanelTokens});
    }
  }
}

}  // namespace

Reason supports_spread(const Problem& p) {
  if (p.in != DType::bf16 || p.weight.dtype != DType::bf16 || p.out != DType::bf16) {
    return "takes bf16 inputs and values alone, to bf16";
  }
  const BsrShape& s = p.weight.shape;
  if (s.block_cols != 1 || s.block_rows % kTileRows != 0) {
    return cat("takes blocks of a multiple of ", kTileRows, " rows and one column; got ", s.block_rows, 'x',
               s.block_cols);
  }
  if (p.tokens <= kFewTokens) return cat("takes more than ", kFewTokens, " tokens; got ", p.tokens);
  return {};
}

// Ranges of columns only where there are fewer panels than threads, as each packs dY anew; as many panels to
// a set as leave every thread one, with their sums in half of L2.
Config configure_spread(const Problem& p, const Machine& machine) {
  SpreadBlocking b;
  const std::int64_t panels = std::max<std::int64_t>(1, ceil_div(p.tokens, kPanelTokens));
  b.splits =
      std::clamp<std::int64_t>(p.threads / panels, 1, std::max<std::int64_t>(1, p.weight.shape.cols / 256));
  const std::int64_t fit = panel_floats(machine) / (columns_of_range(p, b) * kPanelTokens + 1);
  const bool near = p.weight.shape.value_count() <= panel_floats(machine) * 2;  // of bf16, half of L2
  b.panels = std::clamp<std::int64_t>(std::min(fit, panels * b.splits / p.threads), 1,
                                      near ? kNearSpread : kMostSpread);
  return to_config(b);
}

std::int64_t spread_workspace(const Problem& problem, const Config& config) {
  Room shared, own;
  SpreadParts::take(shared, own, problem, from_config<SpreadBlocking>(config));
  return shared.bytes() + problem.threads * own.bytes();
}

Status run_spread(const PairKernels& kernels, const Call& call) {
  const auto b = from_config<SpreadBlocking>(call.config);
  const BsrShape& s = call.plan.shape;
  if (b.panels < 1 || b.panels > 4096 || b.splits < 1 || b.splits > std::max<std::int64_t>(1, s.cols)) {
    return invalid(kernels.family,
                   cat("panels and splits of the config must be in [1, 4096] and [1, ", s.cols, ']'),
                   cat(b.panels, " and ", b.splits));
  }
  const std::int64_t columns = columns_of_range(call.problem, b), tokens = b.panels * kPanelTokens;
  Room shared(call.workspace), sizes;
  const SpreadParts all = SpreadParts::take(shared, sizes, call.problem, b);
  std::fill_n(all.zeros, columns, 0.0F);
  call.executor.parallel_for(
      ceil_div(call.problem.tokens, tokens) * b.splits, [&](std::int64_t t, int worker) {
        const std::int64_t token = t / b.splits * tokens, begin = t % b.splits * columns;
        const std::int64_t count = std::min(tokens, call.problem.tokens - token);
        if (begin >= s.cols) return;
        Room unused, own(static_cast<char*>(call.workspace) + shared.bytes() + worker * sizes.bytes());
        SpreadParts parts = SpreadParts::take(unused, own, call.problem, b);
        kernels.enter();
        std::fill_n(parts.sums, ceil_div(count, kPanelTokens) * columns * kPanelTokens, 0.0F);
        spread(kernels, call, parts, token, count, begin, begin + columns);
        for (std::int64_t m = 0; m < count; m += kPanelTokens) {
          auto* out = reinterpret_cast<std::uint16_t*>(at(call.out, token + m, begin));
          kernels.store({parts.sums + m * columns, false, all.zeros, Activation::none, out, false,
                         call.out.row_stride,
                         static_cast<std::int32_t>(std::min<std::int64_t>(kPanelTokens, count - m)),
                         static_cast<std::int32_t>(std::min(columns, s.cols - begin))});
        }
        kernels.leave();
      });
  return {};
}

}  // namespace rarefy::cpu
