// How products are cut into tasks: a pure function, so every property is checked without running it.
#include "cpu/blocking.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/registry.h"
#include "cpu/drivers.h"
#include "cpu/pairs_blocking.h"

namespace rarefy::cpu {
namespace {

BlockingProblem problem(std::int64_t tokens, std::int64_t out, std::int64_t red, std::int64_t out_block,
                        std::int64_t red_block, double density, int threads) {
  BlockingProblem p;
  p.tokens = tokens;
  p.out_block = out_block;
  p.red_block = red_block;
  p.out_blocks = (out + out_block - 1) / out_block;
  p.red_blocks = (red + red_block - 1) / red_block;
  p.entries = static_cast<std::int64_t>(density * static_cast<double>(p.out_blocks * p.red_blocks));
  p.threads = threads;
  return p;
}

std::int64_t tasks(const BlockingProblem& p, const Blocking& b) {
  const std::int64_t tokens = b.panels * b.vectors * p.width;
  return (p.tokens + tokens - 1) / tokens * b.splits;
}

// Parts cover all blocks in order, and none has more than its share and one block's work.
TEST(BlockingTest, PartsHaveEqualWork) {
  const std::vector<std::int32_t> begin{0, 0, 3, 3, 10, 11, 40, 41, 42, 50, 50};
  const auto blocks = std::ssize(begin) - 1;
  for (const std::int64_t per_block : {0, 12}) {
    for (const std::int64_t parts : {1, 2, 3, 7, 20}) {
      const auto bound = [&](std::int64_t part) {
        return begin_of_part(begin.data(), blocks, 4, per_block, part, parts);
      };
      const auto work = [&](std::int32_t b) { return begin[b] * 4 + b * per_block; };
      EXPECT_EQ(bound(0), 0);
      EXPECT_EQ(bound(parts), blocks);
      for (std::int64_t part = 0; part < parts; ++part) {
        ASSERT_LE(bound(part), bound(part + 1));
        EXPECT_LE(work(bound(part + 1)) - work(bound(part)), work(blocks) / parts + 1 + 29 * 4 + per_block);
      }
    }
  }
  const std::vector<std::int32_t> none(5, 0);
  EXPECT_EQ(begin_of_part(none.data(), 4, 1, 0, 1, 1), 4);
}

TEST(BlockingTest, StaysWithinWhatTheKernelsOffer) {
  for (const std::int64_t tokens : {1, 15, 64, 100, 4096}) {
    for (const std::int64_t block : {1, 3, 4, 16, 100}) {
      for (const double density : {0.0, 0.01, 0.5, 1.0}) {
        for (const int threads : {1, 2, 64}) {
          for (const int max_vectors : {2, 3, 4}) {
            BlockingProblem p = problem(tokens, 1000, 700, block, 3, density, threads);
            p.max_vectors = max_vectors;
            const Blocking b = choose_blocking(p);
            EXPECT_GE(b.vectors, 1);
            EXPECT_LE(b.vectors, max_vectors);
            EXPECT_GE(b.splits, 1);
            EXPECT_LE(b.splits, std::max<std::int64_t>(1, p.out_blocks));
            EXPECT_GE(b.panels, 1);
            EXPECT_GE(b.tile_blocks, 1);
            EXPECT_LE(b.tile_blocks, p.red_blocks);
          }
        }
      }
    }
  }
}

// Nothing to write is one task that writes nothing; nothing to read still leaves biases to write, in no
// more tasks than threads.
TEST(BlockingTest, EmptyMatricesHaveOneTask) {
  for (const int threads : {1, 2, 64}) {
    for (const std::int64_t red : {0, 64}) {
      const BlockingProblem p = problem(10, 0, red, 4, 4, 0, threads);
      EXPECT_EQ(tasks(p, choose_blocking(p)), 1) << red << " inputs, " << threads << " threads";
    }
    const BlockingProblem p = problem(10, 64, 0, 4, 4, 0, threads);
    EXPECT_EQ(choose_blocking(p).tile_blocks, 1);
    EXPECT_LE(tasks(p, choose_blocking(p)), threads);
  }
}

TEST(BlockingTest, FlatBlocksGoThroughTheTransposedIndex) {
  EXPECT_TRUE(choose_blocking(problem(512, 1024, 1024, 1, 16, 0.1, 2)).scatter);
  EXPECT_TRUE(choose_blocking(problem(512, 1024, 1024, 1, 4, 0.5, 2)).scatter);
  for (const std::int64_t rows : {4, 8, 16, 32}) {
    EXPECT_FALSE(choose_blocking(problem(512, 1024, 1024, rows, 1, 0.1, 2)).scatter) << rows;
    EXPECT_FALSE(choose_blocking(problem(512, 1024, 1024, rows, rows, 0.5, 2)).scatter) << rows;
  }
}

TEST(BlockingTest, EveryThreadGetsWork) {
  for (const int threads : {1, 2, 4, 16}) {
    for (const std::int64_t tokens : {16, 128, 512}) {
      const BlockingProblem p = problem(tokens, 4096, 1024, 16, 16, 0.25, threads);
      EXPECT_GE(tasks(p, choose_blocking(p)), threads) << tokens << " tokens, " << threads << " threads";
    }
  }
}

TEST(BlockingTest, TwoThreadsFinishTogether) {
  // 192 tokens in panels of 64 make three tasks for two threads: some cut must do better than 2 : 1.
  const BlockingProblem p = problem(192, 1024, 1024, 4, 1, 0.5, 2);
  EXPECT_EQ(tasks(p, choose_blocking(p)) % 2, 0);
}

TEST(BlockingTest, TheTileOfAllPanelsFitsInL2) {
  for (const std::int64_t red : {512, 3072, 16384}) {
    const BlockingProblem p = problem(512, 4096, red, 16, 16, 0.5, 2);
    const Blocking b = choose_blocking(p);
    EXPECT_LE(b.tile_blocks * p.red_block * b.panels * b.vectors * p.width * 4, 512 * 1024) << red;
  }
}

// Where woven panels share nothing, the part of W that they meet one after the other is in L3.
TEST(BlockingTest, LargeWeightsOfWovenPanelsGoInParts) {
  for (const int threads : {1, 2}) {
    BlockingProblem p = problem(512, 11008, 4096, 32, 1, 0.25, threads);
    p.woven = true;
    const Blocking b = choose_blocking(p);
    ASSERT_EQ(b.panels, 1);
    EXPECT_GE(b.splits, 5);  // 45 MB, of which two threads or neighbours have 8 each
    p.out_blocks /= 16;
    p.entries /= 16;
    EXPECT_LE(choose_blocking(p).splits, 2 * threads);
  }
}

TEST(BlockingTest, LargeWeightsAreSharedBetweenPanels) {
  EXPECT_EQ(choose_blocking(problem(512, 1024, 1024, 16, 16, 0.5, 1)).panels, 1);  // 2 MB
  EXPECT_GT(choose_blocking(problem(512, 4096, 4096, 16, 16, 0.5, 1)).panels, 1);  // 33 MB
}

// Of pairs two panels do, though one of 4096 inputs is half of L2.
TEST(BlockingTest, PairsOfLargeWeightsMeetTwoPanels) {
  Problem p;
  p.tokens = 512;
  Machine machine;
  machine.l2 = 1 << 20;
  PanelWork work{.tile_cycles = 13, .packed = 4096 * 32, .panel_size = 3 * 4096 * 32};
  for (const std::int64_t features : {768, 11008}) {
    work.out_features = features;
    work.out_blocks = features / 32;
    work.tiles = static_cast<double>(features * 4096 / 2) / 512;
    const auto chosen = from_config<PairsBlocking>(configure_panels(work, p, machine));
    EXPECT_EQ(chosen.panels, features == 768 ? 1 : 2);
  }
}

// Where loads have room beside two FMAs a cycle.
TEST(BlockingTest, LinesOfXAreAskedForWithRoomForLoads) {
  const Problem p = make_problem(Op::linear, BsrShape{64, 64, 4, 1, 512}, 512, DType::f32);
  for (const Kernel& kernel : registry()) {
    if (kernel.name != "avx512_linear") continue;
    Machine machine;
    machine.features = {"avx512"};
    EXPECT_EQ(from_config<Blocking>(kernel.configure(p, machine)).asks, 1);
    machine.features.emplace_back("avx512_load_bound");
    EXPECT_EQ(from_config<Blocking>(kernel.configure(p, machine)).asks, 0);
  }
}

// What a kernel for a few tokens asks for, by processor and by where its weight lies; squares by
// few_turned.h.
TEST(BlockingTest, AFewTokensAskForWhatAProcessorGainsBy) {
  struct Processor {
    std::vector<std::string> features;
    std::int64_t l1;
    Ask cached[2], from_memory[2];  // one token, four
    bool turns;
  };
  const Processor processors[] = {
      {{"avx2", "avx512", "avx512_bf16_fast"}, 48 << 10, {Ask::near, Ask::near}, {Ask::far, Ask::far}, true},
      {{"avx2", "prefetch_l2", "avx512", "avx512_bf16_fast"},
       32 << 10,
       {Ask::nothing, Ask::nothing},
       {Ask::nothing, Ask::l2},
       true},
      {{"avx2", "prefetch_l2"}, 32 << 10, {Ask::nothing, Ask::far}, {Ask::l2, Ask::l2}, true},
      {{"avx2", "avx512", "avx512_load_bound"}, 48 << 10, {Ask::far, Ask::far}, {Ask::far, Ask::far}, false}};
  for (const Processor& processor : processors) {
    Machine machine;
    machine.features = processor.features;
    machine.l1 = processor.l1;
    for (const int i : {0, 1}) {
      for (const bool cached : {true, false}) {
        const std::int64_t n = cached ? 3072 : 11008, k = cached ? 768 : 4096;
        const BsrShape shape{n, k, 16, 16, n * k / 512};
        const Problem p = make_problem(Op::linear, shape, i == 0 ? 1 : 4, DType::f32);
        const auto split = from_config<FewSplit>(configure_few(p, machine));
        EXPECT_EQ(static_cast<Ask>(split.ask), (cached ? processor.cached : processor.from_memory)[i])
            << processor.features.back() << ' ' << p.tokens << ' ' << cached;
        EXPECT_EQ(split.turned != 0, processor.turns) << processor.features.back();
      }
    }
  }
}

// From memory a Zen 4's own prefetchers follow blocks of long rows that one pass or two see, if those are
// whole lines.
TEST(BlockingTest, AZen4AsksForAFewTokensByBlock) {
  Machine machine;
  machine.features = {"avx2", "prefetch_l2", "avx512", "avx512_bf16_fast"};
  machine.l1 = 32 << 10;
  struct Case {
    std::int64_t rows, cols;
    DType dtype;
    Ask one, two, four;
  };
  for (const Case& c : {Case{16, 16, DType::f32, Ask::nothing, Ask::nothing, Ask::l2},
                        {32, 32, DType::f32, Ask::nothing, Ask::near, Ask::l2},
                        {64, 64, DType::f32, Ask::far, Ask::near, Ask::l2},
                        {16, 1, DType::f32, Ask::far, Ask::near, Ask::l2},
                        {8, 8, DType::f32, Ask::far, Ask::near, Ask::l2},
                        {4, 1, DType::f32, Ask::l2, Ask::l2, Ask::l2},
                        {16, 16, DType::bf16, Ask::nothing, Ask::nothing, Ask::l2},
                        {64, 64, DType::bf16, Ask::l2, Ask::l2, Ask::l2},
                        {32, 2, DType::bf16, Ask::far, Ask::near, Ask::l2},
                        {32, 32, DType::i8, Ask::l2, Ask::l2, Ask::l2},
                        {16, 1, DType::i8, Ask::l2, Ask::l2, Ask::l2}}) {
    const std::pair<std::int64_t, Ask> asked[] = {{1, c.one}, {2, c.two}, {4, c.four}};
    for (const auto& [tokens, ask] : asked) {
      const BsrShape shape{11008, 4096, c.rows, c.cols, 11008 * 4096 / 2 / (c.rows * c.cols)};
      Problem p = make_problem(Op::linear, shape, tokens, DType::f32);
      p.weight.dtype = c.dtype;
      const auto split = from_config<FewSplit>(configure_few(p, machine));
      EXPECT_EQ(static_cast<Ask>(split.ask), ask) << c.rows << 'x' << c.cols << ' ' << tokens;
    }
  }
}

// Without AVX-512: far for one token, unless a block of long rows is seen in two passes, and L2 for more. Out
// of caches single columns are found by themselves.
TEST(BlockingTest, AZen3AsksForAFewTokensByBlock) {
  Machine machine;
  machine.features = {"avx2", "prefetch_l2"};
  machine.l1 = 32 << 10;
  const auto ask = [&](std::int64_t n, std::int64_t k, std::int64_t rows, std::int64_t cols,
                       std::int64_t tokens) {
    const BsrShape shape{n, k, rows, cols, n * k / 2 / (rows * cols)};
    return static_cast<Ask>(
        from_config<FewSplit>(configure_few(make_problem(Op::linear, shape, tokens, DType::f32), machine))
            .ask);
  };
  for (const auto& [rows, cols, one] : {std::tuple{16, 16, Ask::l2},
                                        {32, 32, Ask::far},
                                        {16, 1, Ask::far},
                                        {8, 8, Ask::far},
                                        {4, 1, Ask::l2},
                                        {64, 1, Ask::far}}) {
    EXPECT_EQ(ask(11008, 4096, rows, cols, 1), one) << rows << 'x' << cols;
    EXPECT_EQ(ask(11008, 4096, rows, cols, 2), Ask::l2) << rows << 'x' << cols;
    EXPECT_EQ(ask(11008, 4096, rows, cols, 4), Ask::l2) << rows << 'x' << cols;
    EXPECT_EQ(ask(3072, 768, rows, cols, 1), Ask::nothing) << rows << 'x' << cols;
    EXPECT_EQ(ask(3072, 768, rows, cols, 4), cols == 1 && rows <= 16 ? Ask::nothing : Ask::far)
        << rows << 'x' << cols;
  }
}

}  // namespace
}  // namespace rarefy::cpu
