// Drives linear for a few tokens (see few.h): X becomes rows of floats, or stays bf16, padded to whole
// blocks; tasks are ranges of block rows with equal shares of the stored blocks, and Y is written row by row.
// More than four tokens go by fours, one after the other over so many block rows that L2 holds W of them.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/checked.h"
#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"
#include "cpu/linear_quads.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kIndexBytes = 4;
constexpr std::int64_t kRowOfX = 24 << 10;  // what L1 keeps of X beside the streams

bool is_scaled(const Problem& p) { return p.weight.scaling != Scaling::none; }

// Single elements by two tokens and more take four tokens of x at once, by column (few_singles.h): 768→3072
// at .5 by two 439 → 260 us, by four 780 → 260. Two tokens not where rows are ends mostly (7 a row: .17 → .23
// ms).
bool singles_by_four(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return s.block_size() == 1 && (p.tokens > 2 || (p.tokens == 2 && s.nnzb >= 16 * s.rows));
}

// Tokens that go through W together.
struct Group {
  std::int64_t first, count;
  std::int64_t tokens;   // that the kernel takes: 1, 2, 4 or 8
  bool by_column;        // x of four or eight tokens side by side (few_quads, Spread::four)
  std::int64_t rows_at;  // where x is in the working memory, floats: rows, and columns behind them
};

// The working memory: X for all, sums for each worker.
struct Layout {
  Group groups[kFewByFours / kFewTokens];
  int group_count = 0;
  std::int64_t tokens = 0;  // of all groups
  std::int64_t lanes;       // of a row of x, padded: floats, or pairs
  bool turned;              // few_turned
  bool twice;               // R×1 in bf16: see to_twice
  std::int64_t piece;       // block rows that a task works on at once
  std::int64_t stride;      // floats of a row of sums
  std::int64_t shared, worker;

  std::int64_t turned_columns() const { return (lanes + 15) / 16 * 16; }
  bool has_columns(const Group& g) const { return g.by_column || turned; }

  Layout(const FewKernels& kernels, const Problem& p, const FewSplit& split) {
    const BsrShape& s = p.weight.shape;
    const bool singles = singles_by_four(p);
    twice = kernels.pairs && s.block_cols % 2 != 0;
    const std::int64_t columns =
        kernels.pairs && !twice ? s.block_cols / 2 : s.block_cols;  // that lanes have
    lanes = s.col_count() * columns;
    const bool fours = split.fours != 0 && s.block_rows % kernels.rows.width == 0;
    turned = split.turned != 0 && kernels.turn != nullptr && !twice &&
             few_turns(s.block_rows * columns, columns) && !is_scaled(p);
    const bool eights = split.eight != 0 && kernels.takes_eight != nullptr && !is_scaled(p) &&
                        kernels.takes_eight(s.block_rows * columns, columns, turned);
    Room all;
    for (std::int64_t first = 0; first < p.tokens;) {
      Group& g = groups[group_count++];
      const std::int64_t left = p.tokens - first;
      g.first = first;
      g.count = std::min(eights && left >= split.eight ? kFewEight : kFewTokens, left);
      first += g.count;
      g.tokens = singles ? 4 : few_tokens(g.count);
      const bool quads =
          fours || singles || few_quads_takes(s.block_rows, kernels.rows.width, kernels.rows.registers);
      g.by_column = columns == 1 && !twice && (g.tokens == 8 || (g.tokens == 4 && quads));
      tokens += g.tokens;
      g.rows_at = all.bytes();
      all.take<float>(g.tokens * lanes);
      if (has_columns(g)) all.take<float>(g.tokens * turned_columns());
    }
    shared = all.bytes();
    piece = piece_of_range(s.row_count(), split.tasks);
    if (group_count > 1) piece = std::clamp<std::int64_t>(split.piece, 1, piece);
    stride = (piece * s.block_rows + kernels.rows.width - 1) / kernels.rows.width * kernels.rows.width;
    Room own;
    own.take<float>(tokens * stride);
    if (is_scaled(p)) own.take<float>(stride);  // the bias
    worker = own.bytes();
  }
};

// Rows of bf16 as they are, each padded with 0 to `lanes` pairs; rows past the last are 0.
void to_pairs(const MatrixView& from, std::int64_t rows, std::int64_t lanes, float* to) {
  std::fill_n(to, rows * lanes, 0.0F);
  for (std::int64_t m = 0; m < from.rows; ++m) {
    std::memcpy(to + m * lanes, at(from, m, 0), static_cast<std::size_t>(from.cols) * sizeof(bfloat16));
  }
}

// Columns of so many tokens from rows of bf16, each value twice in a lane: either half of a pair is taken
// from where it lies. Tokens past the last are 0.
void to_twice(const MatrixView& from, std::int64_t tokens, float* to) {
  auto* lane = reinterpret_cast<std::uint32_t*>(to);
  std::fill_n(lane, tokens * from.cols, 0U);
  for (std::int64_t m = 0; m < from.rows; ++m) {
    const auto* row = reinterpret_cast<const std::uint16_t*>(at(from, m, 0));
    for (std::int64_t k = 0; k < from.cols; ++k) lane[k * tokens + m] = row[k] * 0x10001U;
  }
}

// Four or eight rows to columns of as many.
void to_columns(const float* rows, std::int64_t stride, std::int64_t lanes, std::int64_t tokens, float* to) {
  for (std::int64_t k = 0; k < lanes; ++k, to += tokens) {
    for (std::int64_t m = 0; m < tokens; ++m) to[m] = rows[m * stride + k];
  }
}

// Whether x and y are what kernels read and write as they lie: floats in whole blocks, of as many tokens as a
// kernel has. One thread copied x for all before, whose lines the others then fetched from its caches.
bool reads_x(const FewKernels& kernels, const Problem& p, const Layout& layout, const Group& g) {
  return !kernels.pairs && p.in == DType::f32 && g.count == g.tokens && p.weight.shape.cols == layout.lanes;
}
bool writes_y(const Problem& p, const Layout& layout) {
  return p.out == DType::f32 && p.activation == Activation::none && p.tokens == layout.tokens &&
         p.weight.shape.rows % p.weight.shape.block_rows == 0;
}

// Sums of int8 values as floats times the scales of their rows, and the bias, for which there is room.
void scale_sums(const Kernels& kernels, const Call& call, std::int64_t first, std::int64_t features,
                std::int64_t tokens, float* sums, std::int64_t stride, float* bias) {
  std::fill_n(bias, features, 0.0F);
  begin_with_bias(kernels, call, first, features, 1, bias, 0);
  const float* scales = call.scales + first;
  for (std::int64_t m = 0; m < tokens; ++m, sums += stride) {
    for (std::int64_t i = 0; i < features; ++i) sums[i] = sums[i] * scales[i] + bias[i];
  }
}

// W in lanes of two columns.
SparseOperand in_pairs(SparseOperand w) {
  w.storage = Storage::f32;
  w.block_size /= 2;
  w.red_block /= 2;
  return w;
}

}  // namespace

void to_float(const Kernels& kernels, const MatrixView& from, std::int64_t rows, std::int64_t padded,
              float* to) {
  std::fill_n(to, rows * padded, 0.0F);
  for (std::int64_t m = 0; m < from.rows; ++m) {
    kernels.unpack(storage(from.dtype), at(from, m, 0), from.cols, to + m * padded);
  }
}

Reason supports_few(const FewKernels& kernels, const Problem& p, std::int64_t most) {
  const BsrShape& s = p.weight.shape;
  if (p.tokens < 1 || p.tokens > most) return cat("takes 1 to ", most, " tokens; got ", p.tokens);
  if (kernels.pairs && (p.in != DType::bf16 || p.weight.dtype != DType::bf16)) {
    return "takes bf16 inputs and values";
  }
  if (!kernels.takes(s.block_rows, s.block_cols)) {
    return cat("blocks of ", s.block_rows, 'x', s.block_cols, " do not fill its vectors");
  }
  return {};
}

Reason supports_few_by_fours(const FewKernels& kernels, const Problem& p) {
  return supports_few(kernels, p, kFewByFours);
}

Reason supports_few_scaled(const FewKernels& kernels, const Problem& p) {
  Reason reason = supports_scaled(p);
  return reason.empty() ? supports_few(kernels, p, kFewByFours) : reason;
}

std::int64_t few_prepared_size(const Problem& problem, const Config& /*config*/) {
  const BsrShape& s = problem.weight.shape;
  return has_narrow_columns(s) ? (s.nnzb + kColumnsAhead) * static_cast<std::int64_t>(sizeof(std::uint16_t))
                               : 0;
}

Status prepare_few(const Call& call, void* to) {
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  if (!has_narrow_columns(s)) return {};
  constexpr std::int64_t kChunk = 1 << 16;
  auto* columns = static_cast<std::uint16_t*>(to);
  std::atomic<bool> valid = true;
  call.executor.parallel_for(ceil_div(s.nnzb, kChunk), [&](std::int64_t task) {
    const std::int64_t end = std::min(s.nnzb, (task + 1) * kChunk);
    std::uint32_t most = 0;
    for (std::int64_t e = task * kChunk; e < end; ++e) {
      const auto column = static_cast<std::uint32_t>(plan.col[e]);
      most = std::max(most, column);
      columns[e] = static_cast<std::uint16_t>(column);
    }
    if (end > task * kChunk && most >= s.cols) valid = false;
  });
  std::fill_n(columns + s.nnzb, kColumnsAhead, std::uint16_t{0});
  if (!valid) return other_columns();
  return {};
}

namespace {

// A Zen 4 finds what its caches hold by itself (16×1, 768→3072, one token: 93 → 69 µs), and from memory, if
// L1 is asked, it reads and multiplies one after the other (16×1, 4096→11008, 4 tokens: 5.7 → 4.2 ms by L2;
// 4×1, one: 5.8 → 4.8), but for the few products of one token or two. Rows of 16 and more columns it finds
// itself there too, if two passes see all of a block (16×16, one token 3.8 → 2.9 ms, two 5.1 → 3.3; 64×64, in
// four passes, 4.4 → 11.7), and if they are whole lines: not those of int8 (32×32, one 2.5 → .95).
// Without AVX-512 squares and tall blocks in caches are asked for still, with two tokens and more (16×16 .14,
// not .15; 64×1, four: .17, not .21), but not 16×1 (two .16 → .12). A Xeon's L3 is further away than a Zen
// 5's: 32×32 with 4 tokens .165 → .177 ms by `near`.
Ask asked(const Problem& p, const Machine& machine, bool cached) {
  if (!machine.has("prefetch_l2")) return cached && is_zen5(machine) ? Ask::near : Ask::far;
  const BsrShape& s = p.weight.shape;
  const bool wide = machine.has("avx512");
  if (wide && p.weight.dtype == DType::i8) return Ask::l2;
  const bool one_pass = s.block_cols == 1 && s.block_rows <= 16;  // with four tokens, too
  if (cached) return wide || p.tokens == 1 || one_pass ? Ask::nothing : Ask::far;
  if (p.tokens > 2 || s.block_size() < 8) return Ask::l2;
  const bool rows = s.block_cols % 16 == 0, floats = p.weight.dtype == DType::f32;
  if (rows && wide && s.block_rows * p.tokens <= 32) return Ask::nothing;
  if (p.tokens == 1) return rows && (wide ? !floats : s.block_rows <= 16) ? Ask::l2 : Ask::far;
  // Two tokens: 16×1 4.6 → 3.9 ms, 64×64 4.8 → 3.8, 8×8 in bf16 2.5 → 1.9.
  return !wide || (rows && !floats) ? Ask::l2 : Ask::near;
}

std::int64_t bytes_of_weight(const Problem& p) {
  const BsrShape& s = p.weight.shape;
  return s.value_count() * static_cast<std::int64_t>(size_of(p.weight.dtype)) + s.nnzb * kIndexBytes;
}

// Up to how many tokens groups of four or eight, one behind the other, are faster than kernels whose lanes
// are tokens, and from how many left ones up to eight are a group (0: none are). Measured on a Zen 4 and a
// Xeon (docs/design/cpu/few_tokens.md#more-than-four-tokens-by-fours), not on a Zen 5.
struct ByGroups {
  std::int64_t most = kFewTokens, eight = 0;
};

// Where groups of eight were measured: f32, and 16 bits, which become floats, on Intel.
bool has_eights(DType dtype, const Machine& machine) {
  const bool short_floats = dtype == DType::bf16 || dtype == DType::f16;
  return dtype == DType::f32 || (short_floats && !machine.has("prefetch_l2"));
}

// Squares of 16 columns and tall blocks, of which eight tokens take little longer than four.
ByGroups by_eights(const Problem& p, const Machine& machine) {
  const bool zen4 = machine.has("prefetch_l2"), tall = p.weight.shape.block_cols == 1;
  const std::int64_t bytes = bytes_of_weight(p);
  if (zen4 && bytes > kFar) return {kFewByFours, 5};
  if (zen4) return {!tall ? 12 : bytes > kCached ? 8 : kFewTokens, 7};
  if (tall && bytes > kFar) return {kFewByFours, 5};
  return {bytes > (tall ? 4 << 20 : 3 << 19) ? kFewEight : kFewTokens, 5};
}

ByGroups by_groups(const FewKernels& kernels, const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  if (is_zen5(machine) || kernels.rows.width != 16) return {};
  const std::int64_t rows = s.block_rows, cols = s.block_cols, bytes = bytes_of_weight(p);
  const bool zen4 = machine.has("prefetch_l2"), tall = cols == 1;
  const bool far = bytes > kCached, dense = 3 * s.value_count() > s.rows * s.cols;
  // Zen 4, 768→3072 at .5, 8 tokens: 50×50 .43 → .30 ms, 1×100 .68 → .48.
  if (few_is_ragged(16, rows, cols)) {
    return {cols > 16 && (dense || p.weight.dtype != DType::f32) ? kFewEight : kFewTokens};
  }
  if (!few_fills(16, rows, cols)) return {};
  if (is_scaled(p)) {
    if (!zen4 || s.value_count() < 2 << 20) return {};
    // Floats would be four times as many bytes (32×32, 4096→11008, 8 tokens: 6.3 → 4.1 ms, 12: 7.8 → 6.1).
    return {tall && !far ? 8 : 12};
  }
  if (kernels.pairs) {
    if (rows == 8 && cols == 8) return {8};
    if (rows == 1 && cols == 16) return {far ? kFewByFours : dense ? 12 : kFewTokens};
    if (rows == 2 && cols == 2) return {far ? 8 : kFewTokens};
    return {!far ? kFewTokens : rows >= 64 ? 8 : tall && rows == 32 ? 6 : kFewTokens};
  }
  if (has_eights(p.weight.dtype, machine) && ((rows >= 16 && cols % 16 == 0) || (tall && rows >= 64)))
    return by_eights(p, machine);
  if (p.weight.dtype != DType::f32) {  // blocks of one or two rows; others were not measured
    if (rows > 2) return {};
    if (far) return {rows == 2 ? 8 : 12};
    return {cols == 16 && (dense || bytes > 4 << 20) ? 8 : kFewTokens};
  }
  // Zen 4, .5 / .1, 5 and 8 tokens, µs: 32×2 355, 357 / 108, 110 → 156, 203 / 46, 59; 16×8 286, 288 / 70, 71
  // → 180, 245 / 56, 77. From memory 16×8 and 8×4 are faster as lanes.
  if (cols > 1 && cols <= 8 && rows * cols >= 16) return {far ? kFewTokens : 8};
  if (rows == 1 && cols == 16) return {zen4 ? (dense ? 6 : kFewTokens) : dense || far ? 8 : kFewTokens};
  return {far && dense && rows == 2 && cols == 2 ? 8 : kFewTokens};
}

}  // namespace

Reason yields_few(const FewKernels& kernels, const Problem& p, const Machine& machine) {
  const BsrShape& s = p.weight.shape;
  // Joined, in pairs (avx512_few_groups.h), .5, × dense bf16 with 1 / 4 tokens: 768→3072 1×4 .65 / .34 → 1.5
  // / 1.6, 2×2 .9 / .9 → 1.8 / 1.9; 4096², which comes out of memory, 1×4 2.1 / .9 → 1.4 / 1.3.
  const bool small = kernels.pairs && s.block_cols > 1 && s.block_size() <= 4;
  const bool packed = p.derived != 0 && (s.block_rows > 1 || 5 * s.value_count() >= s.rows * s.cols);
  if (small && packed && p.tokens <= kFewTokens) {
    const bool far = bytes_of_weight(p) > kCached / 2;
    if (!far || p.tokens > 1) return "blocks of up to 4 elements are faster joined";
  }
  const std::int64_t most = by_groups(kernels, p, machine).most;
  if (p.tokens <= most) return {};
  return cat("more than ", most, " tokens are faster as lanes; got ", p.tokens);
}

Config configure_few(const Problem& problem, const Machine& machine) {
  const BsrShape& s = problem.weight.shape;
  const std::int64_t bytes = bytes_of_weight(problem);
  FewSplit split;
  split.tasks = std::clamp<std::int64_t>(kTasksPerThread * problem.threads, 1,
                                         std::max<std::int64_t>(1, s.row_count()));
  const auto of_x =
      static_cast<std::int64_t>(std::max(size_of(problem.weight.dtype), sizeof(float)));  // bytes
  // Zen 5 shuffles beside its products; others broadcast from memory as fast. (A Zen 4 gains from few_turned
  // what its order of reading brings, with blocks of 16 columns and more: 16×16 .055, .066, .098 → .053,
  // .057, .095 ms with 1, 2, 4 tokens.)
  split.fours = is_zen5(machine) ? 1 : 0;
  const bool wide_blocks = s.block_cols % 16 == 0;
  split.turned = split.fours != 0 || (machine.has("prefetch_l2") && wide_blocks) ? 1 : 0;
  // A Xeon's eight tokens, too, which few_turned alone has of such blocks.
  if (problem.tokens > kFewTokens && has_eights(problem.weight.dtype, machine) && !is_zen5(machine) &&
      machine.has("avx512")) {
    split.eight = by_eights(problem, machine).eight;
    if (wide_blocks && s.block_rows >= 16) split.turned = 1;
  }
  split.ask = static_cast<std::int64_t>(asked(problem, machine, bytes <= kCached));
  split.again = static_cast<std::int64_t>(asked(problem, machine, true));
  constexpr std::int64_t kPiece = 256 << 10;  // bytes of W that groups of tokens share
  split.piece = std::max<std::int64_t>(1, kPiece * s.row_count() / std::max<std::int64_t>(1, bytes));
  const bool far_x = singles_by_four(problem) || s.cols * of_x > kRowOfX;
  split.stream = s.block_size() == 1 && bytes > kCached && far_x ? 1 : 0;
  return to_config(split);
}

std::int64_t few_workspace(const FewKernels& kernels, const Problem& problem, const Config& config) {
  const Layout layout(kernels, problem, from_config<FewSplit>(config));
  return layout.shared + problem.threads * layout.worker;
}

Status run_linear_few(const FewKernels& kernels, const Call& call) {
  const auto split = from_config<FewSplit>(call.config);
  if (split.tasks < 1 || split.piece < 1) {
    return invalid(kernels.family, "tasks and piece of the config must be at least 1",
                   cat(split.tasks, " and ", split.piece));
  }
  if (split.eight != 0 && (split.eight <= kFewTokens || split.eight > kFewEight)) {
    return invalid(kernels.family, "eight of the config must be 0 or 5 to 8", cat(split.eight));
  }
  for (const std::int64_t ask : {split.ask, split.again}) {
    if (ask < 0 || ask > static_cast<int>(Ask::nothing))
      return invalid(kernels.family, "ask of the config must be in [0, 3]", cat(ask));
  }
  const PlanView& plan = call.plan;
  const BsrShape& s = plan.shape;
  const Layout layout(kernels, call.problem, split);
  struct {
    const float* data;
    std::int64_t stride;
  } xs[std::size(layout.groups)];
  for (int i = 0; i < layout.group_count; ++i) {
    const Group& g = layout.groups[i];
    Room room(static_cast<char*>(call.workspace) + g.rows_at);
    MatrixView from = call.x;
    from.data = at(call.x, g.first, 0);
    from.rows = g.count;
    auto& x = xs[i];
    x = {static_cast<const float*>(from.data), from.row_stride};
    if (!reads_x(kernels, call.problem, layout, g)) {
      auto* rows = room.take<float>(g.tokens * layout.lanes);
      if (layout.twice) {
        to_twice(from, g.tokens, rows);
      } else if (kernels.pairs) {
        to_pairs(from, g.tokens, layout.lanes, rows);
      } else {
        to_float(kernels.rows, from, g.tokens, layout.lanes, rows);
      }
      x = {rows, layout.lanes};
    }
    if (!layout.has_columns(g)) continue;
    auto* columns = room.take<float>(g.tokens * layout.turned_columns());
    if (g.by_column) {
      to_columns(x.data, x.stride, layout.lanes, g.tokens, columns);
      x.data = columns;
    }
    if (!layout.turned || g.tokens < 4) continue;
    const std::int64_t four = 4 * layout.turned_columns();
    for (std::int64_t m = 0; m < g.tokens; m += 4) {
      kernels.turn(x.data + m * x.stride, x.stride, layout.lanes, columns + m / 4 * four);
    }
    x = {columns, four};
  }
  const bool in_y = writes_y(call.problem, layout);
  const bool ragged =
      kernels.ragged != nullptr && few_is_ragged(kernels.rows.width, s.block_rows, s.block_cols);
  const auto multiply = ragged ? kernels.ragged : kernels.multiply;
  const bool scaled = is_scaled(call.problem);
  SparseOperand w =
      operand(s, call.values, scaled ? DType::f32 : call.problem.weight.dtype, plan.col, nullptr, false);
  if (scaled) w.storage = Storage::i8;
  if (kernels.pairs && s.block_cols % 2 == 0) w = in_pairs(w);

  // Block rows begin … end, at most a piece of them.
  const auto rows = [&](std::int32_t begin, std::int32_t end, float* y, float* bias) {
    const std::int64_t first = begin * s.block_rows;
    const std::int64_t features = std::min(end * s.block_rows, s.rows) - first;
    std::int64_t stride = layout.stride;
    if (in_y) {
      y = static_cast<float*>(call.out.data) + first;
      stride = call.out.row_stride;
      for (std::int64_t m = 0; m < layout.tokens; ++m) std::fill_n(y + m * stride, features, 0.0F);
    } else {
      std::fill_n(y, layout.tokens * stride, 0.0F);
    }
    if (!scaled) begin_with_bias(kernels.rows, call, first, features, layout.tokens, y, stride);
    for (int i = 0; i < layout.group_count; ++i) {
      const Group& g = layout.groups[i];
      multiply({w, static_cast<std::int32_t>(s.nnzb), plan.crow, begin, end, xs[i].data, xs[i].stride,
                static_cast<std::int32_t>(g.tokens), y + g.first * stride, stride,
                i == 0 && split.stream != 0,
                has_narrow_columns(s) ? static_cast<const std::uint16_t*>(call.derived.prepared) : nullptr,
                g.by_column, static_cast<Ask>(i == 0 ? split.ask : split.again), layout.turned});
    }
    if (scaled) scale_sums(kernels.rows, call, first, features, layout.tokens, y, stride, bias);
    if (!in_y) finish_tokens(kernels.rows, call, first, features, y, stride);
  };
  call.executor.parallel_for(split.tasks, [&](std::int64_t task, int worker) {
    Room own(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
    auto* y = own.take<float>(layout.tokens * layout.stride);
    auto* bias = scaled ? own.take<float>(layout.stride) : nullptr;
    const std::int32_t end = begin_of_part(plan.crow, s.row_count(), 1, 0, task + 1, split.tasks);
    std::int32_t begin = begin_of_part(plan.crow, s.row_count(), 1, 0, task, split.tasks);
    for (; begin < end; begin += static_cast<std::int32_t>(layout.piece)) {
      rows(begin, static_cast<std::int32_t>(std::min<std::int64_t>(begin + layout.piece, end)), y, bias);
    }
  });
  return {};
}

}  // namespace rarefy::cpu
