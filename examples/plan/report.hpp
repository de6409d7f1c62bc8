// What turboquant_plan prints and writes.
#pragma once

#include "candidate.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace turboquant_plan {

/// Bytes of a machine and of the weights on it.
struct Room {
  std::uint64_t memory = 0, weights = 0;
};

struct Report {
  Model model;
  std::vector<std::uint64_t> contexts;
  std::uint64_t sequences = 1, shared_tokens = 0;
  std::optional<Room> room;
  std::vector<Candidate> rows;  // f16 first

  Load load(std::uint64_t tokens) const { return {tokens, sequences, shared_tokens}; }
};

/// A size of every row at every context length, and what fits if there is a room to fit into. Throws PlanError if a
/// size does not fit 64 bits.
std::string table(const Report& report);

/// The same in JSON, sizes in bytes.
std::string as_json(const Report& report);

/// Throws std::runtime_error if `file` cannot be written.
void write(const std::string& text, const std::filesystem::path& file);

}  // namespace turboquant_plan
