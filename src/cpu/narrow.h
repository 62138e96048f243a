// woven.h's product for panels of at most one vector of tokens, where a block row of 4 or 8 outputs has too
// few sums: each waits 4 cycles for itself. As many block rows go side by side as have 8 sums together, and
// up to half a vector of tokens (kHalf) two outputs share a vector. Each sum is made as in gather.h: same
// order, same parts, same bits.
//
// 768→3072 at a density of 0.5, one thread of a Zen 5, ms by woven.h → here: 8 tokens 4×1 .29 → .16, 4×4 .28
// → .16, 8×8 .20 → .13, 16 tokens 4×1 .29 → .20.
#pragma once

#include "cpu/woven.h"

namespace rarefy::cpu {

// One register tile's place in W: kOutputs outputs of a block row.
struct NarrowRow {
  const std::int32_t* index;
  const float* values;
  const float* start;
  std::int32_t count;
};

template <class I, int kOutputs, bool kHalf>
struct Narrow {
  static constexpr int kSums = kHalf ? kOutputs / 2 : kOutputs;
  static constexpr int kSide = 8 / kSums;  // block rows at once
  using Sums = Vec<I>[kSums];

  static Vec<I> load(const float* x) {
    if constexpr (kHalf) return I::template repeat<I::kWidth / 2>(x);
    return I::load(x);
  }

  // A block of one column, its outputs side by side.
  [[gnu::always_inline]] static void column(const float* x, const float* w, Sums& sum) {
    const Vec<I> xv = load(x);
#pragma GCC unroll 2
    for (int o = 0; o < kOutputs; o += 4) {
      if constexpr (kHalf) {
        const Vec<I> twos = I::twos(w + o);
        sum[o / 2] = I::fma(I::template one_of_four<0>(twos), xv, sum[o / 2]);
        sum[o / 2 + 1] = I::fma(I::template one_of_four<1>(twos), xv, sum[o / 2 + 1]);
      } else {  // two broadcasts by a shuffle, two by a load: neither is the bound then
        const Vec<I> four = I::template repeat<4>(w + o);
        sum[o] = I::fma(I::template one_of_four<0>(four), xv, sum[o]);
        sum[o + 1] = I::fma(I::template one_of_four<1>(four), xv, sum[o + 1]);
        sum[o + 2] = I::fma(I::set1(w[o + 2]), xv, sum[o + 2]);
        sum[o + 3] = I::fma(I::set1(w[o + 3]), xv, sum[o + 3]);
      }
    }
  }

  // Four columns of a block, its outputs `stride` apart.
  [[gnu::always_inline]] static void columns(const float* x, const float* w, std::int64_t stride, Sums& sum) {
    Vec<I> four[kSums];
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i, w += stride) {
      four[i] = I::template repeat<4>(w);
      if constexpr (kHalf) four[i] = I::template repeat_above<4>(four[i], w + 2 * stride);
      if (kHalf && i % 2 == 1) w += 2 * stride;
    }
    const auto each = [&]<int kColumn>() {
      const Vec<I> xv = load(x + kColumn * I::kWidth);
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) sum[i] = I::fma(I::template one_of_four<kColumn>(four[i]), xv, sum[i]);
    };
    each.template operator()<0>();
    each.template operator()<1>();
    each.template operator()<2>();
    each.template operator()<3>();
  }

  // What is read of a row, in registers: pointers, and how far ahead weights are asked for, in floats.
  struct Cursor {
    const std::int32_t* index;
    const float* w;
  };

  // The next entry of rows `from` … `to`, column by column side by side. Of a column's W the line is asked
  // for if `asks`, of several columns' all lines, not the first of each four columns' alone.
  template <bool kColumn>
  [[gnu::always_inline]] static void entries(const SparseOperand& op, const float* x, std::int64_t ahead,
                                             bool asks, int from, int to, Cursor (&at)[kSide],
                                             Sums (&sum)[kSide]) {
    const float* xe[kSide];
    const auto each = [&](auto f) {
#pragma GCC unroll 4
      for (int s = from; s < to; ++s) f(s);
    };
    each([&](int s) { xe[s] = x + std::int64_t{*at[s].index++} * (kColumn ? 1 : op.red_block) * I::kWidth; });
    if constexpr (kColumn) {
      each([&](int s) {
        if (asks) __builtin_prefetch(at[s].w + ahead, 0, 2);
        column(xe[s], at[s].w, sum[s]);
        at[s].w += op.block_size;
      });
    } else {
      for (std::int32_t c = 0; c < op.red_block; c += 4) {
        each([&](int s) {
          __builtin_prefetch(at[s].w + c + ahead, 0, 2);
          if (asks) {  // of a block that lies in one piece
            __builtin_prefetch(at[s].w + c * kOutputs + ahead, 0, 2);
            if constexpr (kOutputs == 8) __builtin_prefetch(at[s].w + c * kOutputs + 16 + ahead, 0, 2);
          }
          columns(xe[s] + c * I::kWidth, at[s].w + c, op.out_stride, sum[s]);
        });
      }
      each([&](int s) { at[s].w += op.block_size; });
    }
  }

  // kSide rows; their sums to [output][token] floats, quads of outputs transposed, as WayOut wants them.
  template <bool kColumn>
  static void multiply(const WovenTask& task, const NarrowRow (&row)[kSide], std::int64_t ahead, float* to) {
    Sums sum[kSide];
    const auto each = [](auto f) {
#pragma GCC unroll 4
      for (int s = 0; s < kSide; ++s) f(s);
    };
    const SparseOperand& op = task.w;
    const float* x = task.x;
    Cursor at[kSide];
    std::int32_t least = row[0].count, most = 0;
    each([&](int s) {
      at[s] = {row[s].index, row[s].values};
      if (row[s].count < least) least = row[s].count;
      if (row[s].count > most) most = row[s].count;
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        sum[s][i] = kHalf
                        ? I::two_halves(row[s].start[i / 2 * 4 + i % 2], row[s].start[i / 2 * 4 + i % 2 + 2])
                        : I::set1(row[s].start[i]);
      }
    });
    alignas(64) float total[kSide][kSums][I::kWidth];
    bool begun[kSide] = {};
    for (std::int32_t e = 0; e < most;) {
      const std::int32_t full = most - e > task.part ? e + task.part : most;
      constexpr int kStep = kColumn ? 4 : 1;
      for (const std::int32_t stop = (full < least ? full : least) - kStep; e <= stop; e += kStep) {
#pragma GCC unroll 4
        for (int i = 0; i < kStep; ++i) {
          entries<kColumn>(op, x, ahead, kColumn ? i * kOutputs % 16 == 0 : task.streams, 0, kSide, at, sum);
        }
      }
      for (; e < full; ++e) {
        each([&](int s) {
          if (e < row[s].count) entries<kColumn>(op, x, ahead, false, s, s + 1, at, sum);
        });
      }
      each([&](int s) {  // where another part begins
        if (e % task.part != 0 || row[s].count - e < least_entries(task.part)) return;
        for (int i = 0; i < kSums; ++i) {
          I::store(total[s][i], begun[s] ? I::add(sum[s][i], I::load(total[s][i])) : sum[s][i]);
          sum[s][i] = I::zero();
        }
        begun[s] = true;
      });
    }
    each([&](int s) {
      if (begun[s]) {
        for (int i = 0; i < kSums; ++i) sum[s][i] = I::add(I::load(total[s][i]), sum[s][i]);
      }
#pragma GCC unroll 2
      for (int o = 0; o < kOutputs; o += 4, to += 4 * I::kWidth) {
        Vec<I> quad[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          if constexpr (kHalf) quad[i] = I::half_twice(sum[s][o / 2 + i % 2], i / 2);
          if constexpr (!kHalf) quad[i] = sum[s][o + i];
        }
        I::transpose_quads(quad);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) I::store(to + i * I::kWidth, quad[i]);
      }
    });
  }

  template <bool kColumn>
  static void run(const WovenTask& task) {
    constexpr int w = I::kWidth;
    alignas(64) static constexpr float kNothing[kOutputs] = {};
    const auto* values = static_cast<const float*>(task.w.values);
    const float* start = task.start;
    std::int32_t o = task.begin, r = 0;  // block row, and output within it
    for (std::int32_t made = 0; o < task.end && made < task.cols; made += w) {
      for (int group = 0; group < w; group += kSide * kOutputs) {
        NarrowRow row[kSide];
        const std::int32_t from = task.row[o < task.end ? o : task.end];
        for (NarrowRow& one : row) {
          if (o == task.end) {
            one = {task.w.index, values, kNothing, 0};
            continue;
          }
          const std::int32_t first = task.row[o];
          one = {task.w.index + first, values + first * task.w.block_size + r * task.w.out_stride, start,
                 task.row[o + 1] - first};
          start += kOutputs;
          r += kOutputs;
          if (r == task.w.out_block) ++o, r = 0;
        }
        const std::int64_t ahead = (task.row[o < task.end ? o : task.end] - from) * task.w.block_size;
        multiply<kColumn>(task, row, ahead, task.sums + group * w);
      }
      activate_all<I>(task.activation, task.sums, w * w);
      put_group<I, 1>(task, task.sums, task.y + made, task.cols - made);
    }
  }
};

// The blocks that this takes, and up to how many tokens.
template <class I>
bool narrow_takes(const WovenTask& task) {
  const bool columns = task.w.red_block % 4 == 0 || (task.w.red_block == 1 && task.w.out_stride == 1);
  return task.vectors == 1 && columns && task.w.perm == nullptr &&
         (task.tokens <= I::kWidth / 2 || task.w.out_block % 8 != 0);
}

template <class I>
void narrow(const WovenTask& task) {
  const auto run = [&]<int kOutputs, bool kHalf>() {
    using N = Narrow<I, kOutputs, kHalf>;
    if (task.w.red_block == 1) return N::template run<true>(task);
    N::template run<false>(task);
  };
  const bool eights = task.w.out_block % 8 == 0;
  if (task.tokens > I::kWidth / 2) return run.template operator()<4, false>();
  if (eights) return run.template operator()<8, true>();
  run.template operator()<4, true>();
}

}  // namespace rarefy::cpu
