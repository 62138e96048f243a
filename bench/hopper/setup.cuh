// One case of the Hopper bench: its operands on the device, what it must give, and the comparison.
#pragma once

#include <limits>
#include <type_traits>

#include "harness.cuh"
#include "rarefy/dtype.h"
#include "rarefy/linear.h"

namespace bench {

using rarefy::Activation;
using rarefy::DType;

template <class T>
inline constexpr DType kDType = std::is_same_v<T, float>    ? DType::f32
                                : std::is_same_v<T, __half> ? DType::f16
                                                            : DType::bf16;

inline double activate(Activation a, double x) {
  switch (a) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 || x != x ? x : 0;
    case Activation::gelu_erf: return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::gelu_tanh:
      return x / (1 + std::exp(-2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return x;
}

struct Case {
  bool transposed = false;  // grad_input
  std::int64_t m = 8192, n = 4096, k = 4096, r = 64, c = 64;
  double density = .5;
  Kind kind = Kind::random;
  Activation activation = Activation::none;
  bool bias = false;
  std::int64_t pad = 0;       // elements between rows of X and of Y beyond their length
  bool x_by_feature = false;  // X is [feature][token]
  bool specials = false;      // some tokens of X have an Inf or a NaN
};

// CONFIG=text: only configurations whose text has that in it.
inline bool chosen_by_env(const std::string& config) {
  const char* wanted = std::getenv("CONFIG");
  return wanted == nullptr || config.find(wanted) != std::string::npos;
}

inline std::string block_text(const Case& c) { return std::to_string(c.r) + "x" + std::to_string(c.c); }

inline std::string describe(const Case& c) {
  char text[160];
  std::snprintf(text, sizeof text, "%s M%ld N%ld K%ld b%ldx%ld d%g kind%d act%d bias%d pad%ld%s",
                c.transposed ? "grad_input" : "linear", c.m, c.n, c.k, c.r, c.c, c.density,
                static_cast<int>(c.kind), static_cast<int>(c.activation), c.bias, c.pad,
                c.specials ? " Inf and NaN" : "");
  return text;
}

template <class T>
struct Setup {
  Case c;
  Pattern pattern;
  Buffer<T> x, values, bias, y;
  Setup(const Case& c, bool integers, unsigned seed)
      : c(c),
        pattern(make_pattern(c.n, c.k, c.r, c.c, c.density, c.kind, seed)),
        x(static_cast<std::size_t>(c.x_by_feature ? in() * x_stride() : c.m * x_stride())),
        values(static_cast<std::size_t>(pattern.blocks() * c.r * c.c)),
        bias(static_cast<std::size_t>(out())),
        y(static_cast<std::size_t>(c.m * y_stride())) {
    fill(x.data(), x.size, seed + 1, 1, integers);
    fill(values.data(), values.size, seed + 2, .02f, integers);
    fill(bias.data(), bias.size, seed + 3, 1, integers);
    if (c.specials) add_specials();
    if (c.n % c.r != 0 || c.k % c.c != 0) zero_padding();
  }
  std::int64_t in() const { return c.transposed ? c.n : c.k; }
  std::int64_t out() const { return c.transposed ? c.k : c.n; }
  std::int64_t x_stride() const { return c.x_by_feature ? (c.m + c.pad + 7) / 8 * 8 : in() + c.pad; }
  std::int64_t y_stride() const { return out() + c.pad; }
  const T* bias_or_null() const { return c.bias ? bias.data() : nullptr; }

 private:
  // In tokens of every row of a tile: one Inf, one NaN, both; at features that many rows of W do not store.
  void add_specials() {
    std::vector<T> v = x.host();
    for (std::int64_t t = 0; t < c.m; ++t) {
      const auto at = [&](std::int64_t i) -> T& {
        return v[static_cast<std::size_t>(c.x_by_feature ? i * x_stride() + t : t * x_stride() + i)];
      };
      const float inf = std::numeric_limits<float>::infinity();
      if (t % 5 == 1) at(t * 37 % in()) = T(t % 2 == 0 ? inf : -inf);
      if (t % 7 == 2) at((t * 53 + 5) % in()) = T(std::numeric_limits<float>::quiet_NaN());
    }
    CHECK(cudaMemcpy(x.data(), v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

  void zero_padding() {  // the format's rule
    std::vector<T> v = values.host();
    for (std::int64_t i = 0; i < pattern.block_rows(); ++i) {
      for (std::int32_t e = pattern.crow[static_cast<std::size_t>(i)];
           e < pattern.crow[static_cast<std::size_t>(i) + 1]; ++e) {
        for (std::int64_t a = 0; a < c.r; ++a) {
          for (std::int64_t b = 0; b < c.c; ++b) {
            const bool inside = i * c.r + a < c.n && pattern.col[static_cast<std::size_t>(e)] * c.c + b < c.k;
            if (!inside) v[static_cast<std::size_t>((e * c.r + a) * c.c + b)] = T(0.f);
          }
        }
      }
    }
    CHECK(cudaMemcpy(values.data(), v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
};

// The double reference at sampled tokens (all, if there are no more than `samples`; the last one always).
struct Expected {
  std::vector<int> tokens;
  std::vector<double> sum, size;
  bool integers;

  template <class T>
  Expected(const Setup<T>& s, bool integers, int samples)
      : tokens(static_cast<std::size_t>(s.c.m)), integers(integers) {
    std::iota(tokens.begin(), tokens.end(), 0);
    if (samples < s.c.m) std::shuffle(tokens.begin(), tokens.end() - 1, std::mt19937(1));
    tokens.resize(std::min(tokens.size(), static_cast<std::size_t>(samples)));
    tokens.back() = static_cast<int>(s.c.m - 1);
    const Pattern& p = s.pattern;
    const auto offsets = to_device(s.c.transposed ? p.ccol : p.crow),
               others = to_device(s.c.transposed ? p.row : p.col);
    const auto perm = to_device(p.perm), sampled = to_device(tokens);
    Buffer<double> device_sum(tokens.size() * static_cast<std::size_t>(s.out())),
        device_size(device_sum.size);
    const ReferenceArgs args{s.c.transposed,
                             s.c.r,
                             s.c.c,
                             s.in(),
                             s.out(),
                             s.c.x_by_feature ? 1 : s.x_stride(),
                             s.c.x_by_feature ? s.x_stride() : 1,
                             offsets.data(),
                             others.data(),
                             s.c.transposed ? perm.data() : nullptr,
                             sampled.data(),
                             static_cast<int>(tokens.size())};
    reference_kernel<T>
        <<<dim3(static_cast<unsigned>((s.out() + 127) / 128), static_cast<unsigned>(tokens.size())), 128>>>(
            args, s.values.data(), s.x.data(), s.bias_or_null(), device_sum.data(), device_size.data());
    CHECK(cudaDeviceSynchronize());
    sum = device_sum.host();
    size = device_size.host();
  }

  // Runs `call` into a poisoned Y, twice. Wrong elements, elements not written, writes outside and unequal
  // repeats are reported.
  template <class T, class F>
  bool compare(Setup<T>& s, const std::string& what, F&& call) const {
    const double u_out = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
    s.y.poison();
    call();
    CHECK(cudaDeviceSynchronize());
    const std::vector<T> y = s.y.host();
    std::int64_t wrong = 0, unwritten = 0, spilled = 0;
    double worst = 0;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::int64_t o = 0; o < s.out(); ++o) {
        const std::size_t at = t * static_cast<std::size_t>(s.out()) + static_cast<std::size_t>(o);
        const double want = activate(s.c.activation, sum[at]);
        const double got = static_cast<float>(y[static_cast<std::size_t>(tokens[t] * s.y_stride() + o)]);
        if (!std::isfinite(want)) {
          wrong += !(std::isnan(want) ? std::isnan(got) : got == want);
          continue;
        }
        if (integers && s.c.activation <= Activation::relu) {
          wrong += !(got == static_cast<double>(static_cast<float>(T(static_cast<float>(want)))));
          continue;
        }
        const double gamma = static_cast<double>(s.in()) * 0x1p-24;
        const double bound =
            2 * (1.2 * gamma * size[at] + u_out * std::abs(want) + (u_out == 0x1p-11 ? 0x1p-25 : 0));
        worst = std::max(worst, std::abs(got - want) / bound);
        wrong += !(std::abs(got - want) <= bound);
      }
    }
    for (std::int64_t t = 0; t < s.c.m; ++t) {
      for (std::int64_t o = 0; o < s.y_stride(); ++o) {
        std::uint16_t bits;
        std::memcpy(&bits, &y[static_cast<std::size_t>(t * s.y_stride() + o)], 2);
        unwritten += o < s.out() && bits == 0xFFFF;
        spilled += o >= s.out() && bits != 0xFFFF;
      }
    }
    const bool guards = s.y.guards_intact();
    call();
    CHECK(cudaDeviceSynchronize());
    const std::vector<T> again = s.y.host();
    const bool same = std::memcmp(again.data(), y.data(), y.size() * sizeof(T)) == 0;
    if (wrong + unwritten + spilled == 0 && guards && same) return true;
    std::printf(
        "WRONG %s %s, %s: %ld of %zu wrong (worst %.2f of the bound), %ld unwritten, %ld spilled, guards %d, "
        "repeat %d\n",
        describe(s.c).c_str(), integers ? "integers" : "reals", what.c_str(), wrong, sum.size(), worst,
        unwritten, spilled, guards, same);
    return false;
  }
};

}  // namespace bench
