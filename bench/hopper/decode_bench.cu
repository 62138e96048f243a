// Checks and times the decode kernel (linear for up to 16 tokens).
#include "cuda/sm90/decode.h"
#include "hopper.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;
using namespace rarefy::sm90;

template <class T>
DecodeProblem problem_of(const Setup<T>& s) {
  DecodeProblem p;
  p.dtype = kDType<T>;
  p.tokens = s.c.m;
  p.rows = s.c.n;
  p.cols = s.c.k;
  p.block_rows = s.c.r;
  p.block_cols = s.c.c;
  p.blocks = s.pattern.blocks();
  p.x_stride = s.x_stride();
  p.y_stride = s.y_stride();
  p.activation = s.c.activation;
  return p;
}

template <class T>
bool check(const Case& c, bool integers, unsigned seed) {
  Setup<T> s(c, integers, seed);
  const DecodeProblem problem = problem_of(s);
  if (const std::string reason = unsupported(problem); !reason.empty()) {
    std::printf("%s: %s\n", describe(c).c_str(), reason.c_str());
    return false;
  }
  const auto crow = to_device(s.pattern.crow), col = to_device(s.pattern.col);
  const Expected expected(s, integers, 16);
  bool good = true;
  for (const DecodeCandidate& candidate : decode_candidates(problem)) {
    if (!candidate.reason.empty()) continue;
    good &= expected.compare(s, "decode " + candidate.config.text(), [&] {
      CHECK(launch(problem, candidate.config,
                   {s.x.data(), s.values.data(), crow.data(), col.data(), s.bias_or_null(), s.y.data()},
                   nullptr));
    });
  }
  return good;
}

}  // namespace

bool check_decode(bool small) {
  std::vector<Case> cases;
  for (const std::int64_t m : {1, 3, 8, 11, 16}) {
    for (const auto& [r, c] : {std::pair{16, 16},
                               {32, 32},
                               {64, 64},
                               {128, 128},
                               {16, 64},
                               {64, 16},
                               {96, 32},
                               {48, 48},
                               {32, 256}}) {
      cases.push_back(
          {false, m, 384, 768, r, c, .3, Kind::random, Activation::none, m % 2 == 1, m == 8 ? 8 : 0});
    }
  }
  cases.push_back({false, 5, 1000, 840, 64, 64, .3, Kind::rows_half_empty, Activation::none, true});
  cases.push_back({false, 16, 1000, 840, 32, 32, 1, Kind::random, Activation::gelu_tanh, true});
  cases.push_back({false, 2, 1000, 840, 32, 32, 0, Kind::random, Activation::relu, true});
  cases.push_back({false, 1, 512, 2048, 32, 32, .05, Kind::one_dense_row, Activation::silu, true});
  if (!small) cases.push_back({false, 16, 14336, 4096, 64, 64, .25});
  if (!small) cases.push_back({false, 7, 40000, 512, 16, 16, .25, Kind::rows_half_empty});
  bool good = true;
  unsigned seed = 100;
  for (const Case& c : cases) {
    if (!wanted_case(case_name(c.m, c.n, c.k, c.r, c.density))) continue;
    good &= check<__nv_bfloat16>(c, false, seed++);
    good &= check<__half>(c, true, seed++);
  }
  std::printf("decode: %zu cases, every configuration, %s\n", cases.size(), good ? "all right" : "WRONG");
  return good;
}

namespace {

__global__ void copy_kernel(const uint4* from, uint4* to) {  // four pieces a thread
  const std::size_t at = blockIdx.x * std::size_t{1024} + threadIdx.x;
  uint4 v[4];
#pragma unroll
  for (std::size_t i = 0; i < 4; ++i) v[i] = from[at + i * 256];
#pragma unroll
  for (std::size_t i = 0; i < 4; ++i) to[at + i * 256] = v[i];
}

// What reading alone takes, in a chain of kernels that may overlap: each block asks L2 for the begin of its
// part while the kernel before runs, then reads 16 bytes a thread, eight of them in flight.
__global__ void __launch_bounds__(256)
    floor_kernel(const uint4* from, int each, unsigned ahead, unsigned* sum) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const uint4* p = from + static_cast<std::size_t>(blockIdx.x) * static_cast<std::size_t>(each);
  if (threadIdx.x == 0 && ahead > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p),
                 "r"(min(ahead, static_cast<unsigned>(each) * 16))
                 : "memory");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  unsigned s = 0;
  for (int i = static_cast<int>(threadIdx.x); i < each; i += 8 * 256) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = {};
      if (i + j * 256 < each)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                     : "l"(p + i + j * 256));
    }
#pragma unroll
    for (const uint4& w : v) s += w.x ^ w.y ^ w.z ^ w.w;
  }
  if (s == 0x12345678) *sum = s;
}

}  // namespace

void time_floor() {
  {
    constexpr std::size_t kBytes = 1u << 30;
    Buffer<char> from(kBytes), to(kBytes);
    const Times by_kernel = time_chain(4,
                                       [&](cudaStream_t stream, int) {
                                         copy_kernel<<<kBytes / 16 / 1024, 256, 0, stream>>>(
                                             reinterpret_cast<const uint4*>(from.data()),
                                             reinterpret_cast<uint4*>(to.data()));
                                       }),
                by_driver = time_chain(4, [&](cudaStream_t stream, int) {
                  CHECK(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream));
                });
    for (const auto& [name, t] : {std::pair{"a kernel", by_kernel}, {"cudaMemcpyAsync", by_driver}})
      std::printf("floor: copies by %s, 1 GB: %.0f GB/s\n", name, 2 * kBytes / t.median * 1e-3);
  }
  Buffer<char> data(360u << 20);
  for (const double mb : {0.5, 11.7, 29.4, 58.7}) {
    for (const int blocks : {264, 528, 1056}) {
      const int each = static_cast<int>(mb * 1e6 / 16 / blocks);
      const auto bytes = static_cast<std::size_t>(each) * static_cast<std::size_t>(blocks) * 16;
      const int calls = static_cast<int>(340e6 / std::max(static_cast<double>(bytes), 6e6));
      for (const unsigned ahead : {0u, 8u << 10, 16u << 10, 32u << 10, 64u << 10}) {
        for (const bool overlap : {false, true}) {
          if (!overlap && ahead > 0) continue;
          const Times t = time_chain(calls, [&](cudaStream_t stream, int i) {
            cudaLaunchAttribute attribute{};
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t launch{};
            launch.gridDim = dim3(static_cast<unsigned>(blocks));
            launch.blockDim = dim3(256);
            launch.stream = stream;
            launch.attrs = &attribute;
            launch.numAttrs = overlap ? 1 : 0;
            CHECK(cudaLaunchKernelEx(
                &launch, floor_kernel,
                reinterpret_cast<const uint4*>(data.data() + static_cast<std::size_t>(i) * bytes), each,
                ahead, reinterpret_cast<unsigned*>(data.data())));
          });
          std::printf("floor %.1f MB, %d blocks, ahead %u KB, overlap %d: %.2f us %.0f GB/s\n", mb, blocks,
                      ahead >> 10, overlap, t.median, bytes / t.median * 1e-3);
        }
      }
    }
  }
}

// Each case alone, after L2 has been overwritten, and in a chain: as many calls one after another, each with
// a weight and columns of its own, as read 300 MB, as the layers of a model do that decodes.
void time_decode(Report& report, Dense& dense, bool every_config) {
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape& shape : {Shape{1, 14336, 4096},
                             {1, 4096, 14336},
                             {2, 14336, 4096},
                             {2, 4096, 14336},
                             {4, 14336, 4096},
                             {4, 4096, 14336},
                             {8, 4096, 14336},
                             {8, 14336, 4096},
                             {16, 14336, 4096},
                             {16, 4096, 14336}}) {
    if (const char* only = std::getenv("TOKENS"); only != nullptr && std::atoll(only) != shape.m) continue;
    const Times dense_alone = dense.linear(shape.m, shape.n, shape.k),
                dense_chain = dense.linear_chain(shape.m, shape.n, shape.k, 4);
    for (const std::int64_t b : {128, 64, 32, 16}) {
      for (const double density : {.5, .25, .1, .05}) {
        if (!wanted_case(case_name(shape.m, shape.n, shape.k, b, density))) continue;
        const Case c{false, shape.m, shape.n, shape.k, b, b, density};
        Setup<__nv_bfloat16> s(c, false, 7);
        const DecodeProblem problem = problem_of(s);
        const auto crow = to_device(s.pattern.crow), col = to_device(s.pattern.col);
        const std::size_t weights = s.values.size, blocks = col.size;
        const auto calls = static_cast<int>((300u << 20) / (weights * 2) + 4);
        Buffer<__nv_bfloat16> many(weights * static_cast<std::size_t>(calls));
        fill(many.data(), many.size, 8, .02f, false);
        Buffer<std::int32_t> cols(blocks * static_cast<std::size_t>(calls));
        for (int i = 0; i < calls; ++i) {
          CHECK(cudaMemcpy(cols.data() + static_cast<std::size_t>(i) * blocks, col.data(),
                           blocks * sizeof(std::int32_t), cudaMemcpyDeviceToDevice));
        }
        const std::string chosen = configure(problem, 132).text();
        for (const DecodeCandidate& candidate : decode_candidates(problem)) {
          const bool is_chosen = candidate.config.text() == chosen;
          if (!candidate.reason.empty() || (!is_chosen && !every_config) ||
              !chosen_by_env(candidate.config.text()))
            continue;
          const auto call = [&](cudaStream_t stream, int i) {
            const auto at = static_cast<std::size_t>(i);
            CHECK(launch(problem, candidate.config,
                         {s.x.data(), many.data() + at * weights, crow.data(), cols.data() + at * blocks,
                          nullptr, s.y.data()},
                         stream));
          };
          const auto add = [&](const char* kernel, const Times& t, const Times& t_dense) {
            Row row{
                "linear", shape.m, shape.n, shape.k, block_text(c), density, kernel, candidate.config.text(),
                t,        t_dense};
            row.config += is_chosen ? " *" : "";
            row.bytes = static_cast<double>(s.pattern.blocks() * (b * b * 2 + 4));
            report.add(row);
          };
          add("decode", time_graph([&](cudaStream_t stream) { call(stream, 0); }), dense_alone);
          add("decode (chain)", time_chain(calls, call), dense_chain);
        }
      }
    }
  }
}

}  // namespace bench
