// Movement of blocks between patterns: units of up to 16 bytes, one after the other in memory, for
// neighbouring threads.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/move_blocks.h"
#include "cuda/status.h"

namespace rarefy {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostGroups = 1 << 20;  // beyond, threads take several units

template <class Unit>
__global__ void move_units(const Unit* from, std::int64_t from_blocks, const std::int64_t* source,
                           std::int64_t units, std::int64_t block_units, Unit* to) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < units;
       i += step) {
    const std::int64_t block = i / block_units;
    const std::int64_t at = source[block];
    to[i] = at >= 0 && at < from_blocks ? from[at * block_units + i % block_units] : Unit{};
  }
}

template <class Unit>
cudaError_t launch(const std::byte* from, std::int64_t from_blocks, const std::int64_t* source,
                   std::int64_t blocks, std::int64_t block_bytes, std::byte* to, cudaStream_t stream) {
  const std::int64_t block_units = block_bytes / static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t units = blocks * block_units;
  if (units == 0) return cudaSuccess;
  const auto groups = static_cast<unsigned>(std::min((units + kThreads - 1) / kThreads, kMostGroups));
  move_units<<<groups, kThreads, 0, stream>>>(reinterpret_cast<const Unit*>(from), from_blocks, source, units,
                                              block_units, reinterpret_cast<Unit*>(to));
  return cudaGetLastError();
}

}  // namespace

Status move_device_blocks(std::string_view op, const std::byte* from, std::int64_t from_blocks,
                          const std::int64_t* source, std::int64_t blocks, std::int64_t block_bytes,
                          std::byte* to, const Context& context) {
  // What block size and addresses are a multiple of.
  const std::uint64_t bits = static_cast<std::uint64_t>(block_bytes) |
                             reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  const auto run = [&](auto unit) {
    return launch<decltype(unit)>(from, from_blocks, source, blocks, block_bytes, to,
                                  static_cast<cudaStream_t>(context.stream));
  };
  cudaError_t launched = cudaSuccess;
  if (bits % 16 == 0) {
    launched = run(uint4{});
  } else if (bits % 4 == 0) {
    launched = run(std::uint32_t{});
  } else if (bits % 2 == 0) {
    launched = run(std::uint16_t{});
  } else {
    launched = run(std::uint8_t{});
  }
  return cuda::launch_status(op, launched);
}

}  // namespace rarefy
