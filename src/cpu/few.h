// A few tokens: reading W is all the work, so lanes lie along the stored blocks, as they are in memory,
// and X is spread to match. Which kernel takes which blocks, and their rows one after the other.
#pragma once

#include "cpu/few_fours.h"
#include "cpu/few_singles.h"
#include "cpu/few_slices.h"
#include "cpu/few_turned.h"

namespace rarefy::cpu {

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
  // Half as many where L1 has 32 KB for them and those that come, and floats come from memory (AVX2, a Zen 3:
  // 16×16, 4096→11008, four tokens 6.2 → 5.3 ms; out of L3 .18 → .19).
  const bool half = I::kRegisters < 32 && kStorage == Storage::f32 && task.entries * block > kCached;
  const std::int64_t elements = half ? kFewChunk / 2 : kFewChunk;
  const auto chunk = static_cast<std::int32_t>(elements / w.block_size < 1 ? 1 : elements / w.block_size);
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
