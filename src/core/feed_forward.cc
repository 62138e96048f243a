// feed_forward: checks everything, then runs the first kernel of the registry that fits; on CUDA, where few
// networks have one, else its layers.
#include "rarefy/feed_forward.h"

#include "core/arguments.h"
#include "core/message.h"
#include "core/products.h"
#include "core/registry.h"

namespace rarefy {

namespace {

constexpr std::string_view kOp = "feed_forward";

WeightSpec spec_of(const BsrView& w) { return {Format::bsr, w.plan.shape, w.dtype, w.scaling, w.rounds_x}; }

// Pointers and sizes of one layer. The name of its values in messages: "up values".
Status check_layer(std::string_view values, const LayerView& layer, Device device, DType in) {
  if (Status status = check_plan(kOp, values, layer.weight.plan, layer.weight.values); !status.ok())
    return status;
  if (Status status = check_scaling(kOp, layer.weight, "x", in); !status.ok()) return status;
  if (layer.weight.device == device) return {};
  return mismatch(kOp, cat(values, " must be on device ", name(device)), name(layer.weight.device));
}

// A pre-activation to be saved; nothing to check if it is not.
Status check_saved(std::string_view argument, const MutableMatrixView& saved, const MutableMatrixView& y,
                   std::int64_t hidden) {
  if (saved.data == nullptr) return {};
  if (Status status = check_output(kOp, argument, saved, y.device); !status.ok()) return status;
  if (Status status = check_size(kOp, argument, "columns (hidden features)", hidden, saved.cols);
      !status.ok())
    return status;
  if (Status status = check_size(kOp, argument, "rows, like y", y.rows, saved.rows); !status.ok())
    return status;
  if (saved.dtype == y.dtype) return {};
  return mismatch(kOp, cat(argument, " must be of y's dtype, ", name(y.dtype)), name(saved.dtype));
}

// The key of what every layer holds, for a kernel that reads the weights as linear's kernel does.
std::uint64_t common_key(const FeedForward& layers) {
  const std::uint64_t key = layers.up.weight.derived.key;
  const bool same =
      layers.down.weight.derived.key == key && (!layers.gate || layers.gate->weight.derived.key == key);
  return same ? key : 0;
}

Range bias_of(std::string_view argument, const LayerView& layer, DType dtype) {
  const std::int64_t bytes = layer.weight.plan.shape.rows * static_cast<std::int64_t>(size_of(dtype));
  return {argument, layer.bias, layer.bias == nullptr ? 0 : bytes};
}

Range values_of(std::string_view argument, const LayerView& layer) {
  return range_of(argument, layer.weight.plan, layer.weight.values, layer.weight.dtype);
}

// No output may share memory with what is read, nor with another output.
Status check_memory(const MatrixView& x, const FeedForward& layers, const MutableMatrixView& y,
                    const HiddenViews& save) {
  const LayerView none;
  const LayerView& gate = layers.gate ? *layers.gate : none;
  const Range outputs[] = {range_of("y", y), range_of("saved up", save.up),
                           range_of("saved gate", save.gate)};
  for (std::size_t i = 0; i < std::size(outputs); ++i) {
    const Range& later = outputs[(i + 1) % std::size(outputs)];
    if (Status status =
            check_disjoint(kOp, outputs[i],
                           {range_of("x", x), values_of("up values", layers.up),
                            bias_of("up bias", layers.up, y.dtype), values_of("gate values", gate),
                            bias_of("gate bias", gate, y.dtype), values_of("down values", layers.down),
                            bias_of("down bias", layers.down, y.dtype), range_of_scales(layers.up.weight),
                            range_of_scales(gate.weight), range_of_scales(layers.down.weight), later});
        !status.ok()) {
      return status;
    }
  }
  return {};
}

}  // namespace

Status feed_forward(const MatrixView& x, const FeedForward& layers, const MutableMatrixView& y,
                    const Context& context, const HiddenViews& save) {
  const Device device = layers.up.weight.device;
  const BsrShape& up = layers.up.weight.plan.shape;
  const BsrShape& down = layers.down.weight.plan.shape;
  if (Status status = check_layer("up values", layers.up, device, x.dtype); !status.ok()) return status;
  if (Status status = check_layer("down values", layers.down, device, x.dtype); !status.ok()) return status;
  if (layers.gate) {
    if (Status status = check_layer("gate values", *layers.gate, device, x.dtype); !status.ok())
      return status;
  }
  if (Status status =
          check_feed_forward(kOp, up, down, layers.gate ? layers.gate->weight.plan.shape : BsrShape{});
      !status.ok()) {
    return status;
  }
  if (Status status = check_rows(kOp, {"x", "columns (in_features)", up.cols, x},
                                 {"y", "columns (out_features)", down.rows, y}, "rows, like x", device);
      !status.ok()) {
    return status;
  }
  if (Status status = check_activation(kOp, layers.activation); !status.ok()) return status;
  if (Status status = check_saved("saved up", save.up, y, up.rows); !status.ok()) return status;
  if (Status status = check_saved("saved gate", save.gate, y, up.rows); !status.ok()) return status;
  if (save.gate.data != nullptr && !layers.gate)
    return invalid(kOp, "saved gate must go with a gate", "none");
  if (Status status = check_memory(x, layers, y, save); !status.ok()) return status;
  if (y.rows == 0) return {};
  Alignment in, out;
  in.add(x);
  in.add(layers.up.weight.values);
  in.add(layers.down.weight.values);
  out.add(y);
  out.add(layers.up.bias);
  out.add(layers.down.bias);
  if (layers.gate) {
    in.add(layers.gate->weight.values);
    out.add(layers.gate->bias);
  }
  Call call;
  Problem& p = call.problem;
  p.op = Op::feed_forward;
  p.weight = spec_of(layers.up.weight);
  p.down = spec_of(layers.down.weight);
  if (layers.gate) p.gate = spec_of(layers.gate->weight);
  p.in = x.dtype;
  p.out = y.dtype;
  p.tokens = x.rows;
  p.in_stride = x.stride();
  p.out_stride = y.stride();
  p.in_layout = x.layout();
  p.out_layout = y.layout();
  p.in_alignment = in.bytes();
  p.out_alignment = out.bytes();
  p.bias = layers.up.bias != nullptr || layers.down.bias != nullptr;
  p.activation = layers.activation;
  p.device = device;
  call.x = x;
  call.layers = &layers;
  call.derived.key = common_key(layers);
  call.save = save;
  call.out = y;
  if (device == Device::cuda && save.up.data == nullptr && save.gate.data == nullptr) {
    complete(call, context);
    if (!has_kernel(p)) return run_layers(x, layers, y, context);
  }
  return dispatch(call, context);
}

}  // namespace rarefy
