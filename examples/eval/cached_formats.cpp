// Storing a layer in KVCache and attending to it there.
#include "cached_formats.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

namespace turboquant_eval {
namespace {

using turboquant::ConstRows;
using turboquant::Rows;

turboquant::CacheConfig config_of(const turboquant::LayerShape& shape, const CacheSettings& settings) {
  turboquant::CacheConfig config;
  config.layers = {shape};
  config.page_tokens = settings.page_tokens;
  config.recent_tokens = 0;
  config.seed = settings.seed;
  return config;
}

// A cache of one layer with one sequence in it.
template <class F>
class CachedLayer {
 public:
  CachedLayer(const std::string& name, const turboquant::LayerShape& shape, const CacheSettings& settings)
      : name_(name), cache_(config_of(shape, settings)) {
    require(cache_.create_sequence(sequence_), "create_sequence");
  }

  void append(ConstRows keys, ConstRows values) {
    const std::array items{item(keys, values, {}, {}, turboquant::npos)};
    require(turboquant::attend(cache_, 0, items), "attend (append)");
  }

  void seal() { require(cache_.seal(sequence_), "seal"); }

  void read(Rows keys, Rows values) const { require(cache_.read(sequence_, 0, 0, keys, values), "read"); }

  void attend(ConstRows queries, std::size_t position, float* scores, Rows out) {
    require(turboquant::logits(cache_, sequence_, 0, queries, scores), "logits");
    const std::array items{item({}, {}, queries, out, position)};
    require(turboquant::attend(cache_, 0, items), "attend");
  }

  turboquant::MemoryUse memory() const { return cache_.memory(); }

 private:
  turboquant::BatchItem item(ConstRows keys, ConstRows values, ConstRows queries, Rows out, std::size_t position) {
    turboquant::BatchItem result;
    result.sequence = sequence_;
    result.keys = keys;
    result.values = values;
    result.queries = queries;
    result.out = out;
    result.position = position;
    return result;
  }

  void require(turboquant::Status status, const char* call) const {
    if (status == turboquant::Status::ok) return;
    throw MeasurementError(fmt::format("{}: {} answered {} ({}: expected {}, found {})", name_, call,
                                       turboquant::to_string(status.code), status.field, status.expected,
                                       status.found));
  }

  std::string name_;
  turboquant::KVCache<F> cache_;
  turboquant::SequenceId sequence_;
};

// Rows over numbers stored head by head, [heads][tokens][dim].
template <class View, class T>
View head_major(T* numbers, std::size_t tokens, std::size_t heads, std::size_t dim) {
  View rows(numbers, tokens, heads, dim);
  rows.token_stride = static_cast<std::ptrdiff_t>(dim);
  rows.head_stride = static_cast<std::ptrdiff_t>(tokens * dim);
  return rows;
}

// Cost of one full page: zeros are stored in as many bytes as anything else.
template <class F>
void measure_page(Subject& subject, const turboquant::LayerShape& shape, const ExactLayer& layer,
                  const CacheSettings& settings) {
  const std::vector<float> zeros(settings.page_tokens * layer.kv_heads * (std::max)(layer.head_dim, layer.value_dim));
  CachedLayer<F> page(subject.format, shape, settings);
  page.append(ConstRows(zeros.data(), settings.page_tokens, layer.kv_heads, layer.head_dim),
              ConstRows(zeros.data(), settings.page_tokens, layer.kv_heads, layer.value_dim));
  page.seal();
  const turboquant::MemoryUse use = page.memory();
  subject.bits_per_coordinate = use.bits_per_coordinate;
  subject.bytes_per_token = static_cast<double>(use.page_bytes) / static_cast<double>(settings.page_tokens);
}

// A raw token reads back bit for bit; a coded one does not. Asked of the numbers, not of the cache's own accounts.
std::vector<char> find_coded(const ExactLayer& layer, const Subject& subject) {
  std::vector<char> is_coded(layer.tokens, 0);
  const auto differs = [&](const std::vector<float>& a, const std::vector<float>& b, std::size_t head,
                           std::size_t token, std::size_t dim) {
    const auto begin = static_cast<std::ptrdiff_t>((head * layer.tokens + token) * dim);
    return !std::equal(a.begin() + begin, a.begin() + begin + static_cast<std::ptrdiff_t>(dim), b.begin() + begin);
  };
  for (std::size_t head = 0; head < layer.kv_heads; ++head) {
    for (std::size_t token = 0; token < layer.tokens; ++token) {
      if (differs(layer.keys, subject.keys, head, token, layer.head_dim) ||
          differs(layer.values, subject.values, head, token, layer.value_dim)) {
        is_coded[token] = 1;
      }
    }
  }
  return is_coded;
}

template <class F>
Subject store(const std::string& name, std::uint8_t center_bits, const LayerTensors& tensors, const ExactLayer& layer,
              const CacheSettings& settings) {
  turboquant::LayerShape shape;
  shape.kv_heads = static_cast<std::uint32_t>(layer.kv_heads);
  shape.head_dim = static_cast<std::uint32_t>(layer.head_dim);
  shape.value_dim = static_cast<std::uint32_t>(layer.value_dim);
  shape.center_bits = center_bits;

  Subject subject;
  subject.format = name;
  measure_page<F>(subject, shape, layer, settings);

  const auto cached = std::make_shared<CachedLayer<F>>(name, shape, settings);
  cached->append(tensors.keys.rows(), tensors.values.rows());
  cached->seal();
  subject.keys.resize(layer.keys.size());
  subject.values.resize(layer.values.size());
  cached->read(head_major<Rows>(subject.keys.data(), layer.tokens, layer.kv_heads, layer.head_dim),
               head_major<Rows>(subject.values.data(), layer.tokens, layer.kv_heads, layer.value_dim));
  subject.is_coded = find_coded(layer, subject);
  subject.attend = [cached, &layer](std::size_t first, std::size_t count, float* logits, float* out) {
    ConstRows queries = head_major<ConstRows>(layer.queries.data(), layer.tokens, layer.heads, layer.head_dim);
    queries.data = layer.queries.data() + first * layer.head_dim;
    queries.tokens = count;
    cached->attend(queries, first, logits, Rows(out, count, layer.heads, layer.value_dim));
  };
  return subject;
}

template <class F>
CachedFormat cached_format(const std::string& name, std::uint8_t center_bits) {
  return {name,
          [name, center_bits](const LayerTensors& tensors, const ExactLayer& layer, const CacheSettings& settings) {
            return store<F>(name, center_bits, tensors, layer, settings);
          }};
}

}  // namespace

std::string why_invalid(const CacheSettings& settings) {
  return turboquant::why_invalid(config_of(turboquant::LayerShape{}, settings), 1);
}

std::vector<CachedFormat> cached_formats() {
  using namespace turboquant;
  using FourThree = Format<PolarQuant<4>, PolarQuant<3>>;
  return {cached_format<TQ8>("TQ8", 8),
          cached_format<TQ4>("TQ4", 8),
          cached_format<TQ3>("TQ3", 8),
          cached_format<TQ2>("TQ2", 8),
          cached_format<TQ8>("TQ8, not centred", 0),
          cached_format<TQ4>("TQ4, not centred", 0),
          cached_format<TQ3>("TQ3, not centred", 0),
          cached_format<TQ2>("TQ2, not centred", 0),
          cached_format<FourThree>("keys 4, values 3", 8)};
}

}  // namespace turboquant_eval
