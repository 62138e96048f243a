// Y = act(X Wᵀ + b) for up to 16 tokens: W is read once, as it is stored, and x for whatever a weight meets.
// A warp's lanes have neighbouring weights of some rows of a block, or of several blocks of the block row,
// and each sums for its own rows; the warps of a thread block share the block row's entries.
#include "cuda/device/activation.cuh"
#include "cuda/simt/kernels.h"
#include "cuda/simt/launch.cuh"

namespace rarefy::cuda::simt {
namespace {

using namespace device;

// What a lane loads at once: one weight; 16 bytes along a row, which meet 16 bytes of x; or, of blocks of one
// column, 16 bytes down the rows, which meet one element.
enum class Piece { single, along, down };

template <class T, Piece kPiece>
struct Lane {
  static constexpr int kValues = kPiece == Piece::single ? 1 : 16 / static_cast<int>(sizeof(T));
  static constexpr int kRows = kPiece == Piece::down ? kValues : 1;
  static constexpr int kCols = kPiece == Piece::along ? kValues : 1;
};

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Values {
  T v[kCount];
};

template <class T, int kCount>
__device__ inline Values<T, kCount> load_values(const T* from) {
  return *reinterpret_cast<const Values<T, kCount>*>(from);
}

// Whether x is packed first, the tokens of a feature side by side: where a weight meets one element of each
// token, that many loads become one.
__host__ __device__ constexpr bool packs_x(int tokens, Piece piece) {
  return piece == Piece::single ? tokens > 1 : piece == Piece::down && tokens > 4;
}

// How the lanes of a warp lie on a block row's entries.
struct Cut {
  int high;     // rows of W of a thread block: a share of a block's
  int pieces;   // of a row of a block; of `down` 1
  int lanes;    // that share an entry
  int entries;  // at once: 32 / lanes
  int turns;    // steps for an entry: more than one where a row has more than 32 pieces
};

constexpr int kMostWarps = 16;

template <class T, int kTokens>
__global__ void __launch_bounds__(256) pack_kernel(Matrix<const T> x, int features, T* packed) {
  const int feature = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  if (feature >= features) return;
  Values<T, kTokens> all{};
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    const std::int64_t token = std::int64_t{blockIdx.y} * kTokens + m;
    if (token < x.rows) all.v[m] = x.data[token * x.row_stride + feature * x.col_stride];
  }
  reinterpret_cast<Values<T, kTokens>*>(packed)[std::int64_t{blockIdx.y} * features + feature] = all;
}

// x: as the caller has it; packed: what pack_kernel made of it, where packs_x.
template <class T, int kTokens, Piece kPiece>
__global__ void __launch_bounds__(kMostWarps * 32)
    few_kernel(Plan plan, const T* values, Matrix<const T> x, const T* packed, const T* bias,
               device::Activation activation, Matrix<T> y, Cut cut) {
  using L = Lane<T, kPiece>;
  using A = accumulator_t<T>;
  constexpr bool kPacked = packs_x(kTokens, kPiece);
  constexpr int kAtOnce = kTokens <= 4 && sizeof(A) == 4 ? 8 : 4;  // pieces in flight
  __shared__ A part[kMostWarps][32][kTokens];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            warps = static_cast<int>(blockDim.x) / 32;
  const auto block_rows = static_cast<int>(plan.block_rows), block_cols = static_cast<int>(plan.block_cols),
             cols = static_cast<int>(plan.cols);
  const int chunks = (block_rows + cut.high - 1) / cut.high;
  const int block_row = static_cast<int>(blockIdx.x) / chunks,
            first_row = static_cast<int>(blockIdx.x) % chunks * cut.high;  // of the block
  const int which = lane / cut.lanes, in = lane % cut.lanes;
  const int row = kPiece == Piece::down ? in * L::kRows : cut.turns > 1 ? 0 : in / cut.pieces;
  const int piece = kPiece == Piece::down ? 0 : cut.turns > 1 ? lane : in % cut.pieces;
  const bool mine = which < cut.entries && row < cut.high && first_row + row < block_rows;
  const int begin = plan.crow[block_row], end = plan.crow[block_row + 1];
  const int steps = (end - begin + cut.entries - 1) / cut.entries * cut.turns;
  const int first_token = static_cast<int>(blockIdx.y) * kTokens;
  const T* of_token[kTokens];  // behind the last token the last once more
#pragma unroll
  for (int m = 0; m < kTokens; ++m)
    of_token[m] = x.data + min(static_cast<std::int64_t>(first_token + m), x.rows - 1) * x.row_stride;
  if constexpr (kPacked) packed += std::int64_t{blockIdx.y} * cols * kTokens;

  A sum[L::kRows][kTokens] = {};
  // Loads are of addresses that are valid in any case, so that nothing branches before the last has left.
  for (int first = warp; first < steps; first += warps * kAtOnce) {
    Values<T, L::kValues> w[kAtOnce];
    int at[kAtOnce];  // feature of x
    bool there[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int step = first + j * warps;
      const int turn = cut.turns == 1 ? 0 : step % cut.turns,
                place = cut.turns == 1 ? step : step / cut.turns;
      const int entry = min(begin + place * cut.entries + which, end - 1),
                column = (turn * 32 + piece) * L::kCols;
      there[j] = mine & (step < steps) & (begin + place * cut.entries + which < end) & (column < block_cols);
      const int feature = plan.col[entry] * block_cols + (there[j] ? column : 0);
      there[j] &= feature < cols;  // else padding
      at[j] = there[j] ? feature : 0;
      const std::int64_t inside = there[j] ? std::int64_t{first_row + row} * block_cols + column : 0;
      w[j] = load_values<T, L::kValues>(values + std::int64_t{entry} * block_rows * block_cols + inside);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if constexpr (kPacked) {
        const auto in_x = load_values<T, kTokens>(packed + std::int64_t{at[j]} * kTokens);
        if (!there[j]) continue;
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
#pragma unroll
          for (int i = 0; i < L::kValues; ++i) sum[i][m] += load(&w[j].v[i]) * load(&in_x.v[m]);
        }
      } else {
        Values<T, L::kCols> in_x[kTokens];
#pragma unroll
        for (int m = 0; m < kTokens; ++m)
          in_x[m] = load_values<T, L::kCols>(of_token[m] + at[j] * x.col_stride);
        if (!there[j]) continue;
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
#pragma unroll
          for (int i = 0; i < L::kValues; ++i)
            sum[i % L::kRows][m] += load(&w[j].v[i]) * load(&in_x[m].v[i % L::kCols]);
        }
      }
    }
  }

  // `down`: entries first, so that each row of W has one sum a warp. Others: a sum for each lane.
#pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    if constexpr (kPiece == Piece::down) {
#pragma unroll
      for (int r = 0; r < L::kRows; ++r) {
        for (int d = cut.lanes; d < 32; d *= 2) sum[r][m] += __shfl_xor_sync(~0u, sum[r][m], d);
        if (which == 0) part[warp][row + r][m] = sum[r][m];
      }
    } else {
      part[warp][lane][m] = sum[0][m];
    }
  }
  __syncthreads();
  const auto threads = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < 32 * kTokens; i += threads) {
    A all = part[0][i / kTokens][i % kTokens];
    for (int w = 1; w < warps; ++w) all += part[w][i / kTokens][i % kTokens];
    part[0][i / kTokens][i % kTokens] = all;
  }
  __syncthreads();
  const int side = kPiece == Piece::down ? 1 : cut.turns > 1 ? 32 : cut.pieces;  // sums of a row of an entry
  const int entries = kPiece == Piece::down ? 1 : cut.entries;
  for (int i = static_cast<int>(threadIdx.x); i < cut.high * kTokens; i += threads) {
    const int own = i / kTokens, m = i % kTokens;
    const std::int64_t n = static_cast<std::int64_t>(block_row) * block_rows + first_row + own,
                       token = first_token + m;
    if (first_row + own >= block_rows || n >= plan.rows || token >= x.rows) continue;
    A all = 0;
    for (int e = 0; e < entries; ++e) {
      for (int p = 0; p < side; ++p) all += part[0][e * cut.lanes + own * side + p][m];
    }
    if (bias != nullptr) all += load(bias + n);
    store(y.data + token * y.row_stride + n * y.col_stride, activate(activation, all));
  }
}

std::int64_t values_of_piece(const Problem& p) { return 16 / static_cast<std::int64_t>(size_of(p.in)); }

Piece piece_of(const Problem& p) {
  const std::int64_t values = values_of_piece(p);
  const BsrShape& s = p.weight.shape;
  if (p.in_alignment < 16) return Piece::single;
  if (s.block_cols == 1 && s.block_rows % values == 0) return Piece::down;
  const bool along = s.block_cols % values == 0 && s.cols % values == 0 && p.in_stride % values == 0 &&
                     p.in_layout == Layout::by_token;
  return along ? Piece::along : Piece::single;
}

Cut cut_of(const Problem& p, Piece piece) {
  const auto n = [](std::int64_t x) { return static_cast<int>(x); };
  const BsrShape& s = p.weight.shape;
  const std::int64_t values = values_of_piece(p);
  Cut cut{};
  if (piece == Piece::down) {  // up to four pieces of a column side by side
    const std::int64_t all = s.block_rows / values;
    cut.lanes = all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
    cut.high = cut.lanes * n(values);
    cut.pieces = cut.turns = 1;
  } else {
    const std::int64_t of_row = piece == Piece::along ? s.block_cols / values : s.block_cols;
    cut.pieces = n(std::min<std::int64_t>(of_row, 32));
    cut.high = n(std::min<std::int64_t>(s.block_rows, 32 / cut.pieces));
    cut.lanes = cut.high * cut.pieces;
    cut.turns = n(ceil_div(of_row, 32));
    if (cut.turns > 1) cut.lanes = 32;
  }
  cut.entries = 32 / cut.lanes;
  return cut;
}

// Tokens that a thread block sums.
int tokens_at_once(std::int64_t tokens) { return tokens == 1 ? 1 : tokens <= 4 ? 4 : 8; }

template <class T, int kTokens, Piece kPiece>
cudaError_t launch_piece(const Call& call, int warps) {
  const BsrShape& s = call.plan.shape;
  const Cut cut = cut_of(call.problem, kPiece);
  const auto x = device_matrix<T>(call.x);
  const std::int64_t passes = ceil_div(call.x.rows, kTokens);
  auto* packed = static_cast<T*>(call.workspace);
  if (packs_x(kTokens, kPiece) && s.cols > 0) {
    const cudaError_t status = launch(pack_kernel<T, kTokens>, grid(ceil_div(s.cols, 256), passes), 256,
                                      call.stream, x, static_cast<int>(s.cols), packed);
    if (status != cudaSuccess) return status;
  }
  return launch(few_kernel<T, kTokens, kPiece>,
                grid(s.row_count() * ceil_div(s.block_rows, cut.high), passes), 32 * warps, call.stream,
                device_plan(call.plan), static_cast<const T*>(call.values), x, static_cast<const T*>(packed),
                static_cast<const T*>(call.bias), static_cast<device::Activation>(call.activation),
                device_matrix<T>(call.out), cut);
}

template <class T, int kTokens>
cudaError_t launch_tokens(const Call& call, int warps) {
  switch (piece_of(call.problem)) {
    case Piece::down: return launch_piece<T, kTokens, Piece::down>(call, warps);
    case Piece::along: return launch_piece<T, kTokens, Piece::along>(call, warps);
    case Piece::single: break;
  }
  return launch_piece<T, kTokens, Piece::single>(call, warps);
}

}  // namespace

// More warps for a block row until the GPU has some 24 an SM, while each still has pieces to wait for at
// once. Of the weight alone, so that a token's bits do not depend on the batch.
FewChoice configure_few(const Problem& p, int sms) {
  const BsrShape& s = p.weight.shape;
  const Cut cut = cut_of(p, piece_of(p));
  const std::int64_t blocks = s.row_count() * ceil_div(s.block_rows, cut.high);
  const std::int64_t steps = blocks == 0 ? 0 : ceil_div(s.nnzb, s.row_count() * cut.entries) * cut.turns;
  FewChoice choice{1};
  while (choice.warps < kMostWarps && blocks * choice.warps < 24 * std::int64_t{sms} &&
         choice.warps * 4 <= steps)
    choice.warps *= 2;
  return choice;
}

std::int64_t few_workspace(const Problem& p) {
  const int at_once = tokens_at_once(p.tokens);
  if (!packs_x(at_once, piece_of(p))) return 0;
  return p.weight.shape.cols * ceil_div(p.tokens, at_once) * at_once *
         static_cast<std::int64_t>(size_of(p.in));
}

cudaError_t launch_few(const Call& call, int warps) {
  return with_element(call.problem.weight.dtype, [&]<class T>(T) {
    switch (tokens_at_once(call.x.rows)) {
      case 1: return launch_tokens<T, 1>(call, warps);
      case 4: return launch_tokens<T, 4>(call, warps);
      default: return launch_tokens<T, 8>(call, warps);
    }
  });
}

}  // namespace rarefy::cuda::simt
