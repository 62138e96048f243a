// The units of a score matrix, as keys: read, added up and ordered anew at each pass over them, so that
// nothing of the size of the matrix is kept. Units of many elements are few, and their keys are kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/checked.h"
#include "prune/keys.h"
#include "prune/lanes.h"
#include "rarefy/prune.h"

namespace rarefy::prune {

inline bool bit(const std::uint8_t* row, std::int64_t col) { return ((row[col / 8] >> (col % 8)) & 1) != 0; }

// Memory of one worker.
template <class Real>
struct Scratch {
  std::vector<Real> values;
  std::vector<double> sums;
  std::vector<KeyOf<Real>> keys;
};

template <class T>
class Units {
 public:
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Key = KeyOf<Real>;

  Units(const PruneScores& scores, const PruneUnits& units)
      : s_(scores), u_(units), groups_(units.of > 0 && units.block.rows == 1 && units.block.cols == 1) {
    unit_rows_ = groups_ ? 1 : std::min(u_.block.rows, std::max<std::int64_t>(s_.matrix.rows, 1));
    unit_cols_ = groups_ ? u_.of : std::min(u_.block.cols, std::max<std::int64_t>(s_.matrix.cols, 1));
    rows_ = ceil_div(s_.matrix.rows, unit_rows_);
    cols_ = ceil_div(s_.matrix.cols, unit_cols_);
  }

  const PruneScores& scores() const { return s_; }
  const PruneUnits& units() const { return u_; }
  bool groups() const { return groups_; }  // units are groups of `of`, not blocks
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  std::int64_t unit_rows() const { return unit_rows_; }
  std::int64_t unit_cols() const { return unit_cols_; }

  // Rows of units that make a task worth handing out.
  std::int64_t rows_per_task() const {
    constexpr std::int64_t kElements = 1 << 16;
    return std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, unit_rows_ * s_.matrix.cols));
  }
  std::int64_t tasks() const { return ceil_div(rows_, rows_per_task()); }

  // Keeps the keys if they are few.
  void keep_keys(const Executor& executor, std::vector<Scratch<Real>>& scratch) {
    if (groups_ || unit_rows_ * unit_cols_ < 8) return;  // at most an eighth of the scores
    kept_.resize(static_cast<std::size_t>(rows_ * cols_));
    executor.parallel_for(tasks(), [&](std::int64_t task, int worker) {
      for (std::int64_t i = task * rows_per_task(); i < std::min(rows_, (task + 1) * rows_per_task()); ++i) {
        compute(i, kept_.data() + i * cols_, scratch[static_cast<std::size_t>(worker)]);
      }
    });
  }

  // The keys of a row of units.
  const Key* keys(std::int64_t row, Scratch<Real>& scratch) const {
    if (!kept_.empty()) return kept_.data() + row * cols_;
    scratch.keys.resize(static_cast<std::size_t>(cols_));
    compute(row, scratch.keys.data(), scratch);
    return scratch.keys.data();
  }

  // The keys of a row of elements.
  void element_keys(std::int64_t row, Key* out) const {
    const T* x = row_of(row);
    const std::int64_t n = s_.matrix.cols;
    if (s_.importance == Importance::value) {
      for (std::int64_t c = 0; c < n; ++c) out[c] = key_of<Real>(read(x + c));
    } else if (s_.column_scale == nullptr) {
      for (std::int64_t c = 0; c < n; ++c) out[c] = key_of<Real>(std::abs(read(x + c)));
    } else {
      for (std::int64_t c = 0; c < n; ++c) out[c] = key_of(static_cast<Real>(root(scaled(x[c], c))));
    }
    static_assert(kRemovedKey == 0);
    if (s_.previous != nullptr) keep_lanes(out, n, previous_row(row));
  }

  const std::uint8_t* previous_row(std::int64_t row) const {
    return s_.previous + row * mask_row_bytes(s_.matrix.cols);
  }

 private:
  const T* row_of(std::int64_t row) const {
    return static_cast<const T*>(s_.matrix.data) + row * s_.matrix.row_stride;
  }
  double root(double sum) const { return s_.importance == Importance::square ? std::sqrt(sum) : sum; }

  double scaled(const T& element, std::int64_t col) const {
    const double x = read(&element), scale = s_.column_scale == nullptr ? 1.0 : s_.column_scale[col];
    switch (s_.importance) {
      case Importance::value: return x;
      case Importance::magnitude: return std::abs(x) * scale;
      case Importance::square: return x * x * scale;
    }
    return x;
  }

  void compute(std::int64_t row, Key* out, Scratch<Real>& scratch) const {
    if (groups_) return losses(row, out, scratch);
    if (unit_rows_ == 1 && unit_cols_ == 1) return element_keys(row, out);
    // Element sums of one unit row, by column, then by unit: whole units at a time, 16 KB of sums.
    const std::int64_t per_chunk = std::max<std::int64_t>(1, 2048 / unit_cols_);
    scratch.sums.resize(static_cast<std::size_t>(per_chunk * unit_cols_));
    const std::int64_t first = row * unit_rows_, last = std::min(first + unit_rows_, s_.matrix.rows);
    for (std::int64_t begin = 0; begin < cols_; begin += per_chunk) {
      const std::int64_t end = std::min(begin + per_chunk, cols_);
      const std::int64_t col = begin * unit_cols_, n = std::min(end * unit_cols_, s_.matrix.cols) - col;
      double* sums = scratch.sums.data();
      std::fill_n(sums, n, 0.0);
      for (std::int64_t r = first; r < last; ++r) add(row_of(r) + col, col, n, sums);
      for (std::int64_t j = begin; j < end; ++j) {
        double sum = 0;
        const std::int64_t to = std::min((j - begin + 1) * unit_cols_, n);
        for (std::int64_t c = (j - begin) * unit_cols_; c < to; ++c) sum += sums[c];
        out[j] = removed(first, last, j) ? Key{kRemovedKey} : key_of(static_cast<Real>(root(sum)));
      }
    }
  }

  void add(const T* x, std::int64_t col, std::int64_t n, double* sums) const {
    const double* scale = s_.column_scale == nullptr ? nullptr : s_.column_scale + col;
    const auto each = [&](auto importance) {
      if (scale == nullptr) {
        for (std::int64_t c = 0; c < n; ++c) sums[c] += importance(static_cast<double>(read(x + c)));
      } else {
        for (std::int64_t c = 0; c < n; ++c) {
          sums[c] += importance(static_cast<double>(read(x + c))) * scale[c];
        }
      }
    };
    switch (s_.importance) {
      case Importance::value: return each([](double v) { return v; });
      case Importance::magnitude: return each([](double v) { return std::abs(v); });
      case Importance::square: return each([](double v) { return v * v; });
    }
  }

  // Whether the previous mask has nothing left of a block.
  bool removed(std::int64_t first, std::int64_t last, std::int64_t unit) const {
    if (s_.previous == nullptr) return false;
    const std::int64_t begin = unit * unit_cols_, end = std::min(begin + unit_cols_, s_.matrix.cols);
    for (std::int64_t r = first; r < last; ++r) {
      const std::uint8_t* before = previous_row(r);
      for (std::int64_t c = begin; c < end; ++c) {
        if (bit(before, c)) return false;
      }
    }
    return true;
  }

  // What each group of a row would lose: the sum of its lowest elements, all but `keep`.
  void losses(std::int64_t row, Key* out, Scratch<Real>& scratch) const {
    const T* x = row_of(row);
    scratch.sums.resize(static_cast<std::size_t>(u_.of));
    for (std::int64_t j = 0; j < cols_; ++j) {
      const std::int64_t begin = j * u_.of, n = std::min(u_.of, s_.matrix.cols - begin);
      const std::int64_t lost = std::max<std::int64_t>(0, n - u_.keep);
      bool was = false;
      double* v = scratch.sums.data();
      for (std::int64_t c = 0; c < n; ++c) {
        const double value = scaled(x[begin + c], begin + c);
        v[c] = value != value ? -std::numeric_limits<double>::infinity() : value;
        was = was || (s_.previous != nullptr && !bit(previous_row(row), begin + c));
      }
      if (lost > 0 && lost < n) std::nth_element(v, v + lost - 1, v + n);
      std::sort(v, v + lost);  // one order of summation, whatever nth_element left
      double sum = 0;
      for (std::int64_t c = 0; c < lost; ++c) sum += v[c];
      out[j] = was ? Key{kRemovedKey} : key_of(static_cast<Real>(root(std::max(sum, lowest()))));
    }
  }

  // A group with a NaN loses first; the root of −∞ would be NaN.
  double lowest() const {
    return s_.importance == Importance::square ? 0.0 : -std::numeric_limits<double>::infinity();
  }

  PruneScores s_;
  PruneUnits u_;
  bool groups_;
  std::int64_t unit_rows_, unit_cols_, rows_, cols_;
  std::vector<Key> kept_;
};

}  // namespace rarefy::prune
