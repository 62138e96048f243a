// Drives linear and grad_input, which are one product: out = W · in on feature-major panels of
// tokens, W read by its rows or through the transposed index. A task is a panel of tokens × a range
// of output blocks (product_task.h); ranges have equal shares of the stored blocks.
#include <algorithm>
#include <numeric>

#include "core/message.h"
#include "cpu/product_task.h"

namespace rarefy::cpu {

namespace {

using namespace product;

BlockingProblem problem_of(const Kernels& kernels, const Problem& p, const Machine& machine) {
  const Sizes s(p);
  return {p.tokens,
          s.out_blocks,
          s.red_blocks,
          s.out_block,
          s.red_block,
          s.entries,
          p.threads,
          kernels.width,
          kernels.max_vectors,
          kernels.registers,
          panel_floats(machine),
          p.op == Op::linear,
          weaves(kernels, p),
          !machine.has("avx512_load_bound")};
}

// Where parts of the sums of output blocks are full: listed by reduction block, and there by output block.
void list_full_parts(const Product& p, std::int32_t* begin, FullPart* full) {
  const Listing& rows = p.by_output;
  const std::int32_t part = p.sizes.part;
  std::int32_t* end = begin + 1;
  std::fill_n(begin, p.sizes.red_blocks + 1, 0);
  const auto each = [&](auto f) {
    for (auto o = static_cast<std::int32_t>(p.sizes.out_blocks); o-- > 0;) {
      const std::int32_t first = rows.begin[o] + part;
      for (std::int32_t e = first; e <= rows.begin[o + 1] - least_entries(part); e += part) {
        f(rows.w.index[e], FullPart{o, e == first});
      }
    }
  };
  each([&](std::int32_t before, const FullPart&) { ++end[before]; });
  std::partial_sum(begin, begin + p.sizes.red_blocks + 1, begin);
  const std::int32_t count = begin[p.sizes.red_blocks];
  each([&](std::int32_t before, const FullPart& one) { full[--end[before]] = one; });
  std::copy(end, end + p.sizes.red_blocks, begin);  // each end has come down to its beginning
  begin[p.sizes.red_blocks] = count;
}

// A forced configuration may be anything.
Status check_blocking(const Kernels& kernels, const Sizes& s, const Blocking& b) {
  const auto check = [&](std::string_view field, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value >= least && value <= most) return Status();
    return invalid(kernels.family, cat(field, " of the config must be in [", least, ", ", most, ']'),
                   cat(value));
  };
  const auto out = std::max<std::int64_t>(1, s.out_blocks);
  const auto red = std::max<std::int64_t>({1, s.red_blocks, std::int64_t{64}});
  for (const Status& status :
       {check("scatter", b.scatter, 0, 1), check("vectors", b.vectors, 1, kernels.max_vectors),
        check("panels", b.panels, 1, b.scatter != 0 ? 1 : kMostPanels), check("splits", b.splits, 1, out),
        check("tile_blocks", b.tile_blocks, 1, red),
        check("group", b.group, 1, std::max<std::int64_t>(out, 64)), check("asks", b.asks, 0, 1)}) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace

SparseOperand operand(const BsrShape& s, const void* values, DType dtype, const std::int32_t* index,
                      const std::int32_t* perm, bool transposed) {
  const auto rows = static_cast<std::int32_t>(s.block_rows);
  const auto cols = static_cast<std::int32_t>(s.block_cols);
  const Storage stored = storage(dtype);
  // Kernels count from where values begin, also to what they do not read: where nothing is stored, from here.
  alignas(64) static constexpr char kNothing[64]{};
  if (values == nullptr) values = kNothing;
  if (transposed) return {index, perm, values, stored, s.block_size(), 1, cols, cols, rows};
  return {index, perm, values, stored, s.block_size(), cols, 1, rows, cols};
}

Config configure_product(const Kernels& kernels, const Problem& problem, const Machine& machine) {
  return to_config(choose_blocking(problem_of(kernels, problem, machine)));
}

std::vector<Config> product_candidates(const Kernels& kernels, const Problem& problem,
                                       const Machine& machine) {
  std::vector<Config> configs;
  for (const Blocking& b : all_blockings(problem_of(kernels, problem, machine)))
    configs.push_back(to_config(b));
  return configs;
}

std::int64_t product_workspace(const Kernels& kernels, const Problem& problem, const Config& config) {
  const Layout layout(kernels, Sizes(problem), from_config<Blocking>(config));
  return layout.shared + problem.threads * layout.worker;
}

namespace {

// A call in its workspace, which tasks look up anew: no call takes memory for it.
struct Bound {
  Product product;
  Layout layout;
  Parts common{};

  Bound(const Kernels& kernels, const Call& call, const Blocking& blocking)
      : product(call), layout(kernels, product.sizes, blocking) {
    product.by_output.w.asks_x = blocking.asks != 0;
    Room shared(call.workspace);
    Layout::take_shared(shared, product.sizes, blocking, common);
  }

  Parts parts(const Kernels& kernels, const Call& call, const Blocking& blocking, int worker) const {
    Parts parts = common;
    Room own(static_cast<char*>(call.workspace) + layout.shared + worker * layout.worker);
    layout.take_worker(own, kernels, product.sizes, blocking, parts);
    return parts;
  }

  // Ranges of output blocks have equal work: stored elements, and a price for writing each output feature
  // that equals about 12 of them. Where there are many, they begin with a vector of Y: half of one is two
  // lines.
  std::int32_t begin_of(std::int64_t part, std::int64_t splits, std::int64_t width) const {
    const Sizes& s = product.sizes;
    const std::int64_t whole = std::max<std::int64_t>(1, width / s.out_block);
    const std::int64_t unit = 4 * whole * splits <= s.out_blocks ? whole : 1;
    const std::int32_t at =
        begin_of_part(product.by_output.begin, s.out_blocks, s.red_block, 12, part, splits);
    return part == splits ? at : static_cast<std::int32_t>(at / unit * unit);
  }
};

// What tasks read: where sums start, and where parts of them are full.
Status prepare_call(const Kernels& kernels, const Call& call, const Blocking& blocking) {
  if (blocking.scatter != 0 && call.plan.ccol == nullptr) {
    return invalid(kernels.family, "plan must have its transposed index for scatter", "a row plan");
  }
  const Bound bound(kernels, call, blocking);
  const Product& product = bound.product;
  const std::int64_t out_features = product.sizes.out_blocks * product.sizes.out_block;
  float* start = bound.common.start;
  if (call.bias != nullptr) {
    unpack_bias(kernels, product.out.dtype, call.bias, product.out.cols, start);
    std::fill(start + product.out.cols, start + out_features, 0.0F);
  } else {
    std::fill_n(start, out_features, 0.0F);
  }
  if (bound.common.full_begin != nullptr)
    list_full_parts(product, bound.common.full_begin, bound.common.full);
  return {};
}

}  // namespace

Status run_product(const Kernels& kernels, std::span<const Call> calls) {
  const Call& lead = calls.front();
  const auto blocking = from_config<Blocking>(lead.config);
  Sizes sizes(lead.problem);
  for (const Call& call : calls.subspan(1)) sizes.out_blocks += Sizes(call.problem).out_blocks;
  if (Status status = check_blocking(kernels, sizes, blocking); !status.ok()) return status;
  for (const Call& call : calls) {
    if (Status status = prepare_call(kernels, call, blocking); !status.ok()) return status;
  }
  const MatrixView& in = lead.problem.op == Op::linear ? lead.x : lead.dy;
  const std::int64_t lanes = blocking.vectors * kernels.width;
  const std::int64_t tokens = lanes * blocking.panels;  // of one task
  const std::int64_t sets = (in.rows + tokens - 1) / tokens;
  const bool single = blocking.scatter == 0 && blocking.tile_blocks >= sizes.red_blocks;
  // One part of the outputs after the other: a worker, whose tasks follow one another, keeps its part of W.
  lead.executor.parallel_for(sets * blocking.splits, [&](std::int64_t t, int worker) {
    const std::int64_t first = t % sets * tokens, part = t / sets;
    const Panels panels(first, std::min(tokens, in.rows - first), lanes, kernels.width);
    float* packed = nullptr;  // where all calls read x, if it is one tile
    for (const Call& call : calls) {
      const Bound bound(kernels, call, blocking);
      std::int32_t begin = bound.begin_of(part, blocking.splits, kernels.width);
      const std::int32_t end = bound.begin_of(part + 1, blocking.splits, kernels.width);
      if (begin == end) continue;
      Parts parts = bound.parts(kernels, call, blocking, worker);
      if (packed != nullptr) parts.x = packed;
      Task task(call, bound.product, kernels, blocking, parts);
      for (; begin < end; begin += static_cast<std::int32_t>(bound.layout.piece)) {
        const auto stop = static_cast<std::int32_t>(std::min<std::int64_t>(begin + bound.layout.piece, end));
        if (blocking.scatter != 0) {
          task.scatter(panels[0], begin, stop);
        } else {
          task.gather(panels, begin, stop, packed != nullptr);
          if (single) packed = parts.x;
        }
      }
    }
  });
  return {};
}

}  // namespace rarefy::cpu
