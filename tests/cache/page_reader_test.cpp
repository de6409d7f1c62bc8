// docs/file-format.md says where every bit of a page lies. A reader written after that text alone, in double precision,
// finds what the library finds.
#include <turboquant/turboquant.hpp>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace turboquant;

constexpr std::size_t kHeads = 2, kPage = 32, kKeyDim = 128, kValueDim = 64;
constexpr std::uint64_t kSeed = 7;

double bf16_at(const std::byte* page, std::size_t offset) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, page + offset, 2);
  return static_cast<double>(to_float(bfloat16{bits}));
}

unsigned bit_at(const std::byte* fragment, std::size_t byte, std::size_t bit) {
  return static_cast<unsigned>(fragment[byte]) >> bit & 1u;
}

std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

/// One side of one KV head, from the byte at which its centre begins.
template <class C>
class SideReader {
 public:
  static constexpr unsigned kBits = C::bits;

  SideReader(const std::byte* page, std::size_t begin, bool keys, std::size_t dim, unsigned center_bits)
      : page_(page), center_(begin), keys_(keys), dim_(dim), center_bits_(center_bits) {
    scales_ = center_ + padded(dim * center_bits / 8);
    fragments_ = scales_ + padded(C::zero_points ? 4 * kPage : 2 * kPage);
    end_ = padded(fragments_ + kPage * dim * kBits / 8);
  }
  std::size_t end() const { return end_; }

  double value(std::size_t t, std::size_t i, double center_scale) const {
    double x = bf16_at(page_, scales_ + 2 * t) * level(t, i);
    if (C::zero_points) x += bf16_at(page_, scales_ + 2 * kPage + 2 * t);
    if (center_bits_ == 8) x += center_scale * static_cast<double>(static_cast<std::int8_t>(page_[center_ + i]));
    if (center_bits_ == 16) {
      std::int16_t center = 0;
      std::memcpy(&center, page_ + center_ + 2 * i, 2);
      x += center_scale * center;
    }
    return x;
  }

 private:
  const std::byte* fragment(std::size_t tile, std::size_t group) const {
    const std::size_t number = keys_ ? tile * (dim_ / 16) + group : group * (kPage / 16) + tile;
    return page_ + fragments_ + number * 32 * kBits;
  }

  unsigned code(std::size_t token, std::size_t coordinate) const {
    const std::byte* at = fragment(token / 16, coordinate / 16);
    const std::size_t t = token % 16, c = coordinate % 16;
    const std::size_t p = keys_ ? 64 * (c / 4) + 4 * t + c % 4 : 64 * (t / 4) + 4 * c + t % 4;
    const std::size_t s = p / 64, i = p % 64;
    switch (kBits) {
      case 8:
        return static_cast<unsigned>(at[p]);
      case 4:
        return static_cast<unsigned>(at[64 * (s / 2) + i]) >> 4 * (s % 2) & 15u;
      case 1:
        return bit_at(at, 8 * s + i / 8, i % 8);
      default: {
        const unsigned low = static_cast<unsigned>(at[i]) >> 2 * s & 3u;
        return kBits == 3 ? low + 4 * bit_at(at, 64 + 8 * s + i / 8, i % 8) : low;
      }
    }
  }

  // The new bits of a position of a lane, positions in the order of memory.
  unsigned new_bits(std::size_t lane, std::size_t position, std::size_t tile) const {
    const std::size_t tiles = kPage / 16, number = position / 16, half = position / 8 % 2;
    const std::byte* at = keys_ ? fragment(tile, number) : fragment(number % tiles, number / tiles);
    std::uint32_t word = 0;
    for (std::size_t plane = 0; plane < kBits; ++plane) {
      word += static_cast<std::uint32_t>(at[(half * kBits + plane) * 16 + lane]) << 8 * (kBits - 1 - plane);
    }
    return word >> kBits * (7 - position % 8) & ((1u << kBits) - 1);
  }

  double level(std::size_t t, std::size_t i) const {
    if constexpr ((C::id >> 8) == 3) {
      const std::size_t length = keys_ ? dim_ : kPage * dim_ / 16;
      const std::size_t position = keys_ ? i : i / 16 * kPage + t;
      unsigned w = 0;
      for (std::size_t before = 8; before-- > 0;) {
        w = (w << kBits | new_bits(keys_ ? t % 16 : i % 16, (position + length - before) % length, t / 16)) & 255u;
      }
      const int magnitude = kTrellisConstants<kBits>[w % 16] + kTrellisConstants<kBits>[16 + w / 16 % 8];
      return w >= 128 ? -magnitude : magnitude;
    } else if constexpr (kBits == 8) {
      return static_cast<std::int8_t>(code(t, i));
    } else if constexpr ((C::id >> 8) == 2) {
      return static_cast<double>(code(t, i)) - (1 << (kBits - 1));
    } else {
      return Codebook<kBits>::levels[code(t, i)];
    }
  }

  const std::byte* page_;
  std::size_t center_, scales_ = 0, fragments_ = 0, end_ = 0;
  bool keys_;
  std::size_t dim_;
  unsigned center_bits_;
};

/// R^-1 y = diag(s) H^T y / sqrt(d), d a power of two: H[i][j] = (-1)^popcount(i & j).
std::vector<double> rotated_back(const std::vector<double>& y) {
  const Rotation rotation(kSeed, y.size());
  std::vector<double> x(y.size());
  for (std::size_t j = 0; j < y.size(); ++j) {
    for (std::size_t i = 0; i < y.size(); ++i) x[j] += std::popcount(i & j) % 2 == 0 ? y[i] : -y[i];
    x[j] *= static_cast<double>(rotation.signs()[j]) / std::sqrt(static_cast<double>(y.size()));
  }
  return x;
}

template <class Reader>
void expect_same(const Reader& reader, double center_scale, std::size_t dim, const float* found, std::size_t head) {
  for (std::size_t t = 0; t < kPage; ++t) {
    std::vector<double> coded(dim);
    for (std::size_t i = 0; i < dim; ++i) coded[i] = reader.value(t, i, center_scale);
    const std::vector<double> read = rotated_back(coded);
    for (std::size_t i = 0; i < dim; ++i) {
      ASSERT_NEAR(read[i], static_cast<double>(found[(t * kHeads + head) * dim + i]), 1e-4) << t << " " << i;
    }
  }
}

template <class K, class V>
void read_as_documented(unsigned center_bits) {
  SCOPED_TRACE(std::string(K::name) + "/" + V::name + " " + std::to_string(center_bits));
  LayerShape shape;
  shape.kv_heads = kHeads;
  shape.head_dim = kKeyDim;
  shape.value_dim = kValueDim;
  shape.center_bits = static_cast<std::uint8_t>(center_bits);
  const PageCodec<Format<K, V>> codec(shape, kPage, kSeed);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> keys(kPage * kHeads * kKeyDim), values(kPage * kHeads * kValueDim);
  for (auto* rows : {&keys, &values}) {
    for (float& x : *rows) x = normal(random) + 1;
  }
  const Scratch page(codec.page_bytes()), workspace(codec.workspace_bytes());
  ASSERT_TRUE(codec.encode_page({keys.data(), kPage, kHeads, kKeyDim}, {values.data(), kPage, kHeads, kValueDim},
                                page.get(), workspace.get()) == Status::ok);
  ASSERT_TRUE(codec.read_page(page.get(), 0, {keys.data(), kPage, kHeads, kKeyDim},
                              {values.data(), kPage, kHeads, kValueDim}) == Status::ok);
  std::size_t begin = center_bits == 0 ? 0 : padded(4 * kHeads);
  for (std::size_t head = 0; head < kHeads; ++head) {
    const SideReader<K> key_reader(page.get(), begin, true, kKeyDim, center_bits);
    const SideReader<V> value_reader(page.get(), key_reader.end(), false, kValueDim, center_bits);
    begin = value_reader.end();
    const bool centred = center_bits != 0;
    expect_same(key_reader, centred ? bf16_at(page.get(), 4 * head) : 0, kKeyDim, keys.data(), head);
    expect_same(value_reader, centred ? bf16_at(page.get(), 4 * head + 2) : 0, kValueDim, values.data(), head);
  }
  EXPECT_EQ(begin, codec.page_bytes());
}

template <class K, class V>
void read_with_every_centre() {
  for (const unsigned center_bits : {0u, 8u, 16u}) read_as_documented<K, V>(center_bits);
}

TEST(PageReader, LevelCodes) {
  read_with_every_centre<PolarQuant<1>, PolarQuant<2>>();
  read_with_every_centre<PolarQuant<2>, PolarQuant<1>>();
  read_with_every_centre<PolarQuant<3>, PolarQuant<4>>();
  read_with_every_centre<PolarQuant<4>, PolarQuant<3>>();
  read_with_every_centre<PolarQuant<8>, PolarQuant<8>>();
}

TEST(PageReader, ZeroPoints) {
  read_with_every_centre<PolarQuant<4>, ScalarQuant<2>>();
  read_with_every_centre<PolarQuant<4>, ScalarQuant<3>>();
  read_with_every_centre<PolarQuant<4>, ScalarQuant<4>>();
  read_with_every_centre<PolarQuant<4>, ScalarQuant<8>>();
}

TEST(PageReader, TrellisCodes) {
  read_with_every_centre<TrellisQuant<2>, TrellisQuant<3>>();
  read_with_every_centre<TrellisQuant<3>, TrellisQuant<4>>();
  read_with_every_centre<TrellisQuant<4>, TrellisQuant<2>>();
}

}  // namespace
