// The C functions, each a call of the one in C++ behind a handle that knows all formats.
#include "c_api/turboquant_c.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <turboquant/turboquant.hpp>
#include <utility>
#include <vector>

namespace tq = turboquant;

// Formats in the order of TQ_FORMAT_...: LayerShape::format counts them, so that one cache serves all.
struct tq_cache {
  explicit tq_cache(tq::CacheConfig config) : cache(std::move(config)) {}
  tq::KVCache<tq::TQ2, tq::TQ3, tq::TQ4, tq::TQ8> cache;
};

struct tq_attention_plan {
  tq::AttentionPlan plan;
};

namespace {

static_assert(std::uint32_t(TQ_IO_ERROR) == std::uint32_t(tq::Status::io_error));
static_assert(std::uint32_t(TQ_F16) == std::uint32_t(tq::DType::f16));
static_assert(std::uint32_t(TQ_BF16) == std::uint32_t(tq::DType::bf16));
static_assert(TURBOQUANT_C_NPOS == tq::npos);
constexpr std::size_t kFormats = TQ_FORMAT_TQ8 + 1;

tq_status to_c(const tq::Status& status) noexcept {
  return {std::uint32_t(status.code), status.field, status.expected, status.found, status.item};
}

tq_status bad_argument(const char* field) noexcept { return {TQ_BAD_ARGUMENT, field, 0, 0, -1}; }

// What a call says, which may allocate: arguments are copied into vectors, which throw std::length_error if no memory
// could hold them. Functions of the caller do not throw.
template <class Call>
tq_status guarded(Call&& call) noexcept {
#if defined(__cpp_exceptions)
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return {TQ_OUT_OF_MEMORY, "arguments", 0, 0, -1};
  } catch (const std::exception&) {
    return bad_argument("arguments");
  }
#else
  return call();
#endif
}

// A type that does not exist stays one: the library refuses it.
tq::DType to_type(std::uint32_t type) noexcept { return tq::DType(std::uint8_t((std::min)(type, 255u))); }

tq::ConstRows to_rows(const tq_rows& rows) noexcept {
  return {rows.data, to_type(rows.type), rows.tokens, rows.heads, rows.dim, rows.token_stride, rows.head_stride};
}

tq::Rows to_rows(const tq_rows_out& rows) noexcept {
  return {rows.data, to_type(rows.type), rows.tokens, rows.heads, rows.dim, rows.token_stride, rows.head_stride};
}

tq::SequenceId to_id(tq_sequence sequence) noexcept { return {sequence.index, sequence.generation}; }

tq::AttentionParams to_params(const tq_params* params) noexcept {
  if (params == nullptr) return {};
  return {params->scale,
          params->causal,
          params->softcap,
          {params->alibi_slopes, params->alibi_count},
          {params->sink_logits, params->sink_count}};
}

// A pointer that the library would trust, or null if none is missing.
const char* null_field(const tq_item* items, std::size_t count, const tq_params* params) noexcept {
  if (items == nullptr && count != 0) return "items";
  if (params == nullptr) return nullptr;
  if (params->alibi_slopes == nullptr && params->alibi_count != 0) return "params.alibi_slopes";
  return params->sink_logits == nullptr && params->sink_count != 0 ? "params.sink_logits" : nullptr;
}

std::vector<tq::BatchItem> to_batch(const tq_item* items, std::size_t count) {
  std::vector<tq::BatchItem> batch(count);
  for (std::size_t i = 0; i < count; ++i) {
    const tq_item& item = items[i];
    batch[i] = {.sequence = to_id(item.sequence),
                .keys = to_rows(item.keys),
                .values = to_rows(item.values),
                .queries = to_rows(item.queries),
                .out = to_rows(item.out),
                .lse = item.lse,
                .position = item.position,
                .tree = item.tree,
                .key_begin = item.key_begin,
                .key_end = item.key_end};
  }
  return batch;
}

// The caller's executor, or the loop.
struct Executor {
  const tq_executor* executor;

  template <class Body>
  void operator()(std::size_t tasks, Body body) const {
    if (executor == nullptr) return tq::Serial()(tasks, body);
    const auto run = [](void* argument, std::size_t task) { (*static_cast<const Body*>(argument))(task); };
    executor->run(executor->context, tasks, run, &body);
  }
};

// A call on a cache.
template <class Cache, class Call>
tq_status on(Cache* cache, Call&& call) noexcept {
  return cache != nullptr ? guarded([&] { return to_c(call(cache->cache)); }) : bad_argument("cache");
}

// One that makes a sequence.
template <class Call>
tq_status create(tq_cache* cache, tq_sequence* created, Call&& call) noexcept {
  if (created == nullptr) return bad_argument("created");
  tq::SequenceId id;
  const tq_status status = on(cache, [&](auto& to) { return call(to, id); });
  if (status.code == TQ_OK) *created = {id.index, id.generation};
  return status;
}

}  // namespace

size_t tq_message(tq_status status, char* text, size_t size) {
  const char* name = status.code == TQ_BAD_ARGUMENT ? "bad_argument" : "unknown code";
  if (status.code < TQ_BAD_ARGUMENT) name = tq::to_string(tq::Status::Code(status.code));
  const char* field = status.field != nullptr ? status.field : "";
  const bool numbers = status.expected != 0 || status.found != 0;
  char item[32] = "";
  if (status.code != TQ_OK && status.item >= 0) {
    std::snprintf(item, sizeof item, ": item %lld", static_cast<long long>(status.item));
  }
  const char* form = numbers ? "%s%s: %s: expected %lld, found %lld" : *field != '\0' ? "%s%s: %s" : "%s%s";
  const int length = std::snprintf(text, text != nullptr ? size : 0, form, name, item, field,
                                   static_cast<long long>(status.expected), static_cast<long long>(status.found));
  return length > 0 ? size_t(length) : 0;
}

#define TURBOQUANT_C_TEXT(x) #x
#define TURBOQUANT_C_VERSION(major, minor, patch) \
  TURBOQUANT_C_TEXT(major) "." TURBOQUANT_C_TEXT(minor) "." TURBOQUANT_C_TEXT(patch)

const char* tq_version(void) {
  return TURBOQUANT_C_VERSION(TURBOQUANT_VERSION_MAJOR, TURBOQUANT_VERSION_MINOR, TURBOQUANT_VERSION_PATCH);
}

tq_rows tq_rows_of(const void* data, uint32_t type, size_t tokens, size_t heads, size_t dim) {
  return {data, type, tokens, heads, dim, ptrdiff_t(heads * dim), ptrdiff_t(dim)};
}

tq_rows_out tq_rows_out_of(void* data, uint32_t type, size_t tokens, size_t heads, size_t dim) {
  return {data, type, tokens, heads, dim, ptrdiff_t(heads * dim), ptrdiff_t(dim)};
}

void tq_init_layer(tq_layer* layer) {
  const tq::LayerShape shape;
  *layer = {shape.kv_heads, shape.head_dim, shape.value_dim, shape.window, TQ_FORMAT_TQ4, shape.center_bits};
}

void tq_init_config(tq_config* config) {
  const tq::CacheConfig defaults{.layers = {}};
  *config = {nullptr,
             0,
             defaults.page_tokens,
             defaults.recent_tokens,
             defaults.first_tokens,
             defaults.rollback_tokens,
             defaults.max_bytes,
             defaults.seed,
             {nullptr, nullptr, nullptr}};
}

void tq_init_params(tq_params* params) {
  const tq::AttentionParams defaults;
  *params = {defaults.scale, defaults.causal, defaults.softcap, nullptr, 0, nullptr, 0};
}

void tq_init_item(tq_item* item) {
  *item = {};
  item->position = item->key_end = TURBOQUANT_C_NPOS;
}

tq_status tq_cache_create(const tq_config* config, tq_cache** created, char* why, size_t why_size) {
  if (why != nullptr && why_size != 0) *why = '\0';
  if (created != nullptr) *created = nullptr;
  const auto refuse = [=](const char* field, const char* words) {
    if (why != nullptr) std::snprintf(why, why_size, "%s", words);
    return bad_argument(field);
  };
  if (created == nullptr) return refuse("created", "created is null; it says where to put the cache");
  if (config == nullptr) return refuse("config", "config is null");
  if (config->layers == nullptr && config->layer_count != 0) {
    return refuse("config.layers", "layers is null, and layer_count is not 0");
  }
  return guarded([&]() -> tq_status {
    tq::CacheConfig to{.layers = {},
                       .page_tokens = config->page_tokens,
                       .recent_tokens = config->recent_tokens,
                       .first_tokens = config->first_tokens,
                       .rollback_tokens = config->rollback_tokens,
                       .max_bytes = config->max_bytes,
                       .seed = config->seed,
                       .memory = {config->memory.context, config->memory.allocate, config->memory.release}};
    to.layers.reserve(config->layer_count);
    for (const tq_layer& layer : std::span(config->layers, config->layer_count)) {
      to.layers.push_back(
          {layer.kv_heads, layer.head_dim, layer.value_dim, layer.window, layer.format, layer.center_bits});
    }
    if (const std::string problem = tq::why_invalid(to, kFormats); !problem.empty()) {
      return refuse("config", problem.c_str());
    }
    *created = new tq_cache(std::move(to));
    return to_c({});
  });
}

void tq_cache_destroy(tq_cache* cache) { delete cache; }

tq_memory_use tq_memory(const tq_cache* cache) {
  if (cache == nullptr) return {};
  const tq::MemoryUse use = cache->cache.memory();
  return {use.page_bytes, use.tail_bytes, use.slab_bytes, use.table_bytes, use.bits_per_coordinate};
}

tq_status tq_create_sequence(tq_cache* cache, tq_sequence* created) {
  return create(cache, created, [](auto& to, auto& id) { return to.create_sequence(id); });
}

tq_status tq_fork(tq_cache* cache, tq_sequence source, size_t length, tq_sequence* created) {
  return create(cache, created, [&](auto& to, auto& id) { return to.fork(to_id(source), length, id); });
}

tq_status tq_truncate(tq_cache* cache, tq_sequence sequence, size_t length) {
  return on(cache, [&](auto& to) { return to.truncate(to_id(sequence), length); });
}

tq_status tq_erase(tq_cache* cache, tq_sequence sequence, size_t begin, size_t end) {
  return on(cache, [&](auto& to) { return to.erase(to_id(sequence), begin, end); });
}

tq_status tq_keep(tq_cache* cache, tq_sequence sequence, size_t begin, const uint32_t* tokens, size_t count) {
  if (tokens == nullptr && count != 0) return bad_argument("tokens");
  return on(cache, [&](auto& to) { return to.keep(to_id(sequence), begin, {tokens, count}); });
}

tq_status tq_reserve(tq_cache* cache, tq_sequence sequence, size_t tokens) {
  return on(cache, [&](auto& to) { return to.reserve(to_id(sequence), tokens); });
}

tq_status tq_seal(tq_cache* cache, tq_sequence sequence) {
  return on(cache, [&](auto& to) { return to.seal(to_id(sequence)); });
}

void tq_release(tq_cache* cache, tq_sequence sequence) {
  if (cache != nullptr) cache->cache.release(to_id(sequence));
}

size_t tq_length(const tq_cache* cache, tq_sequence sequence) {
  return cache != nullptr ? cache->cache.length(to_id(sequence)) : 0;
}

tq_status tq_read(const tq_cache* cache, tq_sequence sequence, size_t layer, size_t begin, tq_rows_out keys,
                  tq_rows_out values) {
  return on(cache,
            [&](auto& from) { return from.read(to_id(sequence), layer, begin, to_rows(keys), to_rows(values)); });
}

tq_status tq_attend(tq_cache* cache, size_t layer, const tq_item* items, size_t count, const tq_params* params,
                    const tq_executor* executor) {
  if (const char* field = null_field(items, count, params)) return bad_argument(field);
  if (executor != nullptr && executor->run == nullptr) return bad_argument("executor.run");
  return on(cache, [&](auto& to) {
    return tq::attend(to, layer, to_batch(items, count), to_params(params), Executor{executor});
  });
}

tq_status tq_logits(const tq_cache* cache, tq_sequence sequence, size_t layer, tq_rows queries, float* out,
                    const tq_executor* executor) {
  if (executor != nullptr && executor->run == nullptr) return bad_argument("executor.run");
  return on(cache, [&](auto& from) {
    return tq::logits(from, to_id(sequence), layer, to_rows(queries), out, Executor{executor});
  });
}

tq_status tq_plan_create(tq_attention_plan** created) {
  if (created == nullptr) return bad_argument("created");
  *created = nullptr;
  return guarded([&]() -> tq_status {
    *created = new tq_attention_plan;
    return to_c({});
  });
}

void tq_plan_destroy(tq_attention_plan* plan) { delete plan; }

void tq_plan_drop(tq_attention_plan* plan) {
  if (plan != nullptr) plan->plan.drop();
}

tq_status tq_plan(tq_cache* cache, size_t layer, const tq_item* items, size_t count, const tq_params* params,
                  tq_attention_plan* plan) {
  if (plan == nullptr) return bad_argument("plan");
  if (const char* field = null_field(items, count, params)) return bad_argument(field);
  return on(cache,
            [&](auto& to) { return tq::plan(to, layer, to_batch(items, count), to_params(params), plan->plan); });
}

size_t tq_plan_workspace_bytes(const tq_attention_plan* plan) {
  return plan != nullptr ? plan->plan.workspace_bytes() : 0;
}

size_t tq_plan_phases(const tq_attention_plan* plan) { return plan != nullptr ? plan->plan.phases() : 0; }

size_t tq_plan_tasks(const tq_attention_plan* plan, size_t phase) {
  return plan != nullptr ? plan->plan.tasks(phase) : 0;
}

void tq_plan_run(const tq_attention_plan* plan, size_t phase, size_t task, void* workspace) {
  if (plan != nullptr) plan->plan.run(phase, task, static_cast<std::byte*>(workspace));
}

void tq_merge_partials(tq_rows_out out, float* lse, tq_rows other, const float* other_lse) {
  tq::merge_partials(to_rows(out), lse, to_rows(other), other_lse);
}

void tq_finish_partials(tq_rows_out out, float* lse, const float* sink_logits, size_t sink_count) {
  tq::finish_partials(to_rows(out), lse, {sink_logits, sink_count});
}

tq_status tq_save(const tq_cache* cache, tq_sequence sequence, tq_sink sink) {
  return on(cache, [&](auto& from) { return tq::save(from, to_id(sequence), {sink.context, sink.write}); });
}

tq_status tq_load(tq_cache* cache, tq_source source, tq_sequence* created) {
  return create(cache, created, [&](auto& to, auto& id) { return tq::load(to, {source.context, source.read}, id); });
}
