// The activations in double, as the papers define them.
#pragma once

#include <cmath>
#include <numbers>

#include "rarefy/linear.h"

namespace rarefy::ref {

inline double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x > 0 || std::isnan(x) ? x : 0.0;
    case Activation::gelu_erf: return 0.5 * x * (1 + std::erf(x / std::numbers::sqrt2));
    case Activation::gelu_tanh: {  // Hendrycks & Gimpel 2016, the approximation torch calls "tanh"
      const double inner = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      return 0.5 * x * (1 + std::tanh(inner));
    }
    case Activation::silu: return x / (1 + std::exp(-x));
  }
  return x;
}

}  // namespace rarefy::ref
