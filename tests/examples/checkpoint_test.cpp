// The loader of Hugging Face checkpoints: what is broken or not supported is refused, and the message names it.
#include "checkpoint.hpp"

#include <engine/model.hpp>
#include <engine/plain_cache.hpp>
#include <eval/tensor.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace {

using checkpoint::Checkpoint;
using Path = std::filesystem::path;

class LoadCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = checkpoint::fresh_folder(std::string("checkpoint_") +
                                       testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Empty: the folder loads. Else the message.
  std::string problem() const {
    try {
      const engine::Model model(folder_);
      return {};
    } catch (const turboquant_eval::FileError& error) {
      return error.what();
    }
  }
  std::string problem(const std::function<void(Checkpoint&)>& change, const char* family = "qwen2") const {
    Checkpoint model = checkpoint::random_checkpoint(family);
    change(model);
    checkpoint::write(model, folder_);
    return problem();
  }

  Path folder_;
};

TEST_F(LoadCheckpoint, TakesWhatIsWhole) {
  for (const char* family : {"llama", "qwen2", "qwen3"}) EXPECT_EQ(problem([](Checkpoint&) {}, family), "") << family;
}

TEST_F(LoadCheckpoint, NamesTheFieldThatItDoesNotSupport) {
  const auto with = [&](const char* field, const nlohmann::json& value) {
    return problem([&](Checkpoint& model) { model.config[field] = value; });
  };
  const std::pair<const char*, nlohmann::json> fields[] = {{"model_type", "mamba"},
                                                           {"model_type", 3},
                                                           {"hidden_act", "gelu"},
                                                           {"rope_scaling", {{"rope_type", "yarn"}}},
                                                           {"rope_parameters", {{"rope_type", "llama3"}}},
                                                           {"rope_theta", -1},
                                                           {"quantization_config", {{"bits", 4}}},
                                                           {"use_sliding_window", true},
                                                           {"mlp_bias", true},
                                                           {"hidden_size", 0},
                                                           {"hidden_size", "48"},
                                                           {"num_hidden_layers", 1ULL << 40},
                                                           {"num_key_value_heads", 3},
                                                           {"head_dim", 31},
                                                           {"rms_norm_eps", "tiny"},
                                                           {"tie_word_embeddings", 1}};
  for (const auto& [field, value] : fields) {
    EXPECT_NE(with(field, value).find(std::string("config.json: ") + field), std::string::npos)
        << field << ": " << with(field, value);
  }
  EXPECT_NE(problem([](Checkpoint& model) { model.config.erase("vocab_size"); }).find("vocab_size"), std::string::npos);
  EXPECT_NE(problem([](Checkpoint& model) { model.config["sliding_window"] = 4096; }, "llama").find("sliding_window"),
            std::string::npos);
}

TEST_F(LoadCheckpoint, ReadsNewerRotarySettings) {
  EXPECT_EQ(problem([](Checkpoint& model) {
              model.config.erase("rope_theta");
              model.config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5000.0}};
            }),
            "");
}

TEST_F(LoadCheckpoint, NamesTheTensorThatIsMissing) {
  const Checkpoint whole = checkpoint::random_checkpoint("qwen2");
  for (const auto& [name, tensor] : whole.tensors) {
    const std::string text = problem([missing = name](Checkpoint& model) { model.tensors.erase(missing); });
    EXPECT_NE(text.find(name), std::string::npos) << name << ": " << text;
    EXPECT_NE(text.find("no such tensor"), std::string::npos) << text;
  }
}

TEST_F(LoadCheckpoint, NamesTheTensorOfAnotherShapeOrFamily) {
  const std::string wide = problem([](Checkpoint& model) { model.config["intermediate_size"] = 96; });
  EXPECT_NE(wide.find("model.layers.0.mlp"), std::string::npos) << wide;
  EXPECT_NE(wide.find("[96, 48]"), std::string::npos) << wide;
  // Biases that the configuration does not promise would change what the model computes.
  const std::string bias = problem([](Checkpoint& model) { model.config["model_type"] = "llama"; });
  EXPECT_NE(bias.find("self_attn.k_proj.bias"), std::string::npos) << bias;
}

TEST_F(LoadCheckpoint, SkipsWhatFollowsFromTheConfiguration) {
  EXPECT_EQ(problem([](Checkpoint& model) {
              model.add("lm_head.weight", {61, 48}, 1);
              model.add("model.layers.0.self_attn.rotary_emb.inv_freq", {16}, 1);
            }),
            "");
}

TEST_F(LoadCheckpoint, ReadsSeveralFiles) {
  Checkpoint model = checkpoint::random_checkpoint("qwen3");
  checkpoint::write(model, folder_);
  std::filesystem::remove(folder_ / "model.safetensors");
  std::map<std::string, checkpoint::Tensor> parts[2];
  nlohmann::json index;
  for (const auto& [name, tensor] : model.tensors) {
    const std::size_t part = name.find("layers.1") != std::string::npos ? 1 : 0;
    parts[part][name] = tensor;
    index["weight_map"][name] = part == 1 ? "b.safetensors" : "a.safetensors";
  }
  checkpoint::write_tensors(parts[0], folder_ / "a.safetensors");
  checkpoint::write_tensors(parts[1], folder_ / "b.safetensors");
  const auto write_index = [&] { std::ofstream(folder_ / "model.safetensors.index.json") << index.dump(); };
  write_index();
  EXPECT_EQ(problem(), "");

  parts[1]["model.norm.weight"] = model.tensors["model.norm.weight"];
  checkpoint::write_tensors(parts[1], folder_ / "b.safetensors");
  EXPECT_NE(problem().find("model.norm.weight: expected one tensor of this name"), std::string::npos) << problem();
  index["weight_map"]["model.norm.weight"] = "../a.safetensors";
  write_index();
  EXPECT_NE(problem().find("model.norm.weight: expected a file name"), std::string::npos) << problem();
  std::ofstream(folder_ / "model.safetensors.index.json") << "{\"weight_map\": 3";
  EXPECT_NE(problem().find("weight_map"), std::string::npos) << problem();
}

TEST_F(LoadCheckpoint, NamesTheFileThatIsNotThere) {
  EXPECT_NE(problem().find("config.json"), std::string::npos);
  std::ofstream(folder_ / "config.json") << "{";
  EXPECT_NE(problem().find("JSON"), std::string::npos);
  checkpoint::write(checkpoint::random_checkpoint("llama"), folder_);
  std::filesystem::remove(folder_ / "model.safetensors");
  EXPECT_NE(problem().find("model.safetensors"), std::string::npos);
}

TEST_F(LoadCheckpoint, RefusesADamagedFile) {
  checkpoint::write(checkpoint::random_checkpoint("llama"), folder_);
  std::filesystem::resize_file(folder_ / "model.safetensors", 5000);
  EXPECT_NE(problem(), "");
}

}  // namespace
