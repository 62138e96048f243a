// The input gradient of tall vectors: dX = dY W for blocks of one column, values in place. Two kernels:
// * dense (tall_spread_kernel.cuh): of 64 columns of W next to each other nearly always one stores something
//   in every 16 rows, so nothing is left out; zeros are put between what is stored on its way to the tensor
//   cores. What they made of an Inf or a NaN is repaired.
// * without the zeros (tall_scatter_kernel.cuh): sums lie in shared memory, and of each block row only those
//   columns that it stores are multiplied and added to them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/product.h"

namespace rarefy::sm90 {

struct TallInputConfig {
  bool scatter = false;             // without the zeros
  int tokens = 256, columns = 128;  // of a tile
  int slots = 4;                    // of 64 outputs of dY and W, in flight

  int slot_bytes() const { return (tokens + (scatter ? 64 : 128)) * 128; }
  int other_bytes() const { return 1024 + (scatter ? columns * tokens * 4 : 2 * 2 * 8192); }
  int shared_bytes() const { return other_bytes() + slots * slot_bytes(); }
  std::string text() const {
    return std::string(scatter ? "scatter=1" : "scatter=0") + " tokens=" + std::to_string(tokens) +
           " columns=" + std::to_string(columns) + " slots=" + std::to_string(slots);
  }
};

struct TallInputCandidate {
  TallInputConfig config;
  double microseconds = 0;  // predicted; what candidates are compared by
  std::string reason;       // why not; empty if it can run
};

// `problem`: grad_input of W in tall blocks; x is dY and y is dX. Why no configuration can run it.
std::string tall_input_unsupported(const Product& problem);
std::vector<TallInputCandidate> tall_input_candidates(const Product& problem, int sms, int shared_bytes);
TallInputCandidate tall_input_best(const Product& problem, int sms, int shared_bytes);
bool valid(const Product& problem, const TallInputConfig& config, int shared_bytes = 227 * 1024);

// What is prepared, for any configuration and number of tokens: of 32 columns and each block row where they
// begin in values, and which of them are stored.
std::int64_t tall_input_words(const Product& problem);
cudaError_t prepare_tall_input(const Product& problem, const std::int32_t* crow, const std::int32_t* col,
                               std::int32_t* words, cudaStream_t stream);

struct TallInputOperands {  // device pointers, 16-byte aligned
  const void *dy = nullptr, *values = nullptr;
  void* dx = nullptr;
  const std::int32_t* col = nullptr;
  StatedProduct stated;  // of W by column; with other values than these, which are packed of them
  const std::int32_t* prepared = nullptr;
};

// Queues one kernel.
cudaError_t launch_tall_input(const Product& problem, const TallInputConfig& config, int sms,
                              const TallInputOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
