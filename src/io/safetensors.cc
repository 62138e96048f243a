// Whole safetensors files, from and to disk and memory.
#include "rarefy/safetensors.h"

#include <algorithm>
#include <cstring>

#include "io/output_file.h"
#include "io/tensors.h"

namespace rarefy {

namespace {

Result<SafetensorsFile> read_all(std::string_view op, const ByteSource& source) {
  auto header = read_header(op, source);
  if (!header.ok()) return header.status();
  SafetensorsFile file;
  for (const auto& [name, info] : header->tensors) {
    auto data = read_data(op, source, *header, info);
    if (!data.ok()) return data.status();
    file.tensors.emplace(name, StoredTensor{info.dtype, info.shape, std::move(data).value()});
  }
  file.metadata = std::move(header.value().metadata);
  return file;
}

// Writes a matrix as a dense one, in pieces of about a megabyte, or of a row if that is longer.
Status write_dense(OutputFile& file, const BsrMatrix& matrix) {
  const PlanView& plan = matrix.pattern.view();
  const BsrShape& shape = plan.shape;
  const auto size = static_cast<std::int64_t>(size_of(matrix.dtype));
  const std::int64_t row_bytes = shape.cols * size;
  if (shape.rows == 0 || row_bytes == 0) return {};
  const std::int64_t at_once = std::clamp<std::int64_t>((1 << 20) / row_bytes, 1, shape.rows);
  std::vector<std::byte> piece(static_cast<std::size_t>(at_once * row_bytes));
  for (std::int64_t first = 0; first < shape.rows; first += at_once) {
    const std::int64_t end = std::min(first + at_once, shape.rows);
    std::fill(piece.begin(), piece.end(), std::byte{0});
    for (std::int64_t n = first; n < end; ++n) {
      std::byte* row = piece.data() + (n - first) * row_bytes;
      const std::int64_t i = n / shape.block_rows;
      for (std::int64_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        const std::int64_t from = e * shape.block_size() + n % shape.block_rows * shape.block_cols;
        const std::int64_t k = plan.col[e] * shape.block_cols;
        std::memcpy(row + k * size, matrix.values.data() + from * size,
                    static_cast<std::size_t>(std::min(shape.block_cols, shape.cols - k) * size));
      }
    }
    const auto written = std::span(piece).first(static_cast<std::size_t>((end - first) * row_bytes));
    if (Status status = file.write(written); !status.ok()) return status;
  }
  return {};
}

std::vector<TensorRef> refs(const SafetensorsFile& file) {
  std::vector<TensorRef> result;
  result.reserve(file.tensors.size());
  for (const auto& [name, tensor] : file.tensors) {
    result.push_back({name, tensor.dtype, tensor.shape, tensor.data});
  }
  return result;
}

}  // namespace

Result<std::vector<std::byte>> pack(std::string_view op, std::vector<TensorRef> tensors,
                                    const Metadata& metadata) {
  const auto header = format_header(op, tensors, metadata);
  if (!header.ok()) return header.status();
  const auto front = std::as_bytes(std::span(*header));
  std::vector<std::byte> bytes(front.begin(), front.end());
  for (const TensorRef& tensor : tensors) bytes.insert(bytes.end(), tensor.data.begin(), tensor.data.end());
  return bytes;
}

Status save(std::string_view op, const std::string& path, std::vector<TensorRef> tensors,
            const Metadata& metadata) {
  const auto header = format_header(op, tensors, metadata);
  if (!header.ok()) return header.status();
  OutputFile file(op, path);
  if (Status status = file.open(); !status.ok()) return status;
  if (Status status = file.write(std::as_bytes(std::span(*header))); !status.ok()) return status;
  for (const TensorRef& tensor : tensors) {
    Status status = tensor.sparse != nullptr ? write_dense(file, *tensor.sparse) : file.write(tensor.data);
    if (!status.ok()) return status;
  }
  return file.commit();
}

Result<SafetensorsHeader> read_safetensors_header(const std::string& path) {
  constexpr std::string_view op = "read_safetensors_header";
  return guarded(op, [&]() -> Result<SafetensorsHeader> {
    const auto source = open_file(op, path);
    return source.ok() ? read_header(op, **source) : source.status();
  });
}

Result<SafetensorsFile> read_safetensors(const std::string& path) {
  constexpr std::string_view op = "read_safetensors";
  return guarded(op, [&]() -> Result<SafetensorsFile> {
    const auto source = open_file(op, path);
    return source.ok() ? read_all(op, **source) : source.status();
  });
}

Result<SafetensorsFile> parse_safetensors(std::span<const std::byte> file) {
  constexpr std::string_view op = "parse_safetensors";
  return guarded(op, [&] { return read_all(op, *open_memory(file)); });
}

Status write_safetensors(const std::string& path, const SafetensorsFile& file) {
  constexpr std::string_view op = "write_safetensors";
  return guarded(op, [&] { return save(op, path, refs(file), file.metadata); });
}

Result<std::vector<std::byte>> serialize_safetensors(const SafetensorsFile& file) {
  constexpr std::string_view op = "serialize_safetensors";
  return guarded(op, [&] { return pack(op, refs(file), file.metadata); });
}

}  // namespace rarefy
