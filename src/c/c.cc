// The C interface: handles around the C++ objects, and statuses as numbers with a sentence for each thread.
#include "rarefy/c.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/message.h"
#include "core/padding.h"
#include "cpu/kernels.h"
#include "rarefy/rarefy.h"

using rarefy::Activation;
using rarefy::BsrMatrix;
using rarefy::DType;
using rarefy::Memory;
using rarefy::Result;
using rarefy::Scaling;
using rarefy::Status;
using rarefy::StatusCode;

struct rarefy_pool {
  explicit rarefy_pool(int count) : threads(count) {}
  rarefy::ThreadPool threads;
};

// What a kernel derives from a weight, and the memory that it lies in.
struct Held {
  rarefy::Derived derived;
  Memory prepared, packed;
};

struct rarefy_weight {
  explicit rarefy_weight(BsrMatrix of) : matrix(std::move(of)) {}

  rarefy::BsrView view() const {
    rarefy::BsrView found = matrix.view();
    found.scaling = scaling;
    found.scales = scales.empty() ? nullptr : scales.data();
    found.rounds_x = rounds_x;
    return found;
  }

  BsrMatrix matrix;
  Scaling scaling = Scaling::none;
  std::vector<float> scales;
  bool rounds_x = false;
  Held many, few;  // for products of `x`; few: of single elements with few tokens
  DType x = DType::f32;
};

struct rarefy_file {
  rarefy::BsrFile file;
  std::map<std::string, rarefy_weight> weights;
};

namespace {

static_assert(RAREFY_INTERNAL == static_cast<int>(StatusCode::internal));
static_assert(RAREFY_I8 == static_cast<int>(DType::i8));
static_assert(RAREFY_SILU == static_cast<int>(Activation::silu) && rarefy::kActivations == RAREFY_SILU + 1);

thread_local std::string last_error;

// Runs what returns a Status; nothing gets past it, and its text is kept.
template <class Body>
rarefy_status guarded(Body body) {
  const char* text = nullptr;
  rarefy_status code = RAREFY_OUT_OF_MEMORY;
  try {
    const Status status = body();
    if (status.ok()) return RAREFY_OK;
    last_error = status.message();
    return static_cast<rarefy_status>(status.code());
  } catch (const std::bad_alloc&) {
    text = "[rarefy] the call must fit in memory; got an allocation failure";
  } catch (...) {
    text = "[rarefy] the call must not fail like this; got an unknown exception";
    code = RAREFY_INTERNAL;
  }
  try {
    last_error = text;
  } catch (...) {  // the sentence of the failure before stays
  }
  return code;
}

template <class... Pointers>
Status check_pointers(std::string_view op, Pointers... pointers) {
  const bool missing = (... || (pointers == nullptr));
  return missing ? rarefy::invalid(op, "arguments must not be null", "NULL") : Status{};
}

Result<DType> dtype_of(std::string_view op, rarefy_dtype dtype) {
  if (dtype < RAREFY_F64 || dtype > RAREFY_I8) {
    return rarefy::mismatch(op, "dtype must be a rarefy_dtype", std::to_string(static_cast<int>(dtype)));
  }
  return static_cast<DType>(dtype);
}

// A rarefy_matrix as a MatrixView, a rarefy_output as a MutableMatrixView.
template <class View, class Matrix>
Result<View> view_as(std::string_view op, const Matrix* matrix) {
  if (const Status status = check_pointers(op, matrix); !status.ok()) return status;
  const auto dtype = dtype_of(op, matrix->dtype);
  if (!dtype.ok()) return dtype.status();
  return View{matrix->data, *dtype, matrix->rows, matrix->cols, matrix->row_stride};
}

auto view_of(std::string_view op, const rarefy_matrix* matrix) {
  return view_as<rarefy::MatrixView>(op, matrix);
}

auto view_of(std::string_view op, const rarefy_output* matrix) {
  return view_as<rarefy::MutableMatrixView>(op, matrix);
}

rarefy::Context context_of(rarefy_pool* pool) {
  rarefy::Context context;
  if (pool != nullptr) context.executor = pool->threads.executor();
  return context;
}

Memory aligned(std::int64_t bytes) {
  Memory memory = rarefy::aligned_memory(bytes);
  if (memory == nullptr && bytes > 0) throw std::bad_alloc();
  return memory;
}

template <class Map>
const char* name_at(const Map& map, std::int64_t i) {
  if (i < 0 || i >= static_cast<std::int64_t>(map.size())) return nullptr;
  return std::next(map.begin(), i)->first.c_str();
}

// What the best kernel for so many tokens of a dtype derives from a weight; nothing is held where it is none.
Result<Held> derive(const rarefy::BsrView& view, std::int64_t tokens, DType x,
                    const rarefy::Context& context) {
  rarefy::Problem problem = rarefy::make_problem(rarefy::Op::linear, view.plan.shape, tokens, x,
                                                 rarefy::Device::cpu, context.executor.threads);
  problem.weight.dtype = view.dtype;
  problem.weight.scaling = view.scaling;
  problem.weight.rounds_x = view.rounds_x;
  const auto sizes = rarefy::derived_sizes(problem);
  if (!sizes.ok()) return sizes.status();
  Held held;
  if (sizes->key == 0) return held;
  held.prepared = aligned(sizes->prepared);
  held.packed = aligned(sizes->packed);
  Status status = rarefy::prepare(problem, view.plan, held.prepared.get(), context);
  if (status.ok()) status = rarefy::pack(problem, view, held.prepared.get(), held.packed.get(), context);
  if (!status.ok()) return status;
  held.derived = {sizes->key, held.prepared.get(), held.packed.get(), sizes->prepared, sizes->packed};
  return held;
}
}  // namespace

extern "C" {

const char* rarefy_version(void) { return rarefy::version(); }

const char* rarefy_last_error(void) { return last_error.c_str(); }

rarefy_status rarefy_force_impl(const char* forced) {
  return guarded([&] { return rarefy::force_impl(forced == nullptr ? "" : forced); });
}

rarefy_status rarefy_pool_create(int threads, rarefy_pool** pool) {
  return guarded([&]() -> Status {
    if (Status status = check_pointers("rarefy_pool_create", pool); !status.ok()) return status;
    *pool = std::make_unique<rarefy_pool>(threads).release();
    return {};
  });
}

void rarefy_pool_free(rarefy_pool* pool) { delete pool; }

rarefy_status rarefy_weight_from_dense(const rarefy_matrix* dense, int64_t block_rows, int64_t block_cols,
                                       double density, rarefy_weight** weight) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_weight_from_dense";
    if (Status status = check_pointers(op, weight); !status.ok()) return status;
    const auto view = view_of(op, dense);
    if (!view.ok()) return view.status();
    const rarefy::BlockShape block{block_rows, block_cols};
    const auto mask = rarefy::block_mask_by_norm(*view, block, density);
    if (!mask.ok()) return mask.status().in(op);
    auto made = rarefy::dense_to_bsr(*view, block, *mask);
    if (!made.ok()) return made.status().in(op);
    *weight = std::make_unique<rarefy_weight>(std::move(made).value()).release();
    return {};
  });
}

rarefy_status rarefy_weight_from_blocks(const rarefy_weight_info* info, rarefy_weight** weight) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_weight_from_blocks";
    if (Status status = check_pointers(op, info, weight); !status.ok()) return status;
    const auto dtype = dtype_of(op, info->dtype);
    if (!dtype.ok()) return dtype.status();
    const rarefy::BsrShape shape{info->rows, info->cols, info->block_rows, info->block_cols, info->nnzb};
    if (Status status = rarefy::check_shape(op, shape); !status.ok()) return status;
    if (Status status = check_pointers(op, info->crow_indices); !status.ok()) return status;
    if (shape.nnzb > 0) {
      if (Status status = check_pointers(op, info->col_indices, info->values); !status.ok()) return status;
    }
    auto pattern =
        rarefy::Pattern::create(shape, {info->crow_indices, static_cast<std::size_t>(shape.row_count() + 1)},
                                {info->col_indices, static_cast<std::size_t>(shape.nnzb)});
    if (!pattern.ok()) return pattern.status().in(op);
    const auto bytes = static_cast<std::size_t>(shape.value_count()) * rarefy::size_of(*dtype);
    const auto* values = static_cast<const std::byte*>(info->values);
    BsrMatrix matrix{std::move(pattern).value(), *dtype, {values, values + bytes}};
    for (std::int64_t i = 0; rarefy::has_padding(shape) && i < shape.row_count(); ++i) {
      clear_padding(matrix.pattern.view(), i, matrix.values.data(),
                    static_cast<std::int64_t>(rarefy::size_of(*dtype)));
    }
    *weight = std::make_unique<rarefy_weight>(std::move(matrix)).release();
    return {};
  });
}

void rarefy_weight_free(rarefy_weight* weight) { delete weight; }

rarefy_status rarefy_weight_get_info(const rarefy_weight* weight, rarefy_weight_info* info) {
  return guarded([&]() -> Status {
    if (Status status = check_pointers("rarefy_weight_get_info", weight, info); !status.ok()) return status;
    const rarefy::BsrView view = weight->view();
    const rarefy::BsrShape& shape = view.plan.shape;
    *info = {shape.rows,       shape.cols,     shape.block_rows,
             shape.block_cols, shape.nnzb,     static_cast<rarefy_dtype>(view.dtype),
             view.values,      view.plan.crow, view.plan.col,
             view.scales};
    return {};
  });
}

rarefy_status rarefy_weight_to_dense(const rarefy_weight* weight, const rarefy_output* dense) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_weight_to_dense";
    if (Status status = check_pointers(op, weight); !status.ok()) return status;
    const auto view = view_of(op, dense);
    if (!view.ok()) return view.status();
    return rarefy::bsr_to_dense(weight->view(), *view).in(op);
  });
}

rarefy_status rarefy_weight_prepare(rarefy_weight* weight, rarefy_dtype x, rarefy_pool* pool) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_weight_prepare";
    constexpr std::int64_t kManyTokens = 512;
    if (Status status = check_pointers(op, weight); !status.ok()) return status;
    const auto dtype = dtype_of(op, x);
    if (!dtype.ok()) return dtype.status();
    const rarefy::Context context = context_of(pool);
    auto many = derive(weight->view(), kManyTokens, *dtype, context);
    if (!many.ok()) return many.status().in(op);
    Held few;
    if (weight->view().plan.shape.block_size() == 1) {
      auto held = derive(weight->view(), rarefy::cpu::kFewTokens, *dtype, context);
      if (!held.ok()) return held.status().in(op);
      few = std::move(held).value();
    }
    weight->x = *dtype;
    weight->many = std::move(many).value();
    weight->few = std::move(few);
    return {};
  });
}

rarefy_status rarefy_file_read(const char* path, rarefy_file** file) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_file_read";
    if (Status status = check_pointers(op, path, file); !status.ok()) return status;
    auto found = rarefy::read_bsr_file(path);
    if (!found.ok()) return found.status().in(op);
    auto made = std::make_unique<rarefy_file>();
    made->file = std::move(found).value();
    for (auto& [name, weight] : made->file.weights) {
      rarefy_weight& handle = made->weights.try_emplace(name, std::move(weight)).first->second;
      handle.scaling = weight.scaling;
      handle.rounds_x = weight.rounds_x;
      handle.scales = std::move(weight.scales);
    }
    made->file.weights.clear();
    *file = made.release();
    return {};
  });
}

void rarefy_file_free(rarefy_file* file) { delete file; }

const char* rarefy_file_weight_name(const rarefy_file* file, int64_t i) {
  return file == nullptr ? nullptr : name_at(file->weights, i);
}

const char* rarefy_file_tensor_name(const rarefy_file* file, int64_t i) {
  return file == nullptr ? nullptr : name_at(file->file.tensors, i);
}

rarefy_status rarefy_file_weight(rarefy_file* file, const char* name, rarefy_weight** weight) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_file_weight";
    if (Status status = check_pointers(op, file, name, weight); !status.ok()) return status;
    const auto found = file->weights.find(name);
    if (found == file->weights.end()) {
      return rarefy::invalid(op, "name must be that of a sparse weight of the file", name);
    }
    *weight = &found->second;
    return {};
  });
}

rarefy_status rarefy_file_tensor(const rarefy_file* file, const char* name, rarefy_matrix* tensor) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_file_tensor";
    if (Status status = check_pointers(op, file, name, tensor); !status.ok()) return status;
    const auto found = file->file.tensors.find(name);
    if (found == file->file.tensors.end()) {
      return rarefy::invalid(op, "name must be that of a dense tensor of the file", name);
    }
    const rarefy::StoredTensor& stored = found->second;
    const auto dtype = rarefy::from_safetensors(stored.dtype);
    if (!dtype) {
      return rarefy::mismatch(op, "the tensor's dtype must be a rarefy_dtype", rarefy::name(stored.dtype));
    }
    const std::size_t dimensions = stored.shape.size();
    if (dimensions != 1 && dimensions != 2) {
      return rarefy::invalid(op, "the tensor must have 1 or 2 dimensions", std::to_string(dimensions));
    }
    const std::int64_t cols = stored.shape.back();
    *tensor = {stored.data.data(), static_cast<rarefy_dtype>(*dtype), dimensions == 1 ? 1 : stored.shape[0],
               cols, cols};
    return {};
  });
}

rarefy_status rarefy_linear(const rarefy_matrix* x, const rarefy_weight* weight, const void* bias,
                            rarefy_activation activation, const rarefy_output* y, rarefy_pool* pool) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_linear";
    if (Status status = check_pointers(op, weight); !status.ok()) return status;
    const auto in = view_of(op, x);
    if (!in.ok()) return in.status();
    const auto out = view_of(op, y);
    if (!out.ok()) return out.status();
    if (activation < RAREFY_NONE || activation > RAREFY_SILU) {
      return rarefy::invalid(op, "activation must be a rarefy_activation",
                             std::to_string(static_cast<int>(activation)));
    }
    rarefy::BsrView view = weight->view();
    if (in->dtype == weight->x) {
      const bool few = in->rows <= rarefy::cpu::kFewTokens && weight->few.derived.key != 0;
      view.derived = (few ? weight->few : weight->many).derived;
    }
    return rarefy::linear(*in, view, bias, static_cast<Activation>(activation), *out, context_of(pool))
        .in(op);
  });
}

rarefy_status rarefy_grad_input(const rarefy_matrix* dy, const rarefy_weight* weight, const rarefy_output* dx,
                                rarefy_pool* pool) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_grad_input";
    if (Status status = check_pointers(op, weight); !status.ok()) return status;
    const auto in = view_of(op, dy);
    if (!in.ok()) return in.status();
    const auto out = view_of(op, dx);
    if (!out.ok()) return out.status();
    return rarefy::grad_input(*in, weight->view(), *out, context_of(pool)).in(op);
  });
}

rarefy_status rarefy_grad_weight(const rarefy_matrix* dy, const rarefy_matrix* x, const rarefy_weight* weight,
                                 void* dvalues, rarefy_dtype dtype, rarefy_pool* pool) {
  return guarded([&]() -> Status {
    constexpr auto op = "rarefy_grad_weight";
    if (Status status = check_pointers(op, weight, dvalues); !status.ok()) return status;
    const auto out = view_of(op, dy);
    if (!out.ok()) return out.status();
    const auto in = view_of(op, x);
    if (!in.ok()) return in.status();
    const auto stored = dtype_of(op, dtype);
    if (!stored.ok()) return stored.status();
    return rarefy::grad_weight(*out, *in, weight->view().plan, dvalues, *stored, context_of(pool)).in(op);
  });
}

}  // extern "C"
