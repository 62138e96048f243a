// Which worker takes which task: its own share first, an equal range of the tasks, then what others have
// left. So equal calls give a thread the rows that it wrote before, which its caches still hold, and a layer
// finds what the layer before wrote. From one counter neighbouring tasks went to whoever came first, and
// lines from core to core (Zen 5, two threads, a 1×1 convolution of 16 → 96 channels on 112² pixels: 120–440
// µs, now 84–140).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rarefy {

class TaskQueue {
 public:
  TaskQueue(std::int64_t tasks, int workers) : tasks_(tasks), workers_(workers) {
    for (int s = 0; s < count_; ++s) next(s).store(first(s), std::memory_order_relaxed);
  }

  // Calls each(task) for the tasks that this worker gets, until none is left. Once for each worker.
  template <class Each>
  void take(int worker, Each&& each) {
    const int own = worker * count_ / workers_;
    for (int i = 0; i < count_; ++i) {
      const int share = (own + i) % count_;
      const std::int64_t end = first(share + 1);
      for (std::int64_t task = next(share)++; task < end; task = next(share)++) each(task);
    }
  }

 private:
  static constexpr int kShares = 32;  // more workers take from one share in pairs, and more

  struct alignas(64) Share {
    std::atomic<std::int64_t> next;
  };

  std::atomic<std::int64_t>& next(int share) { return shares_[static_cast<std::size_t>(share)].next; }
  std::int64_t first(int share) const { return tasks_ * share / count_; }

  std::int64_t tasks_;
  int workers_, count_ = std::min(workers_, kShares);
  std::array<Share, kShares> shares_;
};

}  // namespace rarefy
