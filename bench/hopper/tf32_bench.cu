// Times f32 multiplied as tf32, by way of the public API, against cuBLAS in tf32. What it computes is checked
// by sm90_tf32_test.cc.
#include "hopper.h"
#include "rarefy/backend.h"
#include "rarefy/linear.h"
#include "rarefy/pattern.h"
#include "setup.cuh"

namespace bench {
namespace {

using namespace rarefy;

template <class T>
T value_of(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::printf("%s\n", result.status().message().c_str());
  std::exit(1);
}

void check_ok(const Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.message().c_str());
  std::exit(1);
}

// What callers hold of a weight for one product, and workspace.
struct Held {
  Problem problem;
  DerivedSizes sizes;
  Buffer<char> prepared, packed, workspace;
  double prepare_us = 0, pack_us = 0;
  Held(Op op, const BsrShape& shape, std::int64_t tokens, const BsrView& w)
      : problem(asked(op, shape, tokens)),
        sizes(value_of(derived_sizes(problem))),
        prepared(static_cast<std::size_t>(sizes.prepared)),
        packed(static_cast<std::size_t>(sizes.packed)),
        workspace(static_cast<std::size_t>(room())) {
    const auto run = [&](auto&& make) {
      return time_graph([&](cudaStream_t stream) { check_ok(make(context(stream))); }, 5).median;
    };
    if (sizes.prepared > 0)
      prepare_us = run([&](const Context& c) { return prepare(problem, w.plan, prepared.data(), c); });
    if (sizes.packed > 0)
      pack_us = run([&](const Context& c) { return pack(problem, w, prepared.data(), packed.data(), c); });
  }
  Context context(cudaStream_t stream) const {
    Context context;
    context.stream = stream;
    context.tf32 = true;
    context.workspace.data = workspace.data();
    context.workspace.bytes = static_cast<std::int64_t>(workspace.size);
    return context;
  }
  Derived derived() const {
    return {sizes.key, prepared.data(), sizes.packed > 0 ? packed.data() : nullptr, sizes.prepared,
            sizes.packed};
  }
  std::string config() const {
    const Explanation chosen = explain(problem);
    return chosen.kernel + ' ' + chosen.config;
  }

 private:
  static Problem asked(Op op, const BsrShape& shape, std::int64_t tokens) {
    Problem problem = make_problem(op, shape, tokens, DType::f32, Device::cuda);
    problem.tf32 = true;
    problem.derived = value_of(derived_sizes(problem)).key;
    return problem;
  }
  std::int64_t room() const { return value_of(workspace_size(problem)); }
};

}  // namespace

void time_tf32(Report& report, Dense& dense, bool /*every_config*/) {
  struct Shape {
    std::int64_t m, n, k;
  };
  dense.tf32 = true;
  for (const auto& [m, n, k] : {Shape{8192, 4096, 4096}, {8192, 14336, 4096}, {4096, 3072, 768}}) {
    const bool main_shape = n == 4096;
    const Times t_linear = dense.linear<float>(m, n, k), t_input = dense.linear<float>(m, k, n),
                t_gradient = dense.grad_weight<float>(m, n, k);
    for (const std::int64_t b : {128, 64, 32, 16}) {
      if (!main_shape && b != 64) continue;
      for (const double density : {.5, .25, .1}) {
        const Setup<float> s({false, m, n, k, b, b, density}, false, 7);
        const BsrShape shape{n, k, b, b, s.pattern.blocks()};
        const auto pattern = value_of(rarefy::Pattern::create(shape, s.pattern.crow, s.pattern.col));
        const auto words = to_device(std::vector<std::int32_t>(pattern.plan().begin(), pattern.plan().end()));
        BsrView w{
            value_of(view_device_plan("bench", shape, words.data(), static_cast<std::int64_t>(words.size))),
            s.values.data(), DType::f32, Device::cuda};
        const auto matrix = [&](float* data, std::int64_t columns) {
          return MutableMatrixView{data, DType::f32, m, columns, columns, Device::cuda};
        };
        const MatrixView x{s.x.data(), DType::f32, m, k, k, Device::cuda},
            dy{s.y.data(), DType::f32, m, n, n, Device::cuda};  // what linear leaves
        Buffer<float> dvalues(s.values.size), dx(s.x.size);
        const auto time = [&](Op op, const Times& t_dense, auto&& call) {
          const Held held(op, shape, m, w);
          w.derived = held.derived();
          const Times t = time_graph([&](cudaStream_t stream) { check_ok(call(held.context(stream))); });
          report.add({std::string(name(op)), m, n, k, block_text(s.c), density, "sm90", held.config(), t,
                      t_dense, 0, held.prepare_us, 0, held.pack_us, "tf32"});
        };
        time(Op::linear, t_linear, [&](const Context& c) {
          return linear(x, w, nullptr, Activation::none, matrix(s.y.data(), n), c);
        });
        time(Op::grad_input, t_input,
             [&](const Context& c) { return grad_input(dy, w, matrix(dx.data(), k), c); });
        time(Op::grad_weight, t_gradient, [&](const Context& c) {
          return grad_weight(dy, x, w.plan, dvalues.data(), DType::f32, c, w.derived);
        });
      }
    }
  }
  dense.tf32 = false;
}

}  // namespace bench
