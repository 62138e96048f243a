// Whole safetensors files, from and to disk and memory.
#include "rarefy/safetensors.h"

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
    if (Status status = file.write(tensor.data); !status.ok()) return status;
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
