// Random access to the bytes of a file, on disk or in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "rarefy/status.h"

namespace rarefy {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual std::int64_t size() const = 0;
  // Fills `out` from `offset`; [offset, offset + out.size()) must lie inside size().
  virtual Status read(std::string_view op, std::int64_t offset, std::span<std::byte> out) const = 0;
};

// Plain reads, no mapping: a file that somebody truncates meanwhile is an error, not a SIGBUS.
Result<std::unique_ptr<ByteSource>> open_file(std::string_view op, const std::string& path);

std::unique_ptr<ByteSource> open_memory(std::span<const std::byte> bytes);

}  // namespace rarefy
