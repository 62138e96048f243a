// feed_forward in bf16 pairs (pairs.h), on weights packed as for linear. A task takes a set of panels of
// tokens through its products; hidden features are rounded into panels of L2, in the order that the last
// product reads, and are never seen by rows. A gate's are there first, and multiplied by those of `up`. With
// few panels for the threads, or of the last of them, each product is cut into tasks of its own, and hidden
// panels wait in shared memory between the two.
#include <limits>

#include "core/message.h"
#include "cpu/linear_pairs.h"
#include "cpu/pairs_weight.h"

namespace rarefy::cpu {

namespace {

struct Shapes {
  PairsShape up, gate, down;  // gate: up without one; else it differs in what is stored alone
  std::int64_t hidden;        // elements of a panel: all block rows of `up`, and the zeros that `down` reads

  Shapes(const PairKernels& kernels, const Problem& p)
      : up(kernels, p.weight.shape),
        gate(kernels, p.gate == WeightSpec{} ? p.weight.shape : p.gate.shape),
        down(kernels, p.down.shape),
        hidden(std::max(ceil_div(up.out_features(), kGroup) * kGroup, down.padded) * kPanelTokens) {}
};

std::int64_t panels_of(std::int64_t tokens) {
  return std::max<std::int64_t>(1, ceil_div(tokens, kPanelTokens));
}

// The working memory: what tasks share, and what each worker has.
struct Memory {
  float *up_bias, *gate_bias, *down_bias;
  std::int64_t apart, first_apart;  // panels for which the products are apart: the last ones, or all
  std::uint16_t* between;           // their hidden panels
  std::int64_t shared, worker;

  struct Own {
    std::uint16_t *x, *hidden, *gathered;
    std::uint32_t* unfinished;
    float* sums;
  };

  Memory(const Problem& p, const Shapes& s, const FeedForwardSets& sets, void* base)
      : base_(static_cast<char*>(base)), shapes_(s), sets_(sets) {
    Room all(base);
    up_bias = all.take<float>(s.up.out_features() + kGroup);
    gate_bias = all.take<float>(p.gate == WeightSpec{} ? 0 : s.up.out_features() + kGroup);
    down_bias = all.take<float>(s.down.out_features() + kGroup);
    const std::int64_t panels = panels_of(p.tokens);
    apart = sets.apart() ? panels : std::clamp<std::int64_t>(sets.rest, 0, panels);
    first_apart = panels - apart;
    between = all.take<std::uint16_t>(apart * s.hidden);
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
    Own own{};
    own.x = room.take<std::uint16_t>(sets_.panels * shapes_.up.panel_size());
    own.hidden = room.take<std::uint16_t>(sets_.apart() ? 0 : sets_.panels * shapes_.hidden);
    own.gathered = room.take<std::uint16_t>(kGatheredGroups * kGroupSize);
    const std::int64_t most = std::max(sets_.panels, sets_.panels_after());
    own.unfinished = room.take<std::uint32_t>(most);
    const auto sums = [&](const PairsShape& s) { return std::min(most, s.near()) * s.sums_size(); };
    own.sums = room.take<float>(std::max(sums(shapes_.up), sums(shapes_.down)));
    return own;
  }
  char* base_;
  const Shapes& shapes_;
  const FeedForwardSets& sets_;
};

class Network {
 public:
  Network(const PairKernels& kernels, const Call& call, const FeedForwardSets& sets)
      : k_(kernels),
        call_(call),
        sets_(sets),
        shapes_(kernels, call.problem),
        memory_(call.problem, shapes_, sets_, call.workspace),
        up_(weight(shapes_.up, call.layers->up.weight)),
        gate_(call.layers->gate ? weight(shapes_.gate, call.layers->gate->weight) : up_),
        down_(weight(shapes_.down, call.layers->down.weight)) {}

  void run() const {
    const DType out = call_.out.dtype;
    unpack_pairs_bias(call_.layers->up.bias, out, features(), shapes_.up.out_features() + kGroup,
                      memory_.up_bias);
    if (gated()) {
      unpack_pairs_bias(call_.layers->gate->bias, out, features(), shapes_.up.out_features() + kGroup,
                        memory_.gate_bias);
    }
    unpack_pairs_bias(call_.layers->down.bias, out, call_.out.cols, shapes_.down.out_features() + kGroup,
                      memory_.down_bias);
    const PairsBlocking cut{sets_.panels, sets_.splits, sets_.apart() ? 0 : sets_.rest};
    const PanelTasks tasks(call_.x.rows, cut, call_.problem.threads);
    each(tasks.count(), [&](std::int64_t t, const Memory::Own& own) {
      const PanelTasks::Task task = tasks.task(t, false);
      if (task.shared || sets_.apart()) {
        return hidden(task, own, bound(up_, task), bound(up_, after(task)), between(task));
      }
      hidden(task, own, 0, shapes_.up.out_blocks, own.hidden);
      down(task, own, 0, shapes_.down.out_blocks, own.hidden);
    });
    if (memory_.apart == 0) return;
    const PanelTasks later(call_.x.rows, {sets_.panels_after(), sets_.splits, 0}, call_.problem.threads);
    each(sets_.apart() ? later.count() : tasks.parts(), [&](std::int64_t t, const Memory::Own& own) {
      const PanelTasks::Task task = sets_.apart() ? later.task(t, false) : tasks.rest(t);
      down(task, own, bound(down_, task), bound(down_, after(task)), between(task));
    });
  }

 private:
  using Set = PanelTasks::Task;

  PairsWeight weight(const PairsShape& shape, const BsrView& w) const {
    const SparseOperand stored = operand(w.plan.shape, w.values, DType::bf16, w.plan.col, nullptr, false);
    return {k_, shape, {stored, w.plan.crow}, w.derived};
  }

  template <class F>
  void each(std::int64_t tasks, F&& run) const {
    call_.executor.parallel_for(tasks, [&](std::int64_t t, int worker) {
      k_.enter();
      run(t, memory_.own(worker));
      k_.leave();
    });
  }

  static std::int64_t bound(const PairsWeight& w, const Set& set) { return w.begin_of(set.part, set.parts); }
  static Set after(Set set) {
    ++set.part;
    return set;
  }
  bool gated() const { return call_.layers->gate.has_value(); }
  bool floats() const { return call_.out.dtype == DType::f32; }
  std::int64_t features() const { return call_.problem.weight.shape.rows; }
  std::uint16_t* between(const Set& set) const {
    return memory_.between + (set.first / kPanelTokens - memory_.first_apart) * shapes_.hidden;
  }

  // Block rows begin … end of hidden features for a set, into its hidden panels.
  void hidden(const Set& set, const Memory::Own& own, std::int64_t begin, std::int64_t end,
              std::uint16_t* to) const {
    if (begin == end) return;
    const PairsShape& s = shapes_.up;
    pack_panels(k_, s, call_.x, set.first, set.tokens, own.x, s.panel_size());
    find_unfinished(k_, s, own.x, s.panel_size(), set.tokens, own.unfinished);
    const Activation activation = call_.layers->activation;
    if (gated())
      hidden_of(gate_, memory_.gate_bias, activation, call_.save.gate, false, set, own, begin, end, to);
    hidden_of(up_, memory_.up_bias, gated() ? Activation::none : activation, call_.save.up, gated(), set, own,
              begin, end, to);
    if (end < s.out_blocks) return;
    for (std::int64_t m = 0; m < set.tokens; m += kPanelTokens) {
      std::uint16_t* panel = to + m / kPanelTokens * shapes_.hidden;
      std::uint16_t* rest = panel + s.out_features() * kPanelTokens;
      if (shapes_.down.by_token() && s.out_features() % kGroup != 0) {  // half of a group
        rest -= kTileSize;
        for (std::int64_t t = 0; t < kPanelTokens; ++t)
          std::fill_n(rest + t * kGroup + kTileRows, kTileRows, 0);
        rest += kGroupSize;
      }
      std::fill(rest, panel + shapes_.hidden, std::uint16_t{0});
    }
  }

  // What one weight makes of packed x, activated; times: what is there is multiplied by it.
  void hidden_of(const PairsWeight& weight, const float* bias, Activation activation,
                 const MutableMatrixView& save, bool times, const Set& set, const Memory::Own& own,
                 std::int64_t begin, std::int64_t end, std::uint16_t* to) const {
    const PairsShape& s = shapes_.up;
    const bool by_token = s.by_token();
    weight.multiply(
        own.x, s.panel_size(), set.tokens, own.unfinished, begin, end, own.gathered, own.sums,
        [&](std::int64_t m, std::int32_t rows, std::int64_t from, std::int64_t count, float* sums) {
          const std::int64_t there = std::clamp<std::int64_t>(features() - from, 0, count);
          if (save.data != nullptr && there > 0) {
            k_.store({sums, by_token, bias + from, Activation::none, at(save, set.first + m, from), floats(),
                      save.row_stride, rows, static_cast<std::int32_t>(there)});
          }
          // `down` multiplies features past the edge by its padding: they must be no NaN.
          for (std::int64_t o = there; o < count; ++o) {
            float* sum = by_token ? sums + o / kGroup * kGroupSize + o % kGroup : sums + o * kPanelTokens;
            for (std::int64_t t = 0; t < kPanelTokens; ++t) sum[by_token ? t * kGroup : t] = 0;
          }
          k_.keep({sums, by_token, bias + from, activation, static_cast<std::int32_t>(count),
                   order_of(shapes_.down.source), from, to + m / kPanelTokens * shapes_.hidden, times});
        });
  }

  // Block rows begin … end of y for a set.
  void down(const Set& set, const Memory::Own& own, std::int64_t begin, std::int64_t end,
            const std::uint16_t* in) const {
    find_unfinished(k_, shapes_.down, in, shapes_.hidden, set.tokens, own.unfinished);
    down_.multiply(in, shapes_.hidden, set.tokens, own.unfinished, begin, end, own.gathered, own.sums,
                   down_.storing(call_.out, set.first, memory_.down_bias, Activation::none));
  }

  const PairKernels& k_;
  const Call& call_;
  FeedForwardSets sets_;
  Shapes shapes_;
  Memory memory_;
  PairsWeight up_, gate_, down_;  // gate_: up_ where there is none
};

// Cycles, as in linear_pairs.cc: packing and storing an element, activating one into a panel, a byte of W out
// of L3; a hidden feature that goes through L3, which gives a core of the Xeon 10 bytes a cycle; a round of
// tasks that all wait for.
constexpr double kPack = 0.3, kStore = 0.35, kKeep = 1.3, kWeightByte = 0.1, kShared = 0.4, kBarrier = 10'000;
constexpr std::int64_t kMostSet = 16, kMostShared = 8 << 20;  // panels; bytes of hidden features

// Calls visit(sets, cost in cycles) for all that are weighed.
template <class F>
void for_each_sets(const PairKernels& kernels, const Problem& p, const Machine& machine, F&& visit) {
  const Shapes s(kernels, p);
  const auto product = [&](const PairsShape& w, double panels) {
    return w.tiles() * (panels * kernels.tile_cycles + 2 * kTileSize * kWeightByte);
  };
  const bool gated = p.gate != WeightSpec{};
  const auto packing = [&](double of) { return of * static_cast<double>(s.up.panel_size()) * kPack; };
  const auto up = [&](double of) {
    const double keep = of * static_cast<double>(s.hidden) * kKeep;
    return product(s.up, of) + keep + (gated ? product(s.gate, of) + keep : 0);
  };
  const auto down = [&](double of) {
    return product(s.down, of) + of * static_cast<double>(s.down.out_features() * kPanelTokens) * kStore;
  };
  const auto shared = [&](double of) { return of * static_cast<double>(s.hidden) * kShared; };

  const std::int64_t all = panels_of(p.tokens);
  // Panels that L2 holds. Four in any case: W streams by once for all of them, and what does not fit comes
  // back out of L3 (2048→5632→2048, 32×1 at .5, ms with 1, 2, 4, 8: a Zen 5 30.5, 28.2, 27.7; AMX 21.9, 18.7,
  // 16.6, 19.4).
  const auto most = [&](std::int64_t elements) {
    const std::int64_t fit = panel_floats(machine) * 2 / std::max<std::int64_t>(1, elements);
    return std::min({std::max<std::int64_t>(fit, 4), all, kMostSet});
  };
  for (std::int64_t panels = 1; panels <= most(s.up.panel_size() + s.hidden); ++panels) {
    const std::int64_t sets = ceil_div(all, panels);
    const auto even = static_cast<double>(ceil_div(all, sets));
    visit(FeedForwardSets{panels},
          static_cast<double>(ceil_div(sets, p.threads)) * (packing(even) + up(even) + down(even)));
    const RestOfPanels r(all, panels, p.threads);
    if (r.rest == 0) continue;
    const auto rest = static_cast<double>(r.rest);
    visit(FeedForwardSets{panels, 1, r.rest},
          static_cast<double>(r.sets) * (packing(r.each) + up(r.each) + down(r.each)) + packing(rest) +
              up(rest) * part_of(s.up.out_blocks, p.threads) +
              down(rest) * part_of(s.down.out_blocks, p.threads) + kBarrier + shared(rest));
  }
  // Apart, sets are as large as each product allows: W streams by less often. Where hidden features of all
  // tokens stay in L3, or there are few sets for the threads.
  if (2 * all * s.hidden > kMostShared && all >= 4 * p.threads) return;
  const std::int64_t after = most(s.hidden), sets_after = ceil_div(all, after);
  const auto even_after = static_cast<double>(ceil_div(all, sets_after));
  const std::int64_t most_splits =
      std::min<std::int64_t>(4 * p.threads, std::max(s.up.out_blocks, s.down.out_blocks));
  for (std::int64_t panels = 1; panels <= most(s.up.panel_size()); ++panels) {
    const std::int64_t sets = ceil_div(all, panels);
    const auto even = static_cast<double>(ceil_div(all, sets));
    for (std::int64_t splits = 1; splits <= most_splits; ++splits) {
      const auto rounds = [&](std::int64_t of) {
        return static_cast<double>(ceil_div(of * splits, p.threads));
      };
      const auto parts = static_cast<double>(splits);
      visit(FeedForwardSets{panels, splits, 0, after},
            rounds(sets) * (packing(even) + up(even) / parts) +
                rounds(sets_after) * (down(even_after) / parts + shared(even_after)) + kBarrier);
    }
  }
}

}  // namespace

Reason supports_feed_forward_pairs(const PairKernels& kernels, const Problem& p) {
  const bool gated = p.gate != WeightSpec{};
  for (const WeightSpec& w : {p.weight, p.down, gated ? p.gate : p.down}) {
    if (Reason reason = takes_pairs(p, w); !reason.empty()) return reason;
  }
  const BsrShape &up = p.weight.shape, &gate = p.gate.shape;
  if (gated && (gate.block_rows != up.block_rows || gate.block_cols != up.block_cols))
    return "takes gates with blocks as those of up";
  const Shapes s(kernels, p);
  for (const PairsShape& w : {s.up, s.down}) {
    if (Reason reason = takes_rows(kernels, w, Op::linear, p.tokens); !reason.empty()) return reason;
  }
  if (std::max(s.up.panel_size(), s.hidden) > std::numeric_limits<std::uint32_t>::max()) {
    return "takes less than 2^27 features";
  }
  if (p.tokens <= kFewTokens) return cat("takes more than ", kFewTokens, " tokens; got ", p.tokens);
  return {};
}

Config configure_feed_forward_pairs(const PairKernels& kernels, const Problem& problem,
                                    const Machine& machine) {
  return to_config(
      cheapest<FeedForwardSets>([&](auto&& visit) { for_each_sets(kernels, problem, machine, visit); }));
}

std::vector<Config> feed_forward_pairs_candidates(const PairKernels& kernels, const Problem& problem,
                                                  const Machine& machine) {
  std::vector<Config> all;
  for_each_sets(kernels, problem, machine,
                [&](const FeedForwardSets& sets, double) { all.push_back(to_config(sets)); });
  return all;
}

std::int64_t feed_forward_pairs_workspace(const PairKernels& kernels, const Problem& problem,
                                          const Config& config) {
  const Shapes shapes(kernels, problem);
  const auto sets = from_config<FeedForwardSets>(config);
  const Memory memory(problem, shapes, sets, nullptr);
  return memory.shared + problem.threads * memory.worker;
}

Status run_feed_forward_pairs(const PairKernels& kernels, const Call& call) {
  const auto sets = from_config<FeedForwardSets>(call.config);
  const Shapes s(kernels, call.problem);
  const std::int64_t most = std::max(s.up.out_blocks, s.down.out_blocks);
  const PairsBlocking cut{sets.panels, sets.splits, sets.rest};
  if (Status status = check_panels(kernels.family, cut, most); !status.ok()) return status;
  if (sets.after < 0 || sets.after > 4096)
    return invalid(kernels.family, "after of the config must be in [0, 4096]", cat(sets.after));
  const auto check = [&](std::string_view prepared, std::string_view packed, const PairsShape& shape,
                         const Derived& derived) {
    const auto room = [](std::string_view what, std::int64_t size, std::int64_t got) -> Status {
      if (got >= size) return {};
      return invalid(name(Op::feed_forward),
                     cat(what, " must have at least ", size, " bytes (derived_sizes)"), cat(got));
    };
    Status status = room(prepared, Prepared(shape, nullptr).bytes, derived.prepared_bytes);
    return status.ok() ? room(packed, shape.tiles_bytes(), derived.packed_bytes) : status;
  };
  if (Status status = check("up derived.prepared", "up derived.packed", s.up, call.layers->up.weight.derived);
      !status.ok())
    return status;
  if (call.layers->gate) {
    if (Status status =
            check("gate derived.prepared", "gate derived.packed", s.gate, call.layers->gate->weight.derived);
        !status.ok())
      return status;
  }
  if (Status status =
          check("down derived.prepared", "down derived.packed", s.down, call.layers->down.weight.derived);
      !status.ok())
    return status;
  Network(kernels, call, sets).run();
  return {};
}

}  // namespace rarefy::cpu
