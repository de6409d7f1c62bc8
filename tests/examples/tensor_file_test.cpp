// The readers of turboquant_eval: good files in every type, and broken ones of every kind, each refused in words.
#include <eval/layer_set.hpp>
#include <eval/npy.hpp>
#include <eval/safetensors.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace {

using turboquant_eval::FileError;
using turboquant_eval::LayerSet;
using turboquant_eval::read_layers;
using turboquant_eval::read_npy;
using turboquant_eval::read_safetensors;
using turboquant_eval::Tensor;
using Path = std::filesystem::path;

class TensorFile : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = Path(testing::TempDir()) / (std::string("turboquant_tensor_file_") + test->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  Path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }

  Path folder_;
};

std::string little_endian(std::uint64_t number, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text += static_cast<char>(number >> (8 * i) & 255);
  return text;
}

std::string safetensors(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

std::string entry(const std::string& name, const std::string& type, const std::string& shape, std::size_t begin,
                  std::size_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + type + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

// Numbers 0, 1, 2, ... as f32.
std::string ramp(std::size_t count) {
  std::string bytes(4 * count, '\0');
  for (std::size_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(i);
    std::memcpy(bytes.data() + 4 * i, &x, 4);
  }
  return bytes;
}

// One layer: keys and values [1, 2, 32], f32.
std::string small_file() {
  return safetensors("{" + entry("layers.0.k", "F32", "[1,2,32]", 0, 256) + "," +
                         entry("layers.0.v", "F32", "[1,2,32]", 256, 512) + "}",
                     ramp(128));
}

std::string npy(const std::string& dict, const std::string& data, char version = 1) {
  const std::string magic = std::string("\x93NUMPY") + version + '\0';
  return magic + little_endian(dict.size(), version == 1 ? 2 : 4) + dict + data;
}

const std::string kDict = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 32), }   \n";

// The message of the FileError that `read` throws; empty if it throws none.
std::string message(const std::function<void()>& read) {
  try {
    read();
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

std::string message(const Path& file) {
  return message([&] { static_cast<void>(read_layers(std::vector<Path>{file})); });
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "in: " << (text)

TEST_F(TensorFile, ReadsEachType) {
  const std::string halves = little_endian(0x3C00, 2) + little_endian(0xC000, 2) + std::string(60, '\0');
  const std::string brains = little_endian(0x3F80, 2) + little_endian(0xC000, 2) + std::string(60, '\0');
  const Path file = write("t.safetensors", safetensors("{\"__metadata__\":{\"a\":\"b\"}," +
                                                           entry("layers.12.k", "F32", "[2,1,32]", 0, 256) + "," +
                                                           entry("layers.12.v", "F16", "[1,1,32]", 256, 320) + "," +
                                                           entry("layers.12.q", "BF16", "[1,1,32]", 320, 384) + "}",
                                                       ramp(64) + halves + brains));
  const std::vector<Tensor> tensors = read_safetensors(file);
  ASSERT_EQ(tensors.size(), 3U);
  for (const Tensor& tensor : tensors) {
    const auto rows = tensor.rows();
    std::vector<float> row(rows.dim);
    turboquant::load_row(rows, 0, rows.heads - 1, row.data());
    const bool is_keys = tensor.name == "layers.12.k";
    EXPECT_EQ(row[0], is_keys ? 32 : 1) << tensor.name;
    EXPECT_EQ(row[1], is_keys ? 33 : -2) << tensor.name;
  }
}

TEST_F(TensorFile, RowsFollowHeadsThenTokens) {
  const Path file =
      write("t.safetensors", safetensors("{" + entry("layers.0.k", "F32", "[2,3,32]", 0, 768) + "}", ramp(192)));
  const auto tensors = read_safetensors(file);
  std::vector<float> row(32);
  turboquant::load_row(tensors.at(0).rows(), 2, 1, row.data());
  EXPECT_EQ(row[31], 191);
}

TEST_F(TensorFile, RefusesEveryTruncation) {
  const std::string bytes = small_file();
  ASSERT_EQ(message(write("whole.safetensors", bytes)), "");
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const std::string text = message(write("cut.safetensors", bytes.substr(0, length)));
    EXPECT_HAS(text, "cut.safetensors") << length;
    EXPECT_HAS(text, "expected") << length;
  }
  EXPECT_HAS(message(write("long.safetensors", bytes + "x")), "end of the last tensor");
}

TEST_F(TensorFile, SurvivesAnyHeaderByte) {
  const std::string bytes = small_file();
  const std::size_t header_end = bytes.size() - 512;
  for (std::size_t i = 0; i < header_end; ++i) {
    for (const char c : {'\0', '0', '9', '"', '{', ']', '-', '\xFF'}) {
      std::string changed = bytes;
      changed[i] = c;
      const Path file = write("changed.safetensors", changed);
      EXPECT_NO_THROW(static_cast<void>(message(file))) << i;  // reads, or throws a FileError; nothing else
    }
  }
}

TEST_F(TensorFile, NamesWhatIsWrongInAHeader) {
  const std::string good_v = entry("layers.0.v", "F32", "[1,2,32]", 256, 512);
  const auto with_k = [&](const std::string& k) { return "{" + k + "," + good_v + "}"; };
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"[1,2]", {"header", "a JSON object", "array"}},
      {"{\"layers.0.k\":", {"header", "JSON"}},
      {with_k("\"layers.0.k\":7"), {"tensor layers.0.k", "an object", "7"}},
      {with_k("\"layers.0.k\":{\"dtype\":\"F32\",\"shape\":[1,2,32]}"), {"tensor layers.0.k", "data_offsets"}},
      {with_k(entry("layers.0.k", "I32", "[1,2,32]", 0, 256)), {"tensor layers.0.k", "F32, F16 or BF16", "I32"}},
      {with_k(entry("layers.0.k", "F32", "[1,2,33]", 0, 256)), {"tensor layers.0.k", "264 bytes", "256 bytes"}},
      {with_k(entry("layers.0.k", "F32", "[1,-2,32]", 0, 256)), {"tensor layers.0.k", "whole numbers", "-2"}},
      {with_k(entry("layers.0.k", "F32", "[1,2.0,32]", 0, 256)), {"tensor layers.0.k", "whole numbers", "2.0"}},
      {with_k(entry("layers.0.k", "F32", "[4294967296,4294967296,32]", 0, 256)), {"tensor layers.0.k", "2^64"}},
      {with_k(entry("layers.0.k", "F32", "[18446744073709551616,2,32]", 0, 256)), {"tensor layers.0.k"}},
      {with_k(entry("layers.0.k", "F32", "[1,2,32]", 0, 100000)), {"tensor layers.0.k", "within the 512 data bytes"}},
      {with_k(entry("layers.0.k", "F32", "[1,2,32]", 256, 0)), {"tensor layers.0.k", "data_offsets"}},
      {with_k(entry("layers.0.k", "F32", "[1,2,32]", 128, 384)), {"offset 0", "a hole"}},
      {with_k(entry("layers.0.k", "F32", "[1,2,32]", 256, 512)), {"expected data from offset 0"}},
      {"{" + entry("layers.0.k", "F32", "[1,2,32]", 0, 256) + "," + entry("layers.0.v", "F32", "[1,2,32]", 128, 384) +
           "}",
       {"tensor layers.0.v", "an overlap"}},
      {with_k(entry("layers.0.k", "F32", "[1,2,32]", 0, 256) + "," + good_v), {"layers.0.v", "twice"}},
      {"{" + entry("model.embed.weight", "F32", "[128]", 0, 512) + "}", {"layers.N.k", "model.embed.weight"}},
      {"{" + entry("layers.0.k", "F32", "[128]", 0, 512) + "}", {"layers.0.v", "to be there"}},
      {"{}", {"data"}},
  };
  for (const auto& [header, parts] : cases) {
    const std::string text = message(write("broken.safetensors", safetensors(header, ramp(128))));
    EXPECT_HAS(text, "broken.safetensors");
    for (const std::string& part : parts) EXPECT_HAS(text, part) << header;
  }
}

TEST_F(TensorFile, RefusesAbsurdHeaderLengths) {
  for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32,
                                     (std::uint64_t{1} << 63) + 8, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    const std::string text = message(write("t.safetensors", little_endian(length, 8) + small_file().substr(8)));
    EXPECT_HAS(text, "header length") << length;
  }
  EXPECT_HAS(message(write("deep.safetensors", safetensors(std::string(200'000, '['), ""))), "header");
}

TEST_F(TensorFile, RefusesWhatIsNoFile) {
  EXPECT_HAS(message(folder_ / "missing.safetensors"), "existing");
  EXPECT_HAS(message(folder_), "none");  // a directory without .npy files
}

TEST_F(TensorFile, ChecksLayers) {
  const auto file = [&](const std::string& k, const std::string& v, const std::string& q) {
    const auto bytes = [](const std::string& shape) {
      std::size_t product = 4, number = 0;
      for (const char c : shape.substr(1)) {
        if (c >= '0' && c <= '9') {
          number = 10 * number + static_cast<std::size_t>(c - '0');
        } else {
          product *= number;
          number = 0;
        }
      }
      return product;
    };
    const std::size_t a = bytes(k), b = a + bytes(v), c = q.empty() ? b : b + bytes(q);
    return write("t.safetensors",
                 safetensors("{" + entry("layers.7.k", "F32", k, 0, a) + "," + entry("layers.7.v", "F32", v, a, b) +
                                 (q.empty() ? "" : "," + entry("layers.7.q", "F32", q, b, c)) + "}",
                             ramp(c / 4)));
  };
  EXPECT_EQ(message(file("[2,3,32]", "[2,3,64]", "[4,3,32]")), "");
  EXPECT_HAS(message(file("[2,3]", "[2,3,64]", "")),
             "tensor layers.7.k: expected a shape [kv_heads, tokens, head_dim]");
  EXPECT_HAS(message(file("[2,0,32]", "[2,0,32]", "")), "found [2, 0, 32]");
  EXPECT_HAS(message(file("[2,3,32]", "[3,2,32]", "")), "tensor layers.7.v: expected the heads and tokens");
  EXPECT_HAS(message(file("[2,3,32]", "[2,3,40]", "")), "tensor layers.7.v: expected a supported head size");
  EXPECT_HAS(message(file("[2,3,16]", "[2,3,32]", "")), "tensor layers.7.k: expected a supported head size");
  EXPECT_HAS(message(file("[2,3,32]", "[2,3,32]", "[3,3,32]")), "tensor layers.7.q: expected [a multiple of 2, 3, 32]");
  EXPECT_HAS(message(file("[2,3,32]", "[2,3,32]", "[4,2,32]")), "found [4, 2, 32]");
  EXPECT_HAS(message(file("[2,3,32]", "[2,3,32]", "[4,3,64]")), "found [4, 3, 64]");
  const Path good = file("[2,3,32]", "[2,3,32]", "");
  EXPECT_EQ(read_layers(std::vector<Path>{good}, {7}).size(), 1U);
  EXPECT_HAS(message([&] { static_cast<void>(read_layers(std::vector<Path>{good}, {8})); }), "layers 7");
  EXPECT_HAS(message([&] { static_cast<void>(read_layers(std::vector<Path>{good, good})); }), "each tensor once");
}

TEST_F(TensorFile, RefusesNumbersThatTheCacheRefuses) {
  for (const std::uint32_t bits : {0x7FC00000U, 0x7F800000U, 0xFF800000U, 0x7F000000U}) {
    std::string bytes = small_file();
    bytes.replace(bytes.size() - 4 * 31, 4, little_endian(bits, 4));  // layers.0.v [0, 1, 1]
    EXPECT_HAS(message(write("t.safetensors", bytes)), "tensor layers.0.v: expected finite numbers");
    EXPECT_HAS(message(write("t.safetensors", bytes)), "[0, 1, 1]");
  }
}

TEST_F(TensorFile, ReadsNpyDirectories) {
  write("model_layers.3.k.npy", npy(kDict, ramp(64)));
  write("model_layers.3.v.npy",
        npy("{\"shape\": (1,2,32), 'descr': '<f2', 'fortran_order':False}", std::string(128, '\0'), 2));
  write("notes.txt", "not a tensor");
  write("othermodellayers.3.k.npy", "a name that gives no tensor");
  const LayerSet layers = read_layers(std::vector<Path>{folder_});
  ASSERT_EQ(layers.size(), 1U);
  EXPECT_EQ(layers.at(3).keys.shape, (std::vector<std::size_t>{1, 2, 32}));
  EXPECT_EQ(layers.at(3).values.type, turboquant::DType::f16);
  const std::vector<Path> files{folder_ / "model_layers.3.k.npy", folder_ / "model_layers.3.v.npy"};
  EXPECT_EQ(read_layers(files).size(), 1U);
}

TEST_F(TensorFile, RefusesEveryNpyTruncation) {
  const std::string bytes = npy(kDict, ramp(64));
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    const Path file = write("layers.0.k.npy", bytes.substr(0, length));
    EXPECT_HAS(message([&] { static_cast<void>(read_npy(file)); }), "layers.0.k.npy: ") << length;
  }
}

TEST_F(TensorFile, SurvivesAnyNpyHeaderByte) {
  const std::string bytes = npy(kDict, ramp(64));
  for (std::size_t i = 0; i < bytes.size() - 256; ++i) {
    for (const char c : {'\0', '0', '9', '\'', '(', ')', ',', '\xFF'}) {
      std::string changed = bytes;
      changed[i] = c;
      const Path file = write("layers.0.k.npy", changed);
      EXPECT_NO_THROW(message([&] { static_cast<void>(read_npy(file)); })) << i;
    }
  }
}

TEST_F(TensorFile, NamesWhatIsWrongInAnNpyFile) {
  const auto dict = [](const std::string& type, const std::string& order, const std::string& shape) {
    return "{'descr': " + type + ", 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
  };
  const std::string good = "'<f4'", shape = "(1, 2, 32)";
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {npy(dict("'>f4'", "False", shape), ramp(64)), {"tensor layers.0.k", "'<f4' or '<f2'", ">f4"}},
      {npy(dict("'<f8'", "False", shape), ramp(128)), {"tensor layers.0.k", "'<f4' or '<f2'", "<f8"}},
      {npy(dict("'<V2'", "False", shape), ramp(32)), {"no bfloat16", "<V2"}},
      {npy(dict("[('a', '<f4')]", "False", shape), ramp(64)), {"header", "simple type"}},
      {npy(dict(good, "True", shape), ramp(64)), {"tensor layers.0.k", "C order"}},
      {npy(dict(good, "Maybe", shape), ramp(64)), {"header", "True or False"}},
      {npy(dict(good, "False", "(1, 2, 33)"), ramp(64)), {"264 data bytes", "found 256"}},
      {npy(dict(good, "False", "(-1, 2, 32)"), ramp(64)), {"header", "whole number"}},
      {npy(dict(good, "False", "(18446744073709551616,)"), ramp(64)), {"header", "whole number"}},
      {npy(dict(good, "False", "(4294967296, 4294967296, 32)"), ramp(64)), {"2^64"}},
      {npy(dict(good, "False", shape) + "x", ramp(64)), {"nothing after the dict"}},
      {npy("{'descr': '<f4', 'descr': '<f4'}", ramp(64)), {"each key once"}},
      {npy("{'descr': '<f4'}", ramp(64)), {"fortran_order and shape"}},
      {npy("{'extra': '<f4'}", ramp(64)), {"the keys"}},
      {npy(kDict, ramp(65)), {"256 data bytes", "found 260"}},
      {npy(kDict, ramp(64), 4), {"version", "found 4.0"}},
      {std::string("\x93NUMPZ\x01", 7) + '\0' + npy(kDict, ramp(64)).substr(8), {"magic"}},
      {std::string("\x93NUMPY\x02", 7) + '\0' + "\xFF\xFF\xFF\xFF" + kDict, {"header length"}},
  };
  for (const auto& [bytes, parts] : cases) {
    const Path file = write("layers.0.k.npy", bytes);
    const std::string text = message([&] { static_cast<void>(read_npy(file)); });
    EXPECT_HAS(text, "layers.0.k.npy");
    for (const std::string& part : parts) EXPECT_HAS(text, part);
  }
  EXPECT_HAS(message(write("keys.npy", npy(kDict, ramp(64)))), "file name");
}

TEST(TensorRole, AcceptsExactNamesOnly) {
  using turboquant_eval::role_of;
  EXPECT_EQ(role_of("layers.0.k")->layer, 0U);
  EXPECT_EQ(role_of("layers.31.q")->kind, 'q');
  for (const char* name : {"", "layers", "layers.", "layers..k", "layers.1", "layers.1.", "layers.1.w", "layers.1.kk",
                           "layers.01.k", "layers.-1.k", "layers.1234567.k", "layers.1 .k", "model.layers.1.k"}) {
    EXPECT_FALSE(role_of(name)) << name;
  }
}

}  // namespace
