// Keys and values of the metadata "rarefy", and the tensors that it promises.
#include "io/bsr_entry.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "core/arguments.h"
#include "io/json.h"
#include "io/tensors.h"
#include "rarefy/bitmap.h"
#include "rarefy/version.h"

namespace rarefy {

namespace bsr_v1 {

namespace {

constexpr std::string_view kFormat = "bsr-v1";

// A plan has one word per block column, stored blocks or not. Past this many in all weights together,
// the file must be as large itself, so that a few bytes of metadata cannot ask for gigabytes.
constexpr std::int64_t kMaxFreeColumns = std::int64_t{1} << 24;

// What formats differ in: a new one is a row, if it is values on a pattern of blocks. Keys of an entry are
// sorted, as they are written; "format" (BSR without it) and "x_dtype" may be there, too, and in BSR
// "activations": "bf16", where x may be rounded.
struct FormatRow {
  WeightFormat format;
  std::string_view name;
  std::span<const char* const> keys;
  const char* count;  // the key that says how much is stored
  std::vector<std::int64_t> (*values)(const BsrShape&);
};

constexpr const char* kFormatKey = "format";
constexpr const char* kXDType = "x_dtype";
constexpr const char* kBsrKeys[] = {"block_shape", "dtype", "nnzb", "shape"};
constexpr const char* kCsrKeys[] = {"dtype", "nnz", "shape"};
constexpr const char* kActivations = "activations";
constexpr std::string_view kRounded = "bf16";
constexpr const char* kInt8Keys[] = {kActivations, "block_shape", "dtype", "nnzb", "shape"};
constexpr FormatRow kFormats[] = {
    {WeightFormat::bsr, "bsr", kBsrKeys, "nnzb",
     [](const BsrShape& shape) {
       return std::vector{shape.nnzb, shape.block_rows, shape.block_cols};
     }},
    {WeightFormat::csr, "csr", kCsrKeys, "nnz",
     [](const BsrShape& shape) { return std::vector{shape.nnzb}; }},
    {WeightFormat::int8, "int8", kInt8Keys, "nnzb",
     [](const BsrShape& shape) {
       return std::vector{shape.nnzb, shape.block_rows, shape.block_cols};
     }},
    {WeightFormat::bitmap, "bitmap", kCsrKeys, "nnz",
     [](const BsrShape& shape) { return std::vector{shape.nnzb}; }},
};

// What x becomes for scaled values, as files say it.
constexpr std::pair<std::string_view, Scaling> kScalings[] = {{"int8", Scaling::dynamic},
                                                              {"float", Scaling::weight}};

const FormatRow& row_of(WeightFormat format) { return kFormats[static_cast<std::size_t>(format)]; }

Status check_keys(std::string_view op, std::string_view what, const JsonObject& value,
                  std::span<const char* const> keys, std::size_t optional_keys = 0) {
  for (const char* key : keys) {
    if (!value.contains(key)) return invalid(op, cat(what, " must have \"", key, '"'), "none");
  }
  if (value.size() != keys.size() + optional_keys) {
    return invalid(op, cat(what, " must have ", keys.size(), " keys"), cat(value.size()));
  }
  return {};
}

Result<std::array<std::int64_t, 2>> parse_pair(std::string_view op, const char* key, const JsonValue& value) {
  // Sizes beyond int32 are refused by check_shape; beyond int64 they would turn negative first.
  const JsonNumbers* numbers = value.numbers();
  if (numbers == nullptr || numbers->size() != 2 || (*numbers)[0] > INT64_MAX || (*numbers)[1] > INT64_MAX) {
    return invalid(op, cat(key, " must be two integers below 2^63"), value.text());
  }
  return std::array{static_cast<std::int64_t>((*numbers)[0]), static_cast<std::int64_t>((*numbers)[1])};
}

Result<DType> parse_dtype_key(std::string_view op, const char* key, const JsonValue& value) {
  const auto known = value.string() != nullptr ? parse_dtype(*value.string()) : std::nullopt;
  if (!known) return invalid(op, cat(key, " must be f64, f32, bf16, f16 or i8"), value.text());
  return *known;
}

Result<WeightFormat> parse_format(std::string_view op, const JsonObject& entry) {
  if (!entry.contains(kFormatKey)) return WeightFormat::bsr;
  const JsonValue& value = *entry.at(kFormatKey);
  for (const FormatRow& row : kFormats) {
    if (value.string() != nullptr && *value.string() == row.name) return row.format;
  }
  return error(StatusCode::unsupported, op, "format must be bsr, csr, int8 or bitmap", value.text());
}

// What an entry of format int8 says beyond others.
Status parse_scaling(std::string_view op, const JsonObject& value, BsrEntry& entry) {
  const JsonValue& activations = *value.at(kActivations);
  for (const auto& [text, scaling] : kScalings) {
    if (activations.string() != nullptr && *activations.string() == text) entry.scaling = scaling;
  }
  if (entry.scaling == Scaling::none) {
    return invalid(op, cat(kActivations, " must be int8 or float"), activations.text());
  }
  return check_int8(op, entry);
}

Result<BsrEntry> parse_entry(std::string_view op, const JsonValue& entry_value) {
  if (entry_value.object() == nullptr) {
    return invalid(op, "the metadata entry must be an object", entry_value.type_name());
  }
  const JsonObject& value = *entry_value.object();
  const auto format = parse_format(op, value);
  if (!format.ok()) return format.status();
  const FormatRow& row = row_of(*format);
  const bool is_bsr = *format == WeightFormat::bsr;
  const std::size_t optional_keys =
      value.count(kFormatKey) + value.count(kXDType) + (is_bsr ? value.count(kActivations) : 0);
  if (Status status = check_keys(op, "the metadata entry", value, row.keys, optional_keys); !status.ok()) {
    return status;
  }
  const auto shape = parse_pair(op, "shape", *value.at("shape"));
  if (!shape.ok()) return shape.status();
  std::array<std::int64_t, 2> block{1, 1};
  if (value.contains("block_shape")) {
    const auto parsed = parse_pair(op, "block_shape", *value.at("block_shape"));
    if (!parsed.ok()) return parsed.status();
    block = *parsed;
  }
  const JsonValue& count = *value.at(row.count);
  if (count.number() == nullptr || *count.number() > INT64_MAX) {
    return invalid(op, cat(row.count, " must be an integer below 2^63"), count.text());
  }
  const auto dtype = parse_dtype_key(op, "dtype", *value.at("dtype"));
  if (!dtype.ok()) return dtype.status();
  const BsrShape sizes{(*shape)[0], (*shape)[1], block[0], block[1],
                       static_cast<std::int64_t>(*count.number())};
  BsrEntry entry{sizes, *dtype, *format, std::nullopt, Scaling::none};
  if (value.contains(kXDType)) {
    const auto x_dtype = parse_dtype_key(op, kXDType, *value.at(kXDType));
    if (!x_dtype.ok()) return x_dtype.status();
    entry.x_dtype = *x_dtype;
  }
  if (entry.format == WeightFormat::int8) {
    if (Status status = parse_scaling(op, value, entry); !status.ok()) return status;
  }
  if (is_bsr && value.contains(kActivations)) {
    const JsonValue& activations = *value.at(kActivations);
    if (activations.string() == nullptr || *activations.string() != kRounded) {
      return invalid(op, cat(kActivations, " must be ", kRounded), activations.text());
    }
    entry.rounds_x = true;
  }
  if (Status status = check_rounding(op, entry.rounds_x, entry.dtype, entry.x_dtype); !status.ok()) {
    return status;
  }
  if (Status status = check_shape(op, entry.shape); !status.ok()) return status;
  return entry;
}

std::string describe(SafetensorsDType dtype, const std::vector<std::int64_t>& shape) {
  return cat(name(dtype), ' ', json_array(shape));
}

// The piece must be there, with one of these dtypes and this shape.
Status check_piece(std::string_view op, const SafetensorsHeader& header, const std::string& tensor,
                   std::initializer_list<SafetensorsDType> dtypes, const std::vector<std::int64_t>& shape) {
  const auto found = header.tensors.find(tensor);
  if (found == header.tensors.end()) {
    return invalid(op, cat("the file must have the tensor ", quote(tensor)), "none");
  }
  const StoredTensorInfo& info = found->second;
  if (std::find(dtypes.begin(), dtypes.end(), info.dtype) == dtypes.end() || info.shape != shape) {
    return invalid(
        op, cat(quote(tensor), " must be ", describe(*dtypes.begin(), shape), ", as the metadata says"),
        info.shape.size() > 8 ? cat(info.shape.size(), " dimensions") : describe(info.dtype, info.shape));
  }
  return {};
}

Status check_entry(std::string_view op, const SafetensorsHeader& header, const std::string& weight,
                   const BsrEntry& entry) {
  const BsrShape& shape = entry.shape;
  if (header.tensors.contains(weight)) {
    return invalid(op, "a weight must be sparse or dense", "a dense tensor of the same name");
  }
  const std::vector<std::int64_t> values = values_shape(entry.format, shape);
  if (Status status = check_piece(op, header, piece(weight, kValues), {to_safetensors(entry.dtype)}, values);
      !status.ok()) {
    return status;
  }
  if (entry.format == WeightFormat::int8) {
    if (Status status =
            check_piece(op, header, piece(weight, kScales), {SafetensorsDType::f32}, {shape.rows});
        !status.ok()) {
      return status;
    }
  }
  if (entry.format == WeightFormat::bitmap) {
    return check_piece(op, header, piece(weight, kBitmap), {SafetensorsDType::u8},
                       {shape.rows, mask_row_bytes(shape.cols)});
  }
  constexpr auto i32 = SafetensorsDType::i32, i64 = SafetensorsDType::i64;
  if (Status status = check_piece(op, header, piece(weight, kCrow), {i32, i64}, {shape.row_count() + 1});
      !status.ok()) {
    return status;
  }
  return check_piece(op, header, piece(weight, kCol), {i32, i64}, {shape.nnzb});
}

}  // namespace

std::string scoped(std::string_view op, std::string_view weight) { return join({op, " ", quote(weight)}); }

std::string piece(std::string_view weight, std::string_view suffix) { return join({weight, suffix}); }

std::optional<std::string_view> owner_of_index(std::string_view tensor) {
  for (const std::string_view suffix : {kCrow, kCol, kBitmap}) {
    if (tensor.ends_with(suffix)) return tensor.substr(0, tensor.size() - suffix.size());
  }
  return std::nullopt;
}

std::vector<std::int64_t> values_shape(WeightFormat format, const BsrShape& shape) {
  return row_of(format).values(shape);
}

Status check_int8(std::string_view op, const BsrEntry& entry) {
  if (entry.dtype != DType::i8) return invalid(op, "dtype of format int8 must be i8", name(entry.dtype));
  const DType in = entry.x_dtype.value_or(DType::i8);
  if (in == DType::f32 || in == DType::bf16 || in == DType::f16) return {};
  return invalid(op, cat(kXDType, " of format int8 must be f32, bf16 or f16"),
                 entry.x_dtype ? name(in) : "none");
}

Status check_rounding(std::string_view op, bool rounds_x, DType dtype, std::optional<DType> x_dtype) {
  if (!rounds_x || (dtype == DType::bf16 && x_dtype == DType::f32)) return {};
  return invalid(op, "activations in bf16 must go with values in bf16 and an x_dtype of f32",
                 cat(name(dtype), " and ", x_dtype ? name(*x_dtype) : "none"));
}

Result<Entries> parse_entries(std::string_view op, const SafetensorsHeader& header) {
  Entries entries;
  if (const auto text = header.metadata.find(std::string(kMetadataKey)); text != header.metadata.end()) {
    const auto parsed = parse_strict_json(op, "metadata \"rarefy\"", text->second, 4);
    if (!parsed.ok()) return parsed.status();
    const JsonObject& root = *parsed;
    constexpr const char* kRootKeys[] = {"format", "version", "modules"};
    if (Status status = check_keys(op, "metadata \"rarefy\"", root, kRootKeys); !status.ok()) {
      return status;
    }
    const JsonValue& format = *root.at("format");
    if (format.string() == nullptr || *format.string() != kFormat) {
      return error(StatusCode::unsupported, op, "metadata \"rarefy\" must be of format \"bsr-v1\"",
                   format.text());
    }
    const JsonObject* modules = root.at("modules")->object();
    if (root.at("version")->string() == nullptr || modules == nullptr) {
      return invalid(op, "metadata \"rarefy\" must have a version string and a modules object",
                     cat(root.at("version")->type_name(), " and ", root.at("modules")->type_name()));
    }
    const std::int64_t most_columns = std::max(kMaxFreeColumns, header.file_bytes);
    std::int64_t columns = 0;  // at most 2^31 for each entry, of which a header has at most 10^8 bytes
    for (const auto& [weight, value] : *modules) {
      const std::string scope = scoped(op, weight);
      const auto entry = parse_entry(scope, *value);
      if (!entry.ok()) return entry.status();
      if (Status status = check_entry(scope, header, weight, *entry); !status.ok()) return status;
      columns += entry->shape.col_count();
      // A bitmap of no columns has rows without any bytes.
      if (entry->format == WeightFormat::bitmap) columns += entry->shape.row_count();
      if (columns > most_columns) {
        return invalid(scope,
                       cat("the weights of a file of ", header.file_bytes, " bytes may have at most ",
                           most_columns, " block columns (and rows of bitmaps) in all"),
                       cat(columns, " with this one"));
      }
      entries.emplace(weight, *entry);
    }
  }
  for (const auto& [tensor, info] : header.tensors) {
    const auto owner = owner_of_index(tensor);
    if (owner && !entries.contains(std::string(*owner))) {
      return invalid(op, cat("metadata \"rarefy\" must describe the weight of ", quote(tensor)),
                     "no entry for it");
    }
  }
  return entries;
}

std::string entry_text(const FileWeight& weight) {
  const BsrShape& shape = weight.pattern.shape();
  std::string text = "{";
  const auto add = [&](std::string_view key, std::string_view value) {
    text += join({text.size() > 1 ? "," : "", "\"", key, "\":", value});
  };
  const auto quoted = [](std::string_view word) { return join({"\"", word, "\""}); };
  for (const auto& [word, scaling] : kScalings) {
    if (weight.scaling == scaling) add(kActivations, quoted(word));
  }
  if (weight.rounds_x) add(kActivations, quoted(kRounded));
  const bool is_bsr = weight.format == WeightFormat::bsr;
  if (weight.format == WeightFormat::bsr || weight.format == WeightFormat::int8)
    add("block_shape", json_array({shape.block_rows, shape.block_cols}));
  add("dtype", quoted(name(weight.dtype)));
  if (!is_bsr) add(kFormatKey, quoted(name(weight.format)));
  add(row_of(weight.format).count, std::to_string(shape.nnzb));
  add("shape", json_array({shape.rows, shape.cols}));
  if (weight.x_dtype) add(kXDType, quoted(name(*weight.x_dtype)));
  return text += '}';
}

std::string metadata_text(std::string_view modules) {
  return join({"{\"format\":\"", kFormat, "\",\"modules\":{", modules, "},\"version\":\"", version(), "\"}"});
}

}  // namespace bsr_v1

std::string_view name(WeightFormat format) { return bsr_v1::row_of(format).name; }

}  // namespace rarefy
