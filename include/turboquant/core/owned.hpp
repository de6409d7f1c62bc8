// What std::unique_ptr does, as far as it is needed here: <memory> would cost every unit that includes the library a
// quarter of a second, most of it for <ostream>.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace turboquant {

/// The only owner of an object or, as Owned<T[]>, of an array, either made by `new`, or of nothing.
template <class T>
class Owned {
  using Element = std::remove_extent_t<T>;

 public:
  /// Owns nothing.
  Owned() noexcept = default;
  /// Owns what `made` points to; nothing if it is null.
  explicit Owned(Element* made) noexcept : made_(made) {}
  /// Takes over what `other` owns.
  Owned(Owned&& other) noexcept : made_(other.release()) {}
  /// Takes over what `other` owns; deletes its own.
  Owned& operator=(Owned&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~Owned() { reset(nullptr); }

  /// Deletes what it owned and owns what `made` points to.
  void reset(Element* made) noexcept {
    Element* const old = std::exchange(made_, made);
    if (old == made) return;
    if constexpr (std::is_array_v<T>) {
      delete[] old;
    } else {
      delete old;
    }
  }
  /// Gives up ownership of what it returns.
  [[nodiscard]] Element* release() noexcept { return std::exchange(made_, nullptr); }

  /// True if it owns something.
  explicit operator bool() const noexcept { return made_ != nullptr; }
  /// The object, or element i of the array. Requires that there is one.
  /// @{
  [[nodiscard]] Element& operator*() const noexcept { return *made_; }
  [[nodiscard]] Element* operator->() const noexcept { return made_; }
  [[nodiscard]] Element& operator[](std::size_t i) const noexcept { return made_[i]; }
  /// @}

 private:
  Element* made_ = nullptr;
};

}  // namespace turboquant
