// Optimal brain surgeon for the blocks of one block row after the other.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <compare>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "core/message.h"
#include "prune/check.h"
#include "prune/dense.h"
#include "prune/reconstruct.h"
#include "prune/units.h"

namespace rarefy {

namespace prune {
namespace {

// One block row: its weights and a copy of H⁻¹, both of the columns that are still there.
class Surgeon {
 public:
  Surgeon(const Reconstruction& problem, std::int64_t block_row, const double* inverse)
      : p_(problem),
        first_(block_row * problem.units.block.rows),
        rows_(std::min(problem.units.block.rows, problem.rows - first_)),
        c_(problem.units.block.cols),
        n_(problem.cols),
        h_(inverse, inverse + problem.cols * problem.cols),
        w_(problem.weight + first_ * problem.cols, problem.weight + (first_ + rows_) * problem.cols),
        columns_(static_cast<std::size_t>(problem.cols)) {
    std::iota(columns_.begin(), columns_.end(), std::int64_t{0});
  }

  bool run(std::int64_t remove, std::int64_t steps) {
    std::int64_t done = 0;
    for (std::int64_t step = 0; step < steps; ++step) {
      const std::int64_t count = remove * (step + 1) / steps - done;
      if (count == 0) continue;
      done += count;
      if (!take_out(columns_of(cheapest(count)))) return false;
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      double* to = p_.weight + (first_ + r) * p_.cols;
      std::uint8_t* mask = p_.mask + (first_ + r) * mask_row_bytes(p_.cols);
      std::fill_n(to, p_.cols, 0.0);
      std::memset(mask, 0, static_cast<std::size_t>(mask_row_bytes(p_.cols)));
      for (std::int64_t i = 0; i < n_; ++i) {
        const std::int64_t col = columns_[static_cast<std::size_t>(i)];
        to[col] = w_[static_cast<std::size_t>(r * n_ + i)];
        mask[col / 8] |= static_cast<std::uint8_t>(1U << (col % 8));
      }
    }
    return true;
  }

  // Until nothing is left: what each block cost when it left, never less than those that left before it.
  bool order(std::int64_t steps, double* costs) {
    const std::int64_t all = ceil_div(n_, c_);
    double last = 0;
    for (std::int64_t step = 0, done = 0; step < steps; ++step) {
      const std::int64_t count = all * (step + 1) / steps - done;
      if (count == 0) continue;
      done += count;
      const std::vector<Block> gone = cheapest(count);
      for (const Block& block : gone) {
        const double above = std::nextafter(last, std::numeric_limits<double>::infinity());
        costs[columns_[static_cast<std::size_t>(block.begin)] / c_] = last = std::max(block.cost, above);
      }
      if (done < all && !take_out(columns_of(gone))) return false;
    }
    return true;
  }

 private:
  struct Block {
    double cost;
    std::int64_t begin;                              // its first position among the columns that are left
    auto operator<=>(const Block&) const = default;  // NOLINT(modernize-use-nullptr)
  };

  // Blocks are whole here: the end of the one that begins at this position.
  std::int64_t end_of(std::int64_t begin) const {
    const std::int64_t block = columns_[static_cast<std::size_t>(begin)] / c_;
    std::int64_t end = begin + 1;
    while (end < n_ && columns_[static_cast<std::size_t>(end)] / c_ == block) ++end;
    return end;
  }

  // The `count` blocks whose leaving costs least, tr(B (H⁻¹_BB)⁻¹ Bᵀ), the cheapest first.
  std::vector<Block> cheapest(std::int64_t count) {
    std::vector<Block> blocks;
    std::vector<double> corner(static_cast<std::size_t>(c_ * c_)), x(static_cast<std::size_t>(c_));
    for (std::int64_t begin = 0, end = 0; begin < n_; begin = end) {
      end = end_of(begin);
      const std::int64_t m = end - begin;
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j <= i; ++j) corner[i * m + j] = h(begin + i, begin + j);
      }
      double cost = 0;
      if (cholesky(dense_, corner.data(), m, m)) {
        for (std::int64_t r = 0; r < rows_; ++r) {
          std::copy_n(w_.data() + r * n_ + begin, m, x.data());
          solve_lower(dense_, corner.data(), m, m, x.data());
          cost += dense_.dot(x.data(), x.data(), m);
        }
      }
      blocks.push_back({cost, begin});
    }
    std::partial_sort(blocks.begin(), blocks.begin() + count, blocks.end());
    blocks.resize(static_cast<std::size_t>(count));
    return blocks;
  }

  std::vector<std::int64_t> columns_of(const std::vector<Block>& blocks) const {
    std::vector<std::int64_t> columns;
    for (const Block& block : blocks) {
      for (std::int64_t i = block.begin; i < end_of(block.begin); ++i) columns.push_back(i);
    }
    std::sort(columns.begin(), columns.end());
    return columns;
  }

  double h(std::int64_t i, std::int64_t j) const { return h_[static_cast<std::size_t>(i * n_ + j)]; }

  // With D the columns that leave and A = H⁻¹_DD = L Lᵀ, Z = L⁻¹ H⁻¹_D: of the rest: w −= (L⁻¹ w_D)ᵀ Z and
  // H⁻¹ −= Zᵀ Z. What leaves is dropped from both.
  bool take_out(const std::vector<std::int64_t>& gone) {
    const auto m = static_cast<std::int64_t>(gone.size());
    std::vector<std::int64_t> rest;
    for (std::int64_t i = 0, g = 0; i < n_; ++i) {
      if (g < m && gone[static_cast<std::size_t>(g)] == i) {
        ++g;
      } else {
        rest.push_back(i);
      }
    }
    const auto left = static_cast<std::int64_t>(rest.size());
    std::vector<double> a(static_cast<std::size_t>(m * m));
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j <= i; ++j) a[i * m + j] = h(gone[i], gone[j]);
    }
    if (!cholesky(dense_, a.data(), m, m)) return false;
    // Z (m × left): forward substitution on whole rows.
    std::vector<double> z(static_cast<std::size_t>(m * left)), y(static_cast<std::size_t>(rows_ * m));
    for (std::int64_t i = 0; i < m; ++i) {
      double* row = z.data() + i * left;
      const double* from = h_.data() + gone[i] * n_;
      for (std::int64_t j = 0; j < left; ++j) row[j] = from[rest[j]];
      std::int64_t p = 0;
      for (; p + 8 <= i; p += 8) dense_.minus8(row, a.data() + i * m + p, z.data() + p * left, left, left);
      for (; p < i; ++p) dense_.minus(row, a[i * m + p], z.data() + p * left, left);
      const double scale = 1 / a[i * m + i];
      for (std::int64_t j = 0; j < left; ++j) row[j] *= scale;
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      double* mine = y.data() + r * m;
      for (std::int64_t i = 0; i < m; ++i) mine[i] = w_[static_cast<std::size_t>(r * n_ + gone[i])];
      solve_lower(dense_, a.data(), m, m, mine);
    }
    // Drop, then subtract: the upper triangle of H⁻¹ is worked on and mirrored.
    for (std::int64_t i = 0; i < left; ++i) {
      const double* from = h_.data() + rest[i] * n_;
      double* to = h_.data() + i * left;  // never past what is still to be read
      for (std::int64_t j = 0; j < left; ++j) to[j] = from[rest[j]];
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t j = 0; j < left; ++j)
        w_[static_cast<std::size_t>(r * left + j)] = w_[static_cast<std::size_t>(r * n_ + rest[j])];
    }
    std::vector<double> factors(static_cast<std::size_t>(m));
    for (std::int64_t i = 0; i < left; ++i) {
      for (std::int64_t p = 0; p < m; ++p) factors[p] = z[static_cast<std::size_t>(p * left + i)];
      subtract(h_.data() + i * left + i, factors.data(), z.data() + i, m, left, left - i);
    }
    for (std::int64_t i = 0; i < left; ++i) {
      for (std::int64_t j = i + 1; j < left; ++j)
        h_[static_cast<std::size_t>(j * left + i)] = h_[static_cast<std::size_t>(i * left + j)];
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      subtract(w_.data() + r * left, y.data() + r * m, z.data(), m, left, left);
    }
    for (std::int64_t i = 0; i < left; ++i)
      columns_[static_cast<std::size_t>(i)] = columns_[static_cast<std::size_t>(rest[i])];
    n_ = left;
    return true;
  }

  // y −= Σ_p a[p] x[p], rows of x `stride` apart.
  void subtract(double* y, const double* a, const double* x, std::int64_t m, std::int64_t stride,
                std::int64_t n) const {
    std::int64_t p = 0;
    for (; p + 8 <= m; p += 8) dense_.minus8(y, a + p, x + p * stride, stride, n);
    for (; p < m; ++p) dense_.minus(y, a[p], x + p * stride, n);
  }

  const Reconstruction& p_;
  const DenseKernels& dense_ = dense_kernels();
  std::int64_t first_, rows_, c_, n_;
  std::vector<double> h_, w_;
  std::vector<std::int64_t> columns_;
};

// `work` for each block row, on all threads.
template <typename Work>
Status each_block_row(std::string_view op, const Reconstruction& problem, const double* inverse,
                      std::int64_t steps, const Executor& executor, const Work& work) {
  if (Status status = check_problem(op, problem, inverse); !status.ok()) return status;
  if (steps < 1) return invalid(op, "steps must be at least 1", cat(steps));
  if (problem.rows == 0 || problem.cols == 0) return {};
  std::atomic<bool> singular{false}, memory{false};
  executor.parallel_for(ceil_div(problem.rows, problem.units.block.rows), [&](std::int64_t row) {
    try {
      Surgeon surgeon(problem, row, inverse);
      if (!work(surgeon, row)) singular = true;
    } catch (const std::bad_alloc&) {
      memory = true;
    }
  });
  if (memory) return no_memory(op);
  if (singular) return invalid(op, "inverse must be positive definite", "a singular one");
  return {};
}

}  // namespace
}  // namespace prune

Status block_obs(const Reconstruction& problem, const double* inverse, std::int64_t steps,
                 const Executor& executor) {
  constexpr std::string_view op = "block_obs";
  if (!problem.units.each_row || problem.units.of > 0) {
    return invalid(op, "units must be blocks counted in each row, without N:M", "others");
  }
  return prune::each_block_row(
      op, problem, inverse, steps, executor,
      [&](prune::Surgeon& surgeon, std::int64_t) { return surgeon.run(problem.remove, steps); });
}

Status block_obs_costs(const Reconstruction& problem, const double* inverse, std::int64_t steps,
                       double* costs, const Executor& executor) {
  constexpr std::string_view op = "block_obs_costs";
  if (problem.units.of > 0) return invalid(op, "units must be blocks, without N:M", "others");
  if (costs == nullptr && problem.rows > 0 && problem.cols > 0) {
    return invalid(op, "costs must point to its elements", "a null pointer");
  }
  const std::int64_t across = ceil_div(problem.cols, problem.units.block.cols);
  return prune::each_block_row(
      op, problem, inverse, steps, executor,
      [&](prune::Surgeon& surgeon, std::int64_t row) { return surgeon.order(steps, costs + row * across); });
}

}  // namespace rarefy
