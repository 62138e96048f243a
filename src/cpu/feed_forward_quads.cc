// feed_forward in int8: a task takes its tokens, some at a time, through its layers, each as linear's own
// kernels compute it (quads_task.h). Hidden features are float rows of the worker's memory. A range of them
// at a time they are computed and activated (or multiplied by a gate's, which are), so that these stay in L2;
// then all are rounded to int8. With ReLU and in f32 results are the layers' bit for bit.
#include <numeric>
#include <optional>

#include "core/message.h"
#include "core/scalar.h"
#include "cpu/linear_quads.h"
#include "cpu/one_layer.h"
#include "cpu/quads_task.h"

namespace rarefy::cpu {

namespace {

// Tokens that go through the layers at a time: one of the largest panels, two of 32. With more, hidden
// features leave L2 before they are rounded (of 128 they took 1.05 and .95 times as long: a Xeon with AMX, 8
// threads); but large weights come out of L3, or of memory, for as many tokens as that: 4096→11008 70 ms with
// 64, 65 with 128, 61 with 256, 2048→5632 with a gate 26.5, 24.2, 23.8, 1536→4096 12.4, 13.4, 13.1 (a Zen 5).
constexpr std::int64_t kTogether = 64, kTogetherLarge = 256, kLarge = 4 << 20;  // values of a layer
constexpr std::int64_t kVector = 16;  // floats that activations go by, at most
// Floats of all tokens in a range, or the next number of whole blocks.
constexpr std::int64_t kRange = 64 << 10;

// One layer: the kernels that have it, what they know of it, and its part of the memory.
struct Layer {
  const QuadKernels& kernels;
  QuadsShape shape;
  QuadsParts parts{};

  Layer(const QuadKernels& few, const WeightSpec& weight, bool many)
      : kernels(many ? *few.many_tokens : few), shape(kernels, weight.shape) {}
  void take_worker(Room& room, std::int64_t tokens) {
    QuadsLayout::take_worker(room, kernels, shape, {tokens / shape.tokens, 1}, parts);
  }
};

struct Network {
  Layer up, down;
  std::optional<Layer> gate;
  std::int64_t together;  // tokens
  std::int64_t stride;    // of hidden rows, not a multiple of a page
  std::int64_t range;     // whole output blocks of up and gate
  float *hidden = nullptr, *gates = nullptr;
  std::int64_t shared, worker;

  Network(const QuadKernels& kernels, const Problem& p, const FeedForwardQuads& c, void* base)
      : up(kernels, p.weight, c.up_many != 0),
        down(kernels, p.down, c.down_many != 0),
        together(p.weight.shape.value_count() > kLarge ? kTogetherLarge : kTogether),
        stride(ceil_div(p.weight.shape.rows, kVector) * kVector + kVector) {
    if (p.gate != WeightSpec{}) gate.emplace(kernels, p.gate, c.gate_many != 0);
    const std::int64_t whole =
        std::lcm(kVector, std::lcm(up.shape.out_block, gate ? gate->shape.out_block : 1));
    range = std::min(ceil_div(kRange / together, whole) * whole, stride);
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
    up.take_worker(room, together);
    down.take_worker(room, together);
    hidden = room.take<float>(together * stride);
    if (!gate) return;
    gate->take_worker(room, together);
    if (packs_alike()) gate->parts.panels = up.parts.panels, gate->parts.tokens = up.parts.tokens;
    gates = room.take<float>(together * gate_stride());
  }
  std::int64_t gate_stride() const { return range + kVector; }
  // Whether up and gate want x packed in one way.
  bool packs_alike() const {
    return &up.kernels == &gate->kernels && up.shape.padded == gate->shape.padded &&
           order_of(up.shape.source) == order_of(gate->shape.source);
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

void pack(const Layer& layer, const Call& call) {
  pack_quads_x(layer.kernels, layer.shape, call, layer.parts, 0, call.x.rows);
}

// Outputs begin … end, whole output blocks.
void multiply(const Layer& layer, const Derived& derived, const Call& call, std::int64_t begin,
              std::int64_t end) {
  const QuadsSection section = quad_section(layer.kernels, call.problem.weight.shape);
  const QuadsWeight w(layer.kernels, layer.shape, call.plan.crow, section.of(derived));
  layer.kernels.enter();
  multiply_quads(w, call, layer.parts, 0, call.x.rows, begin / layer.shape.out_block,
                 std::min(ceil_div(end, layer.shape.out_block), layer.shape.out_blocks));
  layer.kernels.leave();
}

// Some of a token's sums before the activation, for a caller who wants them; few do.
void save(const MutableMatrixView& to, std::int64_t m, std::int64_t first, std::int64_t count,
          const float* sums) {
  if (to.data == nullptr) return;
  visit_float(to.dtype, [&]<class T>(T) {
    T* out = static_cast<T*>(to.data) + m * to.row_stride + first * to.col_stride;
    for (std::int64_t h = 0; h < count; ++h) store(out + h * to.col_stride, sums[h]);
  });
}

void run_task(const Call& call, Network own, std::int64_t first, std::int64_t last) {
  const FeedForward& layers = *call.layers;
  const std::int64_t features = call.problem.weight.shape.rows;
  Call up = layer_call(call, layers.up, call.problem.weight);
  Call down = layer_call(call, layers.down, call.problem.down);
  Call gate = layers.gate ? layer_call(call, *layers.gate, call.problem.gate) : Call{};
  const auto activate = [&](float* sums, std::int64_t count) {
    std::fill_n(sums + count, -count & (kVector - 1), 0.0F);
    own.up.kernels.activate(layers.activation, sums, ceil_div(count, kVector) * kVector);
  };
  for (std::int64_t m = first; m < last; m += own.together) {
    const std::int64_t rows = std::min(own.together, last - m);
    gate.x = up.x = rows_of(call.x, m, rows);
    up.out = {own.hidden, DType::f32, rows, features, own.stride};
    pack(own.up, up);
    if (layers.gate && !own.packs_alike()) pack(*own.gate, gate);
    for (std::int64_t begin = 0; begin < features; begin += own.range) {
      const std::int64_t end = std::min(features, begin + own.range), count = end - begin;
      multiply(own.up, layers.up.weight.derived, up, begin, end);
      if (layers.gate) {  // its features are counted from 0, and lie behind the hidden ones
        gate.out = {own.gates - begin, DType::f32, rows, features, own.gate_stride()};
        multiply(*own.gate, layers.gate->weight.derived, gate, begin, end);
      }
      for (std::int64_t t = 0; t < rows; ++t) {
        float* sums = own.hidden + t * own.stride + begin;
        save(call.save.up, m + t, begin, count, sums);
        if (!layers.gate) {
          activate(sums, count);
          continue;
        }
        float* by = own.gates + t * own.gate_stride();
        save(call.save.gate, m + t, begin, count, by);
        activate(by, count);
        for (std::int64_t h = 0; h < count; ++h) sums[h] *= by[h];
      }
    }
    down.x = {own.hidden, DType::f32, rows, features, own.stride};
    down.out = rows_of(call.out, m, rows);
    pack(own.down, down);
    multiply(own.down, layers.down.weight.derived, down, 0, down.out.cols);
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
