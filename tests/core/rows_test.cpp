// Row views: constructors, strides of both signs, odd addresses, all element types, and the checks on arrival.
#include <turboquant/core/rows.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace tq = turboquant;

namespace {

constexpr tq::DType kTypes[] = {tq::DType::f32, tq::DType::f16, tq::DType::bf16};

float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// Writes x, which every type holds exactly, to any address.
void put(std::byte* where, tq::DType type, float x) {
  if (type == tq::DType::f32) {
    std::memcpy(where, &x, 4);
  } else {
    const std::uint16_t bits = type == tq::DType::f16 ? tq::to_half(x).bits : tq::to_bfloat16(x).bits;
    std::memcpy(where, &bits, 2);
  }
}

/// A small integer that names its place: exact in 8 significant bits.
float value_at(std::size_t token, std::size_t head, std::size_t i) {
  return float(int((token * 101 + head * 53 + i * 7) % 255) - 127);
}

struct Strides {
  const char* name;
  std::ptrdiff_t token, head;
};

constexpr std::size_t kTokens = 3, kHeads = 2, kDim = 37;
constexpr std::ptrdiff_t kD = kDim, kH = kHeads, kT = kTokens;
constexpr Strides kStrides[] = {
    {"contiguous", kH* kD, kD},        {"heads first", kD, kT* kD},      {"padded", kH*(kD + 3) + 5, kD + 3},
    {"tokens backwards", -kH* kD, kD}, {"heads backwards", kH* kD, -kD}, {"both backwards", -kH* kD - 1, -kD},
};

/// Bytes that hold every row of a view with these strides at an odd address, and the place of row (0, 0).
struct Buffer {
  std::vector<std::byte> bytes;
  std::byte* first;

  Buffer(tq::DType type, const Strides& strides) {
    const std::ptrdiff_t token_span = strides.token * (kT - 1), head_span = strides.head * (kH - 1);
    const std::ptrdiff_t before =
        -((std::min)(token_span, std::ptrdiff_t(0)) + (std::min)(head_span, std::ptrdiff_t(0)));
    const std::ptrdiff_t after =
        (std::max)(token_span, std::ptrdiff_t(0)) + (std::max)(head_span, std::ptrdiff_t(0)) + kD;
    const std::ptrdiff_t size = std::ptrdiff_t(tq::size_of(type));
    bytes.assign(std::size_t((before + after) * size) + 1, std::byte{0xa5});
    first = bytes.data() + 1 + before * size;
  }
};

std::byte* place(const Buffer& buffer, tq::DType type, const Strides& strides, std::size_t token, std::size_t head,
                 std::size_t i) {
  const std::ptrdiff_t elements =
      std::ptrdiff_t(token) * strides.token + std::ptrdiff_t(head) * strides.head + std::ptrdiff_t(i);
  return buffer.first + elements * std::ptrdiff_t(tq::size_of(type));
}

template <class Body>
void for_each_element(Body&& body) {
  for (std::size_t token = 0; token < kTokens; ++token) {
    for (std::size_t head = 0; head < kHeads; ++head) {
      for (std::size_t i = 0; i < kDim; ++i) body(token, head, i);
    }
  }
}

}  // namespace

TEST(Rows, DefaultIsNoRows) {
  const tq::ConstRows rows;
  EXPECT_EQ(rows.data, nullptr);
  EXPECT_EQ(rows.tokens + rows.heads + rows.dim, 0u);
  const tq::ConstRows from_writable{tq::Rows{}};
  EXPECT_EQ(from_writable.data, nullptr);
  EXPECT_EQ(from_writable.tokens + from_writable.heads + from_writable.dim, 0u);
}

TEST(Rows, TypedPointersGiveContiguousViewsOfTheirType) {
  float f[24] = {};
  tq::half h[24] = {};
  tq::bfloat16 b[24] = {};
  const auto expect = [](const tq::ConstRows& rows, const void* data, tq::DType type) {
    EXPECT_EQ(rows.data, data);
    EXPECT_EQ(rows.type, type);
    EXPECT_EQ(rows.tokens, 2u);
    EXPECT_EQ(rows.heads, 3u);
    EXPECT_EQ(rows.dim, 4u);
    EXPECT_EQ(rows.token_stride, 12);
    EXPECT_EQ(rows.head_stride, 4);
  };
  expect(tq::ConstRows(f, 2, 3, 4), f, tq::DType::f32);
  expect(tq::ConstRows(h, 2, 3, 4), h, tq::DType::f16);
  expect(tq::ConstRows(b, 2, 3, 4), b, tq::DType::bf16);
  expect(tq::ConstRows(h, tq::DType::bf16, 2, 3, 4), h, tq::DType::bf16);
  expect(tq::Rows(f, 2, 3, 4), f, tq::DType::f32);
  expect(tq::Rows(h, 2, 3, 4), h, tq::DType::f16);
  expect(tq::Rows(b, 2, 3, 4), b, tq::DType::bf16);
  expect(tq::Rows(h, tq::DType::bf16, 2, 3, 4), h, tq::DType::bf16);
}

TEST(Rows, WritableConvertsToReadableOnly) {
  EXPECT_TRUE((std::is_convertible_v<tq::Rows, tq::ConstRows>));
  EXPECT_FALSE((std::is_constructible_v<tq::Rows, tq::ConstRows>));
  EXPECT_FALSE((std::is_constructible_v<tq::Rows, const float*, std::size_t, std::size_t, std::size_t>));
  float f[1] = {};
  const tq::ConstRows rows = tq::Rows(f, tq::DType::f32, 5, 6, 7, -8, -9);
  EXPECT_EQ(rows.token_stride, -8);
  EXPECT_EQ(rows.head_stride, -9);
  EXPECT_EQ(rows.heads, 6u);
}

TEST(Rows, LoadsFollowStridesAtOddAddresses) {
  for (const tq::DType type : kTypes) {
    for (const Strides& strides : kStrides) {
      SCOPED_TRACE(std::string(strides.name) + ", type " + std::to_string(int(type)));
      Buffer buffer(type, strides);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(buffer.first) % 2, 1u);
      for_each_element([&](std::size_t token, std::size_t head, std::size_t i) {
        put(place(buffer, type, strides, token, head, i), type, value_at(token, head, i));
      });
      const tq::ConstRows rows(buffer.first, type, kTokens, kHeads, kDim, strides.token, strides.head);
      std::vector<float> wide(kDim + 1, 777.0f);
      std::vector<tq::bfloat16> narrow(kDim + 1, tq::bfloat16{0x1234});
      for_each_element([&](std::size_t token, std::size_t head, std::size_t i) {
        if (i == 0) {
          tq::load_row(rows, token, head, wide.data());
          tq::load_row(rows, token, head, narrow.data());
        }
        ASSERT_EQ(wide[i], value_at(token, head, i)) << token << ' ' << head << ' ' << i;
        ASSERT_EQ(tq::to_float(narrow[i]), value_at(token, head, i)) << token << ' ' << head << ' ' << i;
      });
      EXPECT_EQ(wide[kDim], 777.0f) << "wrote beyond the row";
      EXPECT_EQ(narrow[kDim].bits, 0x1234) << "wrote beyond the row";
    }
  }
}

TEST(Rows, StoresWriteTheirRowAndNothingElse) {
  for (const tq::DType type : kTypes) {
    for (const Strides& strides : kStrides) {
      SCOPED_TRACE(std::string(strides.name) + ", type " + std::to_string(int(type)));
      Buffer stored(type, strides), expected(type, strides);
      const tq::Rows rows(stored.first, type, kTokens, kHeads, kDim, strides.token, strides.head);
      std::vector<float> in(kDim);
      for (std::size_t token = kTokens; token-- > 0;) {
        for (std::size_t head = 0; head < kHeads; ++head) {
          for (std::size_t i = 0; i < kDim; ++i) {
            in[i] = value_at(token, head, i);
            put(place(expected, type, strides, token, head, i), type, in[i]);
          }
          tq::store_row(rows, token, head, in.data());
          ASSERT_TRUE(stored.bytes == expected.bytes) << token << ' ' << head;
        }
      }
    }
  }
}

TEST(Rows, ZeroStrideRepeatsARow) {
  const float row[2] = {3.0f, -4.0f};
  const tq::ConstRows rows(row, tq::DType::f32, 1000, 1000, 2, 0, 0);
  float out[2] = {};
  tq::load_row(rows, 999, 999, out);
  EXPECT_EQ(out[0], 3.0f);
  EXPECT_EQ(out[1], -4.0f);
}

TEST(Rows, NoDimensionTouchesNothing) {
  const tq::ConstRows rows(static_cast<const float*>(nullptr), 1, 1, 0);
  float out = 5.0f;
  tq::load_row(rows, 0, 0, &out);
  EXPECT_EQ(out, 5.0f);
  EXPECT_TRUE(tq::is_storable_row(rows, 0, 0));
  EXPECT_TRUE(tq::is_finite_row(rows, 0, 0));
}

TEST(Rows, EveryHalfLoadsExactlyAndRoundsOnceToBfloat16) {
  std::vector<tq::half> in(65536);
  for (std::size_t i = 0; i < in.size(); ++i) in[i].bits = std::uint16_t(i);
  const tq::ConstRows rows(in.data(), 1, 1, in.size());
  std::vector<float> wide(in.size());
  std::vector<tq::bfloat16> narrow(in.size());
  tq::load_row(rows, 0, 0, wide.data());
  tq::load_row(rows, 0, 0, narrow.data());
  for (std::size_t i = 0; i < in.size(); ++i) {
    const float x = tq::to_float(in[i]);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), std::bit_cast<std::uint32_t>(x)) << i;
    ASSERT_EQ(narrow[i].bits, tq::to_bfloat16(x).bits) << i;
  }
}

TEST(Rows, ConversionsRoundToNearestEven) {
  const float in[4] = {1.00390625f, 1.01171875f, 65520.0f, 0x1p-24f};
  tq::bfloat16 loaded[4];
  tq::load_row(tq::ConstRows(in, 1, 1, 4), 0, 0, loaded);
  EXPECT_EQ(loaded[0].bits, 0x3f80);
  EXPECT_EQ(loaded[1].bits, 0x3f82);
  tq::bfloat16 b[4];
  tq::store_row(tq::Rows(b, 1, 1, 4), 0, 0, in);
  EXPECT_EQ(b[0].bits, 0x3f80);
  EXPECT_EQ(b[1].bits, 0x3f82);
  tq::half h[4];
  tq::store_row(tq::Rows(h, 1, 1, 4), 0, 0, in);
  EXPECT_EQ(h[2].bits, 0x7c00);
  EXPECT_EQ(h[3].bits, 0x0001);
}

TEST(Rows, Bfloat16RowsAreCopiedBitByBit) {
  const tq::bfloat16 in[3] = {{0x8000}, {0x0001}, {0x7f81}};
  tq::bfloat16 out[3] = {};
  tq::load_row(tq::ConstRows(in, 1, 1, 3), 0, 0, out);
  EXPECT_EQ(out[0].bits, 0x8000);
  EXPECT_EQ(out[1].bits, 0x0001);
  EXPECT_EQ(out[2].bits, 0x7f81);
}

TEST(Rows, StorableUpTo2To96AfterRounding) {
  struct Case {
    std::uint32_t bits;
    bool finite, storable;
  };
  const std::uint32_t limit = (96u + 127u) << 23;
  const Case cases[] = {
      {0, true, true},
      {1, true, true},
      {limit, true, true},
      {limit + 0x7fffu, true, true},
      {limit + 0x8000u, true, true},  // a tie, rounds down to the even 2^96
      {limit + 0x8001u, true, false},
      {limit + 0x10000u, true, false},
      {0x7f7fffffu, true, false},
      {0x7f800000u, false, false},
      {0x7f800001u, false, false},
      {0x7fc00000u, false, false},
      {0x7fffffffu, false, false},
  };
  for (const std::size_t dim : {1u, 7u, 8u, 15u, 16u, 17u, 33u, 64u, 100u}) {
    for (std::size_t at = 0; at < dim; ++at) {
      for (const Case& c : cases) {
        for (const std::uint32_t sign : {0u, 0x80000000u}) {
          // Rows 0 and 2 around the row in question hold NaN: neighbours must not matter.
          std::vector<float> in(3 * dim, std::numeric_limits<float>::quiet_NaN());
          std::fill(in.begin() + std::ptrdiff_t(dim), in.begin() + std::ptrdiff_t(2 * dim), -1.5f);
          in[dim + at] = float_of(c.bits | sign);
          const tq::ConstRows rows(in.data(), 1, 3, dim);
          ASSERT_EQ(tq::is_storable_row(rows, 0, 1), c.storable) << std::hex << c.bits << " at " << at;
          ASSERT_EQ(tq::is_finite_row(rows, 0, 1), c.finite) << std::hex << c.bits << " at " << at;
        }
      }
    }
  }
}

TEST(Rows, SixteenBitRowsAreCheckedForEveryPattern) {
  for (std::uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const std::uint32_t magnitude = bits & 0x7fffu;
    const tq::half h[3] = {{0}, {std::uint16_t(bits)}, {0x3c00}};
    const tq::ConstRows halves(h, 1, 1, 3);
    ASSERT_EQ(tq::is_finite_row(halves, 0, 0), magnitude < 0x7c00u) << bits;
    ASSERT_EQ(tq::is_storable_row(halves, 0, 0), magnitude < 0x7c00u) << bits;
    const tq::bfloat16 b[3] = {{0}, {std::uint16_t(bits)}, {0x3f80}};
    const tq::ConstRows bfloats(b, 1, 1, 3);
    ASSERT_EQ(tq::is_finite_row(bfloats, 0, 0), magnitude < 0x7f80u) << bits;
    ASSERT_EQ(tq::is_storable_row(bfloats, 0, 0), magnitude <= 0x6f80u) << bits;
  }
}
