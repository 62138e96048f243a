// The border between the units that leave and those that stay, found digit by digit: a histogram of the next
// 11 bits of the keys that agree so far, until the digits are used up or the border lies between two of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "prune/units.h"

namespace rarefy::prune {

inline constexpr int kDigitBits = 11;
using Histogram = std::array<std::int64_t, 1 << kDigitBits>;

// A unit leaves if its key is less than `key`, or equal and its tie less than `tie`, or both are equal and it
// is one of the first `rest` such units.
template <class Key>
struct Cut {
  Key key = 0;
  std::uint64_t tie = 0;  // up to 2³², for all
  std::int64_t rest = 0;

  bool at_border(Key k, std::int64_t row, std::int64_t col) const {
    return rest != 0 && k == key && tie_of(row, col) == tie;
  }
};

// The bits above `shift` of a key are those of `prefix`; all of them, at the beginning.
template <class Key>
struct Digits {
  int shift = sizeof(Key) * 8;
  Key prefix = 0;

  // The next digit: how far right it begins.
  int next() const { return std::max(0, shift - kDigitBits); }
  void append(std::int64_t digit) {
    const int bits = shift - next();
    prefix = static_cast<Key>((prefix << bits) | static_cast<Key>(digit));
    shift = next();
  }
  Key low() const {
    return static_cast<Key>(prefix << shift);
  }  // the least key with this prefix; shift < width
  bool is_last() const { return prefix == (~Key{0} >> shift); }
};

// Adds the next digits of n keys, in turns to one histogram and the other, as additions to one counter wait
// for each other where digits repeat. Without a branch, which would be guessed wrong: keys that do not agree
// so far add nothing.
template <class Key>
void add_digits(const Key* keys, std::int64_t n, const Digits<Key>& digits, Histogram& one,
                Histogram& other) {
  const int next = digits.next(), shift = digits.shift;
  std::int64_t j = 0;
  if (shift == sizeof(Key) * 8) {
    for (; j + 2 <= n; j += 2) {
      ++one[keys[j] >> next];
      ++other[keys[j + 1] >> next];
    }
    if (j < n) ++one[keys[j] >> next];
    return;
  }
  const Key mask = static_cast<Key>((Key{1} << (shift - next)) - 1);
  const auto add = [&](Key key, Histogram& to) {
    to[(key >> next) & mask] += (key >> shift) == digits.prefix ? 1 : 0;
  };
  for (; j + 2 <= n; j += 2) {
    add(keys[j], one);
    add(keys[j + 1], other);
  }
  if (j < n) add(keys[j], one);
}

inline void add_up(const std::vector<Histogram>& parts, Histogram& total) {
  total = Histogram{};
  for (const Histogram& part : parts) {
    for (std::size_t d = 0; d < part.size(); ++d) total[d] += part[d];
  }
}

// Counts the digits of the keys that agree so far. Once those are an eighth of all, they are copied, and what
// follows asks only the copies.
template <class T>
class Counter {
 public:
  using Key = typename Units<T>::Key;
  using Real = typename Units<T>::Real;

  Counter(const Units<T>& units, const Executor& executor, std::vector<Scratch<Real>>& scratch)
      : units_(units), executor_(executor), scratch_(scratch) {}

  // digits: those of the call before and one more; none at first.
  void count(const Digits<Key>& digits, Histogram& total) {
    const bool first = digits.shift == sizeof(Key) * 8;
    if (!first && copies_.empty()) {
      const std::int64_t agree = last_[digits.prefix & (last_.size() - 1)];
      if (8 * agree <= units_.rows() * units_.cols()) copy(digits);
    }
    std::vector<Histogram> counts(2 * scratch_.size(), Histogram{});
    if (copies_.empty()) {
      each_row([&](const Key* keys, std::size_t worker) {
        add_digits(keys, units_.cols(), digits, counts[2 * worker], counts[2 * worker + 1]);
      });
    } else {
      executor_.parallel_for(static_cast<std::int64_t>(copies_.size()), [&](std::int64_t part, int) {
        const auto p = static_cast<std::size_t>(part);
        const auto n = static_cast<std::int64_t>(copies_[p].size());
        add_digits(copies_[p].data(), n, digits, counts[2 * p], counts[2 * p + 1]);
      });
    }
    add_up(counts, total);
    last_ = total;
  }

 private:
  template <class F>
  void each_row(F&& body) {
    executor_.parallel_for(units_.tasks(), [&](std::int64_t task, int worker) {
      const auto w = static_cast<std::size_t>(worker);
      const std::int64_t begin = task * units_.rows_per_task();
      for (std::int64_t i = begin; i < std::min(units_.rows(), begin + units_.rows_per_task()); ++i) {
        body(units_.keys(i, scratch_[w]), w);
      }
    });
  }

  void copy(const Digits<Key>& digits) {
    copies_.resize(scratch_.size());
    std::vector<std::vector<Key>> rows(scratch_.size());
    each_row([&](const Key* keys, std::size_t worker) {
      std::vector<Key>& row = rows[worker];
      row.resize(static_cast<std::size_t>(units_.cols()) + 1);
      std::size_t n = 0;
      for (std::int64_t j = 0; j < units_.cols(); ++j) {
        row[n] = keys[j];
        n += (keys[j] >> digits.shift) == digits.prefix ? 1 : 0;
      }
      copies_[worker].insert(copies_[worker].end(), row.begin(),
                             row.begin() + static_cast<std::ptrdiff_t>(n));
    });
  }

  const Units<T>& units_;
  const Executor& executor_;
  std::vector<Scratch<Real>>& scratch_;
  std::vector<std::vector<Key>> copies_;  // of each worker
  Histogram last_{};
};

// The same of the ties of the units whose key is `key`.
template <class T>
void count_ties(const Units<T>& units, typename Units<T>::Key key, const Digits<std::uint32_t>& digits,
                const Executor& executor, std::vector<Scratch<typename Units<T>::Real>>& scratch,
                Histogram& total) {
  std::vector<Histogram> counts(scratch.size(), Histogram{});
  const int next = digits.next();
  executor.parallel_for(units.tasks(), [&](std::int64_t task, int worker) {
    Histogram& mine = counts[static_cast<std::size_t>(worker)];
    const std::int64_t begin = task * units.rows_per_task();
    for (std::int64_t i = begin; i < std::min(units.rows(), begin + units.rows_per_task()); ++i) {
      const auto* keys = units.keys(i, scratch[static_cast<std::size_t>(worker)]);
      for (std::int64_t j = 0; j < units.cols(); ++j) {
        if (keys[j] != key) continue;
        const std::uint32_t tie = tie_of(i, j);
        if (digits.shift < 32 && (tie >> digits.shift) != digits.prefix) continue;
        ++mine[(tie >> next) & ((1U << (digits.shift - next)) - 1)];
      }
    }
  });
  add_up(counts, total);
}

// Moves `rest`, how many of the counted units leave, into the digit where the border is; returns how many
// units that digit has.
inline std::int64_t descend(const Histogram& counts, std::int64_t& rest, std::int64_t& digit) {
  digit = 0;
  while (counts[static_cast<std::size_t>(digit)] < rest) rest -= counts[static_cast<std::size_t>(digit++)];
  return counts[static_cast<std::size_t>(digit)];
}

// The border below which `remove` units lie; 0 < remove < all of them.
template <class T>
Cut<typename Units<T>::Key> find_cut(const Units<T>& units, std::int64_t remove, const Executor& executor,
                                     std::vector<Scratch<typename Units<T>::Real>>& scratch) {
  using Key = typename Units<T>::Key;
  Histogram counts;
  std::int64_t digit = 0;
  Digits<Key> digits;
  Counter<T> counter(units, executor, scratch);
  while (digits.shift > 0) {
    counter.count(digits, counts);
    const std::int64_t here = descend(counts, remove, digit);
    digits.append(digit);
    if (here == remove) {  // the border is at the upper end of this digit
      if (digits.is_last()) return {~Key{0}, std::uint64_t{1} << 32, 0};
      return {static_cast<Key>((digits.prefix + 1) << digits.shift), 0, 0};
    }
  }
  Digits<std::uint32_t> ties;
  while (ties.shift > 0) {
    count_ties(units, digits.prefix, ties, executor, scratch, counts);
    const std::int64_t here = descend(counts, remove, digit);
    ties.append(digit);
    if (here == remove) {
      return {digits.prefix, (static_cast<std::uint64_t>(ties.prefix) + 1) << ties.shift, 0};
    }
  }
  return {digits.prefix, ties.prefix, remove};
}

}  // namespace rarefy::prune
