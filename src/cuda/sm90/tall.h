// The tall kernel, host side: linear for blocks of one column and a multiple of 64 rows, whose canonical
// values are read in place; what other blocks store becomes such a weight first (tall_columns.h). X is read
// by feature; one by token is transposed first, into workspace, and one whose lines begin anywhere in those
// of memory is copied into lines that do not. What the kernel walks follows from the pattern alone and is
// made on the device (tall_plan.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/sm90/product.h"
#include "cuda/sm90/strip_walk.h"
#include "cuda/sm90/tall_tile.h"
#include "cuda/sm90/transpose.h"

namespace rarefy::sm90 {

struct TallProblem {
  DType dtype = DType::bf16;
  std::int64_t tokens = 0, rows = 0, cols = 0;  // W is (rows, cols)
  std::int64_t block_rows = 0, blocks = 0;
  Layout x_layout = Layout::by_feature, y_layout = Layout::by_token;
  std::int64_t x_stride = 0, y_stride = 0;                   // elements between features, or between tokens
  rarefy::Activation activation = rarefy::Activation::none;  // device/ has another
  bool y_padded = false;  // rows of Y may be written up to a multiple of 16 bytes

  // Into workspace. By feature: where pieces of 512 bytes do not begin where lines of memory do, each of them
  // asks for one line more, .05 µs a MB that is gathered (1000×2560→10240 at .5: 64 µs, copied first 57).
  bool copies_x() const {
    if (x_layout == Layout::by_token) return true;
    const std::int64_t tile_rows = block_rows % 128 == 0 ? 128 : 64;
    const std::int64_t gathered = blocks * (block_rows / tile_rows) * tokens * 2;  // bytes
    return x_stride % 64 != 0 &&
           static_cast<double>(gathered) * 5e-8 > transpose_microseconds(tokens * cols * 2);
  }
};

// What is prepared are groups of `rows` features, 128 or 64; a tile has all of one or 64 of them. X that is
// copied (by token: transposed) is so, and multiplied, `chunk` tokens at a time. Where tiles are few, `split`
// thread blocks have a part of a tile's columns each.
struct TallConfig {
  int rows = 128;
  int slots = 4;
  std::int64_t chunk = 1 << 20;  // a multiple of 512
  int split = 1;
  TallTile tile;

  bool lists() const { return std::ranges::count(kListedTallTiles, tile) > 0; }
  // A thread block for each tile, or for a part of one.
  bool single() const { return split > 1 || tile.rows < rows || !lists(); }
  bool is_compiled() const { return std::ranges::count(tall_tiles(single()), tile) > 0; }
  int shared_bytes() const { return 1024 + slots * tile.slot_bytes() + tile.warpgroups() * 2 * 8192; }
  // Elements between features of a copied chunk, and bytes of one.
  std::int64_t chunk_stride(std::int64_t all) const { return turned_stride(all < chunk ? all : chunk); }
  std::int64_t chunk_bytes(const TallProblem& p) const { return p.cols * chunk_stride(p.tokens) * 2; }
  // Two chunks: one is transposed while the one before is multiplied.
  std::int64_t workspace(const TallProblem& p) const {
    return p.copies_x() ? chunk_bytes(p) * (p.tokens > chunk ? 2 : 1) : 0;
  }
  std::string text() const {
    const auto n = [](std::int64_t x) { return std::to_string(x); };
    return "rows=" + n(rows) + " slots=" + n(slots) + " chunk=" + n(chunk) + " split=" + n(split) +
           " tile_rows=" + n(tile.rows) + " tokens=" + n(tile.tokens) + " columns=" + n(tile.columns);
  }
};

std::string unsupported(const TallProblem& problem);
// `rows` are of the weight alone, as what is prepared follows them: tiles of 128 rows ask for fewer bytes.
TallConfig configure(const TallProblem& problem, int sms, int shared_bytes);
// The same with the tile for so many tokens: what is prepared does not follow it.
TallConfig with_tile(const TallProblem& problem, const TallConfig& config, int sms,
                     int shared_bytes = 227 * 1024);
double predicted_microseconds(const TallProblem& problem, const TallConfig& config, int sms);

// Where things are in a prepared buffer, in words: groups of rows, four words each (the group, its first
// stored column and the one behind its last), by falling cost; and lists (strip_walk.h) of tiles of them.
struct TallPlan {
  int groups, sms;  // groups of `rows` rows; thread blocks
  std::int64_t items_at, words;
  TallPlan(const TallProblem& problem, const TallConfig& config, int thread_blocks);
  StripLists lists() const { return {groups, 1, sms}; }
};

// Queues the kernels that fill `words`; tokens, layouts and strides do not matter. crow is on the device.
cudaError_t prepare(const TallProblem& problem, const TallConfig& config, int sms, const std::int32_t* crow,
                    std::int32_t* words, cudaStream_t stream);

struct TallOperands {  // device pointers, 16-byte aligned
  const void* x = nullptr;
  const void* values = nullptr;
  const std::int32_t* col = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  const std::int32_t* plan = nullptr;
  void* workspace = nullptr;  // config.workspace(problem) bytes
  StatedProduct stated;
};

// Queues one kernel, or two for each chunk.
cudaError_t launch(const TallProblem& problem, const TallConfig& config, int sms,
                   const TallOperands& operands, cudaStream_t stream);

}  // namespace rarefy::sm90
