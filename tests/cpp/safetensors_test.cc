// The safetensors reader and writer: exact round trips, and every lie a file can tell, by name.
#include "rarefy/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "raw_file.h"

namespace rarefy {
namespace {

using test::bytes_of;
using test::counting_bytes;
using test::raw_file;
using test::TemporaryDirectory;

std::vector<SafetensorsDType> every_dtype() {
  std::vector<SafetensorsDType> all;
  for (int i = 0; i <= static_cast<int>(SafetensorsDType::u64); ++i) {
    all.push_back(static_cast<SafetensorsDType>(i));
  }
  return all;
}

StoredTensor counting_tensor(SafetensorsDType dtype, std::vector<std::int64_t> shape) {
  std::int64_t bits = bits_of(dtype);
  for (const std::int64_t dim : shape) bits *= dim;
  return {dtype, std::move(shape), counting_bytes(static_cast<std::size_t>(bits / 8))};
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void write_bytes(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream(path, std::ios::binary) << text_of(bytes);
}

class SafetensorsDTypeTest : public ::testing::TestWithParam<SafetensorsDType> {};

TEST_P(SafetensorsDTypeTest, NameRoundTrips) {
  EXPECT_EQ(parse_safetensors_dtype(name(GetParam())), GetParam());
}

TEST_P(SafetensorsDTypeTest, TensorsRoundTripThroughBytesAndDisk) {
  SafetensorsFile file;
  file.tensors["matrix"] = counting_tensor(GetParam(), {3, 8});
  file.tensors["empty"] = counting_tensor(GetParam(), {3, 0, 8});
  file.tensors["byte"] = counting_tensor(SafetensorsDType::u8, {});
  file.metadata["format"] = "pt";

  const auto bytes = serialize_safetensors(file);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const auto parsed = parse_safetensors(*bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(*parsed, file);

  const TemporaryDirectory directory;
  ASSERT_TRUE(write_safetensors(directory.file("a"), file).ok());
  const auto read = read_safetensors(directory.file("a"));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(*read, file);
  EXPECT_EQ(std::filesystem::file_size(directory.file("a")), bytes->size());
}

INSTANTIATE_TEST_SUITE_P(All, SafetensorsDTypeTest, ::testing::ValuesIn(every_dtype()),
                         [](const auto& test) { return std::string(name(test.param)); });

TEST(SafetensorsTest, RarefyDTypesMapBothWays) {
  for (const DType dtype : kAllDTypes) EXPECT_EQ(from_safetensors(to_safetensors(dtype)), dtype);
  EXPECT_EQ(from_safetensors(SafetensorsDType::f8_e4m3), std::nullopt);
}

TEST(SafetensorsTest, WritesTheseBytes) {
  SafetensorsFile file;
  file.tensors["b"] = {SafetensorsDType::u8, {2}, counting_bytes(2)};
  file.tensors["ä\n"] = {SafetensorsDType::f32, {1, 2}, counting_bytes(8)};
  file.tensors["a"] = {SafetensorsDType::f32, {0}, {}};
  file.metadata = {{"k", "v\""}};
  std::string header =
      R"({"__metadata__":{"k":"v\""},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
      R"("ä\n":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[2],"data_offsets":[8,10]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::vector<std::byte> data = counting_bytes(8);
  data.insert(data.end(), {std::byte{1}, std::byte{2}});
  const auto bytes = serialize_safetensors(file);
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(text_of(*bytes), text_of(raw_file(header, data)));
}

TEST(SafetensorsTest, EmptyFileRoundTrips) {
  const auto bytes = serialize_safetensors({});
  ASSERT_TRUE(bytes.ok());
  EXPECT_EQ(text_of(*bytes), text_of(raw_file("{}      ")));
  const auto parsed = parse_safetensors(*bytes);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed, SafetensorsFile{});
}

TEST(SafetensorsTest, AcceptsAnyOrderOfKeysAndSpaces) {
  const auto file = parse_safetensors(
      raw_file("{ \"late\" : {\"shape\":[2], \"data_offsets\":[1,3], \"dtype\":\"U8\"},\n"
               "\"early\":{\"dtype\":\"BOOL\",\"shape\":[],\"data_offsets\":[0,1]},\"__metadata__\":{}} \n",
               counting_bytes(3)));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->tensors.at("early").data, counting_bytes(1));
  EXPECT_EQ(file->tensors.at("late").data, (std::vector{std::byte{2}, std::byte{3}}));
}

TEST(SafetensorsTest, HeaderSaysWhereTensorsLie) {
  const TemporaryDirectory directory;
  SafetensorsFile file;
  file.tensors["a"] = counting_tensor(SafetensorsDType::f64, {2});
  file.tensors["b"] = counting_tensor(SafetensorsDType::i8, {3});
  ASSERT_TRUE(write_safetensors(directory.file("a"), file).ok());
  const auto header = read_safetensors_header(directory.file("a"));
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(header->tensors.at("a").begin, 0);
  EXPECT_EQ(header->tensors.at("b").begin, 16);
  EXPECT_EQ(header->tensors.at("b").end, 19);
  EXPECT_EQ(header->data_offset % 8, 0);
  EXPECT_EQ(header->file_bytes, header->data_offset + 19);
}

// A header, the number of data bytes after it, and what the message must hold.
struct Hostile {
  std::string name;
  std::string header;
  std::size_t data_bytes;
  std::string message;

  friend std::ostream& operator<<(std::ostream& out, const Hostile& hostile) {
    return out << hostile.header.substr(0, 80);
  }
};

std::string tensor(std::string_view dtype, std::string_view shape, std::string_view offsets,
                   std::string_view key = "a") {
  return "\"" + std::string(key) + "\":{\"dtype\":\"" + std::string(dtype) +
         "\",\"shape\":" + std::string(shape) + ",\"data_offsets\":" + std::string(offsets) + "}";
}

std::string repeated(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

std::vector<Hostile> hostile_headers() {
  const std::string good = tensor("U8", "[4]", "[0,4]");
  return {
      {"Empty", "", 0, "must start with '{'"},
      {"OnlySpaces", "        ", 0, "must start with '{'"},
      {"LeadingSpace", " {" + good + "}", 4, "must start with '{'"},
      {"ByteOrderMark", "\xef\xbb\xbf{" + good + "}", 4, "must start with '{'"},
      {"TopLevelArray", "[]", 0, "must start with '{'"},
      {"Unterminated", "{" + good, 4, "syntax error"},
      {"UnterminatedString", "{\"a", 0, "syntax error"},
      {"TrailingComma", "{" + good + ",}", 4, "syntax error"},
      {"TrailingGarbage", "{" + good + "}x", 4, "syntax error"},
      {"NulAndGarbage", "{" + good + "}" + std::string(1, '\0') + "{{{{", 4, "a NUL at byte"},
      {"SingleQuotes", "{'a':1}", 0, "syntax error"},
      {"Comment", "{/* */" + good + "}", 4, "syntax error"},
      {"InvalidUtf8", "{\"\xff\xfe\":{}}", 0, "syntax error"},
      {"LoneSurrogate", R"({"\ud800":{}})", 0, "syntax error"},
      {"DuplicateTensor", "{" + good + "," + good + "}", 4, "the key \"a\" twice"},
      {"DuplicateKeyInTensor", R"({"a":{"dtype":"U8","dtype":"F64","shape":[4],"data_offsets":[0,4]}})", 4,
       "the key \"dtype\" twice"},
      {"DuplicateMetadata", R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
      {"DuplicateMetadataKey", R"({"__metadata__":{"k":"1","k":"2"}})", 0, "twice"},
      {"DuplicateByEscape", R"({"__metadata__":{"k":"1","\u006b":"2"}})", 0, "twice"},
      {"MetadataArray", R"({"__metadata__":[]})", 0, "__metadata__ must be an object"},
      {"MetadataString", R"({"__metadata__":"x"})", 0, "__metadata__ must be an object"},
      {"MetadataNull", R"({"__metadata__":null})", 0, "null"},
      {"MetadataNumberValue", R"({"__metadata__":{"k":1}})", 0, "must be a string"},
      {"MetadataBooleanValue", R"({"__metadata__":{"k":true}})", 0, "a boolean"},
      {"MetadataObjectValue", R"({"__metadata__":{"k":{}}})", 0, "must be a string"},
      {"TensorNumber", R"({"a":1})", 0, "tensor \"a\" must be an object"},
      {"TensorString", R"({"a":"x"})", 0, "tensor \"a\" must be an object"},
      {"TensorArray", R"({"a":[]})", 0, "tensor \"a\" must be an object"},
      {"NoDType", R"({"a":{"shape":[4],"data_offsets":[0,4]}})", 4, "must have \"dtype\""},
      {"NoShape", R"({"a":{"dtype":"U8","data_offsets":[0,4]}})", 4, "must have \"shape\""},
      {"NoOffsets", R"({"a":{"dtype":"U8","shape":[4]}})", 4, "must have \"data_offsets\""},
      {"ExtraKey", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"y"}})", 4, "only; got 4 keys"},
      {"UnknownDType", "{" + tensor("F128", "[4]", "[0,64]") + "}", 64, "got \"F128\""},
      {"LowerCaseDType", "{" + tensor("u8", "[4]", "[0,4]") + "}", 4, "got \"u8\""},
      {"EmptyDType", "{" + tensor("", "[4]", "[0,4]") + "}", 4, "got \"\""},
      {"DTypeNumber", R"({"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}})", 4, "dtype must be a string"},
      {"ShapeNegative", "{" + tensor("U8", "[-4]", "[0,4]") + "}", 4, "a negative number"},
      {"ShapeMinusZero", "{" + tensor("U8", "[-0]", "[0,0]") + "}", 0, "a negative number"},
      {"ShapeFraction", "{" + tensor("U8", "[4.0]", "[0,4]") + "}", 4, "unsigned 64-bit integer"},
      {"ShapeExponent", "{" + tensor("U8", "[4e0]", "[0,4]") + "}", 4, "unsigned 64-bit integer"},
      {"ShapeString", "{" + tensor("U8", "[\"4\"]", "[0,4]") + "}", 4, "a string in an array"},
      {"ShapeScalar", "{" + tensor("U8", "4", "[0,4]") + "}", 4, "shape must be an array"},
      {"ShapeNested", "{" + tensor("U8", "[[4]]", "[0,4]") + "}", 4, "an array of arrays"},
      {"ShapeBeyond63Bits", "{" + tensor("U8", "[9223372036854775808]", "[0,4]") + "}", 4, "below 2^63"},
      {"ShapeBeyond64Bits", "{" + tensor("U8", "[18446744073709551616]", "[0,4]") + "}", 4, "64-bit integer"},
      {"ShapeProductOverflows", "{" + tensor("U8", "[4294967296,4294967296]", "[0,0]") + "}", 0, "63 bits"},
      {"ShapeProductWrapsToFour", "{" + tensor("U8", "[4611686018427387905,4]", "[0,4]") + "}", 4, "63 bits"},
      {"ShapeBytesOverflow", "{" + tensor("F64", "[2305843009213693952]", "[0,0]") + "}", 0, "63 bits"},
      {"HalfAByte", "{" + tensor("F4", "[3]", "[0,1]") + "}", 1, "whole number of bytes"},
      {"ShapeSmallerThanSpan", "{" + tensor("U8", "[3]", "[0,4]") + "}", 4, "span the 3 bytes"},
      {"ShapeLargerThanSpan", "{" + tensor("U8", "[5]", "[0,4]") + "}", 4, "span the 5 bytes"},
      {"DTypeWiderThanSpan", "{" + tensor("F32", "[4]", "[0,4]") + "}", 4, "span the 16 bytes"},
      {"OneOffset", "{" + tensor("U8", "[4]", "[4]") + "}", 4, "[begin, end]"},
      {"ThreeOffsets", "{" + tensor("U8", "[4]", "[0,4,4]") + "}", 4, "[begin, end]"},
      {"OffsetsReversed", "{" + tensor("U8", "[4]", "[4,0]") + "}", 4, "got [4, 0]"},
      {"OffsetNegative", "{" + tensor("U8", "[4]", "[-4,0]") + "}", 4, "a negative number"},
      {"OffsetBeyond63Bits", "{" + tensor("U8", "[4]", "[18446744073709551612,0]") + "}", 4, "below 2^63"},
      {"FirstNotAtZero", "{" + tensor("U8", "[4]", "[1,5]") + "}", 5, "at 0; got 1"},
      {"Gap", "{" + good + "," + tensor("U8", "[4]", "[5,9]", "b") + "}", 9, "at 4; got 5"},
      {"Overlap", "{" + good + "," + tensor("U8", "[4]", "[3,7]", "b") + "}", 7, "at 4; got 3"},
      {"SameBytesTwice", "{" + good + "," + tensor("U8", "[4]", "[0,4]", "b") + "}", 4, "at 4; got 0"},
      {"BeyondTheFile", "{" + good + "," + tensor("U8", "[4]", "[4,8]", "b") + "}", 7, "the 8 bytes"},
      {"HugeBeyondTheFile", "{" + tensor("U8", "[1152921504606846975]", "[0,1152921504606846975]") + "}", 4,
       "got 4"},
      {"BytesLeftOver", "{" + good + "}", 5, "the 4 bytes"},
      {"DeepArrays", "{\"a\":" + repeated("[", 100000), 0, "an array of arrays"},
      {"DeepObjects", repeated("{\"a\":", 100000), 0, "more than 3 levels"},
  };
}

class HostileHeaderTest : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileHeaderTest, IsRefused) {
  const auto file = parse_safetensors(raw_file(GetParam().header, counting_bytes(GetParam().data_bytes)));
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), StatusCode::invalid_argument);
  EXPECT_TRUE(file.status().message().starts_with("[parse_safetensors] "));
  EXPECT_NE(file.status().message().find(GetParam().message), std::string::npos) << file.status().message();
  EXPECT_LT(file.status().message().size(), 600U);
}

INSTANTIATE_TEST_SUITE_P(All, HostileHeaderTest, ::testing::ValuesIn(hostile_headers()),
                         [](const auto& test) { return test.param.name; });

std::vector<std::byte> small_file() {
  SafetensorsFile file;
  file.tensors["a"] = counting_tensor(SafetensorsDType::f32, {2, 3});
  file.tensors["b"] = counting_tensor(SafetensorsDType::i8, {5});
  file.metadata["k"] = "v";
  return serialize_safetensors(file).value();
}

TEST(HostileFileTest, TruncatedAtEveryByte) {
  const TemporaryDirectory directory;
  const std::vector<std::byte> whole = small_file();
  ASSERT_TRUE(parse_safetensors(whole).ok());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    const std::vector<std::byte> cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_EQ(parse_safetensors(cut).status().code(), StatusCode::invalid_argument) << length;
    write_bytes(directory.file("cut"), cut);
    EXPECT_EQ(read_safetensors(directory.file("cut")).status().code(), StatusCode::invalid_argument)
        << length;
    EXPECT_EQ(read_safetensors_header(directory.file("cut")).status().code(), StatusCode::invalid_argument);
  }
}

TEST(HostileFileTest, HeaderLengthLies) {
  const std::string header = "{" + tensor("U8", "[4]", "[0,4]") + "}";
  const std::uint64_t lies[] = {0,
                                1,
                                header.size() - 1,
                                header.size() + 1,
                                header.size() + 4,
                                header.size() + 5,
                                100'000'001,
                                UINT64_MAX - 7,
                                UINT64_MAX,
                                1ULL << 63};
  for (const std::uint64_t lie : lies) {
    const auto file = parse_safetensors(raw_file(lie, header, counting_bytes(4)));
    EXPECT_EQ(file.status().code(), StatusCode::invalid_argument) << lie;
  }
  EXPECT_TRUE(parse_safetensors(raw_file(header.size(), header, counting_bytes(4))).ok());
}

TEST(HostileFileTest, HeaderLengthBeyondTheFileNamesBoth) {
  const auto file = parse_safetensors(raw_file(UINT64_MAX, "{}"));
  EXPECT_EQ(file.status().message(),
            "[parse_safetensors] the header length must be at most 2 in a file of 10 bytes; got "
            "18446744073709551615");
}

TEST(HostileFileTest, HeaderOverTheLimitIsRefusedUnread) {
  // A sparse file: large by its size, nothing on disk.
  const TemporaryDirectory directory;
  write_bytes(directory.file("big"), raw_file(100'000'001, "{}"));
  std::filesystem::resize_file(directory.file("big"), 200'000'000);
  const auto header = read_safetensors_header(directory.file("big"));
  EXPECT_NE(header.status().message().find("at most 100000000"), std::string::npos);
}

TEST(HostileFileTest, LongNamesAreShortenedInMessages) {
  const auto file = parse_safetensors(raw_file("{\"" + repeated("ä", 100000) + "\":1}"));
  ASSERT_FALSE(file.ok());
  EXPECT_LT(file.status().message().size(), 300U);
  const auto control = parse_safetensors(raw_file("{\"\\u001b[2J\":1}"));
  EXPECT_NE(control.status().message().find("\"\\x1b[2J\""), std::string::npos) << control.status().message();
}

TEST(UnreadableFileTest, MissingDirectoryAndPipe) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo(directory.file("pipe").c_str(), 0600), 0);
  for (const std::string& path : {directory.file("none"), directory.path().string(), directory.file("pipe"),
                                  std::string(), std::string("/dev/zero")}) {
    const auto file = read_safetensors(path);
    EXPECT_EQ(file.status().code(), StatusCode::io_error) << path;
    EXPECT_NE(file.status().message().find("path must be a readable file"), std::string::npos);
  }
}

TEST(SafetensorsWriterTest, RefusesWhatItCouldNotReadBack) {
  const auto refused = [](SafetensorsFile file, std::string_view message) {
    const auto bytes = serialize_safetensors(file);
    ASSERT_FALSE(bytes.ok()) << message;
    EXPECT_EQ(bytes.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(bytes.status().message().find(message), std::string::npos) << bytes.status().message();
  };
  constexpr auto u8 = SafetensorsDType::u8;
  refused({{{"a", {u8, {3}, counting_bytes(4)}}}, {}}, "4 bytes for shape [3] of U8");
  refused({{{"a", {u8, {-1, -4}, counting_bytes(4)}}}, {}}, "shape [-1, -4]");
  refused({{{"a", {u8, {INT64_MAX, 2}, {}}}}, {}}, "must have the bytes of its shape");
  refused({{{"a", {SafetensorsDType::f4, {1}, counting_bytes(1)}}}, {}}, "must have the bytes of its shape");
  refused({{{"__metadata__", {u8, {0}, {}}}}, {}}, "must not be __metadata__");
  refused({{{"\xff", {u8, {0}, {}}}}, {}}, "must be UTF-8");
  refused({{}, {{"k", "\xff"}}}, "must be UTF-8");
  // Long names are cut between characters.
  const std::string a(95, 'a');
  refused({{{a + "éé", {u8, {3}, counting_bytes(4)}}}, {}}, a + "…\"");
}

TEST(SafetensorsWriterTest, ReplacesInOneStepAndLeavesNothingBehind) {
  const TemporaryDirectory directory;
  SafetensorsFile file;
  file.tensors["a"] = counting_tensor(SafetensorsDType::f32, {4});
  ASSERT_TRUE(write_safetensors(directory.file("x"), file).ok());
  SafetensorsFile bad = file;
  bad.tensors["a"].shape = {5};
  EXPECT_FALSE(write_safetensors(directory.file("x"), bad).ok());
  EXPECT_EQ(*read_safetensors(directory.file("x")), file);
  file.tensors["a"].data[0] = std::byte{99};
  ASSERT_TRUE(write_safetensors(directory.file("x"), file).ok());
  EXPECT_EQ(*read_safetensors(directory.file("x")), file);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

TEST(SafetensorsWriterTest, UnwritablePathIsAnIoError) {
  const TemporaryDirectory directory;
  EXPECT_EQ(write_safetensors(directory.file("no/such/x"), {}).code(), StatusCode::io_error);
  // A directory in the way: rename fails after everything is written.
  std::filesystem::create_directories(directory.path() / "taken" / "inside");
  EXPECT_EQ(write_safetensors(directory.file("taken"), {}).code(), StatusCode::io_error);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

TEST(SafetensorsWriterTest, AWriteThatFailsHalfWayKeepsTheOldFile) {
  const TemporaryDirectory directory;
  SafetensorsFile file;
  file.tensors["a"] = counting_tensor(SafetensorsDType::u8, {100});
  ASSERT_TRUE(write_safetensors(directory.file("x"), file).ok());
  SafetensorsFile large;
  large.tensors["a"] = counting_tensor(SafetensorsDType::u8, {1 << 20});

  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 4096;  // the disk is full, as far as this process can tell
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = write_safetensors(directory.file("x"), large);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);

  EXPECT_EQ(status.code(), StatusCode::io_error);
  EXPECT_NE(status.message().find("File too large"), std::string::npos) << status.message();
  EXPECT_EQ(*read_safetensors(directory.file("x")), file);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory.path()), {}), 1);
}

}  // namespace
}  // namespace rarefy
