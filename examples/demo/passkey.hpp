// Recall: keys hidden in a text, asked for at its end.
#pragma once

#include <engine/model.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace demo {

constexpr std::size_t kDigits = 5, kDepths = 4;

/// A text with questions; an answer's digits are the bytes [begin, begin + kDigits).
struct Passage {
  struct Question {
    std::size_t begin;
    std::size_t depth;  // quarter of the text in which the key was given
  };
  std::string text;
  std::vector<Question> questions;
};

/// `count` passages of `length` bytes, cut from `text`: up to four keys, one in each quarter of what comes before the
/// questions, all of them asked for in random order. Fewer keys where there is no room. The seed decides everything.
std::vector<Passage> make_passages(std::string_view text, std::size_t length, std::size_t count, std::uint64_t seed);

/// Digits by depth of the key.
struct Recall {
  std::array<std::size_t, kDepths> digits{}, right{};

  Recall& operator+=(const Recall& other);
  std::size_t all_digits() const;
  double accuracy() const;                   // NaN without digits
  double accuracy(std::size_t depth) const;  // the same
};

/// The most likely digits, each after the true ones before it. `logits`: of the passage's bytes, row t predicting
/// byte t + 1.
Recall count_recalled(const Passage& passage, const engine::Rows& logits);

}  // namespace demo
