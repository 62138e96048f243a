// Memory aligned to cache lines, without objects in it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace rarefy {

struct Free {
  void operator()(void* memory) const { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)
};
using Memory = std::unique_ptr<void, Free>;

// Null for no bytes, or where there is no memory.
inline Memory aligned_memory(std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  return Memory(
      bytes == 0 ? nullptr
                 : std::aligned_alloc(kLine, static_cast<std::size_t>((bytes + kLine - 1) / kLine * kLine)));
}

}  // namespace rarefy
