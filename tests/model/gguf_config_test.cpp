// The config in GGUF's terms: what is written is what is read, and every key is believed only when it fits the others.
#include "model/gguf_config.hpp"

#include "model/expect_refused.hpp"
#include "model/gguf_stored.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace gguf_config_test {

using namespace testing;

class GgufConfig : public ::testing::TestWithParam<Family> {
 protected:
  TemporaryFolder folder;
  std::filesystem::path path = folder.path / "x.gguf";
  Config config = gguf_config_of({GetParam(), Format::f32});
  GgufStored file;

  GgufConfig() {
    config.rms_eps = 3e-6F;
    config.mla.latent_eps = 2e-6F;
    config.kda.l2_eps = 5e-6F;
    file.metadata = gguf_metadata(config, "small");
    // Nothing but their presence matters here.
    for (int i = 0; i < config.layer_count(); ++i) {
      if (config.mla.output_gate && config.layers[static_cast<std::size_t>(i)] == LayerKind::mla) add(i, "attn_gate");
      if (config.experts.latent_norm && i >= config.first_dense) add(i, "ffn_routed_norm");
    }
  }
  void add(int layer, const std::string& name) {
    file.tensors.push_back({fmt::format("blk.{}.{}.weight", layer, name), ggml::f32, {1}, std::vector<std::byte>(4)});
  }
  std::string full(const std::string& key) const {
    return (GetParam() == Family::linear ? "kimi-linear." : "kimi-k3.") + key;
  }
  Config read() {
    file.write(path);
    return gguf_config(GgufModel(path));
  }
  void refuse(const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    SCOPED_TRACE(part);
    file.write(path);
    expect_refused(code, part, [&] { gguf_config(GgufModel(path)); });
  }
};
std::string family_name(const ::testing::TestParamInfo<Family>& test) {
  return Variant{test.param, Format::f32}.name();
}
INSTANTIATE_TEST_SUITE_P(Family, GgufConfig, ::testing::Values(Family::linear, Family::k3, Family::k31), family_name);

TEST_P(GgufConfig, ReadsBackWhatItWrote) {
  const Config back = read();
  EXPECT_EQ(config_to_json(back), config_to_json(config));
  EXPECT_EQ(back.tensor_prefix, config.tensor_prefix);
}

TEST_P(GgufConfig, OneEpsilonServesAllNormsOfOtherPrograms) {
  file.remove_key("tidelock.mla_latent_norm_eps");
  file.remove_key("tidelock.kda_l2_norm_eps");
  const Config back = read();
  EXPECT_EQ(back.mla.latent_eps, 3e-6F);
  EXPECT_EQ(back.kda.l2_eps, 3e-6F);
  EXPECT_EQ(back.index.heads, config.index.heads);
}

TEST_P(GgufConfig, MissingKeysAreNamed) {
  const auto all = file.metadata;
  for (const char* key :
       {"embedding_length", "context_length", "block_count", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "ssm.conv_kernel",
        "kda.head_dim", "attention.kv_lora_rank", "rope.dimension_count", "attention.key_length_mla",
        "attention.value_length_mla", "expert_used_count", "expert_feed_forward_length", "expert_gating_func"}) {
    file.metadata = all;
    file.remove_key(full(key));
    refuse(full(key));
  }
  if (GetParam() == Family::linear) return;
  for (const char* key : {"kda.gate_lower_bound", "attn_res.block_size", "activation.situ_beta",
                          "activation.situ_linear_beta", "expert_weights_norm"}) {
    file.metadata = all;
    file.remove_key(full(key));
    refuse(full(key));
  }
}

TEST_P(GgufConfig, WrongValuesAreNamed) {
  const auto u32 = [](std::uint32_t x) { return GgufValue::of(x); };
  const std::size_t layers = config.layers.size();
  const struct {
    const char* key;
    GgufValue value;
    const char* message;
    ErrorCode code = ErrorCode::corrupt_data;
  } cases[] = {
      {"embedding_length", u32(0), "embedding_length = 0"},
      {"embedding_length", u32(1U << 31), "embedding_length = 2147483648"},
      {"embedding_length", GgufValue::of("44"), "no whole number", ErrorCode::not_supported},
      {"block_count", u32(static_cast<std::uint32_t>(layers) + 1), "list of"},
      {"block_count", u32(5000), "block_count = 5000"},
      {"attention.head_count_kv", u32(1), "0 for a KDA layer"},
      {"attention.head_count_kv", GgufValue::list(GgufType::u32, std::vector<std::uint64_t>(layers, 9)), "holds 9"},
      {"attention.head_count", GgufValue::list(GgufType::u32, {3, 4}), "not the same one", ErrorCode::not_supported},
      {"attention.head_count", u32(1 << 26), "attention.head_count x"},
      {"attention.key_length", u32(7), "attention.key_length = 7, expected 24"},
      {"attention.key_length_mla", u32(4), "more than rope.dimension_count"},
      {"kda.head_dim", u32(24), "multiple of 16", ErrorCode::not_supported},
      {"ssm.conv_kernel", u32(3), "ssm.conv_kernel = 3, expected 4", ErrorCode::not_supported},
      {"attention.layer_norm_rms_epsilon", GgufValue::of(0.0F), "above 0"},
      {"attention.layer_norm_rms_epsilon", GgufValue::of(std::nanf("")), "no finite number"},
      {"attention.layer_norm_rms_epsilon", u32(1), "no finite number"},
      {"expert_gating_func", u32(1), "only 2 (sigmoid)", ErrorCode::not_supported},
      {"expert_used_count", u32(7), "expert_used_count = 7, expected 1 to 6"},
      {"expert_weights_norm", u32(1), "no bool"},
      {"leading_dense_block_count", u32(99), "leading_dense_block_count = 99"},
  };
  const auto all = file.metadata;
  for (const auto& c : cases) {
    file.metadata = all;
    file.key(full(c.key)) = c.value;
    refuse(c.message, c.code);
  }
}

TEST_P(GgufConfig, UnknownAndUnsupportedKeysAreNamed) {
  const auto all = file.metadata;
  const auto with = [&](const std::string& key, const GgufValue& value, const std::string& message) {
    file.metadata = all;
    file.metadata.emplace_back(full(key), value);
    refuse(message, ErrorCode::not_supported);
  };
  with("rope.scaling.factor", GgufValue::of(2.0F), "unknown key");
  with("expert_group_count", GgufValue::of(std::uint32_t{8}), "expert_group_count = 8");
  with("expert_group_used_count", GgufValue::of(std::uint32_t{4}), "expert_group_used_count = 4");
  with("nextn_predict_layers", GgufValue::of(std::uint32_t{1}), "nextn_predict_layers = 1");
  if (GetParam() == Family::linear) {
    with("attn_res.block_size", GgufValue::of(std::uint32_t{2}), "unknown key");
    with("kda.gate_lower_bound", GgufValue::of(-5.0F), "unknown key");
  }
  // What llama.cpp's converter writes and no reader uses.
  file.metadata = all;
  std::erase_if(file.metadata, [&](const auto& e) { return e.first == full("attention.value_length"); });
  file.metadata.emplace_back(full("attention.value_length"), GgufValue::of(std::uint32_t{72}));
  file.metadata.emplace_back(full("rope.freq_base"), GgufValue::of(10000.0F));
  file.metadata.emplace_back("general.file_type", GgufValue::of(std::uint32_t{7}));
  EXPECT_EQ(config_to_json(read()), config_to_json(config));
}

TEST_P(GgufConfig, ArchitectureContractAndVocabularyAreChecked) {
  const auto all = file.metadata;
  file.key("general.architecture") = GgufValue::of("llama");
  refuse("general.architecture = \"llama\"", ErrorCode::not_supported);
  file.remove_key("general.architecture");
  refuse("general.architecture is missing");
  file.metadata = all;
  file.key("tidelock.contract") = GgufValue::of("tidelock-0");
  refuse("tidelock-0", ErrorCode::mismatch);
  file.metadata = all;
  file.metadata.emplace_back("tokenizer.ggml.tokens", GgufValue::list(std::vector<std::string>(66, "x")));
  refuse("tokenizer.ggml.tokens has 66 entries");
  file.metadata.back().second = GgufValue::list(std::vector<std::string>(67, "x"));
  file.remove_key(full("vocab_size"));
  file.metadata.emplace_back("tokenizer.ggml.eos_token_id", GgufValue::of(std::uint32_t{66}));
  file.metadata.emplace_back("tokenizer.ggml.eot_token_id", GgufValue::of(std::uint32_t{3}));
  EXPECT_EQ(read().vocab, 67);
  EXPECT_EQ(read().end_tokens, (std::vector<std::int32_t>{66, 3}));
  file.metadata.back().second = GgufValue::of(std::uint32_t{67});
  refuse("tokenizer.ggml.eot_token_id is outside the vocabulary of 67");
}

TEST_P(GgufConfig, K3AloneIsChecked) {
  if (GetParam() == Family::linear) return;
  const auto all = file.metadata;
  const auto with = [&](const std::string& key, const GgufValue& value, const std::string& message,
                        ErrorCode code = ErrorCode::not_supported) {
    file.metadata = all;
    file.key(full(key)) = value;
    refuse(message, code);
  };
  with("kda.gate_lower_bound", GgufValue::of(-6.0F), "gate_lower_bound = -6");
  with("kda.gate_lower_bound", GgufValue::of(1.0F), "gate_lower_bound = 1");
  with("activation.situ_beta", GgufValue::of(-1.0F), "situ_beta = -1", ErrorCode::corrupt_data);
  if (GetParam() == Family::k31) {
    auto types = std::vector<std::uint64_t>(config.layers.size(), 0);
    with("attention.indexer.types", GgufValue::list(GgufType::u32, types), "shares another layer's selection");
    types.pop_back();
    with("attention.indexer.types", GgufValue::list(GgufType::u32, types), "entries, expected",
         ErrorCode::corrupt_data);
    file.metadata = all;
    file.remove_key(full("attention.q_lora_rank"));
    refuse("an indexer needs");
  }
  file.metadata = all;
  file.tensors.erase(file.tensors.begin());  // one of several gates or norms
  refuse(".weight is missing, other layers have theirs");
}

TEST(GgufMetadataOf, NamesWhatAnArchitectureCannotSay) {
  const auto refused = [](Config config, const std::string& part) {
    expect_refused(ErrorCode::not_supported, part, [&] { gguf_metadata(config, "x"); });
  };
  const Config linear = gguf_config_of({Family::linear, Format::f32}), k3 = gguf_config_of({Family::k3, Format::f32});
  Config c = linear;
  c.kda.heads = 2;
  refused(c, "2 heads in KDA layers and 3 in MLA layers");
  c = linear;
  c.activation = Activation::situ;
  refused(c, "hidden_act = situ");
  c = linear;
  c.experts.latent = 16;
  refused(c, "routed_expert_hidden_size");
  c = linear;
  c.mla.output_gate = true;
  refused(c, "mla_use_output_gate");
  c = k3;
  c.kda.bounded = false;
  refused(c, "gate_lower_bound");
  c = k3;
  c.kda.full_rank_gate = false;
  refused(c, "use_full_rank_gate = false");
}

}  // namespace gguf_config_test
}  // namespace tidelock::model
