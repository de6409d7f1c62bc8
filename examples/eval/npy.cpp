// Reading .npy: magic, version, header length, a Python dict literal, the numbers.
#include "npy.hpp"

#include "input_file.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <set>
#include <string_view>

namespace turboquant_eval {
namespace {

using turboquant::DType;

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kMaxHeaderBytes = 65'536;  // an array of three dimensions needs 128

struct Header {
  std::string type;
  bool fortran_order = false;
  std::vector<std::size_t> shape;
};

// Parses {'descr': '<f4', 'fortran_order': False, 'shape': (2, 99, 256), } and nothing else.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const InputFile& file) : text_(text), file_(file) {}

  Header parse() {
    Header header;
    std::set<std::string, std::less<>> seen;
    expect('{');
    while (!accept('}')) {
      const std::string key = parse_string();
      expect(':');
      if (!seen.insert(key).second) fail("each key once");
      if (key == "descr") {
        header.type = parse_string();
      } else if (key == "fortran_order") {
        header.fortran_order = parse_bool();
      } else if (key == "shape") {
        header.shape = parse_shape();
      } else {
        fail("the keys descr, fortran_order and shape");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) fail("nothing after the dict");
    if (seen.size() != 3) fail("the keys descr, fortran_order and shape");
    return header;
  }

 private:
  [[noreturn]] void fail(std::string_view expected) const {
    std::string rest;
    for (const char c : text_.substr(at_, 24)) rest += c >= ' ' && c <= '~' ? c : '?';
    file_.refuse("header", expected, fmt::format("\"{}\" at byte {}", rest, at_));
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }

  bool accept(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail(fmt::format("'{}'", c));
  }

  bool accept_word(std::string_view word) {
    skip_space();
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  std::string parse_string() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') fail("a string (an array of one simple type)");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) fail("the end of the string");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }

  bool parse_bool() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    fail("True or False");
  }

  std::vector<std::size_t> parse_shape() {
    std::vector<std::size_t> shape;
    expect('(');
    while (!accept(')')) {
      skip_space();
      std::size_t extent = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), extent);
      if (error != std::errc{}) fail("a whole number below 2^64");
      at_ = static_cast<std::size_t>(end - text_.data());
      shape.push_back(extent);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return shape;
  }

  std::string_view text_;
  const InputFile& file_;
  std::size_t at_ = 0;
};

}  // namespace

std::optional<std::string> npy_tensor_name(const std::filesystem::path& file) {
  if (file.extension() != ".npy") return std::nullopt;
  const std::string stem = file.stem().string();
  const std::size_t at = stem.rfind("layers.");
  if (at == std::string::npos || !role_of(std::string_view(stem).substr(at))) return std::nullopt;
  if (at > 0 && std::string_view("._-").find(stem[at - 1]) == std::string_view::npos) return std::nullopt;
  return stem.substr(at);
}

Tensor read_npy(const std::filesystem::path& path) {
  const auto name = npy_tensor_name(path);
  if (!name) throw FileError(path, "file name", "<prefix>layers.N.k.npy, .v.npy or .q.npy", path.filename().string());
  InputFile file(path);
  std::array<std::byte, 12> prefix{};
  const auto byte = [&](std::size_t i) { return std::to_integer<std::uint64_t>(prefix[i]); };
  file.read(0, std::span(prefix).first(10), "magic, version and header length");
  for (std::size_t i = 0; i < kMagic.size(); ++i) {
    if (byte(i) != static_cast<unsigned char>(kMagic[i])) file.refuse("magic", "\\x93NUMPY", "other bytes");
  }
  const std::uint64_t version = byte(6);
  if (version < 1 || version > 3 || byte(7) != 0) {
    file.refuse("version", "1.0, 2.0 or 3.0", fmt::format("{}.{}", version, byte(7)));
  }
  std::uint64_t data_begin = 10, length = byte(8) | byte(9) << 8;
  if (version > 1) {
    file.read(10, std::span(prefix).subspan(10), "header length");
    data_begin = 12;
    length |= byte(10) << 16 | byte(11) << 24;
  }
  if (length > kMaxHeaderBytes) {
    file.refuse("header length", fmt::format("at most {}", kMaxHeaderBytes), fmt::to_string(length));
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file.read(data_begin, std::as_writable_bytes(std::span(text)), "header");
  data_begin += length;
  const Header header = HeaderParser(text, file).parse();

  Tensor tensor{path, *name, DType::f32, header.shape, {}};
  if (header.type == "<f2") {
    tensor.type = DType::f16;
  } else if (header.type != "<f4") {
    tensor.refuse("descr '<f4' or '<f2' (numpy has no bfloat16)", "'" + header.type + "'");
  }
  if (header.fortran_order) tensor.refuse("C order (numpy.ascontiguousarray)", "Fortran order");
  const auto bytes = byte_count(header.shape, header.type == "<f2" ? 2 : 4);
  const std::uint64_t data_bytes = file.size() - data_begin;
  if (!bytes || *bytes != data_bytes) {
    tensor.refuse(fmt::format("{} data bytes for {} {}", bytes ? fmt::to_string(*bytes) : "more than 2^64", header.type,
                              to_string(header.shape)),
                  fmt::to_string(data_bytes));
  }
  tensor.bytes.resize(*bytes);
  file.read(data_begin, tensor.bytes, "tensor " + *name);
  return tensor;
}

}  // namespace turboquant_eval
