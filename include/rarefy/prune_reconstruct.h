// Layer-wise reconstruction: a layer's weights W (N, K) lose units, and those that stay make up for them, so
// that X Wᵀ changes least on calibration inputs X. All that is known of X is H = XᵀX + λI; everything is in
// double.
#pragma once

#include <cstdint>

#include "rarefy/prune.h"

namespace rarefy {

// Row-major, without gaps: weight (N, K), changed in place; the others (K, K).
struct Reconstruction {
  double* weight = nullptr;
  std::int64_t rows = 0, cols = 0;
  PruneUnits units;
  std::int64_t remove = 0;       // units that leave, as for prune_mask
  std::uint8_t* mask = nullptr;  // rows × mask_row_bytes(cols): written; read by the functions that say so
};

// One sweep over the columns (Frantar & Alistarh 2023). In each panel of `panel` columns, rounded up to whole
// blocks, the units of least error leave, the same part of each panel (N:M: as each group is reached); then
// every column's error goes to the columns on its right. `factor` is the upper U with H⁻¹ = UᵀU. With fixed =
// true the mask is given and only the errors are passed on.
// With levels > 0, and a mask that is given, what stays is rounded to multiples of its row's largest |w| /
// levels when its column is reached, and that error is passed on, too (Frantar et al. 2023, GPTQ). The
// largest weight of a row keeps its size, so that rounding the result again, by rows, changes nothing.
RAREFY_API Status sparse_gpt(const Reconstruction& problem, const double* factor, std::int64_t panel,
                             bool fixed, std::int64_t levels, const Executor& executor);

// The best weights on the mask that is given: for every row the least squares solution, by the smaller of two
// systems, that of what stays (H) or of what leaves (H⁻¹). Rows of the same mask share its factorization.
RAREFY_API Status least_squares(const Reconstruction& problem, const double* hessian, const double* inverse,
                                const Executor& executor);

// Optimal brain surgeon for blocks: from each block row `remove` blocks leave, in `steps` rounds, those whose
// leaving costs least, and after each the rest is solved for again (Hassibi & Stork 1993; Frantar & Alistarh
// 2022). Each block row works on a copy of H⁻¹ of its own. Units must be counted in each row, without N:M.
RAREFY_API Status block_obs(const Reconstruction& problem, const double* inverse, std::int64_t steps,
                            const Executor& executor);

// The same without a number: every block leaves, in `steps` rounds, and costs[i · ⌈K/C⌉ + j] is what block
// (i, j) cost when it did. In a block row costs rise strictly in the order of leaving: any number of blocks
// of least cost, over the whole layer, is a choice that OBS made, and least_squares has its weights. The
// weight is not changed, and the mask not written.
RAREFY_API Status block_obs_costs(const Reconstruction& problem, const double* inverse, std::int64_t steps,
                                  double* costs, const Executor& executor);

}  // namespace rarefy
