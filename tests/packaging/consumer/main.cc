// Uses the library as its documentation shows: a 4×4 weight with two of four 2×2 blocks.
#include <rarefy/rarefy.h>

#include <array>
#include <cstdio>
#include <cstring>

int main() {
  const std::array<std::int32_t, 3> crow{0, 1, 2};
  const std::array<std::int32_t, 2> col{1, 0};
  const rarefy::Result<rarefy::Pattern> pattern = rarefy::Pattern::create({4, 4, 2, 2, 0}, crow, col);
  if (!pattern.ok()) {
    std::printf("%s\n", pattern.status().message().c_str());
    return 1;
  }
  const std::array<float, 8> values{1, 2, 3, 4, 5, 6, 7, 8};
  const std::array<float, 4> x{1, 10, 100, 1000};
  std::array<float, 4> y{};
  rarefy::ThreadPool pool(2);
  const rarefy::Status status =
      rarefy::linear({x.data(), rarefy::DType::f32, 1, 4, 4}, {pattern->view(), values.data()}, nullptr,
                     rarefy::Activation::none, {y.data(), rarefy::DType::f32, 1, 4, 4}, {pool.executor()});
  const std::array<float, 4> expected{2100, 4300, 65, 87};
  const bool right = status.ok() && y == expected && std::strcmp(rarefy::version(), RAREFY_VERSION) == 0;
  std::printf("rarefy %s: %s\n", rarefy::version(), right ? "ok" : "wrong");
  return right ? 0 : 1;
}
