// A scheduler of one loop: admit, draft, run one batch, verify, retire.
#include "serving.hpp"

#include "cache_decorator.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace engine {
namespace {

class Server {
 public:
  Server(const Model& model, KvCache& cache, std::span<const Request> requests, const ServingOptions& options,
         const std::function<void()>& advance)
      : model_(model), cache_(cache), requests_(requests), options_(options), advance_(advance) {
    report_.texts.resize(requests.size());
  }

  ServingReport run(std::span<const Token> shared_prompt) {
    shared_prompt_ = shared_prompt;
    const std::size_t shared = cache_.create();
    const double begin = processor_seconds();
    for (std::size_t done = 0; done < shared_prompt.size(); done += options_.chunk_tokens) {
      const auto chunk = shared_prompt.subspan(done, (std::min)(options_.chunk_tokens, shared_prompt.size() - done));
      const SequenceStep step{shared, chunk, false};
      shared_logits_ = model_.forward(cache_, {&step, 1});
    }
    report_.prompt_seconds += processor_seconds() - begin;
    while (!active_.empty() || next_ < requests_.size()) {
      while (active_.size() < options_.batch && next_ < requests_.size()) admit(shared);
      if (!active_.empty()) step();
    }
    cache_.release(shared);
    return std::move(report_);
  }

 private:
  struct Active {
    std::size_t request, sequence;
    std::vector<Token> text;  // shared prompt, prompt, and what was generated
    std::size_t cached = 0;   // of its tokens
    std::size_t prompt_end = 0;
    std::vector<Token> input{};  // of this step
    std::size_t drafts = 0;      // the last ones of it
  };

  void admit(std::size_t shared) {
    const Request& request = requests_[next_];
    Active active{next_++,
                  cache_.fork(shared, shared_prompt_.size()),
                  {shared_prompt_.begin(), shared_prompt_.end()},
                  shared_prompt_.size()};
    active.text.insert(active.text.end(), request.prompt.begin(), request.prompt.end());
    active.prompt_end = active.text.size();
    if (active.text.empty()) throw std::invalid_argument("a request without a prompt");
    if (request.prompt.empty() && request.new_tokens > 0) generate(active, shared_logits_[0]);
    if (is_finished(active)) {
      retire(active);
    } else {
      active_.push_back(std::move(active));
    }
  }

  // Chooses this step's tokens of a sequence; returns how many of them are of its prompt.
  std::size_t plan(Active& active, std::size_t prompt_tokens_left) const {
    active.input.clear();
    active.drafts = 0;
    const std::size_t waiting = active.text.size() - active.cached;
    const bool is_prompt = active.cached < active.prompt_end;
    const std::size_t count = is_prompt ? (std::min)(waiting, prompt_tokens_left) : waiting;
    const auto begin = active.text.begin() + static_cast<std::ptrdiff_t>(active.cached);
    active.input.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
    if (is_prompt || options_.draft_tokens == 0) return is_prompt ? count : 0;
    const std::size_t missing = active.prompt_end + requests_[active.request].new_tokens - active.text.size();
    const auto drafts = draft_by_lookup(active.text, (std::min)(options_.draft_tokens, missing - 1));
    active.drafts = drafts.size();
    active.input.insert(active.input.end(), drafts.begin(), drafts.end());
    return 0;
  }

  void step() {
    const double begin = processor_seconds();
    std::vector<SequenceStep> steps;
    std::vector<Active*> taking_part;
    std::size_t prompt_tokens = 0;
    for (Active& active : active_) {
      prompt_tokens += plan(active, options_.chunk_tokens - prompt_tokens);
      if (active.input.empty()) continue;  // its prompt waits for the next step
      steps.push_back({active.sequence, active.input, active.drafts > 0});
      taking_part.push_back(&active);
    }
    const Rows logits = model_.forward(cache_, steps);
    report_.largest_bytes = (std::max)(report_.largest_bytes, cache_.bytes());
    ++report_.steps;
    const std::size_t before = report_.new_tokens;
    std::size_t row = 0;
    for (Active* active : taking_part) {
      verify(*active, logits, row);
      row += active->drafts + 1;
    }
    const auto is_done = [this](Active& active) {
      if (is_finished(active)) retire(active);
      return is_finished(active);
    };
    std::erase_if(active_, is_done);
    const double seconds = processor_seconds() - begin;
    if (prompt_tokens > 0) {
      report_.prompt_seconds += seconds;
    } else {
      report_.decode_seconds += seconds;
      report_.decode_tokens += report_.new_tokens - before;
    }
  }

  // Takes the tokens that the model would have generated one by one; `row`: logits of the token before the drafts.
  void verify(Active& active, const Rows& logits, std::size_t row) {
    const std::size_t known = active.input.size() - active.drafts;
    active.cached += known;
    if (active.cached < active.text.size()) return;  // in the middle of a prompt
    std::size_t accepted = 0;
    generate(active, logits[row]);
    while (accepted < active.drafts && active.text.back() == active.input[known + accepted]) {
      ++accepted;
      generate(active, logits[row + accepted]);
    }
    active.cached += accepted;
    report_.drafted += active.drafts;
    report_.accepted += accepted;
    if (accepted < active.drafts) cache_.truncate(active.sequence, active.cached);
  }

  void generate(Active& active, const float* logits) {
    const std::size_t vocabulary = model_.config().vocabulary;
    active.text.push_back(sample(logits, vocabulary, options_.sampling, active.request, active.text.size()));
    ++report_.new_tokens;
  }

  bool is_finished(const Active& active) const {
    return active.text.size() >= active.prompt_end + requests_[active.request].new_tokens;
  }

  void retire(const Active& active) {
    report_.texts[active.request].assign(active.text.begin() + static_cast<std::ptrdiff_t>(active.prompt_end),
                                         active.text.end());
    cache_.release(active.sequence);
    if (advance_) advance_();
  }

  const Model& model_;
  KvCache& cache_;
  std::span<const Request> requests_;
  const ServingOptions& options_;
  const std::function<void()>& advance_;
  std::span<const Token> shared_prompt_{};
  Rows shared_logits_{0, 0};
  std::vector<Active> active_;
  std::size_t next_ = 0;
  ServingReport report_;
};

}  // namespace

ServingReport serve(const Model& model, KvCache& cache, std::span<const Token> shared_prompt,
                    std::span<const Request> requests, const ServingOptions& options,
                    const std::function<void()>& advance) {
  if (options.batch == 0 || options.chunk_tokens == 0)
    throw std::invalid_argument("batch and chunk_tokens: at least 1");
  return Server(model, cache, requests, options, advance).run(shared_prompt);
}

std::vector<Token> draft_by_lookup(std::span<const Token> text, std::size_t count) {
  constexpr std::size_t kLongest = 6, kShortest = 2;
  for (std::size_t length = kLongest; length >= kShortest; --length) {
    if (text.size() <= length) continue;
    const auto ending = text.last(length);
    for (std::size_t begin = text.size() - length; begin-- > 0;) {
      if (!std::equal(ending.begin(), ending.end(), text.begin() + static_cast<std::ptrdiff_t>(begin))) continue;
      const std::size_t from = begin + length;
      const auto found = text.subspan(from, (std::min)(count, text.size() - from));
      return {found.begin(), found.end()};
    }
  }
  return {};
}

}  // namespace engine
