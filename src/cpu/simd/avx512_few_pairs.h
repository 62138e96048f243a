// A few tokens in bf16 (few.h) by vdpbf16ps. Where blocks have pairs of columns, a lane is such a pair as it
// lies in memory, of W as of X: half as many vectors as floats, and none to widen. Blocks of one column are
// multiplied two at a time, their outputs interleaved.
#pragma once

#include <type_traits>

#include "cpu/few.h"
#include "cpu/simd/avx512.h"

namespace rarefy::cpu {

struct Avx512FewPairs : Avx512 {
  static constexpr bool kEdges = false;
  static Vec fma(Vec w, Vec x, Vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
};

// Some entries of a block row of R×1 blocks, R = 32, 48, …; values in bf16, x too, each twice in a lane.
struct FewColumns {
  const std::uint16_t* values;
  const std::int32_t* index;
  std::int32_t count;
  std::int64_t rows;
  const std::uint32_t* x;  // [column][token]
  float* y;
  std::int64_t y_stride;
  Ask ask;
};

// Onto outputs 16 first … 16 (first + Slices), with sums in three levels and in sets as in few_slices.
template <int Slices, int Sets, int Tokens>
static void few_column_slices(const FewColumns& t, int first) {
  alignas(64) static constexpr std::uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i interleave = _mm512_load_si512(kInterleave);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  __m512 sum[Sets][Slices][Tokens];
  alignas(64) float total[Slices][Tokens][16];
  const auto each = [](auto f) {
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
#pragma GCC unroll 4
      for (int m = 0; m < Tokens; ++m) f(s, m);
    }
  };
  const auto clear = [&](int s, int m) {
#pragma GCC unroll 4
    for (int i = 0; i < Sets; ++i) sum[i][s][m] = _mm512_setzero_ps();
  };
  const auto all_sets = [&](int s, int m) {
    __m512 v = sum[0][s][m];
    if constexpr (Sets >= 2) v = _mm512_add_ps(v, sum[1][s][m]);
    if constexpr (Sets == 4) v = _mm512_add_ps(v, _mm512_add_ps(sum[2][s][m], sum[3][s][m]));
    return v;
  };
  each([&](int s, int m) {
    clear(s, m);
    _mm512_store_ps(total[s][m], _mm512_setzero_ps());
  });
  const std::uint16_t* values = t.values + 16 * first;
  const auto half = [](const std::uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  };
  // Columns e and, if there is one, e + 1.
  const auto add = [&](auto& to, std::int32_t e, auto second) {
    constexpr bool kBoth = second.value;
    __m512bh xv[Tokens];
#pragma GCC unroll 4
    for (int m = 0; m < Tokens; ++m) {
      const auto x = [&](std::int32_t i) {
        return _mm512_set1_epi32(static_cast<int>(t.x[std::int64_t{t.index[i]} * Tokens + m]));
      };
      if constexpr (kBoth) {  // of each lane's halves the lower from the first: (a & ~high) | (b & high)
        xv[m] = (__m512bh)_mm512_ternarylogic_epi32(x(e), high, x(e + 1), 0xb8);
      } else {
        xv[m] = (__m512bh)_mm512_andnot_si512(high, x(e));
      }
    }
    constexpr int kLines = (Slices + 1) / 2;  // of each column
    ask_for<kLines>(t.ask, values + kFewAhead / 2);
    ask_for<kLines>(t.ask, values + t.rows + kFewAhead / 2);
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
      __m512i both = _mm512_zextsi256_si512(half(values + 16 * s));
      if constexpr (kBoth) both = _mm512_inserti64x4(both, half(values + t.rows + 16 * s), 1);
      const auto wv = (__m512bh)_mm512_permutexvar_epi16(interleave, both);
#pragma GCC unroll 4
      for (int m = 0; m < Tokens; ++m) to[s][m] = _mm512_dpbf16_ps(to[s][m], wv, xv[m]);
    }
    values += 2 * t.rows;
  };
  std::int32_t e = 0;
  const std::int32_t whole = t.count - t.count % 2;
  while (e < whole) {
    const std::int32_t stop = whole - e > kFewPart * Sets ? e + kFewPart * Sets : whole;
    for (; e + 2 * Sets <= stop; e += 2 * Sets) {
      ask_for<1>(t.ask, t.index + e + kFewIndices);
#pragma GCC unroll 4
      for (int i = 0; i < Sets; ++i) add(sum[i], e + 2 * i, std::true_type{});
    }
    for (; e < stop; e += 2) add(sum[0], e, std::true_type{});
    each([&](int s, int m) {
      _mm512_store_ps(total[s][m], _mm512_add_ps(_mm512_load_ps(total[s][m]), all_sets(s, m)));
      clear(s, m);
    });
  }
  if (e < t.count) add(sum[0], e, std::false_type{});
  each([&](int s, int m) {
    float* y = t.y + m * t.y_stride + 16 * (first + s);
    const __m512 sums = _mm512_add_ps(_mm512_load_ps(total[s][m]), all_sets(s, m));
    _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), sums));
  });
}

template <int Sets, int Tokens>
static void few_columns_of(const FewTask& task) {
  const SparseOperand& w = task.w;
  FewColumns t{};
  t.rows = w.out_block;
  t.x = reinterpret_cast<const std::uint32_t*>(task.x);
  t.y = task.y;
  t.y_stride = task.y_stride;
  t.ask = task.ask;
  const auto slices = static_cast<int>(t.rows / 16);
  constexpr std::int32_t most = Sets * kFewParts * kFewPart;
  for (std::int32_t o = task.begin; o < task.end; ++o, t.y += t.rows) {
    const std::int32_t end = task.entry_begin[o + 1];
    for (std::int32_t e = task.entry_begin[o]; e < end; e += t.count) {
      t.index = w.index + e;
      t.count = end - e < most ? end - e : most;
      t.values = static_cast<const std::uint16_t*>(w.values) + e * t.rows;
      int s = 0;
      const auto step = [&]<int Slices>() {
        for (; s + Slices <= slices; s += Slices) few_column_slices<Slices, Sets, Tokens>(t, s);
      };
      constexpr int kMost = 16 / Tokens / Sets;
      if constexpr (kMost >= 8) step.template operator()<8>();
      if constexpr (kMost >= 4) step.template operator()<4>();
      if constexpr (kMost >= 2) step.template operator()<2>();
      step.template operator()<1>();
    }
  }
}

template <int Tokens>
static void few_columns(const FewTask& task) {
  if (few_sets<Avx512>(task.w.out_block / 16) == 1) return few_columns_of<1, Tokens>(task);
  few_columns_of<2, Tokens>(task);  // of two slices or three
}

static void few_pairs(const FewTask& task) {
  if (task.w.storage == Storage::f32) return few_of<Avx512FewPairs, Storage::f32>(task);
  switch (task.tokens) {
    case 1: return few_columns<1>(task);
    case 2: return few_columns<2>(task);
    case 4: return few_columns<4>(task);
    default: return;
  }
}

// To put a pair of x together takes longer than 16 outputs gain (4 tokens: 7 %).
static bool few_pairs_take(std::int64_t block_rows, std::int64_t block_cols) {
  if (block_cols % 2 == 0) return few_fills(Avx512FewPairs::kWidth, block_rows, block_cols / 2);
  return block_cols == 1 && block_rows % 16 == 0 && block_rows > 16;
}

}  // namespace rarefy::cpu
