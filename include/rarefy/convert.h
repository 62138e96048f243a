// Exact conversion between dense, BSR, CSR, CSC and COO, for any shape and dtype. Values are moved,
// never computed with: NaN payloads and signed zeros survive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rarefy/export.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "rarefy/status.h"
#include "rarefy/view.h"

namespace rarefy {

// An owning BSR matrix in host memory.
struct BsrMatrix {
  Pattern pattern;
  DType dtype = DType::f32;
  std::vector<std::byte> values;  // value_count() elements, padding zero

  BsrView view() const { return {pattern.view(), values.data(), dtype, Device::cpu}; }
};

// CSR with scipy's conventions: sorted, distinct columns in each row. CSC is the same by columns.
struct CsrMatrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<std::int32_t> crow_indices, col_indices;
  DType dtype = DType::f32;
  std::vector<std::byte> values;
};
struct CscMatrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<std::int32_t> ccol_indices, row_indices;
  DType dtype = DType::f32;
  std::vector<std::byte> values;
};
// COO in row-major order without duplicates; coo_to_csr accepts any order and refuses duplicates.
struct CooMatrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<std::int32_t> row_indices, col_indices;
  DType dtype = DType::f32;
  std::vector<std::byte> values;
};

struct BlockShape {
  std::int64_t rows = 1;
  std::int64_t cols = 1;
};

// Stores the blocks that `block_mask` marks (row-major, one byte a block, 0 or 1), whatever they
// hold; with an empty mask, every block that has an element whose bits are not those of +0.
RAREFY_API Result<BsrMatrix> dense_to_bsr(const MatrixView& dense, BlockShape block,
                                          std::span<const std::uint8_t> block_mask = {});
RAREFY_API Status bsr_to_dense(const BsrView& bsr, const MutableMatrixView& dense);

// The mask that keeps the round(density · blocks) blocks of largest L2 norm, halves rounded to even;
// ties keep the earlier block, and a block with a NaN counts as infinite.
RAREFY_API Result<std::vector<std::uint8_t>> block_mask_by_norm(const MatrixView& dense, BlockShape block,
                                                                double density);

// Every stored element becomes an entry, explicit zeros included; padding does not.
RAREFY_API Result<CsrMatrix> bsr_to_csr(const BsrView& bsr);
RAREFY_API Result<BsrMatrix> csr_to_bsr(const CsrMatrix& csr, BlockShape block);
RAREFY_API Result<CscMatrix> csr_to_csc(const CsrMatrix& csr);
RAREFY_API Result<CsrMatrix> csc_to_csr(const CscMatrix& csc);
RAREFY_API Result<CooMatrix> csr_to_coo(const CsrMatrix& csr);
RAREFY_API Result<CsrMatrix> coo_to_csr(const CooMatrix& coo);

}  // namespace rarefy
