// A few tokens by blocks of 8 columns or whole vectors of them, on processors that shuffle beside their
// products. A quarter of a vector of W (128 bits) is four columns of one row. Four tokens: each of the four
// columns in turn is spread over its quarter, where it meets the four tokens' x of it, so that one vector
// holds the sums of one vector of W for all tokens, and all 16 rows of a block are read in one pass. Eight
// tokens: the same with two such vectors. One and two tokens: four vectors of W are turned, 4 × 4 in each
// quarter, and meet a column of x in each quarter. Each sum takes the same products in the same order: bits
// do not depend on the batch.
#pragma once

#include <algorithm>

#include "cpu/asked.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

// Bytes of W under way, from caches and from memory (bf16 16×16 there, one and 4 tokens: 1.10, 1.27 ms by 6
// KB, .97, 1.00 by 14, which are 6 % slower from an L3). Entries whose sums stay in
// registers: vectors of a row, and elements that L1 keeps where rows take several passes. How many of these
// parts go onto y together, and up to how many rows of sums they are kept for.
inline constexpr std::int64_t kTurnedAhead = 6144, kTurnedFar = 14336;
// … and so many of them are asked for behind one branch (one line each: 32×32, four tokens, .105 → .115 ms).
inline constexpr std::int64_t kTurnedAsked = 256;
inline constexpr std::int64_t kTurnedPart = 16, kTurnedChunk = 4 << 10;
inline constexpr std::int32_t kTurnedParts = 8;
inline constexpr std::int64_t kTurnedSums = 64;

// Some entries of one block row.
struct TurnedRow {
  const char* values;
  const std::int32_t* index;
  std::int32_t count;
  std::int64_t columns;  // of a block
  std::int64_t block_size;
  const float* x;
  std::int64_t x_stride;
  float* y;
  std::int64_t y_stride;
  const char* ahead;
  float* total;      // of the parts before
  bool fresh, last;  // no parts before; sums go onto y
  Ask ask;
};

// As many independent sums as hide a product's latency, for any number of tokens.
constexpr int turned_sets(std::int64_t slices) { return slices >= 16 ? 1 : slices >= 8 ? 2 : 4; }

// Slices first … first + Slices of each entry: rows of blocks with whole vectors, else vectors. kQuarters of
// a vector are of one row; kVectors: of a row, 0 for any number.
template <class I, Storage kStorage, int kQuarters, int kVectors, int Slices, int Sets, int Tokens>
void turned_slices(TurnedRow& row, int first) {
  static_assert(I::kWidth == 16 && Slices % 4 == 0);
  constexpr int w = I::kWidth;
  constexpr int kFours = Tokens / 4;
  constexpr bool kAll = kFours > 0;  // tokens side by side
  constexpr std::int64_t kBytes = bytes_of(kStorage);
  constexpr int kSums = kAll ? Slices * kFours : Slices / 4 * Tokens;
  constexpr int kColumns = std::max(kVectors, 1);
  constexpr int kApart = kAll ? kFours : Tokens;  // vectors of x for a column
  const std::int64_t slice = kVectors == 0 ? row.columns : kColumns * w;
  const std::int64_t step = row.block_size * kBytes;
  const char* values = row.values + first * slice * kBytes;
  const char* ahead = row.ahead;
  const Ask ask = row.ask;
  Vec<I> sum[Sets][kSums];
#pragma GCC unroll 4
  for (auto& set : sum) {
#pragma GCC unroll 16
    for (Vec<I>& v : set) v = I::zero();
  }
  const auto vector = [&](int s, std::uint64_t c) {
    return load_as<I>(kStorage, values + (s * slice + static_cast<std::int64_t>(c)) * kBytes, 0);
  };
  // Column i of each quarter.
  const auto columns_of_x = [](Vec<I> v, Vec<I>(&to)[4]) {
    to[0] = I::template one_of_four<0>(v);
    to[1] = I::template one_of_four<1>(v);
    to[2] = I::template one_of_four<2>(v);
    to[3] = I::template one_of_four<3>(v);
  };
  constexpr std::int64_t kAtOnce = Slices * kColumns * w * kBytes;
  const auto ask_at = [&](int s, int i) __attribute__((always_inline)) {
    constexpr std::int64_t kPiece = std::min(kAtOnce, kTurnedAsked);
    const std::int64_t at = (s * kColumns + i) * w * kBytes;
    if (at % kPiece == 0) ask_for<lines_of(kPiece)>(ask, ahead + at);
  };
  const auto add = [&](auto& to, std::int32_t e) {
    const auto block = static_cast<std::uint32_t>(row.index[e]);
    const std::uint64_t column = kQuarters < 4  ? std::uint64_t{block} * (kQuarters * 4)
                                 : kVectors > 0 ? std::uint64_t{block} * (kColumns * w)
                                                : block * static_cast<std::uint64_t>(row.columns);
    const auto columns = [&](std::uint64_t c) {
      Vec<I> x[kColumns][kApart][4];
#pragma GCC unroll 2
      for (int i = 0; i < kColumns; ++i) {
        const std::uint64_t at = column + c + static_cast<std::uint64_t>(i) * w;
        if constexpr (kAll) {  // see turn
          const float* from = row.x + (kQuarters == 4 ? at * 4 : at / w * (4 * w) + at % w);
#pragma GCC unroll 2
          for (int h = 0; h < kFours; ++h, from += row.x_stride) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) x[i][h][j] = I::template repeat_any<kQuarters * 4>(from + j * w);
          }
        } else {
#pragma GCC unroll 2
          for (int m = 0; m < Tokens; ++m) {
            columns_of_x(I::template repeat_any<kQuarters * 4>(row.x + m * row.x_stride + at), x[i][m]);
          }
        }
      }
      if constexpr (kAll) {
#pragma GCC unroll 16
        for (int s = 0; s < Slices; ++s) {
#pragma GCC unroll 2
          for (int i = 0; i < kColumns; ++i) {
            ask_at(s, i);
            Vec<I> v[4];
            columns_of_x(vector(s, c + i * w), v);
#pragma GCC unroll 2
            for (int h = 0; h < kFours; ++h) {
              Vec<I>& of = to[s * kFours + h];
#pragma GCC unroll 4
              for (int j = 0; j < 4; ++j) of = I::fma(v[j], x[i][h][j], of);
            }
          }
        }
      } else {
#pragma GCC unroll 8
        for (int s = 0; s < Slices; s += 4) {
#pragma GCC unroll 2
          for (int i = 0; i < kColumns; ++i) {
            Vec<I> v[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
              ask_at(s + r, i);
              v[r] = vector(s + r, c + i * w);
            }
            I::transpose_quads(v);
#pragma GCC unroll 2
            for (int m = 0; m < Tokens; ++m) {
              Vec<I>& of = to[s / 4 * Tokens + m];
#pragma GCC unroll 4
              for (int j = 0; j < 4; ++j) of = I::fma(v[j], x[i][m][j], of);
            }
          }
        }
      }
      ahead += kAtOnce;
    };
    if constexpr (kVectors > 0) {
      columns(0);
    } else {
      for (std::int64_t c = 0; c < row.columns; c += w) columns(static_cast<std::uint64_t>(c));
    }
    values += step;
  };
  std::int32_t e = 0;
  for (; e + Sets <= row.count; e += Sets) {
#pragma GCC unroll 4
    for (int i = 0; i < Sets; ++i) add(sum[i], e + i);
  }
  for (; e < row.count; ++e) add(sum[0], e);
  row.ahead = ahead;
  float* total = row.total + (kAll ? first * kFours : first / 4 * Tokens) * w;
  Vec<I>(&all)[kSums] = sum[0];
#pragma GCC unroll 16
  for (int s = 0; s < kSums; ++s) {
    if constexpr (Sets >= 2) all[s] = I::add(all[s], sum[1][s]);
    if constexpr (Sets == 4) all[s] = I::add(all[s], I::add(sum[2][s], sum[3][s]));
    if (!row.fresh) all[s] = I::add(I::load(total + s * w), all[s]);
  }
  if (!row.last) {
#pragma GCC unroll 16
    for (int s = 0; s < kSums; ++s) I::store(total + s * w, all[s]);
    return;
  }
  constexpr int kRows = 4 / kQuarters;  // of a slice
#pragma GCC unroll 8
  for (int s = 0; s < Slices; s += 4) {
    float* y = row.y + (first + s) * kRows;
    if constexpr (kAll) {
#pragma GCC unroll 2
      for (int h = 0; h < kFours; ++h, y += 4 * row.y_stride) {
        const auto of = [&](int i) { return all[(s + i) * kFours + h]; };
        Vec<I> v[4] = {of(0), of(1), of(2), of(3)};
        I::transpose_quads(v);
#pragma GCC unroll 4
        for (int m = 0; m < 4; ++m) I::template add_quarters<kQuarters>(v[m], y + m * row.y_stride);
      }
    } else {
#pragma GCC unroll 2
      for (int m = 0; m < Tokens; ++m) {
        I::template add_quarters<kQuarters>(all[s / 4 * Tokens + m], y + m * row.y_stride);
      }
    }
  }
}

template <class I, Storage kStorage, int kQuarters, int kVectors, int Sets, int Tokens>
void turned_rows_of(const FewTask& task, int slices) {
  const SparseOperand& w = task.w;
  TurnedRow row{};
  row.columns = w.red_block;
  row.block_size = w.block_size;
  row.x = task.x;
  row.x_stride = task.x_stride;
  row.y = task.y;
  row.y_stride = task.y_stride;
  alignas(64) float total[std::max(1, Tokens / 4) * kTurnedSums * I::kWidth];
  row.total = total;
  constexpr int kMost =
      Tokens == 1 && Sets == 1 ? 32 : 16 / Sets / std::max(1, Tokens / 4);  // slices of a pass
  const bool once = slices <= kMost;
  row.ask = task.ask;
  const std::int64_t ahead = task.ask == Ask::near ? kTurnedAhead : kTurnedFar;
  const std::int64_t block = w.block_size * bytes_of(kStorage);
  const std::int64_t vectors = kQuarters == 4 ? w.red_block / I::kWidth : 1;
  const std::int64_t fit =
      std::min(kTurnedPart / std::min(vectors, kTurnedPart), kTurnedChunk / w.block_size);
  const auto part = static_cast<std::int32_t>(Sets * std::max<std::int64_t>(fit, 1));
  const std::int32_t most = slices <= kTurnedSums ? kTurnedParts * part : part;
  for (std::int32_t o = task.begin; o < task.end; ++o, row.y += w.out_block) {
    const std::int32_t end = task.entry_begin[o + 1];
    for (std::int32_t e = task.entry_begin[o]; e < end;) {
      const std::int32_t stop = end - e < most ? end : e + most;
      for (row.fresh = true; e < stop; row.fresh = false, e += row.count) {
        row.index = w.index + e;
        row.count = stop - e < part ? stop - e : part;
        row.last = e + row.count == stop;
        row.values = static_cast<const char*>(w.values) + e * block;
        row.ahead = row.values + (once ? ahead : row.count * block);
        int s = 0;
        const auto step = [&]<int Slices>() {
          for (; s + Slices <= slices; s += Slices) {
            turned_slices<I, kStorage, kQuarters, kVectors, Slices, Sets, Tokens>(row, s);
          }
        };
        if constexpr (kMost >= 32) step.template operator()<32>();
        if constexpr (kMost >= 16) step.template operator()<16>();
        if constexpr (kMost >= 8) step.template operator()<8>();
        step.template operator()<4>();
      }
    }
  }
}

template <class I, Storage kStorage, int kQuarters, int kVectors, int Tokens>
void turned_rows(const FewTask& task) {
  const std::int64_t slices = task.w.block_size / (kQuarters == 4 ? task.w.red_block : I::kWidth);
  const auto rows = [&]<int Sets>() {
    turned_rows_of<I, kStorage, kQuarters, kVectors, Sets, Tokens>(task, static_cast<int>(slices));
  };
  switch (turned_sets(slices)) {
    case 1: return rows.template operator()<1>();
    case 2: return rows.template operator()<2>();
    default: break;
  }
  if constexpr (Tokens != 8) rows.template operator()<4>();
}

template <class I, Storage kStorage, int Tokens>
void turned_tokens(const FewTask& task) {
  switch (task.w.red_block) {
    case 8: return turned_rows<I, kStorage, 2, 1, Tokens>(task);
    case 16: return turned_rows<I, kStorage, 4, 1, Tokens>(task);
    case 32:
      if constexpr (Tokens == 1 || Tokens == 4) return turned_rows<I, kStorage, 4, 2, Tokens>(task);
      break;
    default: break;
  }
  turned_rows<I, kStorage, 4, 0, Tokens>(task);
}

template <class I, Storage kStorage>
void few_turned(const FewTask& task) {
  switch (task.tokens) {
    case 1: return turned_tokens<I, kStorage, 1>(task);
    case 2: return turned_tokens<I, kStorage, 2>(task);
    case 4: return turned_tokens<I, kStorage, 4>(task);
    default: return;
  }
}

// x of four tokens for few_turned: of each 16 columns, column i of every quarter, [i][quarter][token].
// Static, as two units have it for the same I.
template <class I>
static void turn(const float* x, std::int64_t stride, std::int64_t columns, float* to) {
  for (std::int64_t k = 0; k < columns; k += I::kWidth, to += 4 * I::kWidth) {
    Vec<I> v[4];
    for (int m = 0; m < 4; ++m) {
      const float* from = x + m * stride + k;
      v[m] = columns - k < I::kWidth ? I::load_first(from, static_cast<int>(columns - k)) : I::load(from);
    }
    I::transpose_quads(v);
    for (int i = 0; i < 4; ++i) I::store(to + i * I::kWidth, v[i]);
  }
}

}  // namespace rarefy::cpu
