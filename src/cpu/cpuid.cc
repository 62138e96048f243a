// cpuid through the compiler's builtins, which also ask the operating system (xgetbv); caches and cores
// from sysconf.
#include "cpu/cpuid.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "cpu/amx_state.h"

namespace rarefy::cpu {

namespace {

#if defined(__x86_64__)
void add_x86(Machine& m) {
  __builtin_cpu_init();
  // Not every compiler's builtin knows "f16c"; with AVX enabled its bit alone decides.
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  m.vector_bits = avx512 ? 512 : avx2 ? 256 : 128;
  if (avx2) m.features.emplace_back("avx2");
  constexpr unsigned kAvxVnni = 1U << 4;  // of leaf 7, 1
  if (avx2 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0) {
    m.features.emplace_back("avx_vnni");
  }
  if (avx512) m.features.emplace_back("avx512");
  const bool amd = __builtin_cpu_is("amd");
  if (avx2 && amd && m.l1 > 0 && m.l1 < 48 << 10) m.features.emplace_back("prefetch_l2");
  if (avx512 && __builtin_cpu_is("intel")) m.features.emplace_back("avx512_load_bound");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) m.features.emplace_back("avx512_vnni");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    m.features.emplace_back("avx512_bf16");
    if (amd) m.features.emplace_back("avx512_bf16_fast");
  }
  if (avx512) {
    const AmxState amx = amx_state();
    if (amx.bf16) m.features.emplace_back("amx_bf16");
    if (amx.int8) m.features.emplace_back("amx_int8");
    if (amx.refused) m.features.emplace_back("amx_refused");  // what kernels say beside their reason
  }
}
#endif

std::string model_name() {
#if defined(__x86_64__)
  std::array<unsigned, 12> words{};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned* w = words.data() + std::size_t{4} * leaf;
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

}  // namespace

Machine detect() {
  Machine m;
  m.cpu = model_name();
  m.cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  m.vector_bits = 128;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const auto bytes = [](int level) { return std::max<std::int64_t>(0, ::sysconf(level)); };
  m.l1 = bytes(_SC_LEVEL1_DCACHE_SIZE);
  m.l2 = bytes(_SC_LEVEL2_CACHE_SIZE);
  m.l3 = bytes(_SC_LEVEL3_CACHE_SIZE);
#endif
#if defined(__x86_64__)
  add_x86(m);
#elif defined(__aarch64__)
  m.features.emplace_back("neon");
#endif
  return m;
}

}  // namespace rarefy::cpu
