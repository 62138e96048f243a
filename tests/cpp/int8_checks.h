// What the tests of scaled int8 values share: random weights with scales, what they must give as sums of
// whole numbers, and a test for each family and way of scaling.
#pragma once

#include <optional>
#include <random>

#include "core/registry.h"
#include "product_checks.h"

namespace rarefy::test::int8 {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The families with a row for such a problem that this machine runs.
inline std::vector<std::string> families_of(Scaling scaling) {
  rarefy::Problem asked = make_problem(Op::linear, {32, 8, 16, 2, 1}, 8, DType::f32);
  asked.weight.dtype = DType::i8;
  asked.weight.scaling = scaling;
  std::vector<std::string> families;
  for (const Candidate& candidate : explain(asked).candidates) {
    if (candidate.why_not.empty()) families.push_back(candidate.kernel.family);
  }
  return families;
}

struct Spec {
  std::int64_t m, n, k, block_rows, block_cols;
  double density = 0.5;
  DType dtype = DType::f32;  // of x and y
  bool integers = false;     // x of integers with 127 in each token: its scale is 1, results are exact
  std::int64_t stride = 3;
  Activation activation = Activation::none;
};

// A weight with scales, x and bias; what it must give.
struct Layer {
  Spec spec;
  Pattern pattern;
  std::vector<std::int8_t> values;
  std::vector<float> scales;
  std::vector<double> x, bias;  // exact in spec.dtype

  explicit Layer(const Spec& s, unsigned seed = 1)
      : spec(s),
        pattern(
            make_problem(ProblemSpec{s.m, s.n, s.k, s.block_rows, s.block_cols, s.density}, seed).pattern),
        values(static_cast<std::size_t>(pattern.shape().value_count())),
        scales(static_cast<std::size_t>(s.n)) {
    std::mt19937 random(seed);
    std::uniform_int_distribution<> byte(-127, 127), small(-2, 2);
    std::normal_distribution<> normal;
    for (std::int8_t& v : values) v = static_cast<std::int8_t>(s.integers ? small(random) : byte(random));
    for (float& scale : scales) {
      scale =
          s.integers ? std::ldexp(1.0F, small(random)) : static_cast<float>(0.01 + std::abs(normal(random)));
    }
    x.resize(static_cast<std::size_t>(s.m * x_stride()));
    for (double& number : x) number = s.integers ? small(random) : normal(random);
    for (std::int64_t m = 0; s.integers && s.k > 0 && m < s.m; ++m) {
      x[static_cast<std::size_t>(m * x_stride() + m % s.k)] = m % 2 == 0 ? 127 : -127;
    }
    bias.resize(static_cast<std::size_t>(s.n));
    for (double& number : bias) number = s.integers ? small(random) : normal(random);
    x = decode(encode(x, s.dtype), s.dtype);
    bias = decode(encode(bias, s.dtype), s.dtype);
  }

  std::int64_t x_stride() const { return spec.k + spec.stride; }
  std::int64_t y_stride() const { return spec.n + spec.stride; }

  // One token as it is multiplied: its integers and their scale, or x and 1.
  double token(std::int64_t m, Scaling scaling, std::vector<double>& out) const {
    const double* from = x.data() + m * x_stride();
    out.assign(from, from + spec.k);
    if (scaling == Scaling::weight) return 1;
    float most = 0;
    for (const double number : out) {
      if (!std::isfinite(number)) return kNan;
      most = std::max(most, static_cast<float>(std::abs(number)));
    }
    most = std::max(most, 0x1p-100F);
    const float inverse = 127 / most;
    for (double& number : out) number = std::nearbyint(static_cast<float>(number) * inverse);
    return most / 127;
  }
};

// Runs linear between guards, with what it derives made ahead or in the call.
class LinearRun {
 public:
  LinearRun(const Layer& layer, Scaling scaling, Executor executor = {}, bool derived = true)
      : layer_(layer),
        plan_(HostBuffer::upload<std::int32_t>(layer.pattern.plan())),
        x_(HostBuffer::upload<std::byte>(encode(layer.x, layer.spec.dtype))),
        values_(HostBuffer::upload<std::int8_t>(layer.values)),
        scales_(HostBuffer::upload<float>(layer.scales)),
        bias_(HostBuffer::upload<std::byte>(encode(layer.bias, layer.spec.dtype))),
        y_(static_cast<std::size_t>(layer.spec.m * layer.y_stride()) * size_of(layer.spec.dtype)) {
    const Spec& s = layer.spec;
    const auto words = static_cast<std::int64_t>(layer.pattern.plan().size());
    weight_ = {*view_device_plan("test", layer.pattern.shape(),
                                 static_cast<const std::int32_t*>(plan_.data()), words),
               values_.data(), DType::i8};
    weight_.scaling = scaling;
    weight_.scales = static_cast<const float*>(scales_.data());
    context_.executor = executor;
    if (derived && s.m > 0) derive(s.m);
  }

  Status linear() {
    const Spec& s = layer_.spec;
    return rarefy::linear({x_.data(), s.dtype, s.m, s.k, layer_.x_stride()}, weight_, bias_.data(),
                          s.activation, {y_.data(), s.dtype, s.m, s.n, layer_.y_stride()}, context_);
  }
  std::vector<std::byte> bytes() const { return y_.download(); }
  std::vector<double> y() const { return decode(bytes(), layer_.spec.dtype); }
  const BsrView& weight() const { return weight_; }

  // As for so many tokens.
  void derive(std::int64_t tokens) {
    const rarefy::Problem asked = of_tokens(tokens);
    const auto sizes = derived_sizes(asked);
    expect_ok(sizes.status());
    if (!sizes.ok() || sizes->key == 0) return;
    prepared_.emplace(static_cast<std::size_t>(sizes->prepared));
    packed_.emplace(static_cast<std::size_t>(sizes->packed));
    expect_ok(prepare(asked, weight_.plan, prepared_->data()));
    expect_ok(pack(asked, weight_, prepared_->data(), packed_->data()));
    weight_.derived = {sizes->key, prepared_->data(), packed_->data(), sizes->prepared, sizes->packed};
  }
  // Whether calls with so many tokens want what is derived.
  bool uses_derived(std::int64_t tokens) const { return derived_sizes(of_tokens(tokens))->packed > 0; }
  void forget_values() { values_.fill(std::byte{0}); }

 private:
  rarefy::Problem of_tokens(std::int64_t tokens) const {
    rarefy::Problem asked = make_problem(Op::linear, layer_.pattern.shape(), tokens, layer_.spec.dtype);
    asked.weight.dtype = DType::i8;
    asked.weight.scaling = weight_.scaling;
    return asked;
  }

  const Layer& layer_;
  HostBuffer plan_, x_, values_, scales_, bias_;
  Guarded<HostBuffer> y_;
  BsrView weight_;
  Context context_;
  std::optional<HostBuffer> prepared_, packed_;
};

// Whether x as it is would be multiplied as digits, by what is forced.
inline bool as_digits(const Layer& layer, Scaling scaling) {
  rarefy::Problem asked = make_problem(Op::linear, layer.pattern.shape(), layer.spec.m, layer.spec.dtype);
  asked.weight.dtype = DType::i8;
  asked.weight.scaling = scaling;
  asked.derived = kAnyDerived;
  return explain(asked).kernel.find("_digits") != std::string::npos;
}

// |got − exact| ≤ 4 u (|sum · scales| + |b|) + u_out |got| where sums are whole numbers; where x is as it is,
// γ for as many roundings as the sum has terms, and two more, and with digits 1.004 · 2⁻²³ of the token's
// largest |x| for each weight. Gaps between rows stay as they were.
inline void expect_linear(const Layer& layer, Scaling scaling, const std::vector<double>& got) {
  const bool digits = as_digits(layer, scaling);
  const Spec& s = layer.spec;
  const BsrShape& shape = layer.pattern.shape();
  const PlanView plan = layer.pattern.view();
  std::vector<double> x;
  for (std::int64_t m = 0; m < s.m; ++m) {
    const double scale = layer.token(m, scaling, x);
    double most = 0;
    for (const double number : x) most = std::max(most, std::abs(number));
    for (std::int64_t n = 0; n < layer.y_stride(); ++n) {
      const double y = got[static_cast<std::size_t>(m * layer.y_stride() + n)];
      if (n >= s.n) {
        ASSERT_TRUE(std::isnan(y)) << m << ' ' << n;
        continue;
      }
      double sum = 0, magnitude = 0, weights = 0, terms = 0;
      const std::int64_t i = n / s.block_rows;
      for (std::int32_t e = plan.crow[i]; e < plan.crow[i + 1]; ++e) {
        for (std::int64_t c = 0; c < s.block_cols; ++c) {
          const std::int64_t k = plan.col[e] * s.block_cols + c;
          if (k >= s.k) break;
          const double w = layer.values[static_cast<std::size_t>(e * shape.block_size() +
                                                                 n % s.block_rows * s.block_cols + c)];
          sum += w * x[static_cast<std::size_t>(k)];
          magnitude += std::abs(w * x[static_cast<std::size_t>(k)]);
          weights += std::abs(w);
          ++terms;
        }
      }
      const double both = layer.scales[static_cast<std::size_t>(n)] * scale;
      const double bias = layer.bias[static_cast<std::size_t>(n)];
      const double exact = sum * both + bias;
      if (s.integers) {
        ASSERT_EQ(y, decode(encode(std::vector{exact}, s.dtype), s.dtype)[0]) << m << ' ' << n;
        continue;
      }
      const double u = accumulator(s.dtype);
      const double bound = scaling == Scaling::dynamic
                               ? 4 * u * (std::abs(sum * both) + std::abs(bias))
                               : gamma(terms + 3, u) * (magnitude * both + std::abs(bias)) +
                                     (digits ? std::ldexp(1.004 * most, -23) * weights * both : 0);
      ASSERT_LE(std::abs(y - exact), bound + storing(s.dtype) * std::abs(y)) << m << ' ' << n;
    }
  }
}

struct Forced {
  std::string family;
  Scaling scaling;
};

inline std::vector<Forced> all_forced() {
  std::vector<Forced> all;
  for (const Scaling scaling : {Scaling::dynamic, Scaling::weight}) {
    for (const std::string& family : families_of(scaling)) all.push_back({family, scaling});
  }
  return all;
}

class Int8Test : public ::testing::TestWithParam<Forced> {
 protected:
  // A family whose only kernel for x as it is, as digits, multiplies what callers hold.
  static bool needs_derived() {
    return GetParam().scaling == Scaling::weight &&
           (GetParam().family == "amx" || GetParam().family == "avx_vnni");
  }
  void check(const Spec& spec, Executor executor = {}, bool derived = true) {
    SCOPED_TRACE(::testing::Message() << GetParam().family << " M=" << spec.m << " N=" << spec.n << " K="
                                      << spec.k << " block " << spec.block_rows << 'x' << spec.block_cols
                                      << " density " << spec.density << ' ' << name(spec.dtype));
    const Layer layer(spec);
    const Force force(GetParam().family);
    LinearRun run(layer, GetParam().scaling, executor, derived);
    if (!derived && needs_derived()) {
      EXPECT_FALSE(run.linear().ok());
      return;
    }
    expect_ok(run.linear());
    expect_linear(layer, GetParam().scaling, run.y());
  }
};

}  // namespace rarefy::test::int8
