// What the metadata "rarefy" of a file of bsr-v1 says of its weights: read, checked against the tensors
// beside it, and written.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rarefy/bsr_file.h"

namespace rarefy::bsr_v1 {

inline constexpr std::string_view kMetadataKey = "rarefy";
inline constexpr std::string_view kValues = ".values";
inline constexpr std::string_view kCrow = ".crow_indices";
inline constexpr std::string_view kCol = ".col_indices";
inline constexpr std::string_view kScales = ".scales";
inline constexpr std::string_view kBitmap = ".bitmap";  // in place of the indices

using Entries = std::map<std::string, BsrEntry>;

// "[read_bsr_file "M.weight"] …": errors of the core's checks then name the weight as well.
std::string scoped(std::string_view op, std::string_view weight);
// The tensor that holds a piece of a weight.
std::string piece(std::string_view weight, std::string_view suffix);
// The weight that an index tensor belongs to, going by its name.
std::optional<std::string_view> owner_of_index(std::string_view tensor);
// The shape of a weight's values as a tensor.
std::vector<std::int64_t> values_shape(WeightFormat format, const BsrShape& shape);

Status check_int8(std::string_view op, const BsrEntry& entry);
Status check_rounding(std::string_view op, bool rounds_x, DType dtype, std::optional<DType> x_dtype);

// None where the file has no such metadata.
Result<Entries> parse_entries(std::string_view op, const SafetensorsHeader& header);
// The entry of a weight, keys sorted; and all of them, "name":{…},…, as the metadata's value.
std::string entry_text(const FileWeight& weight);
std::string metadata_text(std::string_view modules);

}  // namespace rarefy::bsr_v1
