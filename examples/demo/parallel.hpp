// Independent jobs on all cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace demo {

/// body(i) for every i < jobs, on as many threads as the machine has cores. The first exception is thrown again.
template <class Body>
void run_parallel(std::size_t jobs, const Body& body) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t job = next++; job < jobs; job = next++) {
      try {
        body(job);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = jobs;
      }
    }
  };
  std::vector<std::jthread> threads;
  const std::size_t cores = (std::max)(1U, std::thread::hardware_concurrency());
  for (std::size_t i = 1; i < (std::min)(cores, jobs); ++i) threads.emplace_back(work);
  work();
  threads.clear();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace demo
