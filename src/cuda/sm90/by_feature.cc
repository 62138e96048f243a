// X by token copied by feature: checks, and the transposition that the kernels' own X goes through.
#include "core/by_feature.h"

#include "core/arguments.h"
#include "core/message.h"
#include "core/registry.h"
#include "cuda/sm90/transpose.h"
#include "cuda/status.h"

namespace rarefy {

Status copy_by_feature(std::string_view op, const MatrixView& x, void* to, void* stream) {
  const DeviceInfo& gpu = cuda_devices().at(static_cast<std::size_t>(current_cuda_device()));
  if (gpu.arch != 90) {
    return error(StatusCode::unsupported, op, "needs compute capability 9.0", cat("sm_", gpu.arch));
  }
  if (size_of(x.dtype) != 2) return mismatch(op, "x must be of 16 bits", name(x.dtype));
  if (x.layout() != Layout::by_token) return invalid(op, "x must be by token", "x by feature");
  Alignment alignment;
  alignment.add(x);
  alignment.add(to);
  if (alignment.bytes() < 16) {
    return invalid(op, "x must be aligned to 16 bytes, and its rows, too", cat(alignment.bytes()));
  }
  return cuda::launch_status(
      op, sm90::transpose(x.data, 2, x.rows, x.cols, x.row_stride, to, by_feature_stride(x.rows), false,
                          static_cast<cudaStream_t>(stream)));
}

}  // namespace rarefy
