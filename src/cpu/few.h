// A few tokens: reading W is all the work, so lanes lie along the stored blocks, as they are in memory,
// and X is spread to match. Slices of a block row (vectors of its blocks) keep their sums in registers
// while the entries stream by; the sums are folded into output features once at the end.
#pragma once

#include "cpu/few_fours.h"
#include "cpu/few_singles.h"
#include "cpu/few_turned.h"

namespace rarefy::cpu {

// How X meets a vector of W.
enum class Spread : std::uint8_t {
  whole,   // C is a multiple of the width: a vector of one row of the block, and as many of X
  repeat,  // C = N divides the width: N elements of X, once for each row of the block in the vector
  group,   // R × C = Size divides the width: several entries, and each one's C = N elements of X for all its
           // rows
  edge,    // others: vectors from the block's first element on, the last one not full; C = N = 1, or x's
           // columns are put where they belong by their numbers
  four,  // repeat of one column where X has four or eight tokens' side by side: four are loaded once, spread
         // in registers
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
  const char* ahead;  // what to ask for next: W from beginning to end, whatever the order of the slices
  bool once;          // all slices in one pass
  Ask ask;
  const std::int32_t* columns;  // edge: of each element of a block, up to a whole vector
};

// Slices that leave their sums in registers. Where two sets of them do not, the sets of a part follow each
// other, and the first one's sums wait in memory: one pass through W for two.
template <class I, Spread kSpread, int Sets, int Tokens>
constexpr int few_slices_at_once() {
  if (kSpread == Spread::group) return 1;
  constexpr int sums = I::kRegisters / 2 / Tokens;
  if (kSpread != Spread::whole && Sets == 2) return std::min(2, sums);  // of two slices or three: few_sets
  return sums / Sets;
}

// Adds slices first … first + Slices of every entry to y.
template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Slices, int Sets, int Tokens>
void few_slices(FewRow& row, int first) {
  constexpr int w = I::kWidth;
  constexpr int entries = kSpread == Spread::group ? w / Size : 1;  // of a vector
  constexpr bool kParts = kSpread != Spread::whole;
  constexpr std::int64_t kBytes = bytes_of(kStorage);
  constexpr bool kInTurn = kParts && Sets == 2 && 2 * Slices * Tokens > I::kRegisters / 2;
  Vec<I> sum[1 + (kInTurn ? 0 : Sets - 1)][Slices][Tokens];
  const auto each = [&](auto f) {
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) f(s, m);
    }
  };
  const auto clear = [&](int s, int m) {
#pragma GCC unroll 4
    for (auto& set : sum) set[s][m] = I::zero();
  };
  const auto all_sets = [&](int s, int m) {
    Vec<I> v = sum[0][s][m];
    if constexpr (Sets >= 2 && !kInTurn) v = I::add(v, sum[1][s][m]);
    if constexpr (Sets == 4) v = I::add(v, I::add(sum[2][s][m], sum[3][s][m]));
    return v;
  };
  const std::int64_t slice = kSpread == Spread::whole ? row.red_block : w;  // elements from one to the next
  const std::int64_t step = entries * row.block_size * kBytes;
  const char* values = row.values + first * slice * kBytes;
  const char* ahead = row.ahead;
  // Of four tokens' whole vectors not: a branch in that loop cost 8 % out of L3.
  const Ask ask = kSpread == Spread::whole && Tokens >= 4 ? Ask::far : row.ask;
  constexpr std::int64_t kAtOnce = Slices * w * kBytes;                // bytes of W that follow one another
  const std::int64_t left = row.block_size - first * std::int64_t{w};  // edge: of a block's elements
  const std::int64_t passed = kSpread == Spread::edge && left < Slices * w ? left * kBytes : kAtOnce;
  const auto ask_ahead = [&]<int Times>() {
    ask_for<lines_of(Times * kAtOnce)>(ask, ahead);
    ahead += Times * passed;
  };
  // One vector of entries, those from e on.
  const auto add = [&](auto& to, std::int32_t e) {
    const std::int64_t elements = kSpread == Spread::four ? Tokens : row.red_block;
    const float* x = row.x + static_cast<std::int64_t>(row.index[e]) * elements;
    const auto column = [&](std::int64_t c) {
      Vec<I> xv[Tokens];
      if constexpr (kSpread == Spread::four && Tokens == 4) I::four(x, xv);
#pragma GCC unroll 16
      for (int m = 0; m < Tokens; ++m) {
        if constexpr (kSpread == Spread::whole) xv[m] = I::load(x + m * row.x_stride + c);
        if constexpr (kSpread == Spread::four && Tokens == 8) xv[m] = I::set1(x[m]);
        if constexpr (kSpread == Spread::edge && N == 1) xv[m] = I::set1(x[m * row.x_stride]);
        if constexpr (kSpread == Spread::edge && N != 1) {
          xv[m] = I::load_first(x + m * row.x_stride, static_cast<int>(row.red_block));
        }
        if constexpr (kSpread == Spread::repeat) xv[m] = I::template repeat<N>(x + m * row.x_stride);
        if constexpr (kSpread == Spread::group)
          xv[m] = I::template group<Size, N>(row.x + m * row.x_stride, row.index + e);
      }
#pragma GCC unroll 16
      for (int s = 0; s < Slices; ++s) {
        const Vec<I> wv = load_as<I>(kStorage, values + (s * slice + c) * kBytes, 0);
        if (!kParts && s * w * kBytes % 64 == 0) ask_for<1>(ask, ahead + s * w * kBytes);
#pragma GCC unroll 16
        for (int m = 0; m < Tokens; ++m) {
          if constexpr (kSpread == Spread::edge && N != 1) {
            to[s][m] = I::fma(wv, I::permute(xv[m], row.columns + (first + s) * w), to[s][m]);
          } else {
            to[s][m] = I::fma(wv, xv[m], to[s][m]);
          }
        }
      }
    };
    if constexpr (kSpread == Spread::whole) {
      for (std::int64_t c = 0; c < row.red_block; c += w, ahead += kAtOnce) column(c);
    } else {
      column(0);
    }
    values += step;
  };
  const std::int32_t whole = row.count - row.count % entries;
  // Entries from … stop, one set of sums after the other.
  const auto add_in_turn = [&](std::int32_t from, std::int32_t stop) {
    const char* const begin = values;
    const auto every_second = [&](std::int32_t i, auto also) {
      for (values = begin + (i - from) * step; i < stop; i += 2, values += step) {
        also(i);
        add(sum[0], i);
      }
    };
    every_second(from, [&](std::int32_t i) {
      ask_for<1>(ask, row.index + i + kFewIndices);
      ask_ahead.template operator()<2>();
    });
    alignas(64) float kept[Slices][Tokens][w];
    each([&](int s, int m) { I::store(kept[s][m], sum[0][s][m]); });
    each([&](int s, int m) { clear(s, m); });
    every_second(from + 1, [](std::int32_t) {});
    each([&](int s, int m) { sum[0][s][m] = I::add(I::load(kept[s][m]), sum[0][s][m]); });
    values = begin + (stop - from) * step;
  };
  alignas(64) float total[Slices][Tokens][w];  // of the parts before
  each([&](int s, int m) {
    clear(s, m);
    if (kParts) I::store(total[s][m], I::zero());
  });
  std::int32_t e = 0;
  for (;;) {
    constexpr std::int32_t kFull = kFewPart * Sets * entries;
    const std::int32_t stop = kParts && whole - e > kFull ? e + kFull : whole;
    if constexpr (kInTurn) {
      add_in_turn(e, stop);
      e = stop;
    } else {
      for (; e + Sets * entries <= stop; e += Sets * entries) {
        if constexpr (kParts) {
          ask_for<1>(ask, row.index + e + kFewIndices);
          ask_ahead.template operator()<Sets>();
        }
#pragma GCC unroll 4
        for (int i = 0; i < Sets; ++i) add(sum[i], e + i * entries);
      }
      for (; e < stop; e += entries) {
        if constexpr (kParts) ask_ahead.template operator()<1>();
        add(sum[0], e);
      }
    }
    if (!kParts || stop == whole) break;
    each([&](int s, int m) {
      I::store(total[s][m], I::add(I::load(total[s][m]), all_sets(s, m)));
      clear(s, m);
    });
  }
  row.ahead = ahead;
  // Rows are added up now: nothing would be under way meanwhile (16×16 from memory, one token: 2.9 → 2.35
  // ms).
  if (kSpread == Spread::whole && row.once) ask_for<16>(Ask::far, ahead);
  if constexpr (kSpread == Spread::group) {  // the rest is less than a group: 0 beside it, on both sides
    const std::int32_t rest = row.count - e;
    if (rest > 0) {
      const Vec<I> wv = load_part<I>(kStorage, values, 0, rest * Size);
      for (int m = 0; m < Tokens; ++m) {
        float spread[w] = {};
        for (int i = 0; i < rest * Size; ++i) {
          spread[i] = row.x[m * row.x_stride + row.index[e + i / Size] * std::int64_t{N} + i % N];
        }
        sum[0][0][m] = I::fma(wv, I::load(spread), sum[0][0][m]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Tokens; ++m) {
    float* y = row.y + m * row.y_stride;
    if constexpr (kSpread == Spread::whole && Slices % 4 == 0) {
#pragma GCC unroll 4
      for (int s = 0; s < Slices; s += 4) {
        I::add_sums(all_sets(s, m), all_sets(s + 1, m), all_sets(s + 2, m), all_sets(s + 3, m),
                    y + first + s);
      }
      continue;
    }
#pragma GCC unroll 16
    for (int s = 0; s < Slices; ++s) {
      if constexpr (kSpread == Spread::whole) {  // as above, as a row has the same bits beside any others
        float four[4];
        I::sum4(all_sets(s, m), I::zero(), I::zero(), I::zero(), four);
        y[first + s] += four[0];
        continue;
      }
      const Vec<I> v = I::add(I::load(total[s][m]), all_sets(s, m));
      if constexpr (kSpread == Spread::edge) {
        const auto lanes = static_cast<int>(left - s * w < w ? left - s * w : w);
        if constexpr (N == 1) {
          float* to = y + (first + s) * w;
          I::store_first(to, I::add(I::load_first(to, lanes), v), lanes);
          continue;
        }
        float lane[w];
        I::store(lane, v);
        float* to = y + ((first + s) * w - row.columns[(first + s) * w]) / row.red_block;
        for (int i = 0; i < lanes; ++i) {
          *to += lane[i];
          if (row.columns[(first + s) * w + i] + 1 == row.red_block) ++to;
        }
        continue;
      }
      if constexpr (kSpread == Spread::repeat || kSpread == Spread::four) {
        constexpr int rows = w / std::max(N, 1);  // of a slice
        float* to = y + static_cast<std::int64_t>(first + s) * rows;
        if constexpr (N == 1) {
          I::store(to, I::add(I::load(to), v));
        } else {
          float row_sums[w];
          I::template fold<N>(v, row_sums);
          for (int i = 0; i < rows; ++i) to[i] += row_sums[i];
        }
      } else {
        float lane[w];
        I::store(lane, v);
        for (int i = 0; i < w; ++i) y[i % Size / N] += lane[i];
      }
    }
  }
}

// All slices of a block row, as many at a time as leave sums in registers.
template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Sets, int Tokens>
void few_row(FewRow& row, int slices) {
  int s = 0;
  const auto step = [&]<int Slices>() {
    for (; s + Slices <= slices; s += Slices)
      few_slices<I, kStorage, kSpread, Size, N, Slices, Sets, Tokens>(row, s);
  };
  // With four sets there is one slice, with two no more than three (few_sets): others need no code.
  constexpr int wanted = Sets == 4 ? 1 : Sets == 2 ? 2 : 16;
  constexpr int most = std::min(few_slices_at_once<I, kSpread, Sets, Tokens>(), wanted);
  if constexpr (most >= 16) step.template operator()<16>();
  if constexpr (most >= 8) step.template operator()<8>();
  if constexpr (most >= 4) step.template operator()<4>();
  if constexpr (most >= 2) step.template operator()<2>();
  step.template operator()<1>();
}

template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Sets, int Tokens>
void few_rows_of(const FewTask& task, std::int64_t slices) {
  const SparseOperand& w = task.w;
  FewRow row{};
  row.red_block = w.red_block;
  row.block_size = w.block_size;
  row.x = task.x;
  row.x_stride = task.x_stride;
  row.y = task.y;
  row.y_stride = task.y_stride;
  const std::int64_t block = w.block_size * bytes_of(kStorage);
  constexpr bool kEdge = kSpread == Spread::edge;
  constexpr std::int64_t kOver = kEdge ? I::kWidth - 1 : 0;  // elements that are read past a block, at most
  std::int32_t columns[kEdge ? kMostEdge : 1];
  alignas(64) char padded[kEdge ? (kMostEdge + 2 * I::kWidth) * bytes_of(kStorage) : 1];
  // Past the entries before this one lie as many elements; the others are copied.
  const std::int64_t near_end = task.entries - (kOver + w.block_size - 1) / w.block_size;
  if constexpr (kEdge) {
    for (std::int64_t i = 0; i < slices * I::kWidth; ++i) {
      columns[i] = static_cast<std::int32_t>(i % w.red_block);
    }
    row.columns = columns;
  }
  constexpr std::int32_t parts =
      Sets * kFewParts * kFewPart * (kSpread == Spread::group ? I::kWidth / Size : 1);
  const auto chunk = static_cast<std::int32_t>(kFewChunk / w.block_size < 1 ? 1 : kFewChunk / w.block_size);
  // Whether 4 tokens take several passes; the same for fewer, whose sums have the same chunks.
  const bool several = Sets == 1 && slices > I::kRegisters / 8;
  const std::int32_t most = kSpread == Spread::whole || (several && chunk < parts) ? chunk : parts;
  row.once = slices <= few_slices_at_once<I, kSpread, Sets, Tokens>();
  row.ask = task.ask;
  const std::int64_t ahead = kSpread == Spread::four ? kFewFourAhead
                             : task.ask == Ask::near ? kFewNear
                                                     : kFewAhead;
  // Of several passes, into L2 (AVX2, from memory, two tokens: 16×16 4.6 → 3.9 ms, 32×32 4.1 → 3.4); into L1,
  // which holds no more, a second one takes 8 to 12 % longer.
  const std::int64_t chunks_ahead = kSpread == Spread::whole && task.ask == Ask::l2 && Tokens < 4 ? 2 : 1;
  for (std::int32_t o = task.begin; o < task.end; ++o, row.y += w.out_block) {
    const std::int32_t end = task.entry_begin[o + 1];
    for (std::int32_t e = task.entry_begin[o]; e < end; e += row.count) {
      row.index = w.index + e;
      row.count = end - e < most ? end - e : most;
      row.values = static_cast<const char*>(w.values) + e * block;
      if (kEdge && e + row.count > near_end) {
        if (e < near_end) {
          row.count = static_cast<std::int32_t>(near_end - e);
        } else {
          __builtin_memcpy(padded, row.values, static_cast<std::size_t>(row.count * block));
          row.values = padded;
        }
      }
      row.ahead = row.values + (row.once ? ahead : chunks_ahead * row.count * block);
      few_row<I, kStorage, kSpread, Size, N, Sets, Tokens>(row, static_cast<int>(slices));
    }
  }
}

template <class I, Storage kStorage, Spread kSpread, int Size, int N, int Tokens>
void few_rows(const FewTask& task) {
  const std::int64_t slices = kSpread == Spread::group   ? 1
                              : kSpread == Spread::whole ? task.w.block_size / task.w.red_block
                                                         : (task.w.block_size + I::kWidth - 1) / I::kWidth;
  const auto rows = [&]<int Sets>() {
    few_rows_of<I, kStorage, kSpread, Size, N, Sets, Tokens>(task, slices);
  };
  if constexpr (kSpread == Spread::group) return rows.template operator()<few_sets<I>(1)>();
  switch (few_sets<I>(slices)) {
    case 1: return rows.template operator()<1>();
    case 2: return rows.template operator()<2>();
    default: break;
  }
  if constexpr (few_sets<I>(1) == 4) rows.template operator()<4>();
}

// Blocks that fill no vector alone: several at a time.
template <class I, Storage kStorage, int Size, int Tokens>
void few_groups(const FewTask& task) {
  switch (task.w.red_block) {
    case 1:
      if constexpr (few_quads_takes(Size, I::kWidth, I::kRegisters) && Tokens == 4)
        return few_quads<I, kStorage, Size, few_sets<I>(1)>(task);
      return few_rows<I, kStorage, Spread::group, Size, 1, Tokens>(task);
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
  if constexpr (I::kEdges) {
    const std::int64_t cols = task.w.red_block;
    if (!few_fills(I::kWidth, task.w.block_size / cols, cols)) {
      if (cols == 1) return few_rows<I, kStorage, Spread::edge, 0, 1, Tokens>(task);
      return few_rows<I, kStorage, Spread::edge, 0, 0, Tokens>(task);
    }
  }
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
    case 1:
      if constexpr (Tokens == 4) {
        if (task.by_column) return few_rows<I, kStorage, Spread::four, 0, 1, Tokens>(task);
      }
      return few_rows<I, kStorage, Spread::repeat, 0, 1, Tokens>(task);
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
  if constexpr (I::kWidth == 16 && kStorage != Storage::i8) {
    if (task.turned) return few_turned<I, kStorage>(task);
  }
  switch (task.tokens) {
    case 1: return few_tokens<I, kStorage, 1>(task);
    case 2: return few_tokens<I, kStorage, 2>(task);
    case 4: return few_tokens<I, kStorage, 4>(task);
    default: return;
  }
}

// Whether eight tokens go through W together: where their sums fit 32 registers and x comes from few lines.
// By several sets of sums, by eight rows of x or widened from int8 they take longer than four and four (32×1
// 6.2 and 5.8 ms, 8×8 9.5 and 7.5, int8 of 32×32 5.9 and 4.2).
template <class I>
bool few_takes_eight(std::int64_t block_size, std::int64_t columns, bool turned) {
  if (turned) return turned_sets(block_size / (columns % I::kWidth == 0 ? columns : I::kWidth)) <= 2;
  return columns == 1 && block_size % I::kWidth == 0 && few_sets<I>(block_size / I::kWidth) == 1;
}

template <class I, Storage kStorage>
void few_eight(const FewTask& task) {
  if (task.turned) return turned_tokens<I, kStorage, 8>(task);
  few_rows_of<I, kStorage, Spread::four, 0, 1, 1, 8>(task, task.w.block_size / I::kWidth);
}

template <class I>
void few(const FewTask& task) {
  if (task.w.storage == Storage::i8) return few_of<I, Storage::i8>(task);
  dispatch_storage(task.w.storage, [&]<Storage kStorage>() {
    if constexpr (I::kRegisters == 32) {
      if (task.tokens == 8) return few_eight<I, kStorage>(task);
    }
    few_of<I, kStorage>(task);
  });
}

// Whether every vector of W is of one of the kinds above, or few_ragged.h takes these blocks.
template <class I>
bool few_takes(std::int64_t block_rows, std::int64_t block_cols) {
  return few_fills(I::kWidth, block_rows, block_cols) || few_has_edges(block_rows, block_cols) ||
         block_cols > 1;
}

}  // namespace rarefy::cpu
