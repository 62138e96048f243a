// Write, fsync, rename: a crash leaves the old file or the new one.
#include "io/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "core/message.h"
#include "io/json.h"

namespace rarefy {

OutputFile::OutputFile(std::string_view op, std::string path) : op_(op), path_(std::move(path)) {}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Status OutputFile::failed(int code) const {
  return error(StatusCode::io_error, op_, "path must be writable",
               cat(quote(path_), ": ", std::generic_category().message(code)));
}

Status OutputFile::open() {
  // A name of its own, for the path's may be as long as a name can be. open(2) rather than mkstemp(3), which
  // would ignore the user's umask.
  static std::atomic<std::uint64_t> opened{0};
  const std::filesystem::path parent = std::filesystem::path(path_).parent_path();
  constexpr int kAttempts = 1000;  // names can be taken: by processes that crashed, or of other machines
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::string candidate =
        parent / join({".rarefy-", std::to_string(::getpid()), "-", std::to_string(opened++), ".tmp"});
    descriptor_ = ::open(candidate.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) {
      temporary_ = std::move(candidate);
      return {};
    }
    if (errno != EEXIST) break;
  }
  return failed(errno);
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed(errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return {};
}

Status OutputFile::commit() {
  const std::string parent = std::filesystem::path(path_).parent_path().string();  // while it may still fail
  if (::fsync(descriptor_) != 0) return failed(errno);
  const int closed = ::close(descriptor_);
  descriptor_ = -1;
  if (closed != 0 || std::rename(temporary_.c_str(), path_.c_str()) != 0) return failed(errno);
  temporary_.clear();
  // The new name survives a crash once its directory is on disk too; not every file system can do that.
  const int directory = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    ::fsync(directory);
    ::close(directory);
  }
  return {};
}

}  // namespace rarefy
