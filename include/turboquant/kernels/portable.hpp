// Every kernel in portable C++: declared here once with formula, shapes and bounds, and the oracle for all other ISAs.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <turboquant/core/dtype.hpp>
#include <turboquant/kernels/operands.hpp>
#include <turboquant/kernels/portable_encode.hpp>
#include <turboquant/kernels/portable_trellis.hpp>
#include <turboquant/kernels/unit_target.hpp>
#include <turboquant/layout/fragment.hpp>

namespace turboquant::kernels {

/// The kernels. `Unit` is UnitTarget. All functions are static, allocate
/// nothing and never throw. Pointers need the alignment of their type only. Bytes written by `center_rows`, `encode_*`
/// and `pack` are the same for every Unit, compiler and optimisation level: element-wise IEEE operations in a fixed
/// order, sums in double or in integers, and no float product that meets an addition unless it is exact.
template <class Unit>
struct PortableKernels : PortableEncoders<Unit>, PortableTrellis<PortableKernels<Unit>> {
  static constexpr const char* name = "portable";

  // ---- rotation
  // ------------------------------------------------------------------------------------------------------

  /// out = R in. in, out: [dim], may be the same. Scaled by a power of two on the way: inputs up to the largest float
  /// in magnitude neither overflow nor vanish before the result does.
  static void rotate(const RotationView& r, const float* in, float* out) { rotate_by(r, in, out, &sylvester); }

  /// out = R^-1 in = diag(signs) H^T in / sqrt(dim). in, out: [dim], may be the same.
  static void rotate_back(const RotationView& r, const float* in, float* out) {
    rotate_back_by(r, in, out, &sylvester);
  }

  // ---- decoding
  // ------------------------------------------------------------------------------------------------------

  /// out[i] = part.center_scale * part.center[i], in the rotated domain; zeros without centring. out: [part.dim].
  static void decode_center(const CodedPart& part, float* out) {
    for (std::size_t i = 0; i < part.dim; ++i) {
      int level = 0;
      if (part.center_bits == 8) level = static_cast<std::int8_t>(part.center[i]);
      if (part.center_bits == 16) {
        level = static_cast<std::int16_t>(static_cast<std::uint16_t>(part.center[2 * i] | part.center[2 * i + 1] << 8));
      }
      out[i] = part.center_scale * static_cast<float>(level);
    }
  }

  /// rows[t][i] -= part.center_scale * part.center[i], as center_rows does it. rows: [count][part.dim].
  static void subtract_center(float* rows, std::size_t count, const CodedPart& part) {
    float center[kMaxRow];
    decode_center(part, center);
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t i = 0; i < part.dim; ++i) rows[t * part.dim + i] -= center[i];
    }
  }

  /// Decodes token `token` of the page into the rotated domain. out: [part.dim].
  template <class Codes>
  static void decode_row(layout::Side side, const CodedPart& part, const Codes& codes, std::size_t token, float* out) {
    decode_center(part, out);
    const std::size_t groups = part.dim / 16, tile = token / 16;
    const float scale = to_float(part.scales[token]);
    const float zero = part.zero_points != nullptr ? to_float(part.zero_points[token]) : 0.0f;
    std::int16_t levels[layout::kFragmentCodes];
    for (std::size_t group = 0; group < groups; ++group) {
      unpack(fragment_at(side, part, codes, tile, group), codes, history_of(side, part, codes, tile, group), levels);
      for (std::size_t c = 0; c < 16; ++c) {
        const std::size_t at = side == layout::Side::key ? c * 16 + token % 16 : token % 16 * 16 + c;
        out[group * 16 + c] += scale * static_cast<float>(levels[at]) + zero;
      }
    }
  }

  // ---- queries and logits
  // --------------------------------------------------------------------------------------------

  /// Prepares the rows of the block, whose `normal` holds the queries themselves before: normalises by powers of two,
  /// rotates, rounds to int8 planes, sums them.
  static void prepare_queries(const RotationView& rotation, QueryBlock& block) {
    prepare_queries_by(rotation, block, &rotate);
  }

  // ---- for other ISAs, which bring the inner function: the steps and their order are those of all
  // --------------------------

  template <class Sylvester>
  static void rotate_by(const RotationView& r, const float* in, float* out, Sylvester inner) {
    const float back = normalize(in, r.dim, out);
    for (std::size_t i = 0; i < r.dim; ++i) out[i] *= r.signs[i];
    transform(r, out, false, inner);
    scale_back(r.dim, out, back);
  }

  template <class Sylvester>
  static void rotate_back_by(const RotationView& r, const float* in, float* out, Sylvester inner) {
    const float back = normalize(in, r.dim, out);
    transform(r, out, true, inner);
    for (std::size_t i = 0; i < r.dim; ++i) out[i] *= r.signs[i];
    scale_back(r.dim, out, back);
  }

  template <class Rotate>
  static void prepare_queries_by(const RotationView& rotation, QueryBlock& block, Rotate rotate_row) {
    for (std::size_t r = 0; r < block.rows; ++r) prepare_query(rotation, block, r, rotate_row);
  }
  template <class Rotate>
  static void prepare_query(const RotationView& rotation, QueryBlock& block, std::size_t r, Rotate rotate_row) {
    const std::size_t dim = block.dim;  // of its own: what is written as bytes may lie anywhere
    const bool one_plane = block.plane_count == 1;
    float* normal = block.normal + r * dim;
    float* rotated = block.rotated + r * dim;
    std::int8_t* planes = block.planes + r * block.plane_count * dim;
    block.unit[r] = normalize(normal, dim, normal);
    rotate_row(rotation, normal, rotated);
    const float largest = largest_magnitude(rotated, dim);
    const float range = one_plane ? 127.0f : 16319.0f;  // 128 * 127 + 63
    block.step[r] = largest / range;
    const float inverse = largest > 0 ? range / largest : 0.0f;
    float scaled[kMaxRow];
    for (std::size_t i = 0; i < dim; ++i) scaled[i] = rotated[i] * inverse;
    forget(scaled);  // rounding begins with an addition
    if (one_plane) {
      for (std::size_t i = 0; i < dim; ++i) {
        planes[i] = static_cast<std::int8_t>((std::min)((std::max)(round_even(scaled[i]), -127), 127));
      }
    } else {
      for (std::size_t i = 0; i < dim; ++i) {
        const std::int32_t level = round_even(scaled[i]);
        const std::int32_t high = (std::min)((std::max)((level + 64) >> 7, -127), 127);
        planes[i] = static_cast<std::int8_t>(high);
        planes[dim + i] = static_cast<std::int8_t>((std::min)((std::max)(level - high * 128, -64), 63));
      }
    }
    for (std::size_t p = 0; p < block.plane_count; ++p) {
      std::int32_t sum = 0;
      for (std::size_t i = 0; i < dim; ++i) sum += planes[p * dim + i];
      block.sums[r * block.plane_count + p] = sum;
    }
  }

  /// logits[(r - row_begin) * stride + t] = factor[r] * <q_r, k_t> for the tokens t of the tiles [tile_begin, tile_end)
  /// of a page, in units of block.unit, saturated to the largest finite float:
  ///   <q, k_t> = step scale_t (sum of plane_i level_ti) + sum of rotated_i center_i
  /// The integer sum is exact: at most 1024 * 127 * 16319 < 2^31.
  template <class Codes>
  static void score(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                    const QueryBlock& block, std::size_t row_begin, std::size_t row_end, const float* factor,
                    float* logits, std::size_t stride) {
    const std::size_t groups = part.dim / 16;
    float center[kMaxRow];
    if (part.center_bits != 0) decode_center(part, center);
    std::int16_t levels[layout::kFragmentCodes];
    for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
      // Rows in small sets, so that a fragment is unpacked once for several queries and the sums stay on the stack.
      constexpr std::size_t kRows = 8;
      for (std::size_t first = row_begin; first < row_end; first += kRows) {
        const std::size_t rows = (std::min)(kRows, row_end - first);
        std::int32_t sums[kRows][16] = {};
        for (std::size_t group = 0; group < groups; ++group) {
          unpack(fragment_at(layout::Side::key, part, codes, tile, group), codes,
                 history_of(layout::Side::key, part, codes, tile, group), levels);
          for (std::size_t r = 0; r < rows; ++r) {
            const std::int8_t* plane = block.planes + (first + r) * block.plane_count * block.dim + group * 16;
            for (std::size_t c = 0; c < 16; ++c) {
              const std::int32_t q = block.plane_count == 1 ? plane[c] : plane[c] * 128 + plane[block.dim + c];
              for (std::size_t lane = 0; lane < 16; ++lane) sums[r][lane] += q * levels[c * 16 + lane];
            }
          }
        }
        for (std::size_t r = 0; r < rows; ++r) {
          const std::size_t row = first + r;
          const float shared = part.center_bits != 0 ? dot(block.rotated + row * block.dim, center, block.dim) : 0.0f;
          float* out = logits + (row - row_begin) * stride + tile * 16;
          for (std::size_t lane = 0; lane < 16; ++lane) {
            const float scale = block.step[row] * to_float(part.scales[tile * 16 + lane]);
            out[lane] = saturate((scale * static_cast<float>(sums[r][lane]) + shared) * factor[row]);
          }
        }
      }
    }
  }

  /// score of all rows for the whole pages `parts`, of one shape, whose logits lie behind one another:
  /// logits[r * stride + p * page_tokens + t] for token t of page p. Requires a page.
  template <class Codes>
  static void score_pages(std::span<const CodedPart> parts, const Codes& codes, const QueryBlock& block,
                          const float* factor, float* logits, std::size_t stride) {
    score_each<PortableKernels>(parts, codes, block, factor, logits, stride);
  }

  /// The raw twin of score: keys [count][dim] in bf16, not rotated. logits[(r - row_begin) * stride + t], t < count.
  static void score_raw(const bfloat16* keys, std::size_t count, const QueryBlock& block, std::size_t row_begin,
                        std::size_t row_end, const float* factor, float* logits, std::size_t stride) {
    float key[kMaxRow];
    for (std::size_t t = 0; t < count; ++t) {
      widen(keys + t * block.dim, block.dim, key);
      for (std::size_t r = row_begin; r < row_end; ++r) {
        logits[(r - row_begin) * stride + t] = saturate(dot(block.normal + r * block.dim, key, block.dim) * factor[r]);
      }
    }
  }

  // ---- softmax
  // -------------------------------------------------------------------------------------------------------

  /// logit -> cap tanh(logit / cap), for [begin, end). Relative error below 1e-6.
  static void soft_cap(float* logits, std::size_t begin, std::size_t end, float cap) {
    for (std::size_t t = begin; t < end; ++t) {
      const float x = std::abs(logits[t] / cap), x2 = x * x;
      const float e = exp_negative(-2.0f * x);
      // Near zero 1 - e cancels; there four terms of the series do.
      const float series = x * (1.0f - x2 * (1.0f / 3 - x2 * (2.0f / 15 - x2 * (17.0f / 315))));
      const float magnitude = cap * (x < 0.2f ? series : (1.0f - e) / (1.0f + e));
      logits[t] = logits[t] < 0 ? -magnitude : magnitude;
    }
  }

  /// One step of the online softmax over the logits [begin, end), of which only [low, high) are visible (others count
  /// as masked and become 0): logits[t] -> p[t] = exp(logits[t] - state.largest), state updated. Returns the factor
  /// exp(old largest - new largest) by which earlier accumulators must be multiplied. Requires low < high.
  static float softmax_step(float* logits, std::size_t begin, std::size_t end, std::size_t low, std::size_t high,
                            SoftmaxState& state) {
    float largest = state.sum > 0 ? state.largest : logits[low];
    for (std::size_t t = low; t < high; ++t) largest = (std::max)(largest, logits[t]);
    const float factor = state.sum > 0 ? exp_negative(state.largest - largest) : 0.0f;
    float lanes[16] = {};
    for (std::size_t t = begin; t < low; ++t) logits[t] = 0;
    for (std::size_t t = low; t < high; ++t) logits[t] = exp_negative(logits[t] - largest);
    for (std::size_t t = high; t < end; ++t) logits[t] = 0;
    for (std::size_t t = begin; t < end; ++t) lanes[t % 16] += logits[t];
    state.sum = state.sum * factor + tree_sum(lanes);
    state.largest = largest;
    return factor;
  }

  /// A step of the online softmax covers the coded tokens of `parts`, which have one shape, behind one another: column
  /// c is token c % page_tokens of part c / page_tokens. Columns [begin, end) are whole tiles, from the first part on
  /// and up to the last one; there are at most kMaxPageTokens.
  ///
  /// Weights for the values of a step: weights[c] = round(p[c] scale_c / coefficient) in [0, 16383], the largest of the
  /// step being 16383. sums[k * sum_stride] belongs to part k; the coefficient is the same for all.
  static void weigh(std::span<const CodedPart> parts, const float* p, std::size_t begin, std::size_t end,
                    std::int16_t* weights, WeightSums* sums, std::size_t sum_stride) {
    float largest = 0;
    float product[kMaxPage];
    for_parts(parts, begin, end, [&](std::size_t k, std::size_t from, std::size_t until) {
      const CodedPart& part = parts[k];
      const std::size_t first = k * part.page_tokens;
      float lanes[16] = {}, zero_lanes[16] = {};
      for (std::size_t c = from; c < until; ++c) {
        product[c] = p[c] * to_float(part.scales[c - first]);
        largest = (std::max)(largest, product[c]);
        lanes[c % 16] += p[c];
        if (part.zero_points != nullptr) zero_lanes[c % 16] += p[c] * to_float(part.zero_points[c - first]);
      }
      sums[k * sum_stride] = WeightSums{0, tree_sum(lanes), tree_sum(zero_lanes)};
    });
    const float coefficient = largest / static_cast<float>(kWeightMax);
    for (std::size_t k = 0; k < parts.size(); ++k) sums[k * sum_stride].coefficient = coefficient;
    for (std::size_t c = begin; c < end; ++c) {
      const float relative = largest > 0 ? product[c] / largest : 0.0f;
      weights[c] = static_cast<std::int16_t>(round_even(relative * static_cast<float>(kWeightMax)));
    }
  }

  /// softmax_step and weigh, with their bits, for rows that see all columns [begin, end) of a step, and
  /// acc[r][i] *= factor_r where a row has seen keys before. logits, which are lost, and weights: [rows][stride]; sums:
  /// [parts][rows].
  static void soften_rows(std::span<const CodedPart> parts, std::size_t begin, std::size_t end, std::size_t rows,
                          float* logits, std::size_t stride, SoftmaxState* states, std::int16_t* weights,
                          WeightSums* sums, float* acc, std::size_t dim) {
    soften_each<PortableKernels>(parts, begin, end, rows, logits, stride, states, weights, sums, acc, dim);
  }

  // ---- accumulation
  // --------------------------------------------------------------------------------------------------

  /// out[r * out_stride + i] += coefficient_r (sum of weights_rc level_ci) + sum over parts of (probability_r center_i
  /// + zero_point_r) for the columns [begin, end) of a step, in the rotated domain; weights: [rows][weight_stride];
  /// sums: [parts][sum_stride]. Rows of probability 0 are left alone. Integer sums are exact: 256 * 16383 * 127 < 2^31.
  template <class Codes>
  static void accumulate(std::span<const CodedPart> parts, const Codes& codes, std::size_t begin, std::size_t end,
                         std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                         const WeightSums* sums, std::size_t sum_stride, float* out, std::size_t out_stride) {
    accumulate_each<PortableKernels>(parts, codes, begin, end, rows, weights, weight_stride, sums, sum_stride, out,
                                     out_stride);
  }

  /// The raw twin of accumulate: out[r * out_stride + i] += sum of p_rt values[t][i]; values [count][dim] in bf16,
  /// p: [rows][p_stride]. Tokens with p == 0 are left out for that row.
  static void accumulate_raw(const bfloat16* values, std::size_t count, std::size_t dim, std::size_t rows,
                             const float* p, std::size_t p_stride, float* out, std::size_t out_stride) {
    float value[kMaxRow];
    for (std::size_t t = 0; t < count; ++t) {
      widen(values + t * dim, dim, value);
      for (std::size_t r = 0; r < rows; ++r) {
        const float probability = p[r * p_stride + t];
        if (!(probability > 0)) continue;
        float* to = out + r * out_stride;
        for (std::size_t i = 0; i < dim; ++i) to[i] += probability * value[i];
      }
    }
  }

  /// out[i] = a out[i] + b other[i]. Requires dim a multiple of 16.
  static void combine(float* out, float a, const float* other, float b, std::size_t dim) {
    for (; dim != 0; dim -= 16, out += 16, other += 16) {
      // Copies of a fixed size: the loop becomes vectors at -O2 too.
      float x[16], y[16];
      std::memcpy(x, out, sizeof x);
      std::memcpy(y, other, sizeof y);
      for (std::size_t i = 0; i < 16; ++i) x[i] = a * x[i] + b * y[i];
      std::memcpy(out, x, sizeof x);
    }
  }

  /// exp(x) for x <= 0, relative error below 2e-7; 0 below -87, so that no weight is subnormal. One polynomial, fixed
  /// order.
  static float exp_negative(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const auto n = static_cast<std::int32_t>(clamped * 1.44269504f - 0.5f);
    const float nf = static_cast<float>(n);
    const float f = (clamped - nf * 0.693359375f) - nf * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * f * f + f + 1.0f;
    const float power = std::bit_cast<float>((n + 127) << 23);
    return x < -87.0f ? 0.0f : y * power;
  }

 protected:
  // score_pages, page by page, of kernels without one of their own.
  template <class Kernels, class Codes>
  static void score_each(std::span<const CodedPart> parts, const Codes& codes, const QueryBlock& block,
                         const float* factor, float* logits, std::size_t stride) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      Kernels::score(parts[p], codes, 0, parts[p].page_tokens / 16, block, 0, block.rows, factor,
                     logits + p * parts[p].page_tokens, stride);
    }
  }

  // visit(k, from, until): the columns of [begin, end) that belong to part k.
  template <class Visit>
  static void for_parts(std::span<const CodedPart> parts, std::size_t begin, std::size_t end, Visit visit) {
    for (std::size_t k = 0; k < parts.size(); ++k) {
      const std::size_t first = k * parts[k].page_tokens;
      visit(k, (std::max)(begin, first), (std::min)(end, first + parts[k].page_tokens));
    }
  }

  // soften_rows, row by row, of kernels without one of their own.
  template <class Kernels>
  static void soften_each(std::span<const CodedPart> parts, std::size_t begin, std::size_t end, std::size_t rows,
                          float* logits, std::size_t stride, SoftmaxState* states, std::int16_t* weights,
                          WeightSums* sums, float* acc, std::size_t dim) {
    for (std::size_t r = 0; r < rows; ++r) {
      const bool fresh = !(states[r].sum > 0);
      const float factor = Kernels::softmax_step(logits + r * stride, begin, end, begin, end, states[r]);
      if (!fresh && factor != 1.0f) {
        for (std::size_t i = 0; i < dim; ++i) acc[r * dim + i] *= factor;
      }
      Kernels::weigh(parts, logits + r * stride, begin, end, weights + r * stride, sums + r, rows);
    }
  }

  // accumulate, part by part, of kernels that have it for one part.
  template <class Kernels, class Codes>
  static void accumulate_each(std::span<const CodedPart> parts, const Codes& codes, std::size_t begin, std::size_t end,
                              std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                              const WeightSums* sums, std::size_t sum_stride, float* out, std::size_t out_stride) {
    for_parts(parts, begin, end, [&](std::size_t k, std::size_t from, std::size_t until) {
      const std::size_t first = k * parts[k].page_tokens;
      Kernels::accumulate_part(parts[k], codes, (from - first) / 16, (until - first) / 16, rows, weights + first,
                               weight_stride, sums + k * sum_stride, out, out_stride);
    });
  }

  // The columns of one part, whose token t is column t of `weights`.
  template <class Codes>
  static void accumulate_part(const CodedPart& part, const Codes& codes, std::size_t tile_begin, std::size_t tile_end,
                              std::size_t rows, const std::int16_t* weights, std::size_t weight_stride,
                              const WeightSums* sums, float* out, std::size_t out_stride) {
    const std::size_t groups = part.dim / 16;
    constexpr std::size_t kRows = 8;
    std::int16_t levels[layout::kFragmentCodes];
    float center[kMaxRow];
    decode_center(part, center);
    for (std::size_t first = 0; first < rows; first += kRows) {
      const std::size_t set = (std::min)(kRows, rows - first);
      for (std::size_t group = 0; group < groups; ++group) {
        std::int32_t acc[kRows][16] = {};
        for (std::size_t tile = tile_begin; tile < tile_end; ++tile) {
          unpack(fragment_at(layout::Side::value, part, codes, tile, group), codes,
                 history_of(layout::Side::value, part, codes, tile, group), levels);
          for (std::size_t r = 0; r < set; ++r) {
            if (!(sums[first + r].coefficient > 0)) continue;
            for (std::size_t t = 0; t < 16; ++t) {
              const std::int32_t w = weights[(first + r) * weight_stride + tile * 16 + t];
              for (std::size_t lane = 0; lane < 16; ++lane) acc[r][lane] += w * levels[t * 16 + lane];
            }
          }
        }
        for (std::size_t r = 0; r < set; ++r) {
          const WeightSums& sum = sums[first + r];
          if (!(sum.probability > 0)) continue;
          float* to = out + (first + r) * out_stride + group * 16;
          for (std::size_t lane = 0; lane < 16; ++lane) {
            to[lane] += sum.coefficient * static_cast<float>(acc[r][lane]) +
                        (sum.probability * center[group * 16 + lane] + sum.zero_point);
          }
        }
      }
    }
  }

  friend struct PortableTrellis<PortableKernels>;
  using PortableTrellis<PortableKernels>::unpack;

  using Encoders = PortableEncoders<Unit>;
  using Encoders::exponent;
  using Encoders::final_scale;
  using Encoders::fragment_index;
  using Encoders::kMaxRow;
  using Encoders::largest_magnitude;
  using Encoders::power_of_two;
  using Encoders::round_even;
  using Encoders::to_fixed;

  static constexpr std::size_t kMaxPage = layout::kMaxPageTokens;

  // Makes the compiler forget what x holds, so that no float product stored there is fused with a later addition.
  static void forget(float* x) {
#if defined(__GNUC__)
    __asm__ volatile("" : : "r"(x) : "memory");
#else
    static_cast<void>(x);
#endif
  }

  static float saturate(float x) { return (std::min)((std::max)(x, -3.402823466e38f), 3.402823466e38f); }

  // out = in / f with f a power of two such that the largest magnitude comes into [1, 4). Returns f.
  static float normalize(const float* in, std::size_t dim, float* out) {
    const int e = (std::min)(exponent(largest_magnitude(in, dim)), 126);
    const float down = power_of_two(-e);
    for (std::size_t i = 0; i < dim; ++i) out[i] = in[i] * down;
    return power_of_two(e);
  }

  static void scale_back(std::size_t dim, float* x, float factor) {
    const float norm = 1.0f / std::sqrt(static_cast<float>(dim));
    for (std::size_t i = 0; i < dim; ++i) x[i] = x[i] * norm * factor;
    forget(x);
  }

  // x = H x, or H^T x.
  template <class Sylvester>
  static void transform(const RotationView& r, float* x, bool transposed, Sylvester sylvester_of) {
    const std::size_t inner = r.dim / r.order;
    for (std::size_t block = 0; block < r.dim; block += inner) sylvester_of(x + block, inner);
    if (r.order == 1) return;
    float mixed[kMaxRow];
    for (std::size_t a = 0; a < r.order; ++a) {
      float* to = mixed + a * inner;
      std::copy_n(x, inner, to);  // column 0 of base and transposed base enters with its sign below
      const float sign0 = r.base[transposed ? 0 * r.order + a : a * r.order];
      for (std::size_t i = 0; i < inner; ++i) to[i] *= sign0;
      for (std::size_t b = 1; b < r.order; ++b) {
        const float sign = r.base[transposed ? b * r.order + a : a * r.order + b];
        const float* from = x + b * inner;
        if (sign > 0) {
          for (std::size_t i = 0; i < inner; ++i) to[i] += from[i];
        } else {
          for (std::size_t i = 0; i < inner; ++i) to[i] -= from[i];
        }
      }
    }
    std::copy_n(mixed, r.dim, x);
  }

  // In-place Walsh-Hadamard transform of n = 2^k values, butterflies of growing distance.
  static void sylvester(float* x, std::size_t n) {
    for (std::size_t h = 1; h < n; h *= 2) {
      for (std::size_t block = 0; block < n; block += 2 * h) {
        float* low = x + block;
        float* high = low + h;
        if (h >= 16) {
          for (std::size_t i = 0; i < h; i += 16) butterfly<16>(low + i, high + i);
        } else if (h >= 4) {
          for (std::size_t i = 0; i < h; i += 4) butterfly<4>(low + i, high + i);
        } else {
          for (std::size_t i = 0; i < h; ++i) butterfly<1>(low + i, high + i);
        }
      }
    }
  }

  // low, high = low + high, low - high, element by element: N pairs, so that compilers make vectors of them.
  template <std::size_t N>
  static void butterfly(float* low, float* high) {
    float a[N], b[N];
    std::memcpy(a, low, sizeof(a));
    std::memcpy(b, high, sizeof(b));
    for (std::size_t i = 0; i < N; ++i) low[i] = a[i] + b[i];
    for (std::size_t i = 0; i < N; ++i) high[i] = a[i] - b[i];
  }

  template <class Codes>
  static const std::uint8_t* fragment_at(layout::Side side, const CodedPart& part, const Codes&, std::size_t tile,
                                         std::size_t group) {
    return part.fragments + fragment_index(side, tile, group, part.page_tokens / 16, part.dim / 16) *
                                layout::fragment_bytes(Codes::bits);
  }

  // The last 16 bytes of the fragment before, which codes with a memory continue. A tile of keys and the whole section
  // of values are closed: the last fragment comes before the first.
  template <class Codes>
  static const std::uint8_t* history_of(layout::Side side, const CodedPart& part, const Codes&, std::size_t tile,
                                        std::size_t group) {
    const std::size_t tiles = part.page_tokens / 16, groups = part.dim / 16;
    const std::size_t index = fragment_index(side, tile, group, tiles, groups);
    std::size_t end = index;
    if (side == layout::Side::key && group == 0) end = index + groups;
    if (side == layout::Side::value && index == 0) end = tiles * groups;
    return part.fragments + end * layout::fragment_bytes(Codes::bits) - 16;
  }

  // levels[16 * depth + lane]: depth is the coordinate of a key fragment, the token of a value fragment. The fields are
  // those of layout/fragment.hpp, written out per width; a test compares the two.
  template <unsigned B>
  static void unpack(const std::uint8_t* fragment, const LevelCodes<B>& codes, const std::uint8_t* /*history*/,
                     std::int16_t* levels) {
    for (std::size_t lane = 0; lane < 16; ++lane) {
      for (std::size_t b = 0; b < 4; ++b) {
        const std::size_t i = lane * 4 + b;
        std::int16_t* to = levels + b * 16 + lane;  // slot s is 64 s further
        if constexpr (B == 8) {
          for (std::size_t s = 0; s < 4; ++s) to[64 * s] = static_cast<std::int8_t>(fragment[64 * s + i]);
        } else if constexpr (B == 4) {
          const unsigned first = fragment[i], second = fragment[64 + i];
          to[0] = codes.levels[first & 15u];
          to[64] = codes.levels[first >> 4];
          to[128] = codes.levels[second & 15u];
          to[192] = codes.levels[second >> 4];
        } else if constexpr (B == 1) {
          for (std::size_t s = 0; s < 4; ++s) to[64 * s] = codes.levels[fragment[8 * s + i / 8] >> i % 8 & 1u];
        } else {
          for (std::size_t s = 0; s < 4; ++s) {
            unsigned code = fragment[i] >> 2 * s & 3u;
            if constexpr (B == 3) code |= (fragment[64 + 8 * s + i / 8] >> i % 8 & 1u) << 2;
            to[64 * s] = codes.levels[code];
          }
        }
      }
    }
  }

  static void widen(const bfloat16* in, std::size_t dim, float* out) {
    for (std::size_t i = 0; i < dim; ++i) out[i] = to_float(in[i]);
  }

  static float tree_sum(const float (&lanes)[16]) {
    float sum[16];
    std::copy_n(lanes, 16, sum);
    for (std::size_t half = 8; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) sum[i] += sum[i + half];
    }
    return sum[0];
  }

  // dim is a multiple of 16. 16 partial sums, then a tree.
  static float dot(const float* a, const float* b, std::size_t dim) {
    float lanes[16] = {};
    for (std::size_t i = 0; i < dim; i += 16) {
      for (std::size_t lane = 0; lane < 16; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
    }
    return tree_sum(lanes);
  }
};

using Portable = PortableKernels<UnitTarget>;

}  // namespace turboquant::kernels
