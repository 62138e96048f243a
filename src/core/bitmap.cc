// Bitmaps: their plan, made and checked once, CSR's indices of them and back, and linear's checks.
#include "rarefy/bitmap.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "core/arguments.h"
#include "core/checked.h"
#include "core/message.h"
#include "core/products.h"

namespace rarefy {

namespace {

// How a plan lies in its buffer: a header, crow, bits. As in plan_layout.h.
constexpr std::int32_t kMagic = 0x52464231;  // "RFB1": bump the digit with the layout
constexpr std::int64_t kHeaderWords = 8;  // magic, rows, cols, nnz, whether of each four two are stored, 0 …

struct PlanWords {
  std::int64_t crow = kHeaderWords, bits, size;

  PlanWords(std::int64_t rows, std::int64_t cols)
      : bits((crow + rows + 1 + 1) / 2 * 2), size(bits + rows * (ceil_div(cols, 64) * 2)) {}
};

BitmapPlanView view_of(const BsrShape& shape, const std::int32_t* plan) {
  const PlanWords layout(shape.rows, shape.cols);
  const auto* bits = reinterpret_cast<const std::uint8_t*>(plan + layout.bits);
  return {shape, plan + layout.crow, bits, plan[4] != 0};
}

// Whether of each four columns two are stored, and the code of such four: where the first is, and the second.
bool two_of_four(const std::uint8_t* bits, std::int64_t bytes, std::int64_t cols) {
  if (cols % 4 != 0) return false;
  for (std::int64_t g = 0; g < cols / 4; ++g) {
    if (std::popcount(static_cast<unsigned>(bits[g / 2] >> (g % 2 * 4) & 15)) != 2) return false;
  }
  return bytes > 0;
}

std::uint8_t code_of(unsigned nibble) {
  const int first = std::countr_zero(nibble), second = std::countr_zero(nibble & (nibble - 1));
  return static_cast<std::uint8_t>(first | second << 2);
}

std::int64_t ones(const std::uint8_t* row, std::int64_t bytes) {  // whole 8 bytes
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < bytes; b += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, row + b, sizeof(word));
    count += std::popcount(word);
  }
  return count;
}

Status check_size_of(std::string_view op, std::string_view argument, std::int64_t expected, std::size_t got) {
  if (static_cast<std::int64_t>(got) == expected) return {};
  return invalid(op, cat(argument, " must have ", expected, " elements"), cat(got));
}

// The first bit past the last column of a row, as text.
Status padding_error(std::string_view op, std::int64_t row, std::int64_t cols, std::uint8_t last) {
  const auto extra = static_cast<unsigned>(last) >> (cols % 8);
  return invalid(op, cat("bits past column ", cols, " must be 0"),
                 cat("bitmap[", row, ", ", cols / 8, "] with bit ", cols % 8 + std::countr_zero(extra)));
}

}  // namespace

std::int64_t bitmap_plan_size(std::int64_t rows, std::int64_t cols) { return PlanWords(rows, cols).size; }

Result<std::int64_t> build_bitmap_plan(std::string_view op, std::int64_t rows, std::int64_t cols,
                                       std::span<const std::uint8_t> bits, std::span<std::int32_t> plan) {
  BsrShape shape{rows, cols, 1, 1, 0};
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  const std::int64_t from = mask_row_bytes(cols);
  if (Status status = check_size_of(op, "bitmap", rows * from, bits.size()); !status.ok()) return status;
  const PlanWords layout(rows, cols);
  if (Status status = check_size_of(op, "plan", layout.size, plan.size()); !status.ok()) return status;
  std::fill(plan.begin(), plan.end(), 0);
  std::int32_t* crow = plan.data() + layout.crow;
  auto* to = reinterpret_cast<std::uint8_t*>(plan.data() + layout.bits);
  const std::int64_t stride = ceil_div(cols, 64) * 8;
  std::int64_t total = 0;
  for (std::int64_t n = 0; n < rows; ++n) {
    std::uint8_t* row = to + n * stride;
    if (from > 0) std::memcpy(row, bits.data() + n * from, static_cast<std::size_t>(from));
    if (cols % 8 != 0 && (row[from - 1] >> (cols % 8)) != 0) {
      return padding_error(op, n, cols, row[from - 1]);
    }
    total += ones(row, stride);  // of the copy: whoever writes to the bits meanwhile does no harm
    if (total > std::numeric_limits<std::int32_t>::max()) {
      return invalid(op, "less than 2^31 elements must be stored", cat("more, in ", n + 1, " rows"));
    }
    crow[n + 1] = static_cast<std::int32_t>(total);
  }
  const auto all_rows = [&](auto f) {
    for (std::int64_t n = 0; n < rows; ++n) {
      if (!f(to + n * stride)) return false;
    }
    return rows > 0;
  };
  const bool pairs = all_rows([&](const std::uint8_t* row) { return two_of_four(row, stride, cols); });
  if (pairs) {
    all_rows([&](std::uint8_t* row) {
      for (std::int64_t g = 0; g < cols / 4; g += 2) {
        const unsigned byte = row[g / 2];
        const auto second = g + 1 < cols / 4 ? code_of(byte >> 4) : std::uint8_t{0};
        row[g / 2] = static_cast<std::uint8_t>(code_of(byte & 15U) | second << 4);
      }
      return true;
    });
  }
  const std::int32_t header[] = {kMagic, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(cols),
                                 static_cast<std::int32_t>(total), pairs ? 1 : 0};
  std::copy(std::begin(header), std::end(header), plan.begin());
  return total;
}

Result<BitmapPlanView> view_bitmap_plan(std::string_view op, std::int64_t rows, std::int64_t cols,
                                        std::span<const std::int32_t> plan) {
  BsrShape shape{rows, cols, 1, 1, 0};
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  const PlanWords layout(rows, cols);
  const bool fits = static_cast<std::int64_t>(plan.size()) == layout.size;
  if (!fits || plan[0] != kMagic || plan[1] != rows || plan[2] != cols) {
    return invalid(op, cat("plan must be a bitmap's of a matrix of ", rows, " × ", cols),
                   cat(plan.size(), " words of something else"));
  }
  shape.nnzb = plan[3];
  return view_of(shape, plan.data());
}

Status bitmap_columns(std::string_view op, const BitmapPlanView& plan, std::span<std::int32_t> col_indices) {
  const BsrShape& s = plan.shape;
  if (Status status = check_size_of(op, "col_indices", s.nnzb, col_indices.size()); !status.ok())
    return status;
  std::int32_t* to = col_indices.data();
  for (std::int64_t n = 0; n < s.rows; ++n) {
    const std::uint8_t* row = plan.bits + n * plan.row_bytes();
    if (plan.two_of_four) {
      for (std::int64_t e = 0; e < s.cols / 2; ++e) {
        *to++ = static_cast<std::int32_t>(e / 2 * 4 + (row[e / 4] >> (e % 4 * 2) & 3));
      }
      continue;
    }
    for (std::int64_t b = 0; b < plan.row_bytes(); b += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, row + b, sizeof(word));
      for (; word != 0; word &= word - 1) *to++ = static_cast<std::int32_t>(b * 8 + std::countr_zero(word));
    }
  }
  return {};
}

Status bitmap_of(std::string_view op, const PlanView& pattern, std::span<std::uint8_t> bits) {
  const BsrShape& s = pattern.shape;
  if (s.block_size() != 1) {
    return invalid(op, "a bitmap must be of blocks of 1x1", cat(s.block_rows, 'x', s.block_cols));
  }
  const std::int64_t stride = mask_row_bytes(s.cols);
  if (Status status = check_size_of(op, "bitmap", s.rows * stride, bits.size()); !status.ok()) return status;
  std::fill(bits.begin(), bits.end(), std::uint8_t{0});
  for (std::int64_t n = 0; n < s.rows; ++n) {
    for (std::int32_t e = pattern.crow[n]; e < pattern.crow[n + 1]; ++e) {
      const std::int32_t k = pattern.col[e];
      std::uint8_t& byte = bits[static_cast<std::size_t>(n * stride + k / 8)];
      byte = static_cast<std::uint8_t>(byte | 1U << (k % 8));
    }
  }
  return {};
}

Status linear(const MatrixView& x, const BitmapView& w, const void* bias, Activation activation,
              const MutableMatrixView& y, const Context& context) {
  constexpr std::string_view op = "linear";
  const BsrShape& shape = w.plan.shape;
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  if (shape.block_size() != 1) {
    return invalid(op, "a bitmap must be of blocks of 1x1", cat(shape.block_rows, 'x', shape.block_cols));
  }
  if (w.plan.crow == nullptr || (w.plan.bits == nullptr && shape.rows > 0 && shape.cols > 0)) {
    return invalid(op, "plan must point to its rows and bits", "a null pointer");
  }
  if (w.values == nullptr && shape.nnzb > 0) {
    return invalid(op, "values must point to their elements", "a null pointer");
  }
  if (Status status = check_rows(op, {"x", "columns (in_features)", shape.cols, x},
                                 {"y", "columns (out_features)", shape.rows, y}, "rows, like x", Device::cpu);
      !status.ok()) {
    return status;
  }
  if (Status status = check_activation(op, activation); !status.ok()) return status;
  const Range bias_range{"bias", bias,
                         bias == nullptr ? 0 : shape.rows * static_cast<std::int64_t>(size_of(y.dtype))};
  const Range bits{"plan", w.plan.bits, shape.rows * w.plan.row_bytes()};
  const Range values{"values", w.values, shape.nnzb * static_cast<std::int64_t>(size_of(w.dtype))};
  if (Status status = check_disjoint(op, range_of("y", y), {range_of("x", x), values, bits, bias_range});
      !status.ok()) {
    return status;
  }
  return run_linear(x, w, bias, activation, y, context);
}

}  // namespace rarefy
