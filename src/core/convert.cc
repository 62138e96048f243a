// Conversion between dense, BSR, CSR, CSC and COO by moving bytes: elements are never looked into,
// so that every dtype, NaN payload and signed zero survives.
#include "rarefy/convert.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>

#include "core/arguments.h"
#include "core/compressed.h"
#include "core/message.h"

namespace rarefy {

namespace {

using Indices = std::vector<std::int32_t>;
using Bytes = std::vector<std::byte>;

constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

// Runs body, which returns Result<T>, and reports an allocation that failed.
template <class F>
auto allocating(std::string_view op, F&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return error(StatusCode::out_of_memory, op, "the result must fit in memory", "an allocation failure");
  }
}

const std::byte* element(const MatrixView& m, std::int64_t row, std::int64_t col) {
  const auto size = static_cast<std::int64_t>(size_of(m.dtype));
  return static_cast<const std::byte*>(m.data) + (row * m.row_stride + col) * size;
}

std::byte* element(const MutableMatrixView& m, std::int64_t row, std::int64_t col) {
  return const_cast<std::byte*>(element(static_cast<const MatrixView&>(m), row, col));
}

bool all_zero(const std::byte* p, std::size_t bytes) {
  return bytes == 0 || (*p == std::byte{0} && std::memcmp(p, p + 1, bytes - 1) == 0);
}

// Rows and columns of the block (i, j) that are inside the matrix.
std::int64_t valid_rows(const BsrShape& s, std::int64_t i) {
  return std::min(s.block_rows, s.rows - i * s.block_rows);
}
std::int64_t valid_cols(const BsrShape& s, std::int64_t j) {
  return std::min(s.block_cols, s.cols - j * s.block_cols);
}

bool block_is_zero(const MatrixView& dense, const BsrShape& s, std::int64_t i, std::int64_t j) {
  const std::size_t bytes = static_cast<std::size_t>(valid_cols(s, j)) * size_of(dense.dtype);
  for (std::int64_t r = 0; r < valid_rows(s, i); ++r) {
    if (!all_zero(element(dense, i * s.block_rows + r, j * s.block_cols), bytes)) return false;
  }
  return true;
}

Status check_dense(std::string_view op, const MatrixView& dense, BlockShape block) {
  if (Status status = check_matrix(op, "dense", dense, Device::cpu); !status.ok()) return status;
  return check_shape(op, {dense.rows, dense.cols, block.rows, block.cols, 0});
}

Status check_block_mask(std::string_view op, std::int64_t blocks, std::span<const std::uint8_t> mask) {
  if (static_cast<std::int64_t>(mask.size()) != blocks) {
    return invalid(op, cat("block_mask must have ", blocks, " elements, one a block"), cat(mask.size()));
  }
  const auto bad = std::find_if(mask.begin(), mask.end(), [](std::uint8_t byte) { return byte > 1; });
  if (bad == mask.end()) return {};
  return invalid(op, "block_mask must be 0 or 1",
                 cat("block_mask[", bad - mask.begin(), "]=", static_cast<int>(*bad)));
}

Status check_bsr(std::string_view op, const BsrView& bsr) {
  if (Status status = check_plan(op, "values", bsr.plan, bsr.values); !status.ok()) return status;
  if (bsr.device == Device::cpu) return {};
  return mismatch(op, "the BSR matrix must be on device cpu", "cuda");
}

Status check_value_bytes(std::string_view op, std::size_t entries, DType dtype, const Bytes& values) {
  const std::size_t expected = entries * size_of(dtype);
  if (values.size() == expected) return {};
  return invalid(op,
                 cat("values must have ", expected, " bytes for ", entries, ' ', name(dtype), " elements"),
                 cat(values.size()));
}

// CSR and CSC alike: `rows` is the compressed dimension.
Status check_entries(std::string_view op, const IndexNames& names, std::int64_t rows, std::int64_t cols,
                     const Indices& compressed, const Indices& plain, DType dtype, const Bytes& values) {
  const BsrShape shape{rows, cols, 1, 1, static_cast<std::int64_t>(plain.size())};
  if (Status status = check_compressed(op, names, shape, compressed, plain); !status.ok()) return status;
  return check_value_bytes(op, plain.size(), dtype, values);
}

Status check_csr(std::string_view op, const CsrMatrix& m) {
  return check_entries(op, kCsrNames, m.rows, m.cols, m.crow_indices, m.col_indices, m.dtype, m.values);
}

// Turns counts in counts[1 …] into the offsets of a compressed index.
void accumulate(Indices& counts) { std::partial_sum(counts.begin(), counts.end(), counts.begin()); }

// The other compressed order of the same entries, by a stable counting sort: CSR to CSC and back.
struct Compressed {
  Indices offsets, indices;
  Bytes values;
};
Compressed transpose(std::int64_t cols, const Indices& crow, const Indices& col, const Bytes& values,
                     std::size_t size) {
  Compressed out{Indices(static_cast<std::size_t>(cols) + 1), Indices(col.size()), Bytes(values.size())};
  for (const std::int32_t c : col) ++out.offsets[c + 1];
  accumulate(out.offsets);
  Indices next(out.offsets.begin(), out.offsets.end() - 1);
  for (std::size_t row = 0; row + 1 < crow.size(); ++row) {
    for (std::int32_t e = crow[row]; e < crow[row + 1]; ++e) {
      const auto to = static_cast<std::size_t>(next[col[e]]++);
      out.indices[to] = static_cast<std::int32_t>(row);
      std::memcpy(out.values.data() + to * size, values.data() + e * size, size);
    }
  }
  return out;
}

}  // namespace

Result<BsrMatrix> dense_to_bsr(const MatrixView& dense, BlockShape block,
                               std::span<const std::uint8_t> block_mask) {
  constexpr std::string_view op = "dense_to_bsr";
  if (Status status = check_dense(op, dense, block); !status.ok()) return status;
  BsrShape shape{dense.rows, dense.cols, block.rows, block.cols, 0};
  const std::int64_t rows = shape.row_count(), cols = shape.col_count();
  if (!block_mask.empty()) {
    if (Status status = check_block_mask(op, rows * cols, block_mask); !status.ok()) return status;
  }
  return allocating(op, [&]() -> Result<BsrMatrix> {
    Indices crow{0}, col;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        const bool stored =
            block_mask.empty() ? !block_is_zero(dense, shape, i, j) : block_mask[i * cols + j] == 1;
        if (!stored) continue;
        ++shape.nnzb;
        if (Status status = check_shape(op, shape); !status.ok()) return status;
        col.push_back(static_cast<std::int32_t>(j));
      }
      crow.push_back(static_cast<std::int32_t>(shape.nnzb));
    }
    Result<Pattern> pattern = Pattern::create(shape, crow, col);
    if (!pattern.ok()) return pattern.status();
    const std::size_t size = size_of(dense.dtype);
    Bytes values(static_cast<std::size_t>(shape.value_count()) * size);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t e = crow[i]; e < crow[i + 1]; ++e) {
        for (std::int64_t r = 0; r < valid_rows(shape, i); ++r) {
          const std::int64_t to = e * shape.block_size() + r * shape.block_cols;
          std::memcpy(values.data() + static_cast<std::size_t>(to) * size,
                      element(dense, i * shape.block_rows + r, col[e] * shape.block_cols),
                      static_cast<std::size_t>(valid_cols(shape, col[e])) * size);
        }
      }
    }
    return BsrMatrix{std::move(pattern).value(), dense.dtype, std::move(values)};
  });
}

Status bsr_to_dense(const BsrView& bsr, const MutableMatrixView& dense) {
  constexpr std::string_view op = "bsr_to_dense";
  const BsrShape& shape = bsr.plan.shape;
  if (Status status = check_bsr(op, bsr); !status.ok()) return status;
  if (Status status = check_output(op, "dense", dense, Device::cpu); !status.ok()) return status;
  if (dense.rows != shape.rows || dense.cols != shape.cols) {
    return invalid(op, cat("dense must have shape (", shape.rows, ", ", shape.cols, ')'),
                   cat('(', dense.rows, ", ", dense.cols, ')'));
  }
  if (dense.dtype != bsr.dtype) {
    return mismatch(op, cat("dense must be ", name(bsr.dtype), ", like values"), name(dense.dtype));
  }
  if (Status status =
          check_disjoint(op, range_of("dense", dense), {range_of("values", bsr.plan, bsr.values, bsr.dtype)});
      !status.ok()) {
    return status;
  }
  const std::size_t size = size_of(dense.dtype);
  const auto* values = static_cast<const std::byte*>(bsr.values);
  for (std::int64_t n = 0; n < dense.rows && dense.cols > 0; ++n) {
    std::memset(element(dense, n, 0), 0, static_cast<std::size_t>(dense.cols) * size);
    const std::int64_t i = n / shape.block_rows;
    for (std::int64_t e = bsr.plan.crow[i]; e < bsr.plan.crow[i + 1]; ++e) {
      const std::int64_t from = e * shape.block_size() + n % shape.block_rows * shape.block_cols;
      std::memcpy(element(dense, n, bsr.plan.col[e] * shape.block_cols),
                  values + static_cast<std::size_t>(from) * size,
                  static_cast<std::size_t>(valid_cols(shape, bsr.plan.col[e])) * size);
    }
  }
  return {};
}

Result<CsrMatrix> bsr_to_csr(const BsrView& bsr) {
  constexpr std::string_view op = "bsr_to_csr";
  const BsrShape& shape = bsr.plan.shape;
  if (Status status = check_bsr(op, bsr); !status.ok()) return status;
  return allocating(op, [&]() -> Result<CsrMatrix> {
    CsrMatrix csr{shape.rows, shape.cols, {0}, {}, bsr.dtype, {}};
    std::int64_t nnz = 0;
    for (std::int64_t n = 0; n < shape.rows; ++n) {
      const std::int64_t i = n / shape.block_rows;
      for (std::int64_t e = bsr.plan.crow[i]; e < bsr.plan.crow[i + 1]; ++e) {
        nnz += valid_cols(shape, bsr.plan.col[e]);
      }
      if (nnz > kMaxIndex) {
        return invalid(op, cat("the number of stored elements must be at most ", kMaxIndex),
                       cat("more, up to row ", n));
      }
      csr.crow_indices.push_back(static_cast<std::int32_t>(nnz));
    }
    const std::size_t size = size_of(bsr.dtype);
    csr.col_indices.resize(static_cast<std::size_t>(nnz));
    csr.values.resize(static_cast<std::size_t>(nnz) * size);
    std::size_t to = 0;
    for (std::int64_t n = 0; n < shape.rows; ++n) {
      const std::int64_t i = n / shape.block_rows;
      for (std::int64_t e = bsr.plan.crow[i]; e < bsr.plan.crow[i + 1]; ++e) {
        const std::int64_t from = e * shape.block_size() + n % shape.block_rows * shape.block_cols;
        const std::int64_t k0 = bsr.plan.col[e] * shape.block_cols;
        const auto count = static_cast<std::size_t>(valid_cols(shape, bsr.plan.col[e]));
        std::iota(csr.col_indices.data() + to, csr.col_indices.data() + to + count,
                  static_cast<std::int32_t>(k0));
        std::memcpy(csr.values.data() + to * size,
                    static_cast<const std::byte*>(bsr.values) + static_cast<std::size_t>(from) * size,
                    count * size);
        to += count;
      }
    }
    return csr;
  });
}

Result<BsrMatrix> csr_to_bsr(const CsrMatrix& csr, BlockShape block) {
  constexpr std::string_view op = "csr_to_bsr";
  if (Status status = check_csr(op, csr); !status.ok()) return status;
  BsrShape shape{csr.rows, csr.cols, block.rows, block.cols, 0};
  if (Status status = check_shape(op, shape); !status.ok()) return status;
  return allocating(op, [&]() -> Result<BsrMatrix> {
    Indices crow{0}, col;
    const std::int64_t rows = shape.row_count();
    for (std::int64_t i = 0; i < rows; ++i) {  // the distinct block columns of each block row
      const std::int64_t n0 = i * shape.block_rows;
      const auto begin = static_cast<std::ptrdiff_t>(col.size());
      for (std::int64_t e = csr.crow_indices[n0]; e < csr.crow_indices[n0 + valid_rows(shape, i)]; ++e) {
        const auto j = static_cast<std::int32_t>(csr.col_indices[e] / shape.block_cols);
        if (static_cast<std::ptrdiff_t>(col.size()) == begin || col.back() != j) col.push_back(j);
      }
      std::sort(col.begin() + begin, col.end());
      col.erase(std::unique(col.begin() + begin, col.end()), col.end());
      crow.push_back(static_cast<std::int32_t>(col.size()));
    }
    shape.nnzb = static_cast<std::int64_t>(col.size());
    if (Status status = check_shape(op, shape); !status.ok()) return status;
    Result<Pattern> pattern = Pattern::create(shape, crow, col);
    if (!pattern.ok()) return pattern.status();
    const std::size_t size = size_of(csr.dtype);
    Bytes values(static_cast<std::size_t>(shape.value_count()) * size);
    for (std::int64_t n = 0; n < csr.rows; ++n) {
      const std::int64_t i = n / shape.block_rows;
      std::int64_t b = crow[i];  // columns are sorted in a row: its blocks are passed left to right
      for (std::int64_t e = csr.crow_indices[n]; e < csr.crow_indices[n + 1]; ++e) {
        const std::int64_t j = csr.col_indices[e] / shape.block_cols;
        while (col[b] != j) ++b;
        const std::int64_t to = b * shape.block_size() + n % shape.block_rows * shape.block_cols +
                                csr.col_indices[e] % shape.block_cols;
        std::memcpy(values.data() + static_cast<std::size_t>(to) * size, csr.values.data() + e * size, size);
      }
    }
    return BsrMatrix{std::move(pattern).value(), csr.dtype, std::move(values)};
  });
}

Result<CscMatrix> csr_to_csc(const CsrMatrix& csr) {
  constexpr std::string_view op = "csr_to_csc";
  if (Status status = check_csr(op, csr); !status.ok()) return status;
  return allocating(op, [&]() -> Result<CscMatrix> {
    Compressed t = transpose(csr.cols, csr.crow_indices, csr.col_indices, csr.values, size_of(csr.dtype));
    return CscMatrix{csr.rows,  csr.cols,           std::move(t.offsets), std::move(t.indices),
                     csr.dtype, std::move(t.values)};
  });
}

Result<CsrMatrix> csc_to_csr(const CscMatrix& csc) {
  constexpr std::string_view op = "csc_to_csr";
  if (Status status = check_entries(op, kCscNames, csc.cols, csc.rows, csc.ccol_indices, csc.row_indices,
                                    csc.dtype, csc.values);
      !status.ok()) {
    return status;
  }
  return allocating(op, [&]() -> Result<CsrMatrix> {
    Compressed t = transpose(csc.rows, csc.ccol_indices, csc.row_indices, csc.values, size_of(csc.dtype));
    return CsrMatrix{csc.rows,  csc.cols,           std::move(t.offsets), std::move(t.indices),
                     csc.dtype, std::move(t.values)};
  });
}

Result<CooMatrix> csr_to_coo(const CsrMatrix& csr) {
  constexpr std::string_view op = "csr_to_coo";
  if (Status status = check_csr(op, csr); !status.ok()) return status;
  return allocating(op, [&]() -> Result<CooMatrix> {
    CooMatrix coo{csr.rows,        csr.cols,  Indices(csr.col_indices.size()),
                  csr.col_indices, csr.dtype, csr.values};
    for (std::int64_t n = 0; n < csr.rows; ++n) {
      std::fill(coo.row_indices.begin() + csr.crow_indices[n],
                coo.row_indices.begin() + csr.crow_indices[n + 1], static_cast<std::int32_t>(n));
    }
    return coo;
  });
}

Result<CsrMatrix> coo_to_csr(const CooMatrix& coo) {
  constexpr std::string_view op = "coo_to_csr";
  if (Status status = check_shape(op, {coo.rows, coo.cols, 1, 1, 0}); !status.ok()) return status;
  const std::size_t entries = coo.row_indices.size();
  if (coo.col_indices.size() != entries) {
    return invalid(op, cat("col_indices must have ", entries, " elements, like row_indices"),
                   cat(coo.col_indices.size()));
  }
  if (static_cast<std::int64_t>(entries) > kMaxIndex) {
    return invalid(op, cat("the number of entries must be at most ", kMaxIndex), cat(entries));
  }
  if (Status status = check_value_bytes(op, entries, coo.dtype, coo.values); !status.ok()) return status;
  const auto check_range = [&](std::string_view argument, const Indices& indices,
                               std::int64_t limit) -> Status {
    const auto bad =
        std::find_if(indices.begin(), indices.end(), [&](auto index) { return index < 0 || index >= limit; });
    if (bad == indices.end()) return {};
    return invalid(op, cat(argument, " must be in [0, ", limit, ')'),
                   cat(argument, '[', bad - indices.begin(), "]=", *bad));
  };
  if (Status status = check_range("row_indices", coo.row_indices, coo.rows); !status.ok()) return status;
  if (Status status = check_range("col_indices", coo.col_indices, coo.cols); !status.ok()) return status;

  return allocating(op, [&]() -> Result<CsrMatrix> {
    const auto key = [&](std::int32_t e) { return std::pair(coo.row_indices[e], coo.col_indices[e]); };
    Indices order(entries);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](std::int32_t a, std::int32_t b) { return std::pair(key(a), a) < std::pair(key(b), b); });
    const auto repeat = std::adjacent_find(order.begin(), order.end(),
                                           [&](std::int32_t a, std::int32_t b) { return key(a) == key(b); });
    if (repeat != order.end()) {
      const auto [row, col] = key(*repeat);
      return invalid(op, "entries must be distinct",
                     cat("(row_indices[", repeat[1], "], col_indices[", repeat[1], "])=(", row, ", ", col,
                         "), as at ", repeat[0]));
    }
    const std::size_t size = size_of(coo.dtype);
    CsrMatrix csr{coo.rows,         coo.cols,  Indices(static_cast<std::size_t>(coo.rows) + 1),
                  Indices(entries), coo.dtype, Bytes(coo.values.size())};
    for (const std::int32_t row : coo.row_indices) ++csr.crow_indices[row + 1];
    accumulate(csr.crow_indices);
    for (std::size_t to = 0; to < entries; ++to) {
      csr.col_indices[to] = coo.col_indices[order[to]];
      std::memcpy(csr.values.data() + to * size, coo.values.data() + order[to] * size, size);
    }
    return csr;
  });
}

}  // namespace rarefy
