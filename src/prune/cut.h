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

  bool leaves(Key k, std::int64_t row, std::int64_t col) const {
    return k < key || (k == key && tie != 0 && tie_of(row, col) < tie);
  }
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

template <class T>
void count_digits(const Units<T>& units, const Digits<typename Units<T>::Key>& digits,
                  const Executor& executor, std::vector<Scratch<typename Units<T>::Real>>& scratch,
                  Histogram& total) {
  using Key = typename Units<T>::Key;
  std::vector<Histogram> counts(2 * scratch.size(), Histogram{});
  const int next = digits.next(), shift = digits.shift;
  const bool all = shift == sizeof(Key) * 8;
  const Key mask = static_cast<Key>((Key{1} << (shift - next)) - 1);
  executor.parallel_for(units.tasks(), [&](std::int64_t task, int worker) {
    Histogram& mine = counts[2 * static_cast<std::size_t>(worker)];
    Histogram& other = counts[2 * static_cast<std::size_t>(worker) + 1];
    const std::int64_t begin = task * units.rows_per_task();
    for (std::int64_t i = begin; i < std::min(units.rows(), begin + units.rows_per_task()); ++i) {
      const Key* keys = units.keys(i, scratch[static_cast<std::size_t>(worker)]);
      if (all) {
        for (std::int64_t j = 0; j < units.cols(); ++j) ++mine[keys[j] >> next];
      } else {
        // Without a branch, which would be guessed wrong: what does not agree adds nothing. In turns, as
        // additions to one counter wait for each other where digits repeat.
        std::int64_t j = 0;
        for (; j + 2 <= units.cols(); j += 2) {
          mine[(keys[j] >> next) & mask] += (keys[j] >> shift) == digits.prefix ? 1 : 0;
          other[(keys[j + 1] >> next) & mask] += (keys[j + 1] >> shift) == digits.prefix ? 1 : 0;
        }
        if (j < units.cols()) mine[(keys[j] >> next) & mask] += (keys[j] >> shift) == digits.prefix ? 1 : 0;
      }
    }
  });
  total = Histogram{};
  for (const Histogram& mine : counts) {
    for (std::size_t d = 0; d < mine.size(); ++d) total[d] += mine[d];
  }
}

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
  total = Histogram{};
  for (const Histogram& mine : counts) {
    for (std::size_t d = 0; d < mine.size(); ++d) total[d] += mine[d];
  }
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
  while (digits.shift > 0) {
    count_digits(units, digits, executor, scratch, counts);
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
