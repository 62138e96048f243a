// What the Hopper bench shares between kernels: memory, random patterns and numbers, a double reference,
// timing by graph replay against cuBLAS in the same process.
#pragma once

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace bench {

#define CHECK(call)                                                                                     \
  do {                                                                                                  \
    const auto status_ = (call);                                                                        \
    if (static_cast<int>(status_) != 0) {                                                               \
      std::printf("%s:%d: %s returned %d (%s)\n", __FILE__, __LINE__, #call, static_cast<int>(status_), \
                  cudaGetErrorString(cudaGetLastError()));                                              \
      std::exit(1);                                                                                     \
    }                                                                                                   \
  } while (false)

// Device memory between two guard zones; everything starts as 0xFF, which is a NaN in every float type.
template <class T>
struct Buffer {
  static constexpr std::size_t kGuard = 4096;
  char* raw = nullptr;
  std::size_t size = 0;
  explicit Buffer(std::size_t n) : size(n) {
    CHECK(cudaMalloc(&raw, n * sizeof(T) + 2 * kGuard));
    poison();
  }
  Buffer(Buffer&& other) noexcept : raw(std::exchange(other.raw, nullptr)), size(other.size) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(raw); }
  T* data() const { return reinterpret_cast<T*>(raw + kGuard); }
  void poison() { CHECK(cudaMemset(raw, 0xFF, size * sizeof(T) + 2 * kGuard)); }
  std::vector<T> host() const {
    std::vector<T> h(size);
    CHECK(cudaMemcpy(h.data(), data(), size * sizeof(T), cudaMemcpyDeviceToHost));
    return h;
  }
  bool guards_intact() const {
    std::vector<unsigned char> g(2 * kGuard);
    CHECK(cudaMemcpy(g.data(), raw, kGuard, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(g.data() + kGuard, raw + kGuard + size * sizeof(T), kGuard, cudaMemcpyDeviceToHost));
    return std::all_of(g.begin(), g.end(), [](unsigned char c) { return c == 0xFF; });
  }
};

template <class T>
Buffer<T> to_device(const std::vector<T>& h) {
  Buffer<T> b(h.size());
  if (!h.empty()) CHECK(cudaMemcpy(b.data(), h.data(), h.size() * sizeof(T), cudaMemcpyHostToDevice));
  return b;
}

__device__ inline std::uint32_t hash(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<std::uint32_t>(x);
}

// Reals about normal with this deviation, or integers -2 … 2.
template <class T>
__global__ void fill_kernel(T* p, std::size_t n, std::uint64_t seed, float scale, bool integers) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const std::uint32_t h = hash(i + (seed << 40));
    const float uniforms = static_cast<float>(h & 0xFFF) + static_cast<float>(h >> 12 & 0x3FF) * 4 +
                           static_cast<float>(h >> 22) * 4;
    p[i] =
        T(integers ? static_cast<float>(static_cast<int>(h % 5) - 2) : (uniforms / 4096 - 1.5f) * 2 * scale);
  }
}
template <class T>
void fill(T* p, std::size_t n, std::uint64_t seed, float scale, bool integers) {
  if (n > 0) fill_kernel<<<1024, 256>>>(p, n, seed, scale, integers);
  CHECK(cudaGetLastError());
}

// A pattern on the host: by block row, and by block column with the position in values.
struct Pattern {
  std::int64_t rows, cols, r, c;
  std::vector<std::int32_t> crow, col, ccol, row, perm;
  std::int64_t block_rows() const { return (rows + r - 1) / r; }
  std::int64_t block_cols() const { return (cols + c - 1) / c; }
  std::int64_t blocks() const { return static_cast<std::int64_t>(col.size()); }
};

enum class Kind { random, rows_half_empty, one_dense_row };

inline Pattern make_pattern(std::int64_t rows, std::int64_t cols, std::int64_t r, std::int64_t c,
                            double density, Kind kind, unsigned seed) {
  Pattern p{rows, cols, r, c, {}, {}, {}, {}, {}};
  const std::int64_t br = p.block_rows(), bc = p.block_cols();
  std::vector<char> stored(static_cast<std::size_t>(br * bc), 0);
  std::mt19937 random(seed);
  std::vector<std::int64_t> places;
  for (std::int64_t i = 0; i < br * bc; ++i) {
    if (kind == Kind::rows_half_empty && i / bc % 2 == 0) continue;
    if (kind == Kind::one_dense_row && i / bc == br / 2)
      stored[static_cast<std::size_t>(i)] = 1;
    else
      places.push_back(i);
  }
  std::shuffle(places.begin(), places.end(), random);
  auto want = static_cast<std::size_t>(static_cast<double>(br * bc) * density + 0.5);
  if (kind == Kind::one_dense_row) want -= std::min(want, static_cast<std::size_t>(bc));  // as many in all
  for (std::size_t i = 0; i < std::min(want, places.size()); ++i)
    stored[static_cast<std::size_t>(places[i])] = 1;
  p.crow.push_back(0);
  for (std::int64_t i = 0; i < br; ++i) {
    for (std::int64_t j = 0; j < bc; ++j) {
      if (stored[static_cast<std::size_t>(i * bc + j)]) p.col.push_back(static_cast<std::int32_t>(j));
    }
    p.crow.push_back(static_cast<std::int32_t>(p.col.size()));
  }
  p.ccol.push_back(0);
  for (std::int64_t j = 0; j < bc; ++j) {
    for (std::int64_t i = 0; i < br; ++i) {
      const auto first = p.col.begin() + p.crow[static_cast<std::size_t>(i)],
                 last = p.col.begin() + p.crow[static_cast<std::size_t>(i) + 1];
      const auto at = std::lower_bound(first, last, j);
      if (at == last || *at != j) continue;
      p.row.push_back(static_cast<std::int32_t>(i));
      p.perm.push_back(static_cast<std::int32_t>(at - p.col.begin()));
    }
    p.ccol.push_back(static_cast<std::int32_t>(p.row.size()));
  }
  return p;
}

// The product in double, and the sum of its terms' magnitudes, at sampled tokens. grad_input swaps the roles
// of rows and columns of W; its index is the one by block column.
struct ReferenceArgs {
  bool transposed;
  std::int64_t r, c, in, out, x_token, x_feature;  // strides of x
  const std::int32_t *offsets, *others, *entries;
  const int* tokens;
  int count;
};
template <class T>
__global__ void reference_kernel(ReferenceArgs a, const T* values, const T* x, const T* bias, double* sum,
                                 double* size) {
  const std::int64_t o = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x;
  if (o >= a.out) return;
  const std::int64_t token = a.tokens[blockIdx.y];
  const std::int64_t outer = a.transposed ? a.c : a.r, inner = a.transposed ? a.r : a.c;
  double s = bias == nullptr ? 0 : static_cast<double>(static_cast<float>(bias[o])), m = fabs(s);
  for (std::int32_t e = a.offsets[o / outer]; e < a.offsets[o / outer + 1]; ++e) {
    const std::int64_t entry = a.entries == nullptr ? e : a.entries[e];
    for (std::int64_t k = 0; k < inner; ++k) {
      const std::int64_t i = a.others[e] * inner + k;
      if (i >= a.in) break;
      const std::int64_t at =
          a.transposed ? (entry * a.r + k) * a.c + o % outer : (entry * a.r + o % outer) * a.c + k;
      const double t = static_cast<double>(static_cast<float>(values[at])) *
                       static_cast<double>(static_cast<float>(x[token * a.x_token + i * a.x_feature]));
      s += t;
      m += fabs(t);
    }
  }
  sum[blockIdx.y * a.out + o] = s;
  size[blockIdx.y * a.out + o] = m;
}

// Whether the environment's CASE is part of this name, or not set.
inline bool wanted_case(const std::string& name) {
  const char* wanted = std::getenv("CASE");
  return wanted == nullptr || name.find(wanted) != std::string::npos;
}
inline std::string case_name(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t block_rows,
                             double density) {
  char name[80];
  std::snprintf(name, sizeof name, "M%ld N%ld K%ld b%ld d%g", m, n, k, block_rows, density);
  return name;
}

struct Times {
  double median = 0, q1 = 0, q3 = 0;
};

// Leaves a sum nobody looks at.
inline __global__ void read_kernel(const uint4* p, std::size_t n, unsigned* sum) {
  unsigned s = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const uint4 v = p[i];
    s += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (s == 0x12345678) *sum = s;
}

// Microseconds of a graph of what `record` queues, replayed; `before` queues what comes first each time.
template <class F, class G>
Times time_replays(F&& record, G&& before, int repeats) {
  // A copy from pageable memory returns before it has ended, and the stream below does not wait for it.
  CHECK(cudaDeviceSynchronize());
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  record(stream);
  CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  record(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    before(stream, i);
    CHECK(cudaEventRecord(a, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 3) times.push_back(ms * 1e3);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaEventDestroy(a));
  CHECK(cudaEventDestroy(b));
  CHECK(cudaStreamDestroy(stream));
  std::sort(times.begin(), times.end());
  const auto at = [&](double q) {
    return times[static_cast<std::size_t>(q * static_cast<double>(times.size() - 1) + 0.5)];
  };
  return {at(.5), at(.25), at(.75)};
}

// Microseconds of one of `calls` calls, one after another in a graph: call(stream, i) is to read other
// weights for each i, more of them all together than L2 holds.
template <class F>
Times time_chain(int calls, F&& call, int repeats = 21) {
  const Times all = time_replays(
      [&](cudaStream_t stream) {
        for (int i = 0; i < calls; ++i) call(stream, i);
      },
      [](cudaStream_t, int) {}, repeats);
  return {all.median / calls, all.q1 / calls, all.q3 / calls};
}

// Microseconds of one call, replayed as a graph. Before each, L2 is filled with other lines: written ones,
// and with FLUSH=read then with read ones, which cost nothing to push out. FLUSH=chain: ten calls one after
// another in a graph, as a training step has them, and nothing between them.
template <class F>
Times time_graph(F&& call, int repeats = 21) {
  static const std::string flushed = std::getenv("FLUSH") == nullptr ? "" : std::getenv("FLUSH");
  if (flushed == "chain")
    return time_chain(
        10, [&](cudaStream_t stream, int) { call(stream); }, repeats);
  static Buffer<char> flush(256u << 20), others(256u << 20);
  return time_replays(
      call,
      [&](cudaStream_t stream, int i) {
        CHECK(cudaMemsetAsync(flush.raw, i, 256u << 20, stream));
        if (flushed != "read") return;
        read_kernel<<<1056, 256, 0, stream>>>(reinterpret_cast<const uint4*>(others.data()), others.size / 16,
                                              reinterpret_cast<unsigned*>(flush.raw));
      },
      repeats);
}

// GELU as an eager framework computes it: a kernel of its own, rounded sums in, 16 bytes a thread and turn.
inline __global__ void gelu_kernel(const uint4* from, uint4* to, std::size_t n) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * blockDim.x) {
    uint4 v = from[i];
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&v);
    for (int j = 0; j < 4; ++j) {
      const float2 x = __bfloat1622float2(pairs[j]);
      pairs[j] = __floats2bfloat162_rn(x.x * 0.5f * (1 + erff(x.x * 0.70710678f)),
                                       x.y * 0.5f * (1 + erff(x.y * 0.70710678f)));
    }
    to[i] = v;
  }
}

// cuBLAS, row-major: y[m][n] = x[m][k] · w, w as [n][k] (transposed: as [k][n]).
struct Dense {
  cublasHandle_t handle;
  Buffer<char> workspace{64u << 20};
  bool tf32 = false;  // of f32
  Dense() {
    CHECK(cublasCreate(&handle));
    CHECK(cublasSetWorkspace(handle, workspace.raw, 64u << 20));
  }
  template <class T = __nv_bfloat16>
  Times linear(std::int64_t m, std::int64_t n, std::int64_t k) {
    return product<T>(m, n, k, false);
  }
  template <class T = __nv_bfloat16>
  Times grad_weight(std::int64_t m, std::int64_t n, std::int64_t k) {
    return product<T>(m, n, k, true);
  }
  // linear, `copies` times with weights of their own.
  Times linear_chain(std::int64_t m, std::int64_t n, std::int64_t k, int copies) {
    using T = __nv_bfloat16;
    Buffer<T> x(static_cast<std::size_t>(m * k)), w(static_cast<std::size_t>(n * k * copies)),
        y(static_cast<std::size_t>(m * n));
    fill(x.data(), x.size, 1, 1, false);
    fill(w.data(), w.size, 2, .02f, false);
    return time_chain(copies, [&](cudaStream_t s, int i) {
      multiply(s, m, n, k, x.data(), w.data() + static_cast<std::size_t>(i) * static_cast<std::size_t>(n * k),
               y.data());
    });
  }
  // k → h → k with a GELU kernel between the products, or, without one, on the same buffers.
  Times network(std::int64_t m, std::int64_t k, std::int64_t h, bool gelu) {
    using T = __nv_bfloat16;
    const auto room = [](std::int64_t n) { return Buffer<T>(static_cast<std::size_t>(n)); };
    Buffer<T> x = room(m * k), up = room(h * k), down = room(k * h), hidden = room(m * h),
              active = room(m * h), y = room(m * k);
    fill(x.data(), x.size, 1, 1, false);
    fill(up.data(), up.size, 2, .02f, false);
    fill(down.data(), down.size, 3, .02f, false);
    fill(active.data(), active.size, 4, 1, false);
    return time_graph([&](cudaStream_t s) {
      multiply(s, m, h, k, x.data(), up.data(), hidden.data());
      if (gelu) {
        gelu_kernel<<<132 * 16, 256, 0, s>>>(reinterpret_cast<const uint4*>(hidden.data()),
                                             reinterpret_cast<uint4*>(active.data()), hidden.size / 8);
      }
      multiply(s, m, k, h, active.data(), down.data(), y.data());
    });
  }

 private:
  template <class T>
  static constexpr cudaDataType_t kData = sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_16BF;

  cublasComputeType_t compute() const { return tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F; }

  // y (m, n) = x (m, k) wᵀ, or w (n, k) = yᵀ x.
  template <class T>
  Times product(std::int64_t m, std::int64_t n, std::int64_t k, bool gradient) {
    Buffer<T> x(static_cast<std::size_t>(m * k)), w(static_cast<std::size_t>(n * k)),
        y(static_cast<std::size_t>(m * n));
    fill(x.data(), x.size, 1, 1, false);
    fill(w.data(), w.size, 2, .02f, false);
    fill(y.data(), y.size, 3, 1, false);
    return time_graph([&](cudaStream_t s) {
      if (gradient) {
        const float one = 1, zero = 0;
        const auto i = [](std::int64_t v) { return static_cast<int>(v); };
        CHECK(cublasSetStream(handle, s));
        CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_T, i(k), i(n), i(m), &one, x.data(), kData<T>, i(k),
                           y.data(), kData<T>, i(n), &zero, w.data(), kData<T>, i(k), compute(),
                           CUBLAS_GEMM_DEFAULT));
      } else {
        multiply<T>(s, m, n, k, x.data(), w.data(), y.data());
      }
    });
  }

  template <class T = __nv_bfloat16>
  void multiply(cudaStream_t s, std::int64_t m, std::int64_t n, std::int64_t k, const void* x, const void* w,
                void* y) {
    const float one = 1, zero = 0;
    const auto i = [](std::int64_t v) { return static_cast<int>(v); };
    CHECK(cublasSetStream(handle, s));
    CHECK(cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, i(n), i(m), i(k), &one, w, kData<T>, i(k), x,
                       kData<T>, i(k), &zero, y, kData<T>, i(n), compute(), CUBLAS_GEMM_DEFAULT));
  }
};

}  // namespace bench
