// bsr-v1 files: exact round trips for every dtype, format and edge. Files that are wrong:
// bsr_file_hostile_test.cc.
#include "rarefy/bsr_file.h"

#include <gtest/gtest.h>

#include <random>

#include "bsr_files.h"

namespace rarefy {
namespace {

using test::bytes_of;
using test::counting_bytes;
using test::good_file;
using test::parse;
using test::TemporaryDirectory;

// A weight with about half of its blocks stored; values count, padding is zero.
BsrMatrix make_weight(const BsrShape& shape, DType dtype, unsigned seed, double density = 0.5) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> crow{0}, col;
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    for (std::int64_t j = 0; j < shape.col_count(); ++j) {
      if (std::uniform_real_distribution<>()(random) < density) col.push_back(static_cast<std::int32_t>(j));
    }
    crow.push_back(static_cast<std::int32_t>(col.size()));
  }
  BsrMatrix weight{Pattern::create(shape, crow, col).value(), dtype, {}};
  const PlanView& plan = weight.pattern.view();
  const std::size_t size = size_of(dtype);
  weight.values = counting_bytes(static_cast<std::size_t>(plan.shape.value_count()) * size);
  for (std::int64_t i = 0; i < shape.row_count(); ++i) {
    for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
      for (std::int64_t r = 0; r < shape.block_rows; ++r) {
        for (std::int64_t c = 0; c < shape.block_cols; ++c) {
          const bool inside =
              i * shape.block_rows + r < shape.rows && plan.col[e] * shape.block_cols + c < shape.cols;
          if (inside) continue;
          const std::int64_t at =
              (e * shape.block_size() + r * shape.block_cols + c) * static_cast<std::int64_t>(size);
          std::fill_n(weight.values.begin() + at, size, std::byte{0});
        }
      }
    }
  }
  return weight;
}

void expect_equal(const BsrFile& a, const BsrFile& b) {
  EXPECT_EQ(a.tensors, b.tensors);
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.weights.size(), b.weights.size());
  for (const auto& [name, weight] : a.weights) {
    ASSERT_TRUE(b.weights.contains(name)) << name;
    const FileWeight& other = b.weights.at(name);
    EXPECT_EQ(weight.format, other.format) << name;
    EXPECT_EQ(weight.x_dtype, other.x_dtype) << name;
    EXPECT_EQ(weight.pattern.shape(), other.pattern.shape()) << name;
    EXPECT_TRUE(std::ranges::equal(weight.pattern.crow_indices(), other.pattern.crow_indices())) << name;
    EXPECT_TRUE(std::ranges::equal(weight.pattern.col_indices(), other.pattern.col_indices())) << name;
    EXPECT_EQ(weight.dtype, other.dtype) << name;
    EXPECT_EQ(weight.values, other.values) << name;
  }
}

class BsrFileDTypeTest : public ::testing::TestWithParam<DType> {};

TEST_P(BsrFileDTypeTest, RoundTripsThroughBytesAndDisk) {
  BsrFile file;
  unsigned seed = 0;
  for (const auto& [rows, cols] : {std::pair{64, 48}, {5, 7}, {1, 1}, {33, 31}, {0, 7}, {5, 0}, {0, 0}}) {
    for (const auto& [r, c] : {std::pair{1, 1}, {2, 3}, {4, 1}, {16, 16}, {64, 64}}) {
      const std::string name = std::to_string(rows) + "x" + std::to_string(cols) + "." + std::to_string(r) +
                               "x" + std::to_string(c) + ".weight";
      file.weights.emplace(name, make_weight({rows, cols, r, c}, GetParam(), seed++));
      if (r * c == 1) {
        file.weights.emplace(
            std::string("csr.").append(name),
            FileWeight(make_weight({rows, cols, 1, 1}, GetParam(), seed), WeightFormat::csr, DType::f64));
        file.weights.emplace(
            std::string("bitmap.").append(name),
            FileWeight(make_weight({rows, cols, 1, 1}, GetParam(), seed), WeightFormat::bitmap));
      }
      file.weights.emplace("none." + name, make_weight({rows, cols, r, c}, GetParam(), seed, 0.0));
      file.weights.emplace("all." + name, make_weight({rows, cols, r, c}, GetParam(), seed, 1.0));
    }
  }
  file.tensors["bias"] = {SafetensorsDType::f32, {5}, counting_bytes(20)};
  file.tensors["lone.values"] = {SafetensorsDType::f8_e4m3, {2}, counting_bytes(2)};
  file.metadata["format"] = "pt";

  const auto bytes = serialize_bsr_file(file);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const auto parsed = parse_bsr_file(*bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  expect_equal(*parsed, file);
  EXPECT_EQ(*serialize_bsr_file(*parsed), *bytes);

  const TemporaryDirectory directory;
  ASSERT_TRUE(write_bsr_file(directory.file("w"), file).ok());
  const auto read = read_bsr_file(directory.file("w"));
  ASSERT_TRUE(read.ok()) << read.status().message();
  expect_equal(*read, file);
}

INSTANTIATE_TEST_SUITE_P(All, BsrFileDTypeTest, ::testing::ValuesIn(kAllDTypes),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(BsrFileTest, ReadsTheGoodFile) {
  const auto file = parse(good_file());
  ASSERT_TRUE(file.ok()) << file.status().message();
  const BsrMatrix& weight = file->weights.at("m.weight");
  EXPECT_EQ(weight.pattern.shape(), (BsrShape{5, 7, 2, 3, 4}));
  EXPECT_EQ(weight.values, good_file().tensors.at("m.weight.values").data);
  EXPECT_EQ(file->tensors.size(), 1U);
  EXPECT_EQ(file->metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
}

TEST(BsrFileTest, WritesTheGoodFile) {
  const SafetensorsFile good = good_file();
  const auto bytes = serialize_bsr_file(parse(good).value());
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(*parse_safetensors(*bytes), good);
}

TEST(BsrFileTest, EntriesComeFromTheHeaderAlone) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(write_safetensors(directory.file("w"), good_file()).ok());
  const auto entries = bsr_entries(read_safetensors_header(directory.file("w")).value());
  ASSERT_TRUE(entries.ok());
  EXPECT_EQ(entries->at("m.weight").shape, (BsrShape{5, 7, 2, 3, 4}));
  EXPECT_EQ(entries->at("m.weight").dtype, DType::f32);
}

// The weight of a CSR file: (2, 5), elements 1 and 4 of row 1.
SafetensorsFile csr_file(const std::string& entry) {
  SafetensorsFile file;
  file.tensors["m.weight.values"] = {SafetensorsDType::bf16, {2}, counting_bytes(4)};
  file.tensors["m.weight.crow_indices"] = {SafetensorsDType::i32, {3}, bytes_of<std::int32_t>({0, 0, 2})};
  file.tensors["m.weight.col_indices"] = {SafetensorsDType::i32, {2}, bytes_of<std::int32_t>({1, 4})};
  std::string metadata = R"({"format":"bsr-v1","modules":{"m.weight":)";
  file.metadata = {{"rarefy", metadata.append(entry).append(R"(},"version":"1"})")}};
  return file;
}

TEST(BsrFileTest, ReadsAndWritesCsr) {
  const auto file =
      parse(csr_file(R"({"format":"csr","shape":[2,5],"nnz":2,"dtype":"bf16","x_dtype":"f32"})"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const FileWeight& weight = file->weights.at("m.weight");
  EXPECT_EQ(weight.format, WeightFormat::csr);
  EXPECT_EQ(weight.x_dtype, DType::f32);
  EXPECT_EQ(weight.pattern.shape(), (BsrShape{2, 5, 1, 1, 2}));
  EXPECT_EQ(weight.values, counting_bytes(4));
  const auto again = parse_safetensors(serialize_bsr_file(*file).value());
  EXPECT_EQ(again->tensors.at("m.weight.values").shape, (std::vector<std::int64_t>{2}));
}

// Scales belong to their weight: they are not among the other tensors, but a tensor that is only called so
// is.
TEST(BsrFileTest, ReadsAndWritesInt8) {
  FileWeight weight(make_weight({4, 6, 2, 1}, DType::i8, 3), WeightFormat::int8, DType::f32);
  weight.scaling = Scaling::dynamic;
  weight.scales = {1, 2, 0.5F, 4};
  BsrFile file;
  file.weights.emplace("m.weight", weight);
  file.weights.emplace("plain.weight", make_weight({4, 6, 2, 1}, DType::f32, 3));
  file.tensors["plain.weight.scales"] = {SafetensorsDType::f32, {1}, counting_bytes(4)};
  const auto bytes = serialize_bsr_file(file);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const auto read = parse_bsr_file(*bytes);
  ASSERT_TRUE(read.ok()) << read.status().message();
  expect_equal(*read, file);
  EXPECT_EQ(read->weights.at("m.weight").scales, weight.scales);
  EXPECT_EQ(read->weights.at("m.weight").scaling, Scaling::dynamic);
  EXPECT_EQ(*serialize_bsr_file(*read), *bytes);
}

// "activations": "bf16" is for bf16 under f32, in BSR.
TEST(BsrFileTest, ReadsAndWritesWhatMayBeRounded) {
  BsrFile file;
  FileWeight weight(make_weight({4, 6, 2, 1}, DType::bf16, 3), WeightFormat::bsr, DType::f32);
  weight.rounds_x = true;
  file.weights.emplace("m.weight", weight);
  file.weights.emplace("exact.weight",
                       FileWeight(make_weight({4, 6, 2, 1}, DType::bf16, 3), WeightFormat::bsr, DType::f32));
  const auto bytes = serialize_bsr_file(file);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const auto read = parse_bsr_file(*bytes);
  ASSERT_TRUE(read.ok()) << read.status().message();
  expect_equal(*read, file);
  EXPECT_TRUE(read->weights.at("m.weight").rounds_x);
  EXPECT_FALSE(read->weights.at("exact.weight").rounds_x);
  EXPECT_EQ(*serialize_bsr_file(*read), *bytes);

  const auto refused = [](std::optional<DType> x_dtype, DType dtype, WeightFormat format) {
    BsrFile wrong;
    wrong.weights.emplace("w", FileWeight(make_weight({4, 6, 1, 1}, dtype, 3), format, x_dtype));
    wrong.weights.at("w").rounds_x = true;
    return serialize_bsr_file(wrong).status().message();
  };
  const std::string must = "must go with values in bf16 and an x_dtype of f32; got ";
  EXPECT_NE(refused(std::nullopt, DType::bf16, WeightFormat::bsr).find(must + "bf16 and none"),
            std::string::npos);
  EXPECT_NE(refused(DType::f32, DType::f16, WeightFormat::bsr).find(must + "f16 and f32"), std::string::npos);
  EXPECT_NE(refused(DType::f32, DType::bf16, WeightFormat::csr).find("must go with format bsr; got csr"),
            std::string::npos);
}

TEST(BsrFileTest, RefusesWrongActivations) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"activations":"int8","shape":[2,5],"block_shape":[1,1],"nnzb":2,"dtype":"bf16","x_dtype":"f32"})",
       "activations must be bf16; got \"int8\""},
      {R"({"activations":1,"shape":[2,5],"block_shape":[1,1],"nnzb":2,"dtype":"bf16","x_dtype":"f32"})",
       "activations must be bf16; got 1"},
      {R"({"activations":"bf16","shape":[2,5],"block_shape":[1,1],"nnzb":2,"dtype":"bf16"})",
       "values in bf16 and an x_dtype of f32; got bf16 and none"},
      {R"({"activations":"bf16","format":"csr","shape":[2,5],"nnz":2,"dtype":"bf16","x_dtype":"f32"})",
       "keys; got 6"},
  };
  for (const auto& [entry, message] : cases) {
    const auto file = parse(csr_file(entry));
    ASSERT_FALSE(file.ok()) << entry;
    EXPECT_NE(file.status().message().find(message), std::string::npos) << file.status().message();
  }
}

SafetensorsFile bitmap_file(const std::string& entry, std::vector<std::uint8_t> bits) {
  SafetensorsFile file;
  const auto bytes = std::as_bytes(std::span(bits));
  file.tensors["m.weight.values"] = {SafetensorsDType::bf16, {4}, counting_bytes(8)};
  file.tensors["m.weight.bitmap"] = {
      SafetensorsDType::u8, {2, static_cast<std::int64_t>(bits.size()) / 2}, {bytes.begin(), bytes.end()}};
  file.metadata["rarefy"] = R"({"format":"bsr-v1","version":"1","modules":{"m.weight":)" + entry + "}}";
  return file;
}

TEST(BsrFileTest, ReadsBitmaps) {
  const std::string entry = R"({"format":"bitmap","shape":[2,10],"nnz":4,"dtype":"bf16"})";
  const auto file = parse(bitmap_file(entry, {0x81, 0x02, 0x10, 0x00}));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const FileWeight& weight = file->weights.at("m.weight");
  EXPECT_EQ(weight.format, WeightFormat::bitmap);
  EXPECT_EQ(weight.pattern.shape(), (BsrShape{2, 10, 1, 1, 4}));
  EXPECT_TRUE(std::ranges::equal(weight.pattern.crow_indices(), std::vector{0, 3, 4}));
  EXPECT_TRUE(std::ranges::equal(weight.pattern.col_indices(), std::vector{0, 7, 9, 4}));
  EXPECT_TRUE(file->tensors.empty());
}

TEST(BsrFileTest, RefusesWrongBitmaps) {
  const std::vector<std::uint8_t> good{0x81, 0x02, 0x10, 0x00};
  const std::tuple<const char*, std::vector<std::uint8_t>, const char*> cases[] = {
      {R"({"format":"bitmap","shape":[2,10],"nnz":4,"dtype":"bf16"})",
       {0x81, 0x02, 0x10, 0x08},
       "bits past column 10 must be 0; got bitmap[1, 1] with bit 3"},
      {R"({"format":"bitmap","shape":[2,10],"nnz":4,"dtype":"bf16"})",
       {0x81, 0x02, 0x11, 0x00},
       "the bitmap must have 4 bits that are 1, as the metadata says; got 5"},
      {R"({"format":"bitmap","shape":[2,10],"nnz":5,"dtype":"bf16"})", good, "must be BF16 [5]"},
      {R"({"format":"bitmap","shape":[2,17],"nnz":4,"dtype":"bf16"})", good, "must be U8 [2,3]"},
      {R"({"format":"bitmap","shape":[3,10],"nnz":4,"dtype":"bf16"})", good, "must be U8 [3,2]"},
      {R"({"format":"csr","shape":[2,10],"nnz":4,"dtype":"bf16"})", good, "must have the tensor"},
      {R"({"format":"bitmap","shape":[2,10],"block_shape":[1,1],"nnz":4,"dtype":"bf16"})", good,
       "3 keys; got 5"},
  };
  for (const auto& [entry, bits, message] : cases) {
    const auto file = parse(bitmap_file(entry, bits));
    ASSERT_FALSE(file.ok()) << entry;
    EXPECT_NE(file.status().message().find(message), std::string::npos) << file.status().message();
  }
  // Rows without bytes: a few bytes of metadata cannot ask for gigabytes.
  SafetensorsFile empty;
  empty.tensors["m.weight.values"] = {SafetensorsDType::f32, {0}, {}};
  empty.tensors["m.weight.bitmap"] = {SafetensorsDType::u8, {2000000000, 0}, {}};
  empty.metadata["rarefy"] =
      R"({"format":"bsr-v1","version":"1","modules":{"m.weight":{"format":"bitmap","shape":[2000000000,0],)"
      R"("nnz":0,"dtype":"f32"}}})";
  const auto file = parse(empty);
  ASSERT_FALSE(file.ok());
  EXPECT_NE(file.status().message().find(
                "at most 16777216 block columns (and rows of bitmaps) in all; got 2000000000"),
            std::string::npos)
      << file.status().message();
}

TEST(BsrFileTest, RefusesWrongCsr) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"format":"csc","shape":[2,5],"nnz":2,"dtype":"bf16"})",
       "format must be bsr, csr, int8 or bitmap; got \"csc\""},
      {R"({"format":7,"shape":[2,5],"nnz":2,"dtype":"bf16"})",
       "format must be bsr, csr, int8 or bitmap; got 7"},
      {R"({"format":"csr","shape":[2,5],"nnzb":2,"dtype":"bf16"})", "must have \"nnz\""},
      {R"({"format":"csr","shape":[2,5],"nnz":3,"dtype":"bf16"})", "must be BF16 [3]"},
      {R"({"format":"csr","shape":[2,5],"nnz":2,"dtype":"bf16","x_dtype":"f8"})", "x_dtype must be"},
      {R"({"format":"csr","shape":[2,5],"block_shape":[1,1],"nnz":2,"dtype":"bf16"})", "3 keys; got 5"},
      {R"({"shape":[2,5],"block_shape":[1,1],"nnzb":2,"dtype":"bf16"})", "must be BF16 [2,1,1]"},
      {R"({"format":"csr","shape":[2,4],"nnz":2,"dtype":"bf16"})", "col_indices[1]=4 out of range"},
  };
  for (const auto& [entry, message] : cases) {
    const auto file = parse(csr_file(entry));
    ASSERT_FALSE(file.ok()) << entry;
    EXPECT_NE(file.status().message().find(message), std::string::npos) << file.status().message();
  }
}

TEST(BsrFileTest, TakesInt64Indices) {
  SafetensorsFile file = good_file();
  file.tensors["m.weight.crow_indices"] = {SafetensorsDType::i64, {4}, bytes_of<std::int64_t>({0, 2, 2, 4})};
  file.tensors["m.weight.col_indices"] = {SafetensorsDType::i64, {4}, bytes_of<std::int64_t>({0, 2, 1, 2})};
  const auto wide = parse(file);
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  expect_equal(*wide, parse(good_file()).value());
}

TEST(BsrFileTest, WritesWeightsAsDenseOnes) {
  const TemporaryDirectory directory;
  for (const auto& [rows, cols] : {std::pair{5, 7}, {33, 300}, {0, 7}, {5, 0}, {700, 1000}}) {
    for (const auto& [r, c] : {std::pair{1, 1}, {2, 3}, {64, 64}}) {
      BsrFile file;
      file.tensors["bias"] = {SafetensorsDType::f32, {5}, counting_bytes(20)};
      file.metadata["format"] = "pt";
      file.weights.emplace("w", make_weight({rows, cols, r, c}, DType::f32, 1));
      SafetensorsFile dense{file.tensors, file.metadata};
      StoredTensor& w = dense.tensors["w"];
      w = {SafetensorsDType::f32, {rows, cols}, {}};
      w.data.resize(static_cast<std::size_t>(rows) * cols * sizeof(float));
      ASSERT_TRUE(
          bsr_to_dense(file.weights.at("w").view(), {w.data.data(), DType::f32, rows, cols, cols}).ok());
      ASSERT_TRUE(write_dense_file(directory.file("w"), file).ok());
      const auto read = read_safetensors(directory.file("w"));
      ASSERT_TRUE(read.ok()) << read.status().message();
      EXPECT_EQ(*read, dense) << rows << 'x' << cols << " in blocks of " << r << 'x' << c;
    }
  }
}

TEST(BsrFileTest, PlainFileHasNoWeights) {
  SafetensorsFile file;
  file.tensors["m.weight"] = {SafetensorsDType::f32, {2, 2}, counting_bytes(16)};
  const auto plain = parse(file);
  ASSERT_TRUE(plain.ok());
  EXPECT_TRUE(plain->weights.empty());
  EXPECT_EQ(plain->tensors, file.tensors);
  EXPECT_EQ(*serialize_bsr_file(*plain), *serialize_safetensors(file));
}

}  // namespace
}  // namespace rarefy
