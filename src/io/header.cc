// The safetensors header, both ways, with the checks of the format's reference implementation:
// bounded length, known dtypes, checked products, tensors that cover the data without a gap.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "core/checked.h"
#include "io/json.h"
#include "io/tensors.h"

namespace rarefy {

namespace {

static_assert(std::endian::native == std::endian::little, "files are little endian and copied as they are");

constexpr std::int64_t kLengthBytes = 8;               // the header length, u64
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr std::string_view kMetadataKey = "__metadata__";

// Bytes of a tensor; nullopt when the product overflows or ends inside a byte.
std::optional<std::int64_t> tensor_bytes(SafetensorsDType dtype, const std::vector<std::int64_t>& shape) {
  std::optional<std::int64_t> elements = 1;
  for (const std::int64_t dim : shape) {
    if (!(elements = checked_mul(*elements, dim))) return std::nullopt;
  }
  const auto bits = checked_mul(*elements, bits_of(dtype));
  return bits && *bits % 8 == 0 ? std::optional(*bits / 8) : std::nullopt;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t kShown = 8;
  std::string out = "[";
  for (std::size_t i = 0; i < std::min(shape.size(), kShown); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return out + (shape.size() > kShown ? ", …]" : "]");
}

Result<Metadata> parse_metadata(std::string_view op, const JsonValue& value) {
  if (value.object() == nullptr) return invalid(op, "__metadata__ must be an object", value.type_name());
  Metadata metadata;
  for (const auto& [key, text] : *value.object()) {
    if (text->string() == nullptr) {
      return invalid(op, cat("__metadata__ ", quote(key), " must be a string"), text->type_name());
    }
    metadata.emplace(key, *text->string());
  }
  return metadata;
}

Result<std::vector<std::int64_t>> parse_numbers(std::string_view op, std::string_view what,
                                                const JsonValue& value) {
  if (value.numbers() == nullptr) return invalid(op, cat(what, " must be an array"), value.type_name());
  std::vector<std::int64_t> numbers;
  numbers.reserve(value.numbers()->size());
  for (const std::uint64_t number : *value.numbers()) {
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return invalid(op, cat(what, " must be below 2^63"), cat(number));
    }
    numbers.push_back(static_cast<std::int64_t>(number));
  }
  return numbers;
}

Result<StoredTensorInfo> parse_tensor(std::string_view op, const std::string& label, const JsonValue& value) {
  if (value.object() == nullptr) return invalid(op, cat(label, " must be an object"), value.type_name());
  const JsonObject& tensor = *value.object();
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!tensor.contains(key)) return invalid(op, cat(label, " must have \"", key, '"'), "none");
  }
  if (tensor.size() != 3) {
    return invalid(op, cat(label, " must have dtype, shape and data_offsets only"),
                   cat(tensor.size(), " keys"));
  }
  StoredTensorInfo info;
  const JsonValue& dtype = *tensor.at("dtype");
  if (dtype.string() == nullptr) {
    return invalid(op, cat(label, "'s dtype must be a string"), dtype.type_name());
  }
  const auto known = parse_safetensors_dtype(*dtype.string());
  if (!known) {
    return invalid(op, cat(label, "'s dtype must be one that safetensors knows"), quote(*dtype.string()));
  }
  info.dtype = *known;
  auto shape = parse_numbers(op, cat(label, "'s shape"), *tensor.at("shape"));
  if (!shape.ok()) return shape.status();
  info.shape = std::move(shape).value();
  auto offsets = parse_numbers(op, cat(label, "'s data_offsets"), *tensor.at("data_offsets"));
  if (!offsets.ok()) return offsets.status();
  if (offsets->size() != 2) {
    return invalid(op, cat(label, "'s data_offsets must be [begin, end]"), cat(offsets->size(), " numbers"));
  }
  info.begin = (*offsets)[0];
  info.end = (*offsets)[1];
  const auto bytes = tensor_bytes(info.dtype, info.shape);
  if (!bytes) {
    return invalid(op, cat(label, " must have a whole number of bytes that fits in 63 bits"),
                   cat("shape ", shape_text(info.shape), " of ", name(info.dtype)));
  }
  if (info.end < info.begin || info.bytes() != *bytes) {
    return invalid(op,
                   cat(label, "'s data_offsets must span the ", *bytes, " bytes of shape ",
                       shape_text(info.shape), " of ", name(info.dtype)),
                   cat('[', info.begin, ", ", info.end, ']'));
  }
  return info;
}

// The tensors, by offset, must follow each other from 0 to the end of the file.
Status check_cover(std::string_view op, const SafetensorsHeader& header) {
  std::vector<const std::pair<const std::string, StoredTensorInfo>*> order;
  order.reserve(header.tensors.size());
  for (const auto& entry : header.tensors) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  std::int64_t end = 0;
  for (const auto* entry : order) {
    if (entry->second.begin != end) {
      return invalid(op,
                     cat("tensor ", quote(entry->first), " must begin where the one before ends, at ", end),
                     cat(entry->second.begin));
    }
    end = entry->second.end;
  }
  const std::int64_t stored = header.file_bytes - header.data_offset;
  if (end != stored) {
    return invalid(op, cat("the file must hold the ", end, " bytes of its tensors after the header"),
                   cat(stored));
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> read_header(std::string_view op, const ByteSource& source) {
  SafetensorsHeader header;
  header.file_bytes = source.size();
  if (header.file_bytes < kLengthBytes) {
    return invalid(op, cat("the file must have at least ", kLengthBytes, " bytes"), cat(header.file_bytes));
  }
  std::uint64_t length = 0;
  if (Status status = source.read(op, 0, std::as_writable_bytes(std::span(&length, 1))); !status.ok()) {
    return status;
  }
  const std::int64_t limit = std::min(kMaxHeaderBytes, header.file_bytes - kLengthBytes);
  if (length > static_cast<std::uint64_t>(limit)) {
    return invalid(
        op, cat("the header length must be at most ", limit, " in a file of ", header.file_bytes, " bytes"),
        cat(length));
  }
  header.data_offset = kLengthBytes + static_cast<std::int64_t>(length);
  std::string text(length, '\0');
  if (Status status = source.read(op, kLengthBytes, std::as_writable_bytes(std::span(text))); !status.ok()) {
    return status;
  }
  auto parsed = parse_strict_json(op, "the header", text, 3);
  if (!parsed.ok()) return parsed.status();
  for (const auto& [key, value] : *parsed) {
    if (key == kMetadataKey) {
      auto metadata = parse_metadata(op, *value);
      if (!metadata.ok()) return metadata.status();
      header.metadata = std::move(metadata).value();
      continue;
    }
    auto info = parse_tensor(op, cat("tensor ", quote(key)), *value);
    if (!info.ok()) return info.status();
    header.tensors.emplace(key, std::move(info).value());
  }
  if (Status status = check_cover(op, header); !status.ok()) return status;
  return header;
}

Result<std::vector<std::byte>> read_data(std::string_view op, const ByteSource& source,
                                         const SafetensorsHeader& header, const StoredTensorInfo& info) {
  std::vector<std::byte> data(static_cast<std::size_t>(info.bytes()));
  if (Status status = source.read(op, header.data_offset + info.begin, data); !status.ok()) return status;
  return data;
}

Result<std::string> format_header(std::string_view op, std::vector<TensorRef>& tensors,
                                  const Metadata& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorRef& a, const TensorRef& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  const auto not_utf8 = [&](std::string_view what) {
    return invalid(op, "names and metadata must be UTF-8", cat("other bytes in ", quote(what)));
  };
  std::string text;
  for (const auto& [key, value] : metadata) {
    const std::string name = json_string(key), content = json_string(value);
    if (name.empty() || content.empty()) return not_utf8(kMetadataKey);
    text += join({text.empty() ? "\"__metadata__\":{" : ",", name, ":", content});
  }
  if (!text.empty()) text += '}';
  std::int64_t offset = 0;
  for (const TensorRef& tensor : tensors) {
    if (tensor.name == kMetadataKey) {
      return invalid(op, "a tensor's name must not be __metadata__", quote(tensor.name));
    }
    const std::string label = json_string(tensor.name);
    if (label.empty()) return not_utf8(tensor.name);
    const bool negative =
        std::any_of(tensor.shape.begin(), tensor.shape.end(), [](std::int64_t dim) { return dim < 0; });
    const auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
    const bool right =
        tensor.sparse != nullptr ? bytes.has_value() : bytes == static_cast<std::int64_t>(tensor.data.size());
    if (negative || !right) {
      return invalid(
          op, cat("tensor ", quote(tensor.name), " must have the bytes of its shape and dtype"),
          cat(tensor.data.size(), " bytes for shape ", shape_text(tensor.shape), " of ", name(tensor.dtype)));
    }
    const auto end = checked_add(offset, *bytes);
    if (!end) return invalid(op, "the tensors must have fewer than 2^63 bytes in all", "more");
    text += join({text.empty() ? "" : ",", label, ":{\"dtype\":\"", name(tensor.dtype), "\",\"shape\":",
                  json_array(tensor.shape), ",\"data_offsets\":", json_array({offset, *end}), "}"});
    offset = *end;
  }
  text = '{' + text + '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (static_cast<std::int64_t>(text.size()) > kMaxHeaderBytes) {
    return invalid(op, cat("the header must have at most ", kMaxHeaderBytes, " bytes"), cat(text.size()));
  }
  const auto length = std::bit_cast<std::array<char, kLengthBytes>>(static_cast<std::uint64_t>(text.size()));
  return std::string(length.begin(), length.end()) + text;
}

}  // namespace rarefy
