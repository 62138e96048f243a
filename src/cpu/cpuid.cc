// cpuid through the compiler's builtins, which also ask the operating system (xgetbv).
#include "cpu/cpuid.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace rarefy::cpu {

const Features& features() {
  static const Features found = [] {
    Features f;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // Not every compiler's builtin knows "f16c"; with AVX enabled its bit alone decides.
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    f.avx512_vnni = f.avx512 && __builtin_cpu_supports("avx512vnni");
    f.avx512_bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return f;
  }();
  return found;
}

std::vector<std::string> feature_names() {
  const Features& f = features();
  std::vector<std::string> names;
  if (f.avx2) names.emplace_back("avx2");
  if (f.avx512) names.emplace_back("avx512");
  if (f.avx512_vnni) names.emplace_back("avx512_vnni");
  if (f.avx512_bf16) names.emplace_back("avx512_bf16");
  return names;
}

std::int64_t panel_floats() {
  static const std::int64_t floats = [] {
    std::int64_t bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    bytes = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    if (bytes <= 0) bytes = 1 << 20;  // not told
    return std::clamp<std::int64_t>(bytes, 256 << 10, 2 << 20) / 2 / 4;
  }();
  return floats;
}

std::string model_name() {
#if defined(__x86_64__)
  std::array<unsigned, 12> words{};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned* w = words.data() + 4 * leaf;
    if (__get_cpuid(0x80000002U + leaf, w, w + 1, w + 2, w + 3) == 0) return "x86-64";
  }
  std::array<char, sizeof(words) + 1> text{};
  std::memcpy(text.data(), words.data(), sizeof(words));
  std::string model(text.data());
  const auto first = model.find_first_not_of(' ');
  const auto last = model.find_last_not_of(' ');
  return first == std::string::npos ? "x86-64" : model.substr(first, last - first + 1);
#else
  return "unknown";
#endif
}

}  // namespace rarefy::cpu
