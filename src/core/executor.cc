// A small pool: tasks are handed out one by one (task_queue.h); the caller takes part.
#include "rarefy/executor.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/task_queue.h"

namespace rarefy {

namespace {
thread_local bool inside_task = false;  // a nested parallel_for runs serially
}  // namespace

class ThreadPool::Impl {
 public:
  explicit Impl(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  void run(std::int64_t tasks, TaskRef body) {
    if (inside_task) {
      for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    const std::lock_guard one_job(jobs_);
    {
      const std::lock_guard lock(mutex_);
      body_ = body;
      queue_.emplace(tasks, threads_);
      busy_ = static_cast<int>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    take_tasks(body, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  // A task that throws (kernels allocate) must not end the process from a worker: the first
  // exception is kept for the caller, and the other tasks still run.
  void take_tasks(TaskRef body, int worker) {
    inside_task = true;
    queue_->take(worker, [&](std::int64_t task) {
      try {
        body(task, worker);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
    });
    inside_task = false;
  }

  void work(int worker) {
    std::uint64_t seen = 0;
    while (true) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      const TaskRef body = *body_;
      lock.unlock();
      take_tasks(body, worker);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::optional<TaskQueue> queue_;  // whole lines, so it comes first, and what is small last
  std::mutex jobs_;                 // held for a whole run
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::optional<TaskRef> body_;
  std::exception_ptr failure_;
  std::uint64_t generation_ = 0;
  std::vector<std::thread> workers_;
  const int threads_;
  int busy_ = 0;
  bool stopping_ = false;
};

ThreadPool::ThreadPool(int threads)
    : impl_(std::make_unique<Impl>(
          threads > 0 ? threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency())))) {}

ThreadPool::~ThreadPool() = default;

Executor ThreadPool::executor() {
  return {impl_->threads(), impl_.get(), [](void* context, std::int64_t tasks, TaskRef body) {
            static_cast<Impl*>(context)->run(tasks, body);
          }};
}

}  // namespace rarefy
