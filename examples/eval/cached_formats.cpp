// Storing a layer in KVCache and attending to it there.
#include "cached_formats.hpp"

#include "more_formats.hpp"

#include <turboquant/layout/page.hpp>
#include <turboquant/turboquant.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <utility>

namespace turboquant_eval {
namespace {

using turboquant::ConstRows;
using turboquant::Rows;

// All pairs are formats of one cache type, so that the container is compiled once.
template <class Key, class Value>
struct Pair {
  using Format = turboquant::Format<Key, Value>;
  static std::string name() {
    const std::string key = Key::name, value = Value::name;
    return key == value ? key : key + "/" + value;
  }
  static turboquant::layout::PageShape page_shape(const turboquant::LayerShape& layer, std::size_t page_tokens) {
    return {page_tokens,
            layer.kv_heads,
            layer.center_bits,
            {layer.head_dim, Key::bits, false},
            {layer.value_dim, Value::bits, Value::zero_points}};
  }
};

template <class F>
using PairOf = Pair<typename F::key_codec, typename F::value_codec>;

template <class... P>
struct Pairs {
  using Cache = turboquant::KVCache<typename P::Format...>;
  static constexpr std::uint32_t ids[] = {P::Format::id...};
  static constexpr std::string (*names[])() = {&P::name...};
  static constexpr turboquant::layout::PageShape (*page_shapes[])(const turboquant::LayerShape&,
                                                                  std::size_t) = {&P::page_shape...};
};

template <unsigned B>
using Polar = turboquant::PolarQuant<B>;
template <unsigned B>
using Scalar = turboquant::ScalarQuant<B>;
template <unsigned B>
using Trellis = turboquant::TrellisQuant<B>;

using List =
    Pairs<PairOf<turboquant::TQ8>, PairOf<turboquant::TQ4>, PairOf<turboquant::TQ3>, PairOf<turboquant::TQ2>,
          Pair<Polar<8>, Polar<8>>, Pair<Polar<4>, Polar<4>>, Pair<Polar<3>, Polar<3>>, Pair<Polar<2>, Polar<2>>,
          Pair<Trellis<4>, Trellis<4>>, Pair<Trellis<3>, Trellis<3>>, Pair<Trellis<2>, Trellis<2>>,
          Pair<Polar<4>, Scalar<4>>, Pair<Polar<3>, Scalar<3>>, Pair<Polar<2>, Scalar<2>>, Pair<Polar<4>, Polar<3>>>;
constexpr const char* kRecommended[] = {"TQ8", "TQ4", "TQ3", "TQ2"};  // the first pairs of the list

turboquant::CacheConfig config_of(const turboquant::LayerShape& shape, const CacheSettings& settings) {
  turboquant::CacheConfig config;
  config.layers = {shape};
  config.page_tokens = settings.page_tokens;
  config.recent_tokens = 0;
  config.seed = settings.seed;
  return config;
}

// A cache of one layer with one sequence in it.
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
  List::Cache cache_;
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
void measure_page(Subject& subject, const turboquant::LayerShape& shape, const ExactLayer& layer,
                  const CacheSettings& settings) {
  const std::vector<float> zeros(settings.page_tokens * layer.kv_heads * (std::max)(layer.head_dim, layer.value_dim));
  CachedLayer page(subject.format, shape, settings);
  page.append(ConstRows(zeros.data(), settings.page_tokens, layer.kv_heads, layer.head_dim),
              ConstRows(zeros.data(), settings.page_tokens, layer.kv_heads, layer.value_dim));
  page.seal();
  const turboquant::MemoryUse use = page.memory();
  subject.bits_per_coordinate = use.bits_per_coordinate;
  subject.bytes_per_token = static_cast<double>(use.page_bytes) / static_cast<double>(settings.page_tokens);

  // Keys and values each pay for half of the header.
  const auto at = turboquant::layout::page_layout(List::page_shapes[shape.format](shape, settings.page_tokens));
  const double header = static_cast<double>(at.header_bytes) / static_cast<double>(2 * layer.kv_heads);
  const auto bits = [&](std::size_t bytes, std::size_t dim) {
    return 8 * (static_cast<double>(bytes) + header) / static_cast<double>(settings.page_tokens * dim);
  };
  subject.key_bits = bits(at.key.end, layer.head_dim);
  subject.value_bits = bits(at.value.end - at.key.end, layer.value_dim);
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

}  // namespace

std::string why_invalid(const CacheSettings& settings) {
  return turboquant::why_invalid(config_of(turboquant::LayerShape{}, settings), 1);
}

std::vector<CachedFormat> cached_formats() {
  std::vector<CachedFormat> formats;
  for (std::size_t i = 0; i < std::size(kRecommended); ++i) formats.push_back({kRecommended[i], i, 8});
  for (std::size_t i = 0; i < std::size(kRecommended); ++i) {
    formats.push_back({kRecommended[i] + std::string(", not centred"), i, 0});
  }
  for (std::size_t i = std::size(kRecommended); i < std::size(List::ids); ++i) {
    const auto* const end = List::ids + std::size(kRecommended);
    if (std::find(List::ids, end, List::ids[i]) == end) formats.push_back({List::names[i](), i, 8});
  }
  return formats;
}

CachedFormat cached_format(std::string_view codecs, unsigned center_bits) {
  for (std::size_t i = 0; i < std::size(List::ids); ++i) {
    if (codecs == List::names[i]() || (i < std::size(kRecommended) && codecs == kRecommended[i])) {
      return {std::string(codecs), i, center_bits};
    }
  }
  throw MeasurementError(fmt::format("{}: no such pair of codecs", codecs));
}

Subject store(const CachedFormat& format, const LayerTensors& tensors, const ExactLayer& layer,
              const CacheSettings& settings) {
  turboquant::LayerShape shape;
  shape.kv_heads = static_cast<std::uint32_t>(layer.kv_heads);
  shape.head_dim = static_cast<std::uint32_t>(layer.head_dim);
  shape.value_dim = static_cast<std::uint32_t>(layer.value_dim);
  shape.format = static_cast<std::uint32_t>(format.pair);
  shape.center_bits = static_cast<std::uint8_t>(format.center_bits);

  Subject subject;
  subject.format = format.name;
  measure_page(subject, shape, layer, settings);

  const auto cached = std::make_shared<CachedLayer>(format.name, shape, settings);
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

}  // namespace turboquant_eval
