// Feed-forward networks for tests: random layers, their run on the host, and what the reference in double
// makes of them.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <set>

#include "core/registry.h"
#include "product_checks.h"
#include "rarefy/feed_forward.h"

namespace rarefy::test {

using BlockShapes = std::array<std::pair<std::int64_t, std::int64_t>, 3>;  // of up, gate, down

struct Spec {
  std::int64_t m, k, hidden, n;
  BlockShapes blocks;
  double density = 0.4;
  DType dtype = DType::f32;
  bool integers = false;
  std::int64_t stride = 1;
  bool gated = false;
  Activation activation = Activation::relu;
  std::optional<DType> stored = {};  // the dtype of the values, if not `dtype`
  bool rounds_x = false;             // x and hidden features may be rounded to it
};

constexpr BlockShapes all_of(std::int64_t rows, std::int64_t cols) {
  return {{{rows, cols}, {rows, cols}, {rows, cols}}};
}

// The layers as three problems, whose x is that of the first.
struct Layers {
  Spec spec;
  Problem up, gate, down;

  explicit Layers(const Spec& s)
      : spec(s),
        up(layer(s, 0, s.hidden, s.k, 1)),
        gate(layer(s, 1, s.hidden, s.k, 2)),
        down(layer(s, 2, s.n, s.hidden, 3)) {}

 private:
  static Problem layer(const Spec& s, std::size_t which, std::int64_t n, std::int64_t k, unsigned seed) {
    const auto& [rows, cols] = s.blocks[which];
    Problem problem = make_problem({s.m, n, k, rows, cols, s.density, s.dtype, s.integers, s.stride}, seed);
    if (s.stored) problem.values = decode(encode(problem.values, *s.stored), *s.stored);
    return problem;
  }
};

// The layers in the memory and dtypes of a call.
struct Chain {
  explicit Chain(const Layers& l, Executor on = {})
      : spec(l.spec),
        executor(on),
        x(upload(l.up.x, spec.dtype)),
        plans{upload(l.up), upload(l.gate), upload(l.down)},
        values{upload(l.up.values, stored()), upload(l.gate.values, stored()),
               upload(l.down.values, stored())},
        biases{upload(l.up.bias, spec.dtype), upload(l.gate.bias, spec.dtype),
               upload(l.down.bias, spec.dtype)},
        y(size(spec.n)),
        up(size(spec.hidden)),
        gate(size(spec.hidden)),
        shapes{l.up.pattern.shape(), l.gate.pattern.shape(), l.down.pattern.shape()},
        x_stride(l.up.x_stride()) {}

  FeedForward layers() const {
    FeedForward layers{layer(0), layer(2), spec.activation, {}};
    if (spec.gated) layers.gate = layer(1);
    return layers;
  }
  LayerView layer(std::size_t which) const {
    const auto words = static_cast<std::int64_t>(plans[which].bytes() / 4);
    const auto* data = static_cast<const std::int32_t*>(plans[which].data());
    BsrView weight{*view_device_plan("test", shapes[which], data, words), values[which].data(), stored(),
                   Device::cpu, derived[which]};
    weight.rounds_x = spec.rounds_x;
    return {weight, biases[which].data()};
  }
  // From now on layers come with what the best kernel of linear derives.
  void hold_derived() {
    for (const std::size_t which : {0, 1, 2}) {
      const rarefy::Problem asked = rarefy::make_problem(Op::linear, shapes[which], 4096, stored());
      const BsrView w = layer(which).weight;
      const DerivedSizes sizes = *derived_sizes(asked);
      prepared[which].emplace(static_cast<std::size_t>(sizes.prepared));
      packed[which].emplace(static_cast<std::size_t>(sizes.packed));
      expect_ok(prepare(asked, w.plan, prepared[which]->data()));
      expect_ok(pack(asked, w, prepared[which]->data(), packed[which]->data()));
      derived[which] = {sizes.key, prepared[which]->data(), packed[which]->data(), sizes.prepared,
                        sizes.packed};
    }
  }
  MatrixView x_view() const { return {x.data(), spec.dtype, spec.m, spec.k, x_stride}; }
  MutableMatrixView view(const Guarded<HostBuffer>& out, std::int64_t cols) const {
    return {out.data(), spec.dtype, spec.m, cols, cols + std::abs(spec.stride)};
  }
  Status feed_forward(bool save, Workspace workspace = {}) const {
    HiddenViews saved;
    if (save) saved.up = view(up, spec.hidden);
    if (save && spec.gated) saved.gate = view(gate, spec.hidden);
    Context context{executor, nullptr, workspace};
    return rarefy::feed_forward(x_view(), layers(), view(y, spec.n), context, saved);
  }

  Spec spec;
  Executor executor;
  HostBuffer x;
  std::array<HostBuffer, 3> plans, values, biases;
  Guarded<HostBuffer> y, up, gate;
  std::array<BsrShape, 3> shapes;
  std::int64_t x_stride;
  std::array<std::optional<HostBuffer>, 3> prepared, packed;
  std::array<Derived, 3> derived;

 private:
  DType stored() const { return spec.stored.value_or(spec.dtype); }
  std::size_t size(std::int64_t cols) const {
    return static_cast<std::size_t>(spec.m * (cols + std::abs(spec.stride))) * size_of(spec.dtype);
  }
  static HostBuffer upload(const std::vector<double>& numbers, DType dtype) {
    return HostBuffer::upload<std::byte>(encode(numbers, dtype));
  }
  static HostBuffer upload(const Problem& problem) {
    return HostBuffer::upload<std::int32_t>(problem.pattern.plan());
  }
};

inline std::vector<double> linear_of(const Problem& layer, const std::vector<double>& x,
                                     std::int64_t x_stride, const std::vector<double>& values,
                                     const std::vector<double>* bias,
                                     Activation activation = Activation::none) {
  const ProblemSpec& s = layer.spec;
  std::vector<double> y(static_cast<std::size_t>(s.m * s.n));
  const Force reference("ref");
  expect_ok(rarefy::linear({x.data(), DType::f64, s.m, s.k, x_stride},
                           {layer.pattern.view(), values.data(), DType::f64},
                           bias == nullptr ? nullptr : bias->data(), activation,
                           {y.data(), DType::f64, s.m, s.n, s.n}, oracle_context()));
  return y;
}

// act(h) in double: linear with no stored block and h as its bias, a token at a time.
inline std::vector<double> activated(const std::vector<double>& h, Activation activation) {
  const auto count = static_cast<std::int64_t>(h.size());
  const Pattern none = *Pattern::create({count, 0, 1, 1, 0}, std::vector<std::int32_t>(h.size() + 1), {});
  std::vector<double> y(h.size());
  const Force reference("ref");
  expect_ok(rarefy::linear({nullptr, DType::f64, 1, 0, 0}, {none.view(), nullptr, DType::f64}, h.data(),
                           activation, {y.data(), DType::f64, 1, count, count}));
  return y;
}

// A layer's sums and how far off they may be.
struct Sums {
  std::vector<double> value, error;

  Sums(const Problem& layer, const Layers& l) {
    const std::int64_t stride = l.up.x_stride();
    const auto bias = absolute(layer.bias);
    value = linear_of(layer, l.up.x, stride, layer.values, &layer.bias);
    error = linear_of(layer, absolute(l.up.x), stride, absolute(layer.values), &bias);
    const std::vector<double> terms = layer.stored_per_row();
    for (std::size_t e = 0; e < error.size(); ++e)
      error[e] *= gamma(terms[e % terms.size()] + 1, accumulator(l.spec.dtype));
  }
};

inline void expect_within(const char* what, const Guarded<HostBuffer>& output, const Spec& spec,
                          std::int64_t cols, const Sums& expected) {
  SCOPED_TRACE(what);
  const std::vector<double> got = decode(output.download(), spec.dtype);
  const std::vector<double> rounded = decode(encode(expected.value, spec.dtype), spec.dtype);
  const std::int64_t stride = cols + std::abs(spec.stride);
  for (std::int64_t m = 0; m < spec.m; ++m) {
    for (std::int64_t c = 0; c < cols; ++c) {
      const double number = got[static_cast<std::size_t>(m * stride + c)];
      const auto e = static_cast<std::size_t>(m * cols + c);
      if (spec.integers) {
        ASSERT_EQ(number, rounded[e]) << '(' << m << ", " << c << ')';
        continue;
      }
      const double bound = expected.error[e] * (1 + storing(spec.dtype)) +
                           storing(spec.dtype) * std::abs(expected.value[e]) +
                           (spec.dtype == DType::f16 ? 0x1p-25 : 0);
      ASSERT_LE(std::abs(number - expected.value[e]), bound) << '(' << m << ", " << c << ')';
    }
  }
}

// y = act(h) W2ᵀ + b2 with the errors of h passed on, as far as slopes (below 1.2) and weights do. In pairs,
// the second product takes act(h) as it is stored.
inline void expect_feed_forward(const Layers& l, const Chain& run, bool saved, bool pairs = false) {
  const Spec& s = l.spec;
  const double unit = accumulator(s.dtype);
  const Sums up(l.up, l), gate(l.gate, l);
  const std::vector<double>& argument = s.gated ? gate.value : up.value;
  std::vector<double> hidden = activated(argument, s.activation), factor = up.value;
  const DType kept = s.stored.value_or(s.dtype);
  if (pairs && s.gated && s.integers)  // exact before, so exact after
    hidden = decode(encode(hidden, kept), kept), factor = decode(encode(factor, kept), kept);
  std::vector<double> off(hidden.size());
  for (std::size_t e = 0; e < hidden.size(); ++e) {
    off[e] =
        1.2 * (s.gated ? gate : up).error[e] + activation_error(s.activation, argument[e], hidden[e], unit);
    if (!s.gated) continue;
    off[e] = off[e] * (std::abs(up.value[e]) + up.error[e]) + std::abs(hidden[e]) * up.error[e];
    hidden[e] *= factor[e];
    off[e] += unit * std::abs(hidden[e]);
  }
  if (pairs) {
    const double half = storing(kept);
    const int roundings = s.gated ? 3 : 1;  // of the gate's, of up's, and of their product
    for (std::size_t e = 0; e < hidden.size(); ++e) {
      off[e] += pairs_activation_error(s.activation, hidden[e]);
      for (int i = 0; i < roundings; ++i) off[e] = off[e] * (1 + half) + half * std::abs(hidden[e]);
    }
    if (s.integers) hidden = decode(encode(hidden, kept), kept);
  }
  Sums y = up;  // the same shape of result
  const auto weights = absolute(l.down.values), bias = absolute(l.down.bias);
  y.value = linear_of(l.down, hidden, s.hidden, l.down.values, &l.down.bias);
  y.error = linear_of(l.down, absolute(hidden), s.hidden, weights, &bias);
  const std::vector<double> passed = linear_of(l.down, off, s.hidden, weights, nullptr);
  const std::vector<double> terms = l.down.stored_per_row();
  for (std::size_t e = 0; e < y.error.size(); ++e)
    y.error[e] = y.error[e] * gamma(terms[e % terms.size()] + 1, unit) + passed[e] * (1 + 1e-3);
  expect_within("y", run.y, s, s.n, y);
  if (saved) expect_within("up", run.up, s, s.hidden, up);
  if (saved && s.gated) expect_within("gate", run.gate, s, s.hidden, gate);
}

inline const Kernel& kernel_named(std::string_view name) {
  for (const Kernel& kernel : registry()) {
    if (kernel.name == name) return kernel;
  }
  throw std::runtime_error("no such kernel");
}

}  // namespace rarefy::test
