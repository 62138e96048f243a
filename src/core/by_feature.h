// X by token copied by feature, for kernels of CUDA that read it so.
#pragma once

#include <cstdint>
#include <string_view>

#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

// Elements from one feature of such a copy to the next: whole tiles of the kernels.
constexpr std::int64_t by_feature_stride(std::int64_t tokens) { return (tokens + 63) / 64 * 64; }

// to[feature][token] = x[token][feature] in device memory, at the speed of a copy on Hopper (other GPUs are
// refused). x is of 16 bits, by token, in pieces of 16 bytes: aligned, and with rows of multiples of them. Of
// each feature by_feature_stride elements are written.
Status copy_by_feature(std::string_view op, const MatrixView& x, void* to, void* stream);

}  // namespace rarefy
