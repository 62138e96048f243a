// What this library was built with and would run, as JSON for Python's rarefy.backend_info() and explain().
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace rarefy::binding {

std::string backend_info_json(std::int64_t block_rows, std::int64_t block_cols, std::int64_t tokens);

// Every kernel for one problem: chosen, in which configuration, or why not. Names as the core prints them.
std::string explain_json(std::string_view op, std::int64_t out_features, std::int64_t in_features,
                         std::int64_t block_rows, std::int64_t block_cols, std::int64_t nnzb,
                         std::string_view values_dtype, std::string_view in_dtype, std::int64_t tokens,
                         bool bias, std::string_view activation, std::string_view device,
                         std::int64_t device_index, std::int64_t derived, std::int64_t in_stride,
                         bool by_feature);

// The same for a feed-forward network; a gate of no block rows is none.
std::string explain_feed_forward_json(std::int64_t out_features, std::int64_t hidden_features,
                                      std::int64_t in_features, std::int64_t up_rows, std::int64_t up_cols,
                                      std::int64_t up_nnzb, std::int64_t gate_rows, std::int64_t gate_cols,
                                      std::int64_t gate_nnzb, std::int64_t down_rows, std::int64_t down_cols,
                                      std::int64_t down_nnzb, std::string_view values_dtype,
                                      std::string_view in_dtype, std::int64_t tokens, bool bias,
                                      std::string_view activation, std::string_view device,
                                      std::int64_t device_index, std::int64_t derived);

// Narrows the choice of kernels, as RAREFY_FORCE_IMPL; returns what was forced before.
std::string force(std::string_view forced);

}  // namespace rarefy::binding
