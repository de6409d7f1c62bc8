// Table and JSON of a memory plan.
#include "report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <fstream>
#include <stdexcept>

namespace turboquant_plan {
namespace {

using nlohmann::ordered_json;

std::string grouped(std::uint64_t n) {
  std::string text = fmt::to_string(n);
  for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, 1, ',');
  return text;
}

std::string size_text(std::uint64_t bytes) {
  const auto size = static_cast<double>(bytes);
  const auto scaled = [](double value, const char* unit) {
    return fmt::format("{:.{}f} {}", value, value < 9.9995 ? 3 : value < 99.995 ? 2 : 1, unit);
  };
  return size < 999.95e6 ? scaled(size / 1e6, "MB") : scaled(size / 1e9, "GB");
}

struct Size {
  std::uint64_t bytes;
  double smaller, bits;  // than f16; per coordinate that a query can see
};

Size size_of(const Report& report, const Candidate& row, std::uint64_t tokens) {
  const std::uint64_t f16 = report.rows.front().bytes(report.load(tokens)), bytes = row.bytes(report.load(tokens));
  if (f16 == kTooMany || bytes == kTooMany) {
    throw PlanError(fmt::format("context is {}; this model's cache would not fit 2^64 bytes", tokens));
  }
  const double ratio = static_cast<double>(f16) / static_cast<double>(bytes);
  return {bytes, ratio, 16 / ratio};
}

std::string head(const Report& report) {
  std::string text = report.model.name.empty() ? "" : fmt::format("{}: ", report.model.name);
  text += fmt::format("{}; {} sequence{}", describe(report.model), grouped(report.sequences),
                      report.sequences == 1 ? "" : "s");
  if (report.shared_tokens > 0) text += fmt::format(" with the first {} tokens in common", report.shared_tokens);
  const turboquant::CacheConfig& config = report.rows.front().config;
  return text + fmt::format("\npages of {} tokens; raw: the newest {}{}, {} for rollback\n\n", config.page_tokens,
                            config.recent_tokens,
                            config.first_tokens > 0 ? fmt::format(", the first {}", config.first_tokens) : "",
                            config.rollback_tokens);
}

std::string sizes(const Report& report) {
  std::string text = fmt::format("{:<13}", "tokens");
  for (const std::uint64_t tokens : report.contexts) text += fmt::format("{:>11}{:>15}", grouped(tokens), "");
  text.erase(text.find_last_not_of(' ') + 1);
  text += fmt::format("\n{:<13}", "format");
  for (std::size_t i = 0; i < report.contexts.size(); ++i)
    text += fmt::format("{:>11}{:>9}{:>6}", "size", "smaller", "bits");
  for (const Candidate& row : report.rows) {
    text += fmt::format("\n{:<13}", row.name);
    for (const std::uint64_t tokens : report.contexts) {
      const Size size = size_of(report, row, tokens);
      text += fmt::format("{:>11}{:>8.2f}x{:>6.2f}", size_text(size.bytes), size.smaller, size.bits);
    }
  }
  return text + '\n';
}

std::string count_text(std::uint64_t count, std::uint64_t most) { return count == most ? "no limit" : grouped(count); }

std::string fits(const Report& report, const Room& room) {
  const std::uint64_t budget = room.memory - room.weights;
  std::string text = fmt::format("\n{} less {} of weights leave {}:\n{:<13}{:>16}  {}\n{:<13}{:>16}",
                                 size_text(room.memory), size_text(room.weights), size_text(budget), "", "longest",
                                 "most sequences of so many tokens", "format", "context");
  for (const std::uint64_t tokens : report.contexts) text += fmt::format("{:>12}", grouped(tokens));
  for (const Candidate& row : report.rows) {
    text +=
        fmt::format("\n{:<13}{:>16}", row.name, count_text(longest_context(row, report.load(0), budget), kMostTokens));
    for (const std::uint64_t tokens : report.contexts) {
      text += fmt::format("{:>12}", count_text(most_sequences(row, report.load(tokens), budget), kMostSequences));
    }
  }
  return text + '\n';
}

std::string notes(const Report& report) {
  std::string text =
      "\n1 GB is 10^9 bytes. Bits are per coordinate of a key or value that a query can see, with everything in them:\n"
      "scales, centres, padding, the raw tail, and what a window has passed but rollback may need. Not counted:\n"
      "sequence tables. conservative: TQ8 in the first and last tenth of the layers, TQ4 in the rest.\n";
  if (report.room) {
    text += "What fits counts slabs, if tokens come one at a time; a prompt at once takes more behind windows.\n";
  }
  return text;
}

}  // namespace

std::string table(const Report& report) {
  return head(report) + sizes(report) + (report.room ? fits(report, *report.room) : "") + notes(report);
}

std::string as_json(const Report& report) {
  const turboquant::CacheConfig& config = report.rows.front().config;
  ordered_json root = {{"model", report.model.name},
                       {"layers", report.model.layers},
                       {"kv_heads", report.model.kv_heads},
                       {"head_dim", report.model.head_dim},
                       {"value_dim", config.layers.front().value_dim},
                       {"window", report.model.window},
                       {"global_every", report.model.global_every},
                       {"sequences", report.sequences},
                       {"shared_tokens", report.shared_tokens},
                       {"page_tokens", config.page_tokens},
                       {"recent_tokens", config.recent_tokens},
                       {"first_tokens", config.first_tokens},
                       {"rollback_tokens", config.rollback_tokens},
                       {"center_bits", config.layers.front().center_bits}};
  if (report.room) root.update({{"memory", report.room->memory}, {"weights", report.room->weights}});
  for (const Candidate& row : report.rows) {
    ordered_json entry = {{"format", row.name}};
    for (const std::uint64_t tokens : report.contexts) {
      const Size size = size_of(report, row, tokens);
      ordered_json at = {
          {"tokens", tokens}, {"bytes", size.bytes}, {"compression", size.smaller}, {"bits_per_coordinate", size.bits}};
      if (!row.is_f16) {
        const Footprint parts = footprint(row.config, report.load(tokens));
        at.update({{"page_bytes", parts.page_bytes},
                   {"tail_bytes", parts.tail_bytes},
                   {"slab_bytes", slab_bytes(row.config, report.load(tokens))}});
      }
      if (report.room) {
        at["most_sequences"] = most_sequences(row, report.load(tokens), report.room->memory - report.room->weights);
      }
      entry["contexts"].push_back(at);
    }
    if (report.room) {
      entry["longest_context"] = longest_context(row, report.load(0), report.room->memory - report.room->weights);
    }
    root["formats"].push_back(entry);
  }
  return root.dump(2) + '\n';
}

void write(const std::string& text, const std::filesystem::path& file) {
  std::ofstream stream(file);
  stream << text;
  stream.flush();
  if (!stream) throw std::runtime_error(fmt::format("{}: cannot be written", file.string()));
}

}  // namespace turboquant_plan
