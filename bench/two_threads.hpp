// An executor of two threads, as an engine's pool would run a plan: the caller and a helper.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>

/// Runs tasks on the calling thread and one more. Between calls that one looks for work for a while before it sleeps,
/// so that a call every few microseconds finds it awake. The caller waits for tasks that the helper has begun, not for
/// the helper. One call at a time.
class TwoThreads {
 public:
  TwoThreads() : helper_([this] { help(); }) {}
  ~TwoThreads() {
    ticket_.store(kStop, std::memory_order_release);
    ticket_.notify_one();
    helper_.join();
  }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

  template <class Body>
  void operator()(std::size_t tasks, Body&& body) {
    if (tasks == 0) return;
    body_.store(&body, std::memory_order_relaxed);
    run_.store([](void* work, std::size_t task) { (*static_cast<std::remove_reference_t<Body>*>(work))(task); },
               std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const std::uint64_t call = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(call << 32 | tasks, std::memory_order_release);
    ticket_.notify_one();
    while (run_one()) {
    }
    for (int k = 0; done_.load(std::memory_order_acquire) != tasks; ++k) {
      if (k < 1000) {
        pause();
      } else {
        std::this_thread::yield();  // a busy machine
      }
    }
  }

 private:
  static constexpr std::uint64_t kStop = ~std::uint64_t{0};

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Takes and runs one task, if there is one. What belongs to a call stays until all its tasks are done, so a task
  // taken with an unchanged ticket is one of the call that was read.
  bool run_one() {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const std::size_t left = ticket & 0xffffffffU;
      void* body = body_.load(std::memory_order_relaxed);
      const auto run = run_.load(std::memory_order_relaxed);
      if (ticket == kStop || left == 0) return false;
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      run(body, left - 1);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }

  void help() {
    for (;;) {
      while (run_one()) {
      }
      const std::uint64_t seen = ticket_.load(std::memory_order_acquire);
      if (seen == kStop) return;
      for (int k = 0; k < 20000 && ticket_.load(std::memory_order_relaxed) == seen; ++k) pause();
      ticket_.wait(seen);
    }
  }

  std::atomic<std::uint64_t> ticket_{0};  // number of the call, tasks that nobody has taken yet
  std::atomic<std::size_t> done_{0};
  std::atomic<void*> body_{nullptr};
  std::atomic<void (*)(void*, std::size_t)> run_{nullptr};
  std::thread helper_;  // last: the others exist when it starts
};
