/* The interface for C, from C99: every field of a configuration, of a layer and of the parameters arrives where it
 * belongs; and what is refused, with which words. */
#include <math.h>
#include <stdlib.h>

#include "examples/c_api_check.h"

enum { KV_HEADS = 2, HEADS = 4, DIM = 64, TOKENS = 48 };
static float keys[TOKENS * KV_HEADS * DIM], values[TOKENS * KV_HEADS * DIM], queries[TOKENS * HEADS * DIM];
static float out[TOKENS * HEADS * DIM];

typedef struct setup {
  tq_layer layer;
  tq_config config;
} setup;

static void init(setup* with) {
  tq_init_layer(&with->layer);
  with->layer.kv_heads = KV_HEADS;
  with->layer.head_dim = DIM;
  tq_init_config(&with->config);
  with->config.layers = &with->layer;
  with->config.layer_count = 1;
}

static tq_cache* make(const setup* with) {
  tq_cache* cache = NULL;
  char why[200] = "";
  CHECK_OK(tq_cache_create(&with->config, &cache, why, sizeof why));
  if (cache == NULL) exit(fprintf(stderr, "%s\n", why));
  return cache;
}

static tq_item all_tokens(tq_sequence sequence) {
  tq_item item;
  tq_init_item(&item);
  item.sequence = sequence;
  item.keys = tq_rows_of(keys, TQ_F32, TOKENS, KV_HEADS, DIM);
  item.values = tq_rows_of(values, TQ_F32, TOKENS, KV_HEADS, DIM);
  item.queries = tq_rows_of(queries, TQ_F32, TOKENS, HEADS, DIM);
  item.out = tq_rows_out_of(out, TQ_F32, TOKENS, HEADS, DIM);
  return item;
}

/* ---- Configurations ---- */

typedef struct file {
  char bytes[1 << 10];
  size_t size, next;
} file;

static bool put(void* context, const void* bytes, size_t count) {
  file* to = context;
  if (count > sizeof to->bytes - to->size) return false;
  memcpy(to->bytes + to->size, bytes, count);
  to->size += count;
  return true;
}

static size_t take(void* context, void* bytes, size_t count) {
  file* from = context;
  const size_t got = count < from->size - from->next ? count : from->size - from->next;
  memcpy(bytes, from->bytes + from->next, got);
  from->next += got;
  return got;
}

/* A cache refuses the file of another one by the first field in which the two differ. */
static void check_field(const char* field, const setup* with) {
  setup plain;
  init(&plain);
  tq_cache *from = make(&plain), *to = make(with);
  tq_sequence sequence;
  file saved = {{0}, 0, 0};
  CHECK_OK(tq_create_sequence(from, &sequence));
  CHECK_OK(tq_save(from, sequence, (tq_sink){&saved, put}));
  const tq_status status = tq_load(to, (tq_source){&saved, take}, &sequence);
  if (status.code != TQ_FORMAT_MISMATCH || strcmp(status.field, field) != 0) {
    char text[100];
    tq_message(status, text, sizeof text);
    fprintf(stderr, "%s expected, found %s\n", field, text);
    ++failures;
  }
  tq_cache_destroy(from);
  tq_cache_destroy(to);
}

#define CHECK_FIELD(name, change) \
  do {                            \
    setup with;                   \
    init(&with);                  \
    change;                       \
    check_field(name, &with);     \
  } while (0)

static void check_fields(void) {
  CHECK_FIELD("page_tokens", with.config.page_tokens = 16);
  CHECK_FIELD("recent_tokens", with.config.recent_tokens = 16);
  CHECK_FIELD("first_tokens", with.config.first_tokens = 4);
  CHECK_FIELD("rollback_tokens", with.config.rollback_tokens = 8);
  CHECK_FIELD("seed", with.config.seed = 7);
  CHECK_FIELD("kv_heads", with.layer.kv_heads = 1);
  CHECK_FIELD("head_dim", with.layer.head_dim = 96);
  CHECK_FIELD("value_dim", with.layer.value_dim = 96);
  CHECK_FIELD("center_bits", with.layer.center_bits = 0);
  CHECK_FIELD("window", with.layer.window = 5);
}

static size_t allocations, held;

static void* count_allocate(void* context, size_t bytes, size_t alignment) {
  (void)context;
  char* memory = malloc(bytes + 2 * alignment);
  char* aligned = memory + alignment + (alignment - (uintptr_t)memory % alignment) % alignment;
  memcpy(aligned - sizeof memory, &memory, sizeof memory);
  ++allocations;
  held += bytes;
  return aligned;
}

static void count_release(void* context, void* memory, size_t bytes) {
  (void)context;
  char* begin;
  memcpy(&begin, (char*)memory - sizeof begin, sizeof begin);
  held -= bytes;
  free(begin);
}

static void check_memory(void) {
  setup with;
  init(&with);
  with.config.memory = (tq_memory_source){NULL, count_allocate, count_release};
  with.config.max_bytes = 100000; /* 48 tokens in bf16 are 24,576 bytes */
  tq_cache* cache = make(&with);
  tq_sequence sequence;
  CHECK_OK(tq_create_sequence(cache, &sequence));
  tq_item item = all_tokens(sequence);
  CHECK_OK(tq_attend(cache, 0, &item, 1, NULL, NULL));
  CHECK(allocations > 0 && held >= 24576 && tq_memory(cache).slab_bytes == held);
  CHECK(tq_reserve(cache, sequence, 1000).code == TQ_OUT_OF_MEMORY);
  tq_cache_destroy(cache);
  CHECK(held == 0);
}

/* A query that comes again, by its position; and memory before and after the raw tail is coded. */
static void check_positions_and_sizes(void) {
  setup with;
  init(&with);
  tq_cache* cache = make(&with);
  tq_sequence sequence;
  float again[HEADS * DIM];
  CHECK_OK(tq_create_sequence(cache, &sequence));
  tq_item item = all_tokens(sequence);
  CHECK_OK(tq_attend(cache, 0, &item, 1, NULL, NULL));
  item.keys = item.values = tq_rows_of(NULL, TQ_F32, 0, 0, 0);
  item.queries = tq_rows_of(queries + 20 * HEADS * DIM, TQ_F32, 1, HEADS, DIM);
  item.out = tq_rows_out_of(again, TQ_F32, 1, HEADS, DIM);
  item.position = 20;
  CHECK_OK(tq_attend(cache, 0, &item, 1, NULL, NULL));
  CHECK(memcmp(again, out + 20 * HEADS * DIM, sizeof again) == 0);
  tq_memory_use use = tq_memory(cache);
  CHECK(use.page_bytes == 0 && use.tail_bytes == 24576 && use.table_bytes > 0);
  CHECK_OK(tq_seal(cache, sequence));
  use = tq_memory(cache);
  CHECK(use.page_bytes > 0 && use.page_bytes < 24576 / 2 && use.tail_bytes == 0);
  tq_cache_destroy(cache);
}

/* ---- Parameters ---- */

/* Attention with everything in it, over rows that are all raw and exact in bf16; in double. */
static void check_params(tq_cache* cache, const tq_params* params) {
  tq_sequence sequence;
  CHECK_OK(tq_create_sequence(cache, &sequence));
  tq_item item = all_tokens(sequence);
  CHECK_OK(tq_attend(cache, 0, &item, 1, params, NULL));
  tq_release(cache, sequence);
  double worst = 0;
  for (size_t t = 0; t < TOKENS; ++t) {
    for (size_t h = 0; h < HEADS; ++h) {
      double sum = params->sink_count != 0 ? exp((double)params->sink_logits[h]) : 0, exact[DIM] = {0};
      for (size_t j = 0; j < (params->causal ? t + 1 : TOKENS); ++j) {
        const size_t row = (j * KV_HEADS + h / (HEADS / KV_HEADS)) * DIM;
        double logit = 0;
        for (size_t i = 0; i < DIM; ++i) logit += (double)queries[(t * HEADS + h) * DIM + i] * (double)keys[row + i];
        logit *= params->scale != 0 ? (double)params->scale : 1 / sqrt((double)DIM);
        if (params->softcap != 0) logit = (double)params->softcap * tanh(logit / (double)params->softcap);
        if (params->alibi_count != 0) logit += (double)params->alibi_slopes[h] * ((double)j - (double)t);
        sum += exp(logit);
        for (size_t i = 0; i < DIM; ++i) exact[i] += exp(logit) * (double)values[row + i];
      }
      for (size_t i = 0; i < DIM; ++i) {
        worst = fmax(worst, fabs((double)out[(t * HEADS + h) * DIM + i] - exact[i] / sum));
      }
    }
  }
  CHECK(worst < 1e-5); /* of values up to 2: exponentials and sums in float */
}

static void check_parameters(void) {
  static const float kSlopes[HEADS] = {0.01f, 0.1f, 0.5f, 1.0f}, kSinks[HEADS] = {0.5f, -1.0f, 2.0f, 0.0f};
  setup with;
  init(&with);
  tq_cache* cache = make(&with);
  tq_params params;
  tq_init_params(&params);
  check_params(cache, &params);
  params.causal = false;
  check_params(cache, &params);
  params.scale = 0.5f;
  check_params(cache, &params);
  params.softcap = 1.5f;
  check_params(cache, &params);
  params.alibi_slopes = kSlopes;
  params.alibi_count = HEADS;
  check_params(cache, &params);
  params.sink_logits = kSinks;
  params.sink_count = HEADS;
  check_params(cache, &params);
  tq_cache_destroy(cache);
}

/* ---- Refusals ---- */

static void check_configurations(void) {
  tq_cache* none = NULL;
  tq_config config;
  tq_layer layer;
  char why[200] = "", small[8] = "";
  tq_init_config(&config);
  CHECK_REFUSED(tq_cache_create(NULL, &none, NULL, 0), TQ_BAD_ARGUMENT, "config");
  CHECK_REFUSED(tq_cache_create(&config, NULL, NULL, 0), TQ_BAD_ARGUMENT, "created");
  CHECK_REFUSED(tq_cache_create(&config, NULL, why, sizeof why), TQ_BAD_ARGUMENT, "created");
  CHECK(strstr(why, "created is null") != NULL);
  none = (tq_cache*)&config; /* what was there before is gone */
  CHECK_REFUSED(tq_cache_create(NULL, &none, why, sizeof why), TQ_BAD_ARGUMENT, "config");
  CHECK(strcmp(why, "config is null") == 0 && none == NULL);
  CHECK_REFUSED(tq_cache_create(&config, &none, why, sizeof why), TQ_BAD_ARGUMENT, "config");
  CHECK(strstr(why, "at least one layer") != NULL);
  config.layer_count = 1;
  CHECK_REFUSED(tq_cache_create(&config, &none, NULL, 0), TQ_BAD_ARGUMENT, "config.layers");
  CHECK_REFUSED(tq_cache_create(&config, &none, why, sizeof why), TQ_BAD_ARGUMENT, "config.layers");
  CHECK(strstr(why, "layers is null") != NULL);
  config.layers = &layer;
  tq_init_layer(&layer);
  layer.format = 9;
  CHECK_REFUSED(tq_cache_create(&config, &none, why, sizeof why), TQ_BAD_ARGUMENT, "config");
  CHECK(strcmp(why, "layers[0].format is 9; this cache has 4 format(s), counted from 0") == 0);
  CHECK(tq_cache_create(&config, &none, small, sizeof small).code == TQ_BAD_ARGUMENT && strcmp(small, "layers[") == 0);
  CHECK(tq_cache_create(&config, &none, small, 0).code == TQ_BAD_ARGUMENT && strcmp(small, "layers[") == 0);
  CHECK(none == NULL);

  /* Words of an earlier refusal do not stay. */
  layer.format = TQ_FORMAT_TQ4;
  CHECK_OK(tq_cache_create(&config, &none, why, sizeof why));
  CHECK(why[0] == '\0' && none != NULL);
  tq_cache_destroy(none);
}

/* The whole text of tq_message. */
static void check_words(int line, tq_status status, const char* words) {
  char text[80] = "";
  const size_t length = tq_message(status, text, sizeof text);
  if (length == strlen(words) && strcmp(text, words) == 0) return;
  fprintf(stderr, "%s:%d: \"%s\" expected, found \"%s\"\n", __FILE__, line, words, text);
  ++failures;
}
#define CHECK_WORDS(call, words) check_words(__LINE__, call, words)

static void check_refusals(void) {
  setup with;
  init(&with);
  tq_cache* cache = make(&with);
  tq_attention_plan* plan = NULL;
  tq_sequence sequence, nobody = {77, 1};
  CHECK_OK(tq_create_sequence(cache, &sequence));
  CHECK_OK(tq_plan_create(&plan));

  tq_item item = all_tokens(sequence);
  CHECK_REFUSED(tq_attend(NULL, 0, &item, 1, NULL, NULL), TQ_BAD_ARGUMENT, "cache");
  CHECK_REFUSED(tq_attend(cache, 0, NULL, 1, NULL, NULL), TQ_BAD_ARGUMENT, "items");
  CHECK_REFUSED(tq_plan(cache, 0, &item, 1, NULL, NULL), TQ_BAD_ARGUMENT, "plan");
  CHECK_REFUSED(tq_create_sequence(cache, NULL), TQ_BAD_ARGUMENT, "created");
  CHECK_REFUSED(tq_keep(cache, sequence, 0, NULL, 1), TQ_BAD_ARGUMENT, "tokens");
  CHECK(tq_attend(cache, 1, &item, 1, NULL, NULL).code == TQ_BAD_LAYER);
  CHECK(tq_fork(cache, sequence, 1, &nobody).code == TQ_BAD_SHAPE && nobody.index == 77);
  CHECK(tq_seal(cache, nobody).code == TQ_UNKNOWN_SEQUENCE && tq_length(cache, nobody) == 0);
  tq_params params;
  tq_init_params(&params);
  params.alibi_count = HEADS;
  CHECK_REFUSED(tq_attend(cache, 0, &item, 1, &params, NULL), TQ_BAD_ARGUMENT, "params.alibi_slopes");

  if (HUGE_REQUESTS_FAIL) {
    char why[] = "before";
    tq_cache* none = cache;
    with.config.layer_count = SIZE_MAX / 64;
    CHECK_REFUSED(tq_cache_create(&with.config, &none, why, sizeof why), TQ_OUT_OF_MEMORY, "arguments");
    CHECK(why[0] == '\0' && none == NULL);
    CHECK_REFUSED(tq_attend(cache, 0, &item, SIZE_MAX / 1024, NULL, NULL), TQ_OUT_OF_MEMORY, "arguments");
  }
#ifndef TURBOQUANT_C_NO_EXCEPTIONS
  CHECK_REFUSED(tq_attend(cache, 0, &item, SIZE_MAX, NULL, NULL), TQ_BAD_ARGUMENT, "arguments");
  CHECK_REFUSED(tq_plan(cache, 0, &item, SIZE_MAX, NULL, plan), TQ_BAD_ARGUMENT, "arguments");
#endif

  item.keys.dim = 32;
  const tq_status status = tq_attend(cache, 0, &item, 1, NULL, NULL);
  CHECK_REFUSED(status, TQ_BAD_SHAPE, "keys.dim");
  CHECK(status.item == 0 && tq_attend(cache, 1, &item, 1, NULL, NULL).item == -1);
  char cut[10] = "";
  const char* whole = "bad_shape: item 0: keys.dim: expected 64, found 32";
  CHECK_WORDS(status, whole);
  CHECK(tq_message(status, cut, sizeof cut) == strlen(whole) && strcmp(cut, "bad_shape") == 0);
  tq_item pair[2] = {all_tokens(sequence), all_tokens(nobody)};
  CHECK_WORDS(tq_attend(cache, 0, pair, 2, NULL, NULL), "unknown_sequence: item 1: sequence");
  pair[1] = pair[0];
  CHECK_WORDS(tq_attend(cache, 0, pair, 2, NULL, NULL), "bad_shape: item 1: sequence appears twice");
  CHECK_WORDS(tq_attend(cache, 7, pair, 2, NULL, NULL), "bad_layer: layer: expected 1, found 7");
  CHECK_WORDS(((tq_status){TQ_OK, NULL, 0, 0, 0}), "ok");
  item = all_tokens(sequence);
  item.keys.type = 256; /* no type, and f32 in its lowest byte */
  CHECK_REFUSED(tq_attend(cache, 0, &item, 1, NULL, NULL), TQ_BAD_SHAPE, "keys.type");
  item = all_tokens(sequence);
  const float kept = keys[100];
  keys[100] = (float)NAN;
  CHECK_REFUSED(tq_plan(cache, 0, &item, 1, NULL, plan), TQ_NON_FINITE_INPUT, "keys");
  keys[100] = kept;

  /* A plan holds its sequence until it is dropped, and has then changed nothing. */
  CHECK_OK(tq_plan(cache, 0, &item, 1, NULL, plan));
  CHECK(tq_plan_phases(plan) > 0 && tq_plan_workspace_bytes(plan) > 0);
  CHECK_REFUSED(tq_truncate(cache, sequence, 0), TQ_BAD_SHAPE, "pending plan");
  CHECK_REFUSED(tq_truncate(NULL, sequence, 0), TQ_BAD_ARGUMENT, "cache");
  tq_plan_drop(plan);
  CHECK(tq_plan_phases(plan) == 0 && tq_plan_phases(NULL) == 0);
  CHECK_OK(tq_truncate(cache, sequence, 0));
  CHECK_OK(tq_plan(cache, 0, &item, 1, NULL, plan));
  tq_plan_drop(plan);
  tq_plan_drop(NULL);

  tq_plan_destroy(plan);
  tq_plan_destroy(NULL);
  tq_cache_destroy(cache);
  tq_cache_destroy(NULL);
}

int main(void) {
  fill(keys, sizeof keys / sizeof *keys, 1);
  fill(values, sizeof values / sizeof *values, 2);
  fill(queries, sizeof queries / sizeof *queries, 3);
  check_fields();
  check_memory();
  check_positions_and_sizes();
  check_parameters();
  check_configurations();
  check_refusals();
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
