// libFuzzer target for the kernels: the best set of this CPU against the portable one, on shapes, rows and queries from
// the input. Page bytes are equal bit for bit; logits and attention agree within the tolerances of
// tests/kernels/isa_test.cpp, expressed in the norms of what came in.
#include <turboquant/turboquant.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cache/block.hpp"
#include "fuzz/target.hpp"

namespace {

using namespace turboquant;
using fuzz::require;
using tests::Block;

// Trellis and plain codes; one query plane and two; with zero points and without.
using First = TQ3;
using Second = Format<PolarQuant<8>, ScalarQuant<4>>;

constexpr std::size_t kDims[] = {32, 48, 64, 80, 96, 128, 144, 160, 256};

/// The search for a path through a trellis takes its time under sanitizers: small heads and few tokens for it.
template <class F>
constexpr bool kIsSlow = std::is_same_v<F, First>;

/// Rows that the input describes: any that a page stores, or with `tame` those whose sums can be held to a tolerance.
Block rows_of(fuzz::Numbers& input, std::size_t tokens, std::size_t heads, std::size_t dim, bool tame) {
  Block rows = tests::gaussian_block(input.take<std::uint8_t>(), tokens, heads, dim);
  const std::size_t edits = input.below(24);
  for (std::size_t edit = 0; edit < edits; ++edit) {
    const std::size_t begin = input.below(rows.numbers.size()), step = 1 + input.below(40), count = input.below(256),
                      kind = input.below(4);
    const auto bits = std::uint32_t{input.take<std::uint16_t>()} << 16;
    float x = 0;
    std::memcpy(&x, &bits, 4);
    if (!is_finite(x) || std::fabs(x) > (tame ? 8.0F : 0x1p96F)) x = tame ? 8.0F : 0x1p96F;
    for (std::size_t i = begin, n = 0; n < count && i < rows.numbers.size(); i += step, ++n) {
      float& y = rows.numbers[i];
      y = kind == 0 ? x : kind == 1 ? 0 : kind == 2 ? y * x : y + x;
      y = std::clamp(y, tame ? -64.0F : -0x1p96F, tame ? 64.0F : 0x1p96F);
    }
  }
  return rows;
}

double largest_norm(const Block& rows) {
  double largest = 0;
  for (std::size_t r = 0; r < rows.tokens * rows.heads; ++r) {
    double squares = 0;
    for (std::size_t i = 0; i < rows.dim; ++i) squares += std::pow(double{rows.numbers[r * rows.dim + i]}, 2);
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

template <class F>
LayerShape shape_of(fuzz::Numbers& input) {
  const std::size_t dims = kIsSlow<F> ? 4 : std::size(kDims);
  LayerShape shape;
  shape.kv_heads = static_cast<std::uint32_t>(1 + input.below(2));
  shape.head_dim = static_cast<std::uint32_t>(kDims[input.below(dims)]);
  shape.value_dim = static_cast<std::uint32_t>(kDims[input.below(dims)]);
  shape.center_bits = static_cast<std::uint8_t>(8 * input.below(3));
  return shape;
}

struct AlignedBytes {
  explicit AlignedBytes(std::size_t size) : bytes(size + 64) {
    void* at = bytes.data();
    std::size_t space = bytes.size();
    begin = static_cast<std::byte*>(std::align(64, size, at, space));
  }
  std::vector<std::byte> bytes;
  std::byte* begin;
};

template <class F>
void compare_pages(fuzz::Numbers& input) {
  const LayerShape shape = shape_of<F>(input);
  const std::size_t page_tokens = 16 * (1 + input.below(kIsSlow<F> ? 2 : 5)), tokens = 1 + input.below(page_tokens);
  const PageCodec<F> portable(shape, page_tokens, 3, Isa::portable), best(shape, page_tokens, 3);
  const Block keys = rows_of(input, tokens, shape.kv_heads, shape.head_dim, false),
              values = rows_of(input, tokens, shape.kv_heads, shape.value_dim, false);
  AlignedBytes expected(best.page_bytes()), found(best.page_bytes()), workspace(best.workspace_bytes());
  std::memset(expected.begin, 1, best.page_bytes());
  std::memset(found.begin, 2, best.page_bytes());
  require(portable.encode_page(keys.rows(), values.rows(), expected.begin, workspace.begin) == Status::ok, "refused");
  require(best.encode_page(keys.rows(), values.rows(), found.begin, workspace.begin) == Status::ok, "refused");
  require(std::memcmp(expected.begin, found.begin, best.page_bytes()) == 0, "pages differ");
  // Decoded rows are the same too.
  Block a(tokens, shape.kv_heads, shape.head_dim), b = a, c(tokens, shape.kv_heads, shape.value_dim), d = c;
  require(portable.read_page(found.begin, 0, a.rows(), c.rows()) == Status::ok, "unreadable");
  require(best.read_page(found.begin, 0, b.rows(), d.rows()) == Status::ok, "unreadable");
  require(tests::same_bits(a, b) && tests::same_bits(c, d), "decoded rows differ");
}

template <class F>
void compare_attention(fuzz::Numbers& input) {
  CacheConfig config;
  config.layers = {shape_of<F>(input)};
  LayerShape& shape = config.layers[0];
  if (input.below(4) == 0) shape.window = static_cast<std::uint32_t>(1 + input.below(100));
  config.page_tokens = 16 * (1 + input.below(kIsSlow<F> ? 2 : 4));
  config.recent_tokens = input.below(40);
  config.first_tokens = input.below(8);
  config.rollback_tokens = input.below(20);
  const std::size_t tokens = 1 + input.below(kIsSlow<F> ? 60 : 120), heads = shape.kv_heads * (1 + input.below(9)),
                    asking = 1 + input.below(std::min<std::size_t>(tokens, 3));
  const Block keys = rows_of(input, tokens, shape.kv_heads, shape.head_dim, true),
              values = rows_of(input, tokens, shape.kv_heads, shape.value_dim, true),
              queries = rows_of(input, asking, heads, shape.head_dim, true);
  std::vector<float> slopes(heads, 0.0625F);
  tests::CallOptions options;
  options.params.causal = input.below(4) != 0;
  if (input.below(4) == 0) options.params.softcap = 20;
  if (input.below(4) == 0) options.params.alibi_slopes = slopes;

  KVCache<F> portable(config, Isa::portable), best(config);
  const SequenceId id = tests::new_sequence(portable), twin = tests::new_sequence(best);
  const tests::Outcome expected = tests::attend_one(portable, 0, id, keys, values, queries, options),
                       found = tests::attend_one(best, 0, twin, keys, values, queries, options);
  require(expected.status == Status::ok && found.status == Status::ok, "refused");
  std::vector<float> all(asking * heads * tokens), twins(all.size());
  require(logits(portable, id, 0, queries.rows(), all.data()) == Status::ok, "no logits");
  require(logits(best, twin, 0, queries.rows(), twins.data()) == Status::ok, "no logits");

  // isa_test's 3e-5 sqrt(dim) is for keys and queries of norm sqrt(dim); coded keys are a little longer than the ones
  // that came in.
  const double root = std::sqrt(static_cast<double>(shape.head_dim)),
               logit_error = 3e-5 / root * (1 + 1.5 * largest_norm(keys)) * (1 + largest_norm(queries));
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::isinf(all[i]) && all[i] == twins[i]) continue;
    require(std::fabs(double{all[i]} - double{twins[i]}) <= logit_error, "logits differ");
  }
  // A logit's error moves the output by at most twice that times the longest value.
  const double longest = 1.5 * largest_norm(values), scaled = logit_error / root;
  for (std::size_t r = 0; r < asking * heads; ++r) {
    double squares = 0, norm = 0;
    for (std::size_t i = 0; i < shape.value_dim; ++i) {
      const double x = expected.out.numbers[r * shape.value_dim + i], y = found.out.numbers[r * shape.value_dim + i];
      squares += (x - y) * (x - y);
      norm += x * x;
    }
    require(std::sqrt(squares) <= 2e-4 * std::sqrt(norm) + (1e-5 + 2 * scaled) * longest, "outputs differ");
    require(std::fabs(expected.lse[r] - found.lse[r]) <= 2e-6F * (1 + std::fabs(expected.lse[r])) + scaled,
            "log-sum-exps differ");
  }
}

}  // namespace

/// Random bytes for each of the four comparisons.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  fuzz::Seeds seeds(*argc, *argv);
  for (std::uint64_t seed = 0; seeds && seed < 40; ++seed) {
    std::string bytes(1, static_cast<char>(seed));
    for (std::uint64_t i = 0; i < 20 + 8 * seed; ++i) bytes += static_cast<char>(oracle::hash(seed, 2, i));
    seeds.write(bytes);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Numbers input(data, size);
  switch (input.below(4)) {
    case 0:
      compare_pages<First>(input);
      break;
    case 1:
      compare_pages<Second>(input);
      break;
    case 2:
      compare_attention<First>(input);
      break;
    default:
      compare_attention<Second>(input);
      break;
  }
  return 0;
}
