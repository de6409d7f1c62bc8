// The baseline loops of baseline_kernels.inc for each instruction set, and the choice between them at run time.
#include "baseline.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns of the deliberately undefined operands inside its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Unrolled checks would take a sanitizer's build two minutes.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define BENCH_UNROLL
#endif
#endif
#if defined(BENCH_UNROLL) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define BENCH_UNROLL
#elif defined(__clang__)
#define BENCH_UNROLL _Pragma("clang loop unroll(full)")
#else
#define BENCH_UNROLL _Pragma("GCC unroll 32")
#endif
#define BENCH_INLINE __attribute__((always_inline))

namespace baseline {

namespace {

// Bytes of keys (and of values) that one round of the online softmax takes, at 128 coordinates; fits L1 together with
// the values.
inline constexpr std::size_t kBlockBytes = 8192;

namespace portable {

// Two 4-lane vectors of the compiler's own: SSE2 or NEON without any flag.
using Four = float __attribute__((vector_size(16)));
using EightShorts = std::uint16_t __attribute__((vector_size(16)));
using FourInts = std::int32_t __attribute__((vector_size(16)));
struct Vec {
  Four low, high;
};
inline constexpr std::size_t kWidth = 8, kAccumulators = 8;

inline Vec broadcast(float x) { return {Four{x, x, x, x}, Four{x, x, x, x}}; }
inline Vec zero() { return broadcast(0.0F); }
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
#if defined(__aarch64__)
inline Vec load(const std::uint16_t* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
  return {Four(vcvt_f32_f16(vget_low_f16(h))), Four(vcvt_high_f32_f16(h))};
}
#else
// Exponent and mantissa move into place, a multiplication by 2^112 mends the bias, subnormals included.
inline Vec load(const std::uint16_t* p) {
  EightShorts bits;
  std::memcpy(&bits, p, sizeof bits);
  const EightShorts none = {};
  const FourInts word[2] = {
      reinterpret_cast<FourInts>(__builtin_shufflevector(bits, none, 0, 8, 1, 9, 2, 10, 3, 11)),
      reinterpret_cast<FourInts>(__builtin_shufflevector(bits, none, 4, 12, 5, 13, 6, 14, 7, 15))};
  Four out[2];
  for (int k = 0; k < 2; ++k) {
    const Four magnitude = reinterpret_cast<Four>((word[k] & 0x7fff) << 13) * 0x1p112F;
    out[k] = reinterpret_cast<Four>(reinterpret_cast<FourInts>(magnitude) | ((word[k] & 0x8000) << 16));
  }
  return {out[0], out[1]};
}
#endif
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec add(Vec a, Vec b) { return {a.low + b.low, a.high + b.high}; }
inline Vec mul(Vec a, Vec b) { return {a.low * b.low, a.high * b.high}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.low * b.low + c.low, a.high * b.high + c.high}; }
inline Four maximum(Four a, Four b) { return a > b ? a : b; }
inline Vec maximum(Vec a, Vec b) { return {maximum(a.low, b.low), maximum(a.high, b.high)}; }
inline Vec bit_or(Vec a, Vec b) {
  return {reinterpret_cast<Four>(reinterpret_cast<FourInts>(a.low) | reinterpret_cast<FourInts>(b.low)),
          reinterpret_cast<Four>(reinterpret_cast<FourInts>(a.high) | reinterpret_cast<FourInts>(b.high))};
}
inline Four exp2_nonpositive(Four x) {
  x = maximum(x, Four{-126.0F, -126.0F, -126.0F, -126.0F});
  const FourInts whole =
      __builtin_convertvector(x - 0.5F, FourInts);  // truncation of x - 1/2 rounds a nonpositive x to nearest
  const Four r = x - __builtin_convertvector(whole, Four);
  Four y = r * 1.535336188319500e-4F + 1.339887440266574e-3F;
  y = y * r + 9.618437357674640e-3F;
  y = y * r + 5.550332471162809e-2F;
  y = y * r + 2.402264791363012e-1F;
  y = y * r + 6.931472028550421e-1F;
  y = y * r + 1.0F;
  return y * reinterpret_cast<Four>((whole + 127) << 23);
}
inline Vec exp2_nonpositive(Vec x) { return {exp2_nonpositive(x.low), exp2_nonpositive(x.high)}; }
inline float sum(Vec v) {
  const Four s = v.low + v.high;
  return (s[0] + s[1]) + (s[2] + s[3]);
}
inline void reduce8(const Vec* v, float* out) {
  for (int k = 0; k < 8; ++k) out[k] = sum(v[k]);
}
inline std::uint32_t first_word(Vec v) {
  std::uint32_t word;
  std::memcpy(&word, &v, sizeof word);
  return word;
}
#include "baseline_kernels.inc"

}  // namespace portable

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {

using Vec = __m256;
inline constexpr std::size_t kWidth = 8, kAccumulators = 8;

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const std::uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec bit_or(Vec a, Vec b) { return _mm256_or_ps(a, b); }
inline Vec exp2_nonpositive(Vec x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-126.0F));
  const Vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = _mm256_sub_ps(x, whole);
  Vec y = fma(r, broadcast(1.535336188319500e-4F), broadcast(1.339887440266574e-3F));
  y = fma(y, r, broadcast(9.618437357674640e-3F));
  y = fma(y, r, broadcast(5.550332471162809e-2F));
  y = fma(y, r, broadcast(2.402264791363012e-1F));
  y = fma(y, r, broadcast(6.931472028550421e-1F));
  y = fma(y, r, broadcast(1.0F));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}
inline float sum(Vec v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline void reduce8(const Vec* v, float* out) {
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}
inline std::uint32_t first_word(Vec v) {
  return static_cast<std::uint32_t>(_mm256_extract_epi32(_mm256_castps_si256(v), 0));
}
#include "baseline_kernels.inc"

}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {

using Vec = __m512;
inline constexpr std::size_t kWidth = 16, kAccumulators = 16;

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec bit_or(Vec a, Vec b) {
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
inline Vec exp2_nonpositive(Vec x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.0F));
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = _mm512_sub_ps(x, whole);
  Vec y = fma(r, broadcast(1.535336188319500e-4F), broadcast(1.339887440266574e-3F));
  y = fma(y, r, broadcast(9.618437357674640e-3F));
  y = fma(y, r, broadcast(5.550332471162809e-2F));
  y = fma(y, r, broadcast(2.402264791363012e-1F));
  y = fma(y, r, broadcast(6.931472028550421e-1F));
  y = fma(y, r, broadcast(1.0F));
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(y, _mm512_castsi512_ps(power));
}
// Halves the number of 128-bit parts: {a0 + a2, a1 + a3, b0 + b2, b1 + b3}.
inline Vec fold_far(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
// The same for neighbours: {a0 + a1, a2 + a3, b0 + b1, b2 + b3}.
inline Vec fold_near(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}
inline void reduce8(const Vec* v, float* out) {
  const Vec a = fold_near(fold_far(v[0], v[1]), fold_far(v[2], v[3]));  // part k: the four partial sums of v[k]
  const Vec b = fold_near(fold_far(v[4], v[5]), fold_far(v[6], v[7]));  // part k: of v[4 + k]
  const Vec c = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // part k: a, b, a, b
  const Vec d = _mm512_add_ps(c, _mm512_permute_ps(c, 0x4E));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, d)));
}
inline float sum(Vec v) {
  Vec s = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4E));
  s = _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0xB1));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4E));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xB1));
  return _mm512_cvtss_f32(s);
}
inline std::uint32_t first_word(Vec v) {
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm512_castsi512_si128(_mm512_castps_si512(v))));
}
#include "baseline_kernels.inc"

}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // x86_64

template <class T>
void compute_logits(Isa isa, const float* query, const T* keys, std::size_t tokens, std::size_t dim, float* out) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512::compute_logits(query, keys, tokens, dim, out);
  if (isa == Isa::avx2) return avx2::compute_logits(query, keys, tokens, dim, out);
#endif
  static_cast<void>(isa);
  portable::compute_logits(query, keys, tokens, dim, out);
}

template <class T>
void attend(Isa isa, const float* queries, std::size_t heads, const T* keys, const T* values, std::size_t tokens,
            std::size_t dim, float scale, float* out) {
  std::vector<float> scaled(queries, queries + heads * dim);
  for (float& x : scaled) x *= scale * 1.44269504088896F;
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512::attend(scaled.data(), heads, keys, values, tokens, dim, out);
  if (isa == Isa::avx2) return avx2::attend(scaled.data(), heads, keys, values, tokens, dim, out);
#endif
  static_cast<void>(isa);
  portable::attend(scaled.data(), heads, keys, values, tokens, dim, out);
}

}  // namespace

bool is_supported(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) {
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
           __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  }
  // F16C came before AVX2; clang 14 has no name for it.
  if (isa == Isa::avx2) return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
#endif
  return isa == Isa::portable;
}

Isa best_isa() {
  if (is_supported(Isa::avx512)) return Isa::avx512;
  return is_supported(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

std::string_view to_string(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "portable"; }

void compute_logits_f32(Isa isa, const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                        float* out) {
  compute_logits(isa, query, keys, tokens, dim, out);
}
void compute_logits_f16(Isa isa, const float* query, const std::uint16_t* keys, std::size_t tokens, std::size_t dim,
                        float* out) {
  compute_logits(isa, query, keys, tokens, dim, out);
}

bool is_supported_group(std::size_t heads) { return heads == 1 || heads == 2 || heads == 4 || heads == 8; }

void attend_f32(Isa isa, const float* queries, std::size_t heads, const float* keys, const float* values,
                std::size_t tokens, std::size_t dim, float scale, float* out) {
  attend(isa, queries, heads, keys, values, tokens, dim, scale, out);
}
void attend_f16(Isa isa, const float* queries, std::size_t heads, const std::uint16_t* keys,
                const std::uint16_t* values, std::size_t tokens, std::size_t dim, float scale, float* out) {
  attend(isa, queries, heads, keys, values, tokens, dim, scale, out);
}

std::uint32_t read_memory(Isa isa, const void* memory, std::size_t bytes) {
  const float* floats = static_cast<const float*>(memory);
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512::read_memory(floats, bytes / 4);
  if (isa == Isa::avx2) return avx2::read_memory(floats, bytes / 4);
#endif
  static_cast<void>(isa);
  return portable::read_memory(floats, bytes / 4);
}

}  // namespace baseline
