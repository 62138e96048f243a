// Who runs the tasks of a kernel. The core owns no threads: callers pass an Executor (the torch
// binding passes torch's intra-op pool), or use the small ThreadPool here when stand-alone.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "rarefy/export.h"

namespace rarefy {

// A borrowed callable, void(int64_t task) or void(int64_t task, int worker); it must outlive the call it
// is passed to. No two tasks run at once under one worker's number, so it can index working memory.
class TaskRef {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, TaskRef>)
      TaskRef(F&& body)  // NOLINT(google-explicit-constructor)
      : object_(const_cast<void*>(static_cast<const void*>(&body))),
        call_([](void* object, std::int64_t task, int worker) {
          auto& f = *static_cast<std::remove_reference_t<F>*>(object);
          if constexpr (std::is_invocable_v<F&, std::int64_t, int>) {
            f(task, worker);
          } else {
            f(task);
          }
        }) {}

  void operator()(std::int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  void* object_;
  void (*call_)(void*, std::int64_t, int);
};

struct Executor {
  int threads = 1;          // how many tasks may run at once; kernels size split and workspace by it
  void* context = nullptr;  // passed back to run
  // Runs body(0, w) … body(tasks - 1, w), each once, w in [0, threads), and returns when all are done.
  // Null: in order, here.
  void (*run)(void* context, std::int64_t tasks, TaskRef body) = nullptr;

  void parallel_for(std::int64_t tasks, TaskRef body) const {
    if (run != nullptr && threads > 1 && tasks > 1) return run(context, tasks, body);
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
  }
};

// A fixed set of threads; the caller of parallel_for works too. Calls from several threads queue
// up; a call from inside a task runs serially.
class RAREFY_API ThreadPool {
 public:
  explicit ThreadPool(int threads);  // ≤ 0: one per hardware thread
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  Executor executor();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace rarefy
