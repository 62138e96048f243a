// feed_forward as calls of linear's kernels: for a few tokens, and for blocks of few rows, whose best kernels
// are not those of panels. Hidden features are float rows of the workspace, some hundred tokens at a time.
#include <algorithm>
#include <new>

#include "core/message.h"
#include "cpu/drivers.h"
#include "cpu/one_layer.h"

namespace rarefy::cpu {

namespace {

constexpr std::int64_t kTokens = 512;   // at a time
constexpr std::int64_t kChunk = 16384;  // hidden features that a task activates

std::int64_t tokens_at_a_time(const Problem& p) {
  return std::min(kTokens, std::max<std::int64_t>(1, p.tokens));
}

// Float rows of hidden features, and biases as float; then what the layers' kernels want.
struct Parts {
  float *hidden, *gate, *up_bias, *gate_bias;
  void* workspace;
  std::int64_t bytes;

  Parts(const Problem& p, void* base, std::int64_t workspace_bytes) {
    const bool gated = p.gate != WeightSpec{};
    const std::int64_t hidden_features = p.weight.shape.rows;
    const std::int64_t rows = tokens_at_a_time(p) * hidden_features;
    constexpr std::int64_t kPast = 64;  // activations write whole vectors
    Room room(base);
    hidden = room.take<float>(rows + kPast);
    gate = room.take<float>(gated ? rows + kPast : 0);
    up_bias = room.take<float>(hidden_features);
    gate_bias = room.take<float>(gated ? hidden_features : 0);
    workspace = room.take<char>(workspace_bytes);
    bytes = room.bytes();
  }
};

// One layer by the kernel that it gets on its own.
Status run_layer(const Call& call, const LayerView& layer, const WeightSpec& weight, const void* bias,
                 const MatrixView& in, const MutableMatrixView& out, void* workspace) {
  Call one;
  one.problem = layer_problem(call.problem, weight, in.rows);
  one.problem.bias = bias != nullptr;
  one.x = in;
  one.plan = layer.weight.plan;
  one.values = layer.weight.values;
  if (weight.scaling != Scaling::none) {  // floats go by kernels for weights as they are
    one.scales = layer.weight.scales;
    one.derived = layer.weight.derived;
  }
  one.bias = bias;
  one.out = out;
  const std::int64_t bytes = from_config<FeedForwardApart>(call.config).workspace;
  return dispatch(one, {call.executor, call.stream, {workspace, bytes}});
}

// Rows of a matrix of floats into one of another dtype.
void round_rows(const Kernels& kernels, const Executor& executor, const float* from,
                const MutableMatrixView& to) {
  executor.parallel_for(to.rows, [&](std::int64_t m) {
    kernels.round(storage(to.dtype), from + m * to.cols, to.cols, at(to, m, 0));
  });
}

}  // namespace

// What the kernels that the layers get now want; with less they take their memory from the heap.
Config configure_feed_forward_apart(const Problem& p, const Machine& /*machine*/) {
  FeedForwardApart most;
  const bool gated = p.gate != WeightSpec{};
  const std::int64_t whole = tokens_at_a_time(p);
  for (const std::int64_t tokens : {whole, p.tokens % whole}) {
    for (const WeightSpec* weight : {&p.weight, &p.down, gated ? &p.gate : &p.down}) {
      if (tokens == 0) continue;
      const auto bytes = workspace_size(layer_problem(p, *weight, tokens));
      if (bytes.ok()) {
        most.workspace = std::max(most.workspace, *bytes);
      } else if (bytes.status().code() == StatusCode::out_of_memory) {
        throw std::bad_alloc();  // for choose(), which is asking
      }
    }
  }
  return to_config(most);
}

std::int64_t feed_forward_apart_workspace(const Problem& p, const Config& config) {
  const auto layer = from_config<FeedForwardApart>(config);
  return Parts(p, nullptr, std::max<std::int64_t>(layer.workspace, 0)).bytes;
}

Status run_feed_forward_apart(const Kernels& kernels, const Call& call) {
  const Problem& p = call.problem;
  const FeedForward& layers = *call.layers;
  const Parts parts(p, call.workspace, 0);
  const std::int64_t features = p.weight.shape.rows;
  const auto bias = [&](const LayerView& layer, float* to) -> const void* {
    if (layer.bias == nullptr) return nullptr;
    unpack_bias(kernels, p.out, layer.bias, features, to);
    return to;
  };
  const void* up_bias = bias(layers.up, parts.up_bias);
  const void* gate_bias = layers.gate ? bias(*layers.gate, parts.gate_bias) : nullptr;
  const std::int64_t step = tokens_at_a_time(p);
  for (std::int64_t first = 0; first < p.tokens; first += step) {
    const std::int64_t rows = std::min(step, p.tokens - first);
    const MatrixView x = rows_of(call.x, first, rows);
    const MutableMatrixView hidden{parts.hidden, DType::f32, rows, features, features};
    const MutableMatrixView gate{parts.gate, DType::f32, rows, features, features};
    const auto layer = [&](const LayerView& l, const WeightSpec& weight, const void* b, const MatrixView& in,
                           const MutableMatrixView& out, const MutableMatrixView& save) {
      Status status = run_layer(call, l, weight, b, in, out, parts.workspace);
      if (status.ok() && save.data != nullptr) {
        round_rows(kernels, call.executor, static_cast<const float*>(out.data), rows_of(save, first, rows));
      }
      return status;
    };
    if (Status status = layer(layers.up, p.weight, up_bias, x, hidden, call.save.up); !status.ok())
      return status;
    if (layers.gate) {
      if (Status status = layer(*layers.gate, p.gate, gate_bias, x, gate, call.save.gate); !status.ok())
        return status;
    }
    const std::int64_t count = rows * features;
    call.executor.parallel_for((count + kChunk - 1) / kChunk, [&](std::int64_t task) {
      const std::int64_t from = task * kChunk;
      const std::int64_t part = std::min(kChunk, count - from);
      if (layers.gate) {
        kernels.apply_gate(layers.activation, parts.gate + from, parts.hidden + from, part);
      } else {
        kernels.activate(layers.activation, parts.hidden + from, part);
      }
    });
    if (Status status = run_layer(call, layers.down, p.down, layers.down.bias, hidden,
                                  rows_of(call.out, first, rows), parts.workspace);
        !status.ok()) {
      return status;
    }
  }
  return {};
}

}  // namespace rarefy::cpu
