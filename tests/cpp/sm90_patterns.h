// What the tests of the Hopper kernels' host side share: the GPU that they plan for, and random patterns.
#pragma once

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "cuda/sm90/block_gradient.h"

namespace rarefy::sm90 {

inline constexpr Machine kMachine{132, 227 * 1024};

// W (rows, cols) of r × c blocks; matrices by token, in rows as close as TMA takes them.
template <class P>
P product_problem(bool transposed, std::int64_t tokens, std::int64_t rows, std::int64_t cols, std::int64_t r,
                  std::int64_t c, std::int64_t blocks) {
  P p;
  p.transposed = transposed;
  p.tokens = tokens;
  p.rows = rows;
  p.cols = cols;
  p.block_rows = r;
  p.block_cols = c;
  p.blocks = blocks;
  p.x_stride = (p.in_features() + 7) / 8 * 8;
  p.y_stride = (p.out_features() + 7) / 8 * 8;
  return p;
}

struct Pattern {
  std::vector<std::int32_t> crow{0}, col, ccol{0}, row, perm;
};

// Block row i stores each column with probability density · (1 + i % 3) / 2; every `period`-th row alone.
inline Pattern random_pattern(std::int64_t rows, std::int64_t cols, double density, unsigned seed,
                              int period = 1) {
  std::mt19937 random(seed);
  Pattern p;
  std::vector<std::vector<std::pair<int, int>>> columns(static_cast<std::size_t>(cols));
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols && i % period == 0; ++j) {
      if (std::uniform_real_distribution<>(0, 1)(random) >= density * (1 + i % 3) / 2) continue;
      columns[static_cast<std::size_t>(j)].emplace_back(i, static_cast<int>(p.col.size()));
      p.col.push_back(j);
    }
    p.crow.push_back(static_cast<std::int32_t>(p.col.size()));
  }
  for (const auto& column : columns) {
    for (const auto& [i, entry] : column) {
      p.row.push_back(i);
      p.perm.push_back(entry);
    }
    p.ccol.push_back(static_cast<std::int32_t>(p.row.size()));
  }
  return p;
}

}  // namespace rarefy::sm90
