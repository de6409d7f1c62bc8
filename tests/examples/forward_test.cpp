// The engine's forward pass against one in double precision, written from the definition of these models.
#include "checkpoint.hpp"

#include <engine/model.hpp>
#include <engine/plain_cache.hpp>
#include <oracle/attention.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace {

using Numbers = std::vector<double>;

// Of one sequence, token by token; keeps the rotated keys, and the values, of all tokens.
class Oracle {
 public:
  explicit Oracle(const checkpoint::Checkpoint& model) : model_(model) {
    heads_ = number("num_attention_heads");
    kv_heads_ = number("num_key_value_heads");
    dim_ = number("head_dim");
    keys_.resize(number("num_hidden_layers"));
    values_ = keys_;
  }

  // Logits behind `token`.
  Numbers next(std::size_t token) {
    const std::size_t hidden = number("hidden_size");
    Numbers x(hidden);
    for (std::size_t i = 0; i < hidden; ++i) x[i] = weight("model.embed_tokens.weight")[token * hidden + i];
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      add(attention(i, layer, normalized(x, layer + "input_layernorm.weight")), x);
      add(mlp(layer, normalized(x, layer + "post_attention_layernorm.weight")), x);
    }
    const bool is_tied = model_.config["tie_word_embeddings"].get<bool>();
    ++position_;
    return product(is_tied ? "model.embed_tokens" : "lm_head", normalized(x, "model.norm.weight"));
  }

 private:
  std::size_t number(const char* field) const { return model_.config[field].get<std::size_t>(); }
  bool has(const std::string& name) const { return model_.tensors.contains(name); }
  Numbers weight(const std::string& name) const {
    const auto& numbers = model_.tensors.at(name).numbers;
    return {numbers.begin(), numbers.end()};
  }

  Numbers product(const std::string& name, const Numbers& in) const {
    const Numbers matrix = weight(name + ".weight");
    Numbers out(matrix.size() / in.size());
    for (std::size_t o = 0; o < out.size(); ++o) out[o] = oracle::dot(&matrix[o * in.size()], in.data(), in.size());
    if (has(name + ".bias")) add(weight(name + ".bias"), out);
    return out;
  }

  Numbers normalized(const Numbers& in, const std::string& name) const {
    const Numbers scale = weight(name);
    const double count = static_cast<double>(in.size()), epsilon = model_.config["rms_norm_eps"].get<double>();
    const double rms = std::sqrt(oracle::dot(in.data(), in.data(), in.size()) / count + epsilon);
    Numbers out(in.size());
    for (std::size_t i = 0; i < in.size(); ++i) out[i] = in[i] / rms * scale[i];
    return out;
  }

  static void add(const Numbers& change, Numbers& to) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += change[i];
  }

  // One head's vector: norm, if there is one, then rotary embedding.
  Numbers placed(Numbers x, const std::string& norm) const {
    if (has(norm)) x = normalized(x, norm);
    Numbers out(dim_);
    for (std::size_t i = 0; i < dim_ / 2; ++i) {
      const double theta = model_.config["rope_theta"].get<double>();
      const double angle =
          static_cast<double>(position_) * std::pow(theta, -2 * static_cast<double>(i) / static_cast<double>(dim_));
      out[i] = x[i] * std::cos(angle) - x[i + dim_ / 2] * std::sin(angle);
      out[i + dim_ / 2] = x[i + dim_ / 2] * std::cos(angle) + x[i] * std::sin(angle);
    }
    return out;
  }

  Numbers head_of(const Numbers& rows, std::size_t head) const {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(head * dim_);
    return {begin, begin + static_cast<std::ptrdiff_t>(dim_)};
  }

  Numbers attention(std::size_t index, const std::string& layer, const Numbers& in) {
    const Numbers q = product(layer + "self_attn.q_proj", in), k = product(layer + "self_attn.k_proj", in);
    const Numbers v = product(layer + "self_attn.v_proj", in);
    Numbers key_row;
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      const Numbers key = placed(head_of(k, head), layer + "self_attn.k_norm.weight");
      key_row.insert(key_row.end(), key.begin(), key.end());
    }
    keys_[index].push_back(key_row);
    values_[index].push_back(v);
    Numbers out;
    for (std::size_t head = 0; head < heads_; ++head) {
      const std::size_t kv = head / (heads_ / kv_heads_);
      const Numbers query = placed(head_of(q, head), layer + "self_attn.q_norm.weight");
      const oracle::Row row = oracle::attend_row(
          query.data(), dim_, dim_, position_ + 1, [&](std::size_t j) { return &keys_[index][j][kv * dim_]; },
          [&](std::size_t j) { return &values_[index][j][kv * dim_]; }, position_, head, {});
      out.insert(out.end(), row.out.begin(), row.out.end());
    }
    return product(layer + "self_attn.o_proj", out);
  }

  Numbers mlp(const std::string& layer, const Numbers& in) const {
    Numbers gate = product(layer + "mlp.gate_proj", in);
    const Numbers up = product(layer + "mlp.up_proj", in);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
    return product(layer + "mlp.down_proj", gate);
  }

  const checkpoint::Checkpoint& model_;
  std::size_t heads_ = 0, kv_heads_ = 0, dim_ = 0, position_ = 0;
  std::vector<std::vector<Numbers>> keys_, values_;  // [layer][token]
};

std::vector<engine::Token> random_tokens(std::size_t count, std::uint64_t seed) {
  std::vector<engine::Token> tokens;
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(static_cast<engine::Token>(oracle::hash(seed, 1, i) % 61));
  return tokens;
}

class Forward : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    checkpoint_ = checkpoint::random_checkpoint(GetParam());
    folder_ = checkpoint::fresh_folder(std::string("forward_") + GetParam());
    checkpoint::write(checkpoint_, folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  checkpoint::Checkpoint checkpoint_;
  std::filesystem::path folder_;
};

// Logits have magnitudes of 1 to 10; sums of up to 128 floats.
constexpr double kTolerance = 2e-4;

TEST_P(Forward, AgreesWithDoublePrecision) {
  const engine::Model model(folder_);
  const auto cache = engine::make_f32_cache(model.attention_shape());
  const std::vector<engine::Token> tokens = random_tokens(40, 3);
  Oracle oracle(checkpoint_);
  const engine::SequenceStep step{cache->create(), tokens, true};
  const engine::Rows logits = model.forward(*cache, {&step, 1});
  ASSERT_EQ(logits.count(), tokens.size());
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const Numbers expected = oracle.next(tokens[t]);
    ASSERT_EQ(expected.size(), logits.width());
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(logits[t][i], expected[i], kTolerance) << t << " " << i;
  }
}

TEST_P(Forward, DoesNotDependOnBatchAndChunks) {
  const engine::Model model(folder_);
  const auto cache = engine::make_f16_cache(model.attention_shape());
  const std::vector<engine::Token> first = random_tokens(23, 4), second = random_tokens(9, 5);
  const engine::SequenceStep whole{cache->create(), first, true};
  const engine::Rows expected = model.forward(*cache, {&whole, 1});
  // In pieces of 1, 2, 3, ... tokens, beside another sequence.
  const std::size_t sequence = cache->create(), other = cache->create();
  for (std::size_t done = 0, count = 1; done < first.size(); done += count, ++count) {
    count = (std::min)(count, first.size() - done);
    const engine::SequenceStep steps[] = {{other, std::span(second).first(1 + done % 3), false},
                                          {sequence, std::span(first).subspan(done, count), true}};
    const engine::Rows logits = model.forward(*cache, steps);
    ASSERT_EQ(logits.count(), count + 1);
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t i = 0; i < logits.width(); ++i) ASSERT_EQ(logits[t + 1][i], expected[done + t][i]) << done + t;
    }
  }
}

TEST_P(Forward, RefusesTokensBeyondTheVocabulary) {
  const engine::Model model(folder_);
  const auto cache = engine::make_f32_cache(model.attention_shape());
  const std::vector<engine::Token> tokens{3, 61};
  const engine::SequenceStep step{cache->create(), tokens, true};
  EXPECT_THROW(static_cast<void>(model.forward(*cache, {&step, 1})), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(Families, Forward, testing::Values("llama", "qwen2", "qwen3"),
                         [](const auto& values) { return std::string(values.param); });

}  // namespace
