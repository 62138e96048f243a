// Memory that the product tests run in: a Buffer type per device, all with one interface, and
// outputs that are poisoned and lie between guard zones.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <vector>

#include "rarefy/view.h"

namespace rarefy::test {

inline constexpr std::byte kPoison{0xff};  // NaN in every float type
inline constexpr std::size_t kGuard = 512;

// Host memory that ends where a page without access begins: a read past the end ends the test, in every
// build. (AddressSanitizer would see it anyway, and one before the beginning too: it gets its own memory.)
class HostBuffer {
 public:
  static constexpr Device kDevice = Device::cpu;

  explicit HostBuffer(std::size_t bytes) : bytes_(bytes), memory_(allocate(bytes)) {}

  template <class T>
  static HostBuffer upload(std::span<const T> host) {
    HostBuffer buffer(host.size_bytes());
    if (!host.empty()) std::memcpy(buffer.data(), host.data(), host.size_bytes());
    return buffer;
  }
  std::vector<std::byte> download() const { return {begin(), begin() + bytes_}; }
  void fill(std::byte value) { std::fill(begin(), begin() + bytes_, value); }

  void* data() const { return begin(); }
  std::size_t bytes() const { return bytes_; }

 private:
#if defined(RAREFY_ADDRESS_SANITIZER)
  using Memory = std::unique_ptr<std::byte[]>;
  static Memory allocate(std::size_t bytes) { return Memory(new std::byte[bytes]); }
  std::byte* begin() const { return memory_.get(); }
#else
  struct Unmap {
    std::size_t size;
    void operator()(std::byte* p) const { ::munmap(p, size); }
  };
  using Memory = std::unique_ptr<std::byte, Unmap>;
  static Memory allocate(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t usable = (bytes + page - 1) / page * page;
    void* p = ::mmap(nullptr, usable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    Memory memory(static_cast<std::byte*>(p), {usable + page});
    if (::mprotect(memory.get() + usable, page, PROT_NONE) != 0) throw std::runtime_error("mprotect");
    return memory;
  }
  std::byte* begin() const {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return memory_.get() + (bytes_ + page - 1) / page * page - bytes_;
  }
#endif

  std::size_t bytes_;
  Memory memory_;
};

// An output: `bytes` of poison with a guard zone on each side.
template <class Buffer>
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : bytes_(bytes), buffer_(bytes + 2 * kGuard) { poison(); }

  void poison() { buffer_.fill(kPoison); }
  void* data() const { return static_cast<std::byte*>(buffer_.data()) + kGuard; }

  // What was written, after checking that nothing else was.
  std::vector<std::byte> download() const {
    std::vector<std::byte> all = buffer_.download();
    const auto inside = all.begin() + static_cast<std::ptrdiff_t>(kGuard);
    const auto after = inside + static_cast<std::ptrdiff_t>(bytes_);
    const auto poisoned = [](std::byte byte) { return byte == kPoison; };
    if (!std::all_of(all.begin(), inside, poisoned) || !std::all_of(after, all.end(), poisoned)) {
      throw std::runtime_error("a guard zone was written to");
    }
    return {inside, after};
  }

 private:
  std::size_t bytes_;
  Buffer buffer_;
};

}  // namespace rarefy::test
