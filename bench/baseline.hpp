// What the compressed cache is measured against: logits and decode attention over plain f32 and f16 rows, as fast as we
// can make them on this CPU, and Eigen's matrix-vector product. Rows are contiguous, [tokens][dim]; f16 is passed as
// its bits. Nothing here includes a turboquant header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace baseline {

enum class Isa : std::uint8_t { portable, avx2, avx512 };

/// True if this build has the kernels of `isa` and this CPU runs them. avx2 stands for AVX2 + FMA + F16C, avx512 for
/// AVX-512 F + BW + DQ + VL (Eigen's kernels use more than F).
bool is_supported(Isa isa);
/// The widest supported one.
Isa best_isa();
std::string_view to_string(Isa isa);

/// out[t] = sum over i of query[i] * keys[t][i], t < tokens. `dim`: a multiple of 16; 128 has kernels of its own.
/// Requires is_supported(isa). f32 sums in an order of its own; f16 values are finite.
void compute_logits_f32(Isa isa, const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                        float* out);
void compute_logits_f16(Isa isa, const float* query, const std::uint16_t* keys, std::size_t tokens, std::size_t dim,
                        float* out);

/// The same by Eigen (row-major Map times a vector), compiled for `isa`.
void compute_logits_eigen(Isa isa, const float* query, const float* keys, std::size_t tokens, std::size_t dim,
                          float* out);

/// out[n] = sum over t of softmax over t (scale * queries[n].keys[t]) * values[t], by Eigen's matrix products, in
/// blocks of tokens with an online softmax. queries, out: [count][dim].
void prefill_eigen(Isa isa, const float* queries, std::size_t count, const float* keys, const float* values,
                   std::size_t tokens, std::size_t dim, float scale, float* out);

/// True for the head groups that attend_f32 and attend_f16 serve: 1, 2, 4 and 8.
bool is_supported_group(std::size_t heads);

/// One decode step over one KV head: out[h] = sum over t of softmax over t (scale * queries[h].keys[t]) * values[t], h
/// < heads. Online softmax in blocks; a key or value row is loaded and widened once for all heads. Queries and out:
/// [heads][dim]. Requires is_supported(isa), is_supported_group(heads), `dim` a multiple of 16 and at most 1024, tokens
/// > 0. exp is accurate to about 1e-6 relative.
void attend_f32(Isa isa, const float* queries, std::size_t heads, const float* keys, const float* values,
                std::size_t tokens, std::size_t dim, float scale, float* out);
void attend_f16(Isa isa, const float* queries, std::size_t heads, const std::uint16_t* keys,
                const std::uint16_t* values, std::size_t tokens, std::size_t dim, float scale, float* out);

/// Reads `bytes` (a multiple of 512, 64-byte aligned) once and returns a value that depends on all of them: the speed
/// that memory gives.
std::uint32_t read_memory(Isa isa, const void* memory, std::size_t bytes);

}  // namespace baseline
