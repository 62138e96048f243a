// Lists what pieces.h multiplies: rows of W cut at the tiles of X, a tile's pieces sorted by length. Arrays
// that are used once are listed in the call, as many indices as that has, so it goes by vectors of indices: a
// branch at each piece's end, some ten indices on, would be guessed wrong.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "cpu/panel.h"

namespace rarefy::cpu {

inline constexpr std::int32_t kIndicesAtOnce = 16;
inline constexpr std::int32_t kRowsAhead = 8;  // whose indices are asked for

// How many of 16 indices that ascend, the first `left` of them at least, are below the limit: a number that
// is right up to `left`.
template <class I>
[[gnu::always_inline]] inline std::int32_t below_of_16(const std::int32_t* index, std::int32_t left,
                                                       std::int32_t limit) {
  if constexpr (requires { I::below_16(index, limit); }) {
    return std::countr_one(I::below_16(index, limit));
  } else {
    std::int32_t count = 0;
#pragma GCC unroll 1
    for (std::int32_t i = 0; i < kIndicesAtOnce; ++i) {
      count += static_cast<std::int32_t>(index[i] < limit) & static_cast<std::int32_t>(i < left);
    }
    return count;
  }
}

// How many of `left` ascending indices are below the limit, of which `readable` can be read.
template <class I>
[[gnu::always_inline]] inline std::int32_t count_below(const std::int32_t* index, std::int32_t left,
                                                       std::int64_t readable, std::int32_t limit) {
  std::int32_t found = 0;
  for (; found < left && readable - found >= kIndicesAtOnce; found += kIndicesAtOnce) {
    const std::int32_t here = below_of_16<I>(index + found, left - found, limit);
    if (here < kIndicesAtOnce) return std::min(found + here, left);
  }
  while (found < left && index[found] < limit) ++found;
  return std::min(found, left);
}

// A piece's columns, from the tile's first one on. What lies behind the last one may go with them: the next
// piece's are written over it.
template <class I>
[[gnu::always_inline]] inline void copy_columns(const std::int32_t* from, std::int32_t count,
                                                std::int64_t readable, std::int32_t first,
                                                std::uint16_t* to) {
  std::int32_t i = 0;
  for (; i < count && readable - i >= kIndicesAtOnce; i += kIndicesAtOnce) {
#pragma GCC unroll 1
    for (std::int32_t j = 0; j < kIndicesAtOnce; ++j)
      to[i + j] = static_cast<std::uint16_t>(from[i + j] - first);
  }
  for (; i < count; ++i) to[i] = static_cast<std::uint16_t>(from[i] - first);
}

template <class I>
std::int32_t list_pieces(const PieceListTask& t) {
  constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
  // Of each row where its next piece begins, and its next part, if that is not the first one.
  std::int32_t cursor[kMostPieceRows + kRowsAhead] = {}, part[kMostPieceRows];
  const std::int32_t least = least_entries(t.part);
  for (std::int64_t r = 0; r < t.rows; ++r) {
    cursor[r] = t.begin[r];
    part[r] = t.begin[r + 1] - t.begin[r] >= t.part + least ? t.begin[r] + t.part : kNone;
  }
  Piece found[2 * kMostPieceRows];
  std::uint16_t slot[2 * kMostPieceRows];  // of `place`
  std::int32_t at = t.at, columns_at = t.columns_at;
  for (std::int64_t tile = 0; tile < t.tiles; ++tile) {
    const std::int32_t first = static_cast<std::int32_t>(tile) * t.columns, limit = first + t.columns;
    // How many pieces have a length, then where the next one goes; those behind a full part apart.
    std::int32_t place[2 * (kMostPieceColumns + 1)] = {};
    std::int64_t pieces = 0;
    const auto add = [&](int list, std::int64_t row, std::int32_t begin, std::int32_t end, bool second) {
      const std::int32_t count = end - begin;
      found[pieces] = {begin, static_cast<std::uint16_t>(row), static_cast<std::uint16_t>(count & 0x7fff),
                       static_cast<std::uint16_t>(second ? 1 : 0)};
      slot[pieces] = static_cast<std::uint16_t>(list * (kMostPieceColumns + 1) + count);
      ++place[slot[pieces]];
      pieces += count > 0 ? 1 : 0;
    };
    for (std::int64_t r = 0; r < t.rows; ++r) {
      const std::int32_t begin = cursor[r], stop = t.begin[r + 1];
      __builtin_prefetch(t.index + cursor[r + kRowsAhead]);
      const std::int32_t end = begin + count_below<I>(t.index + begin, std::min(stop - begin, t.columns),
                                                      t.entries - begin, limit);
      cursor[r] = end;
      if (end <= part[r]) {
        add(0, r, begin, end, false);
        continue;
      }
      add(0, r, begin, part[r], false);
      add(1, r, part[r], end, part[r] == t.begin[r] + t.part);
      part[r] += t.part;
      if (part[r] > stop - least) part[r] = kNone;
    }
    std::int32_t* lists = t.lists + kPieceLists * tile;
    for (int list = 0; list < 2; ++list) {
      lists[list] = at;
      std::int32_t* of_list = place + list * (kMostPieceColumns + 1);
      for (std::int32_t length = t.columns; length > 0; --length) at += std::exchange(of_list[length], at);
    }
    lists[2] = at;
    lists[3] = columns_at;
    for (std::int64_t p = 0; p < pieces; ++p) t.pieces[place[slot[p]]++] = found[p];
    for (std::int32_t p = lists[0]; p < at; ++p) {
      const Piece piece = t.pieces[p];
      __builtin_prefetch(t.index + t.pieces[std::min(p + kRowsAhead, at - 1)].begin);
      copy_columns<I>(t.index + piece.begin, piece.count, t.entries - piece.begin, first,
                      t.to + std::int64_t{4} * columns_at);
      columns_at += static_cast<std::int32_t>(padded_columns(piece) / 4);
    }
  }
  return at;
}

}  // namespace rarefy::cpu
