// Output stationary: rows × vectors accumulators stay in registers while the entries of an output
// block stream by. Per reduction feature: `vectors` loads of X, `rows` broadcasts of W, and
// rows · vectors FMAs. X comes from L2: 128 / rows bytes a cycle at full rate on AVX-512.
#pragma once

#include "cpu/panel.h"

namespace rarefy::cpu {

// How the weights of one entry lie, as seen from a register tile of output features.
enum class Layout : std::uint8_t {
  column,      // R×1 by rows: contiguous, one reduction feature, entries in order
  row_major,   // by rows: the reduction is contiguous
  transposed,  // through the transposed index: the output is contiguous
};

inline constexpr std::int64_t kAhead = 512;  // floats

// Entries of one output block, values already float.
struct GatherRow {
  const float* values;  // of entry 0, output feature 0 of this tile
  std::int64_t block_size;
  std::int64_t stride;  // between output features (row_major) or reduction features (transposed)
  const std::int32_t* index;
  const std::int32_t* perm;
  std::int32_t count;
  const float* x;
  std::int32_t red_block;
  float* y;
  bool accumulate;
};

template <class I, Layout kLayout, int Rows, int Vectors>
void gather_tile(const GatherRow& row) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  Vec<I> sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      sum[r][v] = row.accumulate ? I::load(row.y + r * lanes + v * I::kWidth) : I::zero();
    }
  }
  const auto step = [&sum](const float* x, const float* w, std::int64_t stride) {
    Vec<I> xv[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) xv[v] = I::load(x + v * I::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec<I> wv = I::set1(w[r * stride]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sum[r][v] = I::fma(wv, xv[v], sum[r][v]);
    }
  };
  const std::int32_t* index = row.index;
  const std::int32_t* stop = index + row.count;
  const float* w = row.values;
  // Weights stream in from L3 or memory, and the hardware loses them between the rows of X: asking
  // for them kAhead floats early doubled the speed of a 33 MB weight.
  if constexpr (kLayout == Layout::column) {
    for (; index != stop; ++index, w += row.block_size) {
      __builtin_prefetch(w + kAhead);
      step(row.x + *index * lanes, w, 1);
    }
  } else {
    const std::int64_t ahead = row.block_size < kAhead ? kAhead / row.block_size : 1;
    for (std::int32_t e = 0; e < row.count; ++e) {
      w = row.values + (row.perm != nullptr ? row.perm[e] : e) * row.block_size;
      const float* next = w + ahead * row.block_size;
      if (row.perm != nullptr)
        next = row.values + row.perm[e + ahead < row.count ? e + ahead : e] * row.block_size;
      const float* x = row.x + index[e] * (row.red_block * lanes);
      const float* x_end = x + row.red_block * lanes;
      for (; x != x_end; x += lanes) {
        __builtin_prefetch(next);
        if constexpr (kLayout == Layout::row_major) {
          step(x, w, row.stride);
          ++w;
          next += Rows;
        } else {
          step(x, w, 1);
          w += row.stride;
          next += row.stride;
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) I::store(row.y + r * lanes + v * I::kWidth, sum[r][v]);
  }
}

// Cuts an output block into register tiles, tallest first.
template <class I, Layout kLayout, int Vectors>
void gather_block(GatherRow row, std::int32_t out_block) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  constexpr int budget = I::kRegisters - Vectors - 1;  // accumulators beside X and one broadcast
  const auto step = [&]<int Rows>() {
    gather_tile<I, kLayout, Rows, Vectors>(row);
    row.values += kLayout == Layout::row_major ? Rows * row.stride : Rows;
    row.y += Rows * lanes;
  };
  if constexpr (8 * Vectors <= budget) {
    for (; out_block >= 8; out_block -= 8) step.template operator()<8>();
  }
  if constexpr (4 * Vectors <= budget) {
    for (; out_block >= 4; out_block -= 4) step.template operator()<4>();
  }
  for (; out_block >= 2; out_block -= 2) step.template operator()<2>();
  if (out_block == 1) step.template operator()<1>();
}

template <class I, Layout kLayout, int Vectors>
void gather_blocks(const GatherTask& task) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  const SparseOperand& w = task.w;
  const float* x = task.x - task.x_first * (w.red_block * lanes);
  const std::int64_t stride = kLayout == Layout::row_major ? w.out_stride : w.red_stride;
  GatherRow row{nullptr, w.block_size, stride, nullptr, nullptr, 0, x, w.red_block, task.y, task.accumulate};
  const std::int64_t chunk = w.block_size < kUnpacked ? kUnpacked / w.block_size : 1;
  for (std::int32_t o = task.begin; o < task.end; ++o, row.y += w.out_block * lanes) {
    const std::int32_t begin = task.entry_begin[o];
    const std::int32_t end = task.entry_end[o];
    if (w.storage == Storage::f32) {
      const auto* values = static_cast<const float*>(w.values);
      row.values = w.perm != nullptr ? values : values + begin * w.block_size;
      row.perm = w.perm != nullptr ? w.perm + begin : nullptr;
      row.index = w.index + begin;
      row.count = end - begin;
      gather_block<I, kLayout, Vectors>(row, w.out_block);
      continue;
    }
    // 16-bit values: a chunk of entries becomes float in L1; one pass at least, to write y.
    row.perm = nullptr;
    row.values = task.unpacked;
    row.accumulate = task.accumulate;
    std::int32_t e = begin;
    do {
      row.count = end - e < chunk ? end - e : static_cast<std::int32_t>(chunk);
      const auto* values = static_cast<const std::uint16_t*>(w.values);
      if (w.perm == nullptr) {
        unpack<I>(w.storage, values + e * w.block_size, row.count * w.block_size, task.unpacked);
      } else {
        for (std::int32_t i = 0; i < row.count; ++i) {
          unpack<I>(w.storage, values + w.perm[e + i] * w.block_size, w.block_size,
                    task.unpacked + i * w.block_size);
        }
      }
      row.index = w.index + e;
      gather_block<I, kLayout, Vectors>(row, w.out_block);
      row.accumulate = true;
      e += row.count;
    } while (e < end);
  }
}

template <class I, Layout kLayout>
void gather_vectors(const GatherTask& task) {
  switch (task.vectors) {
    case 1: return gather_blocks<I, kLayout, 1>(task);
    case 2: return gather_blocks<I, kLayout, 2>(task);
    case 3: return gather_blocks<I, kLayout, 3>(task);
    case 4: return gather_blocks<I, kLayout, 4>(task);
    default: return;
  }
}

template <class I>
void gather(const GatherTask& task) {
  const SparseOperand& w = task.w;
  if (w.red_block == 1 && w.out_stride == 1 && w.perm == nullptr)
    return gather_vectors<I, Layout::column>(task);
  if (w.red_stride == 1) return gather_vectors<I, Layout::row_major>(task);
  return gather_vectors<I, Layout::transposed>(task);
}

}  // namespace rarefy::cpu
