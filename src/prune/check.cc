// Checks of scores and units.
#include "prune/check.h"

#include <cmath>

#include "core/arguments.h"
#include "core/message.h"
#include "prune/units.h"

namespace rarefy {

namespace prune {

Status no_memory(std::string_view op) {
  return error(StatusCode::out_of_memory, op, "working memory must be there", "an allocation failure");
}

Status check_units(std::string_view op, const MatrixView& matrix, const PruneUnits& units) {
  const auto [r, c] = units.block;
  if (r < 1 || c < 1) return invalid(op, "block must be at least 1x1", cat(r, 'x', c));
  if (units.of < 0 || units.keep < 0 || units.keep > units.of) {
    return invalid(op, "N:M must have 0 <= N <= M", cat(units.keep, ':', units.of));
  }
  const bool whole = c >= matrix.cols;
  if (units.of > 0 && (r > 1 || c > 1) && !whole && c % units.of != 0) {
    return invalid(op, cat("N:M inside blocks needs block columns that are a multiple of M=", units.of),
                   cat(c));
  }
  return {};
}

Result<std::int64_t> check(std::string_view op, const PruneScores& scores, const PruneUnits& units) {
  const MatrixView& m = scores.matrix;
  if (Status status = check_matrix(op, "scores", m, Device::cpu); !status.ok()) return status;
  if (m.dtype == DType::i8) return mismatch(op, "scores must be f64, f32, bf16 or f16", name(m.dtype));
  if (Status status = check_units(op, m, units); !status.ok()) return status;
  if (scores.column_scale != nullptr) {
    if (scores.importance == Importance::value) {
      return invalid(op, "a column scale needs magnitudes or squares", "values");
    }
    for (std::int64_t c = 0; c < m.cols; ++c) {
      if (!(scores.column_scale[c] >= 0)) {
        return invalid(op, "column_scale must not be negative or NaN",
                       cat("column_scale[", c, "]=", scores.column_scale[c]));
      }
    }
  }
  return count_units(m, units);
}

}  // namespace prune

Result<std::int64_t> count_units(const MatrixView& matrix, const PruneUnits& units) {
  if (Status status = prune::check_units("count_units", matrix, units); !status.ok()) return status;
  const prune::Units<float> view({.matrix = matrix}, units);
  return units.each_row ? view.cols() : view.rows() * view.cols();
}

}  // namespace rarefy
