// Whether the processor has AMX and the operating system lends it; tests/cpp/amx_in_software answers for
// itself.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rarefy::cpu {

struct AmxState {
  bool bf16 = false, int8 = false;
  bool refused = false;  // the processor has it, and the operating system lends no tile registers
};

// A process must ask Linux for the tile registers before it touches them; a refusal means no AMX.
inline AmxState amx_state() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr unsigned kTile = 1U << 24, kBf16 = 1U << 22, kInt8 = 1U << 25;  // of leaf 7's edx
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTile) == 0) return {};
  if ((edx & (kBf16 | kInt8)) == 0) return {};
  if (::syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return {.refused = true};
  return {(edx & kBf16) != 0, (edx & kInt8) != 0, false};
#else
  return {};
#endif
}

}  // namespace rarefy::cpu
