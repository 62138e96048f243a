// What kernels derive from a weight (rarefy/linear.h), as tensors of bytes that Python's weights and patterns
// hold: ops that make them, and the view that a call takes of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "adapt.h"

namespace rarefy::binding {

// The optional arguments of the products; `key` 0 with no tensors is nothing.
struct DerivedTensors {
  const std::optional<Tensor>& prepared;
  const std::optional<Tensor>& packed;
  std::int64_t key = 0;
};

// As a product takes it. Empty if `values` are no longer those that were packed. Null: the op has none.
Derived view_derived(const Call& call, const DerivedTensors& tensors, const BsrView* weight);

// Key, and bytes to prepare and to pack; key 0: the best kernel wants nothing. For inputs of `dtype`.
std::tuple<std::int64_t, std::int64_t, std::int64_t> derived_sizes(std::string_view op, const Tensor& values,
                                                                   const Tensor& plan,
                                                                   std::int64_t out_features,
                                                                   std::int64_t in_features,
                                                                   ScalarType dtype);
Tensor prepare(std::string_view op, const Tensor& values, const Tensor& plan, std::int64_t out_features,
               std::int64_t in_features, ScalarType dtype);
Tensor pack(std::string_view op, const Tensor& values, const Tensor& plan,
            const std::optional<Tensor>& prepared, std::int64_t out_features, std::int64_t in_features,
            ScalarType dtype);

}  // namespace rarefy::binding
