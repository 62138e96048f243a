// Times the sm80 family, whose kernels run on this GPU as on any since Ampere, by way of the public API. What
// they compute is checked by cuda_products_test.cc.
#include "hopper.h"
#include "rarefy/backend.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;

void check_ok(const Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.message().c_str());
  std::exit(1);
}

template <class T>
void time_type(Report& report, Dense& dense, const char* name) {
  constexpr std::int64_t m = 8192, n = 4096, k = 4096;
  const Times t_linear = dense.linear<T>(m, n, k), t_gradient = dense.grad_weight<T>(m, n, k);
  for (const std::int64_t b : {128, 64, 32, 16}) {
    if (b == 16 && sizeof(T) == 4) continue;
    for (const double density : {.5, .25, .1}) {
      const Setup<T> s({false, m, n, k, b, b, density}, false, 7);
      const BsrShape shape{n, k, b, b, s.pattern.blocks()};
      const auto pattern = rarefy::Pattern::create(shape, s.pattern.crow, s.pattern.col);
      check_ok(pattern.status());
      const auto words = to_device(std::vector<std::int32_t>(pattern->plan().begin(), pattern->plan().end()));
      const PlanView plan =
          *view_device_plan("bench", shape, words.data(), static_cast<std::int64_t>(words.size));
      const MatrixView x{s.x.data(), kDType<T>, m, k, k, Device::cuda};
      // What linear leaves is grad_input's and grad_weight's dY.
      const MatrixView dy{s.y.data(), kDType<T>, m, n, n, Device::cuda};
      const MutableMatrixView y{s.y.data(), kDType<T>, m, n, n, Device::cuda};
      Buffer<T> dvalues(s.values.size), dx(s.x.size);
      const BsrView w{plan, s.values.data(), kDType<T>, Device::cuda};
      const auto time = [&](const char* op, const Times& t_dense, auto&& call) {
        const Times t = time_graph([&](cudaStream_t stream) {
          Context context;
          context.stream = stream;
          check_ok(call(context));
        });
        report.add({op, m, n, k, block_text(s.c), density, name, "", t, t_dense, 0, 0, 0, 0,
                    sizeof(T) == 4 ? "f32" : "bf16"});
      };
      time("linear", t_linear,
           [&](const Context& c) { return linear(x, w, nullptr, Activation::none, y, c); });
      time("grad_input", t_linear, [&](const Context& c) {
        return grad_input(dy, w, {dx.data(), kDType<T>, m, k, k, Device::cuda}, c);
      });
      time("grad_weight", t_gradient,
           [&](const Context& c) { return grad_weight(dy, x, plan, dvalues.data(), kDType<T>, c); });
    }
  }
}

}  // namespace

void time_sm80(Report& report, Dense& dense, bool /*every_config*/) {
  check_ok(force_impl("cuda:sm80"));
  time_type<float>(report, dense, "sm80");
  time_type<__nv_bfloat16>(report, dense, "sm80");
  check_ok(force_impl(""));
}

}  // namespace bench
