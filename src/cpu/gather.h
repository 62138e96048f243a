// Output stationary: rows × vectors accumulators stay in registers while the entries of an output
// block stream by. Per reduction feature: `vectors` loads of X, `rows` broadcasts of W, and
// rows · vectors FMAs. X comes from L2: 128 / rows bytes a cycle at full rate on AVX-512.
#pragma once

#include "cpu/panel.h"

namespace rarefy::cpu {

// How the weights of one entry lie, as seen from a register tile of output features.
enum class Layout : std::uint8_t {
  column,        // R×1 by rows: contiguous, one reduction feature, entries in order
  plain_column,  // the same, but no lines of x are asked for
  row_major,     // by rows: the reduction is contiguous, entries in order
  transposed,    // through the transposed index: the output is contiguous, entries in order of perm
};

// How far ahead weights are asked for, floats. Of 8 rows and more, where vectors are lines: 8 KB, into L2, as
// L1 is x's. 32×1 at a density of 0.25, 512 tokens, one thread of a Zen 5, ms: 4096² 19.8 → 19.6 in a quiet
// minute, 21.1 → 19.9 beside other work, 4096→11008 52.2 → 51.1 and 55.9 → 51.7. 4×1 lost 3 %, AVX2 4 %.
template <class I>
inline constexpr bool kLines = I::kWidth * sizeof(float) == 64;
inline constexpr std::int64_t kNear = 512, kFar = 2048;

// Reduction features of one pass of the inner loop, where they divide the block: 4 × 4 needs no loop.
inline constexpr int kUnroll = 4;

// Entries of single reduction features in one pass of it, where a vector is a cache line. One by one, 4×1 ran
// at 80 % of the peak with x in L2 (Zen 5), in fours at 90, and with the lines of x asked for that the next
// four read, at 94. AVX2 has no registers left for it (− 4 to − 12 %). Ice Lake starts one load of 512 bits a
// cycle for two FMAs; asking, which takes half of one's place, was 14 % of 4×1's time there, 13 of 32×1's.
template <class I>
inline constexpr int kEntries = kLines<I> ? 4 : 1;

// Positions in order: of transposed entries after unpacking.
struct Identity {
  std::int32_t position[kUnpacked] = {};
  constexpr Identity() {
    for (std::int32_t i = 0; i < kUnpacked; ++i) position[i] = i;
  }
};
inline constexpr Identity kIdentity;

// Entries of one output block, values already float. Passed by reference and never copied: a copy is a
// load across several fresh stores, which stalls for a tenth of a short block row.
struct GatherRow {
  const std::int32_t* index;
  const std::int32_t* perm;  // positions of transposed entries
  std::int32_t count;
  std::int32_t red_block;
  std::int32_t ahead;  // entries, to prefetch
  std::int64_t block_size;
  std::int64_t x_block;  // floats of a reduction block in the panel
  std::int64_t stride;   // between output features (row_major) or reduction features (transposed)
  const float* x;
  const std::int32_t* bound;  // where indices end that can be read
};

// Reads memory again. What a loop over entries needs once an entry stays there: GCC would keep it in a
// register, run out of them, and spill to vector registers, where reading it back waits behind the FMAs.
template <class T>
[[gnu::always_inline]] inline T reload(const T& memory) {
  return *const_cast<const volatile T*>(&memory);
}

// What is done along the way, after each kSteps reduction features of a block. Here: nothing.
struct NoBlockWork {
  [[gnu::always_inline]] void operator()() const {}
};

// Entries from … to of the row, added to the sums; `values` of its entry 0 on.
template <class I, Layout kLayout, int kSteps, int Rows, int Vectors, class Work = NoBlockWork>
[[gnu::always_inline]] inline void gather_entries(const GatherRow& row, const float* values,
                                                  std::int32_t from, std::int32_t to,
                                                  Vec<I> (&sum)[Rows][Vectors], Work work = {}) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  constexpr bool far = kLines<I> && Rows > 4;
  const auto step = [&sum](const float* x, const float* w, std::int64_t stride) {
    Vec<I> xv[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) xv[v] = I::load(x + v * I::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Vec<I> wv = I::set1(w[r * stride]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sum[r][v] = I::fma(wv, xv[v], sum[r][v]);
    }
  };
  const std::int32_t* index = row.index + from;
  const std::int32_t* stop = row.index + to;
  // Weights stream in from L3 or memory, and the hardware loses them between the rows of X: asking
  // for them kNear floats early doubled the speed of a 33 MB weight.
  if constexpr (kLayout == Layout::column || kLayout == Layout::plain_column) {
    constexpr int entries = kEntries<I>;
    constexpr bool asks = kLayout == Layout::column;
    const float* w = values + from * row.block_size;
    if constexpr (entries > 1) {
      for (; stop - index >= entries; index += entries) {
        [[maybe_unused]] const std::int32_t* later =
            asks && row.bound - index >= 2 * entries ? index + entries : index;
#pragma GCC unroll 4
        for (int i = 0; i < entries; ++i, w += row.block_size) {
          if (i == 0 || Rows > 4) __builtin_prefetch(w + (far ? kFar : kNear), 0, far ? 2 : 3);
#pragma GCC unroll 4
          for (int v = 0; asks && v < Vectors; ++v) {
            __builtin_prefetch(row.x + later[i] * lanes + v * I::kWidth);
          }
          step(row.x + index[i] * lanes, w, 1);
        }
      }
    }
    for (; index != stop; ++index, w += row.block_size) {
      if constexpr (entries == 1) __builtin_prefetch(w + kNear);
      step(row.x + *index * lanes, w, 1);
    }
  } else if constexpr (kLayout == Layout::row_major) {
    const float* w = values + from * row.block_size;
    const float* next = w + row.ahead * row.block_size;
    for (; index != stop;
         ++index, w += row.block_size - row.red_block, next += row.block_size - Rows * row.red_block) {
      const float* x = row.x + *index * row.x_block;
      for (std::int32_t left = row.red_block; left != 0; left -= kSteps, w += kSteps, next += kSteps * Rows) {
#pragma GCC unroll 4
        for (int i = 0; i < kSteps; ++i, x += lanes) {
          if (i * Rows % 16 == 0) __builtin_prefetch(next + i * Rows, 0, far ? 2 : 3);
          step(x, w + i, row.stride);
        }
        work();
      }
    }
  } else {
    const std::int32_t* perm = row.perm + from;
    for (; index != stop; ++index, ++perm) {
      const std::int32_t later = reload(row.ahead);
      const float* w = values + *perm * reload(row.block_size);
      const float* next = values + perm[later < stop - index ? later : 0] * reload(row.block_size);
      const float* x = reload(row.x) + *index * reload(row.x_block);
      for (std::int32_t left = reload(row.red_block); left != 0; left -= kSteps) {
#pragma GCC unroll 4
        for (int i = 0; i < kSteps; ++i, x += lanes, w += row.stride, next += row.stride) {
          __builtin_prefetch(next);
          step(x, w, 1);
        }
        work();
      }
    }
  }
}

// `Rows` output features from `values` (of entry 0), `y` and `start` on.
template <class I, Layout kLayout, int kSteps, int Rows, int Vectors>
void gather_tile(const GatherRow& row, const float* values, float* y, const float* start) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  Vec<I> sum[Rows][Vectors];
  const auto each = [](auto f) {
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) f(r, v);
    }
  };
  if (start != nullptr) {
    each([&](int r, int v) { sum[r][v] = I::set1(start[r]); });
  } else {
    each([&](int r, int v) { sum[r][v] = I::load(y + r * lanes + v * I::kWidth); });
  }
  gather_entries<I, kLayout, kSteps>(row, values, 0, row.count, sum);
  each([&](int r, int v) { I::store(y + r * lanes + v * I::kWidth, sum[r][v]); });
}

// Cuts an output block into register tiles, tallest first.
template <class I, Layout kLayout, int kSteps, int Vectors>
void gather_block(const GatherRow& row, std::int32_t out_block, const float* values, float* y,
                  const float* start) {
  constexpr std::int64_t lanes = Vectors * I::kWidth;
  constexpr int budget = I::kRegisters - Vectors - 1;  // accumulators beside X and one broadcast
  const auto step = [&]<int Rows>() {
    gather_tile<I, kLayout, kSteps, Rows, Vectors>(row, values, y, start);
    values += kLayout == Layout::row_major ? Rows * row.stride : Rows;
    y += Rows * lanes;
    if (start != nullptr) start += Rows;
  };
  if constexpr (8 * Vectors <= budget) {
    for (; out_block >= 8; out_block -= 8) step.template operator()<8>();
  }
  if constexpr (4 * Vectors <= budget) {
    for (; out_block >= 4; out_block -= 4) step.template operator()<4>();
  }
  for (; out_block >= 2; out_block -= 2) step.template operator()<2>();
  if (out_block == 1) step.template operator()<1>();
}

// What all rows of W have in common; `x` is the panel from reduction block 0 on.
template <class I, Layout kLayout>
GatherRow gather_row(const SparseOperand& w, const float* x, std::int64_t lanes, std::int32_t entries) {
  GatherRow row{};
  row.bound = w.index + entries;
  row.red_block = w.red_block;
  row.block_size = w.block_size;
  const std::int64_t ahead = kLayout == Layout::row_major && kLines<I> && w.out_block >= 8 ? kFar : kNear;
  row.ahead = w.block_size < ahead ? static_cast<std::int32_t>(ahead / w.block_size) : 1;
  row.stride = kLayout == Layout::row_major ? w.out_stride : w.red_stride;
  row.x_block = w.red_block * lanes;
  row.x = x;
  return row;
}

template <class I, Layout kLayout, int kSteps, int Vectors>
void gather_blocks(const GatherTask& task) {
  const SparseOperand& w = task.w;
  const std::int64_t lanes = Vectors * I::kWidth;
  GatherRow row =
      gather_row<I, kLayout>(w, task.x - task.x_first * w.red_block * lanes, lanes, task.row[task.end]);
  const std::int32_t part = task.part;
  const std::int64_t chunk = w.block_size < kUnpacked ? kUnpacked / w.block_size : 1;
  const std::int64_t size = w.out_block * lanes;
  float* y = task.y;
  const float* start = task.start;
  for (std::int32_t o = task.begin; o < task.end; ++o, y += size) {
    const std::int32_t first = task.row[o];
    const std::int32_t last_part = task.row[o + 1] - least_entries(part);  // where it begins at the latest
    const std::int32_t end = task.entry_end[o];
    std::int32_t e = task.entry_begin[o];
    const float* from = start;
    if (start != nullptr) start += w.out_block;
    if (e == end && e != first) continue;  // the rest of the row was in earlier tiles
    const bool several = first + part <= last_part;
    float* total = several ? task.total + (o - task.begin) * task.total_step : nullptr;
    std::int32_t full = first + part;  // where the open part ends, unless it is the last
    if (e != first) full += (e - first - 1) / part * part;
    do {  // at least once, to write y
      if (e == full && full <= last_part) {
        if (full != first + part) add_total<I>(total, y, size);
        clear<I>(y, size);
        full += part;
      }
      float* sums = several && full == first + part ? total : y;  // the first part is the total so far
      row.count = (full <= last_part && full < end ? full : end) - e;
      row.index = w.index + e;
      if (w.storage == Storage::f32) {
        const auto* values = static_cast<const float*>(w.values);
        if (w.perm != nullptr) row.perm = w.perm + e;
        gather_block<I, kLayout, kSteps, Vectors>(
            row, w.out_block, w.perm != nullptr ? values : values + e * w.block_size, sums, from);
      } else {  // 16-bit values become float in L1
        if (row.count > chunk) row.count = static_cast<std::int32_t>(chunk);
        unpack_entries<I>(w, e, row.count, task.unpacked);
        row.perm = kIdentity.position;
        gather_block<I, kLayout, kSteps, Vectors>(row, w.out_block, task.unpacked, sums, from);
      }
      from = nullptr;
      e += row.count;
    } while (e < end);
    if (several && e == task.row[o + 1]) add_total<I>(y, total, size);
  }
}

template <class I, Layout kLayout, int kSteps>
void gather_vectors(const GatherTask& task) {
  dispatch_vectors(task.vectors, [&]<int Vectors>() { gather_blocks<I, kLayout, kSteps, Vectors>(task); });
}

// Calls f with the layout of W, and how far its reduction is unrolled, as compile-time constants.
template <class I, class F>
void dispatch_layout(const SparseOperand& w, F f) {
  const auto steps = [&]<Layout kLayout>() {
    if constexpr (I::kWidth >= 8) {  // for lanes that are a loop, it would be code without speed
      if (w.red_block % kUnroll == 0) return f.template operator()<kLayout, kUnroll>();
    }
    f.template operator()<kLayout, 1>();
  };
  if (w.perm != nullptr) return steps.template operator()<Layout::transposed>();
  if (w.red_block == 1 && w.out_stride == 1) {
    if constexpr (kLines<I>) {
      if (!w.asks_x) return f.template operator()<Layout::plain_column, 1>();
    }
    return f.template operator()<Layout::column, 1>();
  }
  steps.template operator()<Layout::row_major>();
}

template <class I>
void gather(const GatherTask& task) {
  dispatch_layout<I>(task.w, [&]<Layout kLayout, int kSteps>() { gather_vectors<I, kLayout, kSteps>(task); });
}

}  // namespace rarefy::cpu
