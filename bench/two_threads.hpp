// An executor of two threads, as an engine's pool would run a plan: the caller and a helper.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>

/// Runs tasks on the calling thread and one more. Between calls that one looks for work for a while before it sleeps,
/// so that a call every few microseconds finds it awake. The caller waits for tasks that the helper has begun, not for
/// the helper. One call at a time. What one of them writes while both work lies in a cache line of its own.
class TwoThreads {
 public:
  TwoThreads() : helper_([this] { help(); }) {}
  ~TwoThreads() {
    stopped_.store(true, std::memory_order_relaxed);
    next_.store(next_.load(std::memory_order_relaxed) + kCall, std::memory_order_release);
    next_.notify_one();
    helper_.join();
  }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

  template <class Body>
  void operator()(std::size_t tasks, Body&& body) {
    if (tasks == 1) body(0);  // not worth waking anybody
    if (tasks <= 1) return;
    const std::uint64_t call = next_.load(std::memory_order_relaxed) / kCall + 1;
    // Whoever still asks for tasks of the last call finds a number beyond all of them, or none.
    tasks_.store(0, std::memory_order_relaxed);
    body_.store(&body, std::memory_order_relaxed);
    run_.store([](void* work, std::size_t task) { (*static_cast<std::remove_reference_t<Body>*>(work))(task); },
               std::memory_order_relaxed);
    helped_.store(0, std::memory_order_relaxed);
    tasks_.store(call * kCall + tasks, std::memory_order_relaxed);
    next_.store(call * kCall, std::memory_order_release);
    next_.notify_one();
    std::size_t own = 0;
    while (run_one()) ++own;
    for (int k = 0; own + helped_.load(std::memory_order_acquire) != tasks; ++k) {
      if (k < 1000) {
        pause();
      } else {
        std::this_thread::yield();  // a busy machine
      }
    }
  }

 private:
  static constexpr std::uint64_t kCall = std::uint64_t{1} << 32;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Takes and runs one task, if there is one. What belongs to a call stays until all its tasks are done.
  bool run_one() {
    const std::uint64_t task = next_.fetch_add(1, std::memory_order_acq_rel);
    const std::uint64_t end = tasks_.load(std::memory_order_relaxed);
    if (task / kCall != end / kCall || task >= end) return false;
    run_.load(std::memory_order_relaxed)(body_.load(std::memory_order_relaxed), task % kCall);
    return true;
  }

  void help() {
    while (!stopped_.load(std::memory_order_relaxed)) {
      while (run_one()) helped_.store(helped_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
      std::uint64_t seen = next_.load(std::memory_order_acquire);
      for (int k = 0; k < 20000 && !has_tasks(seen); ++k) pause(), seen = next_.load(std::memory_order_acquire);
      if (!has_tasks(seen) && !stopped_.load(std::memory_order_relaxed)) next_.wait(seen);
    }
  }
  bool has_tasks(std::uint64_t next) const { return next < tasks_.load(std::memory_order_relaxed); }

  alignas(64) std::atomic<std::uint64_t> next_{0};   // number of the call, next task
  alignas(64) std::atomic<std::size_t> helped_{0};   // tasks that the helper has done
  alignas(64) std::atomic<std::uint64_t> tasks_{0};  // number of the call, tasks
  std::atomic<void*> body_{nullptr};
  std::atomic<void (*)(void*, std::size_t)> run_{nullptr};
  std::atomic<bool> stopped_{false};
  alignas(64) std::thread helper_;  // last: the others exist when it starts
};
