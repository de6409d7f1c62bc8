// Hiding keys and counting digits.
#include "passkey.hpp"

#include "next_token.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>

namespace demo {
namespace {

// The names that the model has seen in such questions.
constexpr std::string_view kNames[] = {"amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet",
                                       "jumbo", "koala", "lemon", "mango", "north", "onion", "pearl", "quill", "raven",
                                       "sabre", "tulip", "umbra", "viola", "waltz", "xenon", "yacht", "zebra"};

std::string fact(std::string_view name, std::string_view key) {
  return " The pass key of " + std::string(name) + " is " + std::string(key) + ". ";
}
std::string question(std::string_view name) {
  return " Question: what is the pass key of " + std::string(name) + "? Answer: ";
}

double share(std::size_t part, std::size_t whole) {
  return whole == 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(part) / static_cast<double>(whole);
}

// std::uniform_int_distribution differs between standard libraries.
class Random {
 public:
  explicit Random(std::uint64_t seed) : generator_(seed) {}
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(generator_() % bound); }
  template <class T>
  void shuffle(std::vector<T>& list) {
    for (std::size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[below(i)]);
  }

 private:
  std::mt19937_64 generator_;
};

Passage make_passage(std::string_view text, std::size_t length, Random& random) {
  const std::size_t fact_size = fact(kNames[0], "00000").size(),
                    question_size = question(kNames[0]).size() + kDigits + 1;
  const std::size_t fitting = length / (fact_size + question_size), keys = (std::min)(kDepths, fitting);
  if (keys == 0) throw std::invalid_argument("a passage is too short for a key and its question");
  const std::size_t filler = length - keys * (fact_size + question_size);
  if (filler > text.size()) throw std::invalid_argument("the text is shorter than a passage");

  std::vector<std::pair<std::string, std::string>> facts;  // name, key
  while (facts.size() < keys) {
    const std::string name(kNames[random.below(std::size(kNames))]);
    const auto is_same = [&](const auto& other) { return other.first == name; };
    std::string key;
    for (std::size_t i = 0; i < kDigits; ++i) key += static_cast<char>('0' + random.below(10));
    if (std::none_of(facts.begin(), facts.end(), is_same)) facts.emplace_back(name, key);
  }

  Passage passage;
  const std::string_view around = text.substr(random.below(text.size() - filler + 1), filler);
  std::vector<std::size_t> depths;
  std::size_t taken = 0;
  const std::size_t before_questions = filler + keys * fact_size;
  for (std::size_t i = 0; i < keys; ++i) {
    const std::size_t at = filler * i / keys + random.below(filler / keys + 1);
    passage.text += around.substr(taken, at - taken);
    taken = at;
    depths.push_back((std::min)(kDepths - 1, passage.text.size() * kDepths / before_questions));
    passage.text += fact(facts[i].first, facts[i].second);
  }
  passage.text += around.substr(taken);
  std::vector<std::size_t> order(keys);
  for (std::size_t i = 0; i < keys; ++i) order[i] = i;
  random.shuffle(order);
  for (const std::size_t i : order) {
    passage.text += question(facts[i].first);
    passage.questions.push_back({passage.text.size(), depths[i]});
    passage.text += facts[i].second + ".";
  }
  return passage;
}

}  // namespace

std::vector<Passage> make_passages(std::string_view text, std::size_t length, std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<Passage> passages;
  for (std::size_t i = 0; i < count; ++i) passages.push_back(make_passage(text, length, random));
  return passages;
}

Recall& Recall::operator+=(const Recall& other) {
  for (std::size_t depth = 0; depth < kDepths; ++depth) {
    digits[depth] += other.digits[depth];
    right[depth] += other.right[depth];
  }
  return *this;
}

std::size_t Recall::all_digits() const {
  std::size_t sum = 0;
  for (const std::size_t count : digits) sum += count;
  return sum;
}

double Recall::accuracy() const {
  std::size_t sum = 0;
  for (const std::size_t count : right) sum += count;
  return share(sum, all_digits());
}

double Recall::accuracy(std::size_t depth) const { return share(right[depth], digits[depth]); }

Recall count_recalled(const Passage& passage, const engine::Rows& logits) {
  Recall recall;
  for (const Passage::Question& question : passage.questions) {
    for (std::size_t i = question.begin; i < question.begin + kDigits; ++i) {
      const auto byte = static_cast<unsigned char>(passage.text[i]);
      recall.right[question.depth] += most_likely(logits[i - 1], logits.width()) == byte ? 1 : 0;
      ++recall.digits[question.depth];
    }
  }
  return recall;
}

}  // namespace demo
