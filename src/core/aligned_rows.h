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

// The same product of the copies; where they would take more than 512 MB, that of some tokens at a time.
Problem with_aligned_rows(const Problem& problem);

std::int64_t aligned_rows_bytes(const Problem& problem);  // of the copies: a multiple of 256
// What all takes on an H200 where the kernel takes `microseconds` for with_aligned_rows.
double aligned_rows_microseconds(const Problem& problem, double microseconds);

// Copies, runs and copies back. `call` is that of with_aligned_rows but for its matrices, which are the
// caller's, as `problem` has them; `copies`: aligned_rows_bytes of memory.
Status run_aligned(const Kernel& kernel, const Call& call, const Problem& problem, void* copies);

}  // namespace rarefy
