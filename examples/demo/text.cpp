// Reading texts.
#include "text.hpp"

#include <eval/input_file.hpp>
#include <eval/tensor.hpp>

#include <fmt/format.h>

#include <charconv>
#include <span>

namespace demo {

std::string read_text(const std::filesystem::path& file) {
  turboquant_eval::InputFile input(file);
  std::string text(static_cast<std::size_t>(input.size()), '\0');
  input.read(0, std::as_writable_bytes(std::span(text)), "text");
  return text;
}

std::vector<engine::Token> read_token_ids(const std::filesystem::path& file, std::size_t vocabulary) {
  const std::string text = read_text(file);
  std::vector<engine::Token> tokens;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t' || c == ','; };
  while (true) {
    while (at != end && is_space(*at)) ++at;
    if (at == end) return tokens;
    engine::Token token = 0;
    const auto [next, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (next != end && !is_space(*next)) || token >= vocabulary) {
      throw turboquant_eval::FileError(file, fmt::format("token {}", tokens.size()),
                                       fmt::format("a whole number below {}", vocabulary), "something else");
    }
    tokens.push_back(token);
    at = next;
  }
}

std::vector<engine::Token> bytes_as_tokens(std::string_view text) {
  std::vector<engine::Token> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

}  // namespace demo
