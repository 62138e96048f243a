// The op of products with scipy's arrays, which one call reads, checks and uses.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "adapt.h"
#include "rarefy/linear.h"

namespace rarefy::binding {

namespace {

bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
         type == ScalarType::Double;
}

// Words of this call, in memory that the thread keeps where there are few: a plan in fresh pages took as long
// as its product with 8 tokens (768→3072 at 0.1, Ice Lake: 400 of 1,150 us).
constexpr std::int64_t kKeptWords = 4 << 20;

class Words {
 public:
  Words(const Call& call, std::int64_t count) {
    thread_local Tensor kept = call.empty_words(0);
    Tensor& owner = count <= kKeptWords ? kept : own_;
    if (&owner == &own_ || owner.numel() < count) owner = call.empty_words(count);
    data_ = static_cast<std::int32_t*>(owner.mutable_data_ptr());
  }
  std::int32_t* data() const { return data_; }

 private:
  Tensor own_;  // of many
  std::int32_t* data_;
};

// The plan of arrays that one call reads, or nothing where they do not ascend or are not valid.
std::optional<PlanView> plan_of_arrays(const Call& call, const BsrShape& shape, const Tensor& indices,
                                       const Tensor& indptr, std::int32_t* to) {
  const std::span<std::int32_t> plan{to, static_cast<std::size_t>(row_plan_size(shape))};
  std::span<const std::int32_t> rows{static_cast<const std::int32_t*>(indptr.data_ptr()),
                                     static_cast<std::size_t>(indptr.numel())};
  if (indptr.scalar_type() == ScalarType::Long) {
    const auto* wide = static_cast<const std::int64_t*>(indptr.data_ptr());
    std::int32_t* narrow = to + plan.size();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (wide[i] < 0 || wide[i] > shape.nnzb) return std::nullopt;
      narrow[i] = static_cast<std::int32_t>(wide[i]);
    }
    rows = {narrow, rows.size()};
  }
  const auto build = [&]<class Index>(Index) {
    const std::span<const Index> columns{static_cast<const Index*>(indices.data_ptr()),
                                         static_cast<std::size_t>(shape.nnzb)};
    return build_row_plan(call.op(), shape, rows, columns, plan, call.context().executor).ok();
  };
  const bool valid =
      indices.scalar_type() == ScalarType::Long ? build(std::int64_t{}) : build(std::int32_t{});
  if (!valid) return std::nullopt;
  return value_of(call.op(), view_row_plan(call.op(), shape, plan));
}

// x Wᵀ + bias of W in scipy's arrays, which are read, checked and used in this call; nothing where they are
// of another kind, for which there are other ways, or words. For eager calls.
std::optional<Tensor> arrays_product(Tensor x, const Tensor& data, const Tensor& indices,
                                     const Tensor& indptr, const std::optional<Tensor>& bias) {
  const auto plain = [](const Tensor& t) {
    return t.layout() == torch::headeronly::Layout::Strided && t.is_cpu() && t.is_contiguous();
  };
  const auto is_index = [&](const Tensor& t) {
    return plain(t) && t.dim() == 1 &&
           (t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long);
  };
  const ScalarType type = x.scalar_type();
  if (x.layout() != torch::headeronly::Layout::Strided || !x.is_cpu() || x.dim() == 0 || !plain(data) ||
      (data.dim() != 1 && data.dim() != 3) || data.scalar_type() != type || !is_float(type) ||
      !is_index(indices) || !is_index(indptr) || indptr.numel() == 0 || data.size(0) != indices.numel()) {
    return std::nullopt;
  }
  const Call call("sparse_dense", "data", data);
  const std::int64_t r = data.dim() == 3 ? data.size(1) : 1, c = data.dim() == 3 ? data.size(2) : 1;
  const BsrShape shape{(indptr.numel() - 1) * r, x.size(-1), r, c, indices.numel()};
  if (!check_shape(call.op(), shape).ok() || shape.cols % c != 0) return std::nullopt;
  if (bias &&
      (!plain(*bias) || bias->dim() != 1 || bias->numel() != shape.rows || bias->scalar_type() != type))
    return std::nullopt;
  const Words words(call, row_plan_size(shape) + indptr.numel());
  const std::optional<PlanView> plan = plan_of_arrays(call, shape, indices, indptr, words.data());
  if (!plan) return std::nullopt;
  const BsrView weight{*plan, call.elements("data", data), call.float_dtype("data", data), Device::cpu};
  const MatrixView in = call.matrix("x", x, "in_features", shape.cols);
  const void* offsets = call.bias(bias, shape.rows, in.dtype);
  Tensor y = call.empty_rows(x, shape.rows);
  check(call.op(),
        linear(in, weight, offsets, Activation::none, call.output(y, in, shape.rows), call.context()));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def("_arrays_product(Tensor x, Tensor data, Tensor indices, Tensor indptr, Tensor? bias) -> Tensor?");
}

// Of any tensor: it says itself what it does not know.
STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("_arrays_product", TORCH_BOX(&arrays_product));
}

}  // namespace rarefy::binding
