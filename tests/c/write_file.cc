// The file that the C program reads: two weights, blocks of f32 and scaled int8, and a bias.
#include <array>
#include <cstring>

#include "rarefy/rarefy.h"

extern "C" int write_test_file(const char* path) {
  const std::array<std::int32_t, 3> crow{0, 1, 2};
  const std::array<std::int32_t, 2> col{1, 0};
  const auto pattern = rarefy::Pattern::create({4, 4, 2, 2, 0}, crow, col);
  if (!pattern.ok()) return 1;
  const std::array<float, 8> values{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<std::byte> floats(sizeof values), ints(8);
  std::memcpy(floats.data(), values.data(), sizeof values);
  for (std::size_t i = 0; i < 8; ++i) ints[i] = static_cast<std::byte>(i + 1);
  rarefy::BsrFile file;
  file.weights.emplace("a.weight", rarefy::BsrMatrix{*pattern, rarefy::DType::f32, floats});
  rarefy::FileWeight scaled(rarefy::BsrMatrix{*pattern, rarefy::DType::i8, ints}, rarefy::WeightFormat::int8,
                            rarefy::DType::f32);
  scaled.scaling = rarefy::Scaling::weight;
  scaled.scales = {0.5F, 0.5F, 2.0F, 2.0F};
  file.weights.emplace("b.weight", scaled);
  rarefy::StoredTensor bias{rarefy::SafetensorsDType::f32, {4}, std::vector<std::byte>(16)};
  const std::array<float, 4> ones{1, 1, 1, 1};
  std::memcpy(bias.data.data(), ones.data(), sizeof ones);
  file.tensors.emplace("a.bias", bias);
  file.tensors.emplace("steps",
                       rarefy::StoredTensor{rarefy::SafetensorsDType::i64, {}, std::vector<std::byte>(8)});
  return rarefy::write_bsr_file(path, file).ok() ? 0 : 1;
}
