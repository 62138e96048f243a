// Tensors of derived data: making them for a weight, and what a call may use of them.
#include "derived.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "core/message.h"

namespace rarefy::binding {

namespace {

// A weight has one of each, whatever is multiplied with it: what kernels for many tokens derive.
constexpr std::int64_t kTypicalTokens = 4096;

// `prepared` has a section for each of kProducts, in their order, aligned as kernels want it on any device.
// On the CPU that of CSR ends with one for a few tokens, and with its trailer; whoever has no others asks for
// these alone.
constexpr std::int64_t kAlignment = 256;
constexpr std::int64_t kFewTokens = 4;  // more have no kernel of their own
struct Trailer {
  std::uint64_t key;
  std::int64_t bytes;
};

bool has_trailer(const Call& call, const BsrShape& shape) {
  return call.device() == Device::cpu && shape.block_size() == 1;
}
bool is_few(std::int64_t tokens) { return tokens > 0 && tokens <= kFewTokens; }

// A product with a weight of this shape and dtype, for inputs of another.
struct Operands {
  const BsrShape& shape;
  DType stored, in;
  Scaling scaling = Scaling::none;
  bool tf32 = false;
};

Operands operands_of(const Call& call, const BsrView& w, ScalarType in, bool tf32) {
  return {w.plan.shape, w.dtype, call.any_dtype("dtype", in), w.scaling, tf32};
}

Problem typical(const Call& call, Op op, const Operands& w, std::int64_t tokens = kTypicalTokens) {
  const auto threads = static_cast<int>(torch::stable::get_num_threads());
  Problem problem = make_problem(op, w.shape, tokens, w.in, call.device(), threads);
  problem.weight.dtype = w.stored;
  problem.tf32 = w.tf32;
  if (op != Op::grad_weight) problem.weight.scaling = w.scaling;
  if (op == Op::grad_weight) problem.out = w.stored;
  problem.device_index = call.device() == Device::cuda ? call.device_index() : 0;
  return problem;
}

// What a product's kernel wants of what is held here. Gradients of the CPU that want something of the values
// do without all of it and pack as they go; CUDA's pack in the call what is not given.
DerivedSizes sizes_of(const Call& call, Op op, const Operands& w) {
  const auto sizes = derived_sizes(typical(call, op, w));
  if (op == Op::linear) return value_of(call.op(), sizes);
  if (!sizes.ok() || (sizes->packed > 0 && call.device() == Device::cpu)) return {};
  return *sizes;
}

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Linear for a token: with nothing of its values where kernels for more tokens are there, too, who may be all
// that there ever is.
Problem typical_of_few(const Call& call, const Operands& w, bool alone) {
  Problem problem = typical(call, Op::linear, w, 1);
  problem.derived = alone ? kAnyDerived : kAnyPrepared;
  return problem;
}

// What it wants; of others than CSR nothing.
DerivedSizes sizes_of_few(const Call& call, const Operands& w, bool alone) {
  if (!has_trailer(call, w.shape)) return {};
  const auto sizes = derived_sizes(typical_of_few(call, w, alone));
  return sizes.ok() && sizes->prepared > 0 ? *sizes : DerivedSizes{};
}

struct Section {
  std::int64_t offset;
  DerivedSizes sizes;
};

Section section_of(const Call& call, Op op, const Operands& w) {
  std::int64_t offset = 0;
  for (const Op product : kProducts) {
    const DerivedSizes sizes = sizes_of(call, product, w);
    if (product == op) return {offset, sizes};
    offset += aligned(sizes.prepared);
  }
  return {offset, {}};
}

std::int64_t prepared_bytes(const Call& call, const Operands& w, bool alone) {
  const Section last = alone ? Section{} : section_of(call, *std::rbegin(kProducts), w);
  const std::int64_t bytes = last.offset + last.sizes.prepared;
  if (!has_trailer(call, w.shape)) return bytes;
  return aligned(bytes) + aligned(sizes_of_few(call, w, alone).prepared) +
         static_cast<std::int64_t>(sizeof(Trailer));
}

// The section for a few tokens, if there is one; its values come beside it. Whoever wrote the bytes: the core
// compares key and size.
Derived view_few(const Derived& all) {
  Trailer trailer{};
  const std::int64_t end = all.prepared_bytes - static_cast<std::int64_t>(sizeof(trailer));
  if (end < 0) return {};
  const auto* bytes = static_cast<const std::byte*>(all.prepared);
  std::memcpy(&trailer, bytes + end, sizeof(trailer));
  if (trailer.bytes < 0 || trailer.bytes > end || aligned(trailer.bytes) > end) return {};
  return {trailer.key, bytes + end - aligned(trailer.bytes), nullptr, trailer.bytes};
}

// Writes that torch does not count (`values.data.mul_`) would leave packed values behind. So a few of the
// values lie before what is packed, and calls compare them: 64 cache lines, about 1 µs; on the CPU, where the
// host can. What changes no sample is not noticed, and docs/design/pytorch.md says so.
constexpr std::int64_t kSamples = 64;
constexpr std::int64_t kSampleBytes = 8 * kSamples;

template <class Function>  // (sample's index, address of the value)
void for_samples(const BsrView& w, Function function) {
  const std::int64_t count = w.plan.shape.value_count();
  const auto size = static_cast<std::int64_t>(size_of(w.dtype));
  for (std::int64_t i = 0; i < std::min(kSamples, count); ++i) {
    function(i, static_cast<const std::byte*>(w.values) +
                    i * (count - 1) / std::max(kSamples - 1, std::int64_t{1}) * size);
  }
}

void take_samples(const BsrView& w, std::byte* samples) {
  std::memset(samples, 0, kSampleBytes);
  for_samples(w, [&](std::int64_t i, const std::byte* value) {
    std::memcpy(samples + 8 * i, value, size_of(w.dtype));
  });
}

bool samples_agree(const BsrView& w, const std::byte* samples) {
  bool agree = true;
  for_samples(w, [&](std::int64_t i, const std::byte* value) {
    agree = agree && std::memcmp(samples + 8 * i, value, size_of(w.dtype)) == 0;
  });
  return agree;
}

void check_bytes(const Call& call, std::string_view argument, const Tensor& tensor) {
  call.check_device(argument, tensor);
  if (tensor.scalar_type() == ScalarType::Byte && tensor.dim() == 1 && tensor.is_contiguous()) return;
  raise(call.op(), mismatch(call.op(), cat(argument, " must be a contiguous tensor of bytes, 1-D"),
                            cat(tensor.dim(), " dimensions of ", toString(tensor.scalar_type()))));
}

std::int64_t sample_bytes(const Call& call) { return call.device() == Device::cpu ? kSampleBytes : 0; }

// Whether one packed weight serves linear and grad_input.
bool packs_once(const DerivedSizes& linear, const DerivedSizes& input) {
  return linear.packed > 0 && input.key == linear.key;
}

// Linear's packed values with the samples before them, and where grad_input's begin: behind both, or with
// linear's.
std::int64_t linear_bytes(const Call& call, const DerivedSizes& linear) {
  return linear.packed > 0 ? sample_bytes(call) + linear.packed : 0;
}
std::int64_t input_at(const Call& call, const DerivedSizes& linear, const DerivedSizes& input) {
  return packs_once(linear, input) ? sample_bytes(call) : aligned(linear_bytes(call, linear));
}

}  // namespace

bool allows_tf32(const Call& call, std::int64_t key, const PlanView& plan, DType in, DType stored) {
  if (key == 0 || in != DType::f32 || call.device() != Device::cuda) return false;
  const Operands operands{plan.shape, stored, in, Scaling::none, true};
  return sizes_of(call, Op::linear, operands).key == static_cast<std::uint64_t>(key);
}

Derived view_derived(const Call& call, const DerivedTensors& tensors, Op op, const PlanView& plan, DType in,
                     const BsrView* weight, DType stored, std::int64_t tokens) {
  if (tensors.key == 0) return {};
  Derived derived{static_cast<std::uint64_t>(tensors.key)};
  if (tensors.prepared) {
    check_bytes(call, "prepared", *tensors.prepared);
    derived.prepared = call.elements("prepared", *tensors.prepared);
    derived.prepared_bytes = tensors.prepared->numel();
  }
  if (op != Op::linear) {
    const bool tf32 = allows_tf32(call, tensors.key, plan, in, stored);
    const Operands operands{plan.shape, stored, in, Scaling::none, tf32};
    const Section section = section_of(call, op, operands);
    if (section.sizes.key == 0 || derived.prepared_bytes < section.offset + section.sizes.prepared) return {};
    // Of another size in all it was made before others were forced. (On the CPU sizes follow threads.)
    if (call.device() == Device::cuda && derived.prepared_bytes != prepared_bytes(call, operands, false))
      return {};
    const bool alone = has_trailer(call, plan.shape) && derived.key == view_few(derived).key;
    if (alone) return {};  // the section for a few tokens
    Derived its{section.sizes.key, static_cast<const std::byte*>(derived.prepared) + section.offset, nullptr,
                section.sizes.prepared};
    if (op == Op::grad_input && tensors.packed && section.sizes.packed > 0) {
      check_bytes(call, "packed", *tensors.packed);
      const std::int64_t before = input_at(call, sizes_of(call, Op::linear, operands), section.sizes);
      if (tensors.packed->numel() == before + section.sizes.packed) {
        its.packed = static_cast<const std::byte*>(call.elements("packed", *tensors.packed)) + before;
        its.packed_bytes = section.sizes.packed;
      }
    }
    return its;
  }
  if (is_few(tokens) && has_trailer(call, plan.shape)) derived = view_few(derived);
  if (tensors.packed) {
    check_bytes(call, "packed", *tensors.packed);
    const std::int64_t samples = sample_bytes(call);
    const auto* bytes = static_cast<const std::byte*>(call.elements("packed", *tensors.packed));
    if (tensors.packed->numel() < samples) {
      raise(call.op(), invalid(call.op(), cat("packed must have at least ", samples, " bytes"),
                               cat(tensors.packed->numel())));
    }
    if (samples > 0 && !samples_agree(*weight, bytes)) return {};
    derived.packed = bytes + samples;
    derived.packed_bytes = tensors.packed->numel() - samples;
  }
  return derived;
}

HeldSizes derived_sizes(const Call& call, const BsrView& weight, ScalarType dtype, bool tf32,
                        std::int64_t tokens) {
  const Operands operands = operands_of(call, weight, dtype, tf32);
  const bool alone = is_few(tokens) && has_trailer(call, operands.shape);
  const DerivedSizes sizes =
      alone ? sizes_of_few(call, operands, alone) : sizes_of(call, Op::linear, operands);
  const std::uint64_t key = sizes.key != 0 ? sizes.key : sizes_of_few(call, operands, alone).key;
  if (key == 0) return {0, 0, 0, 0};
  const DerivedSizes input = alone ? DerivedSizes{} : sizes_of(call, Op::grad_input, operands);
  return {static_cast<std::int64_t>(key), prepared_bytes(call, operands, alone), linear_bytes(call, sizes),
          input.packed == 0 ? 0 : input_at(call, sizes, input) + input.packed};
}

bool packs_for_few(const Call& call, const BsrView& weight, ScalarType dtype, std::int64_t tokens) {
  const Operands operands = operands_of(call, weight, dtype, false);
  return value_of(call.op(), derived_sizes(typical(call, Op::linear, operands, tokens))).packed > 0;
}

Tensor prepare(const Call& call, const BsrView& weight, ScalarType dtype, bool tf32, std::int64_t tokens) {
  const Operands operands = operands_of(call, weight, dtype, tf32);
  const bool alone = is_few(tokens) && has_trailer(call, operands.shape), rows = weight.plan.ccol == nullptr;
  for (const Op op : kProducts) {
    if (alone || !rows || op == Op::linear) continue;
    if (section_of(call, op, operands).sizes.prepared > 0) return call.empty_bytes(0);
  }
  const std::int64_t bytes = prepared_bytes(call, operands, alone);
  Tensor prepared = call.empty_bytes(bytes);
  const auto make = [&](const Problem& problem, std::int64_t offset) {
    check(call.op(), rarefy::prepare(problem, weight.plan,
                                     static_cast<std::byte*>(prepared.data_ptr()) + offset, call.context()));
  };
  for (const Op op : kProducts) {
    if (alone) break;
    const Section section = section_of(call, op, operands);
    if (section.sizes.prepared > 0) make(typical(call, op, operands), section.offset);
  }
  if (!has_trailer(call, operands.shape)) return prepared;
  const DerivedSizes few = sizes_of_few(call, operands, alone);
  const Trailer trailer{few.key, few.prepared};
  const std::int64_t end = bytes - static_cast<std::int64_t>(sizeof(trailer));
  if (few.key != 0) make(typical_of_few(call, operands, alone), end - aligned(few.prepared));
  std::memcpy(static_cast<std::byte*>(prepared.data_ptr()) + end, &trailer, sizeof(trailer));
  return prepared;
}

Tensor pack(const Call& call, const BsrView& weight, const std::optional<Tensor>& prepared, ScalarType dtype,
            bool tf32, std::int64_t tokens, bool gradient) {
  const Operands operands = operands_of(call, weight, dtype, tf32);
  const bool alone = is_few(tokens) && has_trailer(call, operands.shape);
  const Problem problem = alone ? typical_of_few(call, operands, alone) : typical(call, Op::linear, operands);
  const DerivedSizes sizes =
      alone ? sizes_of_few(call, operands, alone) : sizes_of(call, Op::linear, operands);
  if (prepared) check_bytes(call, "prepared", *prepared);
  const Section input = gradient ? section_of(call, Op::grad_input, operands) : Section{};
  const std::int64_t given = prepared ? prepared->numel() : 0,
                     wanted = gradient ? input.offset + input.sizes.prepared : sizes.prepared;
  if (given < wanted) {
    raise(call.op(), invalid(call.op(), cat("prepared must have at least ", wanted, " bytes"), cat(given)));
  }
  const std::int64_t samples = sizes.packed > 0 ? sample_bytes(call) : 0,
                     of_input = input_at(call, sizes, input.sizes);
  Tensor packed = call.empty_bytes(gradient ? of_input + input.sizes.packed : linear_bytes(call, sizes));
  auto* bytes = static_cast<std::byte*>(packed.data_ptr());
  if (samples > 0) take_samples(weight, bytes);  // first: whoever writes meanwhile is noticed
  const auto* from = prepared ? static_cast<const std::byte*>(prepared->data_ptr()) : nullptr;
  check(call.op(), rarefy::pack(problem, weight, from, bytes + samples, call.context()));
  if (input.sizes.packed > 0 && !packs_once(sizes, input.sizes)) {
    check(call.op(), rarefy::pack(typical(call, Op::grad_input, operands), weight, from + input.offset,
                                  bytes + of_input, call.context()));
  }
  return packed;
}

namespace {

HeldSizes bsr_derived_sizes(const Tensor& values, const Tensor& plan, std::int64_t out_features,
                            std::int64_t in_features, ScalarType dtype, bool tf32, std::int64_t tokens) {
  const Call call("bsr_derived_sizes", "values", values);
  return derived_sizes(call, call.weight(values, plan, out_features, in_features, Call::Part::rows), dtype,
                       tf32, tokens);
}

Tensor bsr_prepare(const Tensor& values, const Tensor& plan, std::int64_t out_features,
                   std::int64_t in_features, ScalarType dtype, bool tf32, std::int64_t tokens) {
  const Call call("bsr_prepare", "values", values);
  return prepare(call, call.weight(values, plan, out_features, in_features, Call::Part::rows), dtype, tf32,
                 tokens);
}

Tensor bsr_pack(const Tensor& values, const Tensor& plan, const std::optional<Tensor>& prepared,
                std::int64_t out_features, std::int64_t in_features, ScalarType dtype, bool tf32,
                std::int64_t tokens, bool gradient) {
  const Call call("bsr_pack", "values", values);
  const auto part = is_few(tokens) ? Call::Part::rows : Call::Part::whole;
  return pack(call, call.weight(values, plan, out_features, in_features, part), prepared, dtype, tf32, tokens,
              gradient);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rarefy, m) {
  m.def(
      "bsr_derived_sizes(Tensor values, Tensor plan, int out_features, int in_features, "
      "ScalarType dtype, bool tf32=False, int tokens=0) -> (int, int, int, int)");
  m.def(
      "bsr_prepare(Tensor values, Tensor plan, int out_features, int in_features, ScalarType dtype, "
      "bool tf32=False, int tokens=0) -> Tensor");
  m.def(
      "bsr_pack(Tensor values, Tensor plan, Tensor? prepared, int out_features, int in_features, "
      "ScalarType dtype, bool tf32=False, int tokens=0, bool gradient=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(rarefy, CompositeExplicitAutograd, m) {
  m.impl("bsr_derived_sizes", TORCH_BOX(&bsr_derived_sizes));
  m.impl("bsr_prepare", TORCH_BOX(&bsr_prepare));
  m.impl("bsr_pack", TORCH_BOX(&bsr_pack));
}

}  // namespace rarefy::binding
