// Growing arrays per sequence, layer and KV head.
#include "plain_cache.hpp"

#include <turboquant/core/dtype.hpp>

#include <baseline.hpp>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

namespace engine {
namespace {

void attend_group(const float* queries, std::size_t heads, const float* keys, const float* values, std::size_t tokens,
                  std::size_t head_dim, float scale, float* out) {
  baseline::attend_f32(baseline::best_isa(), queries, heads, keys, values, tokens, head_dim, scale, out);
}
void attend_group(const float* queries, std::size_t heads, const std::uint16_t* keys, const std::uint16_t* values,
                  std::size_t tokens, std::size_t head_dim, float scale, float* out) {
  baseline::attend_f16(baseline::best_isa(), queries, heads, keys, values, tokens, head_dim, scale, out);
}

void append(const float* row, std::size_t count, std::vector<float>& rows) {
  rows.insert(rows.end(), row, row + count);
}
void append(const float* row, std::size_t count, std::vector<std::uint16_t>& rows) {
  for (std::size_t i = 0; i < count; ++i) rows.push_back(turboquant::to_half(row[i]).bits);
}

template <class T>
class PlainCache final : public KvCache {
 public:
  explicit PlainCache(const AttentionShape& shape) : shape_(shape) {
    if (shape.head_dim % 16 != 0) throw std::runtime_error("head_dim: expected a multiple of 16");
  }

  std::size_t create() override { return add(Sequence{std::vector<Side>(shape_.layers * shape_.kv_heads), true}); }

  std::size_t fork(std::size_t sequence, std::size_t length) override {
    Sequence copy = at(sequence);
    cut(copy, length);
    return add(std::move(copy));
  }

  void truncate(std::size_t sequence, std::size_t length) override { cut(at(sequence), length); }
  void release(std::size_t sequence) override { at(sequence) = Sequence{}; }

  std::size_t length(std::size_t sequence) const override {
    // The last layer is the last to grow.
    return at(sequence).sides.back().keys.size() / shape_.head_dim;
  }

  void attend(std::size_t layer, std::span<const AttentionPart> parts) override {
    const std::size_t dim = shape_.head_dim, group = shape_.group();
    for (const AttentionPart& part : parts) {
      for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
        Side& side = at(part.sequence).sides[layer * shape_.kv_heads + head];
        const std::size_t before = side.keys.size() / dim;
        for (std::size_t t = 0; t < part.tokens; ++t) {
          const std::size_t row = (t * shape_.kv_heads + head) * dim;
          append(part.keys + row, dim, side.keys);
          append(part.values + row, dim, side.values);
        }
        for (std::size_t t = 0; t < part.tokens; ++t) {
          const std::size_t row = (t * shape_.heads + head * group) * dim;
          // A query that stands before the first key attends to nothing.
          const std::size_t end = before + t + 1, begin = (std::min)(part.first_key, end);
          std::fill_n(part.out + row, group * dim, 0.0F);
          if (begin == end) continue;
          attend_rows(part.queries + row, group, side.keys.data() + begin * dim, side.values.data() + begin * dim,
                      end - begin, dim, part.out + row);
        }
      }
    }
  }

  std::size_t bytes() const override {
    std::size_t count = 0;
    for (const Sequence& sequence : sequences_) {
      for (const Side& side : sequence.sides) count += side.keys.size() + side.values.size();
    }
    return count * sizeof(T);
  }

 private:
  struct Side {  // of one layer and KV head, [tokens][head_dim]
    std::vector<T> keys, values;
  };
  struct Sequence {
    std::vector<Side> sides;
    bool is_used = false;
  };

  std::size_t add(Sequence sequence) {
    const auto unused =
        std::find_if(sequences_.begin(), sequences_.end(), [](const Sequence& s) { return !s.is_used; });
    const auto index = static_cast<std::size_t>(unused - sequences_.begin());
    if (unused == sequences_.end()) sequences_.emplace_back();
    sequences_[index] = std::move(sequence);
    return index;
  }

  void cut(Sequence& sequence, std::size_t length) const {
    for (Side& side : sequence.sides) {
      if (side.keys.size() < length * shape_.head_dim) throw std::runtime_error("length: beyond the end");
      side.keys.resize(length * shape_.head_dim);
      side.values.resize(length * shape_.head_dim);
    }
  }

  const Sequence& at(std::size_t sequence) const {
    if (sequence >= sequences_.size() || !sequences_[sequence].is_used) throw std::runtime_error("unknown sequence");
    return sequences_[sequence];
  }
  Sequence& at(std::size_t sequence) { return const_cast<Sequence&>(std::as_const(*this).at(sequence)); }

  AttentionShape shape_;
  std::vector<Sequence> sequences_;
};

}  // namespace

template <class T>
requires std::is_same_v<T, float> || std::is_same_v<T, std::uint16_t>
void attend_rows(const float* queries, std::size_t heads, const T* keys, const T* values, std::size_t tokens,
                 std::size_t head_dim, float* out) {
  const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
  // Heads go in the largest groups that there are loops for.
  for (std::size_t head = 0, group = 8; head < heads; head += group) {
    while (group > heads - head) group /= 2;
    attend_group(queries + head * head_dim, group, keys, values, tokens, head_dim, scale, out + head * head_dim);
  }
}
template void attend_rows(const float*, std::size_t, const float*, const float*, std::size_t, std::size_t, float*);
template void attend_rows(const float*, std::size_t, const std::uint16_t*, const std::uint16_t*, std::size_t,
                          std::size_t, float*);

std::unique_ptr<KvCache> make_f32_cache(const AttentionShape& shape) {
  return std::make_unique<PlainCache<float>>(shape);
}
std::unique_ptr<KvCache> make_f16_cache(const AttentionShape& shape) {
  return std::make_unique<PlainCache<std::uint16_t>>(shape);
}

}  // namespace engine
