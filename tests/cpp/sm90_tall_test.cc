// The Hopper kernels of tall vectors, networks of them, and both kinds of weight gradients against the host's
// products in double.
#include <gtest/gtest.h>

#include "rarefy/feed_forward.h"
#include "sm90_checks.h"

namespace rarefy::test {
namespace {

TEST_F(Sm90Test, GradWeight) {
  const std::pair<std::int64_t, std::int64_t> blocks[] = {{64, 64},  {128, 128}, {64, 128}, {192, 64},
                                                          {128, 64}, {32, 32},   {16, 16},  {16, 64},
                                                          {64, 48},  {48, 32}};
  for (const auto& [r, c] : blocks) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const bool integers : {false, true}) {
        // Empty and full rows; few tokens and many, in shares; more block rows than threads.
        for (const ProblemSpec& spec :
             {ProblemSpec{300, 9 * r, 13 * c, r, c, 0.3, dtype, integers, 8},
              ProblemSpec{1, 5 * r - 24, 3 * c - 40, r, c, 0.6, dtype, integers, 8},
              ProblemSpec{1500, 2 * r, 5 * c - 8, r, c, 1.0, dtype, integers, 16}}) {
          const Problem problem = make_problem(spec);
          ProblemIn<DeviceBuffer> gpu(problem);
          const Force force("cuda:sm90");
          expect_ok(gpu.grad_weight());  // thread blocks find their tiles, or the call makes a list of them
          const std::vector<std::byte> found = gpu.dvalues().download();
          gpu.poison();
          gpu.hold_derived(4096);  // the caller has the list
          expect_ok(gpu.grad_weight());
          expect_grad_weight(problem, gpu);
          EXPECT_EQ(gpu.dvalues().download(), found);
        }
      }
    }
  }
  const Problem problem = make_problem({80, 64 * 500, 128, 64, 64, 0.5, DType::bf16, true, 0});
  ProblemIn<DeviceBuffer> gpu(problem);
  const Force force("cuda:sm90");
  expect_ok(gpu.grad_weight());
  expect_grad_weight(problem, gpu);
}

// Both gradients of tall vectors: few tokens and many, in every number of shares; rows of no, few and more
// columns than a tile has, for each number of products; two block rows in a tile; more tiles than thread
// blocks, so that some are parts; edges. Held or made for the call, the same bits. X by token and by feature.
TEST_F(Sm90Test, TallGradients) {
  for (const std::int64_t r : {32, 64, 96, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const ProblemSpec& spec :
           {ProblemSpec{300, 3 * r - 24, 200, r, 1, 0.3, dtype, true, 8},
            ProblemSpec{1, 2 * r, 40, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{77, 2 * r - 8, 1096, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{400, 2 * r, 496, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{400, 2 * r, 288, r, 1, 1.0, dtype, true, 8},
            ProblemSpec{1500, 2 * r, 328, r, 1, 0.5, dtype, false, 16},
            ProblemSpec{r <= 64 ? 200 : 40, 150 * r, 72, r, 1, 0.2, dtype, true, 0}}) {
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu(problem);
        const auto run = [&] {
          const Force force("cuda:sm90");
          gpu.poison();
          expect_ok(gpu.grad_weight());
          expect_grad_weight(problem, gpu);
          expect_ok(gpu.grad_input());
          expect_grad_input(problem, gpu);
          return std::pair{gpu.dvalues().download(), gpu.dx().download()};
        };
        const auto made = run();

        ProblemSpec by_feature = spec;
        by_feature.x_layout = Layout::by_feature;
        // Columns in pieces of 16 bytes, and what lies between them NaN; rows of dY as well.
        by_feature.stride = 8 + (8 - spec.m % 8) % 8;
        by_feature.n -= by_feature.stride % 8;
        const Problem other = make_problem(by_feature);
        ProblemIn<DeviceBuffer> in_place(other);
        const auto check_every_width = [&](const Problem& host, ProblemIn<DeviceBuffer>& device) {
          std::vector<double> first;
          std::vector<const char*> configs{"split=1 columns=288", "split=2 columns=264",
                                           "split=4 columns=272", "split=1 columns=248",
                                           "split=2 columns=288", "split=4 columns=64"};
          if (r == 64) {  // two block rows in a tile
            for (const char* of_pairs : {"slots=4 split=1 pairs=1 columns=288 long_steps=0",
                                         "slots=4 split=1 pairs=2 columns=288 long_steps=0",
                                         "slots=4 split=1 pairs=2 columns=128 long_steps=0"})
              configs.push_back(of_pairs);
            for (const char* of_long_steps :
                 {"slots=3 pairs=0 split=1 columns=480 turns=0 long_steps=1",
                  "slots=3 pairs=0 split=2 columns=288 turns=2 long_steps=1 turners=2 last=40",
                  "slots=3 pairs=0 split=1 columns=96 turns=2 long_steps=1 turners=5 last=63"})
              configs.push_back(of_long_steps);
          }
          for (const char* config : configs) {
            SCOPED_TRACE(config);
            const Force force("cuda:sm90,sm90_tall_gradient(" + std::string(config) + ')');
            device.poison();
            expect_ok(device.grad_weight());
            const std::vector<double> found = decode(device.dvalues().download(), dtype);
            if (first.empty() || !spec.integers) expect_grad_weight(host, device);
            if (first.empty()) first = found;
            EXPECT_TRUE(!spec.integers || found == first);
          }
        };
        check_every_width(problem, gpu);
        check_every_width(other, in_place);
        gpu.hold_derived(4096);
        EXPECT_EQ(run(), made);
      }
    }
  }
}

// Two block rows in a tile, of which one stores far more, or everything, or nothing; an odd number of rows;
// more tiles than clusters, so that some are parts.
TEST_F(Sm90Test, TallGradientsOfUnevenRows) {
  for (const std::int64_t rows : {2, 4, 5, 8, 13, 150}) {
    for (const double density : {0.1, 0.4}) {
      for (const std::int64_t cols : {200, 1208}) {
        const ProblemSpec spec{rows > 100 ? 70 : 300, rows * 64, cols, 64, 1, density, DType::bf16, true, 8};
        SCOPED_TRACE(text_of(spec));
        const Problem problem = make_problem(spec);
        ProblemIn<DeviceBuffer> gpu(problem);
        for (const char* config : {"pairs=1 columns=288 turns=0", "pairs=2 columns=288 turns=0",
                                   "pairs=2 columns=288 turns=2", "pairs=2 columns=136 turns=0"}) {
          SCOPED_TRACE(config);
          const Force force("cuda:sm90,sm90_tall_gradient(slots=4 split=1 long_steps=0 " +
                            std::string(config) + ')');
          gpu.poison();
          expect_ok(gpu.grad_weight());
          expect_grad_weight(problem, gpu);
        }
      }
    }
  }
}

// X in place and transposed first; every number of groups and tiles; ragged edges; more rows than a round.
TEST_F(Sm90Test, Tall) {
  for (const std::int64_t r : {64, 128, 192, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const Layout x : kLayouts) {
        for (const Layout y : kLayouts) {
          for (const double density : {0.0, 0.3, 1.0}) {
            check({136, 4 * r - 8, 80, r, 1, density, dtype, true, 8, x, y}, "sm90_tall");
          }
          check({520, 3 * r - 24, 328, r, 1, 0.3, dtype, false, 8, x, y}, "sm90_tall");
          // TMA writes whole pieces of 16 bytes: tokens that end a row of Y come in eights.
          const bool by_token = x == Layout::by_token && y == Layout::by_token;
          check({by_token ? 33 : 24, 2 * r - 8, 40, r, 1, 0.5, dtype, true, 8, x, y}, "sm90_tall");
        }
      }
    }
  }
}

// A network of two such layers is its layers, bit for bit: hidden features are rounded between them.
TEST_F(Sm90Test, TallNetworks) {
  const Force force("cuda:sm90");
  const DeviceBuffer workspace(64 << 20);
  Context context;
  context.workspace = {workspace.data(), 64 << 20};
  for (const std::int64_t tokens : {17, 33, 40, 301}) {  // 17: the layers themselves
    for (const std::int64_t r : {64, 128}) {
      for (const Layout x : kLayouts) {
        if (x == Layout::by_feature && tokens % 8 != 0) continue;
        const Problem up = make_problem({tokens, 384, 136, r, 1, 0.4, DType::bf16, false, 0, x});
        const Problem down = make_problem({tokens, 200, 384, r, 1, 0.4, DType::bf16, false, 0}, 2);
        ProblemIn<DeviceBuffer> first(up), second(down);
        first.hold_derived(4096);
        second.hold_derived(4096);
        const auto rows = [&](const DeviceBuffer& out, std::int64_t cols) {
          return MutableMatrixView{out.data(), DType::bf16, tokens, cols, cols, Device::cuda};
        };
        const auto room = [&](std::int64_t cols) {
          DeviceBuffer buffer(static_cast<std::size_t>(tokens * cols * 2));
          buffer.fill(kPoison);  // initcheck does not see what TMA writes, and hidden is read
          return buffer;
        };
        const DeviceBuffer hidden = room(384), apart = room(200), together = room(200);
        expect_ok(linear(first.x_view(), first.weight(), first.bias(), Activation::gelu_erf,
                         rows(hidden, 384), context));
        expect_ok(linear(rows(hidden, 384), second.weight(), second.bias(), Activation::none,
                         rows(apart, 200), context));
        expect_ok(feed_forward(
            first.x_view(),
            {{first.weight(), first.bias()}, {second.weight(), second.bias()}, Activation::gelu_erf, {}},
            rows(together, 200), context));
        EXPECT_EQ(together.download(), apart.download()) << tokens << ' ' << r << ' ' << name(x);
      }
    }
  }
}

TEST_F(Sm90Test, TallOfManyTokens) {
  for (const std::int64_t tokens : {255, 257, 1281, 4100}) {
    check({tokens, 384, 96, 128, 1, 0.4, DType::bf16, true, 8}, "sm90_tall");
    check({tokens, 320, 96, 64, 1, 0.1, DType::bf16, true, 8}, "sm90_tall");
  }
  check({40000, 64, 32, 64, 1, 0.6, DType::bf16, true, 0}, "sm90_tall");
  check({600, 64 * 300, 64, 64, 1, 0.5, DType::f16, true, 0}, "sm90_tall");
}

}  // namespace
}  // namespace rarefy::test
