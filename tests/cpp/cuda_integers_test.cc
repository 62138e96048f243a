// Products of integers on a GPU against the host's, which have tests of their own: every width, ragged edges,
// signs of ReLU, more elements than threads. Buffers are of exact sizes, so that memcheck sees a step too
// far.
#include <gtest/gtest.h>

#include <cstring>

#include "core/integers.h"
#include "cuda_device.h"
#include "product_checks.h"
#include "rarefy/sparse.h"

namespace rarefy::test {
namespace {

template <class U>
std::vector<U> random_bits(std::size_t count, std::uint64_t seed) {
  std::vector<U> bits(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15U + seed;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9U;
    bits[i] = static_cast<U>(x ^ x >> 29);
  }
  return bits;
}

template <class U>
void expect_same_as_host(const ProblemSpec& spec, bool with_bias) {
  SCOPED_TRACE(::testing::Message() << 8 * sizeof(U) << " bits, M=" << spec.m << " N=" << spec.n << " K="
                                    << spec.k << " block " << spec.block_rows << 'x' << spec.block_cols
                                    << " density " << spec.density << (with_bias ? ", bias" : ""));
  const Problem problem = make_problem(spec);
  const BsrShape& shape = problem.pattern.shape();
  const auto x = random_bits<U>(static_cast<std::size_t>(spec.m * spec.k), 1),
             values = random_bits<U>(static_cast<std::size_t>(shape.value_count()), 2),
             bias = random_bits<U>(static_cast<std::size_t>(spec.n), 3);
  const auto plan = DeviceBuffer::upload<std::int32_t>(problem.pattern.plan());
  const auto device_x = DeviceBuffer::upload<U>(x), device_values = DeviceBuffer::upload<U>(values),
             device_bias = DeviceBuffer::upload<U>(bias);
  DeviceBuffer y(static_cast<std::size_t>(spec.m * spec.n) * sizeof(U));
  const PlanView view = *view_device_plan("test", shape, static_cast<const std::int32_t*>(plan.data()),
                                          static_cast<std::int64_t>(problem.pattern.plan().size()));
  for (const Activation activation : {Activation::none, Activation::relu}) {
    std::vector<U> want(y.bytes() / sizeof(U)), got(want.size());
    expect_ok(integer_linear("test", sizeof(U), x.data(), spec.m, problem.pattern.view(), values.data(),
                             with_bias ? bias.data() : nullptr, activation, want.data()));
    y.fill(std::byte{0x5a});
    expect_ok(integer_linear_on_device("test", sizeof(U), device_x.data(), spec.m, view, device_values.data(),
                                       with_bias ? device_bias.data() : nullptr, activation, y.data(), {}));
    const std::vector<std::byte> bytes = y.download();
    std::memcpy(got.data(), bytes.data(), bytes.size());
    EXPECT_EQ(got, want);
  }
}

TEST(CudaIntegersTest, SameAsTheHost) {
  if (const std::string reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  for (const ProblemSpec& spec : {ProblemSpec{7, 22, 35, 4, 3, 0.4, DType::f64, true, 0},
                                  ProblemSpec{1, 1, 1, 1, 1, 1.0, DType::f64, true, 0},
                                  ProblemSpec{130, 67, 129, 16, 16, 0.3, DType::f64, true, 0},
                                  ProblemSpec{5, 33, 9, 1, 7, 0.0, DType::f64, true, 0}}) {
    for (const bool with_bias : {true, false}) {
      expect_same_as_host<std::uint8_t>(spec, with_bias);
      expect_same_as_host<std::uint16_t>(spec, with_bias);
      expect_same_as_host<std::uint32_t>(spec, with_bias);
      expect_same_as_host<std::uint64_t>(spec, with_bias);
    }
  }
}

}  // namespace
}  // namespace rarefy::test
