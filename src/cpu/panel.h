// Between matrices of any storage and feature-major float panels: width × width transposes in registers, or
// copies of what lies by feature, with the activation applied on the way out.
#pragma once

#include "cpu/activation.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

template <class I>
Vec<I> load_as(Storage storage, const void* data, std::int64_t at) {
  switch (storage) {
    case Storage::f32: return I::load(static_cast<const float*>(data) + at);
    case Storage::bf16: return I::load_bf16(static_cast<const std::uint16_t*>(data) + at);
    case Storage::f16: return I::load_f16(static_cast<const std::uint16_t*>(data) + at);
    case Storage::i8:
      if constexpr (requires { I::load_i8(nullptr); })
        return I::load_i8(static_cast<const std::int8_t*>(data) + at);
  }
  return I::zero();
}

template <class I>
void store_as(Storage storage, void* data, std::int64_t at, Vec<I> v) {
  switch (storage) {
    case Storage::f32: return I::store(static_cast<float*>(data) + at, v);
    case Storage::bf16: return I::store_bf16(static_cast<std::uint16_t*>(data) + at, v);
    case Storage::f16: return I::store_f16(static_cast<std::uint16_t*>(data) + at, v);
    case Storage::i8: return;  // nothing is stored so
  }
}

static constexpr std::int64_t bytes_of(Storage storage) {
  return storage == Storage::f32 ? 4 : storage == Storage::i8 ? 1 : 2;
}

// The first `count` < width elements, the rest 0; through a buffer, since only edges come here.
template <class I>
Vec<I> load_part(Storage storage, const void* data, std::int64_t at, int count) {
  alignas(64) unsigned char buffer[I::kWidth * 4] = {};
  __builtin_memcpy(buffer, static_cast<const char*>(data) + at * bytes_of(storage),
                   static_cast<std::size_t>(count * bytes_of(storage)));
  return load_as<I>(storage, buffer, 0);
}

template <class I>
void store_part(Storage storage, void* data, std::int64_t at, Vec<I> v, int count) {
  alignas(64) unsigned char buffer[I::kWidth * 4];
  store_as<I>(storage, buffer, 0, v);
  __builtin_memcpy(static_cast<char*>(data) + at * bytes_of(storage), buffer,
                   static_cast<std::size_t>(count * bytes_of(storage)));
}

// y = y + total, or total alone; `count` floats, whole vectors.
template <class I>
void add_total(float* y, const float* total, std::int64_t count, bool first = false) {
  for (std::int64_t i = 0; i < count; i += I::kWidth) {
    const Vec<I> sum = I::load(total + i);
    I::store(y + i, first ? sum : I::add(sum, I::load(y + i)));
  }
}

template <class I>
void clear(float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += I::kWidth) I::store(y + i, I::zero());
}

// Calls f with the storage as a compile-time constant: the tile loops must not branch on it.
template <class F>
void dispatch_storage(Storage storage, F f) {
  switch (storage) {
    case Storage::f32: return f.template operator()<Storage::f32>();
    case Storage::bf16: return f.template operator()<Storage::bf16>();
    case Storage::f16: return f.template operator()<Storage::f16>();
    case Storage::i8: return;  // few.h alone has it
  }
}

// The same with the vectors of a panel, of which no table of kernels has more (max_vectors).
template <class F>
void dispatch_vectors(std::int32_t vectors, F f) {
  switch (vectors) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
    default: return;
  }
}

template <class I, Storage kStorage>
void pack_edge(const PackTask& task, std::int32_t m, std::int32_t k) {
  constexpr int w = I::kWidth;
  const RowBlock& from = task.from;
  const int cols = from.cols - k < w ? from.cols - k : w;
  Vec<I> tile[w];
  for (int i = 0; i < w; ++i) {
    const std::int64_t at = (m + i) * from.row_stride + k;
    tile[i] = m + i < from.rows ? load_part<I>(kStorage, from.data, at, cols) : I::zero();
  }
  I::transpose(tile);
  float* to = task.panel + static_cast<std::int64_t>(k) * task.lanes + m;
  for (int i = 0; i < cols; ++i) I::store(to + static_cast<std::int64_t>(i) * task.lanes, tile[i]);
}

template <class I, Storage kStorage>
void pack_features(const PackTask& task) {
  constexpr int w = I::kWidth;
  const RowBlock& from = task.from;
  float* to = task.panel;
  for (std::int64_t k = 0; k < from.cols; ++k, to += task.lanes) {
    const std::int64_t at = k * from.row_stride;
    for (std::int32_t m = 0; m < task.lanes; m += w) {
      const int rows = from.rows - m;
      I::store(to + m, rows >= w  ? load_as<I>(kStorage, from.data, at + m)
                       : rows > 0 ? load_part<I>(kStorage, from.data, at + m, rows)
                                  : I::zero());
    }
  }
}

template <class I>
void pack(const PackTask& task) {
  constexpr int w = I::kWidth;
  const RowBlock& from = task.from;
  dispatch_storage(from.storage, [&]<Storage kStorage>() {
    if (from.by_feature) return pack_features<I, kStorage>(task);
    for (std::int32_t m = 0; m < task.lanes; m += w) {
      std::int32_t k = 0;
      if (m + w <= from.rows) {
        for (; k + w <= from.cols; k += w) {
          Vec<I> tile[w];
          std::int64_t at = m * from.row_stride + k;
#pragma GCC unroll 16
          for (int i = 0; i < w; ++i, at += from.row_stride) tile[i] = load_as<I>(kStorage, from.data, at);
          I::transpose(tile);
          float* to = task.panel + static_cast<std::int64_t>(k) * task.lanes + m;
#pragma GCC unroll 16
          for (int i = 0; i < w; ++i, to += task.lanes) I::store(to, tile[i]);
        }
      }
      for (; k < from.cols; k += w) pack_edge<I, kStorage>(task, m, k);
    }
  });
}

// The activation of `gate`, times values; whole vectors.
template <class I>
void apply_gate(Activation activation, const float* gate, float* values, std::int64_t count) {
  constexpr std::int64_t some = kAtOnce<I> * I::kWidth;
  for (std::int64_t i = 0; i < count; i += some) {
    const std::int64_t now = count - i < some ? count - i : some;
    alignas(64) float active[some];
    for (std::int64_t v = 0; v < now; v += I::kWidth) I::store(active + v, I::load(gate + i + v));
    activate_all<I>(activation, active, now);
    for (std::int64_t v = 0; v < now; v += I::kWidth) {
      I::store(values + i + v, I::mul(I::load(active + v), I::load(values + i + v)));
    }
  }
}

// Tokens m … m + width, features n … n + cols, all of them whole tiles: straight to their rows.
template <class I, Storage kStorage>
void store_tiles(const StoreTask& task, std::int32_t m, std::int32_t n, int cols) {
  constexpr int w = I::kWidth;
  for (int done = 0; done < cols; done += w) {
    Vec<I> tile[w];
    const float* from = task.panel + static_cast<std::int64_t>(n + done) * task.lanes + m;
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i, from += task.lanes) tile[i] = I::load(from);
    I::transpose(tile);
    std::int64_t at = m * task.row_stride + n + done;
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i, at += task.row_stride) store_as<I>(kStorage, task.data, at, tile[i]);
  }
}

// The same for edges, and where a tile's rows fall into one set of L1 (a stride of whole pages): rows
// leave one after the other, as runs of cache lines. Elsewhere it takes twice as long as store_tiles, but
// there tiles write at a third of the speed on Zen 5 (14 against 40 GB/s), and no faster on Zen 4.
inline constexpr int kRun = 64;  // floats
inline constexpr std::int64_t kPage = 4096;

template <class I, Storage kStorage>
void store_run(const StoreTask& task, std::int32_t m, std::int32_t n, int cols) {
  constexpr int w = I::kWidth;
  alignas(64) float run[w][kRun];
  for (int done = 0; done < cols; done += w) {
    Vec<I> tile[w];
    for (int i = 0; i < w; ++i) {
      const float* from = task.panel + static_cast<std::int64_t>(n + done + i) * task.lanes + m;
      tile[i] = done + i < cols ? I::load(from) : I::zero();
    }
    I::transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) I::store(run[i] + done, tile[i]);
  }
  const int whole = cols - cols % w;
  const int rows = task.rows - m < w ? task.rows - m : w;
  for (int i = 0; i < rows; ++i) {
    const std::int64_t at = (m + i) * task.row_stride + n;
    for (int j = 0; j < whole; j += w) store_as<I>(kStorage, task.data, at + j, I::load(run[i] + j));
    if (whole < cols) store_part<I>(kStorage, task.data, at + whole, I::load(run[i] + whole), cols - whole);
  }
}

template <class I, Storage kStorage>
void store_features(const StoreTask& task) {
  constexpr int w = I::kWidth;
  const float* from = task.panel;
  for (std::int64_t n = 0; n < task.cols; ++n, from += task.lanes) {
    const std::int64_t at = n * task.row_stride;
    std::int32_t m = 0;
    for (; m + w <= task.rows; m += w) store_as<I>(kStorage, task.data, at + m, I::load(from + m));
    if (m < task.rows) store_part<I>(kStorage, task.data, at + m, I::load(from + m), task.rows - m);
  }
}

template <class I>
void store(const StoreTask& task) {
  activate_all<I>(task.activation, task.panel, static_cast<std::int64_t>(task.cols) * task.lanes);
  dispatch_storage(task.storage, [&]<Storage kStorage>() {
    if (task.by_feature) return store_features<I, kStorage>(task);
    const bool pages = task.row_stride * bytes_of(kStorage) % kPage == 0;
    for (std::int32_t m = 0; m < task.rows; m += I::kWidth) {
      for (std::int32_t n = 0; n < task.cols; n += kRun) {
        const int cols = task.cols - n < kRun ? task.cols - n : kRun;
        if (!pages && m + I::kWidth <= task.rows && cols % I::kWidth == 0) {
          store_tiles<I, kStorage>(task, m, n, cols);
        } else {
          store_run<I, kStorage>(task, m, n, cols);
        }
      }
    }
  });
}

template <class I>
void unpack(Storage from, const void* values, std::int64_t count, float* to) {
  constexpr int w = I::kWidth;
  std::int64_t i = 0;
  for (; i + w <= count; i += w) I::store(to + i, load_as<I>(from, values, i));
  if (i < count) {
    store_part<I>(Storage::f32, to, i, load_part<I>(from, values, i, static_cast<int>(count - i)),
                  static_cast<int>(count - i));
  }
}

// Blocks of kEnd to 2 · kEnd elements, picked by perm. They are put side by side first, so that what becomes
// float are whole vectors: block by block, 1×4 in bf16 took four times as long as all the rest.
template <class I, int kEnd>
void unpack_small(const SparseOperand& w, std::int32_t e, std::int32_t count, float* to) {
  constexpr std::int64_t kBuffer = 1024;
  const std::int64_t size = w.block_size;
  const auto at_once = static_cast<std::int32_t>(kBuffer / size);
  const auto* values = static_cast<const std::uint16_t*>(w.values);
  alignas(64) std::uint16_t near[kBuffer];
  while (count > 0) {
    const std::int32_t some = count < at_once ? count : at_once;
    std::uint16_t* block = near;
    for (std::int32_t i = 0; i < some; ++i, block += size) {
      const std::uint16_t* from = values + w.perm[e + i] * size;
      // Both ends, which may overlap: lengths that the compiler knows.
      __builtin_memcpy(block, from, kEnd * 2);
      __builtin_memcpy(block + size - kEnd, from + size - kEnd, kEnd * 2);
    }
    unpack<I>(w.storage, near, some * size, to);
    to += some * size;
    e += some;
    count -= some;
  }
}

// `count` entries from e on, one after the other.
template <class I>
void unpack_entries(const SparseOperand& w, std::int32_t e, std::int32_t count, float* to) {
  const auto* values = static_cast<const std::uint16_t*>(w.values);
  const std::int64_t size = w.block_size;
  if (w.perm == nullptr) return unpack<I>(w.storage, values + e * size, count * size, to);
  if (size == 1) return unpack_small<I, 1>(w, e, count, to);
  if (size < 4) return unpack_small<I, 2>(w, e, count, to);
  if (size < 8) return unpack_small<I, 4>(w, e, count, to);
  if (size < 16) return unpack_small<I, 8>(w, e, count, to);
  for (std::int32_t i = 0; i < count; ++i, to += size) {
    unpack<I>(w.storage, values + w.perm[e + i] * size, size, to);
  }
}

template <class I>
void round_to(Storage to, const float* values, std::int64_t count, void* out) {
  constexpr int w = I::kWidth;
  std::int64_t i = 0;
  for (; i + w <= count; i += w) store_as<I>(to, out, i, I::load(values + i));
  if (i < count) {
    const int rest = static_cast<int>(count - i);
    store_part<I>(to, out, i, load_part<I>(Storage::f32, values, i, rest), rest);
  }
}

}  // namespace rarefy::cpu
