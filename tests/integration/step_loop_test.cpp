// An engine's step loop on a small random transformer: prompts in chunks beside decoding sequences in one batch, n-gram
// drafts with rollback, forks; every attention output is held against the oracle on the decoded cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "cache/block.hpp"
#include "cache/mirror.hpp"

namespace {

using namespace tests;
using turboquant::BatchItem;
using turboquant::CacheConfig;
using turboquant::KVCache;
using turboquant::LayerShape;
using turboquant::SequenceId;
using turboquant::Status;

constexpr std::size_t kHidden = 48, kVocabulary = 24, kQueryHeads = 4, kSequences = 16;

/// Two windowed layers, one that sees all, repeated: the sliding ones with head size 64, the full ones with 96.
CacheConfig gemma_like() {
  CacheConfig config;
  config.layers.clear();
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j)
      config.layers.push_back(LayerShape{.kv_heads = 2, .head_dim = 64, .window = 40, .format = 0});
    config.layers.push_back(LayerShape{.kv_heads = 1, .head_dim = 96, .format = 1});
  }
  config.page_tokens = 16;
  config.recent_tokens = 16;
  config.rollback_tokens = 8;
  config.first_tokens = 2;
  return config;
}
// After such a chunk a windowed layer still holds every page that the step has finished: it may free what lies more
// than window + rollback = 48 back, and a new page ends at most recent + page - 1 + chunk tokens back and starts 16
// earlier.
constexpr std::size_t kLongestChunk = 8;

using Matrix = std::vector<float>;  // [rows][columns]

Matrix random_matrix(std::uint64_t stream, std::size_t rows, std::size_t columns) {
  Matrix matrix(rows * columns);
  for (std::size_t i = 0; i < matrix.size(); ++i)
    matrix[i] = static_cast<float>(oracle::gaussian(1234, stream, i) / std::sqrt(static_cast<double>(columns)));
  return matrix;
}
/// out[rows] = matrix x
void multiply(const Matrix& matrix, const float* x, std::size_t columns, float* out) {
  for (std::size_t r = 0; r < matrix.size() / columns; ++r) {
    float sum = 0;
    for (std::size_t c = 0; c < columns; ++c) sum += matrix[r * columns + c] * x[c];
    out[r] = sum;
  }
}
std::vector<float> normalized(const std::vector<float>& x) {
  double squares = 1e-6;
  for (const float v : x) squares += static_cast<double>(v) * static_cast<double>(v) / static_cast<double>(x.size());
  std::vector<float> y(x);
  for (float& v : y) v = static_cast<float>(static_cast<double>(v) / std::sqrt(squares));
  return y;
}

struct Model {
  struct Layer {
    Matrix query, key, value, output;
  };
  Matrix embedding = random_matrix(0, kVocabulary, kHidden);
  std::vector<Layer> layers;

  explicit Model(const CacheConfig& config) {
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      const LayerShape& shape = config.layers[i];
      layers.push_back({random_matrix(10 * i + 1, kQueryHeads * shape.head_dim, kHidden),
                        random_matrix(10 * i + 2, shape.kv_heads * shape.head_dim, kHidden),
                        random_matrix(10 * i + 3, shape.kv_heads * shape.head_dim, kHidden),
                        random_matrix(10 * i + 4, kHidden, kQueryHeads * shape.head_dim)});
      for (float& w : layers.back().query) w *= 2;  // attention that chooses
    }
  }
  std::vector<float> embed(unsigned token, std::size_t position) const {
    std::vector<float> x(kHidden);
    for (std::size_t i = 0; i < kHidden; ++i) {
      const double angle = static_cast<double>(position) / std::pow(50.0, static_cast<double>(i) / kHidden);
      x[i] = 3 * embedding[token * kHidden + i] + static_cast<float>(0.3 * std::sin(angle));
    }
    return x;
  }
  unsigned next_token(const std::vector<float>& x) const {
    std::vector<float> scores(kVocabulary);
    multiply(embedding, normalized(x).data(), kHidden, scores.data());
    return static_cast<unsigned>(std::max_element(scores.begin(), scores.end()) - scores.begin());
  }
};

struct Sequence {
  SequenceId id;
  std::vector<unsigned> tokens;  // the prompt and what came after; the last one is not in the cache yet while decoding
  std::size_t prompt = 0;        // tokens of the prompt
  std::vector<Mirror> mirrors;   // one per layer
};

std::vector<unsigned> part(const std::vector<unsigned>& tokens, std::size_t begin, std::size_t end) {
  return {tokens.begin() + static_cast<std::ptrdiff_t>(begin), tokens.begin() + static_cast<std::ptrdiff_t>(end)};
}

/// Up to `most` tokens that followed the last place where the history had its last two tokens.
std::vector<unsigned> draft(const std::vector<unsigned>& tokens, std::size_t most) {
  const std::size_t n = tokens.size();
  for (std::size_t i = n - 2; i >= 1; --i)
    if (tokens[i - 1] == tokens[n - 2] && tokens[i] == tokens[n - 1])
      return part(tokens, i + 1, std::min(n, i + 1 + most));
  return {};
}

class StepLoop : public testing::Test {
 protected:
  using Cache = KVCache<turboquant::TQ4, turboquant::TQ8>;

  StepLoop() : config_(gemma_like()), cache_(config_), model_(config_) {}

  Sequence start(std::uint64_t seed, std::size_t prompt) {
    Sequence sequence;
    sequence.id = new_sequence(cache_);
    sequence.prompt = prompt;
    // Phrases that repeat, so that drafts from the history are sometimes right.
    for (std::size_t i = 0; i < prompt; ++i)
      sequence.tokens.push_back(static_cast<unsigned>(oracle::hash(seed, 77, i % 7) % kVocabulary));
    for (std::size_t layer = 0; layer < config_.layers.size(); ++layer)
      sequence.mirrors.emplace_back(config_, layer, codes_of(config_.layers[layer].format == 0 ? 4 : 8));
    return sequence;
  }

  /// One step of the batch: sequence s puts inputs[s] through every layer. Returns the token that follows each input.
  std::vector<std::vector<unsigned>> step(std::vector<Sequence>& sequences,
                                          const std::vector<std::vector<unsigned>>& inputs) {
    std::vector<std::vector<std::vector<float>>> hidden(sequences.size());
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (std::size_t t = 0; t < inputs[s].size(); ++t)
        hidden[s].push_back(model_.embed(inputs[s][t], cache_.length(sequences[s].id) + t));
    for (std::size_t layer = 0; layer < config_.layers.size(); ++layer) {
      const LayerShape& shape = config_.layers[layer];
      const Model::Layer& weights = model_.layers[layer];
      std::vector<Block> keys(sequences.size()), values(sequences.size()), queries(sequences.size());
      std::vector<Outcome> outcomes(sequences.size());
      std::vector<BatchItem> items;
      for (std::size_t s = 0; s < sequences.size(); ++s) {
        const std::size_t count = inputs[s].size();
        keys[s] = values[s] = Block(count, shape.kv_heads, shape.head_dim);
        queries[s] = Block(count, kQueryHeads, shape.head_dim);
        for (std::size_t t = 0; t < count; ++t) {
          const std::vector<float> x = normalized(hidden[s][t]);
          multiply(weights.key, x.data(), kHidden, keys[s].row(t));
          multiply(weights.value, x.data(), kHidden, values[s].row(t));
          multiply(weights.query, x.data(), kHidden, queries[s].row(t));
        }
        outcomes[s].out = Block(count, kQueryHeads, shape.head_dim, kNaN);
        BatchItem item;
        item.sequence = sequences[s].id;
        item.keys = keys[s].rows();
        item.values = values[s].rows();
        item.queries = queries[s].rows();
        item.out = outcomes[s].out.rows();
        items.push_back(item);
      }
      EXPECT_OK(turboquant::attend(cache_, layer, items));
      for (std::size_t s = 0; s < sequences.size(); ++s) {
        Mirror& mirror = sequences[s].mirrors[layer];
        const std::size_t first = mirror.length();
        mirror.append(keys[s], values[s]);
        mirror.learn(cache_, sequences[s].id);
        mirror.check(queries[s], outcomes[s], {}, {.position = first}, false);
        checked_ += queries[s].tokens;
        for (std::size_t t = 0; t < inputs[s].size(); ++t) {
          std::vector<float> change(kHidden);
          multiply(weights.output, outcomes[s].out.row(t), kQueryHeads * shape.head_dim, change.data());
          for (std::size_t i = 0; i < kHidden; ++i) hidden[s][t][i] += change[i];
        }
      }
    }
    std::vector<std::vector<unsigned>> next(sequences.size());
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (const std::vector<float>& x : hidden[s]) next[s].push_back(model_.next_token(x));
    return next;
  }

  /// What a sequence puts into the next step: a chunk of its prompt, or its last token and a draft of up to seven.
  std::vector<unsigned> next_input(const Sequence& sequence) const {
    const std::size_t present = cache_.length(sequence.id);
    if (present < sequence.prompt)
      return part(sequence.tokens, present, std::min(sequence.prompt, present + kLongestChunk));
    std::vector<unsigned> input{sequence.tokens.back()};
    const std::vector<unsigned> guess = draft(sequence.tokens, 6);
    input.insert(input.end(), guess.begin(), guess.end());
    input.push_back(
        static_cast<unsigned>(oracle::hash(present, 78, sequence.id.index) % kVocabulary));  // and a wild guess
    return input;
  }

  /// Keeps the drafts that the model confirms and drops the others from the cache.
  void verify(Sequence& sequence, const std::vector<unsigned>& input, const std::vector<unsigned>& next) {
    const std::size_t present = cache_.length(sequence.id);
    if (present < sequence.prompt) return;
    if (sequence.tokens.size() == present) {  // that was the prompt's last chunk
      sequence.tokens.push_back(next.back());
      return;
    }
    std::size_t good = 0;
    while (good + 1 < input.size() && next[good] == input[good + 1]) sequence.tokens.push_back(next[good++]);
    sequence.tokens.push_back(next[good]);
    const std::size_t bad = input.size() - 1 - good;
    accepted_ += good;
    rejected_ += bad;
    if (bad == 0) return;
    ASSERT_OK(cache_.truncate(sequence.id, present - bad));
    for (Mirror& mirror : sequence.mirrors) mirror.truncate(present - bad);
  }

  Sequence fork(const Sequence& source, std::size_t length, unsigned next_token) {
    Sequence child = source;
    EXPECT_OK(cache_.fork(source.id, length, child.id));
    child.tokens.resize(length);
    child.tokens.push_back(next_token);
    child.prompt = std::min(child.prompt, length);
    for (Mirror& mirror : child.mirrors) mirror.truncate(length);
    return child;
  }

  CacheConfig config_;
  Cache cache_;
  Model model_;
  std::size_t checked_ = 0, accepted_ = 0, rejected_ = 0;
};

TEST_F(StepLoop, SixteenSequencesWithChunksDraftsRollbackAndForks) {
  std::vector<Sequence> sequences;
  for (std::size_t s = 0; s < kSequences - 2; ++s) sequences.push_back(start(s, 5 + 5 * s));
  std::size_t mixed_steps = 0;
  for (std::size_t round = 0; round < 24 && !HasFailure(); ++round) {
    // Two more by fork: a continuation, and one from six tokens earlier.
    if (round == 8) sequences.push_back(fork(sequences[3], cache_.length(sequences[3].id), 1));
    if (round == 14) sequences.push_back(fork(sequences[6], cache_.length(sequences[6].id) - 6, 2));
    std::vector<std::vector<unsigned>> inputs;
    std::size_t prefilling = 0;
    for (const Sequence& sequence : sequences) {
      prefilling += cache_.length(sequence.id) < sequence.prompt ? 1 : 0;
      inputs.push_back(next_input(sequence));
    }
    mixed_steps += prefilling != 0 && prefilling != sequences.size() ? 1 : 0;
    const std::vector<std::vector<unsigned>> next = step(sequences, inputs);
    for (std::size_t s = 0; s < sequences.size(); ++s) verify(sequences[s], inputs[s], next[s]);
  }
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(sequences.size(), kSequences);
  // The loop has met what it is for.
  EXPECT_GT(accepted_, 10U);
  EXPECT_GT(rejected_, 100U);
  EXPECT_GT(mixed_steps, 2U);
  EXPECT_GT(checked_, 4000U);
  std::size_t longest = 0;
  for (const Sequence& sequence : sequences) {
    longest = std::max(longest, cache_.length(sequence.id));
    EXPECT_EQ(cache_.length(sequence.id), sequence.mirrors[0].length());
    EXPECT_EQ(cache_.length(sequence.id) + 1, sequence.tokens.size());
  }
  EXPECT_GT(longest, 80U);

  // One that is fed the accepted tokens afresh, in other chunks and without drafts, stands where the drafting one
  // stands.
  const Sequence& drafted = sequences[5];
  const std::size_t length = cache_.length(drafted.id);
  std::vector<Sequence> fresh{start(5, drafted.prompt)};
  for (std::size_t begin = 0; begin < length; begin += 5)
    step(fresh, {part(drafted.tokens, begin, std::min(length, begin + 5))});
  for (std::size_t layer = 0; layer < config_.layers.size(); ++layer) {
    const std::size_t window = config_.layers[layer].window,
                      begin = window != 0 && length > window ? length - window : 0;
    Block keys, values, fresh_keys, fresh_values;
    ASSERT_OK(read_rows(cache_, drafted.id, layer, begin, length, keys, values));
    ASSERT_OK(read_rows(cache_, fresh[0].id, layer, begin, length, fresh_keys, fresh_values));
    EXPECT_TRUE(same_bits(keys, fresh_keys) && same_bits(values, fresh_values)) << layer;
  }
  for (const Sequence& sequence : sequences) cache_.release(sequence.id);
  cache_.release(fresh[0].id);
  EXPECT_EQ(cache_.memory().page_bytes, 0U);
  EXPECT_EQ(cache_.memory().tail_bytes, 0U);
}

}  // namespace
