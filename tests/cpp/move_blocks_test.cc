// Blocks on their way from one pattern to another: between two memories and within one, every size of block.
#include "core/move_blocks.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "product_checks.h"

namespace rarefy {
namespace {

using test::expect_ok;

struct Move {
  std::int64_t before;
  std::vector<std::int64_t> source;
};

// The blocks of `places` that either pattern stores, as sorted positions have it.
Move random_move(std::int64_t places, double before, double after, unsigned seed) {
  std::mt19937 random(seed);
  Move move{0, {}};
  for (std::int64_t i = 0; i < places; ++i) {
    const bool was = std::bernoulli_distribution(before)(random),
               is = std::bernoulli_distribution(after)(random);
    if (is) move.source.push_back(was ? move.before : -1);
    move.before += was ? 1 : 0;
  }
  return move;
}

std::vector<std::byte> random_bytes(std::int64_t count) {
  std::mt19937 random(7);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random() | 1U);
  return bytes;
}

// One byte after the other.
std::vector<std::byte> expected(const std::vector<std::byte>& from, const Move& move, std::int64_t block) {
  std::vector<std::byte> to;
  for (const std::int64_t s : move.source) {
    for (std::int64_t b = 0; b < block; ++b) {
      to.push_back(s < 0 ? std::byte{} : from[static_cast<std::size_t>(s * block + b)]);
    }
  }
  return to;
}

TEST(MoveBlocksTest, EverySizeOfBlockAndOfPattern) {
  ThreadPool pool(3);
  for (const std::int64_t block : {1, 2, 3, 4, 8, 16, 24, 1024, 300'000}) {
    const std::int64_t places = block > 10'000 ? 40 : 700;
    for (const auto& [before, after] :
         {std::pair{0.5, 0.5}, {0.1, 0.9}, {0.9, 0.1}, {0.0, 0.5}, {0.5, 0.0}, {1.0, 1.0}}) {
      const Move move = random_move(places, before, after, static_cast<unsigned>(block));
      const std::vector<std::byte> from = random_bytes(move.before * block);
      std::vector<std::byte> to(move.source.size() * static_cast<std::size_t>(block), std::byte{0xee});
      expect_ok(check_sources("test", move.source, move.before));
      move_blocks(from.data(), move.source, block, to.data(), pool.executor());
      EXPECT_EQ(to, expected(from, move, block)) << block << ' ' << before << ' ' << after;
    }
  }
}

// Places that are read later must not be written to first, whether blocks move to the front or to the back.
TEST(MoveBlocksTest, InPlace) {
  for (const std::int64_t block : {1, 2, 3, 4, 8, 16, 24, 1024}) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      Move move = random_move(300, 0.5, 0.5, seed);
      const auto count = static_cast<std::int64_t>(move.source.size());
      if (count < move.before) move.source.resize(static_cast<std::size_t>(move.before), -1);
      move.before = static_cast<std::int64_t>(move.source.size());
      std::vector<std::byte> blocks = random_bytes(move.before * block);
      const std::vector<std::byte> want = expected(blocks, move, block);
      move_blocks_in_place(blocks.data(), move.source, block);
      EXPECT_EQ(blocks, want) << block << ' ' << seed;
    }
  }
}

TEST(MoveBlocksTest, SourcesAreChecked) {
  expect_ok(check_sources("test", std::vector<std::int64_t>{-1, 0, -1, 2}, 3));
  for (const std::vector<std::int64_t>& bad :
       {std::vector<std::int64_t>{0, 3}, {1, 1}, {1, 0}, {-2, 0}, {0, -1, 0}}) {
    const Status status = check_sources("test", bad, 3);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find("[test] source must be -1, or ascend within [0, 3); got source["),
              std::string::npos)
        << status.message();
  }
}

}  // namespace
}  // namespace rarefy
