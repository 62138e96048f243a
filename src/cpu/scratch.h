// Working memory of the CPU kernels: one growing buffer per thread and purpose, so that a call
// neither allocates nor faults in fresh pages. It holds nothing between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace rarefy::cpu {

class Scratch {
 public:
  // At least `count` floats (or int32s), 64-byte aligned, contents undefined.
  template <class T>
  T* get(std::int64_t count) {
    static_assert(sizeof(T) == 4);
    if (count > capacity_) {
      memory_.reset();
      capacity_ = 0;
      const std::size_t bytes = (static_cast<std::size_t>(count) * 4 + 63) / 64 * 64;
      memory_.reset(std::aligned_alloc(64, bytes));
      if (memory_ == nullptr) throw std::bad_alloc();
      capacity_ = static_cast<std::int64_t>(bytes / 4);
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }  // NOLINT(cppcoreguidelines-no-malloc)
  };
  std::unique_ptr<void, Free> memory_;
  std::int64_t capacity_ = 0;
};

// What one task needs at once.
struct TaskScratch {
  Scratch x, y, unpacked, cursors;
};

inline TaskScratch& task_scratch() {
  thread_local TaskScratch scratch;
  return scratch;
}

}  // namespace rarefy::cpu
