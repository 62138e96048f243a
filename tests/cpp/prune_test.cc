// Masks from scores: against a plain sort of all units, for every kind of unit, dtype and number of threads.
#include "rarefy/prune.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "core/scalar.h"
#include "product_checks.h"
#include "prune/keys.h"

namespace rarefy {
namespace {

using Rows = std::vector<std::vector<bool>>;  // true: stays
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Scores in a dtype, rows apart, with the numbers that were stored.
struct Scores {
  std::int64_t rows, cols;
  DType dtype;
  std::vector<double> stored;
  std::vector<std::byte> bytes;

  Scores(std::int64_t r, std::int64_t c, DType d, const std::vector<double>& x) : rows(r), cols(c), dtype(d) {
    const std::size_t size = size_of(d);
    bytes.assign(static_cast<std::size_t>(r * (c + 3)) * size, std::byte{0xff});
    visit_float(d, [&]<class T>(T) {
      for (std::int64_t i = 0; i < r * c; ++i) {
        T* at = reinterpret_cast<T*>(bytes.data()) + i / c * (c + 3) + i % c;
        store(at, x[i]);
        stored.push_back(load(at));
      }
    });
  }
  MatrixView view() const { return {bytes.data(), dtype, rows, cols, cols + 3}; }
  double at(std::int64_t r, std::int64_t c) const { return stored[r * cols + c]; }
};

Scores random_scores(std::int64_t rows, std::int64_t cols, DType dtype, int levels, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<double> x(static_cast<std::size_t>(rows * cols));
  for (double& v : x) {
    v = levels > 0 ? std::uniform_int_distribution<int>(-levels, levels)(random)
                   : std::normal_distribution<double>()(random);
  }
  return {rows, cols, dtype, x};
}

double weighed(double x, Importance importance) {
  return importance == Importance::value ? x : importance == Importance::magnitude ? std::abs(x) : x * x;
}

// NaN first, then by value: what the keys say, in plain words.
using Place = std::tuple<int, double, std::uint32_t, std::int64_t>;
Place place(double score, std::int64_t row, std::int64_t col, std::int64_t position) {
  return {std::isnan(score) ? 0 : 1, std::isnan(score) ? 0 : score, prune::tie_of(row, col), position};
}

void thin(const Scores& s, Importance importance, std::int64_t keep, std::int64_t of, std::int64_t row,
          std::int64_t begin, Rows& mask) {
  std::vector<std::pair<Place, std::int64_t>> order;
  for (std::int64_t c = begin; c < std::min(begin + of, s.cols); ++c) {
    order.emplace_back(place(std::sqrt(weighed(s.at(row, c), importance)), row, c, c), c);
    if (importance == Importance::value) std::get<1>(order.back().first) = s.at(row, c);
  }
  std::sort(order.begin(), order.end());
  for (std::int64_t i = 0; i + keep < static_cast<std::int64_t>(order.size()); ++i) {
    mask[row][order[i].second] = false;
  }
}

// Blocks by a sort of all of them, of each row of blocks if asked; then N:M in what stays.
Rows expected(const Scores& s, Importance importance, const PruneUnits& u, std::int64_t remove) {
  const std::int64_t R = u.block.rows, C = u.block.cols;
  const std::int64_t rows = (s.rows + R - 1) / R, cols = (s.cols + C - 1) / C;
  std::vector<std::pair<Place, std::pair<std::int64_t, std::int64_t>>> order;
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      double sum = 0;
      for (std::int64_t r = i * R; r < std::min(s.rows, (i + 1) * R); ++r) {
        for (std::int64_t c = j * C; c < std::min(s.cols, (j + 1) * C); ++c)
          sum += weighed(s.at(r, c), importance);
      }
      if (importance == Importance::square) sum = std::sqrt(sum);
      if (s.dtype != DType::f64) sum = static_cast<float>(sum);
      order.push_back({place(sum, i, j, i * cols + j), {i, j}});
    }
  }
  Rows mask(static_cast<std::size_t>(s.rows), std::vector<bool>(static_cast<std::size_t>(s.cols), true));
  const auto leave = [&](auto begin, auto end) {
    std::sort(begin, end);
    for (auto it = begin; it != begin + remove; ++it) {
      const auto [i, j] = it->second;
      for (std::int64_t r = i * R; r < std::min(s.rows, (i + 1) * R); ++r) {
        for (std::int64_t c = j * C; c < std::min(s.cols, (j + 1) * C); ++c) mask[r][c] = false;
      }
    }
  };
  if (u.each_row) {
    for (std::int64_t i = 0; i < rows; ++i) leave(order.begin() + i * cols, order.begin() + (i + 1) * cols);
  } else {
    leave(order.begin(), order.end());
  }
  for (std::int64_t r = 0; u.of > 0 && r < s.rows; ++r) {
    for (std::int64_t c = 0; c < s.cols; c += u.of) {
      if (mask[r][c]) thin(s, importance, u.keep, u.of, r, c, mask);
    }
  }
  return mask;
}

Rows unpacked(const std::vector<std::uint8_t>& bits, std::int64_t rows, std::int64_t cols) {
  Rows mask(static_cast<std::size_t>(rows), std::vector<bool>(static_cast<std::size_t>(cols)));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      mask[r][c] = (bits[r * mask_row_bytes(cols) + c / 8] >> (c % 8) & 1) != 0;
    }
  }
  return mask;
}

std::vector<std::uint8_t> run(const PruneScores& scores, const PruneUnits& units, std::int64_t remove,
                              const Executor& executor, PruneCount* count = nullptr) {
  std::vector<std::uint8_t> bits(
      static_cast<std::size_t>(scores.matrix.rows * mask_row_bytes(scores.matrix.cols)), 0xee);
  const auto result = prune_mask(scores, units, remove, bits.data(), executor);
  EXPECT_TRUE(result.ok()) << result.status().message();
  if (count != nullptr && result.ok()) *count = *result;
  return bits;
}

std::int64_t ones(const Rows& mask) {
  std::int64_t count = 0;
  for (const auto& row : mask) count += std::count(row.begin(), row.end(), true);
  return count;
}

TEST(PruneTest, EveryUnitDTypeAndCount) {
  ThreadPool pool(3);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const int levels : {0, 3}) {  // distinct scores, and many ties
      for (const auto& [rows, cols] : {std::pair{37, 53}, {12, 2060}, {1, 9}, {5, 1}}) {
        const Scores s = random_scores(rows, cols, dtype, levels, 1);
        for (const PruneUnits& u :
             {PruneUnits{{1, 1}}, PruneUnits{{4, 1}}, PruneUnits{{3, 8}}, PruneUnits{{16, 16}},
              PruneUnits{{1, 10000}}, PruneUnits{{10000, 1}}, PruneUnits{{4, 8}, 2, 4},
              PruneUnits{{2, 4}, 1, 2}, PruneUnits{{1, 1}, 0, 0, true}, PruneUnits{{4, 2}, 0, 0, true}}) {
          const auto units = count_units(s.view(), u);
          ASSERT_TRUE(units.ok()) << units.status().message();
          for (const double part : {0.0, 0.3, 0.5, 0.9, 1.0}) {
            const auto remove = static_cast<std::int64_t>(part * static_cast<double>(*units));
            const Importance importance = levels > 0 ? Importance::value : Importance::square;
            PruneCount count;
            const auto bits = run({s.view(), importance}, u, remove, pool.executor(), &count);
            const Rows mask = unpacked(bits, rows, cols), want = expected(s, importance, u, remove);
            ASSERT_EQ(mask, want) << name(dtype) << ' ' << rows << 'x' << cols << " block " << u.block.rows
                                  << 'x' << u.block.cols << ' ' << u.keep << ':' << u.of << " remove "
                                  << remove;
            EXPECT_EQ(count.kept, ones(want));
            EXPECT_EQ(count.nan, 0);
            EXPECT_EQ(bits, run({s.view(), importance}, u, remove, {}));
          }
        }
      }
    }
  }
}

TEST(PruneTest, BitsPastTheLastColumnAreZero) {
  const Scores s = random_scores(3, 13, DType::f32, 0, 1);
  for (const PruneUnits& u : {PruneUnits{}, PruneUnits{{2, 2}}, PruneUnits{{1, 1}, 2, 4}}) {
    const auto bits = run({s.view()}, u, 0, {});
    for (int r = 0; r < 3; ++r) EXPECT_EQ(bits[2 * r + 1] & 0xe0, 0);
  }
}

TEST(PruneTest, GroupsOfAnySize) {
  for (const auto& [keep, of] :
       {std::pair{2, 4}, {1, 2}, {4, 8}, {0, 4}, {4, 4}, {3, 7}, {10, 32}, {5, 40}}) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16}) {
      const Scores s = random_scores(17, 90, dtype, 2, 3);
      const PruneUnits u{{1, 1}, keep, of};
      const std::int64_t groups = 17 * ((90 + of - 1) / of);
      const Rows mask = unpacked(run({s.view(), Importance::value}, u, groups, {}), 17, 90);
      Rows want(17, std::vector<bool>(90, true));
      for (int r = 0; r < 17; ++r) {
        for (int c = 0; c < 90; c += of) thin(s, Importance::value, keep, of, r, c, want);
      }
      EXPECT_EQ(mask, want) << keep << ':' << of;
    }
  }
}

// A part of the groups becomes sparse: those that lose least.
TEST(PruneTest, GroupsThatLoseLeast) {
  std::vector<double> x;
  for (int g = 0; g < 6; ++g) {
    for (const double v : {1.0, 9.0, 2.0, 8.0}) x.push_back(v + 10 * g);
  }
  const Scores s(2, 12, DType::f32, x);
  const Rows mask = unpacked(run({s.view()}, {{1, 1}, 2, 4}, 2, {}), 2, 12);
  EXPECT_EQ(mask[0],
            (std::vector<bool>{false, true, false, true, false, true, false, true, true, true, true, true}));
  EXPECT_EQ(mask[1], std::vector<bool>(12, true));
}

// torch.ao breaks ties by index: of a matrix of ones whole rows are lost.
TEST(PruneTest, TiesTakeNoWholeRowOrColumn) {
  for (const auto& [rows, cols] : {std::pair{64, 64}, {40, 144}, {89, 233}, {16, 512}}) {
    const Scores s(rows, cols, DType::f32, std::vector<double>(static_cast<std::size_t>(rows * cols), 1.0));
    for (const double part : {0.25, 0.5, 0.75}) {
      const auto remove = static_cast<std::int64_t>(part * rows * cols);
      const Rows mask = unpacked(run({s.view()}, {}, remove, {}), rows, cols);
      EXPECT_EQ(ones(mask), rows * cols - remove);
      for (int r = 0; r < rows; ++r) {
        const auto kept = static_cast<double>(std::count(mask[r].begin(), mask[r].end(), true)) / cols;
        EXPECT_NEAR(kept, 1 - part, 0.1) << rows << 'x' << cols << " row " << r;
      }
      for (int c = 0; c < cols; ++c) {
        double kept = 0;
        for (int r = 0; r < rows; ++r) kept += mask[r][c] ? 1.0 / rows : 0;
        EXPECT_NEAR(kept, 1 - part, 0.2) << rows << 'x' << cols << " column " << c;
      }
    }
  }
}

TEST(PruneTest, NanLeavesFirstAndIsCounted) {
  std::vector<double> x(60, 5.0);
  x[7] = kNan;
  x[44] = -kNan;
  x[20] = -std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    const Scores s(6, 10, dtype, x);
    PruneCount count;
    Rows mask = unpacked(run({s.view()}, {}, 2, {}, &count), 6, 10);
    EXPECT_EQ(count.nan, 2);
    EXPECT_FALSE(mask[0][7] || mask[4][4]);
    EXPECT_TRUE(mask[2][0]);
    mask = unpacked(run({s.view()}, {{2, 5}}, 2, {}, &count), 6, 10);
    EXPECT_EQ(count.nan, 2);
    EXPECT_FALSE(mask[0][7] || mask[4][4]);
    run({s.view()}, {{1, 1}, 2, 4}, 18, {}, &count);
    EXPECT_EQ(count.nan, 2);
  }
}

TEST(PruneTest, NothingComesBackBeforeAllElseIsGone) {
  const Scores first = random_scores(20, 30, DType::f32, 0, 1),
               second = random_scores(20, 30, DType::f32, 0, 2);
  for (const PruneUnits& u :
       {PruneUnits{}, PruneUnits{{4, 5}}, PruneUnits{{1, 1}, 2, 4}, PruneUnits{{1, 1}, 0, 0, true}}) {
    const std::int64_t units = *count_units(first.view(), u);
    const auto before = run({first.view(), Importance::magnitude}, u, units / 3, {});
    PruneScores scores{second.view(), Importance::magnitude};
    scores.previous = before.data();
    const auto after = run(scores, u, units / 2, {});
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i] & ~before[i], 0);
    EXPECT_EQ(run(scores, u, units / 3, {}), before);
  }
}

TEST(PruneTest, ColumnScale) {
  const Scores s(1, 2, DType::f32, {3, 1});
  const std::vector<double> scale{1, 4};
  PruneScores scores{s.view(), Importance::magnitude, scale.data()};
  EXPECT_EQ(run(scores, {}, 1, {})[0], 0b10);  // 3·1 < 1·4
  scores.importance = Importance::square;
  EXPECT_EQ(run(scores, {}, 1, {})[0], 0b01);  // 9·1 > 1·4
}

std::vector<std::int64_t> allocate(std::vector<PruneLayer> layers, std::int64_t remove,
                                   const Executor& executor) {
  std::vector<std::int64_t> removed(layers.size(), -1);
  const Status status = allocate_global(layers, remove, removed, executor);
  EXPECT_TRUE(status.ok()) << status.message();
  return removed;
}

TEST(PruneTest, GlobalIsASortOfAll) {
  ThreadPool pool(2);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    std::vector<Scores> scores;
    for (unsigned i = 0; i < 4; ++i) scores.push_back(random_scores(20 + 9 * i, 64, dtype, 0, i));
    std::vector<PruneLayer> layers;
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t i = 0; i < 4; ++i) {
      layers.push_back({{scores[i].view(), Importance::magnitude}, {}, 0, scores[i].rows * 64});
      for (const double x : scores[i].stored) order.emplace_back(std::abs(x), i);
    }
    std::sort(order.begin(), order.end());
    for (const std::size_t remove : {std::size_t{0}, order.size() / 3, order.size() * 9 / 10, order.size()}) {
      std::vector<std::int64_t> want(4, 0),
          got = allocate(layers, static_cast<std::int64_t>(remove), pool.executor());
      for (std::size_t i = 0; i < remove; ++i) ++want[order[i].second];
      EXPECT_EQ(std::accumulate(got.begin(), got.end(), std::int64_t{0}), static_cast<std::int64_t>(remove));
      for (std::size_t i = 0; i < 4; ++i)
        EXPECT_NEAR(static_cast<double>(got[i]), static_cast<double>(want[i]), dtype == DType::bf16 ? 30 : 0);
    }
  }
}

// torch.nn.utils.prune takes 98 % of the layer whose weights are a thousand times smaller.
TEST(PruneTest, GlobalKeepsToFloorsAndCeilings) {
  Scores small = random_scores(10, 100, DType::f32, 0, 1), large = random_scores(10, 100, DType::f32, 0, 2);
  for (int i = 0; i < 1000; ++i)
    reinterpret_cast<float*>(large.bytes.data())[i / 100 * 103 + i % 100] *= 1000;
  const auto layer = [](const Scores& s, std::int64_t least, std::int64_t most) {
    return PruneLayer{{s.view(), Importance::magnitude}, {}, least, most};
  };
  EXPECT_GT(allocate({layer(small, 0, 1000), layer(large, 0, 1000)}, 1000, {})[0], 980);
  EXPECT_EQ(allocate({layer(small, 0, 800), layer(large, 0, 1000)}, 1000, {}),
            (std::vector<std::int64_t>{800, 200}));
  EXPECT_EQ(allocate({layer(small, 0, 1000), layer(large, 300, 1000)}, 1000, {}),
            (std::vector<std::int64_t>{700, 300}));
  const Scores equal(10, 100, DType::f32, std::vector<double>(1000, 1.0));
  EXPECT_EQ(allocate({layer(equal, 0, 1000), layer(equal, 0, 500)}, 900, {}),
            (std::vector<std::int64_t>{600, 300}));
}

TEST(PruneTest, LampIsASortWithSums) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Scores weight = random_scores(30, 70, dtype, dtype == DType::f16 ? 5 : 0, 3);  // f16 with ties and zeros
    std::vector<double> squares, got(30 * 70, kNan);
    for (const double x : weight.stored) squares.push_back(x * x);
    std::sort(squares.begin(), squares.end());
    ASSERT_TRUE(lamp_scores(weight.view(), got.data()).ok());
    double sum = 0;
    for (std::size_t i = squares.size(); i-- > 0;) {
      sum += squares[i];
      EXPECT_NEAR(got[i], squares[i] / sum, 1e-15);
    }
    EXPECT_EQ(got.back(), 1);
  }
}

TEST(PruneTest, LampOfNanInfinityAndNothing) {
  const double inf = std::numeric_limits<double>::infinity();
  std::vector<double> got(4);
  const auto of = [&](std::vector<double> x) {
    EXPECT_TRUE(lamp_scores({x.data(), DType::f64, 2, 2, 2}, got.data()).ok());
    return got;
  };
  EXPECT_EQ(of({kNan, 2, -1, 0}), (std::vector<double>{0, 0, 0.2, 1}));
  EXPECT_EQ(of({1, inf, -inf, 3}), (std::vector<double>{0, 0, 1, 1}));
  EXPECT_EQ(of({0, 0, 0, -0.0}), (std::vector<double>{0, 0, 0, 0}));
  EXPECT_TRUE(lamp_scores({nullptr, DType::f32, 0, 5, 5}, nullptr).ok());
  EXPECT_FALSE(lamp_scores({got.data(), DType::i8, 2, 2, 2}, got.data()).ok());
}

TEST(PruneTest, MasksToBytesAndBack) {
  ThreadPool pool(2);
  for (const std::int64_t cols : {1, 7, 8, 9, 64, 100}) {
    std::mt19937 random(3);
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(30 * cols));
    for (auto& b : bytes) b = random() % 2;
    std::vector<std::uint8_t> bits(static_cast<std::size_t>(30 * mask_row_bytes(cols))),
        back(bytes.size(), 9);
    pack_mask(bytes.data(), 30, cols, bits.data(), pool.executor());
    unpack_mask(bits.data(), 30, cols, back.data(), pool.executor());
    EXPECT_EQ(back, bytes);
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i8}) {
      std::vector<std::byte> data(static_cast<std::size_t>(30 * (cols + 2)) * size_of(dtype),
                                  std::byte{0xff});  // NaN
      ASSERT_TRUE(apply_mask({data.data(), dtype, 30, cols, cols + 2}, bits.data(), pool.executor()).ok());
      for (std::int64_t i = 0; i < 30 * (cols + 2); ++i) {
        const std::int64_t r = i / (cols + 2), c = i % (cols + 2);
        const bool zero = c < cols && bytes[r * cols + c] == 0;
        for (std::size_t b = 0; b < size_of(dtype); ++b) {
          EXPECT_EQ(data[static_cast<std::size_t>(i) * size_of(dtype) + b],
                    zero ? std::byte{0} : std::byte{0xff});
        }
      }
    }
  }
}

TEST(PruneTest, BadInput) {
  const Scores s = random_scores(4, 8, DType::f32, 0, 1);
  std::uint8_t bits[4];
  const auto message = [&](PruneScores scores, PruneUnits units, std::int64_t remove) {
    const auto result = prune_mask(scores, units, remove, bits, {});
    return result.ok() ? "" : result.status().message();
  };
  EXPECT_EQ(message({s.view()}, {}, 33),
            "[prune_mask] remove must be in [0, 32], the number of units; got 33");
  EXPECT_EQ(message({s.view()}, {}, -1),
            "[prune_mask] remove must be in [0, 32], the number of units; got -1");
  EXPECT_EQ(message({s.view()}, {{0, 1}}, 0), "[prune_mask] block must be at least 1x1; got 0x1");
  EXPECT_EQ(message({s.view()}, {{1, 1}, 5, 4}, 0), "[prune_mask] N:M must have 0 <= N <= M; got 5:4");
  EXPECT_EQ(message({s.view()}, {{2, 6}, 2, 4}, 0),
            "[prune_mask] N:M inside blocks needs block columns that are a multiple of M=4; got 6");
  const double scale[8] = {1, 1, 1, kNan, 1, 1, 1, 1};
  EXPECT_EQ(message({s.view(), Importance::magnitude, scale}, {}, 0),
            "[prune_mask] column_scale must not be negative or NaN; got column_scale[3]=nan");
  EXPECT_EQ(message({s.view(), Importance::value, scale}, {}, 0),
            "[prune_mask] a column scale needs magnitudes or squares; got values");
  MatrixView int8 = s.view();
  int8.dtype = DType::i8;
  EXPECT_EQ(message({int8}, {}, 0), "[prune_mask] scores must be f64, f32, bf16 or f16; got i8");
  std::int64_t removed[1];
  const PruneLayer layer{{s.view()}, {}, 3, 10};
  EXPECT_EQ(allocate_global({&layer, 1}, 11, removed, {}).message(),
            "[allocate_global] remove must be in [3, 10], what the layers' limits allow; got 11");
  const PruneLayer wrong{{s.view()}, {}, 3, 40};
  EXPECT_EQ(allocate_global({&wrong, 1}, 11, removed, {}).message(),
            "[allocate_global] limits must satisfy 0 <= least <= most <= 32, the layer's units; got 3 and 40 "
            "for layer 0");
}

}  // namespace
}  // namespace rarefy
