// The one file that knows turboquant's cache, as an engine uses it, and the formats of others.
#include "caches.hpp"

#include "plain_cache.hpp"

#include <eval/formats.hpp>
#include <turboquant/turboquant.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <eval/baselines.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <stdexcept>
#include <utility>

namespace engine {
namespace {

using namespace turboquant;

constexpr std::size_t kPageTokens = 64;
constexpr std::uint64_t kSeed = 42;

template <class Key, class Value>
using Mixed = Format<typename Key::key_codec, typename Value::value_codec>;

// One container for all formats, so that it is compiled once.
using Cache = KVCache<TQ8, TQ4, TQ3, TQ2, Mixed<TQ4, TQ8>, Mixed<TQ3, TQ8>, Mixed<TQ2, TQ8>, Mixed<TQ8, TQ4>,
                      Mixed<TQ8, TQ3>, Mixed<TQ8, TQ2>>;
constexpr const char* kCodedNames[] = {"TQ8",      "TQ4",      "TQ3",        "TQ2",        "TQ4 keys",
                                       "TQ3 keys", "TQ2 keys", "TQ4 values", "TQ3 values", "TQ2 values"};
constexpr std::string_view kNotCentred = ", not centred";

CacheConfig config_of(std::size_t format, std::uint8_t center_bits, std::size_t layers, const CacheChoice& choice,
                      const AttentionShape& shape) {
  LayerShape layer;
  layer.kv_heads = static_cast<std::uint32_t>(shape.kv_heads);
  layer.head_dim = static_cast<std::uint32_t>(shape.head_dim);
  layer.format = static_cast<std::uint32_t>(format);
  layer.center_bits = center_bits;
  CacheConfig config;
  config.layers.assign(layers, layer);
  config.page_tokens = kPageTokens;
  config.recent_tokens = choice.codes_everything ? 0 : choice.recent_tokens;
  config.first_tokens = choice.first_tokens;
  config.seed = kSeed;
  return config;
}

void require(Status status, const char* call) {
  if (status == Status::ok) return;
  throw std::runtime_error(fmt::format("{} answered {} ({}: expected {}, found {})", call, to_string(status.code),
                                       status.field, status.expected, status.found));
}

BatchItem item_of(const AttentionPart& part, SequenceId sequence, const AttentionShape& shape) {
  BatchItem item;
  item.sequence = sequence;
  item.keys = {part.keys, part.tokens, shape.kv_heads, shape.head_dim};
  item.values = {part.values, part.tokens, shape.kv_heads, shape.head_dim};
  item.queries = {part.queries, part.tokens, shape.heads, shape.head_dim};
  item.out = {part.out, part.tokens, shape.heads, shape.head_dim};
  item.key_begin = part.first_key;
  return item;
}

// An engine's cache: all that an engine needs is one call per layer and step.
class CodedCache final : public KvCache {
 public:
  CodedCache(const CacheConfig& config, const AttentionShape& shape) : shape_(shape), cache_(config) {}

  std::size_t create() override {
    SequenceId id;
    require(cache_.create_sequence(id), "create_sequence");
    return add(id);
  }
  std::size_t fork(std::size_t sequence, std::size_t length) override {
    SequenceId id;
    require(cache_.fork(ids_.at(sequence), length, id), "fork");
    return add(id);
  }
  void truncate(std::size_t sequence, std::size_t length) override {
    require(cache_.truncate(ids_.at(sequence), length), "truncate");
  }
  void release(std::size_t sequence) override {
    cache_.release(ids_.at(sequence));
    unused_.push_back(sequence);
  }
  std::size_t length(std::size_t sequence) const override { return cache_.length(ids_.at(sequence)); }

  void attend(std::size_t layer, std::span<const AttentionPart> parts) override {
    items_.clear();
    for (const AttentionPart& part : parts) items_.push_back(item_of(part, ids_.at(part.sequence), shape_));
    require(turboquant::attend(cache_, layer, items_), "attend");
  }

  std::size_t bytes() const override {
    const MemoryUse use = cache_.memory();
    return use.page_bytes + use.tail_bytes;
  }

 private:
  std::size_t add(SequenceId id) {
    if (unused_.empty()) {
      ids_.push_back(id);
      return ids_.size() - 1;
    }
    const std::size_t index = unused_.back();
    unused_.pop_back();
    ids_[index] = id;
    return index;
  }

  AttentionShape shape_;
  Cache cache_;
  std::vector<SequenceId> ids_;
  std::vector<std::size_t> unused_;
  std::vector<BatchItem> items_;
};

// For accuracy: a text in one step, of which only the size stays.
class WholeTextCache : public KvCache {
 public:
  explicit WholeTextCache(const AttentionShape& shape) : shape_(shape) {}

  std::size_t create() override {
    texts_.push_back(Text{std::vector<std::size_t>(shape_.layers), 0});
    return texts_.size() - 1;
  }
  std::size_t fork(std::size_t, std::size_t) override { throw std::runtime_error("fork: this cache keeps nothing"); }
  void truncate(std::size_t, std::size_t) override { throw std::runtime_error("truncate: this cache keeps nothing"); }
  void release(std::size_t sequence) override { texts_.at(sequence).bytes = 0; }
  std::size_t length(std::size_t sequence) const override { return texts_.at(sequence).tokens.back(); }
  std::size_t bytes() const override {
    std::size_t sum = 0;
    for (const Text& text : texts_) sum += text.bytes;
    return sum;
  }

  void attend(std::size_t layer, std::span<const AttentionPart> parts) override {
    for (const AttentionPart& part : parts) {
      Text& text = texts_.at(part.sequence);
      if (text.tokens.at(layer) != 0) throw std::runtime_error("attend: this cache takes a text in one step");
      text.tokens[layer] = part.tokens;
      text.bytes += attend_text(part);
    }
  }

 protected:
  const AttentionShape& shape() const { return shape_; }

 private:
  virtual std::size_t attend_text(const AttentionPart& part) = 0;  // returns its bytes

  struct Text {
    std::vector<std::size_t> tokens;  // of each layer
    std::size_t bytes = 0;
  };
  AttentionShape shape_;
  std::vector<Text> texts_;
};

// Codes a whole text, then lets its queries see the codes up to their own.
class SealedCache final : public WholeTextCache {
 public:
  SealedCache(const CacheConfig& config, const AttentionShape& shape) : WholeTextCache(shape), cache_(config) {}

 private:
  std::size_t attend_text(const AttentionPart& part) override {
    SequenceId id;
    require(cache_.create_sequence(id), "create_sequence");
    BatchItem tokens = item_of(part, id, shape()), queries = tokens;
    tokens.queries = {};
    tokens.out = {};
    require(turboquant::attend(cache_, 0, {&tokens, 1}), "attend (append)");
    require(cache_.seal(id), "seal");
    queries.keys = queries.values = {};
    queries.position = 0;
    require(turboquant::attend(cache_, 0, {&queries, 1}), "attend");
    const MemoryUse use = cache_.memory();
    cache_.release(id);
    return use.page_bytes + use.tail_bytes;
  }

  Cache cache_;
};

// Keys and values in a format of others, decoded again, under exact attention.
struct Rounding {
  double bits = 0;                                                           // per coordinate, everything included
  std::function<void(std::span<float> keys, std::size_t width)> round_keys;  // rows [tokens][width]
  std::function<void(std::span<float> values, std::size_t width)> round_values;
};

class RoundedCache final : public WholeTextCache {
 public:
  RoundedCache(Rounding rounding, const CacheChoice& choice, const AttentionShape& shape)
      : WholeTextCache(shape), rounding_(std::move(rounding)), choice_(choice) {}

 private:
  std::size_t attend_text(const AttentionPart& part) override {
    const std::size_t heads = shape().kv_heads, dim = shape().head_dim, width = heads * dim, tokens = part.tokens;
    std::vector<float> keys(part.keys, part.keys + tokens * width), values(part.values, part.values + tokens * width);
    const std::size_t first = (std::min)(choice_.first_tokens, tokens);
    rounding_.round_keys(std::span(keys).subspan(first * width), width);
    rounding_.round_values(std::span(values).subspan(first * width), width);
    std::vector<float> seen_keys(keys.size()), seen_values(keys.size());  // of one head, as the queries see them
    for (std::size_t head = 0; head < heads; ++head) {
      const auto copy = [&](const float* from, std::size_t begin, std::size_t end, std::vector<float>& to) {
        for (std::size_t t = begin; t < end; ++t) std::copy_n(from + (t * heads + head) * dim, dim, &to[t * dim]);
      };
      copy(part.keys, 0, tokens, seen_keys);
      copy(part.values, 0, tokens, seen_values);
      std::size_t coded = first;
      for (std::size_t t = 0; t < tokens; ++t) {
        if (const std::size_t end = coded_end(t + 1, tokens); end > coded) {
          copy(keys.data(), coded, end, seen_keys);
          copy(values.data(), coded, end, seen_values);
          coded = end;
        }
        const std::size_t row = (t * shape().heads + head * shape().group()) * dim;
        const std::size_t begin = (std::min)(part.first_key, t + 1);
        std::fill_n(part.out + row, shape().group() * dim, 0.0F);
        if (begin == t + 1) continue;
        attend_rows(part.queries + row, shape().group(), &seen_keys[begin * dim], &seen_values[begin * dim],
                    t + 1 - begin, dim, part.out + row);
      }
    }
    const std::size_t coded = coded_end(tokens, tokens) - first;
    const double bits = rounding_.bits * static_cast<double>(coded) + 16 * static_cast<double>(tokens - coded);
    return static_cast<std::size_t>(bits * static_cast<double>(2 * width) / 8);
  }

  // The rule of the library's own cache, for a fair comparison.
  std::size_t coded_end(std::size_t present, std::size_t tokens) const {
    if (choice_.codes_everything) return tokens;
    const std::size_t kept = choice_.first_tokens + choice_.recent_tokens;
    const std::size_t first = (std::min)(choice_.first_tokens, tokens);
    return first + (present > kept ? (present - kept) / kPageTokens * kPageTokens : 0);
  }

  Rounding rounding_;
  CacheChoice choice_;
};

// Row by row.
Rounding by_row(double bits, const turboquant_eval::RoundRow& round_row) {
  const auto round = [round_row](std::span<float> rows, std::size_t width) {
    for (std::size_t begin = 0; begin < rows.size(); begin += width) round_row(rows.subspan(begin, width));
  };
  return {bits, round, round};
}

Rounding kivi(unsigned bits) {
  constexpr std::size_t kGroup = turboquant_eval::kBlock;
  return {
      turboquant_eval::min_max_bits(bits, kGroup, kGroup),
      [bits](std::span<float> rows, std::size_t width) { turboquant_eval::round_channels(rows, width, bits, kGroup); },
      [bits](std::span<float> rows, std::size_t width) { turboquant_eval::round_tokens(rows, width, bits); }};
}

Rounding plain(unsigned bits, std::size_t dim) {
  return by_row(bits + 16 / static_cast<double>(dim), turboquant_eval::rotated_levels(bits, kSeed, dim));
}

struct NamedRounding {
  const char* name;
  Rounding (*make)(const AttentionShape& shape);
};
constexpr NamedRounding kRoundings[] = {
    {"q8_0", [](const AttentionShape&) { return by_row(8.5, turboquant_eval::round_q8_0); }},
    {"q4_0", [](const AttentionShape&) { return by_row(4.5, turboquant_eval::round_q4_0); }},
    {"q4_0, rotated",
     [](const AttentionShape& shape) { return by_row(4.5, turboquant_eval::rotated_q4_0(kSeed, shape.head_dim)); }},
    {"KIVI-4", [](const AttentionShape&) { return kivi(4); }},
    {"KIVI-2", [](const AttentionShape&) { return kivi(2); }},
    {"plain 4", [](const AttentionShape& shape) { return plain(4, shape.head_dim); }},
    {"plain 3", [](const AttentionShape& shape) { return plain(3, shape.head_dim); }},
    {"plain 2", [](const AttentionShape& shape) { return plain(2, shape.head_dim); }}};

}  // namespace

std::vector<std::string> cache_formats() {
  std::vector<std::string> names{"f32", "f16"};
  for (const NamedRounding& rounding : kRoundings) names.emplace_back(rounding.name);
  for (const char* name : kCodedNames) {
    names.emplace_back(name);
    names.push_back(std::string(name) + std::string(kNotCentred));
  }
  return names;
}

std::unique_ptr<KvCache> make_cache(const CacheChoice& choice, const AttentionShape& shape) {
  if (choice.format == "f32") return make_f32_cache(shape);
  if (choice.format == "f16") return make_f16_cache(shape);
  for (const NamedRounding& rounding : kRoundings) {
    if (choice.format != rounding.name) continue;
    if (!is_supported_dim(shape.head_dim)) throw std::invalid_argument(why_unsupported_dim(shape.head_dim));
    return std::make_unique<RoundedCache>(rounding.make(shape), choice, shape);
  }
  std::string_view name = choice.format;
  const bool is_centred = !name.ends_with(kNotCentred);
  if (!is_centred) name.remove_suffix(kNotCentred.size());
  const auto found = std::find(std::begin(kCodedNames), std::end(kCodedNames), name);
  if (found == std::end(kCodedNames)) {
    throw std::invalid_argument(
        fmt::format("{}: no such format; there are {}", choice.format, fmt::join(cache_formats(), "; ")));
  }
  const std::size_t layers = choice.codes_everything ? 1 : shape.layers;
  const CacheConfig config = config_of(static_cast<std::size_t>(found - std::begin(kCodedNames)),
                                       is_centred ? std::uint8_t{8} : std::uint8_t{0}, layers, choice, shape);
  if (choice.codes_everything) return std::make_unique<SealedCache>(config, shape);
  return std::make_unique<CodedCache>(config, shape);
}

}  // namespace engine
