// A task of linear.cc's product: a set of panels of tokens × a range of output blocks, and where it works.
#pragma once

#include <algorithm>
#include <array>
#include <functional>

#include "core/checked.h"
#include "cpu/blocking.h"
#include "cpu/drivers.h"

namespace rarefy::cpu::product {

// A call as one product: sizes first, for which the problem is enough.
struct Sizes : ProductShape {
  bool halves;        // W is stored in 16 bits
  std::int32_t part;  // entries of a part of a sum

  explicit Sizes(const Problem& p)
      : ProductShape(p),
        halves(p.weight.dtype != DType::f32),
        part(part_entries(static_cast<std::int32_t>(red_block), part_terms(p))) {}

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

// Whether sums can go to rows of Y on their way. (What lies by feature is not transposed: it has none.)
inline bool weaves(const Kernels& kernels, const Problem& p) {
  return kernels.woven != nullptr && Sizes(p).out_block % 4 == 0 && p.weight.dtype == DType::f32 &&
         p.out == DType::f32 && p.out_layout == rarefy::Layout::by_token;
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
      parts.y = room.take<float>(std::max(waiting, 2 * kWovenGroup * lanes));
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
      task.next = lines(panel, last, std::min(last + piece, red_blocks), list.w.red_block);
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
    k_.pack({{at(p_.in, panel.first, from), p_.in.stride(), panel.rows, static_cast<std::int32_t>(features),
              storage(p_.in.dtype), p_.in.layout() == rarefy::Layout::by_feature},
             x,
             static_cast<std::int32_t>(panel.lanes)});
    std::fill(x + features * panel.lanes, x + (last - first) * red_block * panel.lanes, 0.0F);
  }

  // What packing them will read.
  cpu::Lines lines(const Panel& panel, std::int64_t first, std::int64_t last, std::int64_t red_block) const {
    const std::int64_t from = first * red_block;
    const std::int64_t features = std::min(last * red_block, p_.in.cols) - from;
    if (features <= 0 || p_.in.layout() == rarefy::Layout::by_feature) return {};
    const auto size = static_cast<std::int64_t>(size_of(p_.in.dtype));
    return {at(p_.in, panel.first, from), p_.in.row_stride * size, panel.rows,
            static_cast<std::int32_t>(ceil_div(features * size, 64))};
  }

  void weave(const Panel& panel, std::int32_t begin, std::int32_t end, const float* x) const {
    const Listing& list = p_.by_output;
    const std::int64_t from = begin * std::int64_t{list.w.out_block};
    const WovenTask task{
        list.w,
        list.begin,
        begin,
        end,
        x,
        parts_.start + from,
        panel.vectors,
        p_.sizes.part,
        parts_.y,
        call_.activation,
        reinterpret_cast<float*>(at(p_.out, panel.first, from)),
        p_.out.row_stride,
        panel.rows,
        static_cast<std::int32_t>(std::min(end * std::int64_t{list.w.out_block}, p_.out.cols) - from),
        4.0 * static_cast<double>(p_.sizes.entries * list.w.block_size) > kStreamed};
    const bool narrow = k_.narrow != nullptr && k_.narrow_takes(task);
    (narrow ? k_.narrow : k_.woven)(task);
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
              p_.out.stride(), panel.rows, static_cast<std::int32_t>(features), storage(p_.out.dtype),
              p_.out.layout() == rarefy::Layout::by_feature});
  }

  const Call& call_;
  const Product& p_;
  const Kernels& k_;
  const Blocking& blocking_;
  const Parts& parts_;
};

}  // namespace rarefy::cpu::product
