// Speed-ups over plain f32 and f16 rows. The two sides of a pair take turns within one run, so that a change of clock
// or of neighbours meets both; the median over the rounds is printed, as lines "name value". README.md says what each
// name means.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "baseline.hpp"
#include "filled_cache.hpp"
#include "measure.hpp"
#include "two_threads.hpp"

namespace {

using baseline::Isa;

constexpr std::size_t kDim = 128;
constexpr double kSeconds = 0.01;  // at least so long is every single timing

struct Options {
  std::regex filter{""};
  std::size_t rounds = 9;
  std::size_t cache_bytes = measure::last_level_cache_bytes();
  std::optional<turboquant::Isa> forced{};
  bool list = false, detail = false;

  turboquant::Isa isa() const { return forced.value_or(turboquant::best_isa()); }
  // What is measured of a forced ISA is called after it.
  std::string suffix() const { return forced ? std::string("_") + turboquant::to_string(*forced) : std::string(); }
};

// A way to do something; time is counted per unit (token, vector, byte).
struct Contender {
  std::string name;
  double units;
  std::function<void()> work;
};

// rounds x contenders: ns per unit. All of them once per round, in turn.
std::vector<std::vector<double>> take_turns(const std::vector<Contender>& contenders, std::size_t rounds) {
  std::vector<std::vector<double>> times(contenders.size());
  for (const Contender& contender : contenders) contender.work();
  for (std::size_t round = 0; round < rounds; ++round) {
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      times[c].push_back(measure::time_ns(contenders[c].work, kSeconds) / contenders[c].units);
    }
  }
  return times;
}

void print_times(const Options& options, const std::vector<Contender>& contenders,
                 const std::vector<std::vector<double>>& times) {
  if (!options.detail) return;
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    std::fprintf(stderr, "#   %-22s median %9.3f  best %9.3f ns\n", contenders[c].name.c_str(),
                 measure::median(times[c]), *std::min_element(times[c].begin(), times[c].end()));
  }
}

// How many times faster the first contender is than the fastest (by median) of the others: median over rounds of the
// quotient.
double speed_up(const Options& options, const std::vector<Contender>& contenders) {
  const auto times = take_turns(contenders, options.rounds);
  print_times(options, contenders, times);
  const auto best = std::min_element(times.begin() + 1, times.end(), [](const auto& a, const auto& b) {
    return measure::median(a) < measure::median(b);
  });
  std::vector<double> quotients;
  for (std::size_t round = 0; round < options.rounds; ++round) quotients.push_back((*best)[round] / times[0][round]);
  return measure::median(quotients);
}

// The vectorised ones, or the portable one where there is no other.
std::vector<Isa> baseline_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    if (baseline::is_supported(isa)) isas.push_back(isa);
  }
  if (isas.empty()) isas.push_back(Isa::portable);
  return isas;
}

// So many bytes must stream past for the caches to play no part: four times the last-level cache, or what memory
// allows. The programs hold about five such streams at a time.
std::size_t dram_bytes(const Options& options) {
  const std::size_t wanted = 4 * options.cache_bytes, allowed = measure::available_memory_bytes() / 8;
  if (wanted <= allowed) return wanted;
  std::fprintf(stderr, "# memory allows streams of only %zu MiB, %.1f times the last-level cache\n", allowed >> 20,
               static_cast<double>(allowed) / static_cast<double>(options.cache_bytes));
  return allowed;
}

constexpr std::size_t kDram = 0;  // a context as long as dram_bytes() asks for

template <class F>
constexpr std::size_t key_code_bytes() {
  return kDim * F::key_codec::bits / 8;
}

// Kept from one measurement to the next: filling takes longer than measuring.
template <class F>
std::shared_ptr<FilledCache<F>> filled_cache(const Options& options, std::size_t tokens) {
  static std::shared_ptr<FilledCache<F>> kept;
  static std::size_t kept_for = ~std::size_t{0};
  if (kept_for != tokens) {
    kept.reset();
    kept = std::make_shared<FilledCache<F>>(tokens != kDram ? tokens : dram_bytes(options) / key_code_bytes<F>(), kDim,
                                            options.isa());
    kept_for = tokens;
  }
  return kept;
}

void fill_f32(measure::HugeArray<float>& to, unsigned seed) {
  const std::vector<float> pattern = random_floats((std::min)(to.size(), std::size_t{8192} * kDim), seed);
  for (std::size_t k = 0; k < to.size(); ++k) to[k] = pattern[k % pattern.size()];
}
void fill_f16(measure::HugeArray<std::uint16_t>& to, unsigned seed) {
  const std::vector<float> pattern = random_floats((std::min)(to.size(), std::size_t{8192} * kDim), seed);
  for (std::size_t k = 0; k < to.size(); ++k) {
    to[k] = k < pattern.size() ? turboquant::to_half(pattern[k]).bits : to[k - pattern.size()];
  }
}

template <class F>
Contender logits_contender(const std::shared_ptr<FilledCache<F>>& cache, const std::vector<float>& query) {
  auto out = std::make_shared<measure::HugeArray<float>>(cache->tokens());
  return {"turboquant", static_cast<double>(cache->tokens()),
          [=] { cache->compute_logits(query.data(), 1, out->data()); }};
}

template <class F>
double logits_vs_f32(const Options& options, std::size_t tokens) {
  const std::vector<float> query = random_floats(kDim, 3);
  const auto cache = filled_cache<F>(options, tokens);
  std::vector<Contender> contenders{logits_contender<F>(cache, query)};
  const std::size_t rows = tokens != kDram ? tokens : dram_bytes(options) / (kDim * sizeof(float));
  measure::HugeArray<float> keys(rows * kDim), out(rows);
  fill_f32(keys, 4);
  for (const Isa isa : baseline_isas()) {
    const std::string suffix = " f32 " + std::string(to_string(isa));
    contenders.push_back({"loop" + suffix, static_cast<double>(rows), [&, isa] {
                            baseline::compute_logits_f32(isa, query.data(), keys.data(), rows, kDim, out.data());
                          }});
    contenders.push_back({"Eigen" + suffix, static_cast<double>(rows), [&, isa] {
                            baseline::compute_logits_eigen(isa, query.data(), keys.data(), rows, kDim, out.data());
                          }});
  }
  return speed_up(options, contenders);
}

template <class F>
double attend_vs_f16(const Options& options, std::size_t tokens, std::size_t heads) {
  const std::vector<float> queries = random_floats(heads * kDim, 3);
  std::vector<float> our_out(heads * kDim), out(heads * kDim);
  const auto cache = filled_cache<F>(options, tokens);
  std::vector<Contender> contenders{{"turboquant", static_cast<double>(cache->tokens()),
                                     [&] { cache->attend(queries.data(), heads, our_out.data()); }}};
  const std::size_t rows = tokens != kDram ? tokens : dram_bytes(options) / (2 * kDim * sizeof(std::uint16_t));
  measure::HugeArray<std::uint16_t> keys(rows * kDim), values(rows * kDim);
  fill_f16(keys, 4);
  fill_f16(values, 5);
  const float scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  for (const Isa isa : baseline_isas()) {
    contenders.push_back({"loop f16 " + std::string(to_string(isa)), static_cast<double>(rows), [&, isa] {
                            baseline::attend_f16(isa, queries.data(), heads, keys.data(), values.data(), rows, kDim,
                                                 scale, out.data());
                          }});
  }
  return speed_up(options, contenders);
}

// Median time of one contender.
double time_of(const Options& options, const Contender& contender) {
  const std::vector<Contender> contenders{contender};
  const auto times = take_turns(contenders, options.rounds);
  print_times(options, contenders, times);
  return measure::median(times[0]);
}

// ns per key and query, eight queries at a time.
template <class F>
double logits_group_ns(const Options& options) {
  constexpr std::size_t kHeads = 8;
  const std::vector<float> queries = random_floats(kHeads * kDim, 3);
  const auto cache = filled_cache<F>(options, 1024);
  std::vector<float> out(kHeads * cache->tokens());
  return time_of(options, {"turboquant", static_cast<double>(kHeads * cache->tokens()),
                           [&] { cache->compute_logits(queries.data(), kHeads, out.data()); }});
}

// ns per token of a decode step of four heads.
template <class F>
double attend_ns(const Options& options) {
  constexpr std::size_t kHeads = 4;
  const std::vector<float> queries = random_floats(kHeads * kDim, 3);
  const auto cache = filled_cache<F>(options, 4096);
  std::vector<float> out(kHeads * kDim);
  return time_of(options, {"turboquant", static_cast<double>(cache->tokens()),
                           [&] { cache->attend(queries.data(), kHeads, out.data()); }});
}

// 512 queries against 8,192 tokens, all seen by all.
template <class F>
double prefill_vs_f32(const Options& options) {
  constexpr std::size_t kQueries = 512, kTokens = 8192;
  const std::vector<float> queries = random_floats(kQueries * kDim, 3);
  std::vector<float> our_out(kQueries * kDim), out(kQueries * kDim);
  const auto cache = filled_cache<F>(options, kTokens);
  std::vector<Contender> contenders{{"turboquant", static_cast<double>(kQueries * cache->tokens()),
                                     [&] { cache->prefill(queries.data(), kQueries, our_out.data()); }}};
  measure::HugeArray<float> keys(kTokens * kDim), values(kTokens * kDim);
  fill_f32(keys, 4);
  fill_f32(values, 5);
  const float scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  for (const Isa isa : baseline_isas()) {
    contenders.push_back(
        {"Eigen f32 " + std::string(to_string(isa)), static_cast<double>(kQueries * kTokens), [&, isa] {
           baseline::prefill_eigen(isa, queries.data(), kQueries, keys.data(), values.data(), kTokens, kDim, scale,
                                   out.data());
         }});
  }
  return speed_up(options, contenders);
}

// A decode step of four heads over a context that the last-level cache holds: one thread over two.
template <class F>
double two_threads(const Options& options) {
  constexpr std::size_t kHeads = 4;
  const std::vector<float> queries = random_floats(kHeads * kDim, 3);
  std::vector<float> out(kHeads * kDim);
  const auto cache = filled_cache<F>(options, 16384);
  TwoThreads pair;
  const auto units = static_cast<double>(cache->tokens());
  return speed_up(options, {{"two threads", units, [&] { cache->attend(queries.data(), kHeads, out.data(), pair); }},
                            {"one thread", units, [&] { cache->attend(queries.data(), kHeads, out.data()); }}});
}

// A decode step of 16 sequences of 2,048 tokens, four heads each, in one call.
template <class F>
double batch_vs_f16(const Options& options) {
  constexpr std::size_t kSequences = 16, kTokens = 2048, kHeads = 4;
  const std::vector<float> queries = random_floats(kSequences * kHeads * kDim, 3);
  std::vector<float> our_out(queries.size()), out(queries.size());
  FilledCache<F> cache(kTokens, kDim, options.isa(), kSequences);
  std::vector<Contender> contenders{{"turboquant", static_cast<double>(kSequences * kTokens),
                                     [&] { cache.attend(queries.data(), kHeads, our_out.data()); }}};
  measure::HugeArray<std::uint16_t> keys(kSequences * kTokens * kDim), values(kSequences * kTokens * kDim);
  fill_f16(keys, 4);
  fill_f16(values, 5);
  const float scale = 1.0F / std::sqrt(static_cast<float>(kDim));
  for (const Isa isa : baseline_isas()) {
    contenders.push_back(
        {"loop f16 " + std::string(to_string(isa)), static_cast<double>(kSequences * kTokens), [&, isa] {
           for (std::size_t s = 0; s < kSequences; ++s) {
             baseline::attend_f16(isa, queries.data() + s * kHeads * kDim, kHeads, keys.data() + s * kTokens * kDim,
                                  values.data() + s * kTokens * kDim, kTokens, kDim, scale,
                                  out.data() + s * kHeads * kDim);
           }
         }});
  }
  return speed_up(options, contenders);
}

// Time of reading as many bytes as the key codes have, over the time of the logits.
template <class F>
double bandwidth_fraction(const Options& options) {
  const std::vector<float> query = random_floats(kDim, 3);
  const auto cache = filled_cache<F>(options, kDram);
  std::vector<Contender> contenders{logits_contender<F>(cache, query)};
  const std::size_t bytes = cache->tokens() * key_code_bytes<F>() / 512 * 512;
  measure::HugeArray<std::uint32_t> memory(bytes / sizeof(std::uint32_t));
  std::uint32_t seen = 0;
  for (const Isa isa : baseline_isas()) {
    contenders.push_back({"read " + std::string(to_string(isa)), static_cast<double>(cache->tokens()),
                          [&, isa] { seen |= baseline::read_memory(isa, memory.data(), bytes); }});
  }
  const double fraction = speed_up(options, contenders);
  if (seen != 0) std::abort();  // uses what was read
  return fraction;
}

// ns per vector (a key or a value) of appending tokens with default settings, all but the recent ones being coded.
template <class F>
double encode_ns(const Options& options) {
  turboquant::KVCache<F> cache(turboquant::CacheConfig{}, options.isa());
  constexpr std::size_t kCoded = 4096;
  const std::size_t tokens = kCoded + cache.config().recent_tokens;
  const RandomTokens source(tokens, kDim);
  return time_of(options, {"append", 2.0 * kCoded, [&] {
                             turboquant::SequenceId sequence;
                             require_ok(cache.create_sequence(sequence), "create_sequence");
                             source.append_to(cache, sequence, tokens);
                             cache.release(sequence);
                           }});
}

// How even the steps of a long decode are: the median of the 65 steps around a step over its own time, for the worst
// step. A step's time is its best of all rounds, so that it is the work that counts and not the neighbours.
template <class F>
double decode_evenness(const Options& options) {
  constexpr std::size_t kPrompt = 64, kSteps = 4096, kHeads = 4, kAround = 65;
  const RandomTokens source(kPrompt + kSteps, kDim);
  const std::vector<float> queries = random_floats(kHeads * kDim, 3);
  std::vector<float> out(kHeads * kDim);
  std::vector<double> best(kSteps);
  for (std::size_t round = 0; round < options.rounds; ++round) {
    turboquant::KVCache<F> cache(turboquant::CacheConfig{}, options.isa());
    turboquant::BatchItem item;
    require_ok(cache.create_sequence(item.sequence), "create_sequence");
    require_ok(cache.reserve(item.sequence, kPrompt + kSteps), "reserve");
    source.append_to(cache, item.sequence, kPrompt);
    item.queries = turboquant::ConstRows(queries.data(), 1, kHeads, kDim);
    item.out = turboquant::Rows(out.data(), 1, kHeads, kDim);
    for (std::size_t step = 0; step < kSteps; ++step) {
      item.keys = turboquant::ConstRows(source.keys.data() + (kPrompt + step) * kDim, 1, 1, kDim);
      item.values = turboquant::ConstRows(source.values.data() + (kPrompt + step) * kDim, 1, 1, kDim);
      const double time = measure::time_once_ns(
          [&] { require_ok(turboquant::attend(cache, 0, std::span<const turboquant::BatchItem>(&item, 1)), "step"); });
      best[step] = round == 0 ? time : std::min(best[step], time);
    }
  }
  double worst = 1;
  std::size_t worst_step = 0;
  for (std::size_t step = 0; step < kSteps; ++step) {
    const std::size_t begin = std::min(step < kAround / 2 ? 0 : step - kAround / 2, kSteps - kAround);
    const auto first = best.begin() + static_cast<std::ptrdiff_t>(begin);
    const double evenness = measure::median({first, first + kAround}) / best[step];
    if (evenness < worst) worst = evenness, worst_step = step;
  }
  if (options.detail) std::fprintf(stderr, "#   worst step %zu: %.0f ns\n", worst_step, best[worst_step]);
  return worst;
}

struct Measurement {
  std::string name;
  std::function<double(const Options&)> run;
};

template <class F>
void add_logits(std::vector<Measurement>& list, const std::string& format) {
  const std::string name = "logits_" + format + "_vs_f32_";
  list.push_back({name + "l2", [](const Options& options) { return logits_vs_f32<F>(options, 1024); }});
  list.push_back({name + "4k", [](const Options& options) { return logits_vs_f32<F>(options, 4096); }});
  list.push_back({name + "dram", [](const Options& options) { return logits_vs_f32<F>(options, kDram); }});
}

template <class F>
void add_attend(std::vector<Measurement>& list, const std::string& format, const std::string& where,
                std::size_t tokens) {
  for (const std::size_t heads : {std::size_t{1}, std::size_t{4}, std::size_t{8}}) {
    list.push_back({"attend_" + format + "_vs_f16_" + where + "_g" + std::to_string(heads),
                    [=](const Options& options) { return attend_vs_f16<F>(options, tokens, heads); }});
  }
}

// In an order that fills every cache once.
std::vector<Measurement> all_measurements() {
  using turboquant::TQ3, turboquant::TQ4;
  using Polar3 = turboquant::Format<turboquant::PolarQuant<3>, turboquant::PolarQuant<3>>;
  std::vector<Measurement> list;
  list.push_back({"encode_tq4_ns", encode_ns<TQ4>});
  add_attend<TQ4>(list, "tq4", "4k", 4096);
  list.push_back({"attend_ns_tq4", attend_ns<TQ4>});
  add_logits<TQ4>(list, "tq4");
  list.push_back({"bandwidth_fraction_logits_tq4", bandwidth_fraction<TQ4>});
  add_attend<TQ4>(list, "tq4", "dram", kDram);
  list.push_back({"logits_tq4_g8_ns", logits_group_ns<TQ4>});
  list.push_back({"prefill_tq4_vs_f32", prefill_vs_f32<TQ4>});
  list.push_back({"threads2_attend_tq4", two_threads<TQ4>});
  list.push_back({"batch16_attend_tq4_vs_f16", batch_vs_f16<TQ4>});
  add_logits<Polar3>(list, "polar3");
  list.push_back({"attend_ns_tq3", attend_ns<TQ3>});
  add_logits<TQ3>(list, "tq3");
  list.push_back({"bandwidth_fraction_logits_tq3", bandwidth_fraction<TQ3>});
  list.push_back({"decode_evenness_tq3", decode_evenness<TQ3>});
  return list;
}

constexpr const char* kUsage =
    "usage: turboquant_ratios [--filter REGEX] [--rounds N] [--llc MIB] [--isa NAME] [--list] [--detail]\n"
    "  --filter REGEX  only names that contain a match\n"
    "  --rounds N      the median of N rounds is printed (default 9)\n"
    "  --llc MIB       last-level cache to assume, in MiB (default: what the system says)\n"
    "  --isa NAME      kernels to use, which become a suffix of the names (default: the best, no suffix)\n"
    "  --list          print the names and measure nothing\n"
    "  --detail        times of both sides, in ns per token, to standard error\n";

Options parse(int argc, char** argv) {
  Options options;
  const auto refuse = [](const std::string& what) {
    std::fprintf(stderr, "turboquant_ratios: %s\n%s", what.c_str(), kUsage);
    std::exit(2);
  };
  for (int k = 1; k < argc; ++k) {
    const std::string_view argument = argv[k];
    const auto value = [&]() -> const char* {
      if (++k >= argc) refuse(std::string(argument) + " needs a value");
      return argv[k];
    };
    const auto count = [&]() -> std::size_t {
      const char* text = value();
      const long long number = std::atoll(text);
      if (number < 1 || number > 1'000'000)
        refuse(std::string(argument) + " needs a number from 1 to 1000000, not " + text);
      return static_cast<std::size_t>(number);
    };
    if (argument == "--filter") {
      const char* text = value();
      try {
        options.filter = std::regex(text);
      } catch (const std::regex_error& error) {
        refuse("--filter " + std::string(text) + ": " + error.what());
      }
    } else if (argument == "--rounds") {
      options.rounds = count();
    } else if (argument == "--llc") {
      options.cache_bytes = count() << 20;
    } else if (argument == "--isa") {
      const std::string_view name = value();
      for (std::uint8_t number = 0; number < 16 && !options.forced; ++number) {
        const auto isa = static_cast<turboquant::Isa>(number);
        if (turboquant::is_supported(isa) && name == turboquant::to_string(isa)) options.forced = isa;
      }
      if (!options.forced) refuse("no such kernels here: " + std::string(name));
    } else if (argument == "--list") {
      options.list = true;
    } else if (argument == "--detail") {
      options.detail = true;
    } else if (argument == "--help" || argument == "-h") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    } else {
      refuse("unknown option " + std::string(argument));
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  for (const Measurement& measurement : all_measurements()) {
    const std::string name = measurement.name + options.suffix();
    if (!std::regex_search(name, options.filter)) continue;
    if (options.list) {
      std::printf("%s\n", name.c_str());
      continue;
    }
    if (options.detail) std::fprintf(stderr, "# %s\n", name.c_str());
    std::printf("%s %.4g\n", name.c_str(), measurement.run(options));
    std::fflush(stdout);
  }
}
