// Drives linear in int8 (quads.h) as linear_pairs.cc does in bf16: a task rounds and packs a set of panels of
// tokens and goes through a range of output blocks. Weights are tiles of 16 outputs × 64 of the block row's
// stored columns, in fours, whatever their blocks were; beside them the total of each output's values.
#include "cpu/linear_quads.h"

#include <algorithm>
#include <cstring>

#include "core/message.h"
#include "cpu/quads_weight.h"

namespace rarefy::cpu {

namespace {

static_assert(kTileRows * kQuadGroup == kTileSize * 2, "a tile has the bytes of one in bf16");

// 128 · 127 times as many products fit in an int32; what vpdpbusd adds beyond comes off again, modulo 2³².
constexpr std::int64_t kMostFeatures = 1 << 17;

// Of what a call derives for itself.
std::int64_t own_bytes(const QuadsShape& s) {
  return QuadsPrepared(s, nullptr).bytes + QuadsPacked(s, nullptr).bytes;
}

// The working memory of a call: what all tasks read, and what each worker has.
struct Parts {
  float *bias, *scales;
  std::uint16_t *panels, *gathered;
  float *tokens, *sums;
};

struct QuadsLayout {
  std::int64_t shared, worker;  // bytes

  QuadsLayout(const QuadsShape& s, const PairsBlocking& b) {
    Parts parts{};
    Room all;
    take_shared(all, s, parts);
    shared = all.bytes();
    Room own;
    take_worker(own, s, b, parts);
    worker = own.bytes();
  }
  static void take_shared(Room& room, const QuadsShape& s, Parts& parts) {
    parts.bias = room.take<float>(s.out_features());
    parts.scales = room.take<float>(s.out_features());
  }
  static void take_worker(Room& room, const QuadsShape& s, const PairsBlocking& b, Parts& parts) {
    parts.panels = room.take<std::uint16_t>(b.panels * s.panel_size());
    parts.gathered = room.take<std::uint16_t>(kGatheredGroups * kGroupSize);
    parts.tokens = room.take<float>(b.panels * kPanelTokens);
    parts.sums = room.take<float>(std::min(b.panels, kNear) * s.sums_size());
  }
};

// Bias and scales of whole blocks of outputs, 0 where there is nothing.
void unpack_outputs(const Call& call, const QuadsShape& s, const Parts& parts) {
  const std::int64_t count = call.out.cols;
  std::fill_n(parts.bias, s.out_features(), 0.0F);
  std::fill_n(parts.scales, s.out_features(), 0.0F);
  std::copy_n(call.scales, count, parts.scales);
  if (call.bias == nullptr) return;
  for (std::int64_t n = 0; n < count; ++n) {
    parts.bias[n] = call.problem.out == DType::f32 ? static_cast<const float*>(call.bias)[n]
                                                   : to_float(static_cast<const bfloat16*>(call.bias)[n]);
  }
}

// Output blocks begin … end for tokens first … first + tokens.
void run_task(const QuadsWeight& w, const Call& call, const Parts& parts, std::int64_t first,
              std::int64_t tokens, std::int64_t begin, std::int64_t end) {
  const QuadsShape& s = w.shape;
  w.kernels.enter();
  for (std::int64_t m = 0; m < tokens; m += kPanelTokens) {
    w.kernels.pack({at(call.x, first + m, 0), call.problem.in == DType::bf16, call.x.row_stride,
                    panel_rows(tokens, m), static_cast<std::int32_t>(call.x.cols),
                    static_cast<std::int32_t>(s.padded), s.source != PairSource::columns,
                    reinterpret_cast<std::uint8_t*>(parts.panels + m / kPanelTokens * s.panel_size()),
                    parts.tokens + m});
  }
  w.multiply(
      parts.panels, tokens, begin, end, parts.gathered, parts.sums,
      [&](std::int64_t m, std::int32_t rows, std::int64_t block, std::int64_t stop, const float* sums) {
        const std::int64_t from = block * s.out_block;
        w.kernels.store({reinterpret_cast<const std::int32_t*>(sums), w.packed.totals + from,
                         parts.scales + from, parts.bias + from, parts.tokens + m, call.activation,
                         at(call.out, first + m, from), call.problem.out == DType::bf16, call.out.row_stride,
                         rows,
                         static_cast<std::int32_t>(std::min(stop * s.out_block, call.out.cols) - from)});
      });
  w.kernels.leave();
}

PanelWork work_of(const QuadKernels& kernels, const Problem& p) {
  const QuadsShape s(p.weight.shape);
  return {static_cast<double>(s.entries * s.out_block * s.red_block) / (kTileRows * kQuadGroup),
          kernels.tile_cycles,
          static_cast<double>(s.padded * kPanelTokens),
          s.panel_size(),
          s.out_features(),
          s.out_blocks};
}

}  // namespace

Config configure_quads(const QuadKernels& kernels, const Problem& problem, const Machine& machine) {
  return configure_panels(work_of(kernels, problem), problem, machine);
}

std::vector<Config> quads_candidates(const QuadKernels& kernels, const Problem& problem,
                                     const Machine& machine) {
  return panel_candidates(work_of(kernels, problem), problem, machine);
}

Reason supports_quads(const Problem& p) {
  if (p.weight.dtype != DType::i8 || p.weight.scaling != Scaling::dynamic) {
    return "takes int8 values with scales, for x rounded to int8";
  }
  if ((p.in != DType::f32 && p.in != DType::bf16) || p.out != p.in) {
    return cat("takes inputs in f32 or bf16, to outputs like them; got ", name(p.in), " and ", name(p.out));
  }
  const QuadsShape s(p.weight.shape);
  if (s.out_block % kTileRows != 0) {
    return cat("takes blocks of a multiple of ", kTileRows, " outputs; got ", s.out_block);
  }
  if (s.padded > kMostFeatures) return cat("takes less than ", kMostFeatures, " input features");
  return {};
}

std::int64_t quads_workspace(const Problem& problem, const Config& config) {
  const QuadsShape s(problem.weight.shape);
  const QuadsLayout layout(s, from_config<PairsBlocking>(config));
  return (problem.derived == 0 ? own_bytes(s) : 0) + layout.shared + problem.threads * layout.worker;
}

std::int64_t quads_prepared_size(const Problem& problem, const Config& /*config*/) {
  return QuadsPrepared(QuadsShape(problem.weight.shape), nullptr).bytes;
}

Status prepare_quads(const Call& call, void* data) {
  const QuadsShape s(call.problem.weight.shape);
  const QuadsPrepared prepared(s, data);
  const std::int32_t* begin = call.plan.crow;
  const std::int64_t step = kQuadGroup / s.offsets();
  const auto offset = [](std::int64_t feature) {  // features have 32 bytes
    return static_cast<std::uint32_t>(feature * kPanelTokens / 2);
  };
  std::uint32_t* to = prepared.offsets;
  prepared.first[0] = 0;
  for (std::int64_t o = 0; o < s.out_blocks; ++o) {
    const std::int64_t groups = s.groups_of(begin[o + 1] - begin[o]);
    prepared.first[o + 1] = prepared.first[o] + static_cast<std::int32_t>(groups);
    const std::uint32_t* end = prepared.offsets + prepared.first[o + 1] * s.offsets();
    for (std::int32_t e = begin[o]; e < begin[o + 1]; ++e) {
      const std::int64_t from = std::int64_t{call.plan.col[e]} * s.red_block;
      for (std::int64_t i = 0; i < s.red_block; i += step) *to++ = offset(from + i);
    }
    while (to != end) *to++ = offset(s.padded - kQuad);
  }
  return {};
}

std::int64_t quads_packed_size(const Problem& problem, const Config& /*config*/) {
  return QuadsPacked(QuadsShape(problem.weight.shape), nullptr).bytes;
}

Status pack_quads_weight(const Call& call, void* data) {
  const QuadsShape s(call.problem.weight.shape);
  const QuadsPrepared prepared(s, call.derived.prepared);
  const QuadsPacked packed(s, data);
  const std::int32_t* begin = call.plan.crow;
  const auto* values = static_cast<const std::int8_t*>(call.values);
  const std::int64_t block = s.out_block * s.red_block;
  call.executor.parallel_for(s.out_blocks, [&](std::int64_t o, int) {
    std::int8_t* tiles = packed.tiles + prepared.first[o] * 2 * s.tiles_size();
    std::int32_t* totals = packed.totals + o * s.out_block;
    const std::int64_t columns = (std::int64_t{begin[o + 1]} - begin[o]) * s.red_block;
    const std::int64_t groups = s.groups_of(begin[o + 1] - begin[o]);
    std::memset(tiles, 0, static_cast<std::size_t>(groups * 2 * s.tiles_size()));
    std::fill_n(totals, s.out_block, 0);
    for (std::int64_t i = 0; i < columns; ++i) {
      std::int8_t* to = tiles + i / kQuadGroup * 2 * s.tiles_size() + i % kQuadGroup;
      const std::int8_t* from = values + (begin[o] + i / s.red_block) * block + i % s.red_block;
      for (std::int64_t r = 0; r < s.out_block; ++r) {
        to[r * kQuadGroup] = from[r * s.red_block];
        totals[r] += from[r * s.red_block];
      }
    }
  });
  return {};
}

Status run_quads(const QuadKernels& kernels, const Call& given) {
  const auto b = from_config<PairsBlocking>(given.config);
  const QuadsShape s(given.problem.weight.shape);
  if (Status status = check_panels(kernels.family, b, s.out_blocks); !status.ok()) return status;
  Call call = given;
  auto* memory = static_cast<char*>(call.workspace);
  if (call.derived.packed == nullptr) {
    char* packed = memory + QuadsPrepared(s, nullptr).bytes;
    call.derived.prepared = memory;
    call.derived.packed = packed;
    if (Status status = prepare_quads(call, memory); !status.ok()) return status;
    if (Status status = pack_quads_weight(call, packed); !status.ok()) return status;
    memory += own_bytes(s);
  }
  const QuadsLayout layout(s, b);
  Parts shared{};
  Room all(memory);
  QuadsLayout::take_shared(all, s, shared);
  unpack_outputs(call, s, shared);
  const std::int32_t* begin = call.plan.crow;
  const auto bound = [&](std::int64_t part) {  // as PairsWeight::begin_of
    return begin_of_part(begin, s.out_blocks, s.red_block, 12, part, b.splits);
  };
  const QuadsWeight weight(kernels, s, begin, call.derived);
  for_each_part(call, b, bound,
                [&](int worker, std::int64_t first, std::int64_t tokens, std::int32_t from, std::int32_t to) {
                  Parts parts = shared;
                  Room own(memory + layout.shared + worker * layout.worker);
                  QuadsLayout::take_worker(own, s, b, parts);
                  run_task(weight, call, parts, first, tokens, from, to);
                });
  return {};
}

}  // namespace rarefy::cpu
