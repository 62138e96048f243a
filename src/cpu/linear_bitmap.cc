// Drives linear of bitmaps (bitmap.h). X becomes float rows; a task is a range of rows of W, whose values
// stay in L2 while the task's tokens, eight at a time, go through a tile of columns after the other. Tiles
// have one width on every machine, as sums are folded at their ends: results depend on nothing else.
#include <algorithm>
#include <bit>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/few_parts.h"
#include "rarefy/bitmap.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kMost = 8;         // tokens that meet a vector of W at once
constexpr std::int64_t kTile = 768;       // columns: X of a chunk takes 24 KB of L1
constexpr std::int64_t kLongTile = 4096;  // of a token or two, whose rows of W come as one stream
constexpr std::int64_t kStream = 2;       // as BitmapShape has it
constexpr std::int64_t kTogether = 64;    // rows that share a tile of X, for more

// Two of four pick x anew for each token, so that more would save nothing.
std::int64_t chunk_of(const Problem& p) { return p.weight.format == Format::two_of_four ? 4 : kMost; }

// `count` tokens of a chunk as the kernels have them: those of a stream add up in another order, so that what
// is left of more tokens is filled up.
std::int64_t padded_tokens(const Problem& p, std::int64_t count) {
  const auto tokens = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
  return p.tokens <= kStream ? tokens : std::max<std::int64_t>(tokens, 4);
}

// The working memory: X for all; sums, and where each row has got to, for each worker.
struct Layout {
  std::int64_t columns, tokens, chunk;  // of X, padded; tokens of a chunk
  std::int64_t shared, worker;

  Layout(const Problem& p, const BitmapSplit& split)
      : columns(ceil_div(p.weight.shape.cols, 64) * 64),
        tokens(p.tokens / chunk_of(p) * chunk_of(p) +
               (p.tokens % chunk_of(p) == 0 ? 0 : padded_tokens(p, p.tokens % chunk_of(p)))),
        chunk(std::min(tokens, chunk_of(p))) {
    Room all;
    all.take<float>(tokens * columns);
    shared = all.bytes();
    Room own;
    own.take<float>(chunk * split.rows);
    own.take<std::int32_t>(split.rows);  // and where each ends
    own.take<std::int32_t>(split.rows);
    worker = own.bytes();
  }
};

std::int64_t bytes_of_weight(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return s.nnzb * static_cast<std::int64_t>(size_of(p.weight.dtype)) + s.rows * ceil_div(s.cols, 64) * 8;
}

// From values that are read to those that are asked for. Two tokens and more read up to four rows at once:
// the same places of later ones.
std::int64_t bytes_ahead(const Problem& p, Ask ask) {
  constexpr std::int64_t kNear = 2048, kRows = 4;
  if (ask != Ask::l2) return kNear;
  const BsrShape& s = p.weight.shape;
  const std::int64_t rows =
      kRows * s.nnzb / std::max<std::int64_t>(1, s.rows) * static_cast<std::int64_t>(size_of(p.weight.dtype));
  return p.tokens == 1 || rows == 0 ? kFewAhead : ceil_div(kFewAhead, rows) * rows;
}

}  // namespace

Config configure_bitmap(const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(p.tokens, chunk_of(p)));
  const std::int64_t tasks = p.threads == 1 && chunks == 1 ? 1 : kTasksPerThread * p.threads;
  BitmapSplit split;
  if (chunks > 1) {  // ranges of W that half of L2 holds
    split.ranges =
        std::clamp<std::int64_t>(ceil_div(bytes_of_weight(p), 4 * panel_floats(machine)), 1, s.rows);
    split.groups = std::clamp<std::int64_t>(ceil_div(tasks, split.ranges), 1, chunks);
  } else {
    split.ranges = std::clamp<std::int64_t>(tasks, 1, std::max<std::int64_t>(1, s.rows / 4));
  }
  split.rows = p.tokens <= kStream ? 4 : kTogether;
  // From memory, who asks L2 reads while it multiplies (4096→11008 at .5, one token: a Zen 4's bitmap 6.2
  // → 4.3 ms, its two of four 5.1 → 4.1; a Xeon's 8.4 → 7.8, 8.8 → 7.0, with 8 tokens 15.5 → 12.3, 16
  // → 11.5); a Zen 5 was not measured. Out of caches a Zen 4 finds all by itself.
  const bool zen4 = machine.has("prefetch_l2"), far = bytes_of_weight(p) > (zen4 ? kCached : kFar);
  const Ask ask = far && !is_zen5(machine)                         ? Ask::l2
                  : zen4 || p.weight.format == Format::two_of_four ? Ask::nothing
                                                                   : Ask::far;
  split.ask = static_cast<std::int64_t>(ask);
  // Without AVX-512 (a Zen 3): four rows at once that lie a quarter of the range apart are read at 25 GB/s,
  // one after the other at 16, asked for at 15 to 18. 4096→11008, one token: 6.0–6.5 → 4.9 ms.
  if (far && p.tokens == 1 && p.weight.format == Format::two_of_four && machine.has("avx2") &&
      !machine.has("avx512")) {
    split.apart = 1;
    split.ask = static_cast<std::int64_t>(Ask::nothing);
  }
  return to_config(split);
}

std::int64_t bitmap_workspace(const Problem& p, const Config& config) {
  const Layout layout(p, from_config<BitmapSplit>(config));
  return layout.shared + p.threads * layout.worker;
}

Status run_linear_bitmap(const Kernels& kernels, const Call& call) {
  const auto split = from_config<BitmapSplit>(call.config);
  if (split.ranges < 1 || split.groups < 1 || split.rows < 1) {
    return invalid(kernels.family, "ranges, groups and rows of the config must be at least 1",
                   cat(split.ranges, ", ", split.groups, " and ", split.rows));
  }
  if (split.ask < 0 || split.ask > static_cast<int>(Ask::nothing))
    return invalid(kernels.family, "ask of the config must be in [0, 3]", cat(split.ask));
  if (split.apart < 0 || split.apart > 1)
    return invalid(kernels.family, "apart of the config must be 0 or 1", cat(split.apart));
  const Problem& p = call.problem;
  const BitmapPlanView plan{call.plan.shape, call.plan.crow, call.bits, false};
  const BsrShape& s = plan.shape;
  const Layout layout(p, split);
  auto* x = static_cast<float*>(call.workspace);
  const bool pairs = p.weight.format == Format::two_of_four;
  const std::int64_t per_chunk = chunk_of(p), chunks = ceil_div(p.tokens, per_chunk);
  const auto tokens_of = [&](std::int64_t chunk) {
    return std::min(per_chunk, p.tokens - chunk * per_chunk);
  };
  const auto pack = [&](std::int64_t chunk) {
    MatrixView from = call.x;
    from.data = at(call.x, chunk * per_chunk, 0);
    from.rows = tokens_of(chunk);
    to_float(kernels, from, padded_tokens(p, from.rows), layout.columns,
             x + chunk * per_chunk * layout.columns);
  };
  if (chunks == 1) {
    pack(0);
  } else {
    call.executor.parallel_for(chunks, [&](std::int64_t chunk, int /*worker*/) { pack(chunk); });
  }

  // At most split.rows rows, `step` apart, of the tokens of a chunk.
  const auto piece = [&](std::int64_t begin, std::int64_t rows, std::int64_t step, std::int64_t chunk,
                         Room own) {
    const std::int64_t count = tokens_of(chunk);
    auto* y = own.take<float>(layout.chunk * split.rows);
    auto* position = own.take<std::int32_t>(split.rows);
    auto* ends = own.take<std::int32_t>(split.rows);
    std::fill_n(y, layout.chunk * split.rows, 0.0F);
    // Rows side by side, all of them or one.
    const auto runs = [&](auto f) {
      if (step == 1) return f(std::int64_t{0}, rows);
      for (std::int64_t r = 0; r < rows; ++r) f(r, std::int64_t{1});
    };
    if (call.bias != nullptr) {
      const auto size = static_cast<std::int64_t>(size_of(call.out.dtype));
      runs([&](std::int64_t r, std::int64_t run) {
        const auto* bias = static_cast<const char*>(call.bias) + (begin + r * step) * size;
        unpack_bias(kernels, call.out.dtype, bias, run, y + r);
      });
      for (std::int64_t m = 1; m < count; ++m) std::copy_n(y, rows, y + m * split.rows);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      position[r] = plan.crow[begin + r * step];
      ends[r] = plan.crow[begin + r * step + 1];
    }
    BitmapTask task{};
    task.values = call.values;
    task.storage = storage(p.weight.dtype);
    task.count = s.nnzb;
    task.row_bytes = step * plan.row_bytes();
    task.rows = static_cast<std::int32_t>(rows);
    task.at = position;
    task.end = ends;
    task.x_stride = layout.columns;
    task.tokens = static_cast<std::int32_t>(padded_tokens(p, count));
    task.y = y;
    task.y_stride = split.rows;
    task.ask = static_cast<Ask>(split.ask);
    task.ahead = bytes_ahead(p, task.ask);
    const std::int64_t tile = p.tokens <= kStream ? kLongTile : kTile;
    for (std::int64_t k = 0; k < layout.columns; k += tile) {
      task.bits = plan.bits + begin * plan.row_bytes() + k / 8;
      task.x = x + chunk * per_chunk * layout.columns + k;
      task.columns = static_cast<std::int32_t>(std::min(tile, layout.columns - k));
      (pairs ? kernels.two_of_four : kernels.bitmap)(task);
    }
    kernels.activate(call.activation, y, layout.chunk * split.rows);
    for (std::int64_t m = 0; m < count; ++m) {
      runs([&](std::int64_t r, std::int64_t run) {
        kernels.round(storage(call.out.dtype), y + m * split.rows + r, run,
                      cpu::at(call.out, chunk * per_chunk + m, begin + r * step));
      });
    }
  };
  call.executor.parallel_for(split.ranges * split.groups, [&](std::int64_t task, int worker) {
    const Room own(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
    const std::int64_t range = task / split.groups, group = task % split.groups;
    const std::int64_t first = s.rows * range / split.ranges, end = s.rows * (range + 1) / split.ranges;
    // Pieces; rows from one of a piece to its next.
    const std::int64_t pieces = ceil_div(end - first, split.rows), step = split.apart == 1 ? pieces : 1;
    for (std::int64_t chunk = chunks * group / split.groups; chunk < chunks * (group + 1) / split.groups;
         ++chunk) {
      for (std::int64_t i = 0; i < pieces; ++i) {
        const std::int64_t n = step == 1 ? first + i * split.rows : first + i;
        piece(n, std::min(split.rows, ceil_div(end - n, step)), step, chunk, own);
      }
    }
  });
  return {};
}

}  // namespace rarefy::cpu
