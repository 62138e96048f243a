// A transformer's feed-forward network as one call: two sparse linear layers, or three with a gate, whose
// hidden activations never leave the cache.
//   Y = act(X W1ᵀ + b1) W2ᵀ + b2
//   Y = (act(X Wgᵀ + bg) ∘ (X W1ᵀ + b1)) W2ᵀ + b2     with a gate (GLU, SwiGLU)
// X is (M, K), W1 and Wg are (H, K), W2 is (N, H), Y is (M, N).
#pragma once

#include <optional>

#include "rarefy/linear.h"

namespace rarefy {

// A sparse linear layer; bias: out_features elements of y's dtype, or null.
struct LayerView {
  BsrView weight;
  const void* bias = nullptr;
};

struct FeedForward {
  LayerView up;    // W1
  LayerView down;  // W2
  Activation activation = Activation::none;
  std::optional<LayerView> gate;  // Wg
};

// Where X W1ᵀ + b1 and X Wgᵀ + bg go, for those who will want the gradient: (M, H) of y's dtype. A null
// pointer: not wanted.
struct HiddenViews {
  MutableMatrixView up, gate;
};

// Dtypes as for linear(), int8 with scales among them; the weights may differ in block shape and dtype.
// Hidden activations are kept in the dtype of the sums (float where values have scales), so 16-bit results
// are rounded once, at the end; but where each layer holds what linear's kernel in bf16 pairs derives, they
// are rounded to bf16, as between two calls of linear().
// On CUDA a network that no kernel takes as one runs as calls of linear(), hidden features rounded to y's
// dtype in workspace. workspace_size() does not know of it; Workspace::provide is asked once, and too little
// is refused with the size.
RAREFY_API Status feed_forward(const MatrixView& x, const FeedForward& layers, const MutableMatrixView& y,
                               const Context& context = {}, const HiddenViews& save = {});

}  // namespace rarefy
