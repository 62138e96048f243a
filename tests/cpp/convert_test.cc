// Conversion between the formats: exact to the bit, for every dtype and any shape.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "problem.h"
#include "rarefy/convert.h"

namespace rarefy::test {
namespace {

struct Sizes {
  std::int64_t rows, cols, block_rows, block_cols;
};

// Padded edges, blocks larger than the matrix, empty matrices.
constexpr Sizes kSizes[] = {{12, 10, 4, 2}, {13, 11, 4, 3}, {7, 9, 1, 1}, {5, 33, 1, 16},
                            {33, 5, 16, 1}, {3, 4, 10, 20}, {0, 5, 2, 2}, {5, 0, 2, 2}};

// A dense matrix, a third of it +0, with −0 and NaN payloads among the rest; rows are 2 longer than cols.
std::vector<std::byte> random_dense(const Sizes& s, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  const std::size_t size = size_of(dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(s.rows * (s.cols + 2)) * size);
  for (std::size_t e = 0; e < bytes.size() / size; ++e) {
    if (random() % 3 == 0) continue;
    for (std::size_t b = 0; b < size; ++b) bytes[e * size + b] = static_cast<std::byte>(random());
  }
  return bytes;
}

MatrixView view(const std::vector<std::byte>& bytes, const Sizes& s, DType dtype) {
  return {bytes.data(), dtype, s.rows, s.cols, s.cols + 2};
}

// Only the elements, without the gaps between rows.
std::vector<std::byte> elements(const std::vector<std::byte>& bytes, const Sizes& s, DType dtype) {
  std::vector<std::byte> result;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t r = 0; r < s.rows; ++r) {
    const auto row = bytes.begin() + r * (s.cols + 2) * size;
    result.insert(result.end(), row, row + s.cols * size);
  }
  return result;
}

std::vector<std::byte> dense_of(const BsrMatrix& bsr, const Sizes& s) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(s.rows * (s.cols + 2)) * size_of(bsr.dtype), kPoison);
  const Status status = bsr_to_dense(bsr.view(), {bytes.data(), bsr.dtype, s.rows, s.cols, s.cols + 2});
  EXPECT_TRUE(status.ok()) << status.message();
  return elements(bytes, s, bsr.dtype);
}

TEST(ConvertTest, DenseToBsrAndBackIsExact) {
  for (const Sizes& s : kSizes) {
    for (const DType dtype : kAllDTypes) {
      SCOPED_TRACE(::testing::Message() << name(dtype) << ' ' << s.rows << 'x' << s.cols << " block "
                                        << s.block_rows << 'x' << s.block_cols);
      const std::vector<std::byte> dense = random_dense(s, dtype, 1);
      const Result<BsrMatrix> bsr = dense_to_bsr(view(dense, s, dtype), {s.block_rows, s.block_cols});
      ASSERT_TRUE(bsr.ok()) << bsr.status().message();
      EXPECT_EQ(dense_of(*bsr, s), elements(dense, s, dtype));
    }
  }
}

TEST(ConvertTest, MaskDecidesWhatIsStored) {
  const Sizes s{6, 8, 2, 4};
  const std::vector<float> dense{
      0, 0, 0, 0, 1, 2, 3, 4, 5, 5,  // row stride 10
      0, 0, 0, 0, 5, 6, 7, 8, 5, 5,  //
      9, 9, 9, 9, 1, 1, 1, 1, 5, 5,  //
      9, 9, 9, 9, 1, 1, 1, 1, 5, 5,  //
      2, 2, 2, 2, 3, 3, 3, 3, 5, 5,  //
      2, 2, 2, 2, 3, 3, 3, 3, 5, 5,
  };
  // A block of zeros that the mask wants is stored; one it does not want is dropped.
  const std::vector<std::uint8_t> mask{1, 1, 0, 0, 0, 1};
  const Result<BsrMatrix> bsr = dense_to_bsr({dense.data(), DType::f32, 6, 8, 10}, {2, 4}, mask);
  ASSERT_TRUE(bsr.ok()) << bsr.status().message();
  const auto equal = [](std::span<const std::int32_t> got, const std::vector<std::int32_t>& expected) {
    return std::vector<std::int32_t>(got.begin(), got.end()) == expected;
  };
  EXPECT_TRUE(equal(bsr->pattern.crow_indices(), {0, 2, 2, 3}));
  EXPECT_TRUE(equal(bsr->pattern.col_indices(), {0, 1, 1}));
  const std::vector<double> expected{0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 3, 3, 3, 3, 3, 3, 3};
  EXPECT_EQ(decode(bsr->values, DType::f32), expected);
  EXPECT_EQ(decode(dense_of(*bsr, s), DType::f32)[2 * 8], 0);
}

TEST(ConvertTest, NegativeZeroIsStoredAndZeroIsNot) {
  const std::vector<float> dense{0.0F, -0.0F};
  const Result<BsrMatrix> bsr = dense_to_bsr({dense.data(), DType::f32, 1, 2, 2}, {1, 1});
  ASSERT_TRUE(bsr.ok());
  ASSERT_EQ(bsr->pattern.shape().nnzb, 1);
  EXPECT_EQ(bsr->pattern.col_indices()[0], 1);
  EXPECT_TRUE(std::signbit(decode(bsr->values, DType::f32)[0]));
}

TEST(ConvertTest, EveryFormatRoundTrips) {
  for (const Sizes& s : kSizes) {
    for (const DType dtype : {DType::f64, DType::bf16, DType::i8}) {
      SCOPED_TRACE(::testing::Message() << name(dtype) << ' ' << s.rows << 'x' << s.cols);
      const std::vector<std::byte> dense = random_dense(s, dtype, 2);
      const Result<BsrMatrix> bsr = dense_to_bsr(view(dense, s, dtype), {s.block_rows, s.block_cols});
      ASSERT_TRUE(bsr.ok());
      const Result<CsrMatrix> csr = bsr_to_csr(bsr->view());
      ASSERT_TRUE(csr.ok()) << csr.status().message();
      const Result<CscMatrix> csc = csr_to_csc(*csr);
      ASSERT_TRUE(csc.ok()) << csc.status().message();
      const Result<CsrMatrix> from_csc = csc_to_csr(*csc);
      ASSERT_TRUE(from_csc.ok()) << from_csc.status().message();
      const Result<CooMatrix> coo = csr_to_coo(*from_csc);
      ASSERT_TRUE(coo.ok()) << coo.status().message();
      const Result<CsrMatrix> from_coo = coo_to_csr(*coo);
      ASSERT_TRUE(from_coo.ok()) << from_coo.status().message();
      EXPECT_EQ(from_coo->crow_indices, csr->crow_indices);
      EXPECT_EQ(from_coo->col_indices, csr->col_indices);
      EXPECT_EQ(from_coo->values, csr->values);
      const Result<BsrMatrix> back = csr_to_bsr(*from_coo, {s.block_rows, s.block_cols});
      ASSERT_TRUE(back.ok()) << back.status().message();
      EXPECT_EQ(back->values, bsr->values);
      EXPECT_EQ(dense_of(*back, s), elements(dense, s, dtype));
    }
  }
}

// A row that has nothing in several of its block row's blocks.
TEST(ConvertTest, RowsOfABlockRowMayStoreDifferentBlocks) {
  const std::vector<float> numbers{1, 2, 3, 4, 5};
  const auto bytes = std::as_bytes(std::span(numbers));
  const CsrMatrix csr{2, 8, {0, 2, 5}, {0, 7, 1, 2, 4}, DType::f32, {bytes.begin(), bytes.end()}};
  const Result<BsrMatrix> bsr = csr_to_bsr(csr, {2, 2});
  ASSERT_TRUE(bsr.ok()) << bsr.status().message();
  std::vector<float> dense(16, -1);
  ASSERT_TRUE(bsr_to_dense(bsr->view(), {dense.data(), DType::f32, 2, 8, 8}).ok());
  EXPECT_EQ(dense, (std::vector<float>{1, 0, 0, 0, 0, 0, 0, 2, 0, 3, 4, 0, 5, 0, 0, 0}));
}

TEST(ConvertTest, CooAcceptsAnyOrder) {
  const CooMatrix coo{
      3, 3, {2, 0, 1, 0}, {1, 2, 0, 0}, DType::i8, {std::byte{4}, std::byte{2}, std::byte{3}, std::byte{1}}};
  const Result<CsrMatrix> csr = coo_to_csr(coo);
  ASSERT_TRUE(csr.ok()) << csr.status().message();
  EXPECT_EQ(csr->crow_indices, (std::vector<std::int32_t>{0, 2, 3, 4}));
  EXPECT_EQ(csr->col_indices, (std::vector<std::int32_t>{0, 2, 0, 1}));
  EXPECT_EQ(csr->values, (std::vector<std::byte>{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}}));
}

TEST(BlockMaskTest, KeepsTheLargestNorms) {
  const std::vector<float> dense{1, 1, 0, 3, 2, 2, 0, 0};  // blocks of 1×2: √2, 3, √8, 0
  const MatrixView view{dense.data(), DType::f32, 2, 4, 4};
  const auto mask = [&](double density) { return *block_mask_by_norm(view, {1, 2}, density); };
  using Mask = std::vector<std::uint8_t>;
  EXPECT_EQ(mask(0), (Mask{0, 0, 0, 0}));
  EXPECT_EQ(mask(0.25), (Mask{0, 1, 0, 0}));
  EXPECT_EQ(mask(0.5), (Mask{0, 1, 1, 0}));
  EXPECT_EQ(mask(0.75), (Mask{1, 1, 1, 0}));
  EXPECT_EQ(mask(1), (Mask{1, 1, 1, 1}));
  EXPECT_EQ(mask(0.125), (Mask{0, 0, 0, 0}));  // half a block rounds to even
  EXPECT_EQ(mask(0.375), (Mask{0, 1, 1, 0}));
}

// Rows longer than the matrix, several elements in a block, the last block column narrower.
TEST(BlockMaskTest, SumsTheSquaresOfWholeBlocks) {
  const std::vector<float> dense{
      3, 0, 0, 1, 9,  // row stride 5; blocks of 2×3: 9 + 4 against 1 + 16
      0, 2, 0, 4, 9,  //
      1, 1, 1, 1, 9,  // 6 against 2
      1, 1, 1, 1, 9,
  };
  const MatrixView view{dense.data(), DType::f32, 4, 4, 5};
  using Mask = std::vector<std::uint8_t>;
  EXPECT_EQ(*block_mask_by_norm(view, {2, 3}, 0.25), (Mask{0, 1, 0, 0}));
  EXPECT_EQ(*block_mask_by_norm(view, {2, 3}, 0.5), (Mask{1, 1, 0, 0}));
  EXPECT_EQ(*block_mask_by_norm(view, {2, 3}, 0.75), (Mask{1, 1, 1, 0}));
}

TEST(BlockMaskTest, TiesKeepTheEarlierAndNaNCountsMost) {
  std::vector<float> dense(8, 1.0F);
  EXPECT_EQ(*block_mask_by_norm({dense.data(), DType::f32, 1, 8, 8}, {1, 2}, 0.5),
            (std::vector<std::uint8_t>{1, 1, 0, 0}));
  dense[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(*block_mask_by_norm({dense.data(), DType::f32, 1, 8, 8}, {1, 2}, 0.25),
            (std::vector<std::uint8_t>{0, 0, 0, 1}));
}

}  // namespace
}  // namespace rarefy::test
