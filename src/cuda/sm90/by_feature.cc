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

}  // namespace

bool can_turn(const MatrixView& x) {
  Alignment alignment;
  alignment.add(x);
  return x.device == Device::cuda && size_of(x.dtype) == 2 && alignment.bytes() >= 16 && current_arch() == 90;
}

Status copy_turned(std::string_view op, const MatrixView& x, void* to, void* stream) {
  if (const int arch = current_arch(); arch != 90) {
    return error(StatusCode::unsupported, op, "needs compute capability 9.0", cat("sm_", arch));
  }
  if (size_of(x.dtype) != 2) return mismatch(op, "x must be of 16 bits", name(x.dtype));
  Alignment alignment;
  alignment.add(x);
  alignment.add(to);
  if (alignment.bytes() < 16) {
    return invalid(op, "x must be aligned to 16 bytes, and its rows, too", cat(alignment.bytes()));
  }
  const bool by_token = x.layout() == Layout::by_token;
  const std::int64_t lines = by_token ? x.rows : x.cols, line = by_token ? x.cols : x.rows;
  return cuda::launch_status(op, sm90::transpose(x.data, 2, lines, line, x.stride(), to, turned_stride(lines),
                                                 false, static_cast<cudaStream_t>(stream)));
}

}  // namespace rarefy
