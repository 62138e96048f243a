// Before src/cpu/simd/amx_tiles.h in the include path: AMX's instructions in software, so that its kernels
// are tested wherever there is AVX-512 BF16, under the sanitizers too. Tiles have values of their own only
// between configure and release; outside of these every use traps, as the processor's does.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rarefy::cpu::tile {

struct Config {};

struct Tiles {
  alignas(64) std::byte bytes[8][16][64];
  bool configured = false;
};

inline Tiles& all_tiles() {
  thread_local Tiles tiles;
  return tiles;
}
inline std::byte (&tile_of(int number))[16][64] {
  Tiles& tiles = all_tiles();
  if (!tiles.configured) __builtin_trap();
  return tiles.bytes[number];
}

inline void configure(const Config& /*config*/) {
  Tiles& tiles = all_tiles();
  std::memset(tiles.bytes, 0, sizeof tiles.bytes);
  tiles.configured = true;
}
inline void release() { all_tiles().configured = false; }

template <int kTile>
void zero() {
  std::memset(tile_of(kTile), 0, 1024);
}
template <int kTile>
void load(const void* from, std::int64_t stride) {
  const auto* row = static_cast<const std::byte*>(from);
  for (auto& line : tile_of(kTile)) {
    std::memcpy(line, row, 64);
    row += stride;
  }
}
template <int kTile>
void store(void* to, std::int64_t stride) {
  auto* row = static_cast<std::byte*>(to);
  for (const auto& line : tile_of(kTile)) {
    std::memcpy(row, line, 64);
    row += stride;
  }
}

// Products of even features and those of odd ones are summed apart from zero, then both are added to the
// sums.
template <int kSums, int kA, int kB>
void dot_bf16() {
  auto& sums = tile_of(kSums);
  const auto &a = tile_of(kA), &b = tile_of(kB);
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  for (int row = 0; row < 16; ++row) {
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int pair = 0; pair < 16; ++pair) {
      int two = 0;
      std::memcpy(&two, &a[row][pair * 4], 4);
      const __m512i x = _mm512_set1_epi32(two), y = _mm512_load_si512(b[pair]);
      evens = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                              _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), evens);
      odds = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, odd)),
                             _mm512_castsi512_ps(_mm512_and_si512(y, odd)), odds);
    }
    const __m512 before = _mm512_load_ps(sums[row]);
    _mm512_store_ps(sums[row], _mm512_add_ps(before, _mm512_add_ps(evens, odds)));
  }
}
template <int kSums, int kA, int kB>
void dot_int8() {
  auto& sums = tile_of(kSums);
  const auto &a = tile_of(kA), &b = tile_of(kB);
  for (int row = 0; row < 16; ++row) {
    __m512i sum = _mm512_load_si512(sums[row]);
    for (int four = 0; four < 16; ++four) {
      for (int i = 0; i < 4; ++i) {
        const int x = static_cast<std::int8_t>(a[row][four * 4 + i]);
        const __m512i y = _mm512_srai_epi32(_mm512_slli_epi32(_mm512_load_si512(b[four]), 24 - 8 * i), 24);
        sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(_mm512_set1_epi32(x), y));
      }
    }
    _mm512_store_si512(sums[row], sum);
  }
}

}  // namespace rarefy::cpu::tile
