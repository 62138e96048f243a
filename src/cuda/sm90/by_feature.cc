// X copied into its other layout: checks, and the transposition that the kernels' own X goes through.
#include "core/by_feature.h"

#include "core/arguments.h"
#include "core/message.h"
#include "core/registry.h"
#include "cuda/sm90/transpose.h"
#include "cuda/status.h"

namespace rarefy {

namespace {

int current_arch() { return cuda_devices().at(static_cast<std::size_t>(current_cuda_device())).arch; }

Status check_arch(std::string_view op) {
  const int arch = current_arch();
  if (arch == 90) return {};
  return error(StatusCode::unsupported, op, "needs compute capability 9.0", cat("sm_", arch));
}

}  // namespace

bool can_turn(const MatrixView& x) {
  return x.device == Device::cuda && size_of(x.dtype) == 2 && current_arch() == 90;
}

Status copy_turned(std::string_view op, const MatrixView& x, void* to, void* stream) {
  if (Status status = check_arch(op); !status.ok()) return status;
  if (size_of(x.dtype) != 2) return mismatch(op, "x must be of 16 bits", name(x.dtype));
  const auto [count, length] = lines_of(x);
  return cuda::launch_status(
      op, sm90::transpose(x.data, 2, count, length, x.stride(), to, turned_stride(count), false,
                          static_cast<cudaStream_t>(stream)));
}

Status copy_rows(std::string_view op, const MatrixView& from, const MutableMatrixView& to, bool fill,
                 void* stream) {
  if (Status status = check_arch(op); !status.ok()) return status;
  const auto [count, length] = lines_of(from);
  const auto bytes = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(size_of(from.dtype));
  };
  return cuda::launch_status(
      op,
      sm90::copy_lines({from.data, bytes(from.stride())}, {to.data, bytes(to.stride())}, count, bytes(length),
                       fill ? (16 - bytes(length) % 16) % 16 : 0, false, static_cast<cudaStream_t>(stream)));
}

}  // namespace rarefy
