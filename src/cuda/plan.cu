// Tier 1 on the device: a pattern is copied, validated and given its transposed index without a trip to the
// host; one word comes back, the position of the first error. The texts of errors are the host's own.
#include <cub/cub.cuh>
#include <vector>

#include "core/message.h"
#include "core/plan_layout.h"
#include "core/registry.h"
#include "cuda/status.h"

namespace rarefy {
namespace {

constexpr int kThreads = 256;
constexpr unsigned long long kValid = ~0ULL;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(std::max<std::int64_t>(1, (count + kThreads - 1) / kThreads), 65535));
}

template <class F>
__global__ void __launch_bounds__(kThreads) for_each_kernel(std::int64_t count, F body) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    body(i);
  }
}

template <class F>
void for_each(std::int64_t count, cudaStream_t stream, F body) {
  if (count > 0) for_each_kernel<<<blocks_for(count), kThreads, 0, stream>>>(count, body);
}

// The working memory: sort keys, positions and block rows of the entries, the error word, cub's own.
struct Parts {
  unsigned long long* error;
  std::int32_t *sorted, *position, *row_of;
  void* cub;
  std::size_t cub_bytes = 0;
  std::int64_t bytes = 0;

  Parts(const BsrShape& shape, void* base) {
    const auto take = [&](std::int64_t size) {
      void* part = base == nullptr ? nullptr : static_cast<char*>(base) + bytes;
      bytes += (size + 255) / 256 * 256;
      return part;
    };
    const std::int64_t entries = shape.nnzb * static_cast<std::int64_t>(sizeof(std::int32_t));
    error = static_cast<unsigned long long*>(take(sizeof(unsigned long long)));
    sorted = static_cast<std::int32_t*>(take(entries));
    position = static_cast<std::int32_t*>(take(entries));
    row_of = static_cast<std::int32_t*>(take(entries));
    std::size_t scan = 0;
    std::int32_t* none = nullptr;
    cub::DeviceRadixSort::SortPairs(nullptr, cub_bytes, none, none, none, none, static_cast<int>(shape.nnzb));
    cub::DeviceScan::InclusiveSum(nullptr, scan, none, none, static_cast<int>(shape.col_count() + 1));
    cub_bytes = std::max(cub_bytes, scan);
    cub = take(static_cast<std::int64_t>(cub_bytes));
  }
};

cudaError_t queue(const BsrShape& shape, const std::int32_t* crow, const std::int32_t* col,
                  std::int32_t* words, const Parts& parts, cudaStream_t stream) {
  const PlanLayout layout(shape);
  const std::int64_t rows = shape.row_count();
  const std::int64_t cols = shape.col_count();
  const std::int64_t nnzb = shape.nnzb;
  std::int32_t* own_crow = words + layout.crow;
  std::int32_t* own_col = words + layout.col;
  std::int32_t* ccol = words + layout.ccol;
  std::int32_t* row = words + layout.row;
  std::int32_t* perm = words + layout.perm;
  const PlanHeader header(shape);
  unsigned long long* error = parts.error;
  std::int32_t* position = parts.position;
  std::int32_t* row_of = parts.row_of;

  // What is checked is the copy: nobody else can write to it. Everything below stays in bounds whatever it
  // holds; a wrong plan is never returned.
  cudaMemsetAsync(error, 0xff, sizeof(*error), stream);
  for_each(PlanHeader::kWords, stream, [=] __device__(std::int64_t i) { words[i] = header.word[i]; });
  for_each(rows + 1, stream, [=] __device__(std::int64_t i) { own_crow[i] = crow[i]; });
  for_each(nnzb, stream, [=] __device__(std::int64_t e) {
    own_col[e] = col[e];
    position[e] = static_cast<std::int32_t>(e);
  });
  cudaMemsetAsync(row_of, 0, static_cast<std::size_t>(nnzb) * sizeof(*row_of), stream);  // if crow is wrong
  cudaMemsetAsync(ccol, 0, static_cast<std::size_t>(cols + 1) * sizeof(*ccol), stream);
  // Errors of crow come before those of col, and each at its position.
  const auto report = [=] __device__(unsigned long long stage, std::int64_t at) {
    atomicMin(error, stage << 40 | static_cast<unsigned long long>(at));
  };
  // A warp for each block row, and one for the end.
  constexpr std::int64_t kLanes = 32;
  for_each((rows + 1) * kLanes, stream, [=] __device__(std::int64_t thread) {
    const std::int64_t i = thread / kLanes;
    const std::int64_t begin = own_crow[i];
    if (i == 0 && begin != 0) report(0, 0);
    if (i == rows) {
      if (begin != nnzb) report(2, i);
      return;
    }
    const std::int64_t end = own_crow[i + 1];
    if (end < begin || end - begin > cols) return report(1, i);
    if (begin < 0 || end > nnzb) return report(2, i);
    for (std::int64_t e = begin + thread % kLanes; e < end; e += kLanes) {
      const std::int32_t c = own_col[e];
      row_of[e] = static_cast<std::int32_t>(i);
      if (c < 0 || c >= cols || (e > begin && c <= own_col[e - 1])) {
        report(3, e);
      } else {
        atomicAdd(ccol + c + 1, 1);  // a sum of ones: any order gives the same
      }
    }
  });
  std::size_t bytes = parts.cub_bytes;
  cudaError_t code =
      cub::DeviceScan::InclusiveSum(parts.cub, bytes, ccol, ccol, static_cast<int>(cols + 1), stream);
  if (code != cudaSuccess || nnzb == 0) return code;
  // Stable: the entries of a block column stay in the order of their rows.
  code = cub::DeviceRadixSort::SortPairs(parts.cub, bytes, own_col, parts.sorted, position, perm,
                                         static_cast<int>(nnzb), 0, 32, stream);
  for_each(nnzb, stream, [=] __device__(std::int64_t i) { row[i] = row_of[perm[i]]; });
  return code;
}

// The text of an error: the host checks its copy of the indices, which are wrong there too, unless another
// stream changed them meanwhile.
Status explain_error(std::string_view op, const BsrShape& shape, const std::int32_t* words) {
  const PlanLayout layout(shape);
  std::vector<std::int32_t> crow(static_cast<std::size_t>(shape.row_count() + 1));
  std::vector<std::int32_t> col(static_cast<std::size_t>(shape.nnzb));
  cudaMemcpy(crow.data(), words + layout.crow, crow.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost);
  cudaMemcpy(col.data(), words + layout.col, col.size() * sizeof(std::int32_t), cudaMemcpyDeviceToHost);
  Status status = check_indices(op, shape, crow, col);
  return status.ok()
             ? error(StatusCode::internal, op, "the device must find the host's errors only", "another")
             : status;
}

}  // namespace

Status build_device_plan(std::string_view op, const BsrShape& shape,
                         std::span<const std::int32_t> crow_indices,
                         std::span<const std::int32_t> col_indices, std::span<std::int32_t> plan,
                         const Context& context) {
  if (Status status = check_plan_sizes(op, shape, crow_indices.size(), col_indices.size(), plan.size());
      !status.ok()) {
    return status;
  }
  const auto launched = [&](cudaError_t code) { return cuda::launch_status(op, code); };
  const std::int64_t bytes = Parts(shape, nullptr).bytes;
  void* memory = context.workspace.data;
  if (context.workspace.bytes < bytes) {
    if (context.workspace.provide == nullptr) {
      return invalid(op, cat("workspace must have ", bytes, " bytes"), cat(context.workspace.bytes));
    }
    memory = context.workspace.provide(context.workspace.provider, bytes);
    if (memory == nullptr) {
      return error(StatusCode::out_of_memory, op, "the workspace must fit in memory", cat(bytes, " bytes"));
    }
  }
  const Parts parts(shape, memory);
  auto* stream = static_cast<cudaStream_t>(context.stream);
  if (Status status =
          launched(queue(shape, crow_indices.data(), col_indices.data(), plan.data(), parts, stream));
      !status.ok())
    return status;
  if (Status status = launched(cudaGetLastError()); !status.ok()) return status;
  unsigned long long first = kValid;
  cudaMemcpyAsync(&first, parts.error, sizeof(first), cudaMemcpyDeviceToHost, stream);
  if (Status status = launched(cudaStreamSynchronize(stream)); !status.ok()) return status;
  return first == kValid ? Status() : explain_error(op, shape, plan.data());
}

}  // namespace rarefy
