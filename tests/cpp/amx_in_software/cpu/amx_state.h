// Before src/cpu/amx_state.h in the include path: AMX is there, in software.
#pragma once

namespace rarefy::cpu {

struct AmxState {
  bool bf16 = false, int8 = false, refused = false;
};

inline AmxState amx_state() { return {__builtin_cpu_supports("avx512bf16") != 0, true, false}; }

}  // namespace rarefy::cpu
