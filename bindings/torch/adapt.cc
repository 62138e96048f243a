// Tensors to views and statuses to exceptions.
#include "adapt.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/arguments.h"
#include "core/by_feature.h"
#include "core/message.h"
#include "core/plan_layout.h"
#include "core/registry.h"
#include "core/task_queue.h"

// In libtorch_cuda only: weak, so that this library also loads beside a CPU-only torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(std::int32_t device_index,
                                                                                   void** stream);

namespace rarefy::binding {

namespace {

// None where the schema wants a tensor arrives as an undefined one.
bool on_cuda(std::string_view op, std::string_view argument, const Tensor& tensor) {
  if (!tensor.defined()) raise(op, mismatch(op, cat(argument, " must be a tensor"), "None"));
  std::int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type == aoti_torch_device_type_cuda();
}

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return tensor.is_cuda() ? cat("cuda:", tensor.get_device_index()) : "another device";
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "(";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) text += cat(i == 0 ? "" : ", ", tensor.size(i));
  return text + (tensor.dim() == 1 ? ",)" : ")");
}

std::string_view torch_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Char: return "int8";
    default: return toString(type);
  }
}

std::optional<DType> core_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return DType::f64;
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    default: return std::nullopt;
  }
}

std::string_view torch_name(DType dtype) {
  switch (dtype) {
    case DType::f64: return "float64";
    case DType::f32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::f16: return "float16";
    case DType::i8: return "int8";
  }
  return "?";
}

void run_on_torch_threads(void* /*context*/, std::int64_t tasks, TaskRef body) {
  const auto workers = static_cast<int>(std::min<std::int64_t>(tasks, torch::stable::get_num_threads()));
  if (workers <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  TaskQueue queue(tasks, workers);
  torch::stable::parallel_for(0, workers, 1, [&](std::int64_t worker, std::int64_t) {
    queue.take(static_cast<int>(worker), [&](std::int64_t task) { body(task, static_cast<int>(worker)); });
  });
}

std::span<const std::int32_t> words(const Call& call, std::string_view argument, const Tensor& tensor) {
  call.check_device(argument, tensor);
  const ScalarType type = tensor.scalar_type();
  if (type != ScalarType::Int) {
    const std::string hint =
        type == ScalarType::Long ? cat("; convert with ", argument, ".to(torch.int32)") : "";
    raise(call.op(), mismatch(call.op(), cat(argument, " must be int32"), cat(torch_name(type), hint)));
  }
  if (tensor.dim() != 1 || !tensor.is_contiguous()) {
    raise(call.op(),
          invalid(call.op(), cat(argument, " must be contiguous, with 1 dimension"),
                  cat("shape ", shape_text(tensor), tensor.is_contiguous() ? "" : ", not contiguous")));
  }
  return {static_cast<const std::int32_t*>(call.elements(argument, tensor)),
          static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

void raise(std::string_view op, const Status& status) {
  const std::string text = status.in(op).message();
  switch (status.code()) {
    case StatusCode::invalid_argument: throw std::invalid_argument(text);
    case StatusCode::type_mismatch: throw TypeMismatch(text);
    default: throw std::runtime_error(text);
  }
}

Call::Call(std::string_view op, std::string_view argument, const Tensor& tensor)
    : op_(op),
      device_(on_cuda(op, argument, tensor) ? Device::cuda : Device::cpu),
      device_index_(tensor.get_device_index()) {
  if (device_ != Device::cuda) return;
  if (!cuda_built()) {
    raise(op, error(StatusCode::unsupported, op, "needs a build with CUDA for CUDA tensors (RAREFY_CUDA=on)",
                    "a build without it"));
  }
  guard_.emplace(device_index_);
}

// On the CPU a thread keeps what it was given last, up to here: with fresh pages in each call, 512 × 3072 →
// 768 with 4×1 at 0.5 took 7.1–9.3 instead of 6.1–6.6 ms (Zen 4, 2 threads). Beyond, and on CUDA, each call
// asks and gives back.
constexpr std::int64_t kKeptByThread = 2 << 20;

void* Call::provide_workspace(void* call, std::int64_t bytes) {
  const auto* self = static_cast<const Call*>(call);
  const std::int64_t most = kKeptByThread * std::max<std::int64_t>(8, torch::stable::get_num_threads());
  const bool keep = self->device_ == Device::cpu && bytes <= most;
  thread_local std::optional<Tensor> kept;
  if (keep && kept && kept->numel() >= bytes) return kept->data_ptr();
  const auto type =
      self->device_ == Device::cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  const std::int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError code = aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), type,
                                                       self->device_index_, &handle);
  if (code != AOTI_TORCH_SUCCESS) return nullptr;  // the core reports it under the product's name
  std::optional<Tensor>& owner = keep ? kept : self->workspace_;
  owner.emplace(handle);
  return owner->data_ptr();
}

// What most calls of small layers need, without asking an allocator: fixed, one for each calling thread.
constexpr std::int64_t kSmallWorkspace = 64 << 10;

Context Call::context(bool tf32) const {
  Context context;
  context.tf32 = tf32;
  context.workspace.provide = provide_workspace;
  context.workspace.provider = const_cast<Call*>(this);
  if (device_ == Device::cpu) {
    alignas(64) thread_local std::byte small[kSmallWorkspace];
    context.executor = {static_cast<int>(torch::stable::get_num_threads()), nullptr, run_on_torch_threads};
    context.workspace.data = small;
    context.workspace.bytes = kSmallWorkspace;
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index_, &context.stream));
  }
  return context;
}

DType Call::any_dtype(std::string_view argument, ScalarType type) const {
  if (const auto dtype = core_dtype(type)) return *dtype;
  raise(op_,
        mismatch(op_, cat(argument, " must be float64, float32, bfloat16 or float16"), torch_name(type)));
}

DType Call::float_dtype(std::string_view argument, const Tensor& tensor) const {
  return any_dtype(argument, tensor.scalar_type());
}

void Call::check_device(std::string_view argument, const Tensor& tensor) const {
  if (on_cuda(op_, argument, tensor) == (device_ == Device::cuda) &&
      tensor.get_device_index() == device_index_)
    return;
  const std::string device = device_ == Device::cpu ? "cpu" : cat("cuda:", device_index_);
  raise(op_, mismatch(op_, cat(argument, " must be on the same device as the other arguments, ", device),
                      device_text(tensor)));
}

void* Call::elements(std::string_view argument, const Tensor& tensor) const {
  void* data = tensor.data_ptr();
  if (data == nullptr && tensor.numel() > 0) {
    raise(op_, invalid(op_, cat(argument, " must point to its elements"), "a null pointer"));
  }
  return data;
}

void Call::check_stored(DType stored, std::string_view other, DType dtype) const {
  const bool narrow = dtype != DType::f64 && (stored == DType::bf16 || stored == DType::f16);
  if (stored == dtype || narrow) return;
  raise(op_, mismatch(op_,
                      cat("values must have the dtype of ", other, ", ", torch_name(dtype),
                          dtype == DType::f64 ? "" : ", or be bfloat16 or float16"),
                      torch_name(stored)));
}

DType Call::stored_dtype(const std::optional<ScalarType>& asked, std::string_view other, DType dtype) const {
  if (!asked) return dtype;
  const DType stored = any_dtype("dtype", *asked);
  check_stored(stored, other, dtype);
  return stored;
}

void Call::check_dtype(std::string_view argument, const Tensor& tensor, std::string_view other,
                       DType dtype) const {
  if (float_dtype(argument, tensor) == dtype) return;
  raise(op_, mismatch(op_, cat(argument, " must have the dtype of ", other, ", ", torch_name(dtype)),
                      torch_name(tensor.scalar_type())));
}

void Call::check_rows(const MatrixView& x, const MatrixView& grad_output) const {
  check(op_, check_size(op_, "x", "rows, like grad_output", grad_output.rows, x.rows));
}

Activation Call::activation(std::string_view name) const {
  static_assert(kActivations == 5);
  constexpr std::pair<std::string_view, Activation> kNames[] = {{"none", Activation::none},
                                                                {"relu", Activation::relu},
                                                                {"gelu", Activation::gelu_erf},
                                                                {"gelu_tanh", Activation::gelu_tanh},
                                                                {"silu", Activation::silu}};
  for (const auto& [known, activation] : kNames) {
    if (known == name) return activation;
  }
  raise(op_, invalid(op_, "activation must be none, relu, gelu, gelu_tanh or silu", cat('"', name, '"')));
}

bool Call::reads_in_place(const MatrixView& x, const Product& product) const {
  const auto threads = device_ == Device::cpu ? static_cast<int>(torch::stable::get_num_threads()) : 1;
  const bool gradient = product.dy != nullptr;
  Problem problem =
      make_problem(gradient ? Op::grad_weight : Op::linear, product.shape, x.rows, x.dtype, device_, threads);
  problem.weight.dtype = product.stored;
  problem.device_index = device_ == Device::cuda ? device_index_ : 0;
  problem.derived = static_cast<std::uint64_t>(product.derived);
  Alignment alignment;
  alignment.add(x);
  if (gradient) {
    problem.out = product.stored;
    problem.in_stride = product.dy->stride();
    alignment.add(*product.dy);
  }
  const auto copied = choose(problem);
  problem.in_alignment = alignment.bytes();
  (gradient ? problem.out_layout : problem.in_layout) = x.layout();
  (gradient ? problem.out_stride : problem.in_stride) = x.stride();
  const auto in_place = choose(problem);
  return copied.ok() && in_place.ok() && copied->kernel == in_place->kernel;
}

MatrixView Call::matrix(std::string_view argument, Tensor& tensor, std::string_view columns_name,
                        std::int64_t columns, const Product* product) const {
  check_device(argument, tensor);
  const DType dtype = float_dtype(argument, tensor);
  const std::int64_t leading = tensor.dim() - 1;
  if (leading < 0 || tensor.size(leading) != columns) {
    raise(op_, invalid(op_, cat(argument, "'s last dimension must be ", columns_name, '=', columns),
                       cat("shape ", shape_text(tensor))));
  }
  std::int64_t rows = 1;
  std::int64_t row_stride = columns;
  const std::int64_t col_stride = columns <= 1 ? 1 : tensor.stride(leading);
  bool even = true;
  for (std::int64_t i = leading - 1; i >= 0; --i) {
    if (tensor.size(i) == 1) continue;
    // The innermost dimension that counts sets the stride; the others must continue it.
    if (rows == 1) row_stride = tensor.stride(i);
    even = even && tensor.stride(i) == rows * row_stride;
    rows *= tensor.size(i);
  }
  if (rows > 0 && !(even && col_stride == 1)) {
    const MatrixView by_feature{elements(argument, tensor), dtype, rows, columns, 1, device_, col_stride};
    if (even && row_stride == 1 && col_stride > 1) {
      if (product != nullptr && reads_in_place(by_feature, *product)) return by_feature;
      if (can_turn(by_feature)) {  // which torch does at a fifth of a copy's speed
        tensor = turned(by_feature, tensor);
        return {elements(argument, tensor), dtype, rows, columns, turned_stride(columns), device_};
      }
    }
    tensor = torch::stable::contiguous(tensor);
    row_stride = columns;
  }
  return {elements(argument, tensor), dtype, rows, columns, row_stride, device_};
}

Tensor Call::turned(const MatrixView& x, const Tensor& like) const {
  const bool by_token = x.layout() == Layout::by_token;
  const std::int64_t line = turned_stride(by_token ? x.rows : x.cols), dimensions = like.dim();
  const Tensor memory = empty_matrix(by_token ? x.cols : x.rows, line, like.scalar_type());
  check(op_, copy_turned(op_, x, memory.data_ptr(), context().stream));
  std::vector<std::int64_t> sizes, strides(static_cast<std::size_t>(dimensions));
  for (std::int64_t i = 0; i < dimensions; ++i) sizes.push_back(like.size(i));
  strides.back() = by_token ? line : 1;
  std::int64_t stride = by_token ? 1 : line;
  for (std::size_t i = strides.size() - 1; i-- > 0; stride *= sizes[i]) strides[i] = stride;
  AtenTensorHandle copy = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(memory.get(), dimensions, sizes.data(), strides.data(), 0, &copy));
  return Tensor(copy);
}

PlanView Call::view(std::span<const std::int32_t> plan, const BsrShape& shape, Part part) const {
  if (device_ == Device::cpu) {
    return value_of(op_, part == Part::rows ? view_row_plan(op_, shape, plan) : view_plan(op_, shape, plan));
  }
  return value_of(op_, view_device_plan(op_, shape, plan.data(), std::ssize(plan)));
}

PlanView Call::plan(const Tensor& plan, const BsrShape& shape, Part part) const {
  return view(words(*this, "plan", plan), shape, part);
}

PlanView Call::row_plan(const Tensor& plan, BsrShape shape) const {
  const std::span<const std::int32_t> all = words(*this, "plan", plan);
  if (std::ssize(all) >= PlanHeader::kWords) shape.nnzb = PlanHeader::shape_of(all.data()).nnzb;
  return view(all, shape, Part::rows);
}

PlanView Call::row_plan(const Tensor& plan) const {
  const std::span<const std::int32_t> all = words(*this, "plan", plan);
  const BsrShape shape = std::ssize(all) < PlanHeader::kWords ? BsrShape{} : PlanHeader::shape_of(all.data());
  return view(all, shape, Part::rows);
}

PlanView Call::plan(const Tensor& plan, std::int64_t out_features, std::int64_t in_features,
                    std::int64_t block_rows, std::int64_t block_cols) const {
  const std::span<const std::int32_t> all = words(*this, "plan", plan);
  BsrShape shape{out_features, in_features, block_rows, block_cols, 0};
  check(op_, check_shape(op_, shape));
  // A plan's length grows by the same number of words with each block.
  const std::int64_t empty = plan_size(shape);
  shape.nnzb = 1;
  const std::int64_t step = plan_size(shape) - empty;
  shape.nnzb = std::max<std::int64_t>(std::ssize(all) - empty, 0) / step;
  return view(all, shape, Part::whole);
}

BsrView Call::weight(const Tensor& values, const Tensor& plan, std::int64_t out_features,
                     std::int64_t in_features, Part part) const {
  if (values.dim() != 3) {
    raise(op_, invalid(op_, "values must have shape (nnzb, block_rows, block_cols)",
                       cat("shape ", shape_text(values))));
  }
  if (!values.is_contiguous()) raise(op_, invalid(op_, "values must be contiguous", "another layout"));
  const PlanView pattern =
      this->plan(plan, {out_features, in_features, values.size(1), values.size(2), values.size(0)}, part);
  return {pattern, elements("values", values), float_dtype("values", values), device_};
}

BsrView Call::weight(const Tensor& values, const PlanView& pattern) const {
  const BsrShape& shape = pattern.shape;
  check_device("values", values);
  if (values.dim() != 3 || values.size(0) != shape.nnzb || values.size(1) != shape.block_rows ||
      values.size(2) != shape.block_cols || !values.is_contiguous()) {
    raise(op_, invalid(op_,
                       cat("values must be contiguous, of shape (", shape.nnzb, ", ", shape.block_rows, ", ",
                           shape.block_cols, ')'),
                       cat("shape ", shape_text(values))));
  }
  return {pattern, elements("values", values), float_dtype("values", values), device_};
}

BsrView Call::rows_weight(const Tensor& values, const Tensor& plan) const {
  const PlanView pattern = row_plan(plan);
  const BsrShape& shape = pattern.shape;
  if (values.numel() != shape.value_count() || !values.is_contiguous()) {
    raise(op_, invalid(op_, cat("values must be contiguous, of ", shape.value_count(), " elements"),
                       cat("shape ", shape_text(values))));
  }
  return {pattern, elements("values", values), float_dtype("values", values), device_};
}

const void* Call::bias(const std::optional<Tensor>& bias, std::int64_t out_features, DType dtype) const {
  if (!bias) return nullptr;
  check_device("bias", *bias);
  check_dtype("bias", *bias, "x", dtype);
  if (bias->dim() != 1 || bias->size(0) != out_features || !bias->is_contiguous()) {
    raise(op_, invalid(op_, cat("bias must be contiguous, with out_features=", out_features, " elements"),
                       cat("shape ", shape_text(*bias), bias->is_contiguous() ? "" : ", not contiguous")));
  }
  return elements("bias", *bias);
}

Tensor Call::build_plan(const BsrShape& shape, const Tensor& crow, const Tensor& col) const {
  const std::span<const std::int32_t> rows = words(*this, "crow_indices", crow);
  const std::span<const std::int32_t> columns = words(*this, "col_indices", col);
  check(op_, check_shape(op_, shape));
  const std::int64_t size = plan_size(shape);
  Tensor plan = empty_words(size);
  if (device_ == Device::cuda) {
    check(op_, build_device_plan(
                   op_, shape, rows, columns,
                   {static_cast<std::int32_t*>(plan.data_ptr()), static_cast<std::size_t>(size)}, context()));
    return plan;
  }
  check(op_, rarefy::build_plan(op_, shape, rows, columns,
                                {static_cast<std::int32_t*>(plan.data_ptr()), static_cast<std::size_t>(size)},
                                context().executor));
  return plan;
}

}  // namespace rarefy::binding
