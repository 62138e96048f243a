// Addresses in shared memory as instructions take them: 32 bits, in the shared window.
#pragma once

#include <cstdint>

namespace rarefy::device {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace rarefy::device
