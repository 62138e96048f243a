// feed_forward in int8: a task takes its tokens, some at a time, through its layers, each as linear's own
// kernels compute it (quads_task.h). Hidden features are float rows of the worker's memory, activated (or
// multiplied by a gate's, which are) and rounded to int8 where they lie, mostly in L2; with ReLU and in f32
// results are the layers' bit for bit.
#include <optional>

#include "core/message.h"
#include "core/scalar.h"
#include "cpu/linear_quads.h"
#include "cpu/one_layer.h"
#include "cpu/quads_task.h"

namespace rarefy::cpu {

namespace {

// Tokens that go through both layers at a time: one of the largest panels, two of 32. With more, hidden
// features leave L2: of 128 they took 1.05 and .95 times as long, of 256 and 512 up to twice (a Xeon with
// AMX, 8 threads).
constexpr std::int64_t kTogether = 64;
constexpr std::int64_t kVector = 16;  // floats that activations go by, at most

// One layer: the kernels that have it, what they know of it, and its part of the memory.
struct Layer {
  const QuadKernels& kernels;
  QuadsShape shape;
  QuadsParts parts{};

  Layer(const QuadKernels& few, const WeightSpec& weight, bool many)
      : kernels(many ? *few.many_tokens : few), shape(kernels, weight.shape) {}
  void take_worker(Room& room) {
    QuadsLayout::take_worker(room, kernels, shape, {kTogether / shape.tokens, 1}, parts);
  }
};

struct Network {
  Layer up, down;
  std::optional<Layer> gate;
  std::int64_t stride;  // of hidden rows, not a multiple of a page
  float *hidden = nullptr, *gates = nullptr;
  std::int64_t shared, worker;

  Network(const QuadKernels& kernels, const Problem& p, const FeedForwardQuads& c, void* base)
      : up(kernels, p.weight, c.up_many != 0),
        down(kernels, p.down, c.down_many != 0),
        stride(ceil_div(p.weight.shape.rows, kVector) * kVector + kVector) {
    if (p.gate != WeightSpec{}) gate.emplace(kernels, p.gate, c.gate_many != 0);
    Room all(base);
    QuadsLayout::take_shared(all, up.shape, up.parts);
    QuadsLayout::take_shared(all, down.shape, down.parts);
    if (gate) QuadsLayout::take_shared(all, gate->shape, gate->parts);
    shared = all.bytes();
    Room own;
    take_worker(own);
    worker = own.bytes();
  }
  void take_worker(Room& room) {
    up.take_worker(room);
    down.take_worker(room);
    hidden = room.take<float>(kTogether * stride);
    if (!gate) return;
    gate->take_worker(room);
    gates = room.take<float>(kTogether * stride);
  }
};

// A call of linear for one layer; x and y are set as tokens go by.
Call layer_call(const Call& call, const LayerView& layer, const WeightSpec& weight) {
  Call one;
  one.problem = layer_problem(call.problem, weight, call.problem.tokens);
  one.plan = layer.weight.plan;
  one.scales = layer.weight.scales;
  one.bias = layer.bias;
  return one;
}

void run_layer(const Layer& layer, const Derived& derived, const Call& call) {
  const QuadsSection section = quad_section(layer.kernels, call.problem.weight.shape);
  const QuadsWeight w(layer.kernels, layer.shape, call.plan.crow, section.of(derived));
  layer.kernels.enter();
  pack_quads_x(layer.kernels, layer.shape, call, layer.parts, 0, call.x.rows);
  multiply_quads(w, call, layer.parts, 0, call.x.rows, 0, layer.shape.out_blocks);
  layer.kernels.leave();
}

// One token's sums before the activation, for a caller who wants them; few do.
void save_row(const MutableMatrixView& to, std::int64_t m, const float* row) {
  visit_float(to.dtype, [&]<class T>(T) {
    T* out = static_cast<T*>(to.data) + m * to.row_stride;
    for (std::int64_t h = 0; h < to.cols; ++h) store(out + h * to.col_stride, row[h]);
  });
}

void run_task(const Call& call, Network own, std::int64_t first, std::int64_t last) {
  const FeedForward& layers = *call.layers;
  const std::int64_t features = call.problem.weight.shape.rows;
  Call up = layer_call(call, layers.up, call.problem.weight);
  Call down = layer_call(call, layers.down, call.problem.down);
  Call gate = layers.gate ? layer_call(call, *layers.gate, call.problem.gate) : Call{};
  const auto activate = [&](float* row) {
    std::fill_n(row + features, -features & (kVector - 1), 0.0F);
    own.up.kernels.activate(layers.activation, row, ceil_div(features, kVector) * kVector);
  };
  for (std::int64_t m = first; m < last; m += kTogether) {
    const std::int64_t rows = std::min(kTogether, last - m);
    up.x = rows_of(call.x, m, rows);
    up.out = {own.hidden, DType::f32, rows, features, own.stride};
    run_layer(own.up, layers.up.weight.derived, up);
    if (layers.gate) {
      gate.x = up.x;
      gate.out = {own.gates, DType::f32, rows, features, own.stride};
      run_layer(*own.gate, layers.gate->weight.derived, gate);
    }
    for (std::int64_t t = 0; t < rows; ++t) {
      float* row = own.hidden + t * own.stride;
      if (call.save.up.data != nullptr) save_row(call.save.up, m + t, row);
      if (!layers.gate) {
        activate(row);
        continue;
      }
      float* by = own.gates + t * own.stride;
      if (call.save.gate.data != nullptr) save_row(call.save.gate, m + t, by);
      activate(by);
      for (std::int64_t h = 0; h < features; ++h) row[h] *= by[h];
    }
    down.x = {own.hidden, DType::f32, rows, features, own.stride};
    down.out = rows_of(call.out, m, rows);
    run_layer(own.down, layers.down.weight.derived, down);
  }
}

// Kernels for many tokens, where there are and they take this layer; as for several threads, as rows that
// stay in L2 leave AMX's sums by output as fast as those by token.
bool takes_many(const QuadKernels& kernels, const Problem& p, const WeightSpec& weight,
                const Machine& machine) {
  if (kernels.many_tokens == nullptr) return false;
  Problem one = layer_problem(p, weight, p.tokens);
  one.threads = std::max(2, one.threads);
  return supports_quads(*kernels.many_tokens, one, machine).empty();
}

}  // namespace

Reason supports_feed_forward_quads(const QuadKernels& kernels, const Problem& p, const Machine& machine) {
  for (const WeightSpec* w : {&p.weight, &p.down, p.gate == WeightSpec{} ? &p.down : &p.gate}) {
    Reason reason = supports_quads(kernels, layer_problem(p, *w, p.tokens), machine);
    if (!reason.empty() && !takes_many(kernels, p, *w, machine)) return reason;
  }
  if (p.tokens < kVector * p.threads) {
    return cat("takes ", kVector, " tokens a thread, ", p.threads, "; got ", p.tokens);
  }
  return {};
}

std::vector<Config> feed_forward_quads_candidates(const QuadKernels& kernels, const Problem& p,
                                                  const Machine& machine) {
  FeedForwardQuads c;
  c.up_many = takes_many(kernels, p, p.weight, machine) ? 1 : 0;
  c.down_many = takes_many(kernels, p, p.down, machine) ? 1 : 0;
  c.gate_many = p.gate != WeightSpec{} && takes_many(kernels, p, p.gate, machine) ? 1 : 0;
  std::vector<Config> all;
  for (const int tasks : {1, 2, 4}) {  // of a thread
    c.tokens = std::max<std::int64_t>(1, ceil_div(ceil_div(p.tokens, p.threads * tasks), kVector)) * kVector;
    all.push_back(to_config(c));
  }
  return all;
}

Config configure_feed_forward_quads(const QuadKernels& kernels, const Problem& problem,
                                    const Machine& machine) {
  return feed_forward_quads_candidates(kernels, problem, machine).front();
}

std::int64_t feed_forward_quads_workspace(const QuadKernels& kernels, const Problem& problem,
                                          const Config& config) {
  const Network network(kernels, problem, from_config<FeedForwardQuads>(config), nullptr);
  return network.shared + problem.threads * network.worker;
}

Status run_feed_forward_quads(const QuadKernels& kernels, const Call& call) {
  const auto c = from_config<FeedForwardQuads>(call.config);
  const bool many = kernels.many_tokens != nullptr;
  if (c.tokens < 1 || (!many && (c.up_many != 0 || c.down_many != 0 || c.gate_many != 0))) {
    return invalid(kernels.family, "the configuration must have tokens, and kernels that there are",
                   cat(c.tokens, ", ", c.up_many, ", ", c.down_many, ", ", c.gate_many));
  }
  const Problem& p = call.problem;
  const LayerView* gate = call.layers->gate ? &*call.layers->gate : nullptr;
  for (const auto& [layer, name] :
       {std::pair{&call.layers->up, "up"}, {&call.layers->down, "down"}, {gate, "gate"}}) {
    if (layer == nullptr) continue;
    const auto sizes = for_quad_sections(kernels, layer->weight.plan.shape, [](const QuadsSection&) {});
    const Derived& derived = layer->weight.derived;
    if (derived.prepared_bytes < sizes.first || derived.packed_bytes < sizes.second) {
      return invalid(rarefy::name(Op::feed_forward),
                     cat(name, " derived must have at least ", sizes.first, " and ", sizes.second,
                         " bytes (derived_sizes)"),
                     cat(derived.prepared_bytes, " and ", derived.packed_bytes));
    }
  }
  const Network network(kernels, p, c, call.workspace);
  unpack_outputs(layer_call(call, call.layers->up, p.weight), network.up.shape, network.up.parts, p.out);
  unpack_outputs(layer_call(call, call.layers->down, p.down), network.down.shape, network.down.parts, p.out);
  if (gate != nullptr)
    unpack_outputs(layer_call(call, *gate, p.gate), network.gate->shape, network.gate->parts, p.out);
  call.executor.parallel_for(ceil_div(p.tokens, c.tokens), [&](std::int64_t task, int worker) {
    Network own = network;
    Room room(static_cast<char*>(call.workspace) + network.shared + worker * network.worker);
    own.take_worker(room);
    run_task(call, own, task * c.tokens, std::min(p.tokens, (task + 1) * c.tokens));
  });
  return {};
}

}  // namespace rarefy::cpu
