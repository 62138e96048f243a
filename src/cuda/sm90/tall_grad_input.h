// The input gradient of tall vectors: dX = dY W for blocks of one column. Of 64 columns of W next to each
// other nearly always one stores something in every 16 rows, so nothing can be left out: Wᵀ is packed whole,
// with zeros, and multiplied by the strip kernel (strips.h), at the speed of a dense product, with the repair
// of what zeros made of an Inf or a NaN.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/sm90/strips.h"

namespace rarefy::sm90 {

// dX as linear of Wᵀ in blocks, all of which are there. `problem`: grad_input of W in tall blocks.
StripProblem dense_problem(const Product& problem);

std::string tall_grad_input_unsupported(const Product& problem);

// What is prepared: the index of those blocks, and the strip kernel's plan. Of sizes alone.
std::int64_t tall_grad_input_words(const Product& problem, int sms);
const std::int32_t* strip_plan_of(const Product& problem, const std::int32_t* words);
cudaError_t prepare_tall_grad_input(const Product& problem, int sms, std::int32_t* words,
                                    cudaStream_t stream);

// Wᵀ in blocks. Queues the kernel that packs it; `index`: of W by column.
std::int64_t tall_grad_input_packed_bytes(const Product& problem);
cudaError_t pack_tall_grad_input(const Product& problem, const ProductIndex& index, const void* values,
                                 void* packed, cudaStream_t stream);

}  // namespace rarefy::sm90
