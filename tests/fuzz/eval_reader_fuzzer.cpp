// libFuzzer target for the readers of turboquant_eval, safetensors and .npy: any bytes are refused with a FileError, or
// give tensors whose shape, type and bytes agree. The first byte of an input chooses the reader, the rest is the file.
#include <eval/npy.hpp>
#include <eval/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "fuzz/target.hpp"

namespace {

using namespace turboquant_eval;

/// A folder of this process, gone with it.
struct Folder {
  Folder()
      : path(std::filesystem::temp_directory_path() / ("turboquant_eval_reader_fuzzer_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::filesystem::path path;
};

std::string little_endian(std::uint64_t number, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text += static_cast<char>(number >> (8 * i) & 255);
  return text;
}

/// What was read can be used: every row lies inside the bytes.
void use(const Tensor& tensor) {
  const auto bytes = byte_count(tensor.shape, turboquant::size_of(tensor.type));
  fuzz::require(bytes && *bytes == tensor.bytes.size(), "shape and bytes disagree");
  if (tensor.shape.size() != 3 || *bytes == 0) return;
  const turboquant::ConstRows rows = tensor.rows();
  std::vector<float> row(rows.dim);
  for (const std::size_t token : {std::size_t{0}, rows.tokens - 1}) {
    for (const std::size_t head : {std::size_t{0}, rows.heads - 1}) turboquant::load_row(rows, token, head, row.data());
  }
}

void read(unsigned reader, const std::filesystem::path& folder, std::string_view bytes) {
  const std::filesystem::path path = folder / (reader == 2 ? "layers.3.q.npy" : "input.safetensors");
  {
    std::ofstream file(path, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    fuzz::require(static_cast<bool>(file.flush()), "the input could not be written");
  }
  try {
    if (reader == 2) {
      use(read_npy(path));
    } else {
      const IsWanted all = [](std::string_view) { return true; };
      for (const Tensor& tensor : reader == 0 ? read_safetensors(path) : read_safetensors(path, all)) use(tensor);
    }
  } catch (const FileError& error) {
    fuzz::require(std::string_view(error.what()).find(": expected ") != std::string_view::npos,
                  "a refusal says nothing");
  }
}

void write_seeds(fuzz::Seeds& seeds) {
  const auto entry = [](const std::string& name, const std::string& type, const std::string& shape, unsigned begin,
                        unsigned end) {
    return '"' + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":[)" +
           std::to_string(begin) + ',' + std::to_string(end) + "]}";
  };
  for (const std::string& header :
       {"{" + entry("layers.0.k", "F32", "[1,2,4]", 0, 32) + "," + entry("layers.0.v", "F16", "[1,2,4]", 32, 48) + "}",
        R"({"__metadata__":{"a":"b"},)" + entry("layers.12.q", "BF16", "[2,1,4]", 0, 16) + "," +
            entry("other", "I64", "[4]", 16, 48) + "}",
        "{" + entry("layers.0.k", "F32", "[0,2,4]", 0, 0) + "," + entry("x", "U8", "[]", 0, 1) + "}"}) {
    const std::size_t data = header.find("U8") != std::string::npos ? 1 : 48;
    for (const char reader : {'\0', '\1'})
      seeds.write(reader + little_endian(header.size(), 8) + header + std::string(data, 'x'));
  }
  for (const std::string& dict : {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 4), }   \n",
                                  "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 2, 4)}",
                                  "{\"shape\": (8,), \"fortran_order\": True, \"descr\": \"<f4\"}"}) {
    for (const char version : {'\1', '\2', '\3'}) {
      seeds.write(std::string("\2\x93NUMPY") + version + '\0' + little_endian(dict.size(), version == 1 ? 2 : 4) +
                  dict + std::string(32, 'x'));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (fuzz::Seeds seeds(*argc, *argv); seeds) write_seeds(seeds);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  if (size == 0) return 0;
  read(data[0] % 3, folder.path, {reinterpret_cast<const char*>(data) + 1, size - 1});
  return 0;
}
