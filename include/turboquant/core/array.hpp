// A growable array that reports exhausted memory instead of throwing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace turboquant {

/// Growable array of trivially copyable elements. Every call that may need memory returns false, and changes nothing,
/// if there is none. Moving leaves the source empty.
template <class T>
class Array {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);

 public:
  /// An empty array without memory.
  Array() noexcept = default;
  ~Array() { ::operator delete(data_); }
  /// Takes the elements of `other`, which is empty afterwards.
  Array(Array&& other) noexcept { swap(other); }
  /// Takes the elements of `other`, which is empty afterwards; frees its own.
  Array& operator=(Array&& other) noexcept {
    Array taken(std::move(other));
    swap(taken);
    return *this;
  }

  /// The first element; null if there was never memory.
  /// @{
  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  /// @}
  /// Number of elements.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Number of elements that there is memory for.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// True if size() is 0.
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  /// The range [begin(), end()); every call that may move elements ends it.
  /// @{
  [[nodiscard]] T* begin() noexcept { return data_; }
  [[nodiscard]] T* end() noexcept { return data_ + size_; }
  [[nodiscard]] const T* begin() const noexcept { return data_; }
  [[nodiscard]] const T* end() const noexcept { return data_ + size_; }
  /// @}
  /// Element i. Requires i < size().
  /// @{
  [[nodiscard]] T& operator[](std::size_t i) noexcept { return data_[i]; }
  [[nodiscard]] const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  /// @}
  /// The last element. Requires a non-empty array.
  /// @{
  [[nodiscard]] T& back() noexcept { return data_[size_ - 1]; }
  [[nodiscard]] const T& back() const noexcept { return data_[size_ - 1]; }

  /// @}
  /// The largest size that can be asked for.
  [[nodiscard]] static constexpr std::size_t max_size() noexcept { return std::size_t(PTRDIFF_MAX) / sizeof(T); }

  /// Makes room for `capacity` elements in all; push_back and resize up to there cannot fail.
  [[nodiscard]] bool reserve(std::size_t capacity) noexcept {
    if (capacity <= capacity_) return true;
    if (capacity > max_size()) return false;
    T* grown = static_cast<T*>(::operator new(capacity * sizeof(T), std::nothrow));
    if (grown == nullptr) return false;
    if (size_ != 0) std::memcpy(static_cast<void*>(grown), data_, size_ * sizeof(T));
    ::operator delete(data_);
    data_ = grown;
    capacity_ = capacity;
    return true;
  }

  /// Makes room for `more` further elements, at least doubling what there is if it has to move: n calls copy O(n).
  [[nodiscard]] bool reserve_more(std::size_t more) noexcept {
    return more <= max_size() - size_ && grow(size_ + more);
  }

  /// Sets the size; new elements are value-initialised.
  [[nodiscard]] bool resize(std::size_t size) noexcept {
    if (!grow(size)) return false;
    for (std::size_t i = size_; i < size; ++i) ::new (static_cast<void*>(data_ + i)) T();
    size_ = size;
    return true;
  }

  /// Appends a copy. The value may be an element of this array. Amortised constant time.
  [[nodiscard]] bool push_back(const T& value) noexcept {
    if (size_ == capacity_) return insert(size_, value);
    ::new (static_cast<void*>(data_ + size_)) T(value);
    ++size_;
    return true;
  }

  /// Puts a copy in front of all others.
  [[nodiscard]] bool push_front(const T& value) noexcept { return insert(0, value); }

  /// Puts a copy before element `index`. Requires index <= size(). The value may be an element of this array.
  [[nodiscard]] bool insert(std::size_t index, const T& value) noexcept {
    const T copy = value;
    if (!grow(size_ + 1)) return false;
    move_elements(index + 1, index, size_ - index);
    ::new (static_cast<void*>(data_ + index)) T(copy);
    ++size_;
    return true;
  }

  /// Removes the elements [first, last). Requires first <= last <= size().
  void erase(std::size_t first, std::size_t last) noexcept {
    move_elements(first, last, size_ - last);
    size_ -= last - first;
  }

  /// Removes all elements and keeps the memory.
  void clear() noexcept { size_ = 0; }

  /// Exchanges elements and memory; moves no element.
  void swap(Array& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  /// Room for `size` elements, at least doubled if it has to move, so that appending n elements copies O(n).
  bool grow(std::size_t size) noexcept {
    if (size <= capacity_) return true;
    const std::size_t doubled = capacity_ > max_size() / 2 ? max_size() : capacity_ * 2;
    return reserve(size < doubled ? doubled : size);
  }

  void move_elements(std::size_t to, std::size_t from, std::size_t count) noexcept {
    if (count != 0) std::memmove(static_cast<void*>(data_ + to), data_ + from, count * sizeof(T));
  }

  T* data_ = nullptr;
  std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace turboquant
