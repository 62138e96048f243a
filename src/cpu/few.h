// A few tokens: reading W is all the work, so lanes lie along the stored blocks, as they are in memory,
// and X is spread to match. Slices of a block row (vectors of its blocks) keep their sums in registers
// while the entries stream by; the sums are folded into output features once at the end.
#pragma once

#include "cpu/panel.h"

namespace rarefy::cpu {

// How X meets a vector of W.
enum class Spread : std::uint8_t {
  whole,   // C is a multiple of the width: a vector of one row of the block, and as many of X
  repeat,  // C = N divides the width: N elements of X, once for each row of the block in the vector
  group,  // N × 1 blocks, N divides the width: several entries, and each one's element of X for all its rows
};

// The entries of one block row, values already float.
struct FewRow {
  const float* values;
  const std::int32_t* index;
  std::int32_t count;
  std::int32_t red_block;
  std::int64_t block_size;
  const float* x;  // token-major
  std::int64_t x_stride;
  float* y;
  std::int64_t y_stride;
};

inline constexpr std::int64_t kFewAhead = 4;  // blocks

// Adds slices first … first + Slices of every entry to y.
template <class I, Spread kSpread, int N, int Slices, int Tokens>
void few_slices(const FewRow& row, int first) {
  constexpr int w = I::kWidth;
  constexpr int entries = kSpread == Spread::group ? w / N : 1;  // of a vector
  Vec<I> sum[Slices][Tokens];
  std::int64_t offset[Slices];
#pragma GCC unroll 16
  for (int s = 0; s < Slices; ++s) {
    offset[s] = static_cast<std::int64_t>(first + s) * w % row.red_block;
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m) sum[s][m] = I::zero();
  }
  const float* values = row.values + static_cast<std::int64_t>(first) * w;
  std::int32_t e = 0;
  for (; e + entries <= row.count; e += entries, values += entries * row.block_size) {
    const float* x = row.x + static_cast<std::int64_t>(row.index[e]) * row.red_block;
    Vec<I> xv[Tokens];
#pragma GCC unroll 16
    for (int m = 0; m < Tokens; ++m) {
      if constexpr (kSpread == Spread::repeat) xv[m] = I::template repeat<N>(x + m * row.x_stride);
      if constexpr (kSpread == Spread::group)
        xv[m] = I::template group<N>(row.x + m * row.x_stride, row.index + e);
    }
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
      const Vec<I> wv = I::load(values + s * w);
      // A pass over some slices of each block is no stream that the hardware follows.
      if constexpr (Slices > 1) __builtin_prefetch(values + s * w + kFewAhead * row.block_size);
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) {
        if constexpr (kSpread == Spread::whole) xv[m] = I::load(x + m * row.x_stride + offset[s]);
        sum[s][m] = I::fma(wv, xv[m], sum[s][m]);
      }
    }
  }
  if constexpr (kSpread == Spread::group) {  // the rest is less than a group: 0 beside it, on both sides
    const std::int32_t rest = row.count - e;
    if (rest > 0) {
      const Vec<I> wv = load_part<I>(Storage::f32, values, 0, rest * N);
      for (int m = 0; m < Tokens; ++m) {
        float spread[w] = {};
        for (int i = 0; i < rest * N; ++i) spread[i] = row.x[m * row.x_stride + row.index[e + i / N]];
        sum[0][m] = I::fma(wv, I::load(spread), sum[0][m]);
      }
    }
  }
  for (int m = 0; m < Tokens; ++m) {
    float* y = row.y + m * row.y_stride;
    for (int s = 0; s < Slices; ++s) {
      if constexpr (kSpread == Spread::whole) {
        y[static_cast<std::int64_t>(first + s) * w / row.red_block] += I::sum(sum[s][m]);
      } else {
        float lane[w];
        I::store(lane, sum[s][m]);
        constexpr int rows = kSpread == Spread::group ? N : w / N;
        for (int i = 0; i < w; ++i) {
          y[(first + s) * rows + (kSpread == Spread::group ? i % N : i / N)] += lane[i];
        }
      }
    }
  }
}

// All slices of a block row, as many at a time as leave sums in registers.
template <class I, Spread kSpread, int N, int Tokens>
void few_row(const FewRow& row) {
  if constexpr (kSpread == Spread::group) {
    few_slices<I, kSpread, N, 1, Tokens>(row, 0);
  } else {
    const auto slices = static_cast<int>(row.block_size / I::kWidth);
    int s = 0;
    constexpr int most = I::kRegisters / 2 / Tokens;
    if constexpr (most >= 16) {
      for (; s + 16 <= slices; s += 16) few_slices<I, kSpread, N, 16, Tokens>(row, s);
    }
    if constexpr (most >= 8) {
      for (; s + 8 <= slices; s += 8) few_slices<I, kSpread, N, 8, Tokens>(row, s);
    }
    if constexpr (most >= 4) {
      for (; s + 4 <= slices; s += 4) few_slices<I, kSpread, N, 4, Tokens>(row, s);
    }
    for (; s < slices; ++s) few_slices<I, kSpread, N, 1, Tokens>(row, s);
  }
}

template <class I, Spread kSpread, int N, int Tokens>
void few_rows(const FewTask& task) {
  const SparseOperand& w = task.w;
  FewRow row{};
  row.red_block = w.red_block;
  row.block_size = w.block_size;
  row.x = task.x;
  row.x_stride = task.x_stride;
  row.y = task.y;
  row.y_stride = task.y_stride;
  const std::int64_t chunk = w.block_size < kUnpacked ? kUnpacked / w.block_size : 1;
  constexpr std::int32_t part = kPartTerms * (kSpread == Spread::group ? I::kWidth / N : 1);  // of a lane
  for (std::int32_t o = task.begin; o < task.end; ++o, row.y += w.out_block) {
    const std::int32_t end = task.entry_begin[o + 1];
    std::int32_t e = task.entry_begin[o];
    for (; e < end; e += row.count) {
      row.index = w.index + e;
      if (w.storage == Storage::f32) {
        row.values = static_cast<const float*>(w.values) + e * w.block_size;
        row.count = end - e < part ? end - e : part;
        few_row<I, kSpread, N, Tokens>(row);
        continue;
      }
      row.values = task.unpacked;
      row.count = end - e < chunk ? end - e : static_cast<std::int32_t>(chunk);
      unpack<I>(w.storage, static_cast<const std::uint16_t*>(w.values) + e * w.block_size,
                row.count * w.block_size, task.unpacked);
      few_row<I, kSpread, N, Tokens>(row);
    }
  }
}

template <class I, int Tokens>
void few_tokens(const FewTask& task) {
  const std::int32_t rows = task.w.out_block;
  const std::int32_t cols = task.w.red_block;
  if (cols == 1 && rows < I::kWidth) {
    if (rows == 1) return few_rows<I, Spread::group, 1, Tokens>(task);
    if (rows == 4) return few_rows<I, Spread::group, 4, Tokens>(task);
    if constexpr (I::kWidth > 8) return few_rows<I, Spread::group, 8, Tokens>(task);
  }
  switch (cols) {
    case 1: return few_rows<I, Spread::repeat, 1, Tokens>(task);
    case 2: return few_rows<I, Spread::repeat, 2, Tokens>(task);
    case 4: return few_rows<I, Spread::repeat, 4, Tokens>(task);
    default: break;
  }
  if constexpr (I::kWidth > 8) {
    if (cols == 8) return few_rows<I, Spread::repeat, 8, Tokens>(task);
  }
  return few_rows<I, Spread::whole, 0, Tokens>(task);
}

template <class I>
void few(const FewTask& task) {
  switch (task.tokens) {
    case 1: return few_tokens<I, 1>(task);
    case 2: return few_tokens<I, 2>(task);
    case 4: return few_tokens<I, 4>(task);
    default: return;
  }
}

// Whether every vector of W is of one of the kinds above.
template <class I>
bool few_takes(std::int64_t block_rows, std::int64_t block_cols) {
  constexpr int w = I::kWidth;
  if (block_cols == 1 && block_rows < w) return block_rows == 1 || block_rows == 4 || block_rows == 8;
  const bool repeats = block_cols < w && w % block_cols == 0;
  return (repeats || block_cols % w == 0) && block_rows * block_cols % w == 0;
}

}  // namespace rarefy::cpu
