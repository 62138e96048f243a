// A file that appears at its path complete or not at all.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "rarefy/status.h"

namespace rarefy {

// Writes beside the path, under a temporary name; commit() makes the bytes durable and renames. Destroyed
// without commit(), it leaves nothing.
class OutputFile {
 public:
  OutputFile(std::string_view op, std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  Status open();
  Status write(std::span<const std::byte> bytes);
  Status commit();

 private:
  Status failed(int code) const;

  std::string_view op_;
  std::string path_;
  std::string temporary_;  // empty: nothing to remove
  int descriptor_ = -1;
};

}  // namespace rarefy
