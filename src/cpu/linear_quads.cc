// Drives linear in int8 (quads.h) as linear_pairs.cc does in bf16: a task rounds and packs a set of panels of
// tokens and goes through a range of output blocks. Weights are tiles of 16 outputs × 64 of the block row's
// stored columns, in fours, or lines of all its outputs (lanes.h), whatever their blocks were; beside them
// the total of each output's values.
#include "cpu/linear_quads.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "core/message.h"
#include "cpu/quads_task.h"

namespace rarefy::cpu {

namespace {

static_assert(kTileRows * kQuadGroup == kTileSize * 2, "a tile has the bytes of one in bf16");

// 128 · 127 times as many products fit in an int32; what vpdpbusd adds beyond comes off again, modulo 2³².
constexpr std::int64_t kMostFeatures = 1 << 17;

// A part of the output blocks of every call, for a task's tokens.
void run_task(const QuadKernels& kernels, std::span<const Call> calls, QuadsParts parts,
              const PanelTasks::Task& task) {
  bool packed = false;
  kernels.enter();
  for (const Call& call : calls) {
    const QuadsShape s(kernels, call.problem.weight.shape);
    const QuadsSection section = quad_section(kernels, call.problem.weight.shape);
    QuadsWeight w(kernels, s, call.plan.crow, section.of(call.derived));
    w.again = task.again && calls.size() == 1;
    const std::int64_t begin = w.begin_of(task.part, task.parts), end = w.begin_of(task.part + 1, task.parts);
    if (begin == end) continue;
    if (!std::exchange(packed, true)) pack_quads_x(kernels, s, call, parts, task.first, task.tokens);
    Room own(call.workspace);
    QuadsLayout::take_shared(own, s, parts);
    multiply_quads(w, call, parts, task.first, task.tokens, begin, end);
  }
  kernels.leave();
}

// Of a call that makes what it needs, its own alone.
bool wants(const QuadsSection& section, const QuadKernels& kernels, const Call& call) {
  const std::uint64_t key = call.problem.derived;
  return &section.kernels == &kernels || key == kAnyDerived || key == kAnyPrepared;
}

void pack_section(const QuadsSection& section, const Call& call, void* data) {
  const QuadKernels& kernels = section.kernels;
  const QuadsShape s(kernels, call.problem.weight.shape);
  const Derived derived = section.of({0, call.derived.prepared, data});
  const Prepared prepared(s, derived.prepared);
  const QuadsPacked packed(s, derived.packed);
  const std::int32_t* begin = call.plan.crow;
  const auto* values = static_cast<const std::int8_t*>(call.values);
  const std::int64_t block = s.row_block * s.red_block;
  // Bytes between lines, and between outputs, which by token are in tiles of 16.
  const std::int64_t line = kernels.by_token  ? std::int64_t{kTileRows} * kQuad
                            : kernels.by_line ? s.out_block * kQuad
                                              : std::int64_t{kQuad};
  const std::int64_t output = kernels.by_token || kernels.by_line ? kQuad : kQuadGroup;
  std::vector<std::int32_t> places(static_cast<std::size_t>(s.out_block));  // of outputs in a line
  for (std::int64_t r = 0; r < s.out_block; ++r) {
    const std::int64_t tile = kernels.by_token ? r / kTileRows * (2 * kTileSize - kTileRows * output) : 0;
    places[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(tile + r * output);
  }
  const auto in_total = [&](std::int32_t w) { return kernels.complements ? std::max(0, -w) : w; };
  const bool fours = s.red_block % kQuad == 0;
  const std::int64_t count = fours ? kQuad : 1;                              // copied at once
  const int shift = std::countr_zero(static_cast<std::uint64_t>(s.step()));  // of columns to offsets
  call.executor.parallel_for(s.out_blocks, [&](std::int64_t o, int) {
    std::int8_t* tiles = packed.tiles + prepared.first[o] * 2 * s.tiles_size();
    std::int32_t* totals = packed.totals + o * s.out_block;
    const std::uint32_t* offsets = prepared.offsets + prepared.first[o] * s.offsets();
    const std::int64_t groups = prepared.first[o + 1] - prepared.first[o];
    std::memset(tiles, 0, static_cast<std::size_t>(groups * 2 * s.tiles_size()));
    std::fill_n(totals, s.out_block, 0);
    for (std::int64_t row = s.first_row(o); row < s.stop_row(o); ++row) {
      const RowPart part(s, o, row);
      std::int64_t at = 0;  // among the columns of the output block
      const std::int8_t* from = values + begin[row] * block + part.from * s.red_block;
      for (std::int32_t e = begin[row]; e < begin[row + 1]; ++e, from += block) {
        const std::int64_t column = call.plan.col[e] * s.red_block;
        if (s.dense) at = column;
        while (!s.dense && s.out_block != s.row_block && offsets[at >> shift] != s.place(column))
          at += s.red_block;
        for (std::int64_t i = 0; i < s.red_block; i += count, at += count) {
          const std::int64_t within = at % kQuadGroup;
          std::int8_t* to =
              tiles + at / kQuadGroup * 2 * s.tiles_size() + within / kQuad * line + within % kQuad;
          const auto copy = [to, at_row = places.data() + part.top, from = from + i, rows = part.count,
                             cols = s.red_block]<int kCount> {
            for (std::int64_t r = 0; r < rows; ++r) std::memcpy(to + at_row[r], from + r * cols, kCount);
          };
          fours ? copy.template operator()<kQuad>() : copy.template operator()<1>();
        }
        std::int32_t* total = totals + part.top;
        if (s.red_block == 1) {  // as vectors: in the loops below each sum would go through memory
          for (std::int64_t r = 0; r < part.count; ++r) total[r] += in_total(from[r]);
          continue;
        }
        for (std::int64_t r = 0; r < part.count; ++r) {
          const std::int8_t* of = from + r * s.red_block;
          for (std::int64_t i = 0; i < s.red_block; ++i) total[r] += in_total(of[i]);
        }
      }
    }
  });
  std::fill_n(packed.totals + s.out_features(), s.read_features() - s.out_features(), 0);
}

}  // namespace

PanelWork quads_work(const QuadKernels& kernels, const Problem& p) {
  const QuadsShape s(kernels, p.weight.shape);
  return {s.tiles(),
          kernels.tile_cycles,
          static_cast<double>(s.padded * s.tokens),
          s.panel_size(),
          s.out_features(),
          s.out_blocks,
          kernels.lanes != nullptr ? streamed_byte(static_cast<double>(s.tiles_bytes()))
                                   : PanelWork{}.weight_byte,
          s.tokens};
}

Config configure_quads(const QuadKernels& kernels, const Problem& problem, const Machine& machine) {
  return configure_panels(quads_work(kernels, problem), problem, machine);
}

std::vector<Config> quads_candidates(const QuadKernels& kernels, const Problem& problem,
                                     const Machine& machine) {
  return panel_candidates(quads_work(kernels, problem), problem, machine);
}

Reason supports_quads(const QuadKernels& kernels, const Problem& p, const Machine& machine) {
  if (p.weight.dtype != DType::i8 || p.weight.scaling != Scaling::dynamic) {
    return "takes int8 values with scales, for x rounded to int8";
  }
  const auto takes = [](DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; };
  if (!takes(p.in) || !takes(p.out)) {
    return cat("takes inputs and outputs in f32 or bf16; got ", name(p.in), " and ", name(p.out));
  }
  const QuadsShape s(kernels, p.weight.shape);
  const std::int32_t fewest = fewest_tokens(kernels, p.weight.shape, starts_two(machine), p.threads == 1);
  if (fewest == 0) {
    return cat("takes ", kernels.takes, "; got ", s.row_block, "×", s.red_block, " with ",
               p.weight.shape.nnzb, " of ", s.rows * s.red_blocks);
  }
  if (p.tokens < fewest) {
    return cat("takes at least ", fewest, " tokens with blocks of ", s.row_block, " outputs; got ", p.tokens);
  }
  if (s.padded > kMostFeatures) return cat("takes less than ", kMostFeatures, " input features");
  return {};
}

std::int64_t quads_workspace(const QuadKernels& kernels, const Problem& problem, const Config& config) {
  const QuadsShape s(kernels, problem.weight.shape);
  const QuadsLayout layout(kernels, s, from_config<PairsBlocking>(config));
  return layout.shared + problem.threads * layout.worker;
}

std::int64_t quads_prepared_size(const QuadKernels& kernels, const Problem& problem) {
  return for_quad_sections(kernels, problem.weight.shape, [](const QuadsSection&) {}).first;
}

Status prepare_quads(const QuadKernels& kernels, const Call& call, void* data) {
  for_quad_sections(kernels, call.problem.weight.shape, [&](const QuadsSection& section) {
    if (!wants(section, kernels, call)) return;
    prepare_groups(QuadsShape(section.kernels, call.problem.weight.shape), call.plan.crow, call.plan.col,
                   const_cast<void*>(section.of({0, data}).prepared));
  });
  return {};
}

std::int64_t quads_packed_size(const QuadKernels& kernels, const Problem& problem) {
  return for_quad_sections(kernels, problem.weight.shape, [](const QuadsSection&) {}).second;
}

Status pack_quads_weight(const QuadKernels& kernels, const Call& call, void* data) {
  for_quad_sections(kernels, call.problem.weight.shape, [&](const QuadsSection& section) {
    if (wants(section, kernels, call)) pack_section(section, call, data);
  });
  return {};
}

Status run_quads(const QuadKernels& kernels, std::span<const Call> calls) {
  const Call& lead = calls.front();  // whose workspace has the panels of all
  const auto b = from_config<PairsBlocking>(lead.config);
  std::int64_t out_blocks = 0;
  for (const Call& call : calls) {
    const QuadsShape s(kernels, call.problem.weight.shape);
    out_blocks += s.out_blocks;
    QuadsParts shared{};
    Room all(call.workspace);
    QuadsLayout::take_shared(all, s, shared);
    unpack_outputs(call, s, shared, call.problem.out);
  }
  if (Status status = check_panels(kernels.family, b, out_blocks); !status.ok()) return status;
  const QuadsShape s(kernels, lead.problem.weight.shape);
  const QuadsLayout layout(kernels, s, b);
  for_each_part(
      lead, b,
      [&](int worker, const PanelTasks::Task& task) {
        QuadsParts parts{};
        Room own(static_cast<char*>(lead.workspace) + layout.shared + worker * layout.worker);
        QuadsLayout::take_worker(own, kernels, s, b, parts);
        run_task(kernels, calls, parts, task);
      },
      s.tokens);
  return {};
}

}  // namespace rarefy::cpu
