// gather.h with its way out woven in: the sums of a group, as many outputs as a vector has lanes, are
// transposed and go to rows of Y while those of the next group are made, four vectors at a time between runs
// of entries. FMAs leave a shuffle pipe and the stores idle, but no processor looks far enough ahead to find
// them: in one piece the way out of 4×1 at a density of 0.1 took a fifth of the time (Zen 4), now 5 %.
#pragma once

#include "cpu/gather.h"

namespace rarefy::cpu {

// What remains to be done with a complete group: [output][token] floats, whose quads of outputs are
// transposed.
template <class I, int Vectors>
struct WayOut {
  static constexpr int kWidth = I::kWidth, kLanes = Vectors * kWidth, kQuads = kWidth / 4;
  static constexpr int kSteps = 4 * Vectors;  // every fourth token of a vector each

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
    Vec<I> out[kQuads];
#pragma GCC unroll 4
    for (int i = 0; i < kQuads; ++i) out[i] = I::load(from + std::int64_t{i} * 4 * kLanes);
    I::transpose_lanes(out);
#pragma GCC unroll 4
    for (int i = 0; i < kQuads; ++i) {
      const std::int64_t at = (m + 4 * i) * stride;
      const bool exists = m + 4 * i < tokens;
      I::store(exists ? y + at : none, out[i]);
      // For ownership: a store would wait for its line, and the ones behind it with it.
      __builtin_prefetch(next + (exists ? at : 0), 1);
    }
  }

  void finish() {
    while (done < kSteps) step();
  }
};

// A complete group at once, of whose outputs the first `cols` exist.
template <class I, int Vectors>
void put_group(const WovenTask& task, const float* sums, float* y, std::int32_t cols) {
  using Out = WayOut<I, Vectors>;
  constexpr int w = I::kWidth;
  if (cols >= w) return Out{sums, y, y, task.row_stride, task.tokens, 0}.finish();
  alignas(64) float rows[Out::kLanes * w];
  Out{sums, rows, rows, w, Out::kLanes, 0}.finish();
  for (std::int32_t m = 0; m < task.tokens; ++m) {
    store_part<I>(Storage::f32, y, m * task.row_stride, I::load(rows + m * w), cols);
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

// kWithin: steps stand within blocks, after every so many of their columns, not between entries. A template
// of its own, as GCC makes 4×1 and 4×4 5–12 % slower in a loop that could do either.
template <class I, Layout kLayout, int kSteps, int Rows, int Vectors, bool kWithin>
void weave_rows(const WovenTask& task) {
  using Out = WayOut<I, Vectors>;
  constexpr int w = I::kWidth;
  constexpr int kShare = Out::kSteps * Rows / w;  // steps of a register tile
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
  float* before = sums + w * lanes;
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
      if (group == w) {
        out.finish();  // what short rows left
        out.sums = sums;
        out.y = task.y + made - w;
        out.next = task.y + made;
        out.done = 0;
        float* made_before = sums;
        sums = before;
        before = made_before;
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
#pragma GCC unroll 16
      for (int i = 0; i < Rows; i += 4) {
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) {
          Vec<I> quad[4] = {sum[i][v], sum[i + 1][v], sum[i + 2][v], sum[i + 3][v]};
          I::transpose_quads(quad);
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) I::store(to + (i + k) * lanes + v * w, quad[k]);
        }
      }
      activate_all<I>(task.activation, to, Rows * lanes);
      values += kLayout == Layout::row_major ? Rows * row.stride : Rows;
      start += Rows;
      made += Rows;
      group += Rows;
    }
  }
  out.finish();
  put_group<I, Vectors>(task, sums, task.y + made - group, task.cols - (made - group));
}

template <class I, Layout kLayout, int kSteps, int Vectors>
void weave_vectors(const WovenTask& task) {
  constexpr int budget = I::kRegisters - Vectors - 1;
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
