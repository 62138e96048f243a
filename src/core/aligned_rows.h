// Products of matrices whose rows begin anywhere, by kernels that read and write 16 bytes at a time: of
// copies with aligned rows, in workspace. (By feature: lines of a feature instead of rows.)
#pragma once

#include <cstdint>

#include "core/registry.h"

namespace rarefy {

// Whether it has rows that such kernels cannot take as they are: distances or addresses that are no multiple
// of 16 bytes, rows that overlap, or an output whose rows end within 16 bytes, which those kernels write all
// of. On a GPU.
bool wants_aligned_rows(const Problem& problem);

// The same product of the copies.
Problem with_aligned_rows(const Problem& problem);

std::int64_t aligned_rows_bytes(const Problem& problem);   // of the copies: a multiple of 256
double aligned_rows_microseconds(const Problem& problem);  // to make them, on an H200

// Makes the copies at the beginning of the workspace; the call is that of with_aligned_rows then.
Status align_rows(Call& call);

// Behind it: what the kernel wrote goes where the caller wants it.
Status return_rows(const Call& call, const MutableMatrixView& out);

}  // namespace rarefy
