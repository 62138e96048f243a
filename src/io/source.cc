// The two byte sources.
#include "io/source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/message.h"
#include "io/json.h"

namespace rarefy {

namespace {

class FileSource final : public ByteSource {
 public:
  FileSource(int descriptor, std::int64_t size) : descriptor_(descriptor), size_(size) {}
  ~FileSource() override { ::close(descriptor_); }
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;

  std::int64_t size() const override { return size_; }

  Status read(std::string_view op, std::int64_t offset, std::span<std::byte> out) const override {
    while (!out.empty()) {
      const ssize_t got = ::pread(descriptor_, out.data(), out.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        return error(StatusCode::io_error, op, "the file must be readable",
                     std::generic_category().message(errno));
      }
      if (got == 0) {
        return error(StatusCode::io_error, op,
                     cat("the file must keep its ", size_, " bytes while it is read"),
                     cat("the end at ", offset));
      }
      out = out.subspan(static_cast<std::size_t>(got));
      offset += got;
    }
    return {};
  }

 private:
  int descriptor_;
  std::int64_t size_;
};

class MemorySource final : public ByteSource {
 public:
  explicit MemorySource(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(bytes_.size()); }

  Status read(std::string_view, std::int64_t offset, std::span<std::byte> out) const override {
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return {};
  }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace

Result<std::unique_ptr<ByteSource>> open_file(std::string_view op, const std::string& path) {
  const auto failed = [&](const std::string& reason) {
    return error(StatusCode::io_error, op, "path must be a readable file", cat(quote(path), ": ", reason));
  };
  // Non-blocking, so that a named pipe is refused below instead of waited for.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return failed(std::generic_category().message(errno));
  struct stat info {};
  const bool known = ::fstat(descriptor, &info) == 0;
  auto source = std::make_unique<FileSource>(descriptor, known ? info.st_size : 0);
  if (!known) return failed("no status");
  if (!S_ISREG(info.st_mode)) return failed("not a regular file");
  return std::unique_ptr<ByteSource>(std::move(source));
}

std::unique_ptr<ByteSource> open_memory(std::span<const std::byte> bytes) {
  return std::make_unique<MemorySource>(bytes);
}

}  // namespace rarefy
