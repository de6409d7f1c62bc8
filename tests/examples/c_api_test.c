/* The interface for C, from C99: every format serially, through a plan and from typed rows, bit for bit and against
 * exact attention; forks, rollback, files and drafts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/c_api_check.h"

enum { LAYERS = 2, TOKENS = 200, PROMPT = 150, KV_HEADS = 2, HEADS = 4, KEY_DIM = 64, VALUE_DIM = 96, WINDOW = 70 };
enum { KEYS = TOKENS * KV_HEADS * KEY_DIM, VALUES = TOKENS * KV_HEADS * VALUE_DIM, QUERIES = TOKENS * HEADS * KEY_DIM };
enum { OUT = TOKENS * HEADS * VALUE_DIM };

static float keys[KEYS], values[VALUES], queries[QUERIES];

/* ---- One step ---- */

enum { SERIAL, SCRAMBLED_EXECUTOR, SCRAMBLED_PLAN };

/* Odd tasks from the last one down, then even ones. */
static size_t scrambled(size_t i, size_t tasks) {
  return i < tasks / 2 ? 2 * (tasks / 2 - i) - 1 : 2 * (i - tasks / 2);
}

static void scrambled_run(void* context, size_t tasks, void (*body)(void* argument, size_t task), void* argument) {
  ++*(size_t*)context;
  for (size_t i = 0; i < tasks; ++i) body(argument, scrambled(i, tasks));
}

static tq_status run_plan(tq_attention_plan* plan, tq_cache* cache, size_t layer, const tq_item* item,
                          const tq_params* params) {
  const tq_status status = tq_plan(cache, layer, item, 1, params, plan);
  if (status.code != TQ_OK) return status;
  char* memory = malloc(tq_plan_workspace_bytes(plan) + 63);
  char* workspace = memory + (64 - (uintptr_t)memory % 64) % 64;
  for (size_t phase = 0; phase < tq_plan_phases(plan); ++phase) {
    const size_t tasks = tq_plan_tasks(plan, phase);
    for (size_t i = 0; i < tasks; ++i) tq_plan_run(plan, phase, scrambled(i, tasks), workspace);
  }
  free(memory);
  return status;
}

/* The sharper the softmax, the more the keys' errors count: 3 times the usual scale gives logits of variance 1. */
static tq_params step_params(void) {
  tq_params params;
  tq_init_params(&params);
  params.scale = 3.0f / sqrtf((float)KEY_DIM);
  return params;
}

static tq_item step_item(tq_sequence sequence, size_t begin, size_t count, float* out) {
  tq_item item;
  tq_init_item(&item);
  item.sequence = sequence;
  item.keys = tq_rows_of(keys + begin * KV_HEADS * KEY_DIM, TQ_F32, count, KV_HEADS, KEY_DIM);
  item.values = tq_rows_of(values + begin * KV_HEADS * VALUE_DIM, TQ_F32, count, KV_HEADS, VALUE_DIM);
  item.queries = tq_rows_of(queries + begin * HEADS * KEY_DIM, TQ_F32, count, HEADS, KEY_DIM);
  item.out = tq_rows_out_of(out + begin * HEADS * VALUE_DIM, TQ_F32, count, HEADS, VALUE_DIM);
  return item;
}

/* Tokens [begin, begin + count) of all layers; out: [LAYERS][TOKENS][HEADS][VALUE_DIM]. */
static void step(tq_cache* cache, tq_sequence sequence, size_t begin, size_t count, int mode, float* out) {
  const tq_params params = step_params();
  size_t calls = 0;
  const tq_executor executor = {&calls, scrambled_run};
  tq_attention_plan* plan = NULL;
  CHECK_OK(tq_plan_create(&plan));
  for (size_t layer = 0; layer < LAYERS; ++layer) {
    const tq_item item = step_item(sequence, begin, count, out + layer * OUT);
    if (mode == SCRAMBLED_PLAN) {
      CHECK_OK(run_plan(plan, cache, layer, &item, &params));
    } else {
      CHECK_OK(tq_attend(cache, layer, &item, 1, &params, mode == SERIAL ? NULL : &executor));
    }
  }
  CHECK(mode != SCRAMBLED_EXECUTOR || calls >= LAYERS);
  tq_plan_destroy(plan);
}

static void fill_sequence(tq_cache* cache, tq_sequence* sequence, int mode, float* out) {
  CHECK_OK(tq_create_sequence(cache, sequence));
  step(cache, *sequence, 0, PROMPT, mode, out);
  for (size_t t = PROMPT; t < TOKENS; ++t) step(cache, *sequence, t, 1, mode, out);
  CHECK(tq_length(cache, *sequence) == TOKENS);
}

/* Whether both have the same outputs from token `begin` on. */
static bool same(const float* a, const float* b, size_t begin) {
  const size_t skipped = begin * HEADS * VALUE_DIM, bytes = (OUT - skipped) * sizeof(float);
  for (size_t layer = 0; layer < LAYERS; ++layer) {
    if (memcmp(a + layer * OUT + skipped, b + layer * OUT + skipped, bytes) != 0) return false;
  }
  return true;
}

static tq_cache* make_cache(uint32_t format) {
  tq_layer layers[LAYERS];
  for (size_t l = 0; l < LAYERS; ++l) {
    tq_init_layer(&layers[l]);
    layers[l].kv_heads = KV_HEADS;
    layers[l].head_dim = KEY_DIM;
    layers[l].value_dim = VALUE_DIM;
    layers[l].window = l == 1 ? WINDOW : 0;
    layers[l].format = format;
  }
  tq_config config;
  tq_init_config(&config);
  config.layers = layers;
  config.layer_count = LAYERS;
  config.page_tokens = 32;
  config.recent_tokens = 16;
  tq_cache* cache = NULL;
  char why[200] = "";
  CHECK_OK(tq_cache_create(&config, &cache, why, sizeof why));
  if (cache == NULL) exit(fprintf(stderr, "%s\n", why));
  return cache;
}

/* Relative error energy of one layer's outputs from token 100 on, where most keys are codes, against attention over the
 * rows as they came, in double. */
static double error_of(const float* out, size_t window) {
  double error = 0, energy = 0;
  for (size_t t = 100; t < TOKENS; ++t) {
    for (size_t h = 0; h < HEADS; ++h) {
      double sum = 0, exact[VALUE_DIM] = {0};
      const float* q = queries + (t * HEADS + h) * KEY_DIM;
      const size_t kv = h / (HEADS / KV_HEADS);
      for (size_t j = window != 0 && t + 1 > window ? t + 1 - window : 0; j <= t; ++j) {
        const float* k = keys + (j * KV_HEADS + kv) * KEY_DIM;
        const float* v = values + (j * KV_HEADS + kv) * VALUE_DIM;
        double logit = 0;
        for (size_t i = 0; i < KEY_DIM; ++i) logit += (double)q[i] * (double)k[i];
        const double weight = exp(logit * (double)step_params().scale);
        sum += weight;
        for (size_t i = 0; i < VALUE_DIM; ++i) exact[i] += weight * (double)v[i];
      }
      for (size_t i = 0; i < VALUE_DIM; ++i) {
        const double x = exact[i] / sum, difference = (double)out[(t * HEADS + h) * VALUE_DIM + i] - x;
        error += difference * difference;
        energy += x * x;
      }
    }
  }
  return error / energy;
}

/* Values err by the energy D of the format; keys by D / (1 - D), which moves logits of variance 1 by as much, and the
 * outputs by as much again. That both are at work shows in the lower limit: less the raw tokens and what the centres
 * take. */
static void check_accuracy(uint32_t format, const float* out) {
  static const double kDistortion[] = {0.0823, 0.0222, 0.0093, 4e-5};
  const double d = kDistortion[format], most = d + d / (1 - d);
  const double whole = error_of(out, 0), windowed = error_of(out + OUT, WINDOW);
  printf("format %u: relative error %.3g, in a window %.3g, at most %.3g\n", (unsigned)format, whole, windowed, most);
  CHECK(whole < most && whole > 0.4 * most);
  CHECK(windowed < most && windowed > 0.3 * most);
}

/* ---- Typed rows ---- */

static uint16_t to_bf16(float x) { /* exact for the rows above; to nearest even for outputs */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static uint16_t to_f16(float x) { /* exact for normal halves */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x == 0.0f) return (uint16_t)(bits >> 16);
  return (uint16_t)(((bits >> 16) & 0x8000u) | (((bits & 0x7fffffffu) - (112u << 23)) >> 13));
}

/* The rows as [heads][tokens][dim], a gap of 3 behind each row: strides that are not those of tq_rows_of. */
static tq_rows strided(const float* rows, uint32_t type, size_t heads, size_t dim, uint16_t* memory) {
  const size_t row = dim + 3;
  uint16_t (*convert)(float) = type == TQ_F16 ? to_f16 : to_bf16;
  for (size_t t = 0; t < TOKENS; ++t)
    for (size_t h = 0; h < heads; ++h)
      for (size_t i = 0; i < dim; ++i) memory[(h * TOKENS + t) * row + i] = convert(rows[(t * heads + h) * dim + i]);
  return (tq_rows){memory, type, TOKENS, heads, dim, (ptrdiff_t)row, (ptrdiff_t)(TOKENS * row)};
}

static void check_types(tq_cache* cache, const float* expected) {
  enum { ROOM = TOKENS * HEADS * (VALUE_DIM + 3) };
  uint16_t* memory = calloc(4 * (size_t)ROOM, sizeof(uint16_t));
  float* out = malloc(LAYERS * OUT * sizeof(float));
  const tq_params params = step_params();
  for (uint32_t type = TQ_F16; type <= TQ_BF16; ++type) {
    tq_sequence sequence;
    CHECK_OK(tq_create_sequence(cache, &sequence));
    tq_item item = step_item(sequence, 0, TOKENS, out);
    item.keys = strided(keys, type, KV_HEADS, KEY_DIM, memory);
    item.values = strided(values, type, KV_HEADS, VALUE_DIM, memory + ROOM);
    item.queries = strided(queries, type, HEADS, KEY_DIM, memory + 2 * ROOM);
    CHECK_OK(tq_attend(cache, 0, &item, 1, &params, NULL));
    CHECK(memcmp(out, expected, OUT * sizeof(float)) == 0);
    item.out = tq_rows_out_of(memory + 3 * ROOM, TQ_BF16, TOKENS, HEADS, VALUE_DIM);
    CHECK_OK(tq_attend(cache, 1, &item, 1, &params, NULL));
    size_t different = 0;
    for (size_t i = 0; i < OUT; ++i) different += memory[3 * ROOM + i] != to_bf16(expected[OUT + i]);
    CHECK(different == 0);
    tq_release(cache, sequence);
    CHECK(tq_length(cache, sequence) == 0);
  }
  free(out);
  free(memory);
}

/* ---- Files ---- */

typedef struct buffer {
  unsigned char* bytes;
  size_t size, capacity, next;
} buffer;

static bool put(void* context, const void* bytes, size_t count) {
  buffer* to = context;
  if (count > to->capacity - to->size) return false;
  memcpy(to->bytes + to->size, bytes, count);
  to->size += count;
  return true;
}

static size_t take(void* context, void* bytes, size_t count) {
  buffer* from = context;
  const size_t got = count < from->size - from->next ? count : from->size - from->next;
  memcpy(bytes, from->bytes + from->next, got);
  from->next += got;
  return got;
}

static buffer save(const tq_cache* cache, tq_sequence sequence, uint32_t expected, size_t capacity) {
  buffer to = {malloc(capacity), 0, capacity, 0};
  CHECK(tq_save(cache, sequence, (tq_sink){&to, put}).code == expected);
  return to;
}

static tq_status load(tq_cache* cache, buffer from, tq_sequence* created) {
  return tq_load(cache, (tq_source){&from, take}, created);
}

static void check_files(tq_cache* cache, tq_cache* other, tq_cache* foreign, tq_sequence sequence, size_t length,
                        float* out, const float* expected) {
  const size_t room = 1u << 22;
  buffer file = save(cache, sequence, TQ_OK, room);
  tq_sequence loaded = {0, 0};
  CHECK_OK(load(other, file, &loaded));
  CHECK(tq_length(other, loaded) == length);
  const buffer again = save(other, loaded, TQ_OK, room);
  CHECK(again.size == file.size && memcmp(again.bytes, file.bytes, file.size) == 0);
  step(other, loaded, length, TOKENS - length, SERIAL, out);
  CHECK(same(out, expected, length));

  CHECK(load(foreign, file, &loaded).code == TQ_FORMAT_MISMATCH);
  free(save(cache, sequence, TQ_IO_ERROR, file.size - 1).bytes);
  file.bytes[file.size / 2] ^= 1;
  CHECK(load(other, file, &loaded).code == TQ_CORRUPT_FILE);
  file.bytes[file.size / 2] ^= 1;
  file.size -= 1;
  CHECK(load(other, file, &loaded).code == TQ_CORRUPT_FILE);
  CHECK(tq_save(cache, sequence, (tq_sink){NULL, NULL}).code == TQ_IO_ERROR);
  CHECK(tq_load(cache, (tq_source){NULL, NULL}, &loaded).code == TQ_IO_ERROR);
  free(again.bytes);
  free(file.bytes);
}

/* Logits against the decoded keys in double. The query is rounded to steps of its largest rotated coordinate / 127: an
 * error of deviation 3 / (127 sqrt(12 * 64)) = 8.5e-4 of |q| |k|, and six times that at most. */
static void check_logits(const tq_cache* cache, tq_sequence sequence) {
  float *decoded = malloc(KEYS * sizeof(float)), *out = malloc(HEADS * TOKENS * sizeof(float));
  const tq_rows_out rows = tq_rows_out_of(decoded, TQ_F32, TOKENS, KV_HEADS, KEY_DIM);
  CHECK_OK(tq_read(cache, sequence, 0, 0, rows, tq_rows_out_of(NULL, TQ_F32, 0, 0, 0)));
  CHECK_OK(tq_logits(cache, sequence, 0, tq_rows_of(queries, TQ_F32, 1, HEADS, KEY_DIM), out, NULL));
  for (size_t h = 0; h < HEADS; ++h) {
    for (size_t j = 0; j < TOKENS; ++j) {
      const float *q = queries + h * KEY_DIM, *k = decoded + (j * KV_HEADS + h / (HEADS / KV_HEADS)) * KEY_DIM;
      double product = 0, q_energy = 0, k_energy = 0;
      for (size_t i = 0; i < KEY_DIM; ++i) {
        product += (double)q[i] * (double)k[i];
        q_energy += (double)q[i] * (double)q[i];
        k_energy += (double)k[i] * (double)k[i];
      }
      CHECK(fabs((double)out[h * TOKENS + j] - product) < 5.1e-3 * sqrt(q_energy * k_energy));
    }
  }
  free(out);
  free(decoded);
}

static void check_format(uint32_t format) {
  tq_cache *cache = make_cache(format), *planned = make_cache(format), *foreign = make_cache((format + 1) % 4);
  const size_t bytes = LAYERS * OUT * sizeof(float);
  float *out = malloc(bytes), *other = malloc(bytes);
  tq_sequence sequence, through_plan, branch;
  fill_sequence(cache, &sequence, SERIAL, out);
  fill_sequence(planned, &through_plan, SCRAMBLED_PLAN, other);
  CHECK(same(out, other, 0));
  memset(other, 0, bytes);
  fill_sequence(planned, &branch, SCRAMBLED_EXECUTOR, other);
  CHECK(same(out, other, 0));
  check_accuracy(format, out);
  check_types(planned, out);
  check_logits(cache, sequence);

  static const double kBits[] = {2, 3, 4, 8}; /* and scales, centres and padding */
  const tq_memory_use use = tq_memory(cache);
  CHECK(use.page_bytes > 0 && use.tail_bytes > 0 && use.table_bytes > 0);
  CHECK(use.bits_per_coordinate > kBits[format] && use.bits_per_coordinate < kBits[format] + 1);

  /* A fork goes on as its source did, and leaves it alone. */
  CHECK_OK(tq_fork(cache, sequence, TOKENS - 20, &branch));
  memset(other, 0, bytes);
  step(cache, branch, TOKENS - 20, 20, SERIAL, other);
  CHECK(same(out, other, TOKENS - 20) && tq_length(cache, sequence) == TOKENS);
  CHECK_OK(tq_erase(cache, branch, 10, 50));
  CHECK_OK(tq_seal(cache, branch));
  CHECK(tq_length(cache, branch) == TOKENS - 40);
  tq_release(cache, branch);
  CHECK(tq_truncate(cache, branch, 1).code == TQ_UNKNOWN_SEQUENCE);

  /* So does a sequence that was rolled back, and one that was saved. */
  CHECK_OK(tq_truncate(cache, sequence, TOKENS - 30));
  memset(other, 0, bytes);
  check_files(cache, planned, foreign, sequence, TOKENS - 30, other, out);
  CHECK_OK(tq_reserve(cache, sequence, 30));
  memset(other, 0, bytes);
  step(cache, sequence, TOKENS - 30, 30, SERIAL, other);
  CHECK(same(out, other, TOKENS - 30));

  free(other);
  free(out);
  tq_cache_destroy(foreign);
  tq_cache_destroy(planned);
  tq_cache_destroy(cache);
}

/* ---- Drafts and partial results ---- */

static void check_drafts(void) {
  tq_cache* cache = make_cache(TQ_FORMAT_TQ4);
  float *out = malloc(LAYERS * OUT * sizeof(float)), *other = malloc(LAYERS * OUT * sizeof(float));
  tq_sequence sequence, straight;
  fill_sequence(cache, &sequence, SERIAL, out);
  CHECK_OK(tq_truncate(cache, sequence, TOKENS - 10));
  CHECK_OK(tq_fork(cache, sequence, TOKENS - 10, &straight));
  /* Drafts: token 0, below it 1 and 2. The second branch is accepted. */
  tq_params params = step_params();
  static const uint64_t kTree[] = {1, 3, 5};
  static const uint32_t kAccepted[] = {0, 2};
  for (size_t layer = 0; layer < LAYERS; ++layer) {
    tq_item item = step_item(sequence, TOKENS - 10, 3, other + layer * OUT);
    item.tree = kTree;
    CHECK_OK(tq_attend(cache, layer, &item, 1, &params, NULL));
  }
  CHECK_OK(tq_keep(cache, sequence, TOKENS - 10, kAccepted, 2));
  CHECK(tq_length(cache, sequence) == TOKENS - 8);
  step(cache, straight, TOKENS - 10, 1, SERIAL, out);
  step(cache, straight, TOKENS - 8, 1, SERIAL, out);
  step(cache, straight, TOKENS - 7, 7, SERIAL, out);
  step(cache, sequence, TOKENS - 7, 7, SERIAL, other);
  CHECK(same(out, other, TOKENS - 8));

  /* Two halves of the keys and a sink, merged, are the whole. Weights are rounded to 1/32766 of the largest of a step,
   * which the cut changes: the errors of some ten tokens that weigh as much add up like sqrt(10). */
  static const float kSinks[HEADS] = {0.5f, -1.0f, 2.0f, 0.0f};
  float whole[HEADS * VALUE_DIM], part[2][HEADS * VALUE_DIM], lse[2][HEADS];
  tq_item item = step_item(sequence, 0, 1, out);
  item.keys = item.values = tq_rows_of(NULL, TQ_F32, 0, 0, 0);
  for (size_t half = 0; half < 2; ++half) {
    item.out = tq_rows_out_of(part[half], TQ_F32, 1, HEADS, VALUE_DIM);
    item.lse = lse[half];
    item.key_begin = half == 0 ? 0 : 101;
    item.key_end = half == 0 ? 101 : TURBOQUANT_C_NPOS;
    CHECK_OK(tq_attend(cache, 0, &item, 1, &params, NULL));
  }
  const tq_rows_out first = tq_rows_out_of(part[0], TQ_F32, 1, HEADS, VALUE_DIM);
  tq_merge_partials(first, lse[0], tq_rows_of(part[1], TQ_F32, 1, HEADS, VALUE_DIM), lse[1]);
  tq_finish_partials(first, lse[0], kSinks, HEADS);
  item.out = tq_rows_out_of(whole, TQ_F32, 1, HEADS, VALUE_DIM);
  item.lse = NULL;
  item.key_begin = 0;
  params.sink_logits = kSinks;
  params.sink_count = HEADS;
  CHECK_OK(tq_attend(cache, 0, &item, 1, &params, NULL));
  for (size_t i = 0; i < HEADS * VALUE_DIM; ++i) CHECK(fabsf(part[0][i] - whole[i]) < 1e-4f);
  free(other);
  free(out);
  tq_cache_destroy(cache);
}

int main(void) {
  fill(keys, KEYS, 1);
  fill(values, VALUES, 2);
  fill(queries, QUERIES, 3);
  for (uint32_t format = TQ_FORMAT_TQ2; format <= TQ_FORMAT_TQ8; ++format) check_format(format);
  check_drafts();
  printf("turboquant %s: %d failures\n", tq_version(), failures);
  return failures == 0 ? 0 : 1;
}
