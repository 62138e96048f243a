// Prints what this machine's cores reach in float32 fused multiply-adds: the roof over every product. Or in
// int8 with sums in int32 (tdpbssd on AMX, else vpdpbusd), in bf16 (tdpbf16ps, else vdpbf16ps), or in reading
// so many MB over and over, shared by the threads: from the cache that holds them. With `avx2` or `avx_vnni`
// at the end what a processor could do that had no more than that.
//   usage: rarefy_peak [threads] [seconds] [f32|bf16|int8|MB] [avx2|avx_vnni]
//     →  {"isa": "avx512", "threads": 2, "gflops": 512.3}
// Each thread runs independent chains in registers, long enough to hide the latency; the best of many
// rounds of all threads counts, so that what other processes take away is left out.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kChains = 12;  // 2 a cycle × 4 cycles of latency, and some to spare
constexpr int kSteps = 20000;

struct Isa {
  const char* name;
  double flop;     // of one run
  float (*run)();  // returns a number, so that nothing is optimised away
};

thread_local const float* values = nullptr;  // to read
thread_local std::size_t value_count = 0;    // a multiple of 8 vectors

float read_scalar() {
  float sum[8] = {};
  for (std::size_t i = 0; i < value_count; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sum[j] += values[i + j];
  }
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

float run_scalar() {
  volatile float start = 1.0F;
  float sum[kChains];
  std::fill(sum, sum + kChains, start);
  for (int i = 0; i < kSteps; ++i) {
    for (float& s : sum) s = s * 0.999F + 0.001F;
  }
  float total = 0;
  for (const float s : sum) total += s;
  return total;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float run_avx2() {
  __m256 sum[kChains];
  const __m256 a = _mm256_set1_ps(0.999F), b = _mm256_set1_ps(0.001F);
  for (__m256& s : sum) s = a;
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (__m256& s : sum) s = _mm256_fmadd_ps(s, a, b);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm256_add_ps(sum[0], sum[c]);
  return _mm256_cvtss_f32(sum[0]);
}

// Four products of bytes to one int32 without vpdpbusd.
__attribute__((target("avx2"))) float run_avx2_int8() {
  __m256i sum[kChains];
  __m256i x = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  for (__m256i& s : sum) s = x;
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (__m256i& s : sum) {
      __asm__ volatile("" : "+x"(x));  // or products that are always the same would leave the loop
      s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(x, x), ones));
    }
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm256_add_epi32(sum[0], sum[c]);
  return static_cast<float>(_mm256_extract_epi32(sum[0], 0));
}

// By name: compilers learned its intrinsic late.
__attribute__((target("avx2"))) float run_avx_vnni() {
  __m256i sum[kChains];
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-1);
  for (__m256i& s : sum) s = a;
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (__m256i& s : sum) {
      __m256i next = s;  // else the sums would go through memory
      __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(next) : "x"(a), "x"(b));
      s = next;
    }
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm256_add_epi32(sum[0], sum[c]);
  return static_cast<float>(_mm256_extract_epi32(sum[0], 0));
}

__attribute__((target("avx2"))) float read_avx2() {
  __m256 sum[8];
  for (__m256& s : sum) s = _mm256_setzero_ps();
  for (std::size_t i = 0; i < value_count; i += 64) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      if (j % 2 == 0) __builtin_prefetch(values + i + j * 8 + 1024);
      sum[j] = _mm256_add_ps(sum[j], _mm256_loadu_ps(values + i + j * 8));
    }
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm256_add_ps(sum[0], sum[j]);
  return _mm256_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f"))) float run_avx512() {
  __m512 sum[kChains];
  const __m512 a = _mm512_set1_ps(0.999F), b = _mm512_set1_ps(0.001F);
  for (__m512& s : sum) s = a;
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (__m512& s : sum) s = _mm512_fmadd_ps(s, a, b);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm512_add_ps(sum[0], sum[c]);
  return _mm512_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f"))) float read_avx512() {
  __m512 sum[8];
  for (__m512& s : sum) s = _mm512_setzero_ps();
  for (std::size_t i = 0; i < value_count; i += 128) {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < 8; ++j) {
      __builtin_prefetch(values + i + j * 16 + 1024);
      sum[j] = _mm512_add_ps(sum[j], _mm512_loadu_ps(values + i + j * 16));
    }
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm512_add_ps(sum[0], sum[j]);
  return _mm512_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f,avx512bf16"))) float run_bf16() {
  __m512 sum[kChains];
  const __m512 one = _mm512_set1_ps(0.001F);
  const __m512bh a = _mm512_cvtne2ps_pbh(one, one);
  for (__m512& s : sum) s = one;
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (__m512& s : sum) s = _mm512_dpbf16_ps(s, a, a);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm512_add_ps(sum[0], sum[c]);
  return _mm512_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f,avx512vnni"))) float run_vnni() {
  __m512i sum[kChains];
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-1);
  for (__m512i& s : sum) s = a;
  for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (__m512i& s : sum) s = _mm512_dpbusd_epi32(s, a, b);
  }
  for (int c = 1; c < kChains; ++c) sum[0] = _mm512_add_epi32(sum[0], sum[c]);
  return static_cast<float>(_mm512_reduce_add_epi32(sum[0]));
}

// Four tiles of sums, as the kernels have.
template <bool kInt8>
__attribute__((target("amx-tile,amx-int8,amx-bf16"))) float run_amx() {
  struct alignas(64) {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
  for (int i = 0; i < kSteps; ++i) {
    if constexpr (kInt8) {
      __asm__ volatile(
          "tdpbssd %tmm6, %tmm4, %tmm0\n\ttdpbssd %tmm7, %tmm4, %tmm1\n\t"
          "tdpbssd %tmm6, %tmm5, %tmm2\n\ttdpbssd %tmm7, %tmm5, %tmm3");
    } else {
      __asm__ volatile(
          "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
          "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    }
  }
  __asm__ volatile("tilerelease");
  return 0;
}

bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // as in src/cpu/cpuid.cc
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & (1U << 25)) != 0 &&
         (edx & (1U << 22)) != 0 && ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool avx2_alone = false, with_vnni = false;  // no AVX-512; but vpdpbusd of AVX-VNNI

Isa best_int8() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (with_vnni) return {"avx_vnni", 32 * 2.0 * kChains * kSteps, run_avx_vnni};
  if (avx2_alone) return {"avx2", 32 * 2.0 * kChains * kSteps, run_avx2_int8};
  if (has_amx()) return {"amx_int8", 4.0 * 2 * 16 * 16 * 64 * kSteps, run_amx<true>};
  if (__builtin_cpu_supports("avx512vnni")) return {"avx512_vnni", 64 * 2.0 * kChains * kSteps, run_vnni};
#endif
  return {"none", 0, run_scalar};
}

Isa best_bf16() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (avx2_alone) return {"avx2", 8 * 2.0 * kChains * kSteps, run_avx2};  // bf16 becomes f32
  if (has_amx()) return {"amx_bf16", 4.0 * 2 * 16 * 16 * 32 * kSteps, run_amx<false>};
  if (__builtin_cpu_supports("avx512bf16")) return {"avx512_bf16", 32 * 2.0 * kChains * kSteps, run_bf16};
#endif
  return {"none", 0, run_scalar};
}

// A byte counts as a FLOP.
Isa best_read(std::size_t count) {
  const double bytes = 4.0 * static_cast<double>(count);
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && !avx2_alone) return {"avx512_read", bytes, read_avx512};
  if (__builtin_cpu_supports("avx2")) return {"avx2_read", bytes, read_avx2};
#endif
  return {"read", bytes, read_scalar};
}

Isa best_isa() {
  constexpr double per_lane = 2.0 * kChains * kSteps;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && !avx2_alone) return {"avx512", 16 * per_lane, run_avx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"avx2", 8 * per_lane, run_avx2};
#endif
  return {"scalar", per_lane, run_scalar};
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr double kRound = 2e-3;  // seconds, at least: far above what threads differ by when they start

// Threads work in rounds, from one start to the last one's end: what they share, memory above all, is shared
// all the time. (Each thread's own best run, added up, was twice what two threads can read from memory.)
class Rounds {
 public:
  Rounds(const Isa& isa, int threads, double seconds) : isa_(isa), sync_(threads), seconds_(seconds) {}

  void work(bool first) {
    const auto begin = Clock::now();
    volatile float sink = isa_.run();
    static_cast<void>(sink);
    if (first) runs_ = std::max(1, static_cast<int>(kRound / seconds_since(begin)));
    do {
      sync_.arrive_and_wait();
      const auto start = Clock::now();
      for (int i = 0; i < runs_; ++i) sink = isa_.run();
      sync_.arrive_and_wait();
      if (!first) continue;
      best_ = std::min(best_, seconds_since(start) / runs_);
      ended_ = seconds_since(begin) > seconds_;
    } while (goes_on());
  }

  double best() const { return best_; }  // seconds of a run of every thread

 private:
  bool goes_on() {
    sync_.arrive_and_wait();
    return !ended_;
  }

  const Isa& isa_;
  std::barrier<> sync_;
  double seconds_, best_ = 1e9;
  int runs_ = 1;
  bool ended_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0.05;
  const char* dtype = argc > 3 ? argv[3] : "f32";
  const auto is = [&](const char* name) { return std::strcmp(dtype, name) == 0; };
  const double megabytes = std::atof(dtype);
  with_vnni = argc > 4 && std::strcmp(argv[4], "avx_vnni") == 0;
  avx2_alone = with_vnni || (argc > 4 && std::strcmp(argv[4], "avx2") == 0);
  if (threads < 1 || threads > 4096 || !(seconds > 0) || megabytes > 4096 || (argc > 4 && !avx2_alone) ||
      (!is("f32") && !is("bf16") && !is("int8") && !(megabytes > 0))) {
    std::fprintf(stderr, "usage: rarefy_peak [threads] [seconds] [f32|bf16|int8|MB] [avx2|avx_vnni]\n");
    return 2;
  }
  const auto count = static_cast<std::size_t>(megabytes * 1e6 / 4 / threads) / 128 * 128;  // of a thread
  const Isa isa = is("bf16")      ? best_bf16()
                  : is("int8")    ? best_int8()
                  : megabytes > 0 ? best_read(count)
                                  : best_isa();
  Rounds rounds(isa, threads, seconds);
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      const std::unique_ptr<float[]> memory(new float[count + 1]());
      values = memory.get();
      value_count = count;
      rounds.work(t == 0);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const double gflops = threads * isa.flop / rounds.best() * 1e-9;
  std::printf("{\"isa\": \"%s\", \"threads\": %d, \"gflops\": %.1f}\n", isa.name, threads, gflops);
}
