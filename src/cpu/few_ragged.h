// A few tokens of blocks whose rows are no whole vectors: row by row of a block, each as whole vectors and
// one more, whose lanes behind the row's end are 0 on both sides. Several rows share what is read of X.
#pragma once

#include <algorithm>

#include "cpu/few_parts.h"
#include "cpu/panel.h"

namespace rarefy::cpu {

// So many entries are added up apart, then onto y: no lane has more terms than one of a dense product.
inline constexpr std::int32_t kRaggedPart = 64;

// Rows of so few have several sets of sums, entries in turn, as an FMA takes four cycles: the same for any
// number of tokens.
constexpr int ragged_sets(std::int64_t block_rows) { return block_rows == 1 ? 4 : block_rows < 8 ? 2 : 1; }

// Some entries of one block row.
struct RaggedRow {
  const char* values;
  const std::int32_t* index;
  std::int32_t count;
  std::int64_t cols, block_size;
  const float* x;  // token-major
  std::int64_t x_stride;
  float* y;
  std::int64_t y_stride;
  Ask ask;
  std::int64_t ahead;  // bytes of W
  std::int32_t last;   // the entries from which nothing behind a row may be read
};

// Rows first … first + Rows of each entry's block, onto y.
template <class I, Storage kStorage, int Rows, int Sets, int Tokens>
void ragged_rows(const RaggedRow& t, std::int64_t first) {
  constexpr int w = I::kWidth;
  constexpr std::int64_t kBytes = bytes_of(kStorage);
  const std::int64_t whole = t.cols - t.cols % w;
  const auto rest = static_cast<int>(t.cols - whole);
  Vec<I> sum[Sets][Rows][Tokens];
  for (auto& set : sum) {
#pragma GCC unroll 8
    for (auto& row : set) {
#pragma GCC unroll 4
      for (Vec<I>& v : row) v = I::zero();
    }
  }
  const char* values = t.values + first * t.cols * kBytes;
  const auto add = [&](auto& to, std::int32_t e) {
    const float* x = t.x + t.index[e] * t.cols;
    const char* block = values + e * t.block_size * kBytes;
    ask_for<1>(t.ask, block + t.ahead);
    const auto column = [&](std::int64_t c, auto of_x, auto of_w) {
      Vec<I> xv[Tokens];
#pragma GCC unroll 4
      for (int m = 0; m < Tokens; ++m) xv[m] = of_x(x + m * t.x_stride + c);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const Vec<I> wv = of_w(block + (r * t.cols + c) * kBytes);
#pragma GCC unroll 4
        for (int m = 0; m < Tokens; ++m) to[r][m] = I::fma(wv, xv[m], to[r][m]);
      }
    };
    for (std::int64_t c = 0; c < whole; c += w) {
      column(c, I::load, [](const char* p) { return load_as<I>(kStorage, p, 0); });
    }
    column(
        whole, [&](const float* p) { return I::load_first(p, rest); },
        [&](const char* p) {
          if constexpr (kStorage == Storage::f32) {
            return I::load_first(reinterpret_cast<const float*>(p), rest);
          } else {
            return e >= t.last ? load_part<I>(kStorage, p, 0, rest)
                               : I::first(load_as<I>(kStorage, p, 0), rest);
          }
        });
  };
  std::int32_t e = 0;
  for (; e + Sets <= t.count; e += Sets) {
#pragma GCC unroll 4
    for (int i = 0; i < Sets; ++i) add(sum[i], e + i);
  }
  for (; e < t.count; ++e) add(sum[0], e);
  const auto all_sets = [&](int r, int m) {
    if (r >= Rows) return I::zero();
    Vec<I> v = sum[0][r][m];
    if constexpr (Sets >= 2) v = I::add(v, sum[1][r][m]);
    if constexpr (Sets == 4) v = I::add(v, I::add(sum[2][r][m], sum[3][r][m]));
    return v;
  };
#pragma GCC unroll 4
  for (int m = 0; m < Tokens; ++m) {
#pragma GCC unroll 2
    for (int r = 0; r < Rows; r += 4) {
      float four[4];
      I::sum4(all_sets(r, m), all_sets(r + 1, m), all_sets(r + 2, m), all_sets(r + 3, m), four);
      float* y = t.y + m * t.y_stride + first + r;
#pragma GCC unroll 4
      for (int i = 0; i < std::min(Rows, 4); ++i) y[i] += four[i];
    }
  }
}

// All rows of a block row, as many at a time as leave sums in registers.
template <class I, Storage kStorage, int Sets, int Tokens>
void ragged_block_rows(const FewTask& task) {
  constexpr int kMost = std::min(I::kRegisters / 2 / Sets / Tokens, 8);
  constexpr std::int64_t kOver = kStorage == Storage::f32 ? 0 : I::kWidth - 1;  // elements read past a row
  const SparseOperand& w = task.w;
  const std::int64_t rows = w.block_size / w.red_block, block = w.block_size * bytes_of(kStorage);
  const std::int64_t near_end = task.entries - (kOver + w.block_size - 1) / w.block_size;
  RaggedRow t{};
  t.cols = w.red_block;
  t.block_size = w.block_size;
  t.x = task.x;
  t.x_stride = task.x_stride;
  t.y = task.y;
  t.y_stride = task.y_stride;
  t.ask = task.ask;
  t.ahead = task.ask == Ask::near ? kFewNear : kFewAhead;
  const auto all_rows = [&] {
    std::int64_t r = 0;
    const auto step = [&]<int Rows>() {
      for (; r + Rows <= rows; r += Rows) ragged_rows<I, kStorage, Rows, Sets, Tokens>(t, r);
    };
    if constexpr (kMost >= 8) step.template operator()<8>();
    if constexpr (kMost >= 4) step.template operator()<4>();
    if constexpr (kMost >= 2) step.template operator()<2>();
    step.template operator()<1>();
  };
  for (std::int32_t o = task.begin; o < task.end; ++o, t.y += w.out_block) {
    const std::int32_t end = task.entry_begin[o + 1];
    for (std::int32_t e = task.entry_begin[o]; e < end; e += t.count) {
      t.index = w.index + e;
      t.last = static_cast<std::int32_t>(near_end) - e;
      t.count = std::min(end - e, kRaggedPart);
      t.values = static_cast<const char*>(w.values) + e * block;
      all_rows();
    }
  }
}

template <class I, Storage kStorage, int Tokens>
void ragged_sums(const FewTask& task) {
  switch (ragged_sets(task.w.block_size / task.w.red_block)) {
    case 1: return ragged_block_rows<I, kStorage, 1, Tokens>(task);
    case 2: return ragged_block_rows<I, kStorage, 2, Tokens>(task);
    default: return ragged_block_rows<I, kStorage, 4, Tokens>(task);
  }
}

template <class I>
void ragged_tokens(const FewTask& task) {
  const auto of = [&]<Storage kStorage>() {
    switch (task.tokens) {
      case 1: return ragged_sums<I, kStorage, 1>(task);
      case 2: return ragged_sums<I, kStorage, 2>(task);
      case 4: return ragged_sums<I, kStorage, 4>(task);
      default: return;
    }
  };
  if (task.w.storage == Storage::i8) return of.template operator()<Storage::i8>();
  dispatch_storage(task.w.storage, of);
}

// Rows that half a vector holds go by halves, of which twice as many are multiplied in a cycle of a Zen 4.
template <class I, class Half>
void few_ragged(const FewTask& task) {
  task.w.red_block <= Half::kWidth ? ragged_tokens<Half>(task) : ragged_tokens<I>(task);
}

}  // namespace rarefy::cpu
