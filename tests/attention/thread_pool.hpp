// A real thread pool as an engine has one: an executor for attend, and an SPMD loop over an AttentionPlan.
#pragma once

#include <atomic>
#include <barrier>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <turboquant/turboquant.hpp>
#include <vector>

namespace tests {

/// Threads that wait for work. As an executor, `pool(tasks, body)` runs body(i) for 0 <= i < tasks on all of them, in
/// no fixed order, and returns when all are done.
class ThreadPool {
 public:
  explicit ThreadPool(std::size_t threads) {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  template <class Body>
  void operator()(std::size_t tasks, Body&& body) {
    std::unique_lock lock(mutex_);
    body_ = [&body](std::size_t i) { body(i); };
    tasks_ = tasks;
    next_.store(0);
    busy_ = threads_.size();
    ++round_;
    wake_.notify_all();
    done_.wait(lock, [this] { return busy_ == 0; });
    body_ = nullptr;
    tasks_run_ += tasks;
  }

  std::size_t tasks_run() const { return tasks_run_; }

 private:
  void serve() {
    std::size_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
      lock.unlock();
      for (std::size_t i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) body_(i);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::function<void(std::size_t)> body_;
  std::atomic<std::size_t> next_{0};
  std::size_t tasks_ = 0, busy_ = 0, round_ = 0, tasks_run_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

/// Memory for a plan, aligned to a cache line and filled with 0xff, so that nothing can rely on zeros.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes)
      : bytes_(bytes + 1), memory_(static_cast<std::byte*>(::operator new(bytes_, std::align_val_t(64)))) {
    for (std::size_t i = 0; i < bytes_; ++i) memory_[i] = std::byte{0xff};
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { ::operator delete(memory_, std::align_val_t(64)); }
  std::byte* get() const { return memory_; }
  /// The byte after the last one: nobody's.
  bool is_intact() const { return memory_[bytes_ - 1] == std::byte{0xff}; }

 private:
  std::size_t bytes_;
  std::byte* memory_;
};

/// Every thread runs the same loop: all phases, tasks taken from a shared counter from the last to the first, a barrier
/// between phases.
inline bool run_plan(const turboquant::AttentionPlan& plan, std::size_t threads) {
  const Workspace workspace(plan.workspace_bytes());
  std::vector<std::atomic<std::size_t>> next(plan.phases());
  for (auto& counter : next) counter.store(0);
  std::barrier barrier(static_cast<std::ptrdiff_t>(threads));
  const auto loop = [&] {
    for (std::size_t phase = 0; phase < plan.phases(); ++phase) {
      const std::size_t tasks = plan.tasks(phase);
      for (std::size_t i = next[phase].fetch_add(1); i < tasks; i = next[phase].fetch_add(1))
        plan.run(phase, tasks - 1 - i, workspace.get());
      barrier.arrive_and_wait();
    }
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < threads; ++i) others.emplace_back(loop);
  loop();
  for (std::thread& thread : others) thread.join();
  return workspace.is_intact();
}

}  // namespace tests
