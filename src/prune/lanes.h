// Bits of a row of a mask, eight at a time and without branches: what they leave of elements, and from bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace rarefy::prune {

// For each byte of a mask, what its bits leave of eight elements of some size.
template <class Word>
inline constexpr auto kLanes = [] {
  std::array<std::array<Word, 8>, 256> lanes{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    for (unsigned b = 0; b < 8; ++b)
      lanes[byte][b] = ((byte >> b) & 1U) != 0 ? static_cast<Word>(~Word{0}) : Word{0};
  }
  return lanes;
}();

// Sets to zero the elements whose bit is 0.
template <class Word>
void keep_lanes(Word* row, std::int64_t cols, const std::uint8_t* bits) {
  std::int64_t c = 0;
  for (; c + 8 <= cols; c += 8) {
    const Word* lanes = kLanes<Word>[bits[c / 8]].data();
    for (int b = 0; b < 8; ++b) row[c + b] &= lanes[b];
  }
  for (; c < cols; ++c) row[c] &= kLanes<Word>[bits[c / 8]][static_cast<std::size_t>(c % 8)];
}

// Bits of n bytes that are 0 or 1; the bits past the last one are 0.
inline void pack_bits(const std::uint8_t* bytes, std::int64_t n, std::uint8_t* bits) {
  // Byte i times 2^(56 − 7i) is bit i of the highest byte, and no two of these products meet.
  constexpr std::uint64_t kGather = 0x0102040810204080U;
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word = 0;
    for (int b = 0; b < 8; ++b) word |= std::uint64_t{bytes[i + b]} << (8 * b);
    bits[i / 8] = static_cast<std::uint8_t>((word * kGather) >> 56);
  }
  if (i == n) return;
  unsigned byte = 0;
  for (int b = 0; i + b < n; ++b) byte |= static_cast<unsigned>(bytes[i + b]) << b;
  bits[i / 8] = static_cast<std::uint8_t>(byte);
}

}  // namespace rarefy::prune
