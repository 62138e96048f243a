// Memory that the product tests run in: a Buffer type per device, all with one interface, and
// outputs that are poisoned and lie between guard zones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "rarefy/view.h"

namespace rarefy::test {

inline constexpr std::byte kPoison{0xff};  // NaN in every float type
inline constexpr std::size_t kGuard = 512;

// Host memory of exactly the asked size, so that AddressSanitizer sees a read past the end.
class HostBuffer {
 public:
  static constexpr Device kDevice = Device::cpu;

  explicit HostBuffer(std::size_t bytes) : bytes_(bytes), data_(new std::byte[bytes]) {}

  template <class T>
  static HostBuffer upload(std::span<const T> host) {
    HostBuffer buffer(host.size_bytes());
    if (!host.empty()) std::memcpy(buffer.data(), host.data(), host.size_bytes());
    return buffer;
  }
  std::vector<std::byte> download() const { return {data_.get(), data_.get() + bytes_}; }
  void fill(std::byte value) { std::fill(data_.get(), data_.get() + bytes_, value); }

  void* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> data_;
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
