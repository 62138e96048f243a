// Reads and writes safetensors files, host memory only. A file is untrusted: every number in it is
// checked against the others and against the real size before anything is allocated or read by it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rarefy/dtype.h"
#include "rarefy/export.h"
#include "rarefy/status.h"

namespace rarefy {

// Every element type that the format knows, in its own order (narrow to wide).
enum class SafetensorsDType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64,
};

RAREFY_API std::string_view name(SafetensorsDType dtype);  // as in files: "F32"
RAREFY_API std::optional<SafetensorsDType> parse_safetensors_dtype(std::string_view text);
RAREFY_API std::int64_t bits_of(SafetensorsDType dtype);  // per element; 4 and 6 exist

// The element types that Rarefy computes with, and back.
RAREFY_API SafetensorsDType to_safetensors(DType dtype);
RAREFY_API std::optional<DType> from_safetensors(SafetensorsDType dtype);

// Where a tensor lies: bytes [begin, end) after the header.
struct StoredTensorInfo {
  SafetensorsDType dtype = SafetensorsDType::f32;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t bytes() const { return end - begin; }
};

// A header that agrees with the size of its file: the tensors cover the data exactly, in a row.
struct SafetensorsHeader {
  std::map<std::string, StoredTensorInfo> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::int64_t data_offset = 0;                 // of the data, from the start of the file
  std::int64_t file_bytes = 0;
};

struct StoredTensor {
  SafetensorsDType dtype = SafetensorsDType::f32;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;  // row-major, little endian
  bool operator==(const StoredTensor&) const = default;
};

struct SafetensorsFile {
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;
  bool operator==(const SafetensorsFile&) const = default;
};

// Statuses of all readers here and in bsr_file.h: invalid_argument when the file is not what it says,
// io_error when it cannot be opened or read.
RAREFY_API Result<SafetensorsHeader> read_safetensors_header(const std::string& path);
RAREFY_API Result<SafetensorsFile> read_safetensors(const std::string& path);
RAREFY_API Result<SafetensorsFile> parse_safetensors(std::span<const std::byte> file);

// Writers order tensors by dtype, widest first, then by name, and pad the header to 8 bytes: every
// tensor is aligned, and equal contents give equal bytes. A path is replaced in one step, after all
// bytes are on disk; on error it is as before.
RAREFY_API Status write_safetensors(const std::string& path, const SafetensorsFile& file);
RAREFY_API Result<std::vector<std::byte>> serialize_safetensors(const SafetensorsFile& file);

}  // namespace rarefy
