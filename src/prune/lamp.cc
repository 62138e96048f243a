// LAMP: every weight against those of its layer that are not less, so that layers can be compared.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "core/scalar.h"
#include "prune/check.h"
#include "prune/keys.h"
#include "rarefy/prune.h"

namespace rarefy {

namespace prune {
namespace {

// Ascending, digit by digit from the lowest: three passes over keys of 32 bits.
template <class Key>
void sort(std::vector<Key>& keys) {
  constexpr int kBits = 11;
  std::vector<Key> other(keys.size());
  for (int shift = 0; shift < static_cast<int>(sizeof(Key) * 8); shift += kBits) {
    constexpr Key kMask = (Key{1} << kBits) - 1;
    std::array<std::size_t, (std::size_t{1} << kBits) + 1> begins{};
    for (const Key key : keys) ++begins[static_cast<std::size_t>((key >> shift) & kMask) + 1];
    for (std::size_t digit = 1; digit < begins.size(); ++digit) begins[digit] += begins[digit - 1];
    for (const Key key : keys) other[begins[static_cast<std::size_t>((key >> shift) & kMask)]++] = key;
    std::swap(keys, other);
  }
}

template <class T>
void scores_of(const MatrixView& weight, double* scores) {
  using Real = decltype(read(static_cast<const T*>(nullptr)));
  using Key = KeyOf<Real>;
  std::vector<Key> keys;
  keys.reserve(static_cast<std::size_t>(weight.rows * weight.cols));
  for (std::int64_t r = 0; r < weight.rows; ++r) {
    const T* row = static_cast<const T*>(weight.data) + r * weight.row_stride;
    for (std::int64_t c = 0; c < weight.cols; ++c) {
      const Real size = std::abs(read(row + c));  // bits of positive numbers are in their order
      keys.push_back(std::bit_cast<Key>(std::isnan(size) ? Real{0} : size));
    }
  }
  sort(keys);
  double sum = 0;
  for (std::size_t i = keys.size(); i-- > 0;) {
    const auto size = static_cast<double>(std::bit_cast<Real>(keys[i]));
    sum += size * size;
    scores[i] = std::isinf(sum) ? (std::isinf(size) ? 1.0 : 0.0) : sum > 0 ? size * size / sum : 0.0;
  }
}

}  // namespace
}  // namespace prune

Status lamp_scores(const MatrixView& weight, double* scores) {
  constexpr std::string_view op = "lamp_scores";
  const Result<std::int64_t> units = prune::check(op, {weight}, {});
  if (!units.ok()) return units.status();
  try {
    visit_float(weight.dtype, [&]<class T>(T) { prune::scores_of<T>(weight, scores); });
    return {};
  } catch (const std::bad_alloc&) {
    return prune::no_memory(op);
  }
}

}  // namespace rarefy
