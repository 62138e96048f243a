// Between torch's tensors and the core's views: checks, errors, plans, threads and stream.
// Only the libtorch stable ABI is used, so one binary serves every torch from 2.10 on.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "rarefy/status.h"

namespace rarefy::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// torch turns std::invalid_argument into ValueError. No standard exception becomes TypeError, so
// this one arrives as IndexError, which means nothing else here and python/rarefy/ops.py renames.
struct TypeMismatch : std::out_of_range {
  using std::out_of_range::out_of_range;
};

// Throws what Python shows for `status`, which is not ok. The text starts with [op] whatever part
// of the core it comes from.
[[noreturn]] void raise(std::string_view op, const Status& status);

inline void check(std::string_view op, const Status& status) {
  if (!status.ok()) raise(op, status);
}

template <class T>
T value_of(std::string_view op, Result<T> result) {
  if (!result.ok()) raise(op, result.status());
  return std::move(result).value();
}

// One call of an op: its name for messages, and the device of the named tensor, made current for the
// time of the call; the other tensors must be there too.
class Call {
 public:
  Call(std::string_view op, std::string_view argument, const Tensor& tensor);

  std::string_view op() const { return op_; }
  Device device() const { return device_; }
  int device_index() const { return device_index_; }
  // Threads, stream, and working memory from torch's allocator, which lives as long as this object.
  Context context(bool tf32 = false) const;

  // The core's dtype of an argument; TypeMismatch unless it is a float the kernels know.
  DType float_dtype(std::string_view argument, const Tensor& tensor) const;
  DType any_dtype(std::string_view argument, ScalarType type) const;  // the same of a dtype
  void check_device(std::string_view argument, const Tensor& tensor) const;
  // Its elements, which a tensor whose storage was freed does not have.
  void* elements(std::string_view argument, const Tensor& tensor) const;
  // The one rule of dtypes: values have that of x, or under 32 and 16 bits are bfloat16 or float16.
  void check_stored(DType stored, std::string_view other, DType dtype) const;
  DType stored_dtype(const std::optional<ScalarType>& asked, std::string_view other, DType dtype) const;
  void check_dtype(std::string_view argument, const Tensor& tensor, std::string_view other,
                   DType dtype) const;

  void check_rows(const MatrixView& x, const MatrixView& grad_output) const;

  // "none", "relu", "gelu", "gelu_tanh", "silu", as torch calls them.
  Activation activation(std::string_view name) const;

  // A tensor of any leading dimensions as a matrix whose rows are `columns` long. `tensor` is
  // replaced by a contiguous copy when its rows are not evenly spaced or not contiguous. But one by feature
  // (x.t() of a (features, tokens) tensor) is read in place if what multiplies it is said, and is a kernel
  // that would get the copy too: then a copy saves nothing.
  struct Product {  // linear or, with dy, grad_weight
    const BsrShape& shape;
    DType stored;
    std::int64_t derived;  // at hand for it
    const MatrixView* dy = nullptr;
  };
  MatrixView matrix(std::string_view argument, Tensor& tensor, std::string_view columns_name,
                    std::int64_t columns, const Product* product = nullptr) const;

  // What kernels read of a pattern, after a check in O(1) that `plan` is one for this shape (on CUDA:
  // that its length is). The second takes the number of blocks from the plan's length. Where `part` is rows
  // a row plan will do, on the CPU.
  enum class Part { whole, rows };
  PlanView plan(const Tensor& plan, const BsrShape& shape, Part part = Part::whole) const;
  PlanView plan(const Tensor& plan, std::int64_t out_features, std::int64_t in_features,
                std::int64_t block_rows, std::int64_t block_cols) const;
  // Of a plan on the CPU, a row plan or a whole one, which says itself how many blocks there are.
  PlanView row_plan(const Tensor& plan, BsrShape shape) const;
  PlanView row_plan(const Tensor& plan) const;  // the whole shape
  BsrView weight(const Tensor& values, const Tensor& plan, std::int64_t out_features,
                 std::int64_t in_features, Part part = Part::whole) const;
  BsrView weight(const Tensor& values, const PlanView& pattern) const;
  // Of a row plan, which says the shape, and of values of any dimensions.
  BsrView rows_weight(const Tensor& values, const Tensor& plan) const;
  const void* bias(const std::optional<Tensor>& bias, std::int64_t out_features, DType dtype) const;

  Tensor empty_rows(const Tensor& like, std::int64_t columns) const;  // like.shape[:-1] + (columns,)
  Tensor empty_values(const BsrShape& shape, ScalarType dtype) const;
  Tensor empty_elements(std::int64_t count, ScalarType dtype) const;  // (count,)
  Tensor empty_matrix(std::int64_t rows, std::int64_t columns, ScalarType dtype) const;
  // A copy of x, a matrix of `like`, with the shape of that and the other layout (core/by_feature.h).
  Tensor turned(const MatrixView& x, const Tensor& like) const;
  Tensor empty_bytes(std::int64_t count) const;                           // (count,) of uint8
  Tensor empty_bytes(std::int64_t rows, std::int64_t columns) const;      // uint8
  Tensor empty_words(std::int64_t count) const;                           // (count,) of int32
  Tensor nothing(const Tensor& like) const;                               // (0,)
  Tensor sum_rows(const Tensor& tensor, const MatrixView& matrix) const;  // of tensor as a matrix: (columns,)
  MutableMatrixView output(const Tensor& tensor, const MatrixView& rows_of, std::int64_t columns) const;

  Tensor build_plan(const BsrShape& shape, const Tensor& crow, const Tensor& col) const;

 private:
  PlanView view(std::span<const std::int32_t> plan, const BsrShape& shape, Part part) const;
  Tensor empty(std::span<const std::int64_t> sizes, std::int32_t dtype) const;
  static void* provide_workspace(void* call, std::int64_t bytes);
  bool reads_in_place(const MatrixView& x, const Product& product) const;

  std::string_view op_;
  Device device_;
  std::int32_t device_index_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  mutable std::optional<Tensor> workspace_;
};

// A weight of int8 values with scales, checked; x is rounded, too, if it is `dynamic` (int8.cc).
BsrView scaled_weight(const Call& call, const Tensor& values, const Tensor& scales, const Tensor& plan,
                      std::int64_t out_features, std::int64_t in_features, bool dynamic);

}  // namespace rarefy::binding
