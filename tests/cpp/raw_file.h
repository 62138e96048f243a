// Safetensors files put together by hand, right and wrong, for the readers' tests and fuzzers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace rarefy::test {

// Length, header as it stands, data. Nothing is checked or padded.
inline std::vector<std::byte> raw_file(std::uint64_t header_length, std::string_view header,
                                       const std::vector<std::byte>& data = {}) {
  std::vector<std::byte> file(sizeof header_length + header.size() + data.size());
  std::memcpy(file.data(), &header_length, sizeof header_length);
  std::memcpy(file.data() + sizeof header_length, header.data(), header.size());
  if (!data.empty())
    std::memcpy(file.data() + sizeof header_length + header.size(), data.data(), data.size());
  return file;
}

inline std::vector<std::byte> raw_file(std::string_view header, const std::vector<std::byte>& data = {}) {
  return raw_file(header.size(), header, data);
}

// 1, 2, 3 … so that a byte out of place is seen.
inline std::vector<std::byte> counting_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i % 251 + 1);
  return bytes;
}

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// An empty directory that goes away with its object.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rarefy-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::filesystem::filesystem_error("mkdtemp", pattern, {});
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string file(std::string_view name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace rarefy::test
