// bsr_feed_forward: up to three weights in one op; and two of scaled int8.
#include "rarefy/feed_forward.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "adapt.h"
#include "core/message.h"
#include "derived.h"

namespace rarefy::binding {

namespace {

using Optional = std::optional<Tensor>;

// The arguments of both ops, in the order of their schema.
struct Arguments {
  Tensor x;
  const Tensor &up_values, &up_plan;
  const Optional& up_bias;
  const Optional &gate_values, &gate_plan, &gate_bias;
  const Tensor &down_values, &down_plan;
  const Optional& down_bias;
  std::int64_t out_features, hidden_features, in_features;
  std::string_view activation;
  DerivedTensors up = {}, down = {};  // what the layers hold
  bool rounds_x = false;
  DerivedTensors gate = {};
};

// Errors name tensors as their layer does: this says which one of several it is.
template <class F>
auto of_layer(const Call& call, std::string_view layer, F&& make) {
  const auto named = [&](const std::exception& error) {
    return cat('[', call.op(), "] the ", layer, " layer's ",
               std::string_view(error.what()).substr(call.op().size() + 3));
  };
  try {
    return make();
  } catch (const TypeMismatch& error) {
    throw TypeMismatch(named(error));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(named(error));
  }
}

// On a GPU x by feature is read in place where the up layer alone would read it so. The usual x, by token,
// asks nothing of the layer.
MatrixView matrix_of_x(const Call& call, Arguments& a) {
  const std::int64_t last = a.x.dim() - 1;
  if (call.device() == Device::cpu || last < 0 || a.x.stride(last) == 1)
    return call.matrix("x", a.x, "in_features", a.in_features);
  const BsrView up = of_layer(call, "up", [&] {
    call.check_device("values", a.up_values);
    return call.weight(a.up_values, a.up_plan, a.hidden_features, a.in_features);
  });
  const Call::Product product{up.plan.shape, up.dtype, a.up.key};
  return call.matrix("x", a.x, "in_features", a.in_features, &product);
}

std::tuple<Tensor, Tensor, Tensor> run(Arguments a, bool save) {
  const Call call("bsr_feed_forward", "the up layer's values", a.up_values);
  const MatrixView x = matrix_of_x(call, a);
  const auto layer = [&](std::string_view which, const Tensor& values, const Tensor& plan,
                         const Optional& bias, std::int64_t out, std::int64_t in,
                         const DerivedTensors& derived) {
    return of_layer(call, which, [&] {
      call.check_device("values", values);
      BsrView weight = call.weight(values, plan, out, in);
      call.check_stored(weight.dtype, "x", x.dtype);
      weight.rounds_x = a.rounds_x;
      weight.derived = view_derived(call, derived, Op::linear, weight.plan, x.dtype, &weight, weight.dtype);
      return LayerView{weight, call.bias(bias, out, x.dtype)};
    });
  };
  if (a.gate_values.has_value() != a.gate_plan.has_value()) {
    raise(call.op(), invalid(call.op(), "gate_values and gate_plan must come together",
                             a.gate_values ? "gate_values alone" : "gate_plan alone"));
  }
  FeedForward layers{
      layer("up", a.up_values, a.up_plan, a.up_bias, a.hidden_features, a.in_features, a.up),
      layer("down", a.down_values, a.down_plan, a.down_bias, a.out_features, a.hidden_features, a.down),
      call.activation(a.activation),
      {}};
  if (a.gate_values) {
    layers.gate =
        layer("gate", *a.gate_values, *a.gate_plan, a.gate_bias, a.hidden_features, a.in_features, a.gate);
  }
  Tensor y = call.empty_rows(a.x, a.out_features);
  Tensor up = save ? call.empty_rows(a.x, a.hidden_features) : call.nothing(a.x);
  Tensor gate = save && layers.gate ? call.empty_rows(a.x, a.hidden_features) : call.nothing(a.x);
  HiddenViews saved;
  if (save) saved.up = call.output(up, x, a.hidden_features);
  if (save && layers.gate) saved.gate = call.output(gate, x, a.hidden_features);
  const BsrView& first = layers.up.weight;
  const Context context = call.context(allows_tf32(call, a.up.key, first.plan, x.dtype, first.dtype));
  check(call.op(), feed_forward(x, layers, call.output(y, x, a.out_features), context, saved));
  return {y, up, gate};
}

Tensor bsr_feed_forward(Tensor x, const Tensor& up_values, const Tensor& up_plan, const Optional& up_bias,
                        const Optional& gate_values, const Optional& gate_plan, const Optional& gate_bias,
                        const Tensor& down_values, const Tensor& down_plan, const Optional& down_bias,
                        std::int64_t out_features, std::int64_t hidden_features, std::int64_t in_features,
                        std::string_view activation, const Optional& up_prepared, const Optional& up_packed,
                        const Optional& down_prepared, const Optional& down_packed, std::int64_t derived,
                        bool rounds_x, const Optional& gate_prepared, const Optional& gate_packed) {
  return std::get<0>(run({std::move(x),
                          up_values,
                          up_plan,
                          up_bias,
                          gate_values,
                          gate_plan,
                          gate_bias,
                          down_values,
                          down_plan,
                          down_bias,
                          out_features,
                          hidden_features,
                          in_features,
                          activation,
                          {up_prepared, up_packed, derived},
                          {down_prepared, down_packed, derived},
                          rounds_x,
                          {gate_prepared, gate_packed, gate_prepared || gate_packed ? derived : 0}},
                         false));
}

// With the results of `up` and `gate` before the activation, which a backward pass wants; (0,) without a
// gate.
std::tuple<Tensor, Tensor, Tensor> bsr_feed_forward_hidden(
    Tensor x, const Tensor& up_values, const Tensor& up_plan, const Optional& up_bias,
    const Optional& gate_values, const Optional& gate_plan, const Optional& gate_bias,
    const Tensor& down_values, const Tensor& down_plan, const Optional& down_bias, std::int64_t out_features,
    std::int64_t hidden_features, std::int64_t in_features, std::string_view activation) {
  return run({std::move(x), up_values, up_plan, up_bias, gate_values, gate_plan, gate_bias, down_values,
              down_plan, down_bias, out_features, hidden_features, in_features, activation},
             true);
}

// A copy of x that lies by feature, for a network that waits (chain.py).
Tensor copy_x_by_feature(Tensor x) {
  constexpr std::string_view op = "_copy_by_feature";
  const Call call(op, "x", x);
  const std::int64_t dimensions = x.dim();
  if (dimensions < 1) raise(op, invalid(op, "x must have a dimension", "none"));
  const MatrixView from = call.matrix("x", x, "features", x.size(dimensions - 1));
  return call.turned(from, x);
}

// Two layers of int8, or three with a gate, that round what they multiply, for eager calls that nothing
// records.
Tensor int8_feed_forward(Tensor x, const Tensor& up_values, const Tensor& up_scales, const Tensor& up_plan,
                         const Optional& up_bias, const Optional& gate_values, const Optional& gate_scales,
                         const Optional& gate_plan, const Optional& gate_bias, const Tensor& down_values,
                         const Tensor& down_scales, const Tensor& down_plan, const Optional& down_bias,
                         std::int64_t out_features, std::int64_t hidden_features, std::int64_t in_features,
                         std::string_view activation, const Optional& up_prepared, const Optional& up_packed,
                         const Optional& down_prepared, const Optional& down_packed, std::int64_t derived,
                         const Optional& gate_prepared, const Optional& gate_packed) {
  const Call call("int8_feed_forward", "the up layer's values", up_values);
  const MatrixView in = call.matrix("x", x, "in_features", in_features);
  const auto layer = [&](std::string_view which, const Tensor& values, const Tensor& scales,
                         const Tensor& plan, const Optional& bias, std::int64_t rows, std::int64_t columns,
                         const DerivedTensors& held) {
    return of_layer(call, which, [&] {
      call.check_device("values", values);
      BsrView weight = scaled_weight(call, values, scales, plan, rows, columns, true);
      weight.derived = view_derived(call, held, Op::linear, weight.plan, in.dtype, &weight, weight.dtype);
      return LayerView{weight, call.bias(bias, rows, in.dtype)};
    });
  };
  FeedForward layers{layer("up", up_values, up_scales, up_plan, up_bias, hidden_features, in_features,
                           {up_prepared, up_packed, derived}),
                     layer("down", down_values, down_scales, down_plan, down_bias, out_features,
                           hidden_features, {down_prepared, down_packed, derived}),
                     call.activation(activation),
                     {}};
  if (gate_values && gate_scales && gate_plan) {
    layers.gate = layer("gate", *gate_values, *gate_scales, *gate_plan, gate_bias, hidden_features,
                        in_features, {gate_prepared, gate_packed, derived});
  } else if (gate_values || gate_scales || gate_plan) {
    raise(call.op(), invalid(call.op(), "a gate's values, scales and plan must come together", "some"));
  }
  Tensor y = call.empty_rows(x, out_features);
  check(call.op(), feed_forward(in, layers, call.output(y, in, out_features), call.context()));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "bsr_feed_forward(Tensor x, Tensor up_values, Tensor up_plan, Tensor? up_bias, Tensor? gate_values, "
      "Tensor? gate_plan, Tensor? gate_bias, Tensor down_values, Tensor down_plan, Tensor? down_bias, "
      "SymInt out_features, SymInt hidden_features, SymInt in_features, str activation, "
      "Tensor? up_prepared=None, Tensor? up_packed=None, Tensor? down_prepared=None, "
      "Tensor? down_packed=None, int derived=0, bool rounds_x=False, Tensor? gate_prepared=None, "
      "Tensor? gate_packed=None) -> Tensor");
  m.def(
      "_bsr_feed_forward_hidden(Tensor x, Tensor up_values, Tensor up_plan, Tensor? up_bias, "
      "Tensor? gate_values, Tensor? gate_plan, Tensor? gate_bias, Tensor down_values, Tensor down_plan, "
      "Tensor? down_bias, SymInt out_features, SymInt hidden_features, SymInt in_features, str activation) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("_copy_by_feature(Tensor x) -> Tensor");
  m.def(
      "_int8_feed_forward(Tensor x, Tensor up_values, Tensor up_scales, Tensor up_plan, Tensor? up_bias, "
      "Tensor? gate_values, Tensor? gate_scales, Tensor? gate_plan, Tensor? gate_bias, Tensor down_values, "
      "Tensor down_scales, Tensor down_plan, Tensor? down_bias, SymInt out_features, SymInt hidden_features, "
      "SymInt in_features, str activation, Tensor? up_prepared, Tensor? up_packed, Tensor? down_prepared, "
      "Tensor? down_packed, int derived, Tensor? gate_prepared=None, Tensor? gate_packed=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("bsr_feed_forward", TORCH_BOX(&bsr_feed_forward));
  m.impl("_bsr_feed_forward_hidden", TORCH_BOX(&bsr_feed_forward_hidden));
  m.impl("_int8_feed_forward", TORCH_BOX(&int8_feed_forward));
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CUDA, m) {
  m.impl("bsr_feed_forward", TORCH_BOX(&bsr_feed_forward));
  m.impl("_copy_by_feature", TORCH_BOX(&copy_x_by_feature));
}

}  // namespace rarefy::binding
