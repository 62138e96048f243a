// Drives linear and grad_input, which are one product: out = W · in on feature-major panels of
// tokens, W read by its rows or through the transposed index. A task is a panel of tokens × a range
// of output blocks; ranges have equal shares of the stored blocks.
#include <algorithm>
#include <vector>

#include "cpu/blocking.h"
#include "cpu/cpuid.h"
#include "cpu/drivers.h"
#include "cpu/scratch.h"

namespace rarefy::cpu {

namespace {

// The entries of W listed by one of its dimensions: `begin` has one more element than blocks.
struct Listing {
  SparseOperand w;
  const std::int32_t* begin;
};

struct Product {
  MatrixView in;
  MutableMatrixView out;
  Listing by_output, by_reduction;
  std::int64_t out_blocks, red_blocks, entries;
  const void* bias = nullptr;
  Activation activation = Activation::none;
};

BlockingProblem problem_of(const Product& p, const Kernels& kernels, int threads) {
  const SparseOperand& w = p.by_output.w;
  return {p.in.rows, p.out_blocks,  p.red_blocks,        w.out_block,       w.red_block,   p.entries,
          threads,   kernels.width, kernels.max_vectors, kernels.registers, panel_floats()};
}

// Boundaries of `parts` ranges of output blocks with equal work: stored elements, and a price for
// writing each output feature that equals about 12 of them.
std::vector<std::int32_t> split_evenly(const Listing& list, std::int64_t blocks, std::int64_t parts) {
  std::vector<std::int32_t> bounds;
  for (std::int64_t part = 0; part <= parts; ++part) {
    bounds.push_back(begin_of_part(list.begin, blocks, list.w.red_block, 12, part, parts));
  }
  return bounds;
}

struct Panel {
  std::int64_t first;  // token
  std::int32_t rows;
  int vectors;
  std::int64_t lanes;
};

// Tokens first … first + count, cut into panels; only the last one may be narrower.
std::vector<Panel> cut_tokens(std::int64_t first, std::int64_t count, std::int64_t lanes,
                              std::int64_t width) {
  std::vector<Panel> panels;
  for (std::int64_t at = 0; at < count; at += lanes) {
    const std::int64_t rows = std::min(lanes, count - at);
    const std::int64_t vectors = (rows + width - 1) / width;
    panels.push_back(
        {first + at, static_cast<std::int32_t>(rows), static_cast<int>(vectors), vectors * width});
  }
  return panels;
}

class Task {
 public:
  Task(const Product& product, const Kernels& kernels, const Blocking& blocking, const float* start)
      : p_(product), k_(kernels), blocking_(blocking), start_(start), scratch_(task_scratch()) {
    const std::int64_t unpacked = std::max(kUnpacked, product.by_output.w.block_size);
    unpacked_ = storage(p_.in.dtype) == Storage::f32 ? nullptr : scratch_.unpacked.get<float>(unpacked);
  }

  // Output blocks begin … end, by rows of W, for a set of panels. X is packed a tile of reduction
  // blocks at a time, so that the set's tile stays in L2; a group of output blocks meets all panels
  // while its weights are near. With several tiles the sums of all output blocks wait in `y`.
  void gather(const std::vector<Panel>& panels, std::int32_t begin, std::int32_t end) {
    const Listing& list = p_.by_output;
    const std::int64_t tile = std::min(blocking_.tile_blocks, p_.red_blocks);
    const bool single = tile == p_.red_blocks;
    const std::int64_t lanes = panels.front().lanes;
    const std::int64_t sets = std::ssize(panels);
    // 64 features leave as runs of four cache lines (see store_run); their sums still fit in L1.
    const auto group = static_cast<std::int32_t>(std::max<std::int64_t>(1, 64 / list.w.out_block));
    const std::int64_t x_size = tile * list.w.red_block * lanes;
    const std::int64_t y_size = (end - begin) * list.w.out_block * lanes;
    const std::int64_t y_group = std::min(group, end - begin) * list.w.out_block * lanes;
    auto* x = scratch_.x.get<float>(sets * x_size);
    auto* y = scratch_.y.get<float>(single ? y_group : sets * y_size);
    std::int32_t* cursors =
        single ? nullptr : scratch_.cursors.get<std::int32_t>(2 * std::int64_t{end - begin});
    // At least once: without reduction blocks the outputs are still bias and activation.
    for (std::int64_t first = 0; first == 0 || first < p_.red_blocks;
         first += std::max<std::int64_t>(1, tile)) {
      const std::int64_t last = std::min(first + tile, p_.red_blocks);
      for (std::int64_t s = 0; s < sets; ++s) {
        pack(panels[static_cast<std::size_t>(s)], first, last, list.w.red_block, x + s * x_size);
      }
      const std::int32_t* entry_begin = list.begin;
      const std::int32_t* entry_end = list.begin + 1;
      if (!single) {
        advance(list, begin, end, static_cast<std::int32_t>(last), first == 0, cursors);
        entry_begin = cursors - begin;
        entry_end = cursors + (end - begin) - begin;
      }
      for (std::int32_t o = begin; o < end; o += group) {
        const std::int32_t stop = std::min(o + group, end);
        for (std::int64_t s = 0; s < sets; ++s) {
          const Panel& panel = panels[static_cast<std::size_t>(s)];
          float* to = single ? y : y + s * y_size + (o - begin) * list.w.out_block * panel.lanes;
          k_.gather({list.w, entry_begin, entry_end, o, stop, x + s * x_size,
                     static_cast<std::int32_t>(first), to,
                     first == 0 ? start_ + o * list.w.out_block : nullptr, panel.vectors, unpacked_});
          if (last == p_.red_blocks) store(panel, o, stop, to);
        }
      }
    }
  }

  // The same output blocks, by columns of W: X passes by once, a small piece at a time, and the
  // sums of the range stay in L2.
  void scatter(const Panel& panel, std::int32_t begin, std::int32_t end) {
    const Listing& list = p_.by_reduction;
    const std::int64_t out_lanes = list.w.out_block * panel.lanes;
    const std::int64_t piece = std::max<std::int64_t>(1, 64 / list.w.red_block);
    auto* x = scratch_.x.get<float>(piece * list.w.red_block * panel.lanes);
    auto* y = scratch_.y.get<float>((end - begin) * out_lanes);
    auto* cursors = scratch_.cursors.get<std::int32_t>(2 * piece);
    for (std::int64_t o = 0; o < (end - begin) * list.w.out_block; ++o) {
      std::fill_n(y + o * panel.lanes, panel.lanes, start_[begin * list.w.out_block + o]);
    }
    for (std::int64_t first = 0; first < p_.red_blocks; first += piece) {
      const std::int64_t last = std::min(first + piece, p_.red_blocks);
      pack(panel, first, last, list.w.red_block, x);
      for (std::int64_t j = first; j < last; ++j) {
        const std::int32_t* rows = list.w.index;
        const std::int32_t* from = rows + list.begin[j];
        const std::int32_t* to = rows + list.begin[j + 1];
        if (begin > 0) from = std::lower_bound(from, to, begin);
        if (end < p_.out_blocks) to = std::lower_bound(from, to, end);
        cursors[j - first] = static_cast<std::int32_t>(from - rows);
        cursors[piece + j - first] = static_cast<std::int32_t>(to - rows);
      }
      k_.scatter({list.w, cursors - first, cursors + piece - first, static_cast<std::int32_t>(first),
                  static_cast<std::int32_t>(last), x, y, begin, panel.vectors, unpacked_});
    }
    store(panel, begin, end, y);
  }

 private:
  // Reduction blocks first … last of the panel's tokens; features past the edge become 0.
  void pack(const Panel& panel, std::int64_t first, std::int64_t last, std::int64_t red_block,
            float* x) const {
    const std::int64_t from = first * red_block;
    const std::int64_t features = std::min(last * red_block, p_.in.cols) - from;
    const char* data =
        static_cast<const char*>(p_.in.data) +
        (panel.first * p_.in.row_stride + from) * static_cast<std::int64_t>(size_of(p_.in.dtype));
    k_.pack({{data, p_.in.row_stride, panel.rows, static_cast<std::int32_t>(features), storage(p_.in.dtype)},
             x,
             static_cast<std::int32_t>(panel.lanes)});
    std::fill(x + features * panel.lanes, x + (last - first) * red_block * panel.lanes, 0.0F);
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
    const std::int64_t from = static_cast<std::int64_t>(begin) * p_.by_output.w.out_block;
    const std::int64_t features =
        std::min(static_cast<std::int64_t>(end) * p_.by_output.w.out_block, p_.out.cols) - from;
    char* data = static_cast<char*>(p_.out.data) +
                 (panel.first * p_.out.row_stride + from) * static_cast<std::int64_t>(size_of(p_.out.dtype));
    k_.store({y, static_cast<std::int32_t>(panel.lanes), static_cast<PanelActivation>(p_.activation), data,
              p_.out.row_stride, panel.rows, static_cast<std::int32_t>(features), storage(p_.out.dtype)});
  }

  const Product& p_;
  const Kernels& k_;
  const Blocking& blocking_;
  const float* start_;
  TaskScratch& scratch_;
  float* unpacked_;
};

Status run(const Product& product, const Kernels& kernels, const Context& context) {
  const Blocking blocking = choose_blocking(problem_of(product, kernels, context.executor.threads));
  // What the sums of whole output blocks start from: the bias as float, or 0. A bias of −0 becomes +0, as if
  // it were added last.
  std::vector<float> start(static_cast<std::size_t>(product.out_blocks * product.by_output.w.out_block));
  if (product.bias != nullptr) {
    kernels.unpack(storage(product.out.dtype), product.bias, product.out.cols, start.data());
    for (float& sum : start) sum += 0.0F;
  }
  const std::vector<std::int32_t> bounds =
      split_evenly(product.by_output, product.out_blocks, blocking.splits);
  const std::int64_t lanes = static_cast<std::int64_t>(blocking.vectors) * kernels.width;
  const std::int64_t tokens = lanes * blocking.panels;  // of one task
  const std::int64_t sets = (product.in.rows + tokens - 1) / tokens;
  run_tasks(context, sets * blocking.splits, [&](std::int64_t t) {
    const std::int64_t first = t / blocking.splits * tokens;
    const auto split = static_cast<std::size_t>(t % blocking.splits);
    if (bounds[split] == bounds[split + 1]) return;
    const std::vector<Panel> panels =
        cut_tokens(first, std::min(tokens, product.in.rows - first), lanes, kernels.width);
    Task task(product, kernels, blocking, start.data());
    if (blocking.scatter) {
      task.scatter(panels.front(), bounds[split], bounds[split + 1]);
    } else {
      task.gather(panels, bounds[split], bounds[split + 1]);
    }
  });
  return {};
}

}  // namespace

SparseOperand operand(const BsrView& w, const std::int32_t* index, const std::int32_t* perm,
                      bool transposed) {
  const BsrShape& s = w.plan.shape;
  const auto rows = static_cast<std::int32_t>(s.block_rows);
  const auto cols = static_cast<std::int32_t>(s.block_cols);
  if (transposed) return {index, perm, w.values, storage(w.dtype), s.block_size(), 1, cols, cols, rows};
  return {index, perm, w.values, storage(w.dtype), s.block_size(), cols, 1, rows, cols};
}

Status run_linear(const Kernels& kernels, const LinearArgs& args, const Context& context) {
  const PlanView& plan = args.w.plan;
  return run({args.x,
              args.y,
              {operand(args.w, plan.col, nullptr, false), plan.crow},
              {operand(args.w, plan.row, plan.perm, false), plan.ccol},
              plan.shape.row_count(),
              plan.shape.col_count(),
              plan.shape.nnzb,
              args.bias,
              args.activation},
             kernels, context);
}

Status run_grad_input(const Kernels& kernels, const GradInputArgs& args, const Context& context) {
  const PlanView& plan = args.w.plan;
  return run({args.dy,
              args.dx,
              {operand(args.w, plan.row, plan.perm, true), plan.ccol},
              {operand(args.w, plan.col, nullptr, true), plan.crow},
              plan.shape.col_count(),
              plan.shape.row_count(),
              plan.shape.nnzb},
             kernels, context);
}

}  // namespace rarefy::cpu
