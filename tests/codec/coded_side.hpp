// One side of one head of a page, encoded without a container, for tests of codecs.
#pragma once

#include <turboquant/turboquant.hpp>

#include "oracle/random.hpp"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace test {

using Kernels = turboquant::kernels::Portable;

// Owns the sections of one side; `fill` is what they and the scratch hold before encoding.
template <class C>
struct CodedSide {
  turboquant::Side side;
  std::size_t dim, page_tokens;
  // Trellis codes want 16 readable bytes before the first fragment, as pages have.
  static constexpr std::size_t kBefore = 64;
  std::vector<turboquant::bfloat16> scales, zero_points;
  std::vector<std::uint8_t> memory;

  CodedSide(turboquant::Side which, const std::vector<float>& rows, std::size_t width, std::size_t page,
            turboquant::EncodeOptions options = {}, std::uint8_t fill = 0xaa)
      : side(which),
        dim(width),
        page_tokens(page),
        scales(page, turboquant::bfloat16{0x7fc0}),
        zero_points(page, turboquant::bfloat16{0x7fc0}),
        memory(kBefore + page / 16 * (width / 16) * turboquant::layout::fragment_bytes(C::bits), fill) {
    std::vector<std::uint8_t> scratch(C::scratch_bytes(page_tokens, dim) + 64, fill);
    void* aligned = scratch.data();
    std::size_t space = scratch.size();
    aligned = std::align(64, C::scratch_bytes(page_tokens, dim), aligned, space);
    turboquant::encode_rows<C, Kernels>(side, rows.data(), rows.size() / dim, options, target(),
                                        static_cast<std::uint8_t*>(aligned));
  }

  turboquant::CodedTarget target() {
    turboquant::CodedTarget t;
    t.dim = dim;
    t.page_tokens = page_tokens;
    t.scales = scales.data();
    t.zero_points = C::zero_points ? zero_points.data() : nullptr;
    t.fragments = memory.data() + kBefore;
    return t;
  }

  turboquant::kernels::CodedPart part() const {
    turboquant::kernels::CodedPart p;
    p.dim = dim;
    p.page_tokens = page_tokens;
    p.scales = scales.data();
    p.zero_points = C::zero_points ? zero_points.data() : nullptr;
    p.fragments = memory.data() + kBefore;
    return p;
  }

  std::vector<float> decode(std::size_t token) const {
    std::vector<float> out(dim);
    Kernels::decode_row(side, part(), C::codes(), token, out.data());
    return out;
  }
};

inline std::vector<float> gaussian_rows(std::uint64_t seed, std::size_t count, std::size_t dim) {
  std::vector<float> rows(count * dim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(oracle::gaussian(seed, 77, i));
  return rows;
}

// |x - y|^2 / |x|^2.
inline double relative_error(const float* x, const std::vector<float>& y) {
  double error = 0, energy = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double difference = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    error += difference * difference;
    energy += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  return error / energy;
}

}  // namespace test
