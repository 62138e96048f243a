// linear for up to 16 tokens. Rows of W are operand A of warp-sized products, tokens operand B. A product's
// sum may run over its 16 steps in any order, so a lane takes eight neighbouring weights of a row with one
// 16-byte load and the same eight inputs of a token with another: no packing. Weights in flight are in
// registers, or in shared memory, which leaves registers for more warps.
// Loads are not `.nc`: the kernel before, which this one may overlap, may write what they read. The index it
// does not write (decode.h), so where a warp's first inputs are is known before it ends.
#include "cuda/sm90/decode.h"

#include "cuda/device/async_copy.cuh"
#include "cuda/sm90/device/matrix.cuh"
#include "cuda/sm90/launch.cuh"
#include "cuda/sm90/tile/strip_sums.cuh"

namespace rarefy::sm90 {
namespace {

using device::Activation;
using device::copy_16;

// Of W that all ask for before they may read; more slows the kernel before.
constexpr u32 kAheadBytes = 4 << 20;

struct DecodeParams {
  const void *x, *values, *bias;
  void* y;
  const int *crow, *col;
  int blocks, tokens, rows, cols, block_rows, block_cols, block_size, block_row_count;
  bool late;  // whether the next kernel may start only when this one's loads are done
  int split;  // thread blocks of a cluster, which share a strip
  u32 magic;  // 2³² over the units of a block, rounded up: it divides them (entry_of); 0 if a block is one
  int whole;  // all bits if it is, else 0
  u32 ahead;  // bytes of W that a thread block asks L2 for
  std::int64_t x_stride, y_stride;
  Activation activation;
};

struct Words {  // eight 16-bit elements
  u32 w[4];
};

// Zeros where nothing is wanted. Predicates by hand: of conditions ptxas makes branches around single loads,
// one way in one kernel and another in the next, which cost all kernels 0–15 % and some of them 30.
__device__ inline Words load_streamed(const void* p, bool wanted) {  // read once: not worth a line of L1
  Words r;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(r.w[0]), "=&r"(r.w[1]), "=&r"(r.w[2]), "=&r"(r.w[3])
      : "l"(p), "r"(static_cast<u32>(wanted))
      : "memory");
  return r;
}

__device__ inline Words load_cached(const void* p, bool wanted) {
  Words r;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(r.w[0]), "=&r"(r.w[1]), "=&r"(r.w[2]), "=&r"(r.w[3])
      : "l"(p), "r"(static_cast<u32>(wanted))
      : "memory");
  return r;
}

__device__ inline Words load_shared(u32 address) {
  Words r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
               : "r"(address)
               : "memory");
  return r;
}

// All thread blocks together ask L2 for the whole index and X, which are small, before they are needed one
// after another: each first read of a line from device memory would cost as much as 4 KB of W for every warp.
// Each asks for the begin of about what it will read of W, too. Hints, so they may be given while the kernel
// before runs, whatever that writes.
template <class T>
__device__ inline void ask_ahead(const DecodeParams& p) {
  if (p.blocks == 0) return;
  const int threads = static_cast<int>(gridDim.x * blockDim.x), line_bytes = 128;
  const int self = static_cast<int>(threadIdx.x) * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
  const int crow_lines = p.block_row_count / 32 + 1, col_lines = p.blocks / 32 + 1,
            x_lines = p.cols * static_cast<int>(sizeof(T)) / line_bytes + 1,
            bias_lines = p.bias == nullptr ? 0 : p.rows / 64 + 1;
  const int lines = crow_lines + col_lines + bias_lines + p.tokens * x_lines;
  for (int i = self; i < lines; i += threads) {
    const void* at;
    if (i < crow_lines) {
      at = p.crow + min(i * 32, p.block_row_count);
    } else if (i < crow_lines + col_lines) {
      at = p.col + min((i - crow_lines) * 32, p.blocks - 1);
    } else if (i < crow_lines + col_lines + bias_lines) {
      at = static_cast<const T*>(p.bias) + min((i - crow_lines - col_lines) * 64, p.rows - 1);
    } else {
      const int line = i - crow_lines - col_lines - bias_lines;
      at = static_cast<const T*>(p.x) + line / x_lines * p.x_stride + min(line % x_lines * 64, p.cols - 1);
    }
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
  if (threadIdx.x == 0) {
    constexpr std::int64_t kPiece = 512;  // 16 × 16 weights
    const std::int64_t pieces = std::int64_t{p.blocks} * p.block_rows * p.block_cols / 256;
    const std::int64_t begin = pieces * blockIdx.x / gridDim.x * kPiece,
                       end = pieces * (blockIdx.x + 1) / gridDim.x * kPiece;
    const auto bytes = static_cast<u32>(min(std::int64_t{p.ahead}, end - begin));
    if (bytes > 0) {
      asm volatile(
          "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(p.values) + begin),
          "r"(bytes)
          : "memory");
    }
  }
}

// How a warp reads rows of W: each lane 16 bytes, and lane 4g + q holds a product's row g.
//   whole lines: 64 columns, of which eight lanes read a row's 128 bytes, so that g and g ^ 1 have two halves
//     of one row. Of two loads each lane gives one to its neighbour: products of either half have eight rows.
//     Out of shared memory lanes read what their products want, whoever copied it.
//   halves: the same without that, for up to four tokens. They have two columns of the product each: inputs
//     of the first half in one, of the second in the other. Of a row's sums those of its half count, and the
//     two are added up.
//   32 columns: four lanes read a row.
//   two blocks: of 16 columns, one stored after another: four lanes read what they have of a row.
enum Reads { kLines, kHalves, kColumns, kTwoBlocks };

template <int kReads, bool kShared>
struct Reading {
  static constexpr bool kPaired = kReads == kHalves, kExchanged = kReads == kLines && !kShared;
  // Columns side by side, and how many of these a step has.
  static constexpr int kUnit = kPaired || kReads == kLines ? 64 : kReads == kColumns ? 32 : 16;
  static constexpr int kUnits = kReads == kTwoBlocks ? 2 : 1;
  static constexpr int kRowsOfLoad = kUnit == 64 ? 4 : 8;
  static constexpr int kTokensOfTile = kPaired ? 4 : 8;
  static constexpr int kParts = kReads == kLines ? 2 : 1;  // of a step: inputs that a lane multiplies in turn
  static constexpr int kRowsOfProduct = kPaired ? 8 : 16;
};

// Of two loads of whole lines, `rows` and the four below it: what products of either half of the columns
// multiply. Lanes of even g have first halves.
__device__ inline void exchange(const Words& rows, const Words& below, bool even, Words (&halves)[2]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const u32 theirs = __shfl_xor_sync(~0u, even ? below.w[w] : rows.w[w], 4);
    halves[0].w[w] = even ? rows.w[w] : theirs;
    halves[1].w[w] = even ? theirs : below.w[w];
  }
}

// kRows rows of W, kTiles products of tokens, kInFlight loads of W, in registers or in shared memory.
template <class T, int kReads, int kRows, int kTiles, int kWarps, int kInFlight, bool kShared>
__global__ void __launch_bounds__(kWarps * 32, warps_of_sm(kTiles == 2, kReads == kLines || kReads == kHalves,
                                                           kInFlight, kShared) /
                                                   kWarps) decode_kernel(const DecodeParams p) {
  using R = Reading<kReads, kShared>;
  constexpr int kLoads = kRows / R::kRowsOfLoad, kSteps = kInFlight / kLoads,
                kProducts = kRows / R::kRowsOfProduct;
  constexpr int kTokens = kTiles * R::kTokensOfTile;
  constexpr int kToken = kRows + (R::kPaired ? 8 : 4);  // from token to token: no two lanes meet in a bank
  // A warp's weights in flight, and then its sums.
  constexpr int kLoadBytes = 512, kWeightBytes = kShared ? kInFlight * kLoadBytes : 0;
  constexpr int kSums = kTokens * kToken * 4 > kWeightBytes ? kTokens * kToken : kWeightBytes / 4;
  __shared__ __align__(16) float partial[kWarps][kSums];
  const int split = kShared ? 1 : p.split, rank = kShared ? 0 : static_cast<int>(cluster_rank());
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, q = lane % 4, row = R::kUnit == 64 ? g / 2 : g;  // of a load
  const int strip = static_cast<int>(blockIdx.x) / split, strips_per_block = p.block_rows / kRows;
  const int block_row = strip / strips_per_block, first_row = strip % strips_per_block * kRows;
  if (!p.late) launch_dependents();
  ask_ahead<T>(p);
  const int begin = p.crow[block_row], end = p.crow[block_row + 1];
  const int per_block = p.block_cols / R::kUnit, units = (end - begin) * per_block,
            steps = (units + R::kUnits - 1) / R::kUnits;
  const int w0 = 8 * (R::kUnit == 64       ? lane % 8
                      : kReads == kColumns ? q
                                           : q % 2);  // of a unit's columns, in W
  const int k0 = kReads == kLines ? 8 * q : w0;       // and in X, the first part
  const int in_block = (first_row + row) * p.block_cols + w0;

  // unit / per_block. (A condition here would be a branch around the loads that follow.)
  const auto entry_of = [&](int unit) {
    return static_cast<int>(__umulhi(static_cast<u32>(unit), p.magic)) + (unit & p.whole);
  };
  const auto unit_of = [&](int step) { return R::kUnits * step + (R::kUnits == 2 ? q / 2 : 0); };
  int k[kSteps];  // where this lane's inputs of a step are; p.cols: nowhere
  const auto find_inputs = [&](int(&k)[kSteps], int first) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int wanted = unit_of(first + i), unit = min(wanted, units - 1), entry = entry_of(unit);
      const int at = p.col[begin + entry] * p.block_cols + (unit - entry * per_block) * R::kUnit + k0;
      k[i] = wanted < units ? at : p.cols;
    }
  };
  // Where a lane's part of a load goes, and of a product's rows g what it reads: of whole lines, halves of
  // every other row change places, so that no two lanes meet in a bank.
  const u32 weights = shared_address(partial[warp]);
  const auto place = [&](int row, int piece) {
    return static_cast<u32>(R::kUnit == 64 ? row * 128 + (piece ^ (row % 2 * 4)) * 16 : lane * 16);
  };
  const u32 to = weights + place(row, lane % 8);
  float d[kProducts][kTiles][4] = {};
  const int workers = kWarps * split, worker = rank * kWarps + warp;
  if (units > 0) find_inputs(k, worker * kSteps);
  wait_for_kernels();
  Words a[kShared ? 1 : kSteps][kShared ? 1 : kLoads], b[kSteps][kTiles][R::kParts];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int wanted = unit_of(first + i), unit = min(wanted, units - 1);
      const int entry = entry_of(unit), side = (unit - entry * per_block) * R::kUnit;
      const T* from = static_cast<const T*>(p.values) +
                      (static_cast<std::int64_t>(begin + entry) * p.block_size + (side + in_block));
#pragma unroll
      for (int j = 0; j < kLoads; ++j, from += R::kRowsOfLoad * p.block_cols) {
        if constexpr (kShared)
          copy_16(to + static_cast<u32>((i * kLoads + j) * kLoadBytes), from, wanted < units ? 16 : 0);
        else
          a[i][j] = load_streamed(from, wanted < units);
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int token = (R::kPaired ? row : g) + R::kTokensOfTile * n;
#pragma unroll
        for (int h = 0; h < R::kParts; ++h) {
          b[i][n][h] = load_cached(static_cast<const T*>(p.x) + (token * p.x_stride + k[i] + 32 * h),
                                   token < p.tokens && k[i] + 32 * h < p.cols);
        }
      }
    }
  };
  const auto multiply = [&] {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kProducts; ++j) {
        Words low[R::kParts], high[R::kParts];  // rows g and g + 8 of the product
        if constexpr (R::kExchanged) {
          exchange(a[i][4 * j], a[i][4 * j + 1], g % 2 == 0, low);
          exchange(a[i][4 * j + 2], a[i][4 * j + 3], g % 2 == 0, high);
        } else if constexpr (!kShared) {
          low[0] = a[i][2 * j];
          high[0] = a[i][2 * j + 1];
        }
#pragma unroll
        for (int h = 0; h < R::kParts; ++h) {
          if constexpr (kShared) {
            constexpr int kBytesOfProduct = 16 / R::kRowsOfLoad * kLoadBytes;
            const u32 at = weights + static_cast<u32>(i * kLoads * kLoadBytes + j * kBytesOfProduct) +
                           place(g, 4 * h + q);
            low[h] = load_shared(at);
            high[h] = load_shared(at + kBytesOfProduct / 2);
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int w = 0; w < 4; w += 2) {
              mma(T{}, d[j][n], low[h].w[w], high[h].w[w], low[h].w[w + 1], high[h].w[w + 1], b[i][n][h].w[w],
                  b[i][n][h].w[w + 1]);
            }
          }
        }
      }
    }
  };
  int first = worker * kSteps;
  const int stride = workers * kSteps;
  if constexpr (kShared) {
    // Loads and the wait for them in blocks of their own: within one, ptxas loads inputs after the wait.
    if (first < steps) load(first);
    for (; first < steps; first += stride) {
      device::wait_for_all_copies();
      __syncwarp();
      multiply();
      __syncwarp();  // all have read what others copy to, or write sums to
      if (first + stride >= steps) continue;
      find_inputs(k, first + stride);
      load(first + stride);
    }
  } else {
    for (; first < steps; first += stride) {
      int next[kSteps];
      find_inputs(next, first + stride);
      load(first);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) k[i] = next[i];
      multiply();
    }
  }

  // The next kernel may start now. Sums by token, then row: what is stored side by side lies side by side.
  if (p.late) launch_dependents();
#pragma unroll
  for (int j = 0; j < kProducts; ++j) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float(&sums)[4] = d[j][n];  // rows g, g, g + 8, g + 8, columns 2q, 2q + 1, 2q, 2q + 1
      if constexpr (R::kPaired) {
        float low = g % 2 == 0 ? sums[0] : sums[1], high = g % 2 == 0 ? sums[2] : sums[3];
        low += __shfl_xor_sync(~0u, low, 4);
        high += __shfl_xor_sync(~0u, high, 4);
        partial[warp][(4 * n + q) * kToken + 8 * j + g % 2 * 4 + g / 2] = g % 2 == 0 ? low : high;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          partial[warp][(8 * n + 2 * q + i % 2) * kToken + 16 * j + i / 2 * 8 +
                        (R::kExchanged ? g % 2 * 4 + g / 2 : g)] = sums[i];
      }
    }
  }
  __syncthreads();
  finish_strip<T, kWarps, kRows, kToken>(p, partial, min(p.tokens, kTokens),
                                         block_row * p.block_rows + first_row, split, rank);
}

template <class T, int kReads, int kRows, int kTiles, int kWarps, int kInFlight, bool kShared>
cudaError_t launch_strips(std::int64_t strips, const DecodeParams& params, cudaStream_t stream) {
  return launch_kernel<decode_kernel<T, kReads, kRows, kTiles, kWarps, kInFlight, kShared>>(
      {.blocks = strips * params.split, .threads = kWarps * 32, .cluster = params.split, .early = true},
      params, stream);
}

// Calls f with a compile-time integer equal to `value`, one of `first`, `rest` ….
template <int first, int... rest, class F>
cudaError_t with_int(int value, F&& f) {
  if (value == first) return f(std::integral_constant<int, first>{});
  if constexpr (sizeof...(rest) > 0) return with_int<rest...>(value, f);
  return cudaErrorInvalidConfiguration;
}

template <class T>
cudaError_t launch_type(const DecodeProblem& p, const DecodeConfig& config, const DecodeParams& params,
                        cudaStream_t stream) {
  const std::int64_t strips = config.strips(p);
  const int wide = p.wide(), how = wide == 32   ? kColumns
                                   : wide == 16 ? kTwoBlocks
                                   : p.few()    ? kHalves
                                                : kLines;
  return with_int<kLines, kHalves, kColumns, kTwoBlocks>(how, [&](auto reads) {
    return with_int<1, 2>(p.many() ? 2 : 1, [&](auto tiles) {
      return with_int<16, 32>(config.rows, [&](auto rows) {
        return with_int<2, 4, 8>(config.warps, [&](auto warps) {
          return with_int<8, 16>(config.loads, [&](auto loads) {
            return with_int<0, 1>(config.shared ? 1 : 0, [&](auto shared) {
              constexpr bool few = reads == kHalves, many = tiles == 2;
              constexpr int columns = reads == kTwoBlocks ? 16 : reads == kColumns ? 32 : 64;
              // As decode_candidates says.
              if constexpr ((many && (loads == 16 || few)) ||
                            (shared && !can_share(columns, few, many, rows, warps, loads))) {
                return cudaErrorInvalidConfiguration;
              } else {
                return launch_strips<T, reads, rows, tiles, warps, loads, shared == 1>(strips, params,
                                                                                       stream);
              }
            });
          });
        });
      });
    });
  });
}

}  // namespace

cudaError_t launch(const DecodeProblem& p, const DecodeConfig& config, const DecodeOperands& o,
                   cudaStream_t stream) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  DecodeParams params{};
  params.x = o.x;
  params.values = o.values;
  params.bias = o.bias;
  params.y = o.y;
  params.crow = o.crow;
  params.col = o.col;
  params.blocks = n(p.blocks);
  params.tokens = n(p.tokens);
  params.rows = n(p.rows);
  params.cols = n(p.cols);
  params.block_rows = n(p.block_rows);
  params.block_cols = n(p.block_cols);
  params.block_row_count = n(p.block_row_count());
  params.ahead =
      kAheadBytes / static_cast<u32>(std::max<std::int64_t>(1, config.strips(p) * config.split)) / 16 * 16;
  const std::int64_t per_block = p.block_cols / p.wide();
  params.magic = static_cast<u32>(((std::int64_t{1} << 32) + per_block - 1) / per_block);
  params.whole = per_block == 1 ? -1 : 0;
  params.late = config.late;
  params.split = config.split;
  params.block_size = n(p.block_rows * p.block_cols);
  params.x_stride = p.x_stride;
  params.y_stride = p.y_stride;
  params.activation = static_cast<device::Activation>(p.activation);
  return p.dtype == DType::bf16 ? launch_type<__nv_bfloat16>(p, config, params, stream)
                                : launch_type<__half>(p, config, params, stream);
}

}  // namespace rarefy::sm90
