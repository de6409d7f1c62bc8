/* turboquant from C: a C99 interface to the cache, attention and files, for engines in C and for other languages.
 *
 * Every function is the one of the same name in C++, with its rules: which calls may run at the same time
 * (docs/threads-and-memory.md), what a query sees, how far a rollback is exact (docs/engines.md). Left out are pages
 * without the container (PageCodec, plan_pages, attend_pages), single pages (save_page, load_page), config(), isa() and
 * the choice of kernels, which are the best of the CPU, and formats other than the four below.
 *
 * Structures are filled by their tq_init_ function first, then by you: zero is not always the default. Handles are
 * opaque; the destroy functions accept null. Functions of yours that the library calls must not throw. Compiled
 * without exceptions, tq_cache_create, tq_plan_create, tq_attend and tq_plan end the program where memory for what they
 * make, or for a copy of their arguments, is missing; all else is a status as before. */
#ifndef TURBOQUANT_C_H
#define TURBOQUANT_C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TURBOQUANT_C_API __attribute__((visibility("default")))
#elif defined(_WIN32) && defined(turboquant_c_EXPORTS)
#define TURBOQUANT_C_API __declspec(dllexport)
#else
#define TURBOQUANT_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---- */

/* tq_status.code: those of Status in C++. */
enum {
  TQ_OK,
  TQ_OUT_OF_MEMORY,
  TQ_NON_FINITE_INPUT,
  TQ_UNKNOWN_SEQUENCE,
  TQ_BAD_LAYER,
  TQ_BAD_SHAPE,
  TQ_BEHIND_WINDOW,
  TQ_CORRUPT_FILE,
  TQ_FORMAT_MISMATCH,
  TQ_IO_ERROR,
  TQ_BAD_ARGUMENT /* a null pointer, a count beyond all memory, or a configuration that is refused */
};

/* What became of a call. A refused call changed nothing. */
typedef struct tq_status {
  uint32_t code;
  const char* field;       /* what was refused, or ""; never null, never to be freed */
  int64_t expected, found; /* the two numbers that disagree, or both 0 */
  int64_t item;            /* index of the item that was refused; -1: the call as a whole */
} tq_status;

/* The status in words, "bad_shape: item 2: keys.dim: expected 64, found 32", as snprintf: at most `size` bytes with the
 * final zero; returns the length of the whole text. What does not apply is left out. */
TURBOQUANT_C_API size_t tq_message(tq_status status, char* text, size_t size);

/* Version of the library, "major.minor.patch". */
TURBOQUANT_C_API const char* tq_version(void);

/* ---- Rows ---- */

enum { TQ_F32, TQ_F16, TQ_BF16 }; /* tq_rows.type */

/* Rows [tokens][heads][dim]: element (t, h, i) is number t * token_stride + h * head_stride + i from `data` on. Strides
 * are in elements and may be negative or zero; `data` needs no alignment. All zero: no rows. */
typedef struct tq_rows {
  const void* data;
  uint32_t type;
  size_t tokens, heads, dim;
  ptrdiff_t token_stride, head_stride;
} tq_rows;

/* The same, to be written. */
typedef struct tq_rows_out {
  void* data;
  uint32_t type;
  size_t tokens, heads, dim;
  ptrdiff_t token_stride, head_stride;
} tq_rows_out;

/* Contiguous rows. */
TURBOQUANT_C_API tq_rows tq_rows_of(const void* data, uint32_t type, size_t tokens, size_t heads, size_t dim);
TURBOQUANT_C_API tq_rows_out tq_rows_out_of(void* data, uint32_t type, size_t tokens, size_t heads, size_t dim);

/* ---- Cache ---- */

enum { TQ_FORMAT_TQ2, TQ_FORMAT_TQ3, TQ_FORMAT_TQ4, TQ_FORMAT_TQ8 }; /* tq_layer.format */

/* One layer. Default: one KV head of 128, no window, TQ4. */
typedef struct tq_layer {
  uint32_t kv_heads;
  uint32_t head_dim;   /* coordinates of a key: a multiple of 16 of the form 2^k {1, 3, 5, 7, 9}, 32 to 1024 */
  uint32_t value_dim;  /* coordinates of a value, same rule; 0: head_dim */
  uint32_t window;     /* 0: all keys; else a query at p sees keys j with p - j < window */
  uint32_t format;     /* every layer may have its own */
  uint8_t center_bits; /* bits per coordinate of a page's mean: 0 (not centred), 8 or 16 */
} tq_layer;

/* Where slabs come from; both functions null: aligned memory of the C++ library, huge pages advised. */
typedef struct tq_memory_source {
  void* context;
  void* (*allocate)(void* context, size_t bytes, size_t alignment); /* null: there is no more */
  void (*release)(void* context, void* memory, size_t bytes);
} tq_memory_source;

/* A whole cache. Token counts are per sequence. Default: that of CacheConfig, but for the layers, which are none. */
typedef struct tq_config {
  const tq_layer* layers; /* [layer_count], copied */
  size_t layer_count;
  size_t page_tokens;     /* tokens per page: a multiple of 16, at most 256 */
  size_t recent_tokens;   /* at least so many of the newest tokens are read raw (bf16) */
  size_t first_tokens;    /* so many of the first tokens stay raw for ever */
  size_t rollback_tokens; /* truncating by at most so many below the longest length leaves no trace */
  size_t max_bytes;       /* limit for live pages and tails together; 0: none */
  uint64_t seed;          /* of the rotation; part of the meaning of the codes */
  tq_memory_source memory;
} tq_config;

typedef struct tq_memory_use {
  size_t page_bytes, tail_bytes; /* live */
  size_t slab_bytes;             /* taken from the memory source for both, free blocks included */
  size_t table_bytes;
  double bits_per_coordinate; /* of full pages, everything included; mean over all layers' coordinates */
} tq_memory_use;

typedef struct tq_cache tq_cache;
typedef struct tq_sequence {
  uint32_t index, generation; /* a released id is stale for good */
} tq_sequence;

TURBOQUANT_C_API void tq_init_layer(tq_layer* layer);
TURBOQUANT_C_API void tq_init_config(tq_config* config);

/* A refused configuration is TQ_BAD_ARGUMENT, field "config". `why` (may be null) says in words what is wrong and what
 * is supported: at most `why_size` bytes with the final zero; "" where nothing is. Other errors: TQ_OUT_OF_MEMORY.
 * After an error *created is null. */
TURBOQUANT_C_API tq_status tq_cache_create(const tq_config* config, tq_cache** created, char* why, size_t why_size);
/* No call on this cache may be running, and no plan over it may be left. */
TURBOQUANT_C_API void tq_cache_destroy(tq_cache* cache);
TURBOQUANT_C_API tq_memory_use tq_memory(const tq_cache* cache); /* all 0 for a null cache */

TURBOQUANT_C_API tq_status tq_create_sequence(tq_cache* cache, tq_sequence* created);
/* A new sequence with the first `length` tokens of `source`; shares its memory. */
TURBOQUANT_C_API tq_status tq_fork(tq_cache* cache, tq_sequence source, size_t length, tq_sequence* created);
/* Shortens all layers to `length`. By at most rollback_tokens below the longest length that the sequence has had, it
 * leaves no trace. */
TURBOQUANT_C_API tq_status tq_truncate(tq_cache* cache, tq_sequence sequence, size_t length);
/* Removes the positions [begin, end). */
TURBOQUANT_C_API tq_status tq_erase(tq_cache* cache, tq_sequence sequence, size_t begin, size_t end);
/* Of the drafts from `begin` on keeps begin + tokens[i], i < count, ascending: those of a tree that were accepted. */
TURBOQUANT_C_API tq_status tq_keep(tq_cache* cache, tq_sequence sequence, size_t begin, const uint32_t* tokens,
                                   size_t count);
/* So many more tokens cannot fail for lack of memory. */
TURBOQUANT_C_API tq_status tq_reserve(tq_cache* cache, tq_sequence sequence, size_t tokens);
/* Codes the raw tail: for sequences that are idle. */
TURBOQUANT_C_API tq_status tq_seal(tq_cache* cache, tq_sequence sequence);
/* Unknown sequences are ignored, and so are those of a pending plan. */
TURBOQUANT_C_API void tq_release(tq_cache* cache, tq_sequence sequence);
/* Tokens that all layers have; 0 for an unknown sequence. */
TURBOQUANT_C_API size_t tq_length(const tq_cache* cache, tq_sequence sequence);
/* Keys [tokens][kv_heads][head_dim] and values [tokens][kv_heads][value_dim] from `begin` on, decoded; either may be no
 * rows. */
TURBOQUANT_C_API tq_status tq_read(const tq_cache* cache, tq_sequence sequence, size_t layer, size_t begin,
                                   tq_rows_out keys, tq_rows_out values);

/* ---- Attention ---- */

/* How logits are formed, in this order: scale, soft cap, + alibi_slope * (j - p), mask, sink. */
typedef struct tq_params {
  float scale;               /* 0: 1 / sqrt(head_dim) */
  bool causal;               /* default: true */
  float softcap;             /* logit -> softcap tanh(logit / softcap); 0: none */
  const float* alibi_slopes; /* [alibi_count], one per query head; none: null, 0 */
  size_t alibi_count;
  const float* sink_logits; /* [sink_count], one per query head: a logit that takes part in the sum only */
  size_t sink_count;
} tq_params;

#define TURBOQUANT_C_NPOS ((size_t)-1)

/* One sequence's part of a step. Default: nothing to append, nothing to attend to, both positions TURBOQUANT_C_NPOS. */
typedef struct tq_item {
  tq_sequence sequence;
  tq_rows keys, values;      /* new tokens [tokens][kv_heads][dim]; no rows: attend only */
  tq_rows queries;           /* [tokens][heads][head_dim]; no rows: append only */
  tq_rows_out out;           /* [tokens][heads][value_dim] */
  float* lse;                /* [tokens][heads] log-sum-exp, or null; with it the result is a partial, without sinks */
  size_t position;           /* of query 0; npos: length after the append - queries.tokens */
  const uint64_t* tree;      /* [tokens] or null: bit j of word i: draft i descends from draft j, or is it */
  size_t key_begin, key_end; /* attend to a part; default: 0, npos */
} tq_item;

/* Runs body(argument, i) once for every i < tasks, in any order, on any thread, and returns when all are done. */
typedef struct tq_executor {
  void* context;
  void (*run)(void* context, size_t tasks, void (*body)(void* argument, size_t task), void* argument);
} tq_executor;

TURBOQUANT_C_API void tq_init_params(tq_params* params);
TURBOQUANT_C_API void tq_init_item(tq_item* item);

/* Appends the new tokens of all items to one layer and computes the attention of all queries: all items or none.
 * params, executor: null for the defaults; a null executor is a loop. */
TURBOQUANT_C_API tq_status tq_attend(tq_cache* cache, size_t layer, const tq_item* items, size_t count,
                                     const tq_params* params, const tq_executor* executor);
/* out[t][h][j] = q_th . k_j, unscaled and unmasked, for all tokens j of the layer: [tokens][heads][length]. */
TURBOQUANT_C_API tq_status tq_logits(const tq_cache* cache, tq_sequence sequence, size_t layer, tq_rows queries,
                                     float* out, const tq_executor* executor);

/* The same step as tasks for your own threads: tq_plan, then for each phase all its tasks, in any order on any threads,
 * and a barrier. The last phase commits the appends and ends the plan. Dropped, made anew or destroyed before that, it
 * changes nothing. The buffers of the items must live until it has run. A plan that has run or was dropped may be used
 * again: it keeps its memory. */
typedef struct tq_attention_plan tq_attention_plan;

TURBOQUANT_C_API tq_status tq_plan_create(tq_attention_plan** created); /* after an error *created is null */
TURBOQUANT_C_API void tq_plan_destroy(tq_attention_plan* plan);         /* before its cache */
TURBOQUANT_C_API void tq_plan_drop(tq_attention_plan* plan);
TURBOQUANT_C_API tq_status tq_plan(tq_cache* cache, size_t layer, const tq_item* items, size_t count,
                                   const tq_params* params, tq_attention_plan* plan);
/* Bytes that tq_plan_run needs, aligned to 64; contents do not matter. The same memory for all tasks. */
TURBOQUANT_C_API size_t tq_plan_workspace_bytes(const tq_attention_plan* plan);
TURBOQUANT_C_API size_t tq_plan_phases(const tq_attention_plan* plan);
TURBOQUANT_C_API size_t tq_plan_tasks(const tq_attention_plan* plan, size_t phase);
/* Each task of each phase must run exactly once. Cannot fail. */
TURBOQUANT_C_API void tq_plan_run(const tq_attention_plan* plan, size_t phase, size_t task, void* workspace);

/* out, lse := attention over both key sets; out, other: [tokens][heads][dim] of the same shape, lse: [tokens][heads],
 * none null. */
TURBOQUANT_C_API void tq_merge_partials(tq_rows_out out, float* lse, tq_rows other, const float* other_lse);
/* Lets the sinks take part: one per head, or none. */
TURBOQUANT_C_API void tq_finish_partials(tq_rows_out out, float* lse, const float* sink_logits, size_t sink_count);

/* ---- Files ---- */

/* Takes bytes in order; false: they could not be written. */
typedef struct tq_sink {
  void* context;
  bool (*write)(void* context, const void* bytes, size_t count);
} tq_sink;

/* Copies up to `count` bytes and returns how many; fewer only at the end or after an error. */
typedef struct tq_source {
  void* context;
  size_t (*read)(void* context, void* bytes, size_t count);
} tq_source;

TURBOQUANT_C_API tq_status tq_save(const tq_cache* cache, tq_sequence sequence, tq_sink sink);
/* Makes a new sequence of a saved one, in a cache of the same configuration. Safe with bytes from anywhere. */
TURBOQUANT_C_API tq_status tq_load(tq_cache* cache, tq_source source, tq_sequence* created);

#ifdef __cplusplus
}
#endif

#endif
