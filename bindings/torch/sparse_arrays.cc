// Ops that read scipy's arrays: the product of a call that checks and uses them, their plan, and whether a
// plan is of arrays that come again.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "adapt.h"
#include "rarefy/linear.h"

namespace rarefy::binding {

namespace {

bool is_float(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half ||
         type == ScalarType::Double;
}

using Sizes = std::vector<std::int64_t>;  // N, K, R, C

// Words of this call, in memory that the thread keeps where there are few: a plan in fresh pages took as long
// as its product with 8 tokens (768→3072 at 0.1, Ice Lake: 400 of 1,150 us).
constexpr std::int64_t kKeptWords = 4 << 20;

class Words {
 public:
  Words(const Call& call, std::int64_t count) : count_(static_cast<std::size_t>(count)) {
    thread_local Tensor kept = call.empty_words(0);
    Tensor& owner = count <= kKeptWords ? kept : own_;
    if (&owner == &own_ || owner.numel() < count) owner = call.empty_words(count);
    data_ = static_cast<std::int32_t*>(owner.mutable_data_ptr());
  }
  std::span<std::int32_t> all() const { return {data_, count_}; }

 private:
  Tensor own_;  // of many
  std::size_t count_;
  std::int32_t* data_;
};

bool is_contiguous_on_host(const Tensor& t) {
  return t.layout() == torch::headeronly::Layout::Strided && t.is_cpu() && t.is_contiguous();
}

bool is_index(const Tensor& t) {
  return is_contiguous_on_host(t) && t.dim() == 1 &&
         (t.scalar_type() == ScalarType::Int || t.scalar_type() == ScalarType::Long);
}

// f(a span of the tensor's integers), int32 or int64.
template <class F>
auto with_indices(const Tensor& t, F&& f) {
  const auto count = static_cast<std::size_t>(t.numel());
  if (t.scalar_type() == ScalarType::Long) {
    return f(std::span{static_cast<const std::int64_t*>(t.data_ptr()), count});
  }
  return f(std::span{static_cast<const std::int32_t*>(t.data_ptr()), count});
}

// Makes the plan of arrays, or says that they do not ascend or are not valid.
bool make_plan(const Call& call, const BsrShape& shape, const Tensor& indices, const Tensor& indptr,
               std::span<std::int32_t> plan) {
  const auto make = [&](std::span<const std::int32_t> rows) {
    return with_indices(indices, [&](auto columns) {
      return build_row_plan(call.op(), shape, rows, columns, plan, call.context().executor).ok();
    });
  };
  return with_indices(indptr, [&](auto rows) {
    if constexpr (sizeof(rows[0]) == sizeof(std::int32_t)) {
      return make(rows);
    } else {
      const auto valid = [&](std::int64_t at) { return 0 <= at && at <= shape.nnzb; };
      return std::ranges::all_of(rows, valid) && make(std::vector<std::int32_t>(rows.begin(), rows.end()));
    }
  });
}

// Their row plan; an empty tensor where they do not ascend or are not valid: who asks looks closer.
Tensor row_plan(const Tensor& indptr, const Tensor& indices, const Sizes& sizes) {
  const Call call("bsr_plan", "crow_indices", indptr);
  call.check_device("col_indices", indices);
  Tensor none = call.empty_words(0);
  if (sizes.size() != 4 || !is_index(indptr) || !is_index(indices)) return none;
  const BsrShape shape{sizes[0], sizes[1], sizes[2], sizes[3], indices.numel()};
  if (!check_shape(call.op(), shape).ok()) return none;
  Tensor plan = call.empty_words(row_plan_size(shape));
  const std::span<std::int32_t> words{static_cast<std::int32_t*>(plan.mutable_data_ptr()),
                                      static_cast<std::size_t>(plan.numel())};
  return make_plan(call, shape, indices, indptr, words) ? plan : none;
}

// Whether a row plan was made of these arrays: their elements are compared.
bool row_plan_is_of(const Tensor& plan, const Tensor& indices, const Tensor& indptr) {
  const Call call("sparse_dense", "plan", plan);
  if (!is_index(indptr) || !is_index(indices)) return false;
  const PlanView view = call.row_plan(plan);
  const Executor& executor = call.context().executor;
  const auto equals = [&](std::int64_t count, const std::int32_t* kept) {
    return [=, &executor](auto given) {
      return std::ssize(given) == count &&
             equal_indices({kept, static_cast<std::size_t>(count)}, given, executor);
    };
  };
  return with_indices(indptr, equals(view.shape.row_count() + 1, view.crow)) &&
         with_indices(indices, equals(view.shape.nnzb, view.col));
}

// x Wᵀ + bias of W in scipy's arrays, which are read, checked and used in this call; nothing where they are
// of another kind, for which there are other ways, or words. For eager calls.
std::optional<Tensor> arrays_product(Tensor x, const Tensor& data, const Tensor& indices,
                                     const Tensor& indptr, const std::optional<Tensor>& bias) {
  const ScalarType type = x.scalar_type();
  if (x.layout() != torch::headeronly::Layout::Strided || !x.is_cpu() || x.dim() == 0 ||
      !is_contiguous_on_host(data) || (data.dim() != 1 && data.dim() != 3) || data.scalar_type() != type ||
      !is_float(type) || !is_index(indices) || !is_index(indptr) || indptr.numel() == 0 ||
      data.size(0) != indices.numel()) {
    return std::nullopt;
  }
  const Call call("sparse_dense", "data", data);
  const std::int64_t r = data.dim() == 3 ? data.size(1) : 1, c = data.dim() == 3 ? data.size(2) : 1;
  const BsrShape shape{(indptr.numel() - 1) * r, x.size(-1), r, c, indices.numel()};
  if (!check_shape(call.op(), shape).ok() || shape.cols % c != 0) return std::nullopt;
  if (bias && (!is_contiguous_on_host(*bias) || bias->dim() != 1 || bias->numel() != shape.rows ||
               bias->scalar_type() != type))
    return std::nullopt;
  const Words words(call, row_plan_size(shape));
  if (!make_plan(call, shape, indices, indptr, words.all())) return std::nullopt;
  const BsrView weight{value_of(call.op(), view_row_plan(call.op(), shape, words.all())),
                       call.elements("data", data), call.float_dtype("data", data), Device::cpu};
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
  m.def("_row_plan(Tensor crow_indices, Tensor col_indices, int[] sizes) -> Tensor");
  m.def("_row_plan_is_of(Tensor plan, Tensor indices, Tensor indptr) -> bool");
}

// Of any tensor: it says itself what it does not know.
STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("_arrays_product", TORCH_BOX(&arrays_product));
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CPU, m) {
  m.impl("_row_plan", TORCH_BOX(&row_plan));
  m.impl("_row_plan_is_of", TORCH_BOX(&row_plan_is_of));
}

}  // namespace rarefy::binding
