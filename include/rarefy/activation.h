// The activations that `linear` can fuse. Plain: also read where nothing else may be included.
#pragma once

#include <cstdint>

namespace rarefy {

enum class Activation : std::uint8_t { none, relu, gelu_erf, gelu_tanh, silu };

// Whoever switches over the activations asserts this number, so that a new one forgets no place.
inline constexpr int kActivations = 5;

}  // namespace rarefy
