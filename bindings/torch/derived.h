// What kernels derive from a weight (rarefy/linear.h), as tensors of bytes that Python's weights and patterns
// hold: ops that make them, and the view that a call takes of them.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "adapt.h"

namespace rarefy::binding {

// The optional arguments of the products; `key` 0 with no tensors is nothing.
struct DerivedTensors {
  std::optional<Tensor> prepared;
  std::optional<Tensor> packed;
  std::int64_t key = 0;
};

// Whether the caller allows tf32: what it holds was made for that.
bool allows_tf32(const Call& call, std::int64_t key, const PlanView& plan, DType in, DType stored);

// As a product takes it: linear both, grad_input both if its own was packed, grad_weight what its kernel
// derives from the pattern. Empty if the values are no longer those that were packed. `weight` may be null
// for the weight's gradient, of `stored`. `tokens` of linear: a few find what was derived for them; 0 where
// they do not matter.
Derived view_derived(const Call& call, const DerivedTensors& tensors, Op op, const PlanView& plan, DType in,
                     const BsrView* weight, DType stored, std::int64_t tokens = 0);

// Key, and bytes to prepare for all products, to pack for linear, and for linear and grad_input (0: that
// packs nothing); key 0: linear's best kernel wants nothing. For inputs of `dtype`, which calls with `tf32`
// may round; with a few `tokens`, of CSR on the CPU, what calls with so many use alone.
using HeldSizes = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
HeldSizes derived_sizes(const Call& call, const BsrView& weight, ScalarType dtype, bool tf32 = false,
                        std::int64_t tokens = 0);
// Whether calls with so few tokens use packed values as well.
bool packs_for_few(const Call& call, const BsrView& weight, ScalarType dtype, std::int64_t tokens);
// Empty if the weight has a row plan and a gradient's kernel wants a whole one.
Tensor prepare(const Call& call, const BsrView& weight, ScalarType dtype, bool tf32 = false,
               std::int64_t tokens = 0);
// For linear, and, with `gradient`, for grad_input behind it.
Tensor pack(const Call& call, const BsrView& weight, const std::optional<Tensor>& prepared, ScalarType dtype,
            bool tf32 = false, std::int64_t tokens = 0, bool gradient = false);

}  // namespace rarefy::binding
