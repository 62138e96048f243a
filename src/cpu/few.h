// A few tokens: reading W is all the work, so lanes lie along the stored blocks, as they are in memory,
// and X is spread to match. Slices of a block row (vectors of its blocks) keep their sums in registers
// while the entries stream by; the sums are folded into output features once at the end.
#pragma once

#include "cpu/few_singles.h"

namespace rarefy::cpu {

// How X meets a vector of W.
enum class Spread : std::uint8_t {
  whole,   // C is a multiple of the width: a vector of one row of the block, and as many of X
  repeat,  // C = N divides the width: N elements of X, once for each row of the block in the vector
  group,   // R × C = Size divides the width: several entries, and each one's C = N elements of X for all its
           // rows
};

// Some entries of one block row.
struct FewRow {
  const char* values;
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

// Sums in three levels, so that their errors are no larger than those of a dense product, which has as many
// lanes for one output as a block of 16×1 has outputs: so many vectors of W make a part, in registers; so
// many of these are added up beside it; and what comes of that, onto y. Whole vectors have the lanes.
inline constexpr std::int32_t kFewPart = 16, kFewParts = 8;

// Adds slices first … first + Slices of every entry to y.
template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Slices, int Tokens>
void few_slices(const FewRow& row, int first) {
  constexpr int w = I::kWidth;
  constexpr int entries = kSpread == Spread::group ? w / Size : 1;  // of a vector
  constexpr bool kParts = kSpread != Spread::whole;
  Vec<I> sum[Slices][Tokens];
  std::int64_t offset[Slices];
  const auto each = [&](auto f) {
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) f(s, m);
    }
  };
  for (int s = 0; s < Slices; ++s) offset[s] = static_cast<std::int64_t>(first + s) * w % row.red_block;
  constexpr std::int64_t kBytes = bytes_of(kStorage);
  const char* values = row.values + static_cast<std::int64_t>(first) * w * kBytes;
  const std::int32_t whole = row.count - row.count % entries;
  alignas(64) float total[Slices][Tokens][w];  // of the parts before
  each([&](int s, int m) {
    sum[s][m] = I::zero();
    if (kParts) I::store(total[s][m], I::zero());
  });
  std::int32_t e = 0;
  for (;;) {
    constexpr std::int32_t kFull = kFewPart * entries;
    const std::int32_t stop = kParts && whole - e > kFull ? e + kFull : whole;
    for (; e != stop; e += entries, values += entries * row.block_size * kBytes) {
      const float* x = row.x + static_cast<std::int64_t>(row.index[e]) * row.red_block;
      Vec<I> xv[Tokens];
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) {
        if constexpr (kSpread == Spread::repeat) xv[m] = I::template repeat<N>(x + m * row.x_stride);
        if constexpr (kSpread == Spread::group)
          xv[m] = I::template group<Size, N>(row.x + m * row.x_stride, row.index + e);
      }
#pragma GCC unroll 16
      for (int s = 0; s < Slices; ++s) {
        const Vec<I> wv = load_as<I>(kStorage, values, s * w);
        // A pass over some slices of each block is no stream that the hardware follows.
        if constexpr (Slices > 1) __builtin_prefetch(values + (s * w + kFewAhead * row.block_size) * kBytes);
#pragma GCC unroll 16
        for (int m = 0; m < Tokens; ++m) {
          if constexpr (kSpread == Spread::whole) xv[m] = I::load(x + m * row.x_stride + offset[s]);
          sum[s][m] = I::fma(wv, xv[m], sum[s][m]);
        }
      }
    }
    if (!kParts || stop == whole) break;
    each([&](int s, int m) {
      I::store(total[s][m], I::add(I::load(total[s][m]), sum[s][m]));
      sum[s][m] = I::zero();
    });
  }
  if constexpr (kSpread == Spread::group) {  // the rest is less than a group: 0 beside it, on both sides
    const std::int32_t rest = row.count - e;
    if (rest > 0) {
      const Vec<I> wv = load_part<I>(kStorage, values, 0, rest * Size);
      for (int m = 0; m < Tokens; ++m) {
        float spread[w] = {};
        for (int i = 0; i < rest * Size; ++i) {
          spread[i] = row.x[m * row.x_stride + row.index[e + i / Size] * std::int64_t{N} + i % N];
        }
        sum[0][m] = I::fma(wv, I::load(spread), sum[0][m]);
      }
    }
  }
  if (kParts) each([&](int s, int m) { sum[s][m] = I::add(I::load(total[s][m]), sum[s][m]); });
  for (int m = 0; m < Tokens; ++m) {
    float* y = row.y + m * row.y_stride;
    for (int s = 0; s < Slices; ++s) {
      if constexpr (kSpread == Spread::whole) {
        y[static_cast<std::int64_t>(first + s) * w / row.red_block] += I::sum(sum[s][m]);
      } else if constexpr (kSpread == Spread::repeat && N == 1) {
        float* to = y + static_cast<std::int64_t>(first + s) * w;
        I::store(to, I::add(I::load(to), sum[s][m]));
      } else {
        float lane[w];
        I::store(lane, sum[s][m]);
        constexpr int rows = kSpread == Spread::group ? 0 : w / N;  // of a slice
        for (int i = 0; i < w; ++i)
          y[(first + s) * rows + i % (kSpread == Spread::group ? Size : w) / N] += lane[i];
      }
    }
  }
}

// All slices of a block row, as many at a time as leave sums in registers.
template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Tokens>
void few_row(const FewRow& row) {
  const auto slices = kSpread == Spread::group ? 1 : static_cast<int>(row.block_size / I::kWidth);
  int s = 0;
  const auto step = [&]<int Slices>() {
    for (; s + Slices <= slices; s += Slices)
      few_slices<I, kStorage, kSpread, Size, N, Slices, Tokens>(row, s);
  };
  constexpr int most = kSpread == Spread::group ? 1 : I::kRegisters / 2 / Tokens;
  if constexpr (most >= 16) step.template operator()<16>();
  if constexpr (most >= 8) step.template operator()<8>();
  if constexpr (most >= 4) step.template operator()<4>();
  if constexpr (most >= 2) step.template operator()<2>();
  step.template operator()<1>();
}

template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Tokens>
void few_rows(const FewTask& task) {
  const SparseOperand& w = task.w;
  FewRow row{};
  row.red_block = w.red_block;
  row.block_size = w.block_size;
  row.x = task.x;
  row.x_stride = task.x_stride;
  row.y = task.y;
  row.y_stride = task.y_stride;
  constexpr std::int32_t most =
      kSpread == Spread::whole ? kPartTerms
                               : kFewParts * kFewPart * (kSpread == Spread::group ? I::kWidth / Size : 1);
  for (std::int32_t o = task.begin; o < task.end; ++o, row.y += w.out_block) {
    const std::int32_t end = task.entry_begin[o + 1];
    for (std::int32_t e = task.entry_begin[o]; e < end; e += row.count) {
      row.index = w.index + e;
      row.count = end - e < most ? end - e : most;
      row.values = static_cast<const char*>(w.values) + e * w.block_size * bytes_of(kStorage);
      few_row<I, kStorage, kSpread, Size, N, Tokens>(row);
    }
  }
}

// Blocks that fill no vector alone: several at a time.
template <class I, Storage kStorage, int Size, int Tokens>
void few_groups(const FewTask& task) {
  switch (task.w.red_block) {
    case 1: return few_rows<I, kStorage, Spread::group, Size, 1, Tokens>(task);
    case 2:
      if constexpr (Size >= 2) return few_rows<I, kStorage, Spread::group, Size, 2, Tokens>(task);
      break;
    case 4:
      if constexpr (Size >= 4) return few_rows<I, kStorage, Spread::group, Size, 4, Tokens>(task);
      break;
    case 8:
      if constexpr (Size >= 8) return few_rows<I, kStorage, Spread::group, Size, 8, Tokens>(task);
      break;
    default: break;
  }
}

template <class I, Storage kStorage, int Tokens>
void few_tokens(const FewTask& task) {
  switch (task.w.block_size) {
    case 1: return few_singles<I, kStorage, Tokens>(task);
    case 2: return few_groups<I, kStorage, 2, Tokens>(task);
    case 4: return few_groups<I, kStorage, 4, Tokens>(task);
    case 8:
      if constexpr (I::kWidth > 8) return few_groups<I, kStorage, 8, Tokens>(task);
      break;
    default: break;
  }
  switch (task.w.red_block) {
    case 1: return few_rows<I, kStorage, Spread::repeat, 0, 1, Tokens>(task);
    case 2: return few_rows<I, kStorage, Spread::repeat, 0, 2, Tokens>(task);
    case 4: return few_rows<I, kStorage, Spread::repeat, 0, 4, Tokens>(task);
    case 8:
      if constexpr (I::kWidth > 8) return few_rows<I, kStorage, Spread::repeat, 0, 8, Tokens>(task);
      break;
    default: break;
  }
  return few_rows<I, kStorage, Spread::whole, 0, 0, Tokens>(task);
}

template <class I, Storage kStorage>
void few_of(const FewTask& task) {
  switch (task.tokens) {
    case 1: return few_tokens<I, kStorage, 1>(task);
    case 2: return few_tokens<I, kStorage, 2>(task);
    case 4: return few_tokens<I, kStorage, 4>(task);
    default: return;
  }
}

template <class I>
void few(const FewTask& task) {
  dispatch_storage(task.w.storage, [&]<Storage kStorage>() { few_of<I, kStorage>(task); });
}

// Whether every vector of W is of one of the kinds above.
template <class I>
bool few_takes(std::int64_t block_rows, std::int64_t block_cols) {
  constexpr int w = I::kWidth;
  const std::int64_t size = block_rows * block_cols;
  if (size < w) return w % size == 0;
  return size % w == 0 && (block_cols % w == 0 || w % block_cols == 0);
}

}  // namespace rarefy::cpu
