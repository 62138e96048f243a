// Masks of pruning: scores in, bits out. python/rarefy/prune knows what the arguments mean.
#include "rarefy/prune_reconstruct.h"

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "adapt.h"
#include "core/checked.h"
#include "core/message.h"

namespace rarefy::binding {

namespace {

Importance importance_of(std::string_view op, std::string_view text) {
  if (text == "value") return Importance::value;
  if (text == "magnitude") return Importance::magnitude;
  if (text == "square") return Importance::square;
  raise(op, invalid(op, "importance must be value, magnitude or square", cat('"', text, '"')));
}

void check_bytes(const Call& call, std::string_view argument, const Tensor& tensor, std::int64_t rows,
                 std::int64_t cols) {
  call.check_device(argument, tensor);
  const ScalarType type = tensor.scalar_type();
  if (tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == cols && tensor.is_contiguous() &&
      (type == ScalarType::Byte || type == ScalarType::Bool)) {
    return;
  }
  raise(call.op(),
        invalid(call.op(), cat(argument, " must be contiguous bytes of shape (", rows, ", ", cols, ')'),
                "another tensor"));
}

// float64 without gaps, of the given shape.
double* doubles_of(const Call& call, std::string_view argument, const Tensor& tensor, std::int64_t rows,
                   std::int64_t cols) {
  call.check_device(argument, tensor);
  if (tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == cols && tensor.is_contiguous() &&
      tensor.scalar_type() == ScalarType::Double) {
    return static_cast<double*>(tensor.data_ptr());
  }
  raise(call.op(),
        invalid(call.op(), cat(argument, " must be contiguous float64 of shape (", rows, ", ", cols, ')'),
                "another tensor"));
}

std::uint8_t* bytes_of(const Tensor& tensor) { return static_cast<std::uint8_t*>(tensor.data_ptr()); }

// A matrix of scores with what goes with it; tensors without elements stand for none.
PruneScores scores_of(const Call& call, Tensor& scores, std::string_view importance, const Tensor* scale,
                      const Tensor* previous) {
  if (scores.dim() != 2) {
    raise(call.op(), invalid(call.op(), "scores must have 2 dimensions", cat(scores.dim())));
  }
  PruneScores result{call.matrix("scores", scores, "columns", scores.size(1)),
                     importance_of(call.op(), importance)};
  if (scale != nullptr && scale->numel() > 0) {
    call.check_device("column_scale", *scale);
    if (scale->dim() != 1 || scale->size(0) != scores.size(1) || !scale->is_contiguous() ||
        scale->scalar_type() != ScalarType::Double) {
      raise(
          call.op(),
          invalid(call.op(), cat("column_scale must be contiguous float64 of ", scores.size(1), " elements"),
                  "another tensor"));
    }
    result.column_scale = static_cast<const double*>(scale->data_ptr());
  }
  if (previous != nullptr && previous->numel() > 0) {
    check_bytes(call, "previous", *previous, scores.size(0), mask_row_bytes(scores.size(1)));
    result.previous = bytes_of(*previous);
  }
  return result;
}

PruneUnits units_of(const Call& call, const std::vector<std::int64_t>& units, std::size_t layer) {
  if (units.size() < 4 * (layer + 1)) {
    raise(call.op(), invalid(call.op(), "units must have 4 numbers a matrix", cat(units.size())));
  }
  const std::int64_t* u = units.data() + 4 * layer;
  return {{u[0], u[1]}, u[2], u[3], false};
}

std::tuple<Tensor, std::int64_t, std::int64_t> mask(Tensor scores, const std::string& importance,
                                                    std::optional<Tensor> column_scale,
                                                    std::optional<Tensor> previous,
                                                    const std::vector<std::int64_t>& units, bool each_row,
                                                    std::int64_t remove) {
  const Call call("prune_mask", "scores", scores);
  PruneScores view = scores_of(call, scores, importance, column_scale ? &*column_scale : nullptr,
                               previous ? &*previous : nullptr);
  PruneUnits what = units_of(call, units, 0);
  what.each_row = each_row;
  Tensor bits = call.empty_bytes(view.matrix.rows, mask_row_bytes(view.matrix.cols));
  const PruneCount count =
      value_of(call.op(), prune_mask(view, what, remove, bytes_of(bits), call.context().executor));
  return {bits, count.kept, count.nan};
}

std::vector<std::int64_t> allocate(std::vector<Tensor> scores, const std::string& importance,
                                   std::vector<Tensor> column_scales, std::vector<Tensor> previous,
                                   const std::vector<std::int64_t>& units, std::vector<std::int64_t> limits,
                                   std::int64_t remove) {
  constexpr std::string_view op = "allocate_global";
  const std::size_t n = scores.size();
  if (n == 0 || column_scales.size() != n || previous.size() != n || limits.size() != 2 * n) {
    raise(op, invalid(op, "there must be layers, and an entry for each in every list", cat(n, " scores")));
  }
  const Call call(op, "scores", scores[0]);
  std::vector<PruneLayer> layers;
  for (std::size_t i = 0; i < n; ++i) {
    layers.push_back({scores_of(call, scores[i], importance, &column_scales[i], &previous[i]),
                      units_of(call, units, i), limits[2 * i], limits[2 * i + 1]});
  }
  std::vector<std::int64_t> removed(n);
  check(op, allocate_global(layers, remove, removed, call.context().executor));
  return removed;
}

void lamp(Tensor weight, const Tensor& scores) {
  const Call call("lamp_scores", "weight", weight);
  if (weight.dim() != 2)
    raise(call.op(), invalid(call.op(), "weight must have 2 dimensions", cat(weight.dim())));
  const MatrixView view = call.matrix("weight", weight, "columns", weight.size(1));
  check(call.op(), lamp_scores(view, doubles_of(call, "scores", scores, view.rows, view.cols)));
}

void apply(const Tensor& x, const Tensor& bits) {
  const Call call("apply_mask", "x", x);
  if (x.dim() != 2) raise(call.op(), invalid(call.op(), "x must have 2 dimensions", cat(x.dim())));
  check_bytes(call, "mask", bits, x.size(0), mask_row_bytes(x.size(1)));
  Tensor same = x;
  const MatrixView view = call.matrix("x", same, "columns", x.size(1));
  if (view.data != x.data_ptr())
    raise(call.op(), invalid(call.op(), "x must be a matrix in memory", "another"));
  check(call.op(), apply_mask({x.data_ptr(), view.dtype, view.rows, view.cols, view.row_stride},
                              bytes_of(bits), call.context().executor));
}

Tensor pack(const Tensor& bytes) {
  const Call call("pack_mask", "mask", bytes);
  if (bytes.dim() != 2) raise(call.op(), invalid(call.op(), "mask must have 2 dimensions", cat(bytes.dim())));
  check_bytes(call, "mask", bytes, bytes.size(0), bytes.size(1));
  Tensor bits = call.empty_bytes(bytes.size(0), mask_row_bytes(bytes.size(1)));
  pack_mask(bytes_of(bytes), bytes.size(0), bytes.size(1), bytes_of(bits), call.context().executor);
  return bits;
}

Tensor unpack(const Tensor& bits, std::int64_t cols) {
  const Call call("unpack_mask", "mask", bits);
  if (bits.dim() != 2 || cols < 0) {
    raise(call.op(), invalid(call.op(), "mask must have 2 dimensions and columns", cat(bits.dim())));
  }
  check_bytes(call, "mask", bits, bits.size(0), mask_row_bytes(cols));
  Tensor bytes = call.empty_bytes(bits.size(0), cols);
  unpack_mask(bytes_of(bits), bits.size(0), cols, bytes_of(bytes), call.context().executor);
  return bytes;
}

void unpack_into(const Tensor& bytes, const Tensor& bits) {
  const Call call("unpack_mask", "mask", bits);
  if (bytes.dim() != 2) {
    raise(call.op(), invalid(call.op(), "bytes must have 2 dimensions", cat(bytes.dim())));
  }
  check_bytes(call, "bytes", bytes, bytes.size(0), bytes.size(1));
  check_bytes(call, "mask", bits, bytes.size(0), mask_row_bytes(bytes.size(1)));
  unpack_mask(bytes_of(bits), bytes.size(0), bytes.size(1), bytes_of(bytes), call.context().executor);
}

// What all reconstructions have in common; the mask is written or read.
Reconstruction problem_of(const Call& call, const Tensor& weight, const Tensor& bits,
                          const std::vector<std::int64_t>& units, bool each_row, std::int64_t remove) {
  if (weight.dim() != 2) {
    raise(call.op(), invalid(call.op(), "weight must have 2 dimensions", cat(weight.dim())));
  }
  const std::int64_t rows = weight.size(0), cols = weight.size(1);
  check_bytes(call, "mask", bits, rows, mask_row_bytes(cols));
  PruneUnits what = units_of(call, units, 0);
  what.each_row = each_row;
  return {doubles_of(call, "weight", weight, rows, cols), rows, cols, what, remove, bytes_of(bits)};
}

void sweep(const Tensor& weight, const Tensor& bits, const Tensor& factor,
           const std::vector<std::int64_t>& units, std::int64_t remove, std::int64_t panel, bool fixed,
           std::int64_t levels) {
  const Call call("sparse_gpt", "weight", weight);
  const Reconstruction problem = problem_of(call, weight, bits, units, false, remove);
  const double* u = doubles_of(call, "factor", factor, problem.cols, problem.cols);
  check(call.op(), sparse_gpt(problem, u, panel, fixed, levels, call.context().executor));
}

void solve(const Tensor& weight, const Tensor& bits, const Tensor& hessian, const Tensor& inverse) {
  const Call call("least_squares", "weight", weight);
  const Reconstruction problem = problem_of(call, weight, bits, {1, 1, 0, 0}, false, 0);
  const double* h = doubles_of(call, "hessian", hessian, problem.cols, problem.cols);
  const double* i = doubles_of(call, "inverse", inverse, problem.cols, problem.cols);
  check(call.op(), least_squares(problem, h, i, call.context().executor));
}

void surgeon(const Tensor& weight, const Tensor& bits, const Tensor& inverse,
             const std::vector<std::int64_t>& units, std::int64_t remove, std::int64_t steps) {
  const Call call("block_obs", "weight", weight);
  const Reconstruction problem = problem_of(call, weight, bits, units, true, remove);
  const double* i = doubles_of(call, "inverse", inverse, problem.cols, problem.cols);
  check(call.op(), block_obs(problem, i, steps, call.context().executor));
}

void surgeon_costs(const Tensor& weight, const Tensor& inverse, const std::vector<std::int64_t>& units,
                   std::int64_t steps, const Tensor& costs) {
  const Call call("block_obs_costs", "weight", weight);
  const PruneUnits what = units_of(call, units, 0);
  if (weight.dim() != 2 || what.block.rows < 1 || what.block.cols < 1) {
    raise(call.op(), invalid(call.op(), "weight must be a matrix and blocks at least 1x1", "others"));
  }
  const std::int64_t rows = weight.size(0), cols = weight.size(1);
  std::uint8_t unused = 0;  // the mask is not written
  const Reconstruction problem{doubles_of(call, "weight", weight, rows, cols), rows, cols, what, 0, &unused};
  const double* i = doubles_of(call, "inverse", inverse, cols, cols);
  double* c =
      doubles_of(call, "costs", costs, ceil_div(rows, what.block.rows), ceil_div(cols, what.block.cols));
  check(call.op(), block_obs_costs(problem, i, steps, c, call.context().executor));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "_prune_mask(Tensor scores, str importance, Tensor? column_scale, Tensor? previous, int[] units, "
      "bool each_row, int remove) -> (Tensor, int, int)");
  m.def(
      "_prune_allocate(Tensor[] scores, str importance, Tensor[] column_scales, Tensor[] previous, int[] "
      "units, "
      "int[] limits, int remove) -> int[]");
  m.def("_lamp_scores_(Tensor weight, Tensor(a!) scores) -> ()");
  m.def("_mask_apply_(Tensor(a!) x, Tensor mask) -> ()");
  m.def("_mask_pack(Tensor mask) -> Tensor");
  m.def("_mask_unpack(Tensor mask, int cols) -> Tensor");
  m.def("_mask_unpack_(Tensor(a!) bytes, Tensor mask) -> ()");
  m.def(
      "_sparse_gpt_(Tensor(a!) weight, Tensor(b!) mask, Tensor factor, int[] units, int remove, int panel, "
      "bool fixed, int levels) -> ()");
  m.def("_least_squares_(Tensor(a!) weight, Tensor mask, Tensor hessian, Tensor inverse) -> ()");
  m.def(
      "_block_obs_(Tensor(a!) weight, Tensor(b!) mask, Tensor inverse, int[] units, int remove, int steps) "
      "-> ()");
  m.def("_block_obs_costs_(Tensor weight, Tensor inverse, int[] units, int steps, Tensor(a!) costs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("_prune_mask", TORCH_BOX(&mask));
  m.impl("_prune_allocate", TORCH_BOX(&allocate));
  m.impl("_lamp_scores_", TORCH_BOX(&lamp));
  m.impl("_mask_apply_", TORCH_BOX(&apply));
  m.impl("_mask_pack", TORCH_BOX(&pack));
  m.impl("_mask_unpack", TORCH_BOX(&unpack));
  m.impl("_mask_unpack_", TORCH_BOX(&unpack_into));
  m.impl("_sparse_gpt_", TORCH_BOX(&sweep));
  m.impl("_least_squares_", TORCH_BOX(&solve));
  m.impl("_block_obs_", TORCH_BOX(&surgeon));
  m.impl("_block_obs_costs_", TORCH_BOX(&surgeon_costs));
}

}  // namespace rarefy::binding
