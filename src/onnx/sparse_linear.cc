// com.rarefy::SparseLinear for onnxruntime: y = activation(x Wᵀ + bias) with W in blocks or elements.
// docs/onnx.md has its schema. Errors name the op, and fail the run and nothing else.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "onnx/abi.h"
#include "rarefy/c.h"

namespace {

constexpr const char* kOp = "com.rarefy::SparseLinear";
enum Input : std::size_t { kX, kValues, kCrow, kCol, kBias, kInputs };
constexpr std::array kNames = {"x", "values", "crow_indices", "col_indices", "bias"};

struct Error {
  std::string text;
};

[[noreturn]] void fail(const std::string& requirement, const std::string& got) {
  throw Error{"[" + std::string(kOp) + "] " + requirement + "; got " + got};
}

void check(rarefy_status status) {
  if (status == RAREFY_OK) return;
  const std::string text = rarefy_last_error();  // "[rarefy_…] requirement; got value"
  const std::size_t end = text.find("] ");
  throw Error{"[" + std::string(kOp) + "]" + (end == std::string::npos ? " " + text : text.substr(end + 1))};
}

std::string text_of(std::span<const std::int64_t> sizes) {
  std::string text = "(";
  for (std::size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  return text + ")";
}

// onnxruntime's functions, whose failures are Errors.
class Runtime {
 public:
  explicit Runtime(const ort::Api* api) : api_(api) {}

  template <class... Args>
  void operator()(ort::Function function, Args... args) const {
    if (auto* status = api_->call<ort::Status*>(function, args...); status != nullptr) {
      const std::string why =
          api_->call<const char*>(ort::kGetErrorMessage, static_cast<const ort::Status*>(status));
      api_->call<void>(ort::kReleaseStatus, status);
      fail("onnxruntime must do what the op asks for",
           "an error of function " + std::to_string(function) + ": " + why);
    }
  }

  // Nothing if there is no such attribute.
  template <class... Args>
  bool found(ort::Function function, Args... args) const {
    auto* status = api_->call<ort::Status*>(function, args...);
    if (status != nullptr) api_->call<void>(ort::kReleaseStatus, status);
    return status == nullptr;
  }

  ort::Status* status(ort::ErrorCode code, const char* text) const {
    return api_->call<ort::Status*>(ort::kCreateStatus, code, text);
  }

  // Runs the body; what it throws is the status.
  template <class Body>
  ort::Status* guarded(Body body) const noexcept {
    try {
      body();
      return nullptr;
    } catch (const Error& error) {
      return status(ort::invalid_argument, error.text.c_str());
    } catch (const std::bad_alloc&) {
      return status(ort::fail,
                    "[com.rarefy::SparseLinear] the call must fit in memory; got an allocation failure");
    } catch (...) {
      return status(ort::fail,
                    "[com.rarefy::SparseLinear] the call must not fail like this; got an exception");
    }
  }

  // Of a value, until it goes out of scope.
  auto shape_of(const ort::Value* value) const {
    ort::Shape* shape = nullptr;
    (*this)(ort::kGetTensorShape, value, &shape);
    const auto release = [api = api_](const ort::Shape* made) {
      api->call<void>(ort::kReleaseShape, const_cast<ort::Shape*>(made));
    };
    return std::unique_ptr<const ort::Shape, decltype(release)>(shape, release);
  }

 private:
  const ort::Api* api_;
};

struct Tensor {
  const void* data = nullptr;
  ort::ElementType type = ort::undefined;
  std::vector<std::int64_t> sizes;
};

// Input `at` of a call; no data if it was left out.
Tensor input_of(const Runtime& runtime, const ort::KernelContext* context, std::size_t at) {
  std::size_t count = 0;
  runtime(ort::kGetInputCount, context, &count);
  const ort::Value* value = nullptr;
  if (at < count) runtime(ort::kGetInput, context, at, &value);
  if (value == nullptr) return {};
  const auto shape = runtime.shape_of(value);
  Tensor tensor;
  std::size_t dims = 0;
  runtime(ort::kGetElementType, shape.get(), &tensor.type);
  runtime(ort::kGetDimensionsCount, shape.get(), &dims);
  tensor.sizes.resize(dims);
  runtime(ort::kGetDimensions, shape.get(), tensor.sizes.data(), dims);
  void* data = nullptr;
  runtime(ort::kGetTensorMutableData, const_cast<ort::Value*>(value), &data);
  static constexpr char kEmpty = 0;
  tensor.data = data == nullptr ? &kEmpty : data;
  return tensor;
}

rarefy_dtype dtype_of(ort::ElementType type) {
  switch (type) {
    case ort::f64: return RAREFY_F64;
    case ort::bf16: return RAREFY_BF16;
    case ort::f16: return RAREFY_F16;
    default: return RAREFY_F32;
  }
}

std::int64_t int_attribute(const Runtime& runtime, const ort::KernelInfo* info, const char* name,
                           std::int64_t least, const std::int64_t* otherwise = nullptr) {
  std::int64_t value = 0;
  if (!runtime.found(ort::kGetAttributeInt, info, name, &value)) {
    if (otherwise == nullptr) fail("the attribute " + std::string(name) + " must be an int", "none");
    value = *otherwise;
  }
  if (value < least) {
    const std::string requirement = std::string(name) + " must be at least " + std::to_string(least);
    fail(requirement, std::to_string(value));
  }
  return value;
}

rarefy_activation activation_of(const Runtime& runtime, const ort::KernelInfo* info) {
  std::size_t size = 0;  // with the zero at the end
  if (!runtime.found(ort::kGetAttributeString, info, "activation", static_cast<char*>(nullptr), &size)) {
    return RAREFY_NONE;
  }
  std::string name(size, '\0');
  runtime(ort::kGetAttributeString, info, "activation", name.data(), &size);
  name.resize(size == 0 ? 0 : size - 1);
  constexpr std::array kActivations = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  for (std::size_t i = 0; i < kActivations.size(); ++i) {
    if (name == kActivations[i]) return static_cast<rarefy_activation>(i);
  }
  fail("activation must be none, relu, gelu, gelu_tanh or silu", "'" + name + "'");
}

struct FreeWeight {
  void operator()(rarefy_weight* weight) const { rarefy_weight_free(weight); }
};
using Weight = std::unique_ptr<rarefy_weight, FreeWeight>;

struct FreePool {
  void operator()(rarefy_pool* pool) const { rarefy_pool_free(pool); }
};

// One set of threads for each number that is asked for, by all sessions; calls queue up.
std::shared_ptr<rarefy_pool> pool_of(int threads) {
  if (threads == 1) return nullptr;
  static std::mutex mutex;
  static std::vector<std::pair<int, std::weak_ptr<rarefy_pool>>> pools;
  const std::lock_guard lock(mutex);
  std::erase_if(pools, [](const auto& known) { return known.second.expired(); });
  for (auto& [count, pool] : pools) {
    if (count == threads) {
      if (auto found = pool.lock()) return found;
    }
  }
  rarefy_pool* made = nullptr;
  check(rarefy_pool_create(threads, &made));
  std::shared_ptr<rarefy_pool> pool(made, FreePool());
  pools.emplace_back(threads, pool);
  return pool;
}

class Kernel {
 public:
  Kernel(const ort::Api* api, const ort::KernelInfo* info) : runtime_(api) {
    const std::int64_t no = 0;
    rows_ = int_attribute(runtime_, info, "out_features", 0);
    cols_ = int_attribute(runtime_, info, "in_features", 0);
    constant_ = int_attribute(runtime_, info, "constant", 0, &no) != 0;
    const std::int64_t threads = int_attribute(runtime_, info, "threads", 0, &no);
    if (threads > 1024) fail("threads must be at most 1024", std::to_string(threads));
    activation_ = activation_of(runtime_, info);
    pool_ = pool_of(static_cast<int>(threads));
  }

  ort::Status* compute(ort::KernelContext* context) noexcept {
    return runtime_.guarded([&] { run(context); });
  }

 private:
  void run(ort::KernelContext* context) {
    const Tensor x = input_of(runtime_, context, kX);
    if (x.sizes.empty() || x.sizes.back() != cols_) {
      fail("x must end with in_features = " + std::to_string(cols_), text_of(x.sizes));
    }
    std::int64_t tokens = 1;
    for (std::size_t i = 0; i + 1 < x.sizes.size(); ++i) tokens *= x.sizes[i];
    const Tensor bias = input_of(runtime_, context, kBias);
    if (bias.data != nullptr && (bias.sizes.size() != 1 || bias.sizes[0] != rows_)) {
      fail("bias must be of shape (" + std::to_string(rows_) + ")", text_of(bias.sizes));
    }
    const std::shared_ptr<rarefy_weight> weight = weight_of(context, dtype_of(x.type));

    std::vector<std::int64_t> sizes = x.sizes;
    sizes.back() = rows_;
    ort::Value* value = nullptr;
    const std::int64_t* dims = sizes.data();
    runtime_(ort::kGetOutput, context, std::size_t{0}, dims, sizes.size(), &value);
    void* y = nullptr;
    runtime_(ort::kGetTensorMutableData, value, &y);
    if (tokens == 0 || rows_ == 0) return;
    const rarefy_dtype dtype = dtype_of(x.type);
    const rarefy_matrix in{x.data, dtype, tokens, cols_, cols_};
    const rarefy_output out{y, dtype, tokens, rows_, rows_};
    check(rarefy_linear(&in, weight.get(), bias.data, activation_, &out, pool_.get()));
  }

  // The weight of this call: the first call's, where the model says that it is constant.
  std::shared_ptr<rarefy_weight> weight_of(const ort::KernelContext* context, rarefy_dtype x) {
    if (!constant_) return made_of(context, x);
    const std::lock_guard lock(mutex_);
    if (weight_ == nullptr) weight_ = made_of(context, x);
    return weight_;
  }

  std::shared_ptr<rarefy_weight> made_of(const ort::KernelContext* context, rarefy_dtype x) {
    const Tensor values = input_of(runtime_, context, kValues);
    const std::size_t dims = values.sizes.size();
    if (dims != 1 && dims != 3)
      fail("values must be (elements) or (blocks, rows, columns)", text_of(values.sizes));
    const std::int64_t r = dims == 3 ? values.sizes[1] : 1, c = dims == 3 ? values.sizes[2] : 1;
    if (r < 1 || c < 1) fail("blocks must have rows and columns", text_of(values.sizes));
    const std::int64_t lines = rows_ / r + (rows_ % r != 0 ? 1 : 0);
    const Tensor crow = indices_of(context, kCrow, lines + 1);
    const Tensor col = indices_of(context, kCol, values.sizes[0]);
    rarefy_weight_info info{};
    info.rows = rows_;
    info.cols = cols_;
    info.block_rows = r;
    info.block_cols = c;
    info.nnzb = values.sizes[0];
    info.dtype = dtype_of(values.type);
    info.values = values.data;
    info.crow_indices = static_cast<const std::int32_t*>(crow.data);
    info.col_indices = static_cast<const std::int32_t*>(col.data);
    rarefy_weight* weight = nullptr;
    check(rarefy_weight_from_blocks(&info, &weight));
    std::shared_ptr<rarefy_weight> made(weight, FreeWeight());
    if (constant_) check(rarefy_weight_prepare(weight, x, pool_.get()));
    return made;
  }

  Tensor indices_of(const ort::KernelContext* context, Input at, std::int64_t count) const {
    Tensor indices = input_of(runtime_, context, at);
    if (indices.sizes.size() != 1 || indices.sizes[0] != count) {
      fail(std::string(kNames[at]) + " must be of shape (" + std::to_string(count) + ")",
           text_of(indices.sizes));
    }
    return indices;
  }

  Runtime runtime_;
  std::int64_t rows_ = 0, cols_ = 0;
  bool constant_ = false;
  rarefy_activation activation_ = RAREFY_NONE;
  std::shared_ptr<rarefy_pool> pool_;
  std::mutex mutex_;
  std::shared_ptr<rarefy_weight> weight_;
};

// x and y of a type, values of that or of a narrower one; onnxruntime finds the op that a node's types want.
struct Op : ort::CustomOp {
  Op(ort::ElementType of_x, ort::ElementType of_values) : x(of_x), values(of_values) {
    name = [](const CustomOp*) { return "SparseLinear"; };
    provider = [](const CustomOp*) -> const char* { return nullptr; };  // the CPU
    input_count = [](const CustomOp*) -> std::size_t { return kInputs; };
    output_count = [](const CustomOp*) -> std::size_t { return 1; };
    input_type = [](const CustomOp* op, std::size_t i) {
      const auto& self = static_cast<const Op&>(*op);
      return i == kValues ? self.values : i == kCrow || i == kCol ? ort::i32 : self.x;
    };
    output_type = [](const CustomOp* op, std::size_t) { return static_cast<const Op&>(*op).x; };
    input_presence = [](const CustomOp*, std::size_t i) {
      return i == kBias ? ort::optional : ort::required;
    };
    output_presence = [](const CustomOp*, std::size_t) { return ort::required; };
    input_memory = [](const CustomOp*, std::size_t) { return 0; };
    create_kernel_2 = [](const CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** kernel) {
      return Runtime(api).guarded([&] { *kernel = new Kernel(api, info); });
    };
    compute_2 = [](void* kernel, ort::KernelContext* context) {
      return static_cast<Kernel*>(kernel)->compute(context);
    };
    destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

  ort::ElementType x, values;
};

}  // namespace

// What onnxruntime calls after SessionOptions.register_custom_ops_library(path).
extern "C" RAREFY_C_API ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                       const ort::ApiBase* base) {
  // The first version whose ops return a Status: an older onnxruntime has none, and says so itself.
  const ort::Api* api = base->get_api(16);
  if (api == nullptr)
    return base->get_api(1)->call<ort::Status*>(
        ort::kCreateStatus, ort::fail, "[com.rarefy] onnxruntime must be 1.16 or later; got an older one");
  const Runtime runtime(api);
  return runtime.guarded([&] {
    static const std::array<Op, 6> ops = {Op(ort::f32, ort::f32),   Op(ort::f32, ort::bf16),
                                          Op(ort::f32, ort::f16),   Op(ort::f64, ort::f64),
                                          Op(ort::bf16, ort::bf16), Op(ort::f16, ort::f16)};
    static ort::CustomOpDomain* domain = nullptr;  // never freed: sessions keep what they were given
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (domain == nullptr) {
      ort::CustomOpDomain* made = nullptr;
      runtime(ort::kCreateCustomOpDomain, "com.rarefy", &made);
      for (const Op& op : ops) runtime(ort::kCustomOpDomainAdd, made, static_cast<const ort::CustomOp*>(&op));
      domain = made;
    }
    runtime(ort::kAddCustomOpDomain, options, domain);
  });
}
