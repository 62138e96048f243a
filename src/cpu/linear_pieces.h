// What runs linear and grad_input of blocks of few rows on pieces of rows (pieces.h, linear_pieces.cc).
#pragma once

#include "core/registry.h"
#include "cpu/kernels.h"

namespace rarefy::cpu {

struct PiecesBlocking {
  std::int64_t vectors = 1;   // of a panel; the last one may be narrower
  std::int64_t columns = 1;   // reduction blocks of a tile of X, which stays in L1
  std::int64_t rows = 1;      // output blocks of a range, whose sums stay in L2
  std::int64_t splits = 1;    // tasks over the ranges of a panel
  std::int64_t by_piece = 0;  // 16-bit values become floats: 1: a tile's pieces at a time, 0: all in the call
  static constexpr std::string_view kFields[] = {"vectors", "columns", "rows", "splits", "by_piece"};
};
Reason supports_pieces(const Kernels& kernels, const Problem& problem, const Machine& machine);
Config configure_pieces(const Kernels& kernels, const Problem& problem, const Machine& machine);
std::vector<Config> pieces_candidates(const Kernels& kernels, const Problem& problem, const Machine& machine);
std::int64_t pieces_workspace(const Kernels& kernels, const Problem& problem, const Config& config);
Status run_pieces(const Kernels& kernels, const Call& call);

// Where the pieces lie: of the pattern, the tiles and the ranges alone.
std::int64_t pieces_variant(const Problem& problem, const Config& config);
std::int64_t pieces_prepared_size(const Problem& problem, const Config& config);
Status prepare_pieces(const Kernels& kernels, const Call& call, void* to);

}  // namespace rarefy::cpu
