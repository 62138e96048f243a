// The sweep of SparseGPT, and least squares on a mask.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "core/message.h"
#include "prune/check.h"
#include "prune/dense.h"
#include "prune/reconstruct.h"
#include "prune/units.h"

namespace rarefy {

namespace prune {

Status check_problem(std::string_view op, const Reconstruction& p, const double* matrix) {
  const MatrixView view{p.weight, DType::f64, p.rows, p.cols, p.cols};
  const Result<std::int64_t> units = check(op, {view}, p.units);
  if (!units.ok()) return units.status();
  if (p.remove < 0 || p.remove > *units) {
    return invalid(op, cat("remove must be in [0, ", *units, "], the number of units"), cat(p.remove));
  }
  if (p.rows > 0 && p.cols > 0 && (matrix == nullptr || p.mask == nullptr)) {
    return invalid(op, "mask and matrices must point to their elements", "a null pointer");
  }
  return {};
}

namespace {

// The panels of a sweep.
class Sweep {
 public:
  Sweep(const Reconstruction& problem, const double* factor, std::int64_t panel, std::int64_t levels,
        const Executor& executor)
      : p_(problem),
        u_(factor),
        executor_(executor),
        levels_(levels),
        view_({.matrix = {problem.weight, DType::f64, problem.rows, problem.cols, problem.cols}},
              problem.units),
        panel_(std::min(problem.cols, ceil_div(panel, view_.unit_cols()) * view_.unit_cols())),
        whole_groups_(view_.groups() && problem.remove == view_.rows() * view_.cols()) {}

  Status run(bool fixed) {
    if (levels_ > 0) find_grids();
    const std::int64_t all = view_.rows() * view_.cols();
    std::int64_t seen = 0, removed = 0;
    for (std::int64_t begin = 0; begin < p_.cols; begin += panel_) {
      const std::int64_t end = std::min(begin + panel_, p_.cols);
      if (!fixed) {
        const std::int64_t across = ceil_div(end - begin, view_.unit_cols());
        seen += view_.rows() * across;
        // As many by now as the part of the units that was seen: the last panel makes the count exact.
        const auto due = static_cast<std::int64_t>(std::nearbyint(
            static_cast<double>(p_.remove) * (static_cast<double>(seen) / static_cast<double>(all))));
        const std::int64_t here = std::clamp<std::int64_t>(due - removed, 0, view_.rows() * across);
        removed += here;
        if (Status status = choose(begin, end, across, here); !status.ok()) return status;
      }
      pass_on(begin, end, fixed);
    }
    return {};
  }

 private:
  // What a row is rounded to: multiples of `step`; the weight in column `at` to ± all levels of them.
  struct Grid {
    double step = 1;
    std::int64_t at = -1;
    double sign = 1;
  };

  double rounded(const Grid& grid, double w, std::int64_t col) const {
    const auto most = static_cast<double>(levels_);
    return grid.step *
           (col == grid.at ? grid.sign * most : std::clamp(std::nearbyint(w / grid.step), -most, most));
  }

  void find_grids() {
    grids_.assign(static_cast<std::size_t>(p_.rows), {});
    for (std::int64_t r = 0; r < p_.rows; ++r) {
      const double* w = p_.weight + r * p_.cols;
      double most = 0;
      for (std::int64_t c = 0; c < p_.cols; ++c) {
        if (!bit(mask_row(r), c) || !(std::abs(w[c]) > most)) continue;
        most = std::abs(w[c]);
        grids_[static_cast<std::size_t>(r)] = {most / static_cast<double>(levels_), c, w[c] < 0 ? -1.0 : 1.0};
      }
    }
  }

  std::uint8_t* mask_row(std::int64_t row) const { return p_.mask + row * mask_row_bytes(p_.cols); }

  // The error of taking `n` elements of a row out in one go: ‖w U⁻¹‖² on the diagonal block of U.
  double error(const double* w, std::int64_t col, std::int64_t n, double* z) const {
    double sum = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      double value = w[j];
      for (std::int64_t i = 0; i < j; ++i) value -= z[i] * u_[(col + i) * p_.cols + col + j];
      z[j] = value / u_[(col + j) * p_.cols + col + j];
      sum += z[j] * z[j];
    }
    return sum;
  }

  // What each unit of a panel costs, and the mask of the panel.
  Status choose(std::int64_t begin, std::int64_t end, std::int64_t across, std::int64_t remove) {
    const std::int64_t size = view_.unit_cols();
    std::vector<double> costs(static_cast<std::size_t>(view_.rows() * across));
    executor_.parallel_for(view_.rows(), [&](std::int64_t i) {
      std::vector<double> z(static_cast<std::size_t>(size));
      const std::int64_t last = std::min((i + 1) * view_.unit_rows(), p_.rows);
      for (std::int64_t j = 0; j < across; ++j) {
        const std::int64_t col = begin + j * size, n = std::min(size, end - col);
        double& cost = costs[static_cast<std::size_t>(i * across + j)];
        for (std::int64_t r = i * view_.unit_rows(); r < last; ++r) {
          const double* w = p_.weight + r * p_.cols + col;
          cost += view_.groups() ? loss(w, col, n, z.data()) : error(w, col, n, z.data());
        }
      }
    });
    std::vector<std::uint8_t> stays(costs.size(), 1);
    if (!whole_groups_) {
      const std::int64_t bytes = mask_row_bytes(across);
      std::vector<std::uint8_t> bits(static_cast<std::size_t>(view_.rows() * bytes));
      const Result<PruneCount> chosen =
          prune_mask({.matrix = {costs.data(), DType::f64, view_.rows(), across, across}}, {}, remove,
                     bits.data(), executor_);
      if (!chosen.ok()) return chosen.status();
      unpack_mask(bits.data(), view_.rows(), across, stays.data(), executor_);
    } else {
      std::fill(stays.begin(), stays.end(), std::uint8_t{0});
    }
    // For groups a zero means that the group will be thinned, when the sweep gets there.
    thinned_.assign(stays.size(), 0);
    across_ = across;
    for (std::int64_t r = 0; r < p_.rows; ++r) {
      for (std::int64_t c = begin; c < end; ++c) {
        const auto unit = static_cast<std::size_t>(r / view_.unit_rows() * across + (c - begin) / size);
        const bool stay = view_.groups() || stays[unit] != 0;
        thinned_[unit] = view_.groups() ? 1 - stays[unit] : 0;
        set(mask_row(r), c, stay);
      }
    }
    return {};
  }

  static void set(std::uint8_t* row, std::int64_t col, bool stay) {
    const auto at = static_cast<std::uint8_t>(1U << (col % 8));
    row[col / 8] = static_cast<std::uint8_t>(stay ? row[col / 8] | at : row[col / 8] & ~at);
  }

  // What a group loses, its elements taken one by one.
  double loss(const double* w, std::int64_t col, std::int64_t n, double* z) const {
    for (std::int64_t c = 0; c < n; ++c) z[c] = single(w[c], col + c);
    const std::int64_t lost = std::max<std::int64_t>(0, n - p_.units.keep);
    std::sort(z, z + n);
    double sum = 0;
    for (std::int64_t c = 0; c < lost; ++c) sum += z[c];
    return sum;
  }
  double single(double w, std::int64_t col) const {
    const double d = u_[col * p_.cols + col];
    return w * w / (d * d);
  }

  // Takes a panel's elements out, column by column, and passes errors on to the right. Eight rows share a
  // read of U.
  void pass_on(std::int64_t begin, std::int64_t end, bool fixed) {
    const std::int64_t k = p_.cols, width = end - begin;
    const DenseKernels& dense = dense_kernels();
    constexpr std::int64_t kRows = 16;
    executor_.parallel_for(ceil_div(p_.rows, kRows), [&](std::int64_t task) {
      std::vector<double> errors(static_cast<std::size_t>(width));
      std::vector<std::pair<double, std::int64_t>> order;
      for (std::int64_t r = task * kRows; r < std::min(p_.rows, (task + 1) * kRows); ++r) {
        double* w = p_.weight + r * k;
        const Grid grid = levels_ > 0 ? grids_[static_cast<std::size_t>(r)] : Grid{};
        for (std::int64_t c = begin; c < end; ++c) {
          if (!fixed && p_.units.of > 0 && c % p_.units.of == 0) thin(r, c, begin, end, order);
          double& e = errors[static_cast<std::size_t>(c - begin)];
          const double stays = !bit(mask_row(r), c) ? 0.0 : levels_ > 0 ? rounded(grid, w[c], c) : w[c];
          e = (w[c] - stays) / u_[c * k + c];
          if (e != 0) dense.minus(w + c + 1, e, u_ + c * k + c + 1, end - c - 1);
          w[c] = stays;
        }
        std::int64_t c = begin;
        for (; c + 8 <= end && end < k; c += 8) {
          dense.minus8(w + end, errors.data() + (c - begin), u_ + c * k + end, k, k - end);
        }
        for (; c < end && end < k; ++c)
          dense.minus(w + end, errors[static_cast<std::size_t>(c - begin)], u_ + c * k + end, k - end);
      }
    });
  }

  // Of the group that begins at c all but `keep` leave, as they are by now.
  void thin(std::int64_t row, std::int64_t c, std::int64_t begin, std::int64_t end,
            std::vector<std::pair<double, std::int64_t>>& order) {
    if (view_.groups() && thinned_[static_cast<std::size_t>(row * across_ + (c - begin) / p_.units.of)] == 0)
      return;
    const std::int64_t n = std::min(p_.units.of, end - c);
    order.clear();
    for (std::int64_t i = c; i < c + n; ++i) {
      if (bit(mask_row(row), i)) order.emplace_back(single(p_.weight[row * p_.cols + i], i), i);
    }
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i + p_.units.keep < static_cast<std::int64_t>(order.size()); ++i) {
      set(mask_row(row), order[static_cast<std::size_t>(i)].second, false);
    }
  }

  const Reconstruction& p_;
  const double* u_;
  const Executor& executor_;
  std::int64_t levels_;
  std::vector<Grid> grids_;
  Units<double> view_;
  std::int64_t panel_;
  bool whole_groups_;
  std::vector<std::uint8_t> thinned_;
  std::int64_t across_ = 0;
};

// Rows of one mask: their weights from the smaller of two systems. False if it is singular.
bool solve_rows(const Reconstruction& p, const double* hessian, const double* inverse,
                const std::vector<std::int64_t>& rows) {
  const DenseKernels& dense = dense_kernels();
  std::vector<std::int64_t> stays, leaves;
  for (std::int64_t c = 0; c < p.cols; ++c) {
    (bit(p.mask + rows[0] * mask_row_bytes(p.cols), c) ? stays : leaves).push_back(c);
  }
  if (leaves.empty()) return true;
  const bool by_stays = stays.size() <= leaves.size();
  const std::vector<std::int64_t>& chosen = by_stays ? stays : leaves;
  const double* matrix = by_stays ? hessian : inverse;
  const auto n = static_cast<std::int64_t>(chosen.size());
  std::vector<double> a(static_cast<std::size_t>(n * n)), x(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j <= i; ++j) a[i * n + j] = matrix[chosen[i] * p.cols + chosen[j]];
  }
  if (!cholesky(dense, a.data(), n, n)) return false;
  std::vector<double> all(static_cast<std::size_t>(p.cols));
  for (const std::int64_t r : rows) {
    double* w = p.weight + r * p.cols;
    if (by_stays) {
      // H_SS x = (H w)_S
      for (std::int64_t i = 0; i < n; ++i) x[i] = dense.dot(hessian + stays[i] * p.cols, w, p.cols);
    } else {
      for (std::int64_t i = 0; i < n; ++i) x[i] = w[leaves[i]];
    }
    solve_lower(dense, a.data(), n, n, x.data());
    solve_upper(dense, a.data(), n, n, x.data());
    if (by_stays) {
      std::fill_n(w, p.cols, 0.0);
      for (std::int64_t i = 0; i < n; ++i) w[stays[i]] = x[i];
    } else {
      // w − H⁻¹_:D (H⁻¹_DD)⁻¹ w_D; the inverse is symmetric
      for (std::int64_t i = 0; i < n; ++i) dense.minus(w, x[i], inverse + leaves[i] * p.cols, p.cols);
      for (const std::int64_t c : leaves) w[c] = 0;
    }
  }
  return true;
}

}  // namespace
}  // namespace prune

Status sparse_gpt(const Reconstruction& problem, const double* factor, std::int64_t panel, bool fixed,
                  std::int64_t levels, const Executor& executor) {
  constexpr std::string_view op = "sparse_gpt";
  if (Status status = prune::check_problem(op, problem, factor); !status.ok()) return status;
  if (panel < 1) return invalid(op, "panel must be at least 1", cat(panel));
  if (levels < 0 || (levels > 0 && !fixed)) {
    return invalid(op, "levels must not be negative, and need a mask that is fixed", cat(levels));
  }
  if (problem.units.each_row) return invalid(op, "units must be counted over the whole layer", "in each row");
  for (std::int64_t c = 0; c < problem.cols; ++c) {
    const double d = factor[c * problem.cols + c];
    if (!(d > 0) || !std::isfinite(d)) {
      return invalid(op, "factor must have a positive diagonal", cat("factor[", c, ", ", c, "]=", d));
    }
  }
  if (problem.rows == 0 || problem.cols == 0) return {};
  try {
    if (!fixed) {
      std::memset(problem.mask, 0, static_cast<std::size_t>(problem.rows * mask_row_bytes(problem.cols)));
    }
    return prune::Sweep(problem, factor, panel, levels, executor).run(fixed);
  } catch (const std::bad_alloc&) {
    return prune::no_memory(op);
  }
}

Status least_squares(const Reconstruction& problem, const double* hessian, const double* inverse,
                     const Executor& executor) {
  constexpr std::string_view op = "least_squares";
  if (Status status = prune::check_problem(op, problem, hessian); !status.ok()) return status;
  if (problem.rows == 0 || problem.cols == 0) return {};
  if (inverse == nullptr) return invalid(op, "inverse must point to its elements", "a null pointer");
  try {
    const auto bytes = static_cast<std::size_t>(mask_row_bytes(problem.cols));
    std::map<std::string, std::vector<std::int64_t>> by_mask;
    for (std::int64_t r = 0; r < problem.rows; ++r) {
      const auto* row = reinterpret_cast<const char*>(problem.mask) + static_cast<std::size_t>(r) * bytes;
      by_mask[std::string(row, bytes)].push_back(r);
    }
    std::vector<const std::vector<std::int64_t>*> tasks;
    tasks.reserve(by_mask.size());
    for (const auto& [mask, rows] : by_mask) tasks.push_back(&rows);
    std::atomic<bool> singular{false}, memory{false};
    executor.parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t task) {
      try {
        if (!prune::solve_rows(problem, hessian, inverse, *tasks[static_cast<std::size_t>(task)]))
          singular = true;
      } catch (const std::bad_alloc&) {
        memory = true;
      }
    });
    if (memory) return prune::no_memory(op);
    if (singular) return invalid(op, "hessian must be positive definite", "a singular one");
    return {};
  } catch (const std::bad_alloc&) {
    return prune::no_memory(op);
  }
}

}  // namespace rarefy
