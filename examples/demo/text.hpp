// Texts as tokens.
#pragma once

#include <engine/model.hpp>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace demo {

/// The bytes of a file. Throws turboquant_eval::FileError.
std::string read_text(const std::filesystem::path& file);

/// Whole numbers separated by spaces or lines. Throws turboquant_eval::FileError if there is anything else, or a number
/// that is no token of the vocabulary.
std::vector<engine::Token> read_token_ids(const std::filesystem::path& file, std::size_t vocabulary);

/// A token per byte, for a vocabulary of the 256 bytes.
std::vector<engine::Token> bytes_as_tokens(std::string_view text);

}  // namespace demo
