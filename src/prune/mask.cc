// Masks from scores: the border first, then the bits, row by row of units.
#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "core/message.h"
#include "core/scalar.h"
#include "prune/check.h"
#include "prune/cut.h"
#include "prune/lanes.h"

namespace rarefy {

namespace prune {
namespace {

constexpr std::string_view op = "prune_mask";

// Key and tie as one number, or one pair, of the same order.
std::uint64_t joined(std::uint32_t key, std::uint32_t tie) { return (std::uint64_t{key} << 32) | tie; }
std::pair<std::uint64_t, std::uint32_t> joined(std::uint64_t key, std::uint32_t tie) { return {key, tie}; }

template <class Key>
using Joined = decltype(joined(Key{}, std::uint32_t{}));

void clear_bits(std::uint8_t* row, std::int64_t begin, std::int64_t end) {
  for (; begin < end && begin % 8 != 0; ++begin)
    row[begin / 8] &= static_cast<std::uint8_t>(~(1U << (begin % 8)));
  if (end - begin >= 8) {
    std::memset(row + begin / 8, 0, static_cast<std::size_t>((end - begin) / 8));
    begin += (end - begin) / 8 * 8;
  }
  for (; begin < end; ++begin) row[begin / 8] &= static_cast<std::uint8_t>(~(1U << (begin % 8)));
}

void set_all(std::uint8_t* row, std::int64_t cols) {
  std::memset(row, 0xff, static_cast<std::size_t>(cols / 8));
  if (cols % 8 != 0) row[cols / 8] = static_cast<std::uint8_t>((1U << (cols % 8)) - 1);
}

// Clears the bits of the lowest of `n` elements from `begin` on, all but `keep`. N is n where that is known.
template <int N, class Key>
void thin(const Key* keys, std::int64_t row, std::int64_t begin, int n, std::int64_t keep,
          std::uint8_t* bits) {
  constexpr int kMost = N > 0 ? N : 32;
  Joined<Key> order[kMost];
  int lower[kMost] = {};
  if constexpr (N > 0) n = N;
  for (int i = 0; i < n; ++i) {
    order[i] = joined(keys[begin + i], tie_of(row, begin + i));
    for (int j = 0; j < i; ++j) {
      const int first = order[j] <= order[i] ? 1 : 0;
      lower[i] += first;
      lower[j] += 1 - first;
    }
  }
  for (int i = 0; i < n; ++i) {
    const std::int64_t at = begin + i;
    const unsigned leaves = lower[i] < n - keep ? 1U : 0U;
    bits[at / 8] &= static_cast<std::uint8_t>(~(leaves << (at % 8)));
  }
}

template <class Key>
struct Room {
  std::vector<Key> elements;
  std::vector<Joined<Key>> order;
  Histogram counts;
  std::vector<std::uint8_t> leaves, bits;
  std::int64_t kept = 0, nan = 0;
};

// The same for four elements from a multiple of four on, whose bits are in one byte. Ties are rare: only
// where there is one its sequence is asked for.
template <class Key>
void thin_four(const Key* keys, std::int64_t row, std::int64_t begin, std::int64_t keep, std::uint8_t* bits) {
  const Key a = keys[begin], b = keys[begin + 1], c = keys[begin + 2], d = keys[begin + 3];
  if ((a == b) | (a == c) | (a == d) | (b == c) | (b == d) | (c == d)) {
    return thin<4>(keys, row, begin, 4, keep, bits);
  }
  const unsigned ab = a < b, ac = a < c, ad = a < d, bc = b < c, bd = b < d, cd = c < d;
  const auto leave = static_cast<unsigned>(4 - keep);  // those with fewer than so many below them
  const unsigned leaves = (3 - ab - ac - ad < leave ? 1U : 0U) | (ab + 2 - bc - bd < leave ? 2U : 0U) |
                          (ac + bc + 1 - cd < leave ? 4U : 0U) | (ad + bd + cd < leave ? 8U : 0U);
  bits[begin / 8] &= static_cast<std::uint8_t>(~(leaves << (begin % 8)));
}

// The same for groups of any size.
template <class Key>
void thin_group(const Key* keys, std::int64_t row, std::int64_t begin, std::int64_t n, std::int64_t keep,
                std::uint8_t* bits, Room<Key>& room) {
  if (n <= keep) return;
  if (n == 4 && begin % 4 == 0) return thin_four(keys, row, begin, keep, bits);
  if (n <= 32) return thin<0>(keys, row, begin, static_cast<int>(n), keep, bits);
  room.order.resize(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) room.order[i] = joined(keys[begin + i], tie_of(row, begin + i));
  const auto border = room.order.begin() + (n - keep - 1);
  std::nth_element(room.order.begin(), border, room.order.end());
  const Joined<Key> last = *border;
  std::int64_t equal = 1 + std::count(room.order.begin(), border, last);
  for (std::int64_t i = begin; i < begin + n; ++i) {
    const Joined<Key> mine = joined(keys[i], tie_of(row, i));
    if (mine < last || (mine == last && equal-- > 0)) clear_bits(bits, i, i + 1);
  }
}

// Which units of a row leave if `remove` of them do.
template <class Key>
void cut_row(const Key* keys, std::int64_t row, std::int64_t cols, std::int64_t remove, Room<Key>& room) {
  std::fill(room.leaves.begin(), room.leaves.end(), std::uint8_t{0});
  if (remove == 0) return;
  // The leading digit where the border is, then only what has that digit.
  constexpr int kShift = sizeof(Key) * 8 - kDigitBits;
  room.counts.fill(0);
  for (std::int64_t j = 0; j < cols; ++j) ++room.counts[keys[j] >> kShift];
  std::int64_t digit = 0;
  descend(room.counts, remove, digit);
  room.order.clear();
  for (std::int64_t j = 0; j < cols; ++j) {
    const auto mine = static_cast<std::int64_t>(keys[j] >> kShift);
    room.leaves[j] = mine < digit ? 1 : 0;
    if (mine == digit) room.order.push_back(joined(keys[j], tie_of(row, j)));
  }
  const auto border = room.order.begin() + (remove - 1);
  std::nth_element(room.order.begin(), border, room.order.end());
  const Joined<Key> last = *border;
  std::int64_t equal = 1 + std::count(room.order.begin(), border, last);
  for (std::int64_t j = 0; j < cols; ++j) {
    if (static_cast<std::int64_t>(keys[j] >> kShift) != digit) continue;
    const Joined<Key> mine = joined(keys[j], tie_of(row, j));
    room.leaves[j] = mine < last || (mine == last && equal-- > 0) ? 1 : 0;
  }
}

template <class T>
class Writer {
 public:
  using Key = typename Units<T>::Key;
  using Real = typename Units<T>::Real;

  Writer(const Units<T>& units, std::int64_t remove, std::uint8_t* mask, const Executor& executor,
         std::vector<Scratch<Real>>& scratch)
      : units_(units), mask_(mask), remove_(remove), executor_(executor), scratch_(scratch) {
    const std::int64_t all = units.rows() * units.cols();
    all_leave_ = !units.units().each_row && remove == all;
    if (units.units().each_row || remove == 0) return;
    if (all_leave_) {
      cut_ = {static_cast<Key>(~Key{0}), std::uint64_t{1} << 32, 0};
    } else {
      cut_ = find_cut(units, remove, executor, scratch);
      if (cut_.rest > 0) find_border();
    }
  }

  PruneCount write() {
    const PruneUnits& u = units_.units();
    std::vector<Room<Key>> rooms(scratch_.size());
    for (Room<Key>& room : rooms) {
      room.leaves.resize(static_cast<std::size_t>(units_.cols()));
      room.bits.resize(static_cast<std::size_t>(row_bytes_));
      if (u.of > 0) room.elements.resize(static_cast<std::size_t>(cols_));
    }
    executor_.parallel_for(units_.tasks(), [&](std::int64_t task, int worker) {
      Room<Key>& room = rooms[static_cast<std::size_t>(worker)];
      const std::int64_t begin = task * units_.rows_per_task();
      for (std::int64_t i = begin; i < std::min(units_.rows(), begin + units_.rows_per_task()); ++i) {
        write_row(i, room, scratch_[static_cast<std::size_t>(worker)]);
      }
    });
    PruneCount count;
    for (const Room<Key>& room : rooms) {
      count.kept += room.kept;
      count.nan += room.nan;
    }
    return count;
  }

 private:
  void write_row(std::int64_t row, Room<Key>& room, Scratch<Real>& scratch) {
    const PruneUnits& u = units_.units();
    const bool elements = units_.unit_rows() == 1 && units_.unit_cols() == 1 && u.of == 0;
    // Where every group becomes sparse, only its elements are asked.
    const bool every_group = units_.groups() && all_leave_;
    const Key* keys = every_group ? nullptr : units_.keys(row, scratch);
    if (u.of == 0) room.nan += std::count(keys, keys + units_.cols(), Key{kNanKey});
    if (every_group) {
      std::fill(room.leaves.begin(), room.leaves.end(), std::uint8_t{1});
    } else if (u.each_row) {
      cut_row(keys, row, units_.cols(), remove_, room);
    } else {
      compare_row(keys, row, room.leaves.data());
    }
    if (elements) {
      for (std::uint8_t& leaves : room.leaves) leaves ^= 1;
      pack_bits(room.leaves.data(), cols_, mask_row(row));
      room.kept += count_bits(mask_row(row));
      return;
    }
    set_all(room.bits.data(), cols_);
    if (!units_.groups()) {
      for (std::int64_t j = 0; j < units_.cols(); ++j) {
        if (room.leaves[j] != 0) clear_bits(room.bits.data(), j * units_.unit_cols(), end_of(j));
      }
    }
    const std::int64_t end = std::min((row + 1) * units_.unit_rows(), units_.scores().matrix.rows);
    for (std::int64_t r = row * units_.unit_rows(); r < end; ++r) {
      std::memcpy(mask_row(r), room.bits.data(), room.bits.size());
      if (u.of > 0) thin_row(r, room);
      room.kept += count_bits(mask_row(r));
    }
  }

  // Which units of a row are below the border. Those at it are few, and asked by themselves.
  void compare_row(const Key* keys, std::int64_t row, std::uint8_t* leaves) const {
    const std::int64_t n = units_.cols();
    const Key border = cut_.key;
    for (std::int64_t j = 0; j < n; ++j) leaves[j] = keys[j] < border ? 1 : 0;
    if ((cut_.tie == 0 && cut_.rest == 0) || std::find(keys, keys + n, border) == keys + n) return;
    for (std::int64_t j = 0; j < n; ++j) {
      if (keys[j] != border) continue;
      leaves[j] = tie_of(row, j) < cut_.tie || (cut_.at_border(border, row, j) && first(row, j)) ? 1 : 0;
    }
  }

  // Groups that were chosen, or all those of blocks that stay.
  void thin_row(std::int64_t row, Room<Key>& room) {
    const PruneUnits& u = units_.units();
    units_.element_keys(row, room.elements.data());
    room.nan += std::count(room.elements.begin(), room.elements.end(), Key{kNanKey});
    for (std::int64_t begin = 0, group = 0; begin < cols_; begin += u.of, ++group) {
      const std::int64_t unit = units_.groups() ? group : begin / units_.unit_cols();
      if ((room.leaves[unit] != 0) != units_.groups()) continue;
      thin_group(room.elements.data(), row, begin, std::min(u.of, cols_ - begin), u.keep, mask_row(row),
                 room);
    }
  }

  std::int64_t end_of(std::int64_t unit) const { return std::min((unit + 1) * units_.unit_cols(), cols_); }
  std::uint8_t* mask_row(std::int64_t row) const { return mask_ + row * row_bytes_; }

  std::int64_t count_bits(const std::uint8_t* row) const {
    std::int64_t count = 0, byte = 0;
    for (; byte + 8 <= row_bytes_; byte += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, row + byte, 8);
      count += std::popcount(word);
    }
    for (; byte < row_bytes_; ++byte) count += std::popcount(row[byte]);
    return count;
  }

  // The first `rest` of the units whose key and tie are those of the border: a handful.
  void find_border() {
    std::vector<std::vector<std::int64_t>> found(scratch_.size());
    executor_.parallel_for(units_.tasks(), [&](std::int64_t task, int worker) {
      const auto w = static_cast<std::size_t>(worker);
      const std::int64_t begin = task * units_.rows_per_task();
      for (std::int64_t i = begin; i < std::min(units_.rows(), begin + units_.rows_per_task()); ++i) {
        const Key* keys = units_.keys(i, scratch_[w]);
        for (std::int64_t j = 0; j < units_.cols(); ++j) {
          if (cut_.at_border(keys[j], i, j)) found[w].push_back(i * units_.cols() + j);
        }
      }
    });
    for (const auto& part : found) border_.insert(border_.end(), part.begin(), part.end());
    std::sort(border_.begin(), border_.end());
    border_.resize(static_cast<std::size_t>(cut_.rest));
  }

  bool first(std::int64_t row, std::int64_t col) const {
    return std::binary_search(border_.begin(), border_.end(), row * units_.cols() + col);
  }

  const Units<T>& units_;
  std::uint8_t* mask_;
  std::int64_t remove_;
  const Executor& executor_;
  std::vector<Scratch<Real>>& scratch_;
  const std::int64_t cols_ = units_.scores().matrix.cols, row_bytes_ = mask_row_bytes(cols_);
  bool all_leave_ = false;
  Cut<Key> cut_;
  std::vector<std::int64_t> border_;
};

}  // namespace
}  // namespace prune

Result<PruneCount> prune_mask(const PruneScores& scores, const PruneUnits& units, std::int64_t remove,
                              std::uint8_t* mask,  // NOLINT(readability-non-const-parameter): Writer's
                              const Executor& executor) {
  using prune::op;
  const Result<std::int64_t> most = prune::check(op, scores, units);
  if (!most.ok()) return most.status();
  if (remove < 0 || remove > *most) {
    return invalid(op, cat("remove must be in [0, ", *most, "], the number of units"), cat(remove));
  }
  if (scores.matrix.rows == 0 || scores.matrix.cols == 0) return PruneCount{};
  if (mask == nullptr) return invalid(op, "mask must point to its bytes", "a null pointer");
  try {
    PruneCount count;
    visit_float(scores.matrix.dtype, [&]<class T>(T) {
      std::vector<prune::Scratch<typename prune::Units<T>::Real>> scratch(
          static_cast<std::size_t>(std::max(1, executor.threads)));
      prune::Units<T> view(scores, units);
      view.keep_keys(executor, scratch);
      count = prune::Writer<T>(view, remove, mask, executor, scratch).write();
    });
    return count;
  } catch (const std::bad_alloc&) {
    return prune::no_memory(op);
  }
}

}  // namespace rarefy
