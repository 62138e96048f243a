// Every way in which metadata, pattern and values of a bsr-v1 file can disagree: refused by name, by the
// reader and by the writer.
#include <gtest/gtest.h>

#include <functional>

#include "bsr_files.h"

namespace rarefy {
namespace {

using test::bytes_of;
using test::counting_bytes;
using test::good_file;
using test::kMetadata;
using test::parse;

// One change to the good file, and what the message must then hold.
struct Hostile {
  std::string name;
  std::function<void(SafetensorsFile&)> change;
  std::string message;

  friend std::ostream& operator<<(std::ostream& out, const Hostile& hostile) { return out << hostile.name; }
};

auto metadata(std::string text) {
  return [text = std::move(text)](SafetensorsFile& file) { file.metadata["rarefy"] = text; };
}

auto replaced(std::string_view from, std::string_view to) {
  std::string text = kMetadata;
  const std::size_t at = text.find(from);
  if (at == text.npos) throw std::logic_error("no such text in the metadata: " + std::string(from));
  return metadata(text.replace(at, from.size(), to));
}

auto without(std::string tensor) {
  return [tensor = std::move(tensor)](SafetensorsFile& file) { file.tensors.erase(tensor); };
}

auto with(std::string tensor, StoredTensor value) {
  return [tensor = std::move(tensor), value = std::move(value)](SafetensorsFile& file) {
    file.tensors[tensor] = value;
  };
}

template <class T>
auto crow(SafetensorsDType dtype, std::vector<T> indices) {
  return with("m.weight.crow_indices",
              {dtype, {static_cast<std::int64_t>(indices.size())}, bytes_of(indices)});
}

template <class T>
auto col(SafetensorsDType dtype, std::vector<T> indices) {
  return with("m.weight.col_indices",
              {dtype, {static_cast<std::int64_t>(indices.size())}, bytes_of(indices)});
}

auto value_at(std::size_t index, float value) {
  return [=](SafetensorsFile& file) {
    std::memcpy(file.tensors["m.weight.values"].data.data() + index * sizeof value, &value, sizeof value);
  };
}

// No stored blocks and no block rows to speak of, yet a plan of 8 GiB.
void ask_for_gigabytes(SafetensorsFile& file) {
  file.tensors["m.weight.values"] = {SafetensorsDType::f32, {0, 1, 1}, {}};
  crow<std::int32_t>(SafetensorsDType::i32, {0})(file);
  col<std::int32_t>(SafetensorsDType::i32, {})(file);
  file.metadata["rarefy"] = R"({"format":"bsr-v1","version":"1","modules":{"m.weight":)"
                            R"({"shape":[0,2147483647],"block_shape":[1,1],"nnzb":0,"dtype":"f32"}}})";
}

// The same in many small helpings: 200 weights of 2^20 block columns and no rows, in a file of 60 KB.
void ask_for_gigabytes_in_all(SafetensorsFile& file) {
  std::string modules;
  for (int i = 0; i < 200; ++i) {
    const std::string name = "w" + std::to_string(i);
    file.tensors[name + ".values"] = {SafetensorsDType::f32, {0, 1, 1}, {}};
    file.tensors[name + ".crow_indices"] = {SafetensorsDType::i32, {1}, bytes_of<std::int32_t>({0})};
    file.tensors[name + ".col_indices"] = {SafetensorsDType::i32, {0}, {}};
    modules += (i == 0 ? "\"" : ",\"") + name +
               R"(":{"shape":[0,1048576],"block_shape":[1,1],"nnzb":0,"dtype":"f32"})";
  }
  file.metadata["rarefy"] = R"({"format":"bsr-v1","version":"1","modules":{)" + modules + "}}";
}

// Four blocks of 2^60 elements each.
void block_product_overflows(SafetensorsFile& file) {
  file.metadata["rarefy"] =
      R"({"format":"bsr-v1","version":"1","modules":{"m.weight":)"
      R"({"shape":[2147483647,2147483647],"block_shape":[1073741824,1073741824],"nnzb":4,"dtype":"f32"}}})";
}

std::vector<Hostile> hostile_files() {
  constexpr auto i32 = SafetensorsDType::i32, i64 = SafetensorsDType::i64;
  using I32 = std::int32_t;
  using I64 = std::int64_t;
  return {
      // metadata
      {"NoMetadata", [](SafetensorsFile& file) { file.metadata.clear(); }, "no entry for it"},
      {"MetadataEmpty", metadata(""), "must start with '{'; got nothing"},
      {"MetadataNotJson", metadata("{bsr}"), "syntax error"},
      {"MetadataCutShort", metadata(std::string(kMetadata).substr(0, 60)), "syntax error"},
      {"MetadataDeep", metadata("{\"modules\":{\"a\":{\"b\":{\"c\":{\"d\":{}}}}}}"), "more than 4 levels"},
      {"MetadataNul", metadata(std::string(kMetadata) + '\0'), "a NUL"},
      {"MetadataList", metadata("[]"), "must start with '{'; got byte 91"},
      {"OtherFormat", replaced("bsr-v1", "bsr-v2"), "format \"bsr-v1\""},
      {"FormatNumber", replaced("\"bsr-v1\"", "1"), "format \"bsr-v1\""},
      {"NoFormat", replaced("\"format\":\"bsr-v1\",", ""), "must have \"format\""},
      {"NoVersion", replaced(",\"version\":\"0.1.0\"", ""), "must have \"version\""},
      {"VersionNumber", replaced("\"0.1.0\"", "1"), "a version string"},
      {"ModulesList", metadata(R"({"format":"bsr-v1","version":"1","modules":[]})"), "a modules object"},
      {"UnknownKey", replaced("{\"format\"", "{\"x\":\"y\",\"format\""), "must have 3 keys; got 4"},
      {"NoModules", metadata(R"({"format":"bsr-v1","version":"1","modules":{}})"), "no entry for it"},
      {"OtherModule", replaced("m.weight", "n.weight"), "must have the tensor \"n.weight.values\""},
      {"DuplicateModule", replaced("\"modules\":{", "\"modules\":{\"m.weight\":{},"),
       "the key \"m.weight\" twice"},
      {"EntryString", metadata(R"({"format":"bsr-v1","version":"1","modules":{"m.weight":"x"}})"),
       "an object"},
      {"NoShape", replaced(",\"shape\":[5,7]", ""), "must have \"shape\""},
      {"NoBlockShape", replaced("\"block_shape\":[2,3],", ""), "must have \"block_shape\""},
      {"NoNnzb", replaced("\"nnzb\":4,", ""), "must have \"nnzb\""},
      {"NoDType", replaced("\"dtype\":\"f32\",", ""), "must have \"dtype\""},
      {"UnknownEntryKey", replaced("\"nnzb\":4,", "\"nnzb\":4,\"scales\":\"s\","), "must have 4 keys; got 5"},
      {"ShapeOneNumber", replaced("[5,7]", "[5]"), "shape must be two integers"},
      {"ShapeThreeNumbers", replaced("[5,7]", "[5,7,1]"), "shape must be two integers"},
      {"ShapeString", replaced("[5,7]", "\"5x7\""), "shape must be two integers"},
      {"ShapeNegative", replaced("[5,7]", "[-5,7]"), "a negative number"},
      {"ShapeFraction", replaced("[5,7]", "[5.5,7]"), "64-bit integer"},
      {"ShapeBeyond63Bits", replaced("[5,7]", "[9223372036854775813,7]"), "below 2^63"},
      {"ShapeBeyondInt32", replaced("[5,7]", "[5,4294967303]"), "at most 2147483647"},
      {"BlockZero", replaced("[2,3]", "[0,3]"), "block_shape must be at least 1"},
      {"BlockBeyondInt32", replaced("[2,3]", "[2,4294967299]"), "at most 2147483647"},
      {"BlockProductOverflows", block_product_overflows, "the values must fit in memory"},
      {"NnzbString", replaced("\"nnzb\":4", "\"nnzb\":\"4\""), "nnzb must be an integer"},
      {"NnzbTooSmall", replaced("\"nnzb\":4", "\"nnzb\":3"), "must be F32 [3,2,3]"},
      {"NnzbTooLarge", replaced("\"nnzb\":4", "\"nnzb\":5"), "must be F32 [5,2,3]"},
      {"NnzbOverAllBlocks", replaced("\"nnzb\":4", "\"nnzb\":10"), "[0, 9]; got 10"},
      {"NnzbBeyond63Bits", replaced("\"nnzb\":4", "\"nnzb\":18446744073709551615"),
       "nnzb must be an integer"},
      {"UnknownDType", replaced("f32", "f31"), "got \"f31\""},
      {"OtherDType", replaced("f32", "f16"), "must be F16 [4,2,3], as the metadata says; got F32"},
      {"DTypeNumber", replaced("\"f32\"", "32"), "dtype must be f64"},
      {"AsksForGigabytes", ask_for_gigabytes,
       "at most 16777216 block columns (and rows of bitmaps) in all; got 2147483647"},
      {"AsksForGigabytesInAll", ask_for_gigabytes_in_all, "in all; got 17825792 with this one"},
      {"BlockBeyondTheMatrix", replaced("[2,3]", "[257,3]"), "block_shape must be at most (256, 256)"},
      // pieces
      {"NoValues", without("m.weight.values"), "must have the tensor \"m.weight.values\""},
      {"NoCrow", without("m.weight.crow_indices"), "must have the tensor \"m.weight.crow_indices\""},
      {"NoCol", without("m.weight.col_indices"), "must have the tensor \"m.weight.col_indices\""},
      {"StrayCrow", with("n.weight.crow_indices", {i32, {0}, {}}), "the weight of \"n.weight.crow_indices\""},
      {"StrayCol", with("n.weight.col_indices", {i32, {0}, {}}), "the weight of \"n.weight.col_indices\""},
      {"DenseOfTheSameName", with("m.weight", {i32, {0}, {}}), "a dense tensor of the same name"},
      {"ValuesOtherBlock", with("m.weight.values", {SafetensorsDType::f32, {4, 3, 2}, counting_bytes(96)}),
       "got F32 [4,3,2]"},
      {"ValuesTwoDimensions", with("m.weight.values", {SafetensorsDType::f32, {8, 3}, counting_bytes(96)}),
       "got F32 [8,3]"},
      {"ValuesUnsigned", with("m.weight.values", {SafetensorsDType::u32, {4, 2, 3}, counting_bytes(96)}),
       "got U32 [4,2,3]"},
      {"CrowFloat", crow<float>(SafetensorsDType::f32, {0, 2, 2, 4}), "must be I32 [4]"},
      {"ColUnsigned", col<std::uint32_t>(SafetensorsDType::u32, {0, 2, 1, 2}), "must be I32 [4]"},
      {"CrowTwoDimensions", with("m.weight.crow_indices", {i32, {2, 2}, counting_bytes(16)}),
       "got I32 [2,2]"},
      // pattern
      {"CrowTooShort", crow<I32>(i32, {0, 2, 4}), "got I32 [3]"},
      {"CrowTooLong", crow<I32>(i32, {0, 2, 2, 4, 4}), "got I32 [5]"},
      {"CrowFirstNotZero", crow<I32>(i32, {1, 2, 2, 4}), "crow_indices[0] must be 0; got 1"},
      {"CrowDecreases", crow<I32>(i32, {0, 2, 1, 4}), "crow_indices[2]=1"},
      {"CrowNegative", crow<I32>(i32, {0, -2, 2, 4}), "crow_indices[1]=-2"},
      {"CrowLastTooSmall", crow<I32>(i32, {0, 2, 2, 3}), "crow_indices[3]"},
      {"CrowLastTooLarge", crow<I32>(i32, {0, 2, 2, 5}), "crow_indices[3]"},
      {"CrowRowTooLong", crow<I32>(i32, {0, 4, 4, 4}), "a block row must have at most 3 "},
      {"CrowBeyondInt32", crow<I64>(i64, {0, 2, 2, 4294967300}), "4294967"},
      {"CrowInt64Extremes", crow<I64>(i64, {0, INT64_MAX, INT64_MIN, 4}), "crow_indices[1]"},
      {"ColTooShort", col<I32>(i32, {0, 2, 1}), "got I32 [3]"},
      {"ColOutOfRange", col<I32>(i32, {0, 3, 1, 2}), "col_indices[1]=3 out of range for 3 block columns"},
      {"ColNegative", col<I32>(i32, {-1, 2, 1, 2}), "col_indices[0]=-1"},
      {"ColUnsorted", col<I32>(i32, {2, 0, 1, 2}), "col_indices[1]=0 after 2"},
      {"ColDuplicate", col<I32>(i32, {0, 2, 2, 2}), "col_indices[3]=2 after 2"},
      {"ColBeyondInt32", col<I64>(i64, {0, 4294967298, 1, 2}), "col_indices[1]=4294967298"},
      {"ColInt64Min", col<I64>(i64, {INT64_MIN, 2, 1, 2}), "col_indices[0]=-9223372036854775808"},
      // padding
      {"PaddingColumn", value_at(7, 1.0F), "other bits at values[1, 0, 1]"},
      {"PaddingRow", value_at(15, 1.0F), "other bits at values[2, 1, 0]"},
      {"PaddingCorner", value_at(23, 1.0F), "other bits at values[3, 1, 2]"},
      {"PaddingMinusZero", value_at(23, -0.0F), "other bits at values[3, 1, 2]"},
  };
}

class HostileBsrFileTest : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileBsrFileTest, IsRefused) {
  SafetensorsFile hostile = good_file();
  GetParam().change(hostile);
  const auto bytes = serialize_safetensors(hostile);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();  // right as safetensors, wrong as bsr-v1
  const auto file = parse_bsr_file(*bytes);
  ASSERT_FALSE(file.ok());
  const bool other_format = GetParam().message == "format \"bsr-v1\"";
  EXPECT_EQ(file.status().code(), other_format ? StatusCode::unsupported : StatusCode::invalid_argument);
  EXPECT_TRUE(file.status().message().starts_with("[parse_bsr_file"));
  EXPECT_NE(file.status().message().find(GetParam().message), std::string::npos) << file.status().message();
}

INSTANTIATE_TEST_SUITE_P(All, HostileBsrFileTest, ::testing::ValuesIn(hostile_files()),
                         [](const auto& test) { return test.param.name; });

TEST(HostileBsrFileTest, TruncatedAtEveryByte) {
  const std::vector<std::byte> whole = serialize_safetensors(good_file()).value();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const auto file = parse_bsr_file(std::span(whole).first(length));
    EXPECT_EQ(file.status().code(), StatusCode::invalid_argument) << length;
  }
}

TEST(HostileBsrFileTest, MessageNamesTheWeightAndThePosition) {
  SafetensorsFile hostile = good_file();
  col<std::int32_t>(SafetensorsDType::i32, {0, 640, 1, 2})(hostile);
  EXPECT_EQ(
      parse(hostile).status().message(),
      "[parse_bsr_file \"m.weight\"] col_indices must be in [0, 3); got col_indices[1]=640 out of range for "
      "3 block columns");
}

TEST(BsrFileWriterTest, RefusesWhatItCouldNotReadBack) {
  const BsrFile good = parse(good_file()).value();
  const auto refused = [&](const std::function<void(BsrFile&)>& change, std::string_view message) {
    BsrFile file = good;
    change(file);
    const auto bytes = serialize_bsr_file(file);
    ASSERT_FALSE(bytes.ok()) << message;
    EXPECT_EQ(bytes.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(bytes.status().message().find(message), std::string::npos) << bytes.status().message();
  };
  const StoredTensor empty{SafetensorsDType::i32, {0}, {}};
  refused([](BsrFile& file) { file.weights.at("m.weight").values.pop_back(); }, "must have 96 bytes; got 95");
  refused([](BsrFile& file) { file.weights.at("m.weight").values.back() = std::byte{1}; }, "values[3, 1, 2]");
  refused([](BsrFile& file) { file.weights.at("m.weight").dtype = DType::f64; }, "must have 192 bytes");
  refused([](BsrFile& file) { file.metadata["rarefy"] = "mine"; }, "leave \"rarefy\" to the writer");
  refused([](BsrFile& file) { file.weights.at("m.weight").format = WeightFormat::csr; },
          "blocks of 1x1; got 2x3");
  refused([](BsrFile& file) { file.weights.at("m.weight").format = WeightFormat::bitmap; },
          "stored as bitmap must have blocks of 1x1; got 2x3");
  refused([&](BsrFile& file) { file.tensors["x.bitmap"] = empty; }, "must belong to a weight");
  refused([&](BsrFile& file) { file.tensors["m.weight"] = empty; }, "another tensor \"m.weight\"");
  refused([&](BsrFile& file) { file.tensors["m.weight.values"] = empty; },
          "another tensor \"m.weight.values\"");
  refused([&](BsrFile& file) { file.tensors["x.crow_indices"] = empty; }, "must belong to a weight");
  refused([&](BsrFile& file) { file.weights.emplace("\xff", file.weights.at("m.weight")); }, "UTF-8");
}

}  // namespace
}  // namespace rarefy
