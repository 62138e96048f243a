// Input stationary: for stored blocks flatter than a register tile (1×16, or the transpose of 4×1).
// A few features of the reduction block stay in registers; each entry updates its output features
// in the y panel: per entry and output feature `vectors` loads and stores for
// inputs · vectors FMAs, so four inputs already hide them. Sums have the same parts as in gather.h.
#pragma once

#include "cpu/asked.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kEntriesAhead = 16;

// Blocks of more inputs than a tile: floats of Y that meet all of them, a few at a time, before others do: a
// third of L1. Beyond, each pass took them out of L2 again (32×1's grad_input at .5, Zen 5: 230 → 243
// GFLOP/s).
inline constexpr std::int64_t kUpdated = 4096;

// kFlat: entries are single output features, whose inputs lie side by side. Strides that are known here leave
// one address in the loop: grad_input of 32×1 and 4×1 at 0.5 took 4 and 10 % longer (Zen 5).
template <class I, int Inputs, int Vectors, bool kFlat>
void scatter_tile(const ScatterTask& task, const float* values, const std::int32_t* index,
                  const std::int32_t* perm, std::int32_t count, const float* x) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  const SparseOperand& w = task.w;
  const std::int32_t outputs = kFlat ? 1 : w.out_block;
  const std::int64_t out_stride = w.out_stride, block_size = w.block_size;
  const std::int64_t stride = kFlat ? 1 : w.red_stride;
  Vec<I> xv[Inputs][Vectors];
#pragma GCC unroll 16
  for (int i = 0; i < Inputs; ++i) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) xv[i][v] = I::load(x + i * lanes + v * I::kWidth);
  }
  float* panel = task.y - task.y_first * outputs * lanes;
  // kAtOnce of them side by side: products of one feature of x that do not wait for each other.
  const auto add = [&]<int kAtOnce>(float* const(&y)[kAtOnce], const float* const(&block)[kAtOnce]) {
    Vec<I> sum[kAtOnce][Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 4
      for (int t = 0; t < kAtOnce; ++t) sum[t][v] = I::load(y[t] + v * I::kWidth);
    }
#pragma GCC unroll 16
    for (int i = 0; i < Inputs; ++i) {
      Vec<I> wv[kAtOnce];
#pragma GCC unroll 4
      for (int t = 0; t < kAtOnce; ++t) wv[t] = I::set1(block[t][i * stride]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 4
        for (int t = 0; t < kAtOnce; ++t) sum[t][v] = I::fma(wv[t], xv[i][v], sum[t][v]);
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 4
      for (int t = 0; t < kAtOnce; ++t) I::store(y[t] + v * I::kWidth, sum[t][v]);
    }
  };
  const auto update = [&](std::int32_t e, const float* block) {
    float* y = panel + index[e] * outputs * lanes;
    if constexpr (kFlat) return add({y}, {block});
    for (std::int32_t o = 0; o < outputs; ++o, y += lanes, block += out_stride) add({y}, {block});
  };
  if (perm == nullptr) {
    std::int32_t e = 0;
    if constexpr (kFlat && (Inputs + 2) * Vectors + 2 <= I::kRegisters) {  // 3 % of 32×1 on Zen 5
      for (; e + 2 <= count; e += 2, values += 2 * block_size) {
        add({panel + index[e] * lanes, panel + index[e + 1] * lanes}, {values, values + block_size});
      }
    }
    for (; e < count; ++e, values += block_size) update(e, values);
    return;
  }
  // In transposed order blocks lie scattered in memory, where no hardware prefetcher finds them.
  std::int32_t e = 0;
  for (; e < count - kEntriesAhead; ++e) {
    __builtin_prefetch(values + perm[e + kEntriesAhead] * block_size);
    update(e, values + perm[e] * block_size);
  }
  for (; e < count; ++e) update(e, values + perm[e] * block_size);
}

// Adds y to the total, and begins another part. kVectors: of y, if known.
template <class I, int kVectors>
void end_part(float* total, float* y, std::int64_t size, bool first) {
  const std::int64_t vectors = kVectors != 0 ? kVectors : size / I::kWidth;
#pragma GCC unroll 4
  for (std::int64_t v = 0; v < vectors; ++v, total += I::kWidth, y += I::kWidth) {
    const Vec<I> sum = I::load(y);
    I::store(total, first ? sum : I::add(sum, I::load(total)));
    I::store(y, I::zero());
  }
}

// How often `step` of scatter_blocks is called.
template <class I>
std::int64_t scatter_steps(const ScatterTask& task, std::int64_t most) {
  std::int64_t chunks = 0;
  for (std::int32_t j = task.begin; j < task.end; ++j) {
    chunks += (task.entry_end[j] - task.entry_begin[j] + most - 1) / most;
  }
  return chunks * ((task.w.red_block + 7) / 8);
}

template <class I, int Vectors, bool kFlat>
void scatter_blocks(const ScatterTask& task) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  constexpr int budget = I::kRegisters - Vectors - 1;  // inputs beside the sums and one broadcast
  const SparseOperand& w = task.w;
  const float* x = task.x;
  const std::int64_t chunk = w.block_size < kUnpacked ? kUnpacked / w.block_size : 1;
  const std::int64_t size = w.out_block * lanes;
  const bool passes = w.red_block > 8;
  const std::int64_t near = size < kUpdated ? kUpdated / size : 1;
  Asked<I> next(task.next, scatter_steps<I>(task, passes ? near : INT32_MAX));
  for (std::int32_t j = task.begin; j < task.end; ++j, x += w.red_block * lanes) {
    const std::int32_t full = task.full_end != nullptr ? task.full_end[j] : 0;
    for (std::int32_t p = full != 0 ? task.full_begin[j] : 0; p < full; ++p) {
      const std::int64_t at = (task.parts[p].out - task.y_first) * size;
      end_part<I, kFlat ? Vectors : 0>(task.total + at, task.y + at, size, task.parts[p].first != 0);
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
        next.few();
        scatter_tile<I, Inputs, Vectors, kFlat>(task, values, w.index + e, perm, count, xi);
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
  const bool flat = task.w.out_block == 1 && task.w.red_stride == 1;
  dispatch_vectors(task.vectors, [&]<int Vectors>() {
    if (flat) return scatter_blocks<I, Vectors, true>(task);
    scatter_blocks<I, Vectors, false>(task);
  });
}

}  // namespace rarefy::cpu
