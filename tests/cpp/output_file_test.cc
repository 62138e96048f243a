// Files that appear complete or not at all: in which order the system is asked, what happens when it says
// no, and many threads at one path. The system's fsync and rename are replaced by ones that keep a log.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "rarefy/safetensors.h"
#include "raw_file.h"

namespace {

struct Log {
  bool on = false;
  int failing_sync = -1;  // this one of the calls of fsync fails
  int syncs = 0;
  std::vector<std::string> calls;
};
Log system_log;  // of the one thread that turns it on

std::string name_of(int descriptor) {
  char name[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t length = ::readlink(link.c_str(), name, sizeof name);
  return length < 0 ? "?"
                    : std::filesystem::path(std::string(name, static_cast<std::size_t>(length))).filename();
}

}  // namespace

// The linker takes these before libc's.
extern "C" int fsync(int descriptor) {
  if (system_log.on) {
    system_log.calls.push_back("fsync " + name_of(descriptor));
    if (system_log.syncs++ == system_log.failing_sync) return errno = EIO, -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

extern "C" int rename(const char* from, const char* to) noexcept {
  if (system_log.on) system_log.calls.push_back("rename to " + std::filesystem::path(to).filename().string());
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}

namespace rarefy {
namespace {

using test::TemporaryDirectory;

SafetensorsFile one_tensor(std::size_t bytes, std::byte value = std::byte{1}) {
  SafetensorsFile file;
  file.tensors["a"] = {SafetensorsDType::u8, {static_cast<std::int64_t>(bytes)}, std::vector(bytes, value)};
  return file;
}

// Writes with the log on.
Status logged_write(const std::string& path, const SafetensorsFile& file, int failing_sync = -1) {
  system_log = {true, failing_sync, 0, {}};
  const Status status = write_safetensors(path, file);
  system_log.on = false;
  return status;
}

std::ptrdiff_t entries(const TemporaryDirectory& directory) {
  return std::distance(std::filesystem::directory_iterator(directory.path()), {});
}

TEST(OutputFileTest, BytesAreOnDiskBeforeTheNameAndTheNameBeforeReturning) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(logged_write(directory.file("x"), one_tensor(100)).ok());
  ASSERT_EQ(system_log.calls.size(), 3U);
  EXPECT_TRUE(system_log.calls[0].starts_with("fsync .rarefy-")) << system_log.calls[0];
  EXPECT_EQ(system_log.calls[1], "rename to x");
  EXPECT_EQ(system_log.calls[2], "fsync " + directory.path().filename().string());
}

TEST(OutputFileTest, ADiskThatCannotSyncKeepsTheOldFile) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(write_safetensors(directory.file("x"), one_tensor(3)).ok());
  const Status status = logged_write(directory.file("x"), one_tensor(100), 0);
  EXPECT_EQ(status.code(), StatusCode::io_error);
  EXPECT_NE(status.message().find(std::strerror(EIO)), std::string::npos) << status.message();
  EXPECT_EQ(system_log.calls.size(), 1U);  // no rename
  EXPECT_EQ(*read_safetensors(directory.file("x")), one_tensor(3));
  EXPECT_EQ(entries(directory), 1);
}

TEST(OutputFileTest, ADirectoryThatCannotSyncIsNoFailure) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(logged_write(directory.file("x"), one_tensor(100), 1).ok());
  EXPECT_EQ(*read_safetensors(directory.file("x")), one_tensor(100));
}

TEST(OutputFileTest, TakesNamesAsLongAsTheFileSystemDoes) {
  const TemporaryDirectory directory;
  for (const std::size_t length : {250U, 255U}) {
    const std::string path = directory.file(std::string(length, 'n'));
    EXPECT_TRUE(write_safetensors(path, one_tensor(3)).ok()) << length;
    EXPECT_TRUE(read_safetensors(path).ok()) << length;
  }
  EXPECT_EQ(write_safetensors(directory.file(std::string(256, 'n')), one_tensor(3)).code(),
            StatusCode::io_error);
  EXPECT_EQ(entries(directory), 2);
}

TEST(OutputFileTest, WorksWithoutADirectoryInThePath) {
  const TemporaryDirectory directory;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(directory.path());
  const Status status = write_safetensors("x", one_tensor(3));
  std::filesystem::current_path(before);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(entries(directory), 1);
}

TEST(OutputFileTest, ManyThreadsAtOnePathAllSucceed) {
  const TemporaryDirectory directory;
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const SafetensorsFile file = one_tensor(5000, std::byte(t));
      for (int i = 0; i < 15; ++i) failed += write_safetensors(directory.file("x"), file).ok() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(entries(directory), 1);
  const auto last = read_safetensors(directory.file("x"));
  ASSERT_TRUE(last.ok());
  EXPECT_EQ(*last, one_tensor(5000, last->tensors.at("a").data[0]));  // of one thread, whole
}

TEST(OutputFileTest, HasThePermissionsThatTheUmaskLeaves) {
  const TemporaryDirectory directory;
  const mode_t before = ::umask(027);
  ASSERT_TRUE(write_safetensors(directory.file("x"), one_tensor(3)).ok());
  ::umask(before);
  EXPECT_EQ(static_cast<unsigned>(std::filesystem::status(directory.file("x")).permissions()), 0640U);
}

}  // namespace
}  // namespace rarefy
