// The thread pool: every task once, from any number of callers, nested or not. Run under TSan too.
#include "rarefy/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "core/task_queue.h"

namespace rarefy {
namespace {

TEST(ExecutorTest, WithoutAPoolTasksRunHereInOrder) {
  std::vector<std::int64_t> seen;
  Executor{}.parallel_for(5, [&](std::int64_t task) { seen.push_back(task); });
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(ExecutorTest, NoTasksNoCalls) {
  ThreadPool pool(3);
  pool.executor().parallel_for(0, [](std::int64_t) { FAIL(); });
}

TEST(ThreadPoolTest, EveryTaskRunsOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.executor().threads, threads);
    for (const std::int64_t tasks : {1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      pool.executor().parallel_for(tasks, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; });
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
    }
  }
}

TEST(TaskQueueTest, AWorkerTakesItsOwnShareFirst) {
  TaskQueue queue(10, 3);  // shares of 3, 3 and 4
  std::vector<std::int64_t> seen;
  queue.take(1, [&](std::int64_t task) { seen.push_back(task); });
  EXPECT_EQ(seen, (std::vector<std::int64_t>{3, 4, 5, 6, 7, 8, 9, 0, 1, 2}));
  queue.take(0, [](std::int64_t task) { ADD_FAILURE() << task << " twice"; });
}

TEST(TaskQueueTest, ASlowWorkersShareIsTakenByOthers) {
  TaskQueue queue(8, 2);
  std::vector<std::int64_t> slow, fast;
  queue.take(0, [&](std::int64_t task) {
    slow.push_back(task);
    if (task == 0) queue.take(1, [&](std::int64_t other) { fast.push_back(other); });
  });
  EXPECT_EQ(slow, (std::vector<std::int64_t>{0}));
  EXPECT_EQ(fast, (std::vector<std::int64_t>{4, 5, 6, 7, 1, 2, 3}));
}

TEST(TaskQueueTest, EveryTaskOnceWithMoreWorkersThanSharesOrTasks) {
  for (const int workers : {1, 31, 32, 33, 100, 129}) {
    for (const std::int64_t tasks : {0, 1, 5, 64, 1001}) {
      TaskQueue queue(tasks, workers);
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::vector<std::thread> threads;
      for (int w = 0; w < workers; ++w) {
        threads.emplace_back(
            [&, w] { queue.take(w, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; }); });
      }
      for (std::thread& thread : threads) thread.join();
      for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1) << workers << " workers, " << tasks;
    }
  }
}

TEST(ThreadPoolTest, WhatTasksWroteIsSeenAfterwards) {
  ThreadPool pool(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> squares(50);
    pool.executor().parallel_for(
        50, [&](std::int64_t i) { squares[static_cast<std::size_t>(i)] = static_cast<int>(i * i); });
    EXPECT_EQ(std::accumulate(squares.begin(), squares.end(), 0), 40425);
  }
}

TEST(ThreadPoolTest, MoreThanOneThreadWorks) {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  std::atomic<bool> met{false};
  // Each task waits for the other: this ends only when two threads take one each.
  pool.executor().parallel_for(2, [&](std::int64_t) {
    ++inside;
    while (!met) {
      if (inside == 2) met = true;
      std::this_thread::yield();
    }
  });
  EXPECT_TRUE(met);
}

TEST(ThreadPoolTest, NestedCallsRunSerially) {
  ThreadPool pool(3);
  std::atomic<int> count{0};
  pool.executor().parallel_for(4, [&](std::int64_t) {
    const std::thread::id outer = std::this_thread::get_id();
    pool.executor().parallel_for(5, [&](std::int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      ++count;
    });
  });
  EXPECT_EQ(count, 20);
}

TEST(ThreadPoolTest, SeveralCallersShareIt) {
  ThreadPool pool(2);
  std::atomic<int> count{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 25; ++round)
        pool.executor().parallel_for(10, [&](std::int64_t) { ++count; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(count, 4 * 25 * 10);
}

// A kernel may run out of memory on any thread; its caller must hear of it, and the pool go on.
TEST(ThreadPoolTest, AnExceptionReachesTheCaller) {
  ThreadPool pool(3);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::atomic<int> runs = 0;
    const auto task = [&](std::int64_t number) {
      ++runs;
      if (number % 7 == 3) throw std::bad_alloc();
    };
    EXPECT_THROW(pool.executor().parallel_for(30, task), std::bad_alloc);
    EXPECT_EQ(runs, 30);
    runs = 0;
    pool.executor().parallel_for(30, [&](std::int64_t) { ++runs; });
    EXPECT_EQ(runs, 30);
  }
}

TEST(ThreadPoolTest, NoThreadCountMeansTheMachines) {
  ThreadPool pool(0);
  EXPECT_GE(pool.executor().threads, 1);
}

}  // namespace
}  // namespace rarefy
