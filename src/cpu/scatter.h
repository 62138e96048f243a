// Input stationary: for stored blocks flatter than a register tile (1×16, or the transpose of 4×1).
// A few features of the reduction block stay in registers; each entry updates its output features
// in the y panel: per entry and output feature `vectors` loads and stores for
// inputs · vectors FMAs, so four inputs already hide them. Sums have the same parts as in gather.h.
#pragma once

#include "cpu/panel.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kEntriesAhead = 16;

// Blocks of more inputs than a tile: floats of Y that meet all of them, a few at a time, before others do: a
// third of L1. Beyond, each pass took them out of L2 again (32×1's grad_input at .5, Zen 5: 230 → 243
// GFLOP/s).
inline constexpr std::int64_t kUpdated = 4096;

template <class I, int Inputs, int Vectors>
void scatter_tile(const ScatterTask& task, const float* values, const std::int32_t* index,
                  const std::int32_t* perm, std::int32_t count, const float* x) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  const SparseOperand& w = task.w;
  Vec<I> xv[Inputs][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < Inputs; ++i) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) xv[i][v] = I::load(x + i * lanes + v * I::kWidth);
  }
  float* panel = task.y - task.y_first * w.out_block * lanes;
  const auto update = [&](std::int32_t e, const float* block) {
    float* y = panel + index[e] * w.out_block * lanes;
    for (std::int32_t o = 0; o < w.out_block; ++o, y += lanes, block += w.out_stride) {
      Vec<I> sum[Vectors];
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sum[v] = I::load(y + v * I::kWidth);
#pragma GCC unroll 16
      for (int i = 0; i < Inputs; ++i) {
        const Vec<I> wv = I::set1(block[i * w.red_stride]);
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) sum[v] = I::fma(wv, xv[i][v], sum[v]);
      }
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) I::store(y + v * I::kWidth, sum[v]);
    }
  };
  if (perm == nullptr) {
    for (std::int32_t e = 0; e < count; ++e, values += w.block_size) update(e, values);
    return;
  }
  // In transposed order blocks lie scattered in memory, where no hardware prefetcher finds them.
  std::int32_t e = 0;
  for (; e < count - kEntriesAhead; ++e) {
    __builtin_prefetch(values + perm[e + kEntriesAhead] * w.block_size);
    update(e, values + perm[e] * w.block_size);
  }
  for (; e < count; ++e) update(e, values + perm[e] * w.block_size);
}

template <class I, int Vectors>
void scatter_blocks(const ScatterTask& task) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  constexpr int budget = I::kRegisters - Vectors - 1;  // inputs beside the sums and one broadcast
  const SparseOperand& w = task.w;
  const float* x = task.x;
  const std::int64_t chunk = w.block_size < kUnpacked ? kUnpacked / w.block_size : 1;
  const std::int64_t size = w.out_block * lanes;
  const bool passes = w.red_block > 8;
  const std::int64_t near = size < kUpdated ? kUpdated / size : 1;
  for (std::int32_t j = task.begin; j < task.end; ++j, x += w.red_block * lanes) {
    const std::int32_t full = task.full_end != nullptr ? task.full_end[j] : 0;
    for (std::int32_t p = full != 0 ? task.full_begin[j] : 0; p < full; ++p) {
      const std::int64_t at = (task.parts[p].out - task.y_first) * size;
      add_total<I>(task.total + at, task.y + at, size, task.parts[p].first != 0);
      clear<I>(task.y + at, size);
    }
    std::int32_t e = task.entry_begin[j];
    const std::int32_t end = task.entry_end[j];
    while (e < end) {
      const auto* values = static_cast<const float*>(w.values);
      const std::int32_t* perm = w.perm != nullptr ? w.perm + e : nullptr;
      std::int32_t count = end - e;
      if (passes && count > near) count = static_cast<std::int32_t>(near);
      if (w.storage != Storage::f32) {
        count = count < chunk ? count : static_cast<std::int32_t>(chunk);
        unpack_entries<I>(w, e, count, task.unpacked);
        values = task.unpacked;
        perm = nullptr;
      } else if (perm == nullptr) {
        values += e * w.block_size;
      }
      std::int32_t left = w.red_block;
      const float* xi = x;
      const auto step = [&]<int Inputs>() {
        scatter_tile<I, Inputs, Vectors>(task, values, w.index + e, perm, count, xi);
        values += Inputs * w.red_stride;
        xi += Inputs * lanes;
      };
      if constexpr (8 * Vectors <= budget) {
        for (; left >= 8; left -= 8) step.template operator()<8>();
      }
      if constexpr (4 * Vectors <= budget) {
        for (; left >= 4; left -= 4) step.template operator()<4>();
      }
      for (; left >= 2; left -= 2) step.template operator()<2>();
      if (left == 1) step.template operator()<1>();
      e += count;
    }
  }
  for (std::int32_t o = 0; o < task.complete; ++o) {
    if (task.row[o + 1] - task.row[o] < task.part + least_entries(task.part)) continue;
    add_total<I>(task.y + o * size, task.total + o * size, size);
  }
}

template <class I>
void scatter(const ScatterTask& task) {
  dispatch_vectors(task.vectors, [&]<int Vectors>() { scatter_blocks<I, Vectors>(task); });
}

}  // namespace rarefy::cpu
