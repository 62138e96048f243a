// Drives linear and grad_input, which are one product: out = W · in on feature-major panels of
// tokens, W read by its rows or through the transposed index. A task is a panel of tokens × a range
// of output blocks; ranges have equal shares of the stored blocks.
#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include "core/message.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"

namespace rarefy::cpu {

namespace {

// A call as one product: sizes first, for which the problem is enough.
struct Sizes {
  std::int64_t out_blocks, red_blocks;
  std::int64_t out_block, red_block;
  std::int64_t entries;
  bool halves;        // W is stored in 16 bits
  std::int32_t part;  // entries of a part of a sum

  explicit Sizes(const Problem& p)
      : out_blocks(p.weight.shape.row_count()),
        red_blocks(p.weight.shape.col_count()),
        out_block(p.weight.shape.block_rows),
        red_block(p.weight.shape.block_cols),
        entries(p.weight.shape.nnzb),
        halves(p.weight.dtype != DType::f32) {
    if (p.op != Op::linear) {
      std::swap(out_blocks, red_blocks);
      std::swap(out_block, red_block);
    }
    part = part_entries(static_cast<std::int32_t>(red_block), part_terms(p));
  }

  // Whether a row can have several parts.
  bool parted() const { return red_blocks >= part + least_entries(part); }
};

// The entries of W listed by one of its dimensions: `begin` has one more element than blocks.
struct Listing {
  SparseOperand w;
  const std::int32_t* begin;
};

struct Product {
  Sizes sizes;
  MatrixView in;
  MutableMatrixView out;
  Listing by_output, by_reduction;

  explicit Product(const Call& call)
      : sizes(call.problem),
        in(call.problem.op == Op::linear ? call.x : call.dy),
        out(call.out),
        by_output(listing(call, call.problem.op == Op::linear)),
        by_reduction(listing(call, call.problem.op != Op::linear)) {}

 private:
  static Listing listing(const Call& call, bool by_rows) {
    const bool transposed = call.problem.op != Op::linear;
    const PlanView& plan = call.plan;
    if (by_rows) return {operand(call, plan.col, nullptr, transposed), plan.crow};
    return {operand(call, plan.row, plan.perm, transposed), plan.ccol};
  }
};

// Whether sums can go to rows of Y on their way.
bool weaves(const Kernels& kernels, const Problem& p) {
  return kernels.woven != nullptr && Sizes(p).out_block % 4 == 0 && p.weight.dtype == DType::f32 &&
         p.out == DType::f32;
}

BlockingProblem problem_of(const Kernels& kernels, const Problem& p, const Machine& machine) {
  const Sizes s(p);
  return {p.tokens,          s.out_blocks,          s.red_blocks,
          s.out_block,       s.red_block,           s.entries,
          p.threads,         kernels.width,         kernels.max_vectors,
          kernels.registers, panel_floats(machine), p.op == Op::linear,
          weaves(kernels, p)};
}

// The working memory of a call: what all tasks read, and what each worker has.
struct Parts {
  float* start;              // what the sums of whole output blocks start from: the bias as float, or 0
  FullPart* full;            // scatter: the full parts of all sums, by reduction block and output block
  std::int32_t* full_begin;  // null if no row can have several
  // A worker's:
  float* x;
  float* y;
  float* total;  // of full parts of sums
  float* unpacked;
  std::int32_t* cursors;
};

struct Layout {
  std::int64_t shared, worker;  // bytes
  std::int64_t piece;           // output blocks that a task works on at once

  Layout(const Kernels& kernels, const Sizes& s, const Blocking& b)
      : piece(piece_of_range(s.out_blocks, b.splits)) {
    Room all;
    Parts parts{};
    take_shared(all, s, b, parts);
    shared = all.bytes();
    Room own;
    take_worker(own, kernels, s, b, parts);
    worker = own.bytes();
  }

  static void take_shared(Room& room, const Sizes& s, const Blocking& b, Parts& parts) {
    parts.start = room.take<float>(s.out_blocks * s.out_block);
    if (b.scatter == 0 || !s.parted()) return;
    parts.full = room.take<FullPart>(s.entries / s.part);
    parts.full_begin = room.take<std::int32_t>(s.red_blocks + 1);
  }

  void take_worker(Room& room, const Kernels& kernels, const Sizes& s, const Blocking& b,
                   Parts& parts) const {
    const std::int64_t lanes = b.vectors * kernels.width;
    const std::int64_t tile = std::min(b.tile_blocks, s.red_blocks);
    const std::int64_t sums = s.out_block * lanes;
    const bool single = tile == s.red_blocks;
    if (b.scatter != 0) {
      parts.x = room.take<float>(b.tile_blocks * s.red_block * lanes);
      parts.y = room.take<float>(piece * sums);
      parts.total = room.take<float>(s.parted() ? piece * sums : 0);
      parts.cursors = room.take<std::int32_t>((s.parted() ? 4 : 2) * b.tile_blocks);
    } else {
      parts.x = room.take<float>(b.panels * tile * s.red_block * lanes);
      const std::int64_t waiting = single ? std::min(b.group, piece) * sums : b.panels * piece * sums;
      parts.y = room.take<float>(std::max(waiting, 2 * kernels.width * lanes));  // woven: two groups
      parts.total = room.take<float>(!s.parted() ? 0 : single ? sums : waiting);
      parts.cursors = room.take<std::int32_t>(single ? 0 : 2 * piece);
    }
    parts.unpacked = room.take<float>(s.halves ? std::max(kUnpacked, s.out_block * s.red_block) : 0);
  }
};

struct Panel {
  std::int64_t first;  // token
  std::int32_t rows;
  int vectors;
  std::int64_t lanes;
};

struct Panels {
  std::array<Panel, kMostPanels> panel;
  std::int64_t count = 0;

  // Tokens first … first + tokens, cut into panels; only the last one may be narrower.
  Panels(std::int64_t first, std::int64_t tokens, std::int64_t lanes, std::int64_t width) {
    for (std::int64_t at = 0; at < tokens; at += lanes) {
      const std::int64_t rows = std::min(lanes, tokens - at);
      const std::int64_t vectors = (rows + width - 1) / width;
      panel[static_cast<std::size_t>(count++)] = {first + at, static_cast<std::int32_t>(rows),
                                                  static_cast<int>(vectors), vectors * width};
    }
  }
  const Panel& operator[](std::int64_t i) const { return panel[static_cast<std::size_t>(i)]; }
};

class Task {
 public:
  Task(const Call& call, const Product& product, const Kernels& kernels, const Blocking& blocking,
       const Parts& parts)
      : call_(call), p_(product), k_(kernels), blocking_(blocking), parts_(parts) {}

  // Output blocks begin … end, by rows of W, for a set of panels. X is packed a tile of reduction
  // blocks at a time, so that the set's tile stays in L2; a group of output blocks meets all panels
  // while its weights are near. With several tiles the sums of all output blocks wait in `y`. `packed`: X
  // is, in one tile.
  void gather(const Panels& panels, std::int32_t begin, std::int32_t end, bool packed) {
    const Listing& list = p_.by_output;
    const std::int64_t red_blocks = p_.sizes.red_blocks;
    const std::int64_t tile = std::min(blocking_.tile_blocks, red_blocks);
    const bool single = tile == red_blocks;
    const std::int64_t lanes = panels[0].lanes;
    const bool woven = single && weaves(k_, call_.problem);
    // A panel that shares no weights with others has all of its groups woven into one another.
    const auto group = woven && panels.count == 1 ? end - begin : static_cast<std::int32_t>(blocking_.group);
    const std::int64_t x_size = tile * list.w.red_block * lanes;
    const std::int64_t y_size = (std::int64_t{end} - begin) * list.w.out_block * lanes;
    // At least once: without reduction blocks the outputs are still bias and activation.
    for (std::int64_t first = 0; first == 0 || first < red_blocks; first += std::max<std::int64_t>(1, tile)) {
      const std::int64_t last = std::min(first + tile, red_blocks);
      for (std::int64_t s = 0; s < panels.count && !packed; ++s) {
        pack(panels[s], first, last, list.w.red_block, parts_.x + s * x_size);
      }
      const std::int32_t* entry_begin = list.begin;
      const std::int32_t* entry_end = list.begin + 1;
      if (!single) {
        advance(list, begin, end, static_cast<std::int32_t>(last), first == 0, parts_.cursors);
        entry_begin = parts_.cursors - begin;
        entry_end = parts_.cursors + (end - begin) - begin;
      }
      for (std::int32_t o = begin; o < end; o += group) {
        const std::int32_t stop = std::min(o + group, end);
        for (std::int64_t s = 0; s < panels.count; ++s) {
          const Panel& panel = panels[s];
          if (woven) {
            weave(panel, o, stop, parts_.x + s * x_size);
            continue;
          }
          const std::int64_t at =
              single ? 0 : s * y_size + (std::int64_t{o} - begin) * list.w.out_block * panel.lanes;
          k_.gather({list.w, entry_begin, entry_end, o, stop, parts_.x + s * x_size,
                     static_cast<std::int32_t>(first), parts_.y + at,
                     first == 0 ? parts_.start + std::int64_t{o} * list.w.out_block : nullptr, panel.vectors,
                     parts_.unpacked, p_.sizes.part, list.begin, parts_.total + at,
                     single ? 0 : list.w.out_block * panel.lanes});
          if (last == red_blocks) store(panel, o, stop, parts_.y + at);
        }
      }
    }
  }

  // The same output blocks, by columns of W: X passes by once, a small piece at a time, and the
  // sums of the range stay in L2.
  void scatter(const Panel& panel, std::int32_t begin, std::int32_t end) {
    const Listing& list = p_.by_reduction;
    const std::int64_t red_blocks = p_.sizes.red_blocks;
    const std::int64_t piece = blocking_.tile_blocks;
    std::int32_t* cursors = parts_.cursors;
    const float* start = parts_.start + std::int64_t{begin} * list.w.out_block;
    for (std::int64_t o = 0; o < (std::int64_t{end} - begin) * list.w.out_block; ++o) {
      std::fill_n(parts_.y + o * panel.lanes, panel.lanes, start[o]);
    }
    for (std::int64_t first = 0; first < red_blocks; first += piece) {
      const std::int64_t last = std::min(first + piece, red_blocks);
      pack(panel, first, last, list.w.red_block, parts_.x);
      // Of what is listed by reduction block, that which is for these output blocks.
      const auto restrict = [&](const auto* items, const std::int32_t* listed, std::int32_t* to,
                                auto before) {
        for (std::int64_t j = first; j < last; ++j) {
          const auto* from = items + listed[j];
          const auto* stop = items + listed[j + 1];
          if (begin > 0) from = std::lower_bound(from, stop, begin, before);
          if (end < p_.sizes.out_blocks) stop = std::lower_bound(from, stop, end, before);
          to[j - first] = static_cast<std::int32_t>(from - items);
          to[piece + j - first] = static_cast<std::int32_t>(stop - items);
        }
      };
      restrict(list.w.index, list.begin, cursors, std::less<>());
      ScatterTask task{list.w,
                       cursors - first,
                       cursors + piece - first,
                       static_cast<std::int32_t>(first),
                       static_cast<std::int32_t>(last),
                       parts_.x,
                       parts_.y,
                       begin,
                       panel.vectors,
                       parts_.unpacked,
                       p_.sizes.part};
      if (parts_.full_begin != nullptr) {
        restrict(parts_.full, parts_.full_begin, cursors + 2 * piece,
                 [](const FullPart& part, std::int32_t o) { return part.out < o; });
        task.full_begin = cursors + 2 * piece - first;
        task.full_end = cursors + 3 * piece - first;
        task.parts = parts_.full;
        task.total = parts_.total;
        task.complete = last == red_blocks ? end - begin : 0;
        task.row = p_.by_output.begin + begin;
      }
      k_.scatter(task);
    }
    store(panel, begin, end, parts_.y);
  }

 private:
  // Reduction blocks first … last of the panel's tokens; features past the edge become 0.
  void pack(const Panel& panel, std::int64_t first, std::int64_t last, std::int64_t red_block,
            float* x) const {
    const std::int64_t from = first * red_block;
    const std::int64_t features = std::min(last * red_block, p_.in.cols) - from;
    k_.pack({{at(p_.in, panel.first, from), p_.in.row_stride, panel.rows, static_cast<std::int32_t>(features),
              storage(p_.in.dtype)},
             x,
             static_cast<std::int32_t>(panel.lanes)});
    std::fill(x + features * panel.lanes, x + (last - first) * red_block * panel.lanes, 0.0F);
  }

  void weave(const Panel& panel, std::int32_t begin, std::int32_t end, const float* x) const {
    const Listing& list = p_.by_output;
    const std::int64_t from = begin * std::int64_t{list.w.out_block};
    k_.woven({list.w, list.begin, begin, end, x, parts_.start + from, panel.vectors, p_.sizes.part, parts_.y,
              call_.activation, reinterpret_cast<float*>(at(p_.out, panel.first, from)), p_.out.row_stride,
              panel.rows,
              static_cast<std::int32_t>(std::min(end * std::int64_t{list.w.out_block}, p_.out.cols) - from)});
  }

  // For the tile that ends before reduction block `last`: entries cursors[o] … cursors[count + o].
  static void advance(const Listing& list, std::int32_t begin, std::int32_t end, std::int32_t last,
                      bool start, std::int32_t* cursors) {
    const std::int32_t count = end - begin;
    for (std::int32_t i = 0; i < count; ++i) {
      cursors[i] = start ? list.begin[begin + i] : cursors[count + i];
      const std::int32_t* stop = list.w.index + list.begin[begin + i + 1];
      cursors[count + i] =
          static_cast<std::int32_t>(std::lower_bound(list.w.index + cursors[i], stop, last) - list.w.index);
    }
  }

  void store(const Panel& panel, std::int32_t begin, std::int32_t end, float* y) const {
    const std::int64_t from = begin * std::int64_t{p_.by_output.w.out_block};
    const std::int64_t features = std::min(end * std::int64_t{p_.by_output.w.out_block}, p_.out.cols) - from;
    k_.store({y, static_cast<std::int32_t>(panel.lanes), call_.activation, at(p_.out, panel.first, from),
              p_.out.row_stride, panel.rows, static_cast<std::int32_t>(features), storage(p_.out.dtype)});
  }

  const Call& call_;
  const Product& p_;
  const Kernels& k_;
  const Blocking& blocking_;
  const Parts& parts_;
};

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
        check("group", b.group, 1, std::max<std::int64_t>(out, 64))}) {
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
