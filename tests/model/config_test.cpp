// config.json of the three families read by their keys, and everything else refused by the key's name - from the text
// alone, before there is any weight.
#include "model/config.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/expect_refused.hpp"
#include "model/small_model.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace config_test {

using namespace testing;
using nlohmann::json;

Config parse(const json& j) {
  return parse_config(j.dump(), "test");
}

// The published Kimi-Linear-48B-A3B (spec/model.md 1.1).
json kimi_linear() {
  return json::parse(R"({
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_size": 2304,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
    "intermediate_size": 9216, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 163840,
    "tie_word_embeddings": false, "model_max_length": 1048576, "bos_token_id": 163584, "eos_token_id": 163586,
    "pad_token_id": 163839, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": true, "routed_scaling_factor": 2.446,
    "use_grouped_topk": true, "num_expert_group": 1, "topk_group": 1, "q_lora_rank": null, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true, "rope_theta": 10000,
    "rope_scaling": null, "num_nextn_predict_layers": 0, "torch_dtype": "bfloat16",
    "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
      "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
      "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]}})");
}

// K3 (3.1): nested, and its text_config calls itself kimi_linear as well.
json k3() {
  std::vector<int> kda, full;
  for (int layer = 1; layer <= 93; ++layer) (layer % 4 == 0 || layer == 93 ? full : kda).push_back(layer);
  json text = kimi_linear();
  for (const char* key : {"head_dim", "model_max_length", "torch_dtype"}) text.erase(key);
  text.update(json::parse(R"({
    "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96,
    "intermediate_size": 33792, "q_lora_rank": 1536, "mla_use_output_gate": true, "num_experts": 896,
    "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "latent_moe_use_norm": true, "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc", "attn_res_block_size": 12, "hidden_act": "situ", "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "max_position_embeddings": 1048576})"));
  text["linear_attn_config"] = {{"head_dim", 128},         {"num_heads", 96},          {"short_conv_kernel_size", 4},
                                {"kda_layers", kda},       {"full_attn_layers", full}, {"use_full_rank_gate", true},
                                {"gate_lower_bound", -5.0}};
  return {{"architectures", {"KimiK3ForConditionalGeneration"}},
          {"model_type", "kimi_k3"},
          {"text_config", text},
          {"vision_config", {{"patch_size", 14}}},
          {"media_placeholder_token_id", 163605},
          {"dtype", "bfloat16"}};
}

json k31() {
  json config = k3();
  json& text = config["text_config"];
  text["dsa_config"] = {{"index_n_heads", 32},
                        {"index_head_dim", 128},
                        {"index_topk", 2048},
                        {"layers", text["linear_attn_config"]["full_attn_layers"]}};
  return config;
}

TEST(Config, KimiLinear) {
  const Config c = parse(kimi_linear());
  EXPECT_EQ(c.hidden, 2304);
  EXPECT_EQ(c.vocab, 163840);
  EXPECT_EQ(c.intermediate, 9216);
  EXPECT_EQ(c.max_context, 1048576);
  EXPECT_EQ(c.format, Format::bf16);
  EXPECT_EQ(c.activation, Activation::silu);
  EXPECT_EQ(c.end_tokens, std::vector<std::int32_t>{163586});
  ASSERT_EQ(c.layer_count(), 27);
  for (int i = 0; i < 27; ++i)  // the lists count from 1
    EXPECT_EQ(c.layers[static_cast<std::size_t>(i)] == LayerKind::mla, i % 4 == 3 || i == 26) << i;
  EXPECT_EQ(c.kda.heads, 32);
  EXPECT_EQ(c.kda.head_dim, 128);
  EXPECT_FALSE(c.kda.bounded || c.kda.full_rank_gate);
  EXPECT_EQ(c.mla.q_lora, 0);
  EXPECT_EQ(c.mla.latent, 512);
  EXPECT_EQ(c.mla.query_dim(), 192);
  EXPECT_EQ(c.mla.key_dim(), 576);
  EXPECT_EQ(c.mla.value, 128);
  EXPECT_EQ(c.mla.latent_eps, 1e-6F);
  EXPECT_FALSE(c.mla.output_gate);
  EXPECT_EQ(c.index.heads, 0);
  EXPECT_EQ(c.experts.count, 256);
  EXPECT_EQ(c.experts.top_k, 8);
  EXPECT_EQ(c.experts.intermediate, 1024);
  EXPECT_EQ(c.experts.shared, 1);
  EXPECT_EQ(c.experts.scale, 2.446F);
  EXPECT_EQ(c.expert_width(), 2304);
  EXPECT_TRUE(c.is_dense_ffn(0) && !c.is_dense_ffn(1));
  EXPECT_EQ(c.residual_block, 0);
  EXPECT_EQ(c.tensor_prefix, "");
}

TEST(Config, K3IsReadByItsKeys) {
  const Config c = parse(k3());
  EXPECT_EQ(c.hidden, 7168);
  EXPECT_EQ(c.layer_count(), 93);
  EXPECT_EQ(std::count(c.layers.begin(), c.layers.end(), LayerKind::mla), 24);
  EXPECT_EQ(c.layers.back(), LayerKind::mla);
  EXPECT_EQ(c.layers[91], LayerKind::mla);
  EXPECT_EQ(c.layers[90], LayerKind::kda);
  EXPECT_TRUE(c.kda.bounded && c.kda.full_rank_gate);
  EXPECT_EQ(c.kda.lower_bound, -5.0F);
  EXPECT_EQ(c.kda.channels(), 12288);
  EXPECT_EQ(c.mla.q_lora, 1536);
  EXPECT_TRUE(c.mla.output_gate);
  EXPECT_EQ(c.experts.top_k, 16);
  EXPECT_EQ(c.experts.shared, 2);
  EXPECT_EQ(c.expert_width(), 3584);
  EXPECT_TRUE(c.experts.latent_norm);
  EXPECT_EQ(c.activation, Activation::situ);
  EXPECT_EQ(c.residual_block, 12);
  EXPECT_EQ(c.tensor_prefix, "language_model.");
  EXPECT_EQ(c.format, Format::bf16) << "the dtype of the outer object holds";
  EXPECT_EQ(c.index.heads, 0);
}

TEST(Config, K31HasAnIndexer) {
  const Config c = parse(k31());
  EXPECT_EQ(c.index.heads, 32);
  EXPECT_EQ(c.index.dim, 128);
  EXPECT_EQ(c.index.top_k, 2048);
  EXPECT_EQ(c.index.eps, 1e-5F);
}

TEST(Config, WhatTheOuterObjectSaysHolds) {
  json config = k3();
  config["text_config"].erase("eos_token_id");
  config["eos_token_id"] = {7, 8};
  EXPECT_EQ(parse(config).end_tokens, (std::vector<std::int32_t>{7, 8}));
  config["text_config"]["eos_token_id"] = 9;
  EXPECT_EQ(parse(config).end_tokens, std::vector<std::int32_t>{9});
  config["text_config"].erase("tie_word_embeddings");
  config["tie_word_embeddings"] = true;
  EXPECT_TRUE(parse(config).tied_head);
  config.erase("dtype");
  EXPECT_EQ(parse(config).format, Format::f32);
}

TEST(Config, AliasesAreTheSameKeys) {
  json config = kimi_linear();
  const std::pair<const char*, const char*> aliases[] = {{"num_experts", "n_routed_experts"},
                                                         {"num_experts_per_token", "num_experts_per_tok"},
                                                         {"moe_renormalize", "norm_topk_prob"},
                                                         {"num_expert_group", "n_group"},
                                                         {"num_shared_experts", "n_shared_experts"}};
  for (const auto& [from, to] : aliases) {
    config[to] = config[from];
    config.erase(from);
  }
  EXPECT_EQ(config_to_json(parse(config)), config_to_json(parse(kimi_linear())));
}

// ---- refusals -------------------------------------------------------------------------------------------------------

TEST(Config, EveryMissingKeyIsNamed) {
  for (const char* key : {"hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
                          "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_attn_config",
                          "moe_intermediate_size", "num_experts_per_token"}) {
    json config = kimi_linear();
    config.erase(key);
    expect_refused(ErrorCode::invalid_argument, key, [&] { parse(config); });
    config[key] = nullptr;
    expect_refused(ErrorCode::invalid_argument, key, [&] { parse(config); });
  }
  for (const char* key : {"head_dim", "num_heads", "kda_layers", "full_attn_layers"}) {
    json config = kimi_linear();
    config["linear_attn_config"].erase(key);
    expect_refused(ErrorCode::invalid_argument, key, [&] { parse(config); });
  }
  for (const char* key : {"index_n_heads", "index_head_dim", "index_topk"}) {
    json config = k31();
    config["text_config"]["dsa_config"].erase(key);
    expect_refused(ErrorCode::invalid_argument, key, [&] { parse(config); });
  }
}

TEST(Config, UnknownKeysAreNamed) {
  json config = k31();
  const auto with = [&](const char* pointer) {
    json changed = config;
    changed[json::json_pointer(pointer)] = 1;
    return changed;
  };
  for (const char* pointer :
       {"/sliding_window", "/text_config/sliding_window", "/text_config/linear_attn_config/sliding_window",
        "/text_config/dsa_config/sliding_window"})
    expect_refused(ErrorCode::invalid_argument, "sliding_window", [&] { parse(with(pointer)); });
}

TEST(Config, WrongValuesAreNamed) {
  struct Case {
    const char* pointer;
    json value;
    ErrorCode code;
  };
  const auto bad = ErrorCode::invalid_argument, unsupported = ErrorCode::not_supported;
  const std::vector<Case> cases = {
      {"/hidden_size", "2304", bad},
      {"/hidden_size", 2304.5, bad},
      {"/hidden_size", 0, bad},
      {"/hidden_size", -1, bad},
      {"/hidden_size", std::uint64_t{1} << 63, bad},
      {"/hidden_size", json::array({2304}), bad},
      {"/vocab_size", true, bad},
      {"/num_hidden_layers", 5000, bad},
      {"/num_hidden_layers", 28, bad},  // a layer that is in neither list
      {"/rms_norm_eps", 0, bad},
      {"/rms_norm_eps", -1e-5, bad},
      {"/rms_norm_eps", "1e-5", bad},
      {"/rms_norm_eps", 1e300, bad},
      {"/tie_word_embeddings", 0, bad},
      {"/model_max_length", 0, bad},
      {"/eos_token_id", 163840, bad},
      {"/eos_token_id", -1, bad},
      {"/eos_token_id", 4294967297, bad},  // would be 1 in 32 bits
      {"/eos_token_id", {1, "2"}, bad},
      {"/eos_token_id", "end", bad},
      {"/first_k_dense_replace", 28, bad},
      {"/num_experts_per_token", 257, bad},
      {"/num_experts_per_token", 0, bad},
      {"/routed_scaling_factor", -1, bad},
      {"/latent_moe_use_norm", true, bad},     // without routed_expert_hidden_size
      {"/num_attention_heads", 1 << 20, bad},  // x 192 does not fit
      {"/num_shared_experts", 1 << 20, bad},
      {"/linear_attn_config", 5, bad},
      {"/linear_attn_config/num_heads", 1 << 24, bad},
      {"/linear_attn_config/gate_lower_bound", "-5", bad},
      {"/linear_attn_config/full_attn_layers", 4, bad},
      {"/linear_attn_config/full_attn_layers/0", 0, bad},
      {"/linear_attn_config/full_attn_layers/0", 28, bad},
      {"/linear_attn_config/full_attn_layers/0", 3, bad},           // stands in kda_layers
      {"/linear_attn_config/full_attn_layers/0", 4294967300, bad},  // would be 4 in 32 bits
      {"/linear_attn_config/full_attn_layers/0", 4.0, bad},
      {"/linear_attn_config/gate_lower_bound", -6.0, unsupported},
      {"/linear_attn_config/gate_lower_bound", 0.5, unsupported},
      {"/linear_attn_config/short_conv_kernel_size", 3, unsupported},
      {"/linear_attn_config/head_dim", 72, unsupported},
      {"/linear_attn_config/head_dim", 512, unsupported},
      {"/hidden_act", "gelu", unsupported},
      {"/hidden_act", 1, bad},
      {"/torch_dtype", "float64", unsupported},
      {"/mla_use_nope", false, unsupported},
      {"/moe_router_activation_func", "softmax", unsupported},
      {"/num_expert_group", 8, unsupported},
      {"/topk_group", 4, unsupported},
      {"/moe_layer_freq", 2, unsupported},
      {"/topk_method", "greedy", unsupported},
      {"/dsa_config", {{"index_n_heads", 2}, {"index_head_dim", 8}, {"index_topk", 8}}, bad},  // without q_lora_rank
  };
  for (const Case& c : cases) {
    json config = kimi_linear();
    config[json::json_pointer(c.pointer)] = c.value;
    const std::string pointer = c.pointer;
    // The last key of the path; for an entry of a list, the list.
    std::string key = pointer.substr(pointer.rfind('/') + 1);
    if (key == "0") key = "full_attn_layers";
    if (pointer == "/num_hidden_layers" && c.value == 28) key = "layer 28";
    if (pointer == "/linear_attn_config/full_attn_layers" && c.value == 4) key = "layer 8";
    if (pointer == "/linear_attn_config/num_heads") key = "num_heads x head_dim";
    SCOPED_TRACE(pointer + " = " + c.value.dump());
    expect_refused(c.code, key, [&] { parse(config); });
  }
}

TEST(Config, ContradictionsAreRefused) {
  json config = kimi_linear();
  config["num_experts_per_tok"] = 4;
  expect_refused(ErrorCode::invalid_argument, "contradicts", [&] { parse(config); });
  config = k31();
  config["text_config"]["dsa_config"]["layers"] = {4, 8};
  expect_refused(ErrorCode::invalid_argument, "full_attn_layers", [&] { parse(config); });
  config = k31();
  config["text_config"]["dsa_config"]["index_rope"] = true;
  expect_refused(ErrorCode::not_supported, "index_rope", [&] { parse(config); });
  // One key, two values: a JSON parser would take the last.
  std::string twice = kimi_linear().dump();
  twice.insert(1, "\"hidden_size\": 64,");
  expect_refused(ErrorCode::invalid_argument, "hidden_size", [&] { parse_config(twice, "test"); });
}

TEST(Config, MoreBlocksThanAMixTakesAreRefused) {
  json config = k3();
  config["text_config"]["attn_res_block_size"] = 3;  // 93 layers bank 31 blocks
  EXPECT_EQ(parse(config).residual_block, 3);
  config["text_config"]["attn_res_block_size"] = 2;
  expect_refused(ErrorCode::not_supported, "attn_res_block_size", [&] { parse(config); });
}

TEST(Config, GarbageIsRefused) {
  const std::string whole = k31().dump();
  for (const std::string& text : {std::string(), std::string("{"), std::string("null"), std::string("[]"),
                                  std::string("5"), std::string("{\"text_config\": 3}"), whole + "x",
                                  whole.substr(0, whole.size() - 1), std::string("\xff\xfe"), std::string(1000, '\0')})
    EXPECT_THROW(parse_config(text, "test"), Error) << text.substr(0, 40);
  for (const int depth : {70, 100000}) {
    const std::string deep = "{\"a\":" + std::string(static_cast<std::size_t>(depth), '[') +
                             std::string(static_cast<std::size_t>(depth), ']') + "}";
    expect_refused(ErrorCode::invalid_argument, "nested", [&] { parse_config(deep, "test"); });
  }
  json config = kimi_linear();
  config["name"] = std::string(200, '{');  // braces in a string are no nesting
  EXPECT_EQ(parse(config).hidden, 2304);
}

// Any one value of a config replaced by another: read or refused, never anything else.
TEST(Config, MutationsAreReadOrRefused) {
  const json whole = k31().flatten();
  std::vector<std::string> pointers;
  for (const auto& [pointer, value] : whole.items()) pointers.push_back(pointer);
  const std::vector<json> values = {nullptr,
                                    true,
                                    0,
                                    -1,
                                    1,
                                    3,
                                    1e9,
                                    1e300,
                                    -0.5,
                                    "",
                                    "silu",
                                    json::array(),
                                    json::object(),
                                    json::array({1, 2}),
                                    std::int64_t{1} << 40,
                                    std::uint64_t{0xFFFFFFFFFFFFFFFF}};
  EXPECT_TRUE(rc::check("a mutated config", [&] {
    json config = k31();
    config[json::json_pointer(pointers[*rc::gen::inRange<std::size_t>(0, pointers.size())])] =
        values[*rc::gen::inRange<std::size_t>(0, values.size())];
    try {
      const Config c = parse(config);
      RC_ASSERT(config_to_json(parse_config(config_to_json(c), "again")) == config_to_json(c));
      RC_ASSERT(c.kda.channels() > 0 && c.mla.query_dim() > 0 && c.layer_count() > 0);
    } catch (const Error& error) {
      RC_ASSERT(error.code() == ErrorCode::invalid_argument || error.code() == ErrorCode::not_supported);
    }
  }));
}

// ---- round trip -----------------------------------------------------------------------------------------------------

TEST(Config, WrittenConfigsAreReadBack) {
  std::vector<Config> configs = {parse(kimi_linear()), parse(k3()), parse(k31())};
  for (const Variant& v : all_variants()) configs.push_back(small_config(v));
  for (const Config& c : configs) {
    const Config back = parse_config(config_to_json(c), "written");
    EXPECT_EQ(config_to_json(back), config_to_json(c));
    EXPECT_EQ(back.layers, c.layers);
    EXPECT_EQ(back.format, c.format);
    EXPECT_EQ(back.max_context, c.max_context);
    EXPECT_EQ(back.end_tokens, c.end_tokens);
    EXPECT_EQ(back.tensor_prefix, c.tensor_prefix);
    EXPECT_EQ(back.rms_eps, c.rms_eps);
    EXPECT_EQ(back.mla.latent_eps, c.mla.latent_eps);
    EXPECT_EQ(back.mla.q_lora, c.mla.q_lora);
    EXPECT_EQ(back.mla.output_gate, c.mla.output_gate);
    EXPECT_EQ(back.kda.bounded, c.kda.bounded);
    EXPECT_EQ(back.kda.lower_bound, c.kda.lower_bound);
    EXPECT_EQ(back.kda.full_rank_gate, c.kda.full_rank_gate);
    EXPECT_EQ(back.index.top_k, c.index.top_k);
    EXPECT_EQ(back.index.eps, c.index.eps);
    EXPECT_EQ(back.experts.scale, c.experts.scale);
    EXPECT_EQ(back.experts.latent, c.experts.latent);
    EXPECT_EQ(back.experts.latent_norm, c.experts.latent_norm);
    EXPECT_EQ(back.experts.shared, c.experts.shared);
    EXPECT_EQ(back.residual_block, c.residual_block);
    EXPECT_EQ(back.activation, c.activation);
  }
}

}  // namespace config_test
}  // namespace tidelock::model
