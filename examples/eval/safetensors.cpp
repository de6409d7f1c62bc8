// Reading safetensors.
#include "safetensors.hpp"

#include "input_file.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace turboquant_eval {
namespace {

using nlohmann::json;
using turboquant::DType;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation

const std::map<std::string, std::size_t, std::less<>> kElementBytes = {
    {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},  {"I32", 4}, {"I16", 2},     {"I8", 1},
    {"U64", 8}, {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

struct Entry {
  std::string name, type;
  std::vector<std::size_t> shape;
  std::uint64_t begin = 0, end = 0;
};

// Names come from the file: quoted and escaped before they are shown, and never longer than a line.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  constexpr std::size_t kLongest = 80;
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

class SafetensorsReader {
 public:
  SafetensorsReader(const std::filesystem::path& path, const IsWanted& is_wanted)
      : file_(path), is_wanted_(is_wanted) {}

  // The wanted tensors; none is an error that says it was looking for `expected`, unless that is empty.
  std::vector<Tensor> read(std::string_view expected) {
    const json header = read_header();
    std::vector<Entry> entries;
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") continue;
      entries.push_back(parse_entry(name, value));
    }
    check_coverage(entries);
    std::vector<Tensor> tensors;
    for (const Entry& entry : entries) {
      if (is_wanted_(entry.name)) tensors.push_back(read_tensor(entry));
    }
    if (tensors.empty() && !expected.empty()) {
      file_.refuse("header", expected,
                   entries.empty() ? "no tensor"
                                   : fmt::format("{} tensors such as {}", entries.size(), shown(entries.front().name)));
    }
    return tensors;
  }

 private:
  json read_header() {
    std::array<std::byte, kLengthBytes> prefix{};
    if (file_.size() < kLengthBytes) {
      file_.refuse("header length", "8 bytes", fmt::format("a file of {} bytes", file_.size()));
    }
    file_.read(0, prefix, "header length");
    std::uint64_t length = 0;
    for (std::size_t i = kLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(prefix[i]);
    const std::uint64_t limit = (std::min)(kMaxHeaderBytes, file_.size() - kLengthBytes);
    if (length < 2 || length > limit) {
      file_.refuse("header length", fmt::format("2 to {} bytes (a safetensors file)", limit), fmt::to_string(length));
    }
    std::string text(static_cast<std::size_t>(length), '\0');
    file_.read(kLengthBytes, std::as_writable_bytes(std::span(text)), "header");
    data_begin_ = kLengthBytes + length;
    return parse_header(text);
  }

  json parse_header(const std::string& text) const {
    // A name given twice would silently hide one of the two tensors.
    std::set<std::string> names;
    const auto refuse_twice = [&](int depth, json::parse_event_t event, json& value) {
      if (event == json::parse_event_t::key && depth == 1 && !names.insert(value.get<std::string>()).second) {
        file_.refuse("header", "each name once", shown(value) + " twice");
      }
      return true;
    };
    json header;
    try {
      header = json::parse(text, refuse_twice);
    } catch (const json::exception& error) {
      file_.refuse("header", "JSON", error.what());
    }
    if (!header.is_object()) file_.refuse("header", "a JSON object", header.type_name());
    return header;
  }

  Entry parse_entry(const std::string& name, const json& value) const {
    const std::string part = "tensor " + (is_wanted_(name) ? name : shown(name));
    const auto is_count = [](const json& number) { return number.is_number_unsigned(); };
    const auto is_counts = [&](const json& list) {
      return list.is_array() && std::all_of(list.begin(), list.end(), is_count);
    };
    if (!value.is_object()) file_.refuse(part, "an object with dtype, shape and data_offsets", shown(value));
    Entry entry{name, {}, {}, 0, 0};
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
      if (!value.contains(key)) file_.refuse(part, fmt::format("an entry {}", key), shown(value));
    }
    if (!value["dtype"].is_string()) file_.refuse(part, "a string as dtype", shown(value["dtype"]));
    entry.type = value["dtype"].get<std::string>();
    if (!is_counts(value["shape"])) file_.refuse(part, "a shape of whole numbers", shown(value["shape"]));
    entry.shape = value["shape"].get<std::vector<std::size_t>>();
    const json& offsets = value["data_offsets"];
    if (!is_counts(offsets) || offsets.size() != 2) file_.refuse(part, "data_offsets [begin, end]", shown(offsets));
    entry.begin = offsets[0].get<std::uint64_t>();
    entry.end = offsets[1].get<std::uint64_t>();
    const std::uint64_t data_bytes = file_.size() - data_begin_;
    if (entry.begin > entry.end || entry.end > data_bytes) {
      file_.refuse(part, fmt::format("data_offsets within the {} data bytes of the file", data_bytes), shown(offsets));
    }
    check_type_and_size(entry, part);
    return entry;
  }

  void check_type_and_size(const Entry& entry, const std::string& part) const {
    const auto element = kElementBytes.find(entry.type);
    if (is_wanted_(entry.name) && entry.type != "F32" && entry.type != "F16" && entry.type != "BF16") {
      file_.refuse(part, "dtype F32, F16 or BF16", shown(entry.type));
    }
    if (element == kElementBytes.end()) return;  // a type of a later version, in a tensor that is not read
    const auto bytes = byte_count(entry.shape, element->second);
    if (!bytes || *bytes != entry.end - entry.begin) {
      file_.refuse(part,
                   fmt::format("{} bytes for {} {}", bytes ? fmt::to_string(*bytes) : "more than 2^64", entry.type,
                               to_string(entry.shape)),
                   fmt::format("data_offsets [{}, {}], {} bytes", entry.begin, entry.end, entry.end - entry.begin));
    }
  }

  void check_coverage(std::vector<Entry>& entries) const {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
    std::uint64_t covered = 0;
    for (const Entry& entry : entries) {
      if (entry.begin != covered) {
        file_.refuse("tensor " + (is_wanted_(entry.name) ? entry.name : shown(entry.name)),
                     fmt::format("data from offset {} on, where the tensor before it ends", covered),
                     fmt::format("offset {} ({})", entry.begin, entry.begin < covered ? "an overlap" : "a hole"));
      }
      covered = entry.end;
    }
    const std::uint64_t data_bytes = file_.size() - data_begin_;
    if (covered != data_bytes) {
      file_.refuse("data", fmt::format("{} bytes, the end of the last tensor", covered), fmt::to_string(data_bytes));
    }
  }

  Tensor read_tensor(const Entry& entry) {
    Tensor tensor{file_.path(), entry.name, DType::f32, entry.shape, {}};
    if (entry.type == "F16") tensor.type = DType::f16;
    if (entry.type == "BF16") tensor.type = DType::bf16;
    tensor.bytes.resize(static_cast<std::size_t>(entry.end - entry.begin));
    file_.read(data_begin_ + entry.begin, tensor.bytes, "tensor " + entry.name);
    return tensor;
  }

  InputFile file_;
  const IsWanted& is_wanted_;
  std::uint64_t data_begin_ = 0;
};

}  // namespace

std::vector<Tensor> read_safetensors(const std::filesystem::path& file) {
  const IsWanted has_role = [](std::string_view name) { return role_of(name).has_value(); };
  return SafetensorsReader(file, has_role).read("tensors named layers.N.k and layers.N.v");
}

std::vector<Tensor> read_safetensors(const std::filesystem::path& file, const IsWanted& is_wanted) {
  return SafetensorsReader(file, is_wanted).read({});
}

}  // namespace turboquant_eval
