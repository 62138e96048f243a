// bsr-v1 on top of safetensors: the pieces of a weight, read, checked and written. What the metadata says of
// them is in bsr_entry.cc.
#include "rarefy/bsr_file.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "core/scalar.h"
#include "io/bsr_entry.h"
#include "io/json.h"
#include "io/tensors.h"
#include "rarefy/bitmap.h"

namespace rarefy {

namespace {

using namespace bsr_v1;

// Where padding first has a bit set, as "values[e, r, c]".
std::optional<std::string> dirty_padding(const PlanView& plan, std::span<const std::byte> values,
                                         DType dtype) {
  const BsrShape& shape = plan.shape;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    const std::int64_t rows = std::min(shape.block_rows, shape.rows - i * shape.block_rows);
    for (std::int64_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      const std::int64_t cols = std::min(shape.block_cols, shape.cols - plan.col[e] * shape.block_cols);
      if (rows == shape.block_rows && cols == shape.block_cols) continue;
      const std::byte* block = values.data() + e * shape.block_size() * size;
      for (std::int64_t r = 0; r < shape.block_rows; ++r) {
        const std::int64_t first = r < rows ? cols : 0;
        const std::byte* row = block + r * shape.block_cols * size;
        const std::byte* end = row + shape.block_cols * size;
        const std::byte* dirty =
            std::find_if(row + first * size, end, [](std::byte b) { return b != std::byte{0}; });
        if (dirty != end) return cat("values[", e, ", ", r, ", ", (dirty - row) / size, ']');
      }
    }
  }
  return std::nullopt;
}

// Scales of as many rows, above 0, and no value of −128.
Status check_scaled(std::string_view op, const FileWeight& weight) {
  const BsrShape& shape = weight.pattern.shape();
  if (static_cast<std::int64_t>(weight.scales.size()) != shape.rows) {
    return invalid(op, cat("scales must have ", shape.rows, " elements"), cat(weight.scales.size()));
  }
  if (Status status = check_scales(op, weight.scales); !status.ok()) return status;
  const auto least = std::find(weight.values.begin(), weight.values.end(), std::byte{0x80});
  if (least == weight.values.end()) return {};
  const std::int64_t at = least - weight.values.begin(), in_block = at % shape.block_size();
  return invalid(op, "values with scales must be in [-127, 127]",
                 cat("values[", at / shape.block_size(), ", ", in_block / shape.block_cols, ", ",
                     in_block % shape.block_cols, "]=-128"));
}

Status check_padding(std::string_view op, const BsrMatrix& weight) {
  if (const auto dirty = dirty_padding(weight.pattern.view(), weight.values, weight.dtype)) {
    return invalid(op, "the padding of edge blocks must be zero", cat("other bits at ", *dirty));
  }
  return {};
}

template <class Index>
std::vector<Index> as_numbers(std::span<const std::byte> bytes) {
  std::vector<Index> numbers(bytes.size() / sizeof(Index));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

// One index array as int64, whichever of the two widths the file has.
Result<std::vector<std::int64_t>> read_index(std::string_view op, const ByteSource& source,
                                             const SafetensorsHeader& header, const std::string& tensor) {
  const StoredTensorInfo& info = header.tensors.at(tensor);
  const auto data = read_data(op, source, header, info);
  if (!data.ok()) return data.status();
  if (info.dtype == SafetensorsDType::i64) return as_numbers<std::int64_t>(*data);
  const auto narrow = as_numbers<std::int32_t>(*data);
  return std::vector<std::int64_t>(narrow.begin(), narrow.end());
}

// The pattern of a weight by its bits.
Result<Pattern> read_bitmap(std::string_view op, const ByteSource& source, const SafetensorsHeader& header,
                            const std::string& weight, const BsrEntry& entry) {
  const auto data = read_data(op, source, header, header.tensors.at(piece(weight, kBitmap)));
  if (!data.ok()) return data.status();
  const BsrShape& s = entry.shape;
  const auto bits = as_numbers<std::uint8_t>(*data);
  std::vector<std::int32_t> plan(static_cast<std::size_t>(bitmap_plan_size(s.rows, s.cols)));
  const auto stored = build_bitmap_plan(op, s.rows, s.cols, bits, plan);
  if (!stored.ok()) return stored.status();
  if (*stored != s.nnzb) {
    return invalid(op, cat("the bitmap must have ", s.nnzb, " bits that are 1, as the metadata says"),
                   cat(*stored));
  }
  const auto view = view_bitmap_plan(op, s.rows, s.cols, plan);
  if (!view.ok()) return view.status();
  std::vector<std::int32_t> col(static_cast<std::size_t>(s.nnzb));
  if (Status status = bitmap_columns(op, *view, col); !status.ok()) return status;
  return Pattern::create(s, {view->crow, static_cast<std::size_t>(s.rows + 1)}, col);
}

Result<Pattern> read_pattern(std::string_view op, const ByteSource& source, const SafetensorsHeader& header,
                             const std::string& weight, const BsrEntry& entry) {
  if (entry.format == WeightFormat::bitmap) return read_bitmap(op, source, header, weight, entry);
  const auto crow = read_index(op, source, header, piece(weight, kCrow));
  if (!crow.ok()) return crow.status();
  const auto col = read_index(op, source, header, piece(weight, kCol));
  if (!col.ok()) return col.status();
  if (Status status = check_indices(op, entry.shape, *crow, *col); !status.ok()) return status;
  // Valid indices fit in int32: shapes do.
  const std::vector<std::int32_t> crow32(crow->begin(), crow->end());
  const std::vector<std::int32_t> col32(col->begin(), col->end());
  return Pattern::create(entry.shape, crow32, col32);
}

Result<FileWeight> read_weight(std::string_view op, const ByteSource& source, const SafetensorsHeader& header,
                               const std::string& weight, const BsrEntry& entry) {
  auto pattern = read_pattern(op, source, header, weight, entry);
  if (!pattern.ok()) return pattern.status();
  auto values = read_data(op, source, header, header.tensors.at(piece(weight, kValues)));
  if (!values.ok()) return values.status();
  BsrMatrix matrix{std::move(pattern).value(), entry.dtype, std::move(values).value()};
  if (Status status = check_padding(op, matrix); !status.ok()) return status;
  FileWeight read(std::move(matrix), entry.format, entry.x_dtype);
  read.rounds_x = entry.rounds_x;
  if (entry.format == WeightFormat::int8) {
    const auto scales = read_data(op, source, header, header.tensors.at(piece(weight, kScales)));
    if (!scales.ok()) return scales.status();
    read.scaling = entry.scaling;
    read.scales = as_numbers<float>(*scales);
    if (Status status = check_scaled(op, read); !status.ok()) return status;
  }
  return read;
}

Result<BsrFile> read_all(std::string_view op, const ByteSource& source) {
  auto header = read_header(op, source);
  if (!header.ok()) return header.status();
  const auto entries = parse_entries(op, *header);
  if (!entries.ok()) return entries.status();
  BsrFile file;
  for (const auto& [weight, entry] : *entries) {
    auto matrix = read_weight(scoped(op, weight), source, *header, weight, entry);
    if (!matrix.ok()) return matrix.status();
    file.weights.emplace(weight, std::move(matrix).value());
  }
  for (const auto& [tensor, info] : header->tensors) {
    const auto entry_of = [&entries, &name = tensor](std::string_view suffix) {
      if (!name.ends_with(suffix)) return entries->end();
      return entries->find(name.substr(0, name.size() - suffix.size()));
    };
    const auto scaled = entry_of(kScales);
    const bool is_scales = scaled != entries->end() && scaled->second.format == WeightFormat::int8;
    if (owner_of_index(tensor) || is_scales || entry_of(kValues) != entries->end()) continue;
    auto data = read_data(op, source, *header, info);
    if (!data.ok()) return data.status();
    file.tensors.emplace(tensor, StoredTensor{info.dtype, info.shape, std::move(data).value()});
  }
  file.metadata = std::move(header.value().metadata);
  file.metadata.erase(std::string(kMetadataKey));
  return file;
}

// A BsrFile as plain tensors: the weights' pieces and the rest, and the metadata that describes them.
struct Parts {
  std::vector<TensorRef> tensors;
  Metadata metadata;
  std::vector<std::unique_ptr<BsrMatrix>> scaled;  // as floats, for dense files
  std::vector<std::vector<std::uint8_t>> bitmaps;
};

// Scaled values as what they stand for, in the weight's x_dtype.
std::unique_ptr<BsrMatrix> unscaled(const FileWeight& weight) {
  const BsrShape& shape = weight.pattern.shape();
  const DType dtype = weight.x_dtype.value_or(DType::f32);
  auto matrix = std::make_unique<BsrMatrix>(BsrMatrix{weight.pattern, dtype, {}});
  matrix->values.resize(weight.values.size() * size_of(dtype));
  const PlanView plan = weight.pattern.view();
  const auto* from = reinterpret_cast<const std::int8_t*>(weight.values.data());
  visit_float(dtype, [&]<class T>(T) {
    for (std::int64_t i = 0; i < shape.row_count(); ++i) {
      for (std::int64_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        for (std::int64_t at = 0; at < shape.block_size(); ++at) {
          const std::int64_t row = i * shape.block_rows + at / shape.block_cols;
          const float scale = row < shape.rows ? weight.scales[static_cast<std::size_t>(row)] : 0;
          const std::int64_t position = e * shape.block_size() + at;
          T number;
          // As a product of floats first, as fronts have it.
          store(&number, static_cast<float>(scale * static_cast<float>(from[position])));
          std::memcpy(matrix->values.data() + static_cast<std::size_t>(position) * sizeof(T), &number,
                      sizeof(T));
        }
      }
    }
  });
  return matrix;
}

Status check_weight(std::string_view op, const BsrFile& file, const std::string& weight,
                    const FileWeight& matrix) {
  const bool scaled = matrix.format == WeightFormat::int8;
  for (const std::string& taken : {weight, piece(weight, kValues), piece(weight, kCrow), piece(weight, kCol),
                                   scaled ? piece(weight, kScales) : weight, piece(weight, kBitmap)}) {
    if (file.tensors.contains(taken)) {
      return invalid(op, "names must be distinct", cat("another tensor ", quote(taken)));
    }
  }
  const BsrShape& shape = matrix.pattern.shape();
  const bool elements = matrix.format == WeightFormat::csr || matrix.format == WeightFormat::bitmap;
  if (elements && shape.block_size() != 1) {
    return invalid(op, cat("a weight stored as ", name(matrix.format), " must have blocks of 1x1"),
                   cat(shape.block_rows, 'x', shape.block_cols));
  }
  const auto bytes = static_cast<std::size_t>(shape.value_count()) * size_of(matrix.dtype);
  if (matrix.values.size() != bytes) {
    return invalid(op, cat("values must have ", bytes, " bytes"), cat(matrix.values.size()));
  }
  if (scaled != (matrix.scaling != Scaling::none)) {
    return invalid(op, "scaling must go with format int8", name(matrix.scaling));
  }
  if (scaled) {
    BsrEntry entry{shape, matrix.dtype, matrix.format, matrix.x_dtype, matrix.scaling};
    if (Status status = check_int8(op, entry); !status.ok()) return status;
    if (Status status = check_scaled(op, matrix); !status.ok()) return status;
  }
  if (matrix.rounds_x && matrix.format != WeightFormat::bsr) {
    return invalid(op, "activations in bf16 must go with format bsr", name(matrix.format));
  }
  if (Status status = check_rounding(op, matrix.rounds_x, matrix.dtype, matrix.x_dtype); !status.ok()) {
    return status;
  }
  return check_padding(op, matrix);
}

enum class Weights : std::uint8_t { sparse, dense };

Result<Parts> take_apart(std::string_view op, const BsrFile& file, Weights weights = Weights::sparse) {
  Parts parts{{}, file.metadata, {}, {}};
  if (file.metadata.contains(std::string(kMetadataKey))) {
    return invalid(op, "metadata must leave \"rarefy\" to the writer", "a value of its own");
  }
  for (const auto& [tensor, stored] : file.tensors) {
    if (owner_of_index(tensor)) {
      return invalid(op, "names that end in .crow_indices, .col_indices or .bitmap must belong to a weight",
                     quote(tensor));
    }
    parts.tensors.push_back({tensor, stored.dtype, stored.shape, stored.data});
  }
  std::string modules;  // "name":{…},…
  for (const auto& [weight, matrix] : file.weights) {
    const std::string scope = scoped(op, weight);
    if (Status status = check_weight(scope, file, weight, matrix); !status.ok()) return status;
    const BsrShape& shape = matrix.pattern.shape();
    if (weights == Weights::dense) {
      const BsrMatrix* dense = &matrix;
      if (matrix.format == WeightFormat::int8) dense = parts.scaled.emplace_back(unscaled(matrix)).get();
      parts.tensors.push_back({weight, to_safetensors(dense->dtype), {shape.rows, shape.cols}, {}, dense});
      continue;
    }
    const auto crow = matrix.pattern.crow_indices();
    const auto col = matrix.pattern.col_indices();
    const auto length = [](const auto& span) { return static_cast<std::int64_t>(span.size()); };
    parts.tensors.push_back({piece(weight, kValues), to_safetensors(matrix.dtype),
                             values_shape(matrix.format, shape), matrix.values});
    if (matrix.format == WeightFormat::bitmap) {
      const std::int64_t row = mask_row_bytes(shape.cols);
      auto& bits = parts.bitmaps.emplace_back(static_cast<std::size_t>(shape.rows * row));
      if (Status status = bitmap_of(scope, matrix.pattern.view(), bits); !status.ok()) return status;
      parts.tensors.push_back(
          {piece(weight, kBitmap), SafetensorsDType::u8, {shape.rows, row}, std::as_bytes(std::span(bits))});
    } else {
      parts.tensors.push_back(
          {piece(weight, kCrow), SafetensorsDType::i32, {length(crow)}, std::as_bytes(crow)});
      parts.tensors.push_back(
          {piece(weight, kCol), SafetensorsDType::i32, {length(col)}, std::as_bytes(col)});
    }
    if (matrix.format == WeightFormat::int8) {
      parts.tensors.push_back({piece(weight, kScales),
                               SafetensorsDType::f32,
                               {shape.rows},
                               std::as_bytes(std::span(matrix.scales))});
    }
    const std::string label = json_string(weight);
    if (label.empty()) return invalid(op, "the weights' names must be UTF-8", "other bytes");
    modules += join({modules.empty() ? "" : ",", label, ":", entry_text(matrix)});
  }
  if (modules.empty()) return parts;
  parts.metadata.emplace(kMetadataKey, metadata_text(modules));
  return parts;
}

}  // namespace

Result<std::map<std::string, BsrEntry>> bsr_entries(const SafetensorsHeader& header) {
  constexpr std::string_view op = "bsr_entries";
  return guarded(op, [&] { return parse_entries(op, header); });
}

Result<BsrFile> read_bsr_file(const std::string& path) {
  constexpr std::string_view op = "read_bsr_file";
  return guarded(op, [&]() -> Result<BsrFile> {
    const auto source = open_file(op, path);
    return source.ok() ? read_all(op, **source) : source.status();
  });
}

Result<BsrFile> parse_bsr_file(std::span<const std::byte> file) {
  constexpr std::string_view op = "parse_bsr_file";
  return guarded(op, [&] { return read_all(op, *open_memory(file)); });
}

Status write_bsr_file(const std::string& path, const BsrFile& file) {
  constexpr std::string_view op = "write_bsr_file";
  return guarded(op, [&] {
    auto parts = take_apart(op, file);
    return parts.ok() ? save(op, path, std::move(parts.value().tensors), parts->metadata) : parts.status();
  });
}

Status write_dense_file(const std::string& path, const BsrFile& file) {
  constexpr std::string_view op = "write_dense_file";
  return guarded(op, [&] {
    auto parts = take_apart(op, file, Weights::dense);
    return parts.ok() ? save(op, path, std::move(parts.value().tensors), parts->metadata) : parts.status();
  });
}

Result<std::vector<std::byte>> serialize_bsr_file(const BsrFile& file) {
  constexpr std::string_view op = "serialize_bsr_file";
  return guarded(op, [&]() -> Result<std::vector<std::byte>> {
    auto parts = take_apart(op, file);
    return parts.ok() ? pack(op, std::move(parts.value().tensors), parts->metadata) : parts.status();
  });
}

}  // namespace rarefy
