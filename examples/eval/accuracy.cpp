// Error energies, and exact attention beside that of a format.
#include "accuracy.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace turboquant_eval {
namespace {

constexpr std::size_t kQueryBlock = 16;

double square(double x) { return x * x; }

// Eight partial sums: a loop that compilers turn into vector code without licence to reorder additions.
double dot(const float* a, const float* b, std::size_t count) {
  constexpr std::size_t kLanes = 8;
  std::array<double, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
    }
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Sum over coded tokens and coordinates of (a - b)^2, less the mean over tokens of a - b if `is_centred`.
double energy(const float* a, const float* b, std::size_t tokens, std::size_t dim, const std::vector<char>& is_coded,
              bool is_centred) {
  std::vector<double> means(dim, 0.0);
  const auto difference = [&](std::size_t token, std::size_t i) {
    const std::size_t at = token * dim + i;
    return static_cast<double>(a[at]) - (b == nullptr ? 0.0 : static_cast<double>(b[at]));
  };
  if (is_centred) {
    double coded = 0;
    for (std::size_t token = 0; token < tokens; ++token) {
      if (is_coded[token] == 0) continue;
      coded += 1;
      for (std::size_t i = 0; i < dim; ++i) means[i] += difference(token, i);
    }
    for (double& m : means) m /= coded;
  }
  double sum = 0;
  for (std::size_t token = 0; token < tokens; ++token) {
    if (is_coded[token] == 0) continue;
    for (std::size_t i = 0; i < dim; ++i) sum += square(difference(token, i) - means[i]);
  }
  return sum;
}

// No error is no error, whatever it is relative to.
double ratio(double error, double reference) { return error == 0 ? 0 : error / reference; }

// Attention of one query over the tokens up to its own.
struct Weights {
  std::vector<double> logits, out;
  double log_sum = 0;
  std::size_t top = 0;

  void normalise(std::size_t count) {
    const auto begin = logits.begin(), end = begin + static_cast<std::ptrdiff_t>(count);
    top = static_cast<std::size_t>(std::max_element(begin, end) - begin);
    double sum = 0;
    for (std::size_t j = 0; j < count; ++j) sum += std::exp(logits[j] - logits[top]);
    log_sum = logits[top] + std::log(sum);
  }

  void score(const float* query, const float* keys, std::size_t count, std::size_t dim) {
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    for (std::size_t j = 0; j < count; ++j) logits[j] = scale * dot(query, keys + j * dim, dim);
    normalise(count);
  }

  void accumulate(const float* values, std::size_t count, std::size_t dim) {
    std::fill(out.begin(), out.end(), 0.0);
    for (std::size_t j = 0; j < count; ++j) {
      const double weight = std::exp(logits[j] - log_sum);
      for (std::size_t i = 0; i < dim; ++i) out[i] += weight * static_cast<double>(values[j * dim + i]);
    }
  }
};

// Running sums of one subject over the queries of a layer.
struct QuerySums {
  double error = 0, energy = 0, kl = 0, agreements = 0, queries = 0;
};

class QueryComparison {
 public:
  QueryComparison(const ExactLayer& layer, std::span<const Subject> subjects)
      : layer_(layer), subjects_(subjects), sums_(subjects.size()) {
    for (Weights* weights : {&exact_, &coded_}) {
      weights->logits.resize(layer.tokens);
      weights->out.resize(layer.value_dim);
    }
    logits_.resize(subjects.size());
    outs_.resize(subjects.size());
    for (std::size_t s = 0; s < subjects.size(); ++s) {
      if (!subjects[s].attend) continue;
      logits_[s].resize(kQueryBlock * layer.heads * layer.tokens);
      outs_[s].resize(kQueryBlock * layer.heads * layer.value_dim);
    }
  }

  void run_block(std::size_t first) {
    const std::size_t count = (std::min)(kQueryBlock, layer_.tokens - first);
    for (std::size_t s = 0; s < subjects_.size(); ++s) {
      if (subjects_[s].attend) subjects_[s].attend(first, count, logits_[s].data(), outs_[s].data());
    }
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t head = 0; head < layer_.heads; ++head) {
        const std::size_t kv_head = layer_.kv_head(head), visible = first + i + 1;
        exact_.score(layer_.query(head, first + i), layer_.key(kv_head, 0), visible, layer_.head_dim);
        exact_.accumulate(layer_.value(kv_head, 0), visible, layer_.value_dim);
        for (std::size_t s = 0; s < subjects_.size(); ++s) {
          if (subjects_[s].keys.empty() || subjects_[s].is_coded[first + i] == 0) continue;
          attend(s, i, first + i, head);
          add(sums_[s], visible);
        }
      }
    }
  }

  void finish(std::size_t subject, Accuracy& accuracy) const {
    const QuerySums& sums = sums_[subject];
    if (sums.queries == 0) return;
    if (!subjects_[subject].values.empty()) accuracy.output_error = ratio(sums.error, sums.energy);
    accuracy.kl = sums.kl / sums.queries;
    accuracy.top1 = sums.agreements / sums.queries;
  }

 private:
  // Fills coded_ with the subject's weights and output for one query.
  void attend(std::size_t s, std::size_t row, std::size_t position, std::size_t head) {
    const std::size_t visible = position + 1, dim = layer_.value_dim, kv_head = layer_.kv_head(head);
    if (!subjects_[s].attend) {
      coded_.score(layer_.query(head, position), subjects_[s].keys.data() + kv_head * layer_.tokens * layer_.head_dim,
                   visible, layer_.head_dim);
      if (subjects_[s].values.empty()) return;
      coded_.accumulate(subjects_[s].values.data() + kv_head * layer_.tokens * dim, visible, dim);
      return;
    }
    const double scale = 1 / std::sqrt(static_cast<double>(layer_.head_dim));
    const float* logits = logits_[s].data() + (row * layer_.heads + head) * layer_.tokens;
    const float* out = outs_[s].data() + (row * layer_.heads + head) * dim;
    for (std::size_t j = 0; j < visible; ++j) coded_.logits[j] = scale * static_cast<double>(logits[j]);
    coded_.normalise(visible);
    for (std::size_t i = 0; i < dim; ++i) coded_.out[i] = static_cast<double>(out[i]);
  }

  void add(QuerySums& sums, std::size_t visible) const {
    for (std::size_t i = 0; i < exact_.out.size(); ++i) {
      sums.error += square(coded_.out[i] - exact_.out[i]);
      sums.energy += square(exact_.out[i]);
    }
    for (std::size_t j = 0; j < visible; ++j) {
      const double log_weight = exact_.logits[j] - exact_.log_sum;
      sums.kl += std::exp(log_weight) * (log_weight - (coded_.logits[j] - coded_.log_sum));
    }
    sums.agreements += coded_.top == exact_.top ? 1 : 0;
    sums.queries += 1;
  }

  const ExactLayer& layer_;
  std::span<const Subject> subjects_;
  std::vector<QuerySums> sums_;
  std::vector<std::vector<float>> logits_, outs_;  // one block of queries, per subject
  Weights exact_, coded_;
};

// Error energy of decoded [kv_heads][tokens][dim] relative to the energy, all heads together.
double relative_error(const std::vector<float>& decoded, const std::vector<float>& exact, std::size_t kv_heads,
                      std::size_t tokens, const std::vector<char>& is_coded, bool is_centred) {
  const std::size_t count = exact.size() / kv_heads, dim = count / tokens;
  double error = 0, reference = 0;
  for (std::size_t head = 0; head < kv_heads; ++head) {
    const float* rows = exact.data() + head * count;
    error += energy(decoded.data() + head * count, rows, tokens, dim, is_coded, is_centred);
    reference += energy(rows, nullptr, tokens, dim, is_coded, is_centred);
  }
  return ratio(error, reference);
}

Accuracy compare_rows(const ExactLayer& layer, const Subject& subject) {
  Accuracy accuracy;
  accuracy.coded_tokens =
      static_cast<std::size_t>(std::count(subject.is_coded.begin(), subject.is_coded.end(), char{1}));
  if (subject.keys.empty() || accuracy.coded_tokens == 0) return accuracy;
  accuracy.key_error = relative_error(subject.keys, layer.keys, layer.kv_heads, layer.tokens, subject.is_coded, true);
  if (subject.values.empty()) return accuracy;
  accuracy.value_error =
      relative_error(subject.values, layer.values, layer.kv_heads, layer.tokens, subject.is_coded, false);
  return accuracy;
}

}  // namespace

std::size_t query_blocks(const ExactLayer& layer) {
  return layer.heads == 0 ? 0 : (layer.tokens + kQueryBlock - 1) / kQueryBlock;
}

std::vector<Accuracy> compare(const ExactLayer& layer, std::span<const Subject> subjects,
                              const std::function<void()>& advance) {
  std::vector<Accuracy> result;
  for (const Subject& subject : subjects) result.push_back(compare_rows(layer, subject));
  if (layer.heads == 0) return result;
  QueryComparison comparison(layer, subjects);
  for (std::size_t first = 0; first < layer.tokens; first += kQueryBlock) {
    comparison.run_block(first);
    if (advance) advance();
  }
  for (std::size_t s = 0; s < subjects.size(); ++s) comparison.finish(s, result[s]);
  return result;
}

Accuracy mean(std::span<const Accuracy> layers) {
  Accuracy sum{0, 0, 0, 0, 0, 0};
  const double share = 1 / static_cast<double>(layers.size());
  for (const Accuracy& layer : layers) {
    sum.coded_tokens += layer.coded_tokens;
    sum.key_error += share * layer.key_error;
    sum.value_error += share * layer.value_error;
    sum.output_error += share * layer.output_error;
    sum.kl += share * layer.kl;
    sum.top1 += share * layer.top1;
  }
  return sum;
}

}  // namespace turboquant_eval
