// The weight gradient of tall vectors: blocks of one column and a multiple of 32 rows. A tile is 128 rows of
// W (or 64) × as many stored columns as the sums of two warpgroups hold; it walks the tokens, with dY as it
// is and the tile's columns gathered from X by feature; X by token is turned into workspace, before or, but
// for the first tokens, beside that (tall_gradient_turn.cuh). Tiles that rounds of all SMs leave over are
// shared: each of several clusters takes a part of the tokens. Of blocks of 64 rows a tile may be of two
// block rows (tall_pairs.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/sm90/parts.h"
#include "cuda/sm90/strip_walk.h"
#include "cuda/sm90/tall_pairs.h"
#include "rarefy/dtype.h"
#include "rarefy/problem.h"

namespace rarefy::sm90 {

struct TallGradientProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, blocks = 0;
  std::int64_t dy_stride = 0, x_stride = 0;  // elements between tokens; X by feature: between features
  Layout x_layout = Layout::by_token;

  std::int64_t turned_bytes() const;  // X by feature, if it is not, and its counts
};

// X by token, turned: panels of a step's tokens, 32 or 64, of whole boxes of features. Behind them counts: of
// boxes taken, and of those of each panel that are there.
struct TurnedX {
  static constexpr int kBytes = 4096, kTogether = 4;  // of a box; boxes taken at a time
  static constexpr int features(int step) { return kBytes / 2 / step; }
  std::int64_t features_in_all, bytes, counts;
  TurnedX(std::int64_t cols, std::int64_t tokens)
      : features_in_all((cols + 63) / 64 * 64),
        bytes(features_in_all * ((tokens + 63) / 64 * 64) * 2),
        counts(((tokens + 31) / 32 + 1 + 3) / 4 * 4) {}
};

inline std::int64_t TallGradientProblem::turned_bytes() const {
  const TurnedX x(cols, tokens);
  return x_layout == Layout::by_token ? x.bytes + x.counts * 4 : 0;
}

// Of tiles that are shared: at most so many parts in all, of one tile, and tiles. In workspace, behind X:
// how many parts of a tile are there, for each thread block of a cluster and warpgroup, and their sums.
struct TileParts {
  static constexpr int kMost = 64, kMostOfTile = 8, kMostTiles = kMost / 2;
  static constexpr int kCounts = kMostTiles * 4 * 2;
  static constexpr std::int64_t kCountBytes = kCounts * 4;
  static constexpr std::int64_t kSumBytes = 2 * 128 * 144 * 4;  // of two warpgroups' threads
  static constexpr std::int64_t kBytes = kCountBytes + kMost * kSumBytes;
};

struct TallGradientConfig {
  static constexpr int kMost = 288;        // columns of a warpgroup's sums
  static constexpr int kMostOfLong = 480;  // of a tile: three steps have room
  int rows = 128;                          // of a tile; 64: twice the columns
  int split = 1;                           // thread blocks of a cluster that share the tokens: 1, 2 or 4
  int slots = 4;                           // steps in flight
  int sms = 132;
  int columns = kMost;  // of a tile, at most: a row is divided evenly into as few tiles as hold it
  int pairs = 0;        // tiles are of two block rows of 64 (tall_pairs.h): thread blocks that share dY
  int turns = 1;  // X by token: 0 is transposed before; 1: or, if it has 48 to 128 MB, 2: or always, the
                  // kernel turns it itself, all but the first tokens
  bool long_steps = false;  // of 64 rows: 64 tokens and up to kMostOfLong columns, not 32 and 576
  // Of long steps: thread blocks that, unless the pattern has tiles for them, turn so many 64ths of X by
  // token, the last ones, if it has 48 MB (turns=2: always). Of fewer bytes this saves nothing.
  int turners = 0, last = 0;

  int most_columns() const { return long_steps ? kMostOfLong : rows == 128 || pairs > 0 ? kMost : 2 * kMost; }
  int tokens() const { return rows == 128 || long_steps ? 64 : 32; }  // of a step
  int slot_bytes() const {
    return (pairs > 0 ? 128 + TallPairs::kMostGathered : rows + most_columns()) * tokens() * 2;
  }
  int shared_bytes() const { return 1024 + slots * slot_bytes() + 2 * 2 * 4096; }
  std::string text() const {
    return "rows=" + std::to_string(rows) + " split=" + std::to_string(split) +
           " slots=" + std::to_string(slots) + " sms=" + std::to_string(sms) +
           " columns=" + std::to_string(columns) + (pairs > 0 ? " pairs=" + std::to_string(pairs) : "") +
           " turns=" + std::to_string(turns) + (long_steps ? " long_steps=1" : "") +
           (turners > 0 ? " turners=" + std::to_string(turners) + " last=" + std::to_string(last) : "");
  }
  // Of fewer bytes the start costs more than this saves, more are read again from device memory.
  bool turns_itself(const TallGradientProblem& p) const {
    const std::int64_t bytes = p.tokens * p.cols * 2;
    const bool may = p.x_stride >= p.cols;  // TMA wants rows that do not overlap
    return may && !long_steps && (turns == 2 || (turns == 1 && bytes >= 48'000'000 && bytes <= 128'000'000));
  }
  int turning() const { return long_steps && last > 0 ? turners / cluster() * cluster() : 0; }
  bool turns_last(const TallGradientProblem& p) const {
    return turning() > 0 && p.x_stride >= p.cols && (turns == 2 || p.tokens * p.cols * 2 >= 48'000'000);
  }
  int cluster() const { return pairs > 0 ? pairs : split; }  // thread blocks
  int clusters() const { return clusters_at_once(sms < kMostClusters ? sms : kMostClusters, cluster()); }
};

std::string unsupported(const TallGradientProblem& problem);
bool valid(const TallGradientProblem& problem, const TallGradientConfig& config);
// Of the weight alone, as what is prepared follows it.
TallGradientConfig configure(const TallGradientProblem& problem, int sms, int shared_bytes);

// Where things are in a prepared buffer, in words: tiles by falling cost (row tile, first stored column, how
// many: none behind the last tile; TilePart), the list (strip_walk.h) of which cluster works on which, and
// whether clusters have no tiles, so that they may turn the last tokens of X.
struct TallGradientPlan {
  int most;        // tiles, and parts of tiles
  bool has_parts;  // there may be more tiles than clusters
  std::int64_t items_at, turns_last_at, words;
  TallPairs pairs;
  TallGradientPlan(const TallGradientProblem& problem, const TallGradientConfig& config);
  StripLists lists(const TallGradientConfig& config) const { return {most, 1, config.clusters()}; }
};

std::int64_t workspace(const TallGradientProblem& problem, const TallGradientConfig& config);

cudaError_t prepare(const TallGradientProblem& problem, const TallGradientConfig& config,
                    const std::int32_t* crow, const std::int32_t* col, std::int32_t* words,
                    cudaStream_t stream);

struct TallGradientOperands {  // device pointers, 16-byte aligned
  const void *dy = nullptr, *x = nullptr;
  const std::int32_t* col = nullptr;
  void* dvalues = nullptr;
  const std::int32_t* plan = nullptr;
  void* workspace = nullptr;
};

// Queues a kernel, with X by token two.
cudaError_t launch(const TallGradientProblem& problem, const TallGradientConfig& config,
                   const TallGradientOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
