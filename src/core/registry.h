// Every kernel as a row of one list, in order of preference; the reference is last, so the CPU never has
// a hole. A back end adds its rows in one register_* function and nothing else names a kernel.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/stored_row.h"
#include "rarefy/backend.h"
#include "rarefy/feed_forward.h"

namespace rarefy {

// A kernel's tuning choices as its configure() made them: a few numbers, named by the row's `fields`.
struct Config {
  static constexpr std::size_t kMost = 10;
  std::array<std::int64_t, kMost> value{};
  bool operator==(const Config&) const = default;
};

// Kernels see their own struct of int64s instead, with the names of its members in T::kFields.
template <class T>
Config to_config(const T& choices) {
  static_assert(sizeof(T) == sizeof(std::int64_t) * std::size(T::kFields) && sizeof(T) <= sizeof(Config));
  Config config;
  std::memcpy(config.value.data(), &choices, sizeof(T));
  return config;
}

template <class T>
T from_config(const Config& config) {
  T choices;
  std::memcpy(static_cast<void*>(&choices), config.value.data(), sizeof(T));
  return choices;
}

// One checked call, as kernels get it. What the op does not have is empty.
struct Call {
  Problem problem;
  Config config;
  MatrixView x;   // linear, grad_weight, feed_forward
  MatrixView dy;  // grad_input, grad_weight
  PlanView plan;
  const std::uint8_t* bits = nullptr;  // of a bitmap, whose plan has shape and crow alone
  const void* values = nullptr;        // linear, grad_input
  const float* scales = nullptr;       // of scaled values
  Derived derived;
  const void* bias = nullptr;
  Activation activation = Activation::none;
  const FeedForward* layers = nullptr;  // feed_forward; plan, values, bias and activation are empty then
  HiddenViews save;
  MutableMatrixView out;      // y or dx
  void* dvalues = nullptr;    // grad_weight
  void* dbias = nullptr;      // the same: dY's sum over the tokens, for kernels that sum it (Kernel::sums_dy)
  void* workspace = nullptr;  // what the row's workspace() asked for
  Executor executor;
  void* stream = nullptr;
};

// What a problem lets a kernel do; the text says why not. Empty: it can.
using Reason = std::string;

// What becomes of a call whose caller holds nothing of what a row derives.
enum class Unheld : std::uint8_t {
  refused,  // the next row gets it
  made,     // the core prepares and packs ahead of `run`, in workspace
  runs,     // `run` does without: Call::derived is empty
};

struct Kernel {
  Op op;
  Device device;
  std::string_view family;  // what RAREFY_FORCE_IMPL takes
  std::string_view name;
  // Pure: asked without data, for machines that are not this one too.
  Reason (*supports)(const Problem&, const Machine&);
  Status (*run)(const Call&);
  // Of a problem that it supports: why a later row had better have it. It still gets it where no later row
  // fits, or where it is forced by name. Null: it never yields.
  Reason (*yields)(const Problem&, const Machine&) = nullptr;
  // linear of several weights on one x, which is packed once: calls of one problem but for rows, blocks and
  // bias, with one config, a workspace each, and derived data at hand. Null: one after the other.
  Status (*run_together)(std::span<const Call>) = nullptr;
  Format format = Format::bsr;  // of the weights that it is asked about
  bool any_layout = false;      // it is asked about matrices by feature too; `supports` may still refuse
  bool aligns_rows = false;     // it wants 16 bytes at a time, and copies of matrices that lie otherwise
  // grad_weight: it adds to what is there where Problem::accumulate says so. Of others the core adds what
  // they write into workspace.
  bool accumulates = false;
  // grad_weight: whether it had better sum dY on the way, into Call::dbias, than leave that to its caller.
  bool (*sums_dy)(const Problem&, const Config&) = nullptr;
  // linear on the CPU: whether it reads a plan's transposed index, which the core makes in the call where the
  // caller has the rows alone. Null: it does not.
  bool (*reads_columns)(const Problem&, const Config&) = nullptr;

  // Tuning: a pure function, the names of what it chooses, and all that it chose from.
  Config (*configure)(const Problem&, const Machine&) = nullptr;
  std::span<const std::string_view> fields{};
  std::vector<Config> (*candidates)(const Problem&, const Machine&) = nullptr;
  std::int64_t (*workspace)(const Problem&, const Config&) = nullptr;  // bytes
  // How long a call takes, with what is derived at hand; 0: it cannot say.
  double (*microseconds)(const Problem&, const Config&, const Machine&) = nullptr;

  // Tiers 2 and 3: what it derives from the pattern, and from the values; callers hold them
  // (Problem::derived). Rows of one `derives_as` (their name by default), problems and configs of one
  // `variant` share them; a front holds one for each weight, so neither should follow tokens, strides or
  // bias.
  Unheld unheld = Unheld::refused;
  std::string_view derives_as{};
  std::int64_t (*variant)(const Problem&, const Config&) = nullptr;
  std::int64_t (*prepared_size)(const Problem&, const Config&) = nullptr;  // bytes
  Status (*prepare)(const Call&, void* prepared) = nullptr;
  std::int64_t (*packed_size)(const Problem&, const Config&) = nullptr;
  Status (*pack)(const Call&, void* packed) = nullptr;

  // A row of feed_forward makes nothing: by `derives_as` it names what its layers hold as linear's.
  bool derives() const { return !derives_as.empty() || prepare != nullptr || pack != nullptr; }
};

using Registry = std::vector<Kernel>;

// Built once, on first use, from what was compiled in; what the machine lacks is the rows' own reason.
const Registry& registry();

void register_cpu(Registry& registry);   // src/cpu: avx512, avx2, scalar
void register_cuda(Registry& registry);  // src/cuda, or its stand-in when built without CUDA
void register_ref(Registry& registry);   // src/ref

KernelInfo info(const Kernel& kernel);

// What a family of the CPU does to rows of floats; not products, so not rows of the registry.
struct RowKernels {
  std::string_view family;
  std::string_view feature;  // that the processor must have
  void (*softmax)(const StoredRow& row, const float* from, float* to);
};

std::span<const RowKernels> row_kernels();  // src/cpu, best first
// Those of the family that is forced, or the best for this machine. Null: the machine has none, or not those
// of the forced family, or plain loops are forced.
const RowKernels* chosen_row_kernels();

// What the back ends know of the machine.
const Machine& cpu_machine();
bool cuda_built();
const std::vector<DeviceInfo>& cuda_devices();  // asked for once; empty without a driver or a GPU
int current_cuda_device();
// The product that leaves nothing out, by the vendor's library; 0: it cannot say.
double dense_microseconds(const Problem& problem, const Machine& machine);
// to[i] += from[i], or to[i] *= from[i], in device memory, rounded once.
Status add_on_device(std::string_view op, DType dtype, const void* from, void* to, std::int64_t count,
                     void* stream);
Status multiply_on_device(std::string_view op, DType dtype, const void* from, void* to, std::int64_t count,
                          void* stream);

// The machine that a problem runs on.
Machine machine_of(const Problem& problem);

// Sizes, dtypes and activation of a problem that came without data.
Status check_problem(std::string_view op, const Problem& problem);

// What a call's problem has of its context and of what is at hand.
void complete(Call& call, const Context& context);

// Runs the kernel that a checked call gets, with workspace of the context.
Status dispatch(Call& call, const Context& context);

// A kernel with its configuration.
struct Choice {
  const Kernel* kernel = nullptr;
  Config config;
  std::int64_t workspace = 0;  // of its `run`, and of copies ahead of it
  DerivedSizes derived;        // of the kernel and the variant; key 0 when it derives nothing
  bool aligns_rows = false;    // it is for copies with aligned rows (aligned_rows.h)
};

// Bytes of what a call makes for a caller who does not hold it, in workspace ahead of the kernel's own.
struct Made {
  std::int64_t prepared = 0, packed = 0;  // multiples of 256
  std::int64_t bytes() const { return prepared + packed; }
};

Made made_in_call(const Choice& choice, bool holds_prepared, bool holds_packed);

// Workspace, behind what is made, for a gradient that a kernel writes and the core adds; a multiple of 256.
std::int64_t bytes_to_add(const Problem& problem, const Choice& choice);

// The first kernel that fits, configured. Kept for the last few problems of each thread: a repeated one
// costs a hash and a comparison.
Result<Choice> choose(const Problem& problem);

// Whether there is one; a no costs as little.
bool has_kernel(const Problem& problem);

// The same without memory, over any list and machine.
Result<Choice> choose_from(const Registry& kernels, const Problem& problem, const Machine& machine,
                           std::string_view forced_family);

Choice configured(const Kernel& kernel, const Problem& problem, const Config& config);

// "scatter=0 vectors=4 …" and back; parse starts from `base` and refuses unknown names.
std::string to_string(const Kernel& kernel, const Config& config);
Result<Config> parse_config(const Kernel& kernel, const Config& base, std::string_view text);

}  // namespace rarefy
