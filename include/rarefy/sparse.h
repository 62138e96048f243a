// Beyond the products of a layer, on the host: transposes, both operands sparse, softmax over what is stored,
// integers. Plans are whole ones or row plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "rarefy/activation.h"
#include "rarefy/executor.h"
#include "rarefy/export.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "rarefy/status.h"

namespace rarefy {

// A B, (M, N) in blocks R × C, before it has a place: A is (M, K) in blocks R × S, B (K, N) in S × C, all of
// one floating-point dtype; or of integers of `integers` bytes, 1, 2, 4 or 8, modulo 2^(8 bytes), whatever
// dtype the views say. It stores what may differ from zero, also where sums cancel.
struct SparseProduct {
  // Some rows one after the other: the columns, and the values where blocks are single elements.
  struct Piece {
    std::vector<std::int32_t> col;
    std::vector<std::byte> values;
  };
  BsrShape shape;
  std::vector<std::int32_t> crow;
  std::vector<Piece> pieces;
};
RAREFY_API Result<SparseProduct> sparse_product(std::string_view op, const BsrView& a, const BsrView& b,
                                                const Executor& executor = {}, int integers = 0);

// The row plan of a product of a and b, row_plan_size(product.shape) words, and its values, (nnzb, R, C).
RAREFY_API Status write_product(std::string_view op, const BsrView& a, const BsrView& b,
                                const SparseProduct& product, std::span<std::int32_t> row_plan, void* values,
                                const Executor& executor = {}, int integers = 0);

// The blocks of A B that `pattern` stores, (nnzb, R, C); padding gets 0. Dtypes as above; sums in double for
// f64, else in float, in the order of A's columns.
RAREFY_API Status sampled_product(std::string_view op, const BsrView& a, const BsrView& b,
                                  const PlanView& pattern, void* values, const Executor& executor = {},
                                  int integers = 0);

// Wᵀ: its row plan, in row_plan_size words of the transposed shape, and its values, blocks (C, R) of elements
// of `bytes` 1, 2, 4 or 8. A whole plan has the order of the blocks, of a row plan they are sorted; stable.
RAREFY_API Status transpose(std::string_view op, const PlanView& plan, const void* values, int bytes,
                            std::span<std::int32_t> row_plan, void* out, const Executor& executor = {});

// exp(v − max) / Σ exp(v − max) over the elements that a row stores; padding gets 0. −∞ counts as not
// stored; a row of nothing else is zero.
RAREFY_API Status stored_softmax(std::string_view op, const BsrView& w, void* values,
                                 const Executor& executor = {});

// Of the softmax `p`: p (g − Σ g p), with the sum over the row.
RAREFY_API Status stored_softmax_gradient(std::string_view op, const BsrView& p, const void* gradient,
                                          void* values, const Executor& executor = {});

// Y = X Wᵀ + b in integers of `bytes` 1, 2, 4 or 8, modulo 2^(8 bytes) as C's unsigned ones; ReLU or nothing.
// X is (tokens, K) and Y (tokens, N), by rows without gaps; values are whole blocks.
RAREFY_API Status integer_linear(std::string_view op, int bytes, const void* x, std::int64_t tokens,
                                 const PlanView& plan, const void* values, const void* bias,
                                 Activation activation, void* y, const Executor& executor = {});

// The blocks of X Yᵀ that `plan` stores, (nnzb, R, C), in such integers; padding gets 0. X is (N, depth) and
// Y (K, depth), by rows without gaps.
RAREFY_API Status integer_sampled(std::string_view op, int bytes, const void* x, const void* y,
                                  std::int64_t depth, const PlanView& plan, void* values,
                                  const Executor& executor = {});

}  // namespace rarefy
