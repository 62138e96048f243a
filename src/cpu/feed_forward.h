// The driver of feed_forward, over what multiplies panels. A task packs a panel of tokens, and computes a
// slice of their hidden features, activates it and adds its part of y, slice after slice: hidden features
// are never stored by rows, and are read from L2. With few panels for the threads each product is cut into
// tasks of its own, and hidden panels wait in shared memory between the two.
//
// A Multiply (FloatMultiply in feed_forward.cc) says what panels are made of and multiplies them:
//   Element, kInPlace                                     of panels; whether sums, which are float, are one
//   pack(x, first, rows, features, lanes, to)             tokens to a panel, features past the edge 0
//   product(layer, out range, red range, in, vectors, sums, first, unpacked)   see ChainedProduct
//   keep(sums, count, to)                                 sums to a panel, where not in place
#pragma once

#include <algorithm>
#include <numeric>

#include "cpu/drivers.h"

namespace rarefy::cpu {

// Features of the three matrices, padded to the blocks of every weight that has them.
struct FeedForwardSizes {
  std::int64_t in, hidden, out;
  std::int64_t group;      // hidden features made and activated at a time: whole blocks, about 64
  std::int64_t granule;    // hidden features of which slices are multiples
  std::int64_t out_group;  // features of y stored at a time
  std::int64_t unpacked;   // floats of a chunk of values, where a weight is stored in 16 bits
  std::int64_t tallest;    // rows of a block
  bool gated;

  explicit FeedForwardSizes(const Problem& p) : gated(p.gate != WeightSpec{}) {
    const BsrShape& up = p.weight.shape;
    const BsrShape& down = p.down.shape;
    const BsrShape& gate = gated ? p.gate.shape : up;
    in = std::max(up.col_count() * up.block_cols, gate.col_count() * gate.block_cols);
    hidden = std::max({up.row_count() * up.block_rows, gate.row_count() * gate.block_rows,
                       down.col_count() * down.block_cols});
    out = down.row_count() * down.block_rows;
    // Blocks have rows (check_shape); the analyzer cannot know.
    const std::int64_t rows = std::max<std::int64_t>(1, std::lcm(up.block_rows, gate.block_rows));
    group = rows * std::max<std::int64_t>(1, kStored / rows);
    granule = std::lcm(rows, down.block_cols);
    out_group = down.block_rows * std::max<std::int64_t>(1, kStored / down.block_rows);
    tallest = std::max({up.block_rows, gate.block_rows, down.block_rows});
    const bool halves =
        p.weight.dtype != DType::f32 || p.down.dtype != DType::f32 || (gated && p.gate.dtype != DType::f32);
    unpacked = halves ? std::max({kUnpacked, up.block_size(), gate.block_size(), down.block_size()}) : 0;
  }
  std::int64_t slices(const FeedForwardCut& cut) const {
    return std::max<std::int64_t>(1, (hidden + cut.features - 1) / cut.features);
  }

  static constexpr std::int64_t kStored = 64;  // as in linear: runs of four cache lines, sums within L1
};

// A product of the chain: a layer's operand with the entries of each output block, all of them or those of a
// range of reduction blocks. Sums begin at `start` (padded to whole blocks), or go on if it is null.
struct ChainedProduct {
  SparseOperand w;
  const std::int32_t* entry_begin;
  const std::int32_t* entry_end;
  std::int32_t out_begin, out_end;
  std::int32_t red_begin;   // where the panel of inputs begins
  const float* start;       // of feature 0
  const std::int32_t* row;  // parts of sums, as in GatherTask
  float* total = nullptr;
  std::int64_t total_step = 0;
};

// The working memory: what tasks share, and what each worker has.
template <class Multiply>
struct FeedForwardMemory {
  using Element = typename Multiply::Element;
  float *up_start, *gate_start, *down_start;  // bias as float, or 0, padded to whole blocks
  std::int32_t* cuts;                         // where slices cut the entries of each block row of `down`
  Element* between;                           // hidden panels
  std::int64_t shared = 0, worker = 0;        // bytes

  struct Own {
    Element *x, *hidden;
    float *sums, *gate, *y, *total, *down_total, *unpacked;
  };

  FeedForwardMemory(const Kernels& kernels, const Problem& p, const FeedForwardSizes& s,
                    const FeedForwardCut& cut, void* base)
      : base_(static_cast<char*>(base)), sizes_(s), cut_(cut), lanes_(cut.vectors * kernels.width) {
    Room all(base);
    up_start = all.take<float>(s.hidden);
    gate_start = all.take<float>(s.gated ? s.hidden : 0);
    down_start = all.take<float>(s.out);
    const bool apart = cut.splits > 1;
    cuts = all.take<std::int32_t>(apart ? 0 : (s.slices(cut) + 1) * p.down.shape.row_count());
    between = all.take<Element>(apart ? (p.tokens + lanes_ - 1) / lanes_ * s.hidden * lanes_ : 0);
    shared = all.bytes();
    Room own;
    take(own);
    worker = own.bytes();
  }
  Own own(int index) const {
    Room room(base_ + shared + index * worker);
    return take(room);
  }

 private:
  Own take(Room& room) const {
    const bool apart = cut_.splits > 1;
    const bool whole = apart || sizes_.slices(cut_) == 1;  // y leaves as soon as it is summed up
    Own own{};
    own.x = room.take<Element>(sizes_.in * lanes_);
    own.hidden = room.take<Element>(apart ? 0 : std::min(cut_.features, sizes_.hidden) * lanes_);
    own.sums = room.take<float>(Multiply::kInPlace ? 0 : sizes_.group * lanes_);
    own.gate = room.take<float>(sizes_.gated ? sizes_.group * lanes_ : 0);
    own.y = room.take<float>((whole ? sizes_.out_group : sizes_.out) * lanes_);
    if constexpr (Multiply::kInPlace) {  // by gather, which keeps long sums in parts
      own.total = room.take<float>(sizes_.tallest * lanes_);
      own.down_total = whole ? own.total : room.take<float>(sizes_.out * lanes_);
    }
    own.unpacked = room.take<float>(sizes_.unpacked);
    return own;
  }
  char* base_;
  FeedForwardSizes sizes_;
  FeedForwardCut cut_;
  std::int64_t lanes_;
};

template <class Multiply>
class FeedForwardDriver {
  using Memory = FeedForwardMemory<Multiply>;
  using Own = typename Memory::Own;
  using Element = typename Multiply::Element;

 public:
  FeedForwardDriver(const Kernels& kernels, const Call& call, const FeedForwardCut& cut)
      : k_(kernels),
        multiply_(kernels, call.problem),
        call_(call),
        layers_(*call.layers),
        cut_(cut),
        sizes_(call.problem),
        memory_(kernels, call.problem, sizes_, cut, call.workspace) {}

  void run() {
    prepare_start(layers_.up, memory_.up_start, sizes_.hidden);
    if (layers_.gate) prepare_start(*layers_.gate, memory_.gate_start, sizes_.hidden);
    prepare_start(layers_.down, memory_.down_start, sizes_.out);
    const std::int64_t lanes = cut_.vectors * k_.width;
    const std::int64_t panels = (call_.x.rows + lanes - 1) / lanes;
    if (cut_.splits > 1) return run_apart(panels, lanes);
    cut_entries();
    call_.executor.parallel_for(panels, [&](std::int64_t task, int worker) {
      const Own own = memory_.own(worker);
      const Panel panel = panel_of(task * lanes, lanes);
      pack(panel, own);
      const std::int64_t slices = sizes_.slices(cut_);
      for (std::int64_t slice = 0; slice < slices; ++slice) {
        const std::int64_t from = slice * cut_.features;
        hidden(panel, own, from, std::min(from + cut_.features, sizes_.hidden), own.hidden);
        add_slice(panel, own, slice, slice + 1 == slices);
      }
    });
  }

 private:
  // Tokens first … first + rows.
  struct Panel {
    std::int64_t first;
    std::int32_t rows;
    std::int32_t vectors;
    std::int64_t lanes;
  };

  Panel panel_of(std::int64_t first, std::int64_t lanes) const {
    const std::int64_t rows = std::min(lanes, call_.x.rows - first);
    const std::int64_t vectors = (rows + k_.width - 1) / k_.width;
    return {first, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(vectors), vectors * k_.width};
  }

  void prepare_start(const LayerView& layer, float* start, std::int64_t padded) const {
    std::int64_t features = 0;
    if (layer.bias != nullptr) {
      features = layer.weight.plan.shape.rows;
      unpack_bias(k_, call_.out.dtype, layer.bias, features, start);
    }
    std::fill(start + features, start + padded, 0.0F);
  }

  // Where each slice begins among the entries of each block row of `down`: the same for all panels.
  void cut_entries() const {
    const PlanView& plan = layers_.down.weight.plan;
    const std::int64_t count = plan.shape.row_count();
    std::copy_n(plan.crow, count, memory_.cuts);
    for (std::int64_t slice = 1; slice <= sizes_.slices(cut_); ++slice) {
      const std::int64_t block = slice * cut_.features / plan.shape.block_cols;
      const std::int32_t* before = memory_.cuts + (slice - 1) * count;
      std::int32_t* cuts = memory_.cuts + slice * count;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t* end = plan.col + plan.crow[i + 1];
        cuts[i] = static_cast<std::int32_t>(std::lower_bound(plan.col + before[i], end, block) - plan.col);
      }
    }
  }

  void pack(const Panel& panel, const Own& own) const {
    multiply_.pack(call_.x, panel.first, panel.rows, sizes_.in, panel.lanes, own.x);
  }

  ChainedProduct product(const LayerView& layer, DType dtype, const float* start) const {
    const PlanView& plan = layer.weight.plan;
    return {operand(plan.shape, layer.weight.values, dtype, plan.col, nullptr, false),
            plan.crow,
            plan.crow + 1,
            0,
            static_cast<std::int32_t>(plan.shape.row_count()),
            0,
            start,
            plan.crow};
  }

  // Hidden features from … to of a panel, activated: groups of block rows, whose sums are in L1.
  void hidden(const Panel& panel, const Own& own, std::int64_t from, std::int64_t to, Element* out) const {
    const std::int64_t lanes = panel.lanes;
    for (std::int64_t first = from; first < to; first += sizes_.group) {
      const std::int64_t last = std::min(first + sizes_.group, to);
      Element* kept = out + (first - from) * lanes;
      float* sums = own.sums;
      if constexpr (Multiply::kInPlace) sums = kept;
      layer_rows(panel, own, layers_.up, memory_.up_start, first, last, sums);
      save(panel, call_.save.up, first, last, sums);
      if (layers_.gate) {
        layer_rows(panel, own, *layers_.gate, memory_.gate_start, first, last, own.gate);
        save(panel, call_.save.gate, first, last, own.gate);
        k_.apply_gate(layers_.activation, own.gate, sums, (last - first) * lanes);
      } else {
        k_.activate(layers_.activation, sums, (last - first) * lanes);
      }
      // `down` multiplies features past the edge by its padding: they must be no NaN.
      const std::int64_t edge = std::max(first, layers_.up.weight.plan.shape.rows);
      if (edge < last) std::fill(sums + (edge - first) * lanes, sums + (last - first) * lanes, 0.0F);
      if constexpr (!Multiply::kInPlace) multiply_.keep(sums, (last - first) * lanes, kept);
    }
  }

  // Features first … last of W x + b; those past the last block row are left as they are.
  void layer_rows(const Panel& panel, const Own& own, const LayerView& layer, const float* start,
                  std::int64_t first, std::int64_t last, float* sums) const {
    const WeightSpec& spec = &layer == &layers_.up ? call_.problem.weight : call_.problem.gate;
    const BsrShape& shape = spec.shape;
    ChainedProduct p = product(layer, spec.dtype, start);
    p.total = own.total;
    p.out_begin = static_cast<std::int32_t>(first / shape.block_rows);
    p.out_end = static_cast<std::int32_t>(
        std::min((last + shape.block_rows - 1) / shape.block_rows, shape.row_count()));
    if (p.out_begin < p.out_end) multiply_.product(p, own.x, panel.vectors, sums, own.unpacked);
  }

  void save(const Panel& panel, const MutableMatrixView& to, std::int64_t first, std::int64_t last,
            float* sums) const {
    if (to.data == nullptr || first >= to.cols) return;
    store(panel, to, first, std::min(last, to.cols), sums, panel.lanes);
  }

  void store(const Panel& panel, const MutableMatrixView& to, std::int64_t first, std::int64_t last,
             float* sums, std::int64_t lanes) const {
    if (first >= last) return;
    k_.store({sums, static_cast<std::int32_t>(lanes), Activation::none, at(to, panel.first, first),
              to.row_stride, panel.rows, static_cast<std::int32_t>(last - first), storage(to.dtype)});
  }

  // Block rows begin … end of y, a group at a time, from all entries of p. own.y: of block row `begin`, where
  // earlier slices left their sums, or room for a group.
  void out_rows(const Panel& panel, ChainedProduct p, std::int32_t begin, std::int32_t end, const Element* in,
                const Own& own, bool waiting, bool store_them) const {
    const std::int64_t rows = p.w.out_block;
    const auto group = static_cast<std::int32_t>(sizes_.out_group / rows);
    for (std::int32_t o = begin; o < end; o += group) {
      p.out_begin = o;
      p.out_end = std::min(o + group, end);
      const std::int64_t at = waiting ? (o - begin) * rows * panel.lanes : 0;
      float* sums = own.y + at;
      if constexpr (Multiply::kInPlace) p.total = own.down_total + at;
      p.total_step = waiting ? rows * panel.lanes : 0;
      multiply_.product(p, in, panel.vectors, sums, own.unpacked);
      if (store_them) {
        store(panel, call_.out, o * rows, std::min(p.out_end * rows, call_.out.cols), sums, panel.lanes);
      }
    }
  }

  // The part of y that the hidden features of one slice give.
  void add_slice(const Panel& panel, const Own& own, std::int64_t slice, bool last) const {
    const BsrShape& shape = call_.problem.down.shape;
    ChainedProduct p =
        product(layers_.down, call_.problem.down.dtype, slice == 0 ? memory_.down_start : nullptr);
    p.entry_begin = memory_.cuts + slice * shape.row_count();
    p.entry_end = p.entry_begin + shape.row_count();
    p.red_begin = static_cast<std::int32_t>(slice * cut_.features / shape.block_cols);
    out_rows(panel, p, 0, p.out_end, own.hidden, own, sizes_.slices(cut_) > 1, last);
  }

  // Each product in tasks of its own: parts of the hidden features, then ranges of y with equal work.
  void run_apart(std::int64_t panels, std::int64_t lanes) const {
    const std::int64_t splits = cut_.splits;
    call_.executor.parallel_for(panels * splits, [&](std::int64_t task, int worker) {
      const std::int64_t from = task % splits * cut_.features;
      if (from >= sizes_.hidden) return;
      const Own own = memory_.own(worker);
      const Panel panel = panel_of(task / splits * lanes, lanes);
      pack(panel, own);
      hidden(panel, own, from, std::min(from + cut_.features, sizes_.hidden),
             between(task / splits, lanes) + from * panel.lanes);
    });
    const PlanView& plan = layers_.down.weight.plan;
    call_.executor.parallel_for(panels * splits, [&](std::int64_t task, int worker) {
      const auto bound = [&](std::int64_t part) {
        return begin_of_part(plan.crow, plan.shape.row_count(), plan.shape.block_cols, 12, part, splits);
      };
      const Own own = memory_.own(worker);
      out_rows(panel_of(task / splits * lanes, lanes),
               product(layers_.down, call_.problem.down.dtype, memory_.down_start), bound(task % splits),
               bound(task % splits + 1), between(task / splits, lanes), own, false, true);
    });
  }

  Element* between(std::int64_t panel, std::int64_t lanes) const {
    return memory_.between + panel * sizes_.hidden * lanes;
  }

  const Kernels& k_;
  Multiply multiply_;
  const Call& call_;
  const FeedForward& layers_;
  FeedForwardCut cut_;
  FeedForwardSizes sizes_;
  Memory memory_;
};

}  // namespace rarefy::cpu
