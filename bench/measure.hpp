// Timing, medians, huge-page memory and the sizes of this machine, for the programs in bench/.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace measure {

/// Keeps the compiler from dropping stores to, or reusing loads from, memory across this point.
inline void fence() { asm volatile("" ::: "memory"); }

/// Time of a single call in ns.
template <class Work>
double time_once_ns(Work&& work) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  work();
  fence();
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

/// Mean time of one call in ns, over as many calls as fill `seconds`, at least one.
template <class Work>
double time_ns(Work&& work, double seconds) {
  using Clock = std::chrono::steady_clock;
  double elapsed = 0;
  std::size_t calls = 0;
  for (std::size_t batch = 1; elapsed < seconds * 1e9; batch *= 2) {
    const auto begin = Clock::now();
    for (std::size_t k = 0; k < batch; ++k) {
      work();
      fence();
    }
    elapsed += std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
    calls += batch;
  }
  return elapsed / static_cast<double>(calls);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Array of T at a 2 MiB boundary, in huge pages where the system grants them, written once so that every page is
/// present.
template <class T>
class HugeArray {
 public:
  explicit HugeArray(std::size_t size) : size_(size) {
    const std::size_t bytes = (size * sizeof(T) + kHuge - 1) / kHuge * kHuge;
    memory_ = static_cast<T*>(std::aligned_alloc(kHuge, bytes));
    if (memory_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    madvise(memory_, bytes, MADV_HUGEPAGE);
#endif
    std::fill_n(reinterpret_cast<unsigned char*>(memory_), bytes, static_cast<unsigned char>(0));
  }
  ~HugeArray() { std::free(memory_); }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;

  T* data() { return memory_; }
  const T* data() const { return memory_; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t k) { return memory_[k]; }

 private:
  static constexpr std::size_t kHuge = std::size_t{2} << 20;
  T* memory_ = nullptr;
  std::size_t size_;
};

/// Bytes of the largest cache that CPU 0 sees; 32 MiB where the system does not tell. /sys comes first: sysconf can
/// report the sum over all core complexes of a package.
inline std::size_t last_level_cache_bytes() {
  std::size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    std::size_t amount = 0;
    char unit = ' ';
    if (file >> amount) {
      file >> unit;
      largest = (std::max)(largest, amount * (unit == 'M'   ? std::size_t{1} << 20
                                              : unit == 'K' ? std::size_t{1} << 10
                                                            : 1));
    }
  }
#if defined(_SC_LEVEL3_CACHE_SIZE)
  if (largest == 0) largest = static_cast<std::size_t>((std::max)(0L, sysconf(_SC_LEVEL3_CACHE_SIZE)));
#endif
  return largest != 0 ? largest : std::size_t{32} << 20;
}

/// Bytes of memory that a new process may take without swapping; no limit where the system does not tell.
inline std::size_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::size_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib << 10;
  }
  return (std::numeric_limits<std::size_t>::max)();
}

}  // namespace measure
