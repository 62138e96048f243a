// The activations in double, as the papers define them.
#pragma once

#include <cmath>
#include <numbers>

#include "rarefy/linear.h"

namespace rarefy::ref {

inline double activate(Activation activation, double x) {
  static_assert(kActivations == 5);
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 || std::isnan(x) ? x : 0.0;
    case Activation::gelu_erf:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);  // no cancellation in the tail
    case Activation::gelu_tanh: {  // Hendrycks & Gimpel 2016, the approximation torch calls "tanh"
      const double inner = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      return x / (1 + std::exp(-2 * inner));  // 0.5 x (1 + tanh), without its cancellation
    }
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return x;
}

}  // namespace rarefy::ref
