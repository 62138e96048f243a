// "bsr-v1": block-sparse weights in a safetensors file. A weight "M.weight" is three tensors,
//   M.weight.values        (nnzb, R, C), canonical order, padding zero
//   M.weight.crow_indices  int32 (block rows + 1)     readers take int64 too
//   M.weight.col_indices   int32 (nnzb)
// and one entry in the metadata "rarefy", a JSON text that names the true shape:
//   {"format":"bsr-v1","version":"0.1.0","modules":{"M.weight":
//     {"shape":[N,K],"block_shape":[R,C],"nnzb":n,"dtype":"f32"}}}
// A weight in CSR has values of one dimension, (nnz), and
// {"format":"csr","shape":[N,K],"nnz":n,"dtype":"f32"}. One of int8 values with scales has M.weight.scales,
// f32 (N), too, and {"format":"int8", … as for blocks, "dtype":"i8","x_dtype":"f32","activations":"int8"}.
// A bitmap has CSR's values and key, "format":"bitmap", and M.weight.bitmap, uint8 (N, ⌈K/8⌉), as its
// indices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rarefy/convert.h"
#include "rarefy/export.h"
#include "rarefy/pattern.h"
#include "rarefy/safetensors.h"
#include "rarefy/status.h"

namespace rarefy {

// How a file stores a weight. In memory CSR and bitmaps are blocks of 1×1.
enum class WeightFormat : std::uint8_t { bsr, csr, int8, bitmap };
RAREFY_API std::string_view name(WeightFormat format);  // as the metadata has it

// A weight and how its file stores it. `x_dtype`: what it is multiplied with, if not with its own dtype.
struct FileWeight : BsrMatrix {
  // Any matrix is a weight as it stands.  NOLINTNEXTLINE(google-explicit-constructor)
  FileWeight(BsrMatrix matrix, WeightFormat stored_as = WeightFormat::bsr,
             std::optional<DType> multiplied_with = std::nullopt)
      : BsrMatrix(std::move(matrix)), format(stored_as), x_dtype(multiplied_with) {}

  WeightFormat format;
  std::optional<DType> x_dtype;
  Scaling scaling = Scaling::none;  // of format int8; with it a scale for each row
  std::vector<float> scales;
  bool rounds_x = false;  // as of BsrView: of bf16 values with an x_dtype of f32
};

// A file's sparse weights by name ("M.weight"), and everything else in it, untouched. Without
// weights it is a plain safetensors file.
struct BsrFile {
  std::map<std::string, FileWeight> weights;
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;  // without "rarefy", which writers make anew
};

// What the metadata says of one weight.
struct BsrEntry {
  BsrShape shape;
  DType dtype = DType::f32;
  WeightFormat format = WeightFormat::bsr;
  std::optional<DType> x_dtype;
  Scaling scaling = Scaling::none;
  bool rounds_x = false;
};

// The weights that a header declares, checked against its tensors: none missing, none left over,
// shapes and dtypes equal. Looks at no data.
RAREFY_API Result<std::map<std::string, BsrEntry>> bsr_entries(const SafetensorsHeader& header);

// All of that, and the data: patterns valid, padding zero, scales above 0, scaled values in −127 … 127.
RAREFY_API Result<BsrFile> read_bsr_file(const std::string& path);
RAREFY_API Result<BsrFile> parse_bsr_file(std::span<const std::byte> file);

RAREFY_API Status write_bsr_file(const std::string& path, const BsrFile& file);
// The same file with every weight dense, scaled ones in their x_dtype; of those, a few rows at a time are in
// memory.
RAREFY_API Status write_dense_file(const std::string& path, const BsrFile& file);
RAREFY_API Result<std::vector<std::byte>> serialize_bsr_file(const BsrFile& file);

}  // namespace rarefy
