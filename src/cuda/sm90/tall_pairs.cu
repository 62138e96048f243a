// The weight gradient of tall vectors in tiles of two block rows: windows and their columns, made on the
// device of the pattern, and the launch.
#include <climits>

#include "cuda/sm90/tall_gradient_launch.cuh"

namespace rarefy::sm90 {
namespace {

constexpr int kThreads = 256, kMostWords = TallPairs::kMostCols / 32;  // of 32 columns, a bit each

struct PairPlan {
  const int *crow, *col;
  int block_rows, words, most, cluster;  // of W's columns; of a row's part of a tile; windows of a tile
  int2 *rows, *pairs, *windows;
  int *columns, *targets;
  std::int64_t second;  // from the first row's targets to the second's
};

// A thread for each block row: how many come before it, and what these store. Behind an odd last one a row of
// none.
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ PairPlan p) {
  const int self = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (self >= p.block_rows) return;
  const int length = p.crow[self + 1] - p.crow[self];
  int before = 0, entries = 0;
  for (int row = 0; row < p.block_rows; ++row) {
    const int its = p.crow[row + 1] - p.crow[row];
    if (its < length || (its == length && row >= self)) continue;
    ++before;
    entries += its;
  }
  p.rows[before] = {self, entries};
  if (before + 1 == p.block_rows && p.block_rows % 2 == 1) p.rows[p.block_rows] = {p.block_rows, 0};
}

// What two block rows store.
struct PairBits {
  unsigned of[2][kMostWords];
  int before[3][kMostWords + 1];  // words: columns of the first row, of the second, of both
  int partial[3][kThreads];

  __device__ void read(const PairPlan& p, const int (&rows)[2]) {
    const int self = static_cast<int>(threadIdx.x);
    const int each = (p.words + kThreads - 1) / kThreads, all = each * kThreads;  // words of a thread
    for (int i = self; i < all; i += kThreads) of[0][i] = of[1][i] = 0;
    __syncthreads();
    for (int which = 0; which < 2 && rows[which] < p.block_rows; ++which) {
      const int end = p.crow[rows[which] + 1];
      for (int i = p.crow[rows[which]] + self; i < end; i += kThreads)
        atomicOr(&of[which][p.col[i] / 32], 1u << p.col[i] % 32);
    }
    __syncthreads();
    count(each);
  }

  __device__ void count(int each) {
    const int self = static_cast<int>(threadIdx.x), lane = self % 32;
    int sum[3] = {};
    for (int i = self * each; i < (self + 1) * each; ++i) {
      before[0][i] = sum[0], before[1][i] = sum[1], before[2][i] = sum[2];
      sum[0] += __popc(of[0][i]), sum[1] += __popc(of[1][i]), sum[2] += __popc(of[0][i] & of[1][i]);
    }
    for (int k = 0; k < 3; ++k) partial[k][self] = sum[k];
    __syncthreads();
    if (self < 3 * 32) {  // a warp each: eight of a lane's, then those of the lanes before
      int* its = partial[self / 32] + lane * (kThreads / 32);
      int mine = 0;
      for (int i = 0; i < kThreads / 32; ++i) {
        const int next = its[i];
        its[i] = mine;
        mine += next;
      }
      int all = mine;
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, all, d);
        all += lane >= d ? other : 0;
      }
      for (int i = 0; i < kThreads / 32; ++i) its[i] += all - mine;
      if (lane == 31) before[self / 32][each * kThreads] = all;
    }
    __syncthreads();
    for (int k = 0; k < 3; ++k) {
      for (int i = self * each; i < (self + 1) * each; ++i) before[k][i] += partial[k][self];
    }
    __syncthreads();
  }
};

// Words begin … end of two rows.
struct Window {
  int begin, end;
  int first_alone;  // columns of the first row alone, not filled up
  PairColumns columns{0, 0, 0};
  __device__ Window(const PairBits& bits, int its_begin, int its_end) : begin(its_begin), end(its_end) {
    const auto stored = [&](int k) { return bits.before[k][end] - bits.before[k][begin]; };
    const int both = stored(2);
    first_alone = stored(0) - both;
    columns = PairColumns((first_alone + 7) / 8 * 8, both, stored(1) - both);
    if (columns.all() == 0) columns.first = 8;  // a tile has a column
  }
  __device__ bool fits(int most) const {
    return columns.first + columns.both <= most && columns.both + columns.second <= most &&
           columns.all() <= TallPairs::kMostGathered;
  }
};

// By one warp: windows with no more than `most` columns of each row, as long as they can be; how many.
template <class Take>
__device__ int walk(const PairBits& bits, int words, int most, Take&& take) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0;
  for (int begin = 0, end = 0; begin < words; begin = end, ++count) {
    for (unsigned fit = ~0u; fit == ~0u && end < words;) {  // 32 words at a time
      fit = __ballot_sync(~0u, end + lane < words && Window(bits, begin, end + lane + 1).fits(most));
      end += __popc(fit);
    }
    take(count, begin, end);
  }
  return count;
}

// By each lane for itself: whether so many windows do.
__device__ bool enough(const PairBits& bits, int words, int most, int count) {
  int at = 0;
  for (int i = 0; i < count && at < words; ++i) {
    int low = at + 1, high = words;  // a word fits
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (Window(bits, at, middle).fits(most)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    at = low;
  }
  return at == words;
}

// By one warp: the pair's windows, as few as hold its rows in whole clusters' tiles, with the lowest most
// columns that do: lanes try them in eights. How many there are.
__device__ int cut(const PairBits& bits, const PairPlan& p, int2* windows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int least = walk(bits, p.words, p.most, [](int, int, int) {});
  const int count = (least + p.cluster - 1) / p.cluster * p.cluster, most = p.most - 8 * lane;
  const bool mine = lane == 0 || (most >= 64 && enough(bits, p.words, most, count));
  const int chosen = p.most - 8 * (31 - __clz(__ballot_sync(~0u, mine)));
  const int used = walk(bits, p.words, chosen, [&](int i, int begin, int end) {
    if (lane == 0) windows[i] = {begin, end};
  });
  if (lane < count - used) windows[used + lane] = {p.words, p.words};
  return count;
}

// A thread block for each pair.
__global__ void __launch_bounds__(kThreads) pair_kernel(const __grid_constant__ PairPlan p) {
  extern __shared__ unsigned char shared[];
  __shared__ int count;
  PairBits& bits = *reinterpret_cast<PairBits*>(shared);
  const int pair = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int rows[2] = {p.rows[2 * pair].x, p.rows[2 * pair + 1].x}, entries_before = p.rows[2 * pair].y;
  bits.read(p, rows);
  const int begin[2] = {p.crow[rows[0]], p.crow[min(rows[1], p.block_rows)]};
  const int entries = bits.before[0][p.words] + bits.before[1][p.words];
  int2* its_windows = p.windows + TallPairs::first_window(entries_before, pair);
  if (warp == 0) {
    const int windows = entries == 0 ? 0 : cut(bits, p, its_windows);
    if (lane == 0) count = windows;
  }
  __syncthreads();
  const int windows = count;
  const auto at = static_cast<int>(TallPairs::first_column(entries_before, pair));
  if (threadIdx.x == 0) {
    const int gathered = windows == 0 ? 0 : (entries - bits.before[2][p.words]) / windows + 8;
    p.pairs[pair] = {windows / p.cluster, gathered};
  }
  for (int i = warp; i < windows; i += kThreads / 32) {
    const Window window(bits, its_windows[i].x, its_windows[i].y);
    __syncwarp();
    const PairColumns columns = window.columns;
    // Windows before this one have filled up less than eight columns each, or have eight without entries.
    const int before =
                  bits.before[0][window.begin] + bits.before[1][window.begin] - bits.before[2][window.begin],
              first = at + before + 8 * i;
    if (lane == 0) its_windows[i] = {first, columns.word()};
    const auto put = [&](int place, int column, int target, int second) {
      p.columns[first + place] = column;
      p.targets[first + place] = target;
      p.targets[p.second + first + place] = second;
    };
    if (window.first_alone + lane < columns.first) put(window.first_alone + lane, 0, -1, -1);
    for (int word = window.begin; word < window.end; ++word) {
      const unsigned a = bits.of[0][word], b = bits.of[1][word], below = (1u << lane) - 1;
      const auto since = [&](int k) { return bits.before[k][word] - bits.before[k][window.begin]; };
      const auto is = [&](unsigned set) { return (set >> lane & 1) != 0; };
      const auto under = [&](unsigned set) { return __popc(set & below); };
      if (!is(a | b)) continue;
      int place;
      if (!is(b)) {
        place = since(0) - since(2) + under(a & ~b);
      } else if (is(a)) {
        place = columns.first + since(2) + under(a & b);
      } else {
        place = columns.first + columns.both + since(1) - since(2) + under(b & ~a);
      }
      put(place, word * 32 + lane, is(a) ? begin[0] + bits.before[0][word] + under(a) : -1,
          is(b) ? begin[1] + bits.before[1][word] + under(b) : -1);
    }
  }
}

}  // namespace

cudaError_t prepare_pairs(const TallGradientProblem& p, const TallGradientConfig& config,
                          const std::int32_t* crow, const std::int32_t* col, std::int32_t* words,
                          cudaStream_t stream) {
  const TallPairs pairs = TallGradientPlan(p, config).pairs;
  if (pairs.count == 0) return cudaSuccess;
  static cuda::SharedLimit limit;
  const cudaError_t status = limit.allow(pair_kernel, sizeof(PairBits));
  if (status != cudaSuccess) return status;
  const PairPlan plan{crow,
                      col,
                      static_cast<int>((p.rows + p.block_rows - 1) / p.block_rows),
                      static_cast<int>((p.cols + 31) / 32),
                      config.columns,
                      config.pairs,
                      reinterpret_cast<int2*>(words + pairs.rows_at),
                      reinterpret_cast<int2*>(words + pairs.pairs_at),
                      reinterpret_cast<int2*>(words + pairs.windows_at),
                      words + pairs.columns_at,
                      words + pairs.targets_at,
                      pairs.room};
  row_kernel<<<static_cast<unsigned>((plan.block_rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      plan);
  pair_kernel<<<static_cast<unsigned>(pairs.count), kThreads, sizeof(PairBits), stream>>>(plan);
  return cudaGetLastError();
}

template <class T, int kPairs>
cudaError_t launch_of(const TallGradientConfig& c, const TallGradientParams& params, Gathered x,
                      cudaStream_t stream) {
  return x == Gathered::turned ? launch_tiles<T, 64, 1, kPairs, TallSteps::turns>(c, params, x, stream)
                               : launch_tiles<T, 64, 1, kPairs, TallSteps::plain>(c, params, x, stream);
}

template <class T>
cudaError_t launch_pairs(const TallGradientConfig& c, const TallGradientParams& params, Gathered x,
                         cudaStream_t stream) {
  switch (c.pairs) {
    case 1: return launch_of<T, 1>(c, params, x, stream);
    case 2: return launch_of<T, 2>(c, params, x, stream);
    default: return cudaErrorInvalidConfiguration;
  }
}
template cudaError_t launch_pairs<__half>(const TallGradientConfig&, const TallGradientParams&, Gathered,
                                          cudaStream_t);
template cudaError_t launch_pairs<__nv_bfloat16>(const TallGradientConfig&, const TallGradientParams&,
                                                 Gathered, cudaStream_t);

}  // namespace rarefy::sm90
