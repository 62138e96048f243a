// AMX's instructions, each a function by the numbers of its tiles. tests/cpp/amx_in_software has the same in
// plain C++, for processors without AMX. As with GCC's own macros, no load keeps the compiler from moving
// stores across it: callers do, where it matters.
#pragma once

#include <cstdint>

namespace rarefy::cpu::tile {

// What ldtilecfg reads: eight tiles of 16 rows of 64 bytes. GCC 12's _tile_loadconfig tells the compiler of 8
// bytes that are read, and the other stores go.
struct alignas(64) Config {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Config) == 64);

[[gnu::always_inline]] inline void configure(const Config& config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
[[gnu::always_inline]] inline void release() { __asm__ volatile("tilerelease" ::); }

template <int kTile>
[[gnu::always_inline]] inline void zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// Rows are `stride` bytes apart.
template <int kTile>
[[gnu::always_inline]] inline void load(const void* from, std::int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile));
}
template <int kTile>
[[gnu::always_inline]] inline void store(void* to, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}

// sums += a · b: a has rows of 32 bf16 or 64 int8, b the same features in rows of pairs or fours.
template <int kSums, int kA, int kB>
[[gnu::always_inline]] inline void dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}
template <int kSums, int kA, int kB>
[[gnu::always_inline]] inline void dot_int8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace rarefy::cpu::tile
