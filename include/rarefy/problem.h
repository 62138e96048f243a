// What a product is asked for, without its data, and the machine that it runs on: all that chooses a
// kernel and its configuration. Plain structs with a printed form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rarefy/activation.h"
#include "rarefy/dtype.h"
#include "rarefy/export.h"
#include "rarefy/pattern.h"
#include "rarefy/view.h"

namespace rarefy {

enum class Op : std::uint8_t { linear, grad_input, grad_weight, feed_forward };

inline constexpr Op kAllOps[] = {Op::linear, Op::grad_input, Op::grad_weight, Op::feed_forward};
inline constexpr Op kProducts[] = {Op::linear, Op::grad_input, Op::grad_weight};  // of one weight

// How a weight is stored. CSR is BSR with blocks of 1×1: the same arrays, the same kernels. Bitmaps
// (bitmap.h) have CSR's values and their own kernels, of linear alone; so have those with two of each four.
enum class Format : std::uint8_t { bsr, bitmap, two_of_four };

// What int8 values stand for. Scaled ones are W[n, k] = scale[n] · value, with a float for each row of W.
enum class Scaling : std::uint8_t {
  none,     // numbers as they are
  weight,   // scaled
  dynamic,  // scaled; and each token of x is rounded to int8, with a scale of its own (docs/numerics.md)
};

RAREFY_API std::string_view name(Op op);
RAREFY_API std::string_view name(Scaling scaling);
RAREFY_API std::string_view name(Format format);
RAREFY_API std::string_view name(Activation activation);
RAREFY_API std::string_view name(Device device);
RAREFY_API std::string_view name(Layout layout);

struct WeightSpec {
  Format format = Format::bsr;
  BsrShape shape;
  DType dtype = DType::f32;  // of the stored values; for grad_weight, of the gradient
  Scaling scaling = Scaling::none;
  bool rounds_x = false;  // linear, feed_forward: x in f32 may be rounded to bf16 before it meets bf16 values
  bool operator==(const WeightSpec&) const = default;
};

// For Problem::derived, as a question: what would a caller get who makes whatever the best kernel derives.
inline constexpr std::uint64_t kAnyDerived = ~std::uint64_t{0};
// … who makes whatever follows from the pattern, and nothing of the values.
inline constexpr std::uint64_t kAnyPrepared = kAnyDerived - 1;

struct Problem {
  Op op = Op::linear;
  WeightSpec weight;       // feed_forward: of the first layer, `up`
  DType in = DType::f32;   // x; for grad_input dy; for grad_weight both
  DType out = DType::f32;  // y, dx; for grad_weight the weight's
  std::int64_t tokens = 0;
  // Elements between rows of x (grad_input, grad_weight: of dy), or by feature between its columns; of y, dx,
  // for grad_weight of x.
  std::int64_t in_stride = 0, out_stride = 0;
  Layout in_layout = Layout::by_token, out_layout = Layout::by_token;
  // Bytes, ≤ 16, that addresses are a multiple of: rows of what is read and the values; rows of what is
  // written, and the bias.
  std::int32_t in_alignment = 16, out_alignment = 16;
  bool bias = false;
  Activation activation = Activation::none;
  Device device = Device::cpu;
  int device_index = 0;  // of the GPU
  int threads = 1;
  // Key of what the caller holds, derived from the weight (linear.h), or from each of feed_forward's as for
  // linear; 0: nothing, or of different kernels.
  std::uint64_t derived = 0;
  WeightSpec down = {}, gate = {};  // feed_forward: the other layers; a gate of no rows and columns: none
  bool tf32 = false;                // operands in f32 may be rounded to tf32, 10 bits behind the point
  bool accumulate = false;          // grad_weight adds to what is there
  // The same as above of values and bias alone. What lies between rows of the output is the kernel's, up to a
  // multiple of 16 bytes.
  std::int32_t weight_alignment = 16;
  bool out_padded = false;
  bool operator==(const Problem&) const = default;
};

// The problem of dense-packed matrices of one dtype: what most callers mean. For feed_forward, `shape` is
// that of `up`, and `down` is its transpose in blocks of the same shape and number, at most all.
RAREFY_API Problem make_problem(Op op, const BsrShape& shape, std::int64_t tokens, DType dtype,
                                Device device = Device::cpu, int threads = 1);

// A GPU. Sizes in bytes; bandwidth of its memory in bytes a second, from clock and bus width.
struct DeviceInfo {
  std::string name;
  int arch = 0;  // 90 for compute capability 9.0
  int sms = 0;
  std::int64_t shared_memory = 0;  // most that one thread block can have
  std::int64_t l2 = 0;
  std::int64_t memory = 0;
  double bandwidth = 0;
};

// The processor, and the GPU of the call where there is one.
struct Machine {
  std::string cpu;
  std::vector<std::string> features;  // instruction sets that kernels ask for, by name: "avx512"
  int cores = 1;
  int vector_bits = 0;
  std::int64_t l1 = 0, l2 = 0, l3 = 0;  // bytes of data cache, l1 and l2 of one core; 0: not told
  DeviceInfo gpu;

  RAREFY_API bool has(std::string_view feature) const;
};

// One line each: "linear bsr 3072x768 block 4x1 nnzb 294912 f32, 128 tokens, f32 -> f32, cpu, 2 threads".
RAREFY_API std::string to_string(const Problem& problem);
RAREFY_API std::string to_string(const DeviceInfo& device);
RAREFY_API std::string to_string(const Machine& machine);

}  // namespace rarefy
