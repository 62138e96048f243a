// gather.h with its way out woven in: the sums of a group, as many outputs as a cache line holds, are
// transposed and go to rows of Y while those of the next group are made, four vectors at a time between runs
// of entries. FMAs leave a shuffle pipe and the stores idle, but no processor looks far enough ahead to find
// them: in one piece the way out of 4×1 at a density of 0.1 took a fifth of the time (Zen 4), now 5 %.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/gather.h"

namespace rarefy::cpu {

// What remains to be done with a complete group: [output][token] floats, whose quads of outputs are
// transposed.
template <class I, int Vectors>
struct WayOut {
  static constexpr int kWidth = I::kWidth, kLanes = Vectors * kWidth, kQuads = kWidth / 4;
  static constexpr int kSteps = 4 * Vectors;  // every fourth token of a vector each
  static constexpr int kOutputs = kWovenGroup;

  const float* sums;
  float* y;           // the first token's
  const float* next;  // where the group that is being made will go
  std::int64_t stride;
  std::int32_t tokens;
  int done = kSteps;
  alignas(64) float none[kWidth] = {};  // where tokens go that there are not: no branches here

  void step() {
    const int first = done % 4;
    const int m = done / 4 * kWidth + first;
    ++done;
    const float* from = sums + std::int64_t{first} * kLanes + (m - first);
    // A token's whole line at once: in two steps of half lines 32×1 at a density of 0.1 took 7 % more.
#pragma GCC unroll 4
    for (int n = 0; n < kOutputs; n += kWidth, from += kWidth * kLanes) {
      Vec<I> out[kQuads];
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) out[i] = I::load(from + std::int64_t{i} * 4 * kLanes);
      I::transpose_lanes(out);
#pragma GCC unroll 4
      for (int i = 0; i < kQuads; ++i) {
        const std::int64_t at = (m + 4 * i) * stride;
        const bool exists = m + 4 * i < tokens;
        I::store(exists ? y + at + n : none, out[i]);
        // For ownership: a store would wait for its line, and the ones behind it with it.
        if (n == 0) __builtin_prefetch(next + (exists ? at : 0), 1);
      }
    }
  }

  void finish() {
    while (done < kSteps) step();
  }
};

// A group is complete, `made` outputs with it: it begins to leave, and the next one takes the other room.
template <class Out>
[[gnu::always_inline]] inline void leave(const WovenTask& task, std::int32_t made, Out& out, float*& sums,
                                         float*& before) {
  out.finish();  // what short rows left
  out.sums = sums;
  out.y = task.y + made - Out::kOutputs;
  out.next = task.y + made;
  out.done = 0;
  std::swap(sums, before);
}

// A complete group at once, of whose outputs the first `cols` exist.
template <class I, int Vectors>
void put_group(const WovenTask& task, const float* sums, float* y, std::int32_t cols) {
  using Out = WayOut<I, Vectors>;
  constexpr int outputs = Out::kOutputs;
  if (cols >= outputs) return Out{sums, y, y, task.row_stride, task.tokens, 0}.finish();
  alignas(64) float rows[Out::kLanes * outputs];
  Out{sums, rows, rows, outputs, Out::kLanes, 0}.finish();
  for (std::int32_t m = 0; m < task.tokens; ++m) {
    for (std::int32_t n = 0; n < cols; n += I::kWidth) {
      store_part<I>(Storage::f32, y, m * task.row_stride + n, I::load(rows + m * outputs + n),
                    std::min(cols - n, I::kWidth));
    }
  }
}

// Entries of an output block, on average, up to which steps stand within them.
inline constexpr std::int64_t kFewEntries = 8;

// How steps and entries alternate: `burst` steps after each `run` entries, until a group has left. Fixed for
// a call, from the average row: run lengths that change are mispredicted.
struct Weave {
  std::int32_t run, burst;
  [[gnu::always_inline]] Weave(std::int32_t entries, int steps)
      : run(entries > steps ? entries / (steps + 1) : 1),
        burst(entries > steps ? 1 : (steps + entries) / (entries > 0 ? entries : 1)) {}
};

// A register tile's sums to where their group waits, quads of outputs transposed.
template <class I, int Rows, int Vectors>
[[gnu::always_inline]] inline void put_tile(Activation activation, const Vec<I> (&sum)[Rows][Vectors],
                                            float* to) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
#pragma GCC unroll 16
  for (int i = 0; i < Rows; i += 4) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      Vec<I> quad[4] = {sum[i][v], sum[i + 1][v], sum[i + 2][v], sum[i + 3][v]};
      I::transpose_quads(quad);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) I::store(to + (i + k) * lanes + v * I::kWidth, quad[k]);
    }
  }
  activate_all<I>(activation, to, Rows * lanes);
}

// kWithin: steps stand within blocks, after every so many of their columns, not between entries. A template
// of its own, as GCC makes 4×1 and 4×4 5–12 % slower in a loop that could do either.
template <class I, Layout kLayout, int kSteps, int Rows, int Vectors, bool kWithin>
void weave_rows(const WovenTask& task) {
  using Out = WayOut<I, Vectors>;
  constexpr int w = I::kWidth;
  constexpr int kShare = Out::kSteps * Rows / Out::kOutputs;  // steps of a register tile
  constexpr std::int64_t lanes = Out::kLanes;
  const SparseOperand& op = task.w;
  GatherRow row = gather_row<I, kLayout>(op, task.x, lanes, task.row[task.end]);
  const std::int32_t part = task.part;
  const std::int32_t average = (task.row[task.end] - task.row[task.begin]) / (task.end - task.begin);
  const Weave weave(average, kShare);
  // In kSteps columns.
  const std::int32_t period = std::int32_t{1} > average * op.red_block / kSteps / (kShare + 1)
                                  ? 1
                                  : average * op.red_block / kSteps / (kShare + 1);
  std::int32_t wait = period;
  float* sums = task.sums;
  float* before = sums + Out::kOutputs * lanes;
  Out out{before, nullptr, task.y, task.row_stride, task.tokens};
  const float* start = task.start;
  std::int32_t made = 0;   // outputs
  std::int32_t group = 0;  // of them, in this group
  for (std::int32_t o = task.begin; o < task.end && made < task.cols; ++o) {
    const std::int32_t first = task.row[o], end = task.row[o + 1];
    const std::int32_t last_part = end - least_entries(part);  // where it begins at the latest
    row.index = op.index + first;
    row.count = end - first;
    row.perm = op.perm + (op.perm != nullptr ? first : 0);
    const float* values =
        static_cast<const float*>(op.values) + (op.perm != nullptr ? 0 : first * op.block_size);
    for (std::int32_t r = 0; r < op.out_block && made < task.cols; r += Rows) {
      if (group == Out::kOutputs) {
        leave(task, made, out, sums, before);
        group = 0;
      }
      float* to = sums + group * lanes;
      Vec<I> sum[Rows][Vectors];
      const auto each = [](auto f) {
#pragma GCC unroll 16
        for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
          for (int v = 0; v < Vectors; ++v) f(i, v);
        }
      };
      each([&](int i, int v) { sum[i][v] = I::set1(start[i]); });
      bool begun = false;  // parts, kept where the sums will be
      for (std::int32_t e = first;;) {
        const std::int32_t stop = e + part <= last_part ? e + part : end;
        if constexpr (kWithin) {
          gather_entries<I, kLayout, kSteps>(row, values, e - first, stop - first, sum, [&] {
            if (--wait != 0) return;
            wait = period;
            if (out.done < Out::kSteps) out.step();
          });
          e = stop;
        }
        for (; !kWithin && out.done < Out::kSteps && stop - e >= weave.run; e += weave.run) {
          gather_entries<I, kLayout, kSteps>(row, values, e - first, e - first + weave.run, sum);
          for (std::int32_t b = 0; b < weave.burst && out.done < Out::kSteps; ++b) out.step();
        }
        if constexpr (!kWithin) gather_entries<I, kLayout, kSteps>(row, values, e - first, stop - first, sum);
        e = stop;
        if (stop == end) break;
        each([&](int i, int v) {
          float* total = to + i * lanes + v * w;
          I::store(total, begun ? I::add(sum[i][v], I::load(total)) : sum[i][v]);
          sum[i][v] = I::zero();
        });
        begun = true;
      }
      if (begun) each([&](int i, int v) { sum[i][v] = I::add(I::load(to + i * lanes + v * w), sum[i][v]); });
      put_tile<I>(task.activation, sum, to);
      values += kLayout == Layout::row_major ? Rows * row.stride : Rows;
      start += Rows;
      made += Rows;
      group += Rows;
    }
  }
  out.finish();
  put_group<I, Vectors>(task, sums, task.y + made - group, task.cols - (made - group));
}

// Rows of a tall block that read a run of its entries one after the other, and entries of a run: x and W of
// it and the rows' sums stay in an L1 of 32 KB.
inline constexpr std::int32_t kTallRows = 32, kTallRun = 112;

// weave_rows for R×1 blocks of several register tiles whose rows are longer than a run: run by run, not tile
// by tile, which has x come from L2 again for each tile. 32×1 at a density of 0.5, 768→3072, one thread of a
// Zen 3, x 24 tokens wide: 86 GFLOP/s for 73. Asking for the next run's x lost 2 %.
template <class I, int Rows, int Vectors>
void weave_tall(const WovenTask& task) {
  using Out = WayOut<I, Vectors>;
  constexpr int w = I::kWidth;
  constexpr int kShare = Out::kSteps * Rows / Out::kOutputs;  // steps of a register tile
  constexpr std::int64_t lanes = Out::kLanes;
  const SparseOperand& op = task.w;
  GatherRow row = gather_row<I, Layout::column>(op, task.x, lanes, task.row[task.end]);
  const std::int32_t average = (task.row[task.end] - task.row[task.begin]) / (task.end - task.begin);
  const Weave weave(std::min(average, kTallRun), kShare);
  alignas(64) float kept[kTallRows * lanes];   // sums between runs
  alignas(64) float total[kTallRows * lanes];  // of the parts before
  float* sums = task.sums;
  float* before = sums + Out::kOutputs * lanes;
  Out out{before, nullptr, task.y, task.row_stride, task.tokens};
  const float* start = task.start;
  std::int32_t made = 0;   // outputs
  std::int32_t group = 0;  // of them, in this group
  // Rows top … of output block o: entries in parts, parts in runs, a run for each register tile.
  const auto rows_of_block = [&](std::int32_t o, std::int32_t top) {
    const std::int32_t first = task.row[o], count = task.row[o + 1] - first;
    const std::int32_t last_part = count - least_entries(task.part);
    const auto end_of_part = [&](std::int32_t e) {
      return e + task.part <= last_part ? e + task.part : count;
    };
    const std::int32_t runs = std::max(1, (count + kTallRun - 1) / kTallRun),
                       size = (count + runs - 1) / runs;
    const std::int32_t tiles =
        (std::min({kTallRows, op.out_block - top, task.cols - made}) + Rows - 1) / Rows;
    row.index = op.index + first;
    const float* values = static_cast<const float*>(op.values) + first * op.block_size + top;
    std::int32_t e = 0, part_begin = 0, part_end = end_of_part(0);
    for (;;) {
      const std::int32_t stop = std::min(e + size, part_end);
      for (std::int32_t t = 0; t < tiles; ++t) {
        if (group == Out::kOutputs) {
          leave(task, made, out, sums, before);
          group = 0;
        }
        float* const mine = kept + t * Rows * lanes;
        float* const parts = total + t * Rows * lanes;
        Vec<I> sum[Rows][Vectors];
        const auto each = [&](auto f) {
#pragma GCC unroll 16
          for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 16
            for (int v = 0; v < Vectors; ++v) f(sum[i][v], i * lanes + v * w, i);
          }
        };
        if (e == 0) {
          each([&](Vec<I>& s, std::int64_t, int i) { s = I::set1(start[t * Rows + i]); });
        } else if (e == part_begin) {
          each([&](Vec<I>& s, std::int64_t, int) { s = I::zero(); });
        } else {
          each([&](Vec<I>& s, std::int64_t at, int) { s = I::load(mine + at); });
        }
        std::int32_t from = e;
        for (; out.done < Out::kSteps && stop - from >= weave.run; from += weave.run) {
          gather_entries<I, Layout::column, 1>(row, values + t * Rows, from, from + weave.run, sum);
          for (std::int32_t b = 0; b < weave.burst && out.done < Out::kSteps; ++b) out.step();
        }
        gather_entries<I, Layout::column, 1>(row, values + t * Rows, from, stop, sum);
        if (stop != part_end) {
          each([&](Vec<I>& s, std::int64_t at, int) { I::store(mine + at, s); });
          continue;
        }
        if (part_begin != 0)
          each([&](Vec<I>& s, std::int64_t at, int) { s = I::add(I::load(parts + at), s); });
        if (stop != count) {
          each([&](Vec<I>& s, std::int64_t at, int) { I::store(parts + at, s); });
          continue;
        }
        put_tile<I>(task.activation, sum, sums + group * lanes);
        made += Rows;
        group += Rows;
      }
      if (stop == count) break;
      e = stop;
      if (e == part_end) {
        part_begin = e;
        part_end = end_of_part(e);
      }
    }
    start += tiles * Rows;
  };
  for (std::int32_t o = task.begin; o < task.end && made < task.cols; ++o) {
    for (std::int32_t top = 0; top < op.out_block && made < task.cols; top += kTallRows)
      rows_of_block(o, top);
  }
  out.finish();
  put_group<I, Vectors>(task, sums, task.y + made - group, task.cols - (made - group));
}

template <class I, Layout kLayout, int kSteps, int Vectors>
void weave_vectors(const WovenTask& task) {
  constexpr int budget = I::kRegisters - Vectors - 1;
  if constexpr (kLayout == Layout::column && I::kRegisters == 16) {
    const std::int64_t entries = task.row[task.end] - task.row[task.begin];
    if (task.w.out_block >= 8 && entries > std::int64_t{kTallRun} * (task.end - task.begin)) {
      return weave_tall<I, 4, Vectors>(task);
    }
  }
  if constexpr (8 * Vectors <= budget) {
    if (task.w.out_block % 8 == 0) {
      if constexpr (kSteps > 1) {
        // Few blocks a row: bursts of steps between them would be too coarse.
        const std::int64_t entries = task.row[task.end] - task.row[task.begin];
        if (task.w.red_block >= 8 && entries <= kFewEntries * (task.end - task.begin)) {
          return weave_rows<I, kLayout, kSteps, 8, Vectors, true>(task);
        }
      }
      return weave_rows<I, kLayout, kSteps, 8, Vectors, false>(task);
    }
  }
  weave_rows<I, kLayout, kSteps, 4, Vectors, false>(task);
}

template <class I, Layout kLayout, int kSteps>
void weave(const WovenTask& task) {
  dispatch_vectors(task.vectors, [&]<int Vectors>() { weave_vectors<I, kLayout, kSteps, Vectors>(task); });
}

template <class I>
void woven(const WovenTask& task) {
  dispatch_layout<I>(task.w, [&]<Layout kLayout, int kSteps>() { weave<I, kLayout, kSteps>(task); });
}

}  // namespace rarefy::cpu
