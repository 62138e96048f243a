// 160,000 seeded mutations of files and index arrays. Each failure prints its seed, which is all that
// is needed to see it again.
#include <gtest/gtest.h>

#include <random>

#include "checks.h"
#include "raw_file.h"

namespace rarefy::fuzz {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937;

std::size_t below(Random& random, std::size_t count) {
  return std::uniform_int_distribution<std::size_t>(0, count - 1)(random);
}

template <class Container>
const auto& pick(Random& random, const Container& choices) {
  return choices[below(random, std::size(choices))];
}

// Valid files to start from: edge blocks, three weights, one of them CSR, int64 indices, nothing stored, no
// weights.
std::vector<Bytes> seeds() {
  const auto weight = [](const BsrShape& shape, DType dtype, std::vector<std::int32_t> crow,
                         std::vector<std::int32_t> col) {
    BsrMatrix matrix{Pattern::create(shape, crow, col).value(), dtype, {}};
    // Zero where padding may be; the first element of a block never is.
    const auto block_bytes = static_cast<std::size_t>(shape.block_size()) * size_of(dtype);
    matrix.values.resize(col.size() * block_bytes);
    for (std::size_t e = 0; e < col.size(); ++e) matrix.values[e * block_bytes] = std::byte{1};
    return matrix;
  };
  BsrFile edges;
  edges.weights.emplace("a.weight", weight({5, 7, 2, 3}, DType::f32, {0, 2, 2, 4}, {0, 2, 1, 2}));
  edges.weights.emplace("b.weight", weight({8, 8, 4, 4}, DType::i8, {0, 1, 3}, {1, 0, 1}));
  edges.weights.emplace("c.weight", FileWeight(weight({2, 3, 1, 1}, DType::bf16, {0, 1, 2}, {2, 0}),
                                               WeightFormat::csr, DType::f32));
  edges.weights.emplace("d.weight", FileWeight(weight({3, 11, 1, 1}, DType::f32, {0, 1, 1, 3}, {10, 0, 8}),
                                               WeightFormat::bitmap));
  edges.tensors["a.bias"] = {SafetensorsDType::f32, {5}, test::counting_bytes(20)};
  edges.metadata["format"] = "pt";
  BsrFile empty;
  empty.weights.emplace("w", weight({6, 4, 1, 1}, DType::bf16, {0, 0, 0, 0, 0, 0, 0}, {}));
  empty.weights.emplace("v", weight({3, 3, 2, 2}, DType::f64, {0, 2, 4}, {0, 1, 0, 1}));
  SafetensorsFile wide = parse_safetensors(serialize_bsr_file(edges).value()).value();
  wide.tensors["b.weight.crow_indices"] = {
      SafetensorsDType::i64, {3}, test::bytes_of<std::int64_t>({0, 1, 3})};
  wide.tensors["b.weight.col_indices"] = {
      SafetensorsDType::i64, {3}, test::bytes_of<std::int64_t>({1, 0, 1})};
  SafetensorsFile plain;
  plain.tensors["x"] = {SafetensorsDType::f4, {2, 3}, test::counting_bytes(3)};
  plain.tensors["y"] = {SafetensorsDType::u64, {}, test::counting_bytes(8)};
  return {serialize_bsr_file(edges).value(), serialize_bsr_file(empty).value(),
          serialize_safetensors(wide).value(), serialize_safetensors(plain).value()};
}

// One random edit of a byte string.
void edit(Bytes& bytes, Random& random) {
  static constexpr std::uint64_t kNumbers[] = {
      0,          1,          2,          4,           127,       128,        255,        256,
      0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, INT64_MAX, 1ULL << 63, UINT64_MAX, UINT64_MAX - 7};
  static constexpr std::string_view kTokens[] = {"{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ":",
                                                 ",",
                                                 "\"",
                                                 "\\",
                                                 "null",
                                                 "true",
                                                 "-1",
                                                 "0",
                                                 "1",
                                                 "9",
                                                 "1e9",
                                                 "2147483648",
                                                 "9223372036854775807",
                                                 "18446744073709551616",
                                                 "\"F32\"",
                                                 "\"I64\"",
                                                 "\"BOOL\"",
                                                 "\"F4\"",
                                                 "\"shape\"",
                                                 "\"dtype\"",
                                                 "\"data_offsets\"",
                                                 "\"__metadata__\"",
                                                 "\\\"nnzb\\\"",
                                                 "\\\"shape\\\"",
                                                 ".values",
                                                 ".crow_indices",
                                                 ".col_indices",
                                                 "\xff",
                                                 "\\u0000"};
  if (bytes.empty()) bytes.resize(1);
  const std::size_t at = below(random, bytes.size());
  const auto position = bytes.begin() + static_cast<std::ptrdiff_t>(at);
  const std::size_t length = 1 + below(random, std::min<std::size_t>(16, bytes.size() - at));
  switch (below(random, 9)) {
    case 0: bytes[at] ^= std::byte{1} << below(random, 8); break;
    case 1: bytes[at] = static_cast<std::byte>(below(random, 256)); break;
    case 2: {  // a number of 1, 2, 4 or 8 bytes
      const std::uint64_t number = pick(random, kNumbers);
      std::memcpy(&bytes[at], &number,
                  std::min<std::size_t>(std::size_t{1} << below(random, 4), bytes.size() - at));
      break;
    }
    case 3: bytes.erase(position, position + static_cast<std::ptrdiff_t>(length)); break;
    case 4: {
      const Bytes copy(position, position + static_cast<std::ptrdiff_t>(length));
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(random, bytes.size() + 1)), copy.begin(),
                   copy.end());
      break;
    }
    case 5: bytes.resize(at); break;
    case 6: bytes.resize(bytes.size() + length); break;
    case 7: {
      const auto token = std::as_bytes(std::span(pick(random, kTokens)));
      bytes.insert(position, token.begin(), token.end());
      break;
    }
    case 8: {  // another digit at or after this place: a header that stays JSON
      const auto digit = std::find_if(position, bytes.end(),
                                      [](std::byte b) { return b >= std::byte{'0'} && b <= std::byte{'9'}; });
      if (digit != bytes.end()) *digit = static_cast<std::byte>('0' + below(random, 10));
      break;
    }
  }
}

// Edits the whole file, or its header with the length put right again, or its data with the size kept.
Bytes mutated(Bytes file, Random& random) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  const auto split = file.begin() + static_cast<std::ptrdiff_t>(sizeof length + length);
  Bytes header(file.begin() + sizeof length, split), data(split, file.end());
  const std::size_t part = below(random, 3);
  for (std::size_t edits = 1 + below(random, 3); edits > 0; --edits) {
    edit(part == 0 ? file : part == 1 ? header : data, random);
  }
  if (part == 0) return file;
  data.resize(static_cast<std::size_t>(file.end() - split));
  return test::raw_file({reinterpret_cast<const char*>(header.data()), header.size()}, data);
}

// Runs `once(seed)` for seeds 0 … count - 1; enough must be accepted and refused to mean something.
template <class Once>
void run_seeds(unsigned count, Once once) {
  unsigned accepted = 0;
  for (unsigned seed = 0; seed < count; ++seed) {
    const Outcome outcome = once(seed);
    ASSERT_EQ(outcome.problem, "") << "seed " << seed;
    accepted += outcome.accepted;
  }
  EXPECT_GT(accepted, count / 100) << "of " << count;
  EXPECT_LT(accepted, count - count / 10) << "of " << count;
  ::testing::Test::RecordProperty("accepted", static_cast<int>(accepted));
}

TEST(MutationFuzzTest, SeedsThemselvesAreAccepted) {
  for (const Bytes& seed : seeds()) {
    for (const Outcome& outcome : {check_safetensors(seed), check_bsr_file(seed)}) {
      EXPECT_TRUE(outcome.accepted) << outcome.problem;
      EXPECT_EQ(outcome.problem, "");
    }
  }
}

TEST(MutationFuzzTest, SafetensorsReader) {
  const std::vector<Bytes> files = seeds();
  run_seeds(30'000, [&](unsigned seed) {
    Random random(seed);
    return check_safetensors(mutated(pick(random, files), random));
  });
}

TEST(MutationFuzzTest, BsrFileReader) {
  const std::vector<Bytes> files = seeds();
  run_seeds(50'000, [&](unsigned seed) {
    Random random(1'000'000 + seed);
    return check_bsr_file(mutated(pick(random, files), random));
  });
}

TEST(MutationFuzzTest, IndexValidator) {
  static constexpr std::int64_t kNumbers[] = {-1, 0, 1, 2, 3, 5, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN};
  run_seeds(100'000, [&](unsigned seed) {
    Random random(2'000'000 + seed);
    // A valid pattern of up to 6 × 6 blocks, then at most three changes anywhere.
    BsrShape shape{static_cast<std::int64_t>(below(random, 13)), static_cast<std::int64_t>(below(random, 13)),
                   static_cast<std::int64_t>(2 + below(random, 3)),
                   static_cast<std::int64_t>(2 + below(random, 3))};
    std::vector<std::int32_t> crow{0}, col;
    for (std::int64_t i = 0; i < shape.row_count(); ++i) {
      for (std::int64_t j = 0; j < shape.col_count(); ++j) {
        if (below(random, 2) == 0) col.push_back(static_cast<std::int32_t>(j));
      }
      crow.push_back(static_cast<std::int32_t>(col.size()));
    }
    shape.nnzb = static_cast<std::int64_t>(col.size());
    for (std::size_t edits = below(random, 4); edits > 0; --edits) {
      std::int64_t* const sizes[] = {&shape.rows, &shape.cols, &shape.block_rows, &shape.block_cols,
                                     &shape.nnzb};
      std::vector<std::int32_t>& indices = below(random, 2) == 0 ? crow : col;
      const std::int64_t number = pick(random, kNumbers);
      switch (below(random, 5)) {
        case 0: *pick(random, sizes) = number; break;
        case 1:
          if (!indices.empty()) indices[below(random, indices.size())] = static_cast<std::int32_t>(number);
          break;
        case 2: indices.push_back(static_cast<std::int32_t>(number)); break;
        case 3:
          if (!indices.empty()) indices.pop_back();
          break;
        case 4:
          if (!indices.empty()) std::swap(indices[below(random, indices.size())], indices.back());
          break;
      }
    }
    return check_index_arrays(shape, crow, col);
  });
}

}  // namespace
}  // namespace rarefy::fuzz
