// Several weights on one x in one op, for eager calls that nothing records: x is packed once where a kernel
// can (run_linears). Errors of the arguments are those of the ops of one weight, which come first.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "adapt.h"
#include "core/message.h"
#include "core/products.h"
#include "derived.h"

namespace rarefy::binding {

namespace {

using Optional = std::optional<Tensor>;

// The values of all have one dtype and block shape; `scales` of all, or none: then values are numbers as they
// are. `prepared` and `packed` are those of `derived`, the key that all hold.
std::vector<Tensor> linears(Tensor x, const std::vector<Tensor>& values, const std::vector<Tensor>& scales,
                            const std::vector<Tensor>& plans, const std::vector<Optional>& biases,
                            const std::vector<std::int64_t>& out_features, std::int64_t in_features,
                            const std::vector<Optional>& prepared, const std::vector<Optional>& packed,
                            std::int64_t derived, bool dynamic, bool rounds_x) {
  constexpr std::string_view kOp = "_linears";
  const std::size_t count = values.size();
  if (count == 0) raise(kOp, invalid(kOp, "values must be of a weight or more", "none"));
  for (const std::size_t size : {plans.size(), biases.size(), out_features.size(), prepared.size(),
                                 packed.size(), scales.empty() ? count : scales.size()}) {
    if (size != count) raise(kOp, invalid(kOp, cat("lists must have ", count, " items"), cat(size)));
  }
  const Call call(kOp, "values", values[0]);
  const MatrixView in = call.matrix("x", x, "in_features", in_features);
  std::vector<LayerView> layers;
  std::vector<MutableMatrixView> views;
  std::vector<Tensor> results;
  for (std::size_t i = 0; i < count; ++i) {
    call.check_device("values", values[i]);
    BsrView weight;
    if (scales.empty()) {
      weight = call.weight(values[i], plans[i], out_features[i], in_features, Call::Part::whole);
      call.check_stored(weight.dtype, "x", in.dtype);
      weight.rounds_x = rounds_x;
    } else {
      weight = scaled_weight(call, values[i], scales[i], plans[i], out_features[i], in_features, dynamic);
    }
    weight.derived = view_derived(call, {prepared[i], packed[i], derived}, Op::linear, weight.plan, in.dtype,
                                  &weight, weight.dtype, in.rows);
    layers.push_back({weight, call.bias(biases[i], out_features[i], in.dtype)});
    results.push_back(call.empty_rows(x, out_features[i]));
    views.push_back(call.output(results.back(), in, out_features[i]));
  }
  check(kOp, run_linears(in, layers, views, call.context()));
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "_linears(Tensor x, Tensor[] values, Tensor[] scales, Tensor[] plans, Tensor?[] biases, "
      "int[] out_features, int in_features, Tensor?[] prepared, Tensor?[] packed, int derived, "
      "bool dynamic, bool rounds_x) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) { m.impl("_linears", TORCH_BOX(&linears)); }

}  // namespace rarefy::binding
