// A small right bsr-v1 file, for the tests that read it and those that spoil it.
#pragma once

#include "rarefy/bsr_file.h"
#include "raw_file.h"

namespace rarefy::test {

// A file of one weight "m.weight", (5, 7) in blocks of (2, 3), so 3 × 3 blocks, and a bias:
//   block row 0: columns 0, 2      block row 1: none      block row 2 (one row of padding): 1, 2 (two
//   columns)
inline constexpr char kMetadata[] =
    R"({"format":"bsr-v1","modules":{"m.weight":{"block_shape":[2,3],"dtype":"f32","nnzb":4,"shape":[5,7]}},)"
    R"("version":"0.1.0"})";

inline SafetensorsFile good_file() {
  std::vector<float> values(24);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
  for (const std::size_t padding : {7, 8, 10, 11, 15, 16, 17, 19, 20, 21, 22, 23}) values[padding] = 0;
  SafetensorsFile file;
  file.tensors["m.weight.values"] = {SafetensorsDType::f32, {4, 2, 3}, bytes_of(values)};
  file.tensors["m.weight.crow_indices"] = {SafetensorsDType::i32, {4}, bytes_of<std::int32_t>({0, 2, 2, 4})};
  file.tensors["m.weight.col_indices"] = {SafetensorsDType::i32, {4}, bytes_of<std::int32_t>({0, 2, 1, 2})};
  file.tensors["m.bias"] = {SafetensorsDType::f32, {5}, counting_bytes(20)};
  file.metadata = {{"format", "pt"}, {"rarefy", kMetadata}};
  return file;
}

inline Result<BsrFile> parse(const SafetensorsFile& file) {
  return parse_bsr_file(serialize_safetensors(file).value());
}

}  // namespace rarefy::test
