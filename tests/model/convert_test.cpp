// Conversions: folder -> GGUF -> folder keeps every bit that the target can hold, and the same model comes out.
#include "model/convert.hpp"

#include "model/expect_refused.hpp"
#include "model/gguf_stored.hpp"
#include "model/gguf_vocabulary.hpp"
#include "model/stored_tensors.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace convert_test {

using namespace testing;

std::vector<std::vector<float>> all_values(const std::filesystem::path& path) {
  const auto source = open_weights(path);
  const Model model(source->config(), false);
  source->bind(model);
  std::vector<std::vector<float>> out(model.parameters().size());
  for (std::size_t i = 0; i < out.size(); ++i) source->values(static_cast<ParameterId>(i), out[i]);
  return out;
}

class Convert : public ::testing::TestWithParam<Variant> {
 protected:
  TemporaryFolder folder;
  std::filesystem::path plain = folder.path / "plain", gguf = folder.path / "x.gguf";
  const std::vector<std::int32_t> tokens = random_tokens(40, 1);

  std::unique_ptr<Model> make(bool wide) {
    Config config = gguf_config_of(GetParam(), wide);
    config.end_tokens = {5, 7};
    auto model = make_small_model(config, 7, false);
    std::vector<std::vector<float>> values;
    for (ParameterId id = 0; id < static_cast<ParameterId>(model->parameters().size()); ++id) {
      values.push_back(small_values(*model, id, 7));
      // GGUF keeps the product of a mix's norm and projection, and -exp(A_log): take values that survive both.
      if (model->parameter(id).name.ends_with("_res_norm.weight")) values.back().assign(values.back().size(), 1.0F);
      if (model->parameter(id).name.ends_with("A_log")) values.back().assign(values.back().size(), 0.0F);
    }
    save_model(
        *model, [&](ParameterId id) { return std::span<const float>(values[static_cast<std::size_t>(id)]); }, plain);
    return load_model(plain, false);
  }
  Rows rows(const std::filesystem::path& path) { return Runner(*load_model(path, false)).whole(tokens); }
};
INSTANTIATE_TEST_SUITE_P(Family, Convert, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(Convert, ThereAndBackIsTheSameModel) {
  const auto model = make(false);
  const ConvertReport report = convert_model(plain, gguf, {.to_gguf = true});
  EXPECT_EQ(report.kept, 0U);
  EXPECT_TRUE(same_bits(rows(gguf), rows(plain)));
  EXPECT_EQ(all_values(gguf), all_values(plain));
  const auto back = folder.path / "back";
  convert_model(gguf, back, {.to_gguf = false});
  EXPECT_EQ(read_file(back / "config.json"), read_file(plain / "config.json"));
  EXPECT_EQ(sha256_hex(read_file(back / "model.safetensors")), sha256_hex(read_file(plain / "model.safetensors")));
  // A file converted into its own form is the same file.
  const auto again = folder.path / "y.gguf";
  convert_model(gguf, again, {.to_gguf = true});
  GgufStored a(gguf), b(again);
  a.key("general.name") = b.key("general.name");
  a.write(gguf);
  b.write(again);
  EXPECT_EQ(sha256_hex(read_file(gguf)), sha256_hex(read_file(again)));
}

TEST_P(Convert, ADecayAndAScoreSurviveToTheLastBits) {
  // Without the choice of values above: -exp and log round, so equality is close, not exact.
  Config config = gguf_config_of(GetParam());
  const auto model = make_small_model(config, 9, false);
  std::vector<std::vector<float>> values;
  for (ParameterId id = 0; id < static_cast<ParameterId>(model->parameters().size()); ++id)
    values.push_back(small_values(*model, id, 9));
  save_model(
      *model, [&](ParameterId id) { return std::span<const float>(values[static_cast<std::size_t>(id)]); }, plain);
  convert_model(plain, gguf, {.to_gguf = true});
  const auto back = all_values(gguf);
  const auto expect_near = [&](ParameterId id, const std::vector<float>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(back[static_cast<std::size_t>(id)][i], expected[i], 1e-6F) << model->parameter(id).name;
  };
  const ParameterId decay = model->layers[0].kda.a_log;
  expect_near(decay, values[static_cast<std::size_t>(decay)]);
  if (model->output_mix_norm == kNone) return;
  std::vector<float> product = values[static_cast<std::size_t>(model->output_mix_proj)];
  for (std::size_t i = 0; i < product.size(); ++i)
    product[i] *= values[static_cast<std::size_t>(model->output_mix_norm)][i];
  expect_near(model->output_mix_proj, product);
  expect_near(model->output_mix_norm, std::vector<float>(product.size(), 1.0F));
}

TEST_P(Convert, ShardsAreTheSameModel) {
  make(false);
  const auto shards = folder.path / "shards";
  const ConvertReport report = convert_model(plain, shards, {.to_gguf = false, .shard_bytes = 20'000});
  EXPECT_GT(report.files, 3U);
  EXPECT_FALSE(std::filesystem::exists(shards / "model.safetensors"));
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(shards)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    std::uint64_t bytes = 0;
    const SafetensorsFile file(entry.path());
    for (const auto& [name, tensor] : file.tensors()) bytes += tensor.bytes.size();
    EXPECT_TRUE(bytes <= 20'000 || file.tensors().size() == 1) << entry.path();
  }
  EXPECT_EQ(files, report.files);
  EXPECT_TRUE(same_bits(rows(shards), rows(plain)));
  const auto back = folder.path / "back";
  EXPECT_EQ(convert_model(shards, back, {.to_gguf = false}).files, 1U);
  EXPECT_EQ(read_file(back / "model.safetensors"), read_file(plain / "model.safetensors"));
  // Without the index nobody takes the shards for a whole.
  std::filesystem::remove(shards / "model.safetensors.index.json");
  EXPECT_THROW(open_weights(shards), Error);
}

// Blocks of `format` and back, of rows of a matrix of the plain folder.
std::vector<float> through(Format format, std::vector<float> x) {
  std::vector<std::byte> blocks(numerics::row_bytes(format, static_cast<std::int64_t>(x.size())));
  numerics::quantize(format, x.data(), static_cast<std::int64_t>(x.size()), blocks.data());
  numerics::dequantize(format, blocks.data(), static_cast<std::int64_t>(x.size()), x.data());
  return x;
}

TEST_P(Convert, QuantisedMatricesHoldTheQuantisersNumbers) {
  const auto model = make(true);
  const auto before = all_values(plain);
  for (const Format format : {Format::q8_0, Format::mxfp4, Format::bf16, Format::f32}) {
    EXPECT_EQ(convert_model(plain, gguf, {.to_gguf = true, .type = format}).kept, 0U);
    const auto after = all_values(gguf);
    std::size_t changed = 0;
    for (std::size_t i = 0; i < after.size(); ++i) {
      const Parameter& p = model->parameters()[i];
      const bool expert = p.name.find(".experts.") != std::string::npos;
      const bool matrix = p.kind == ParameterKind::linear || p.kind == ParameterKind::embedding;
      if (p.kind == ParameterKind::absorbed) continue;  // its key halves are turned before they are quantised
      const bool wanted = matrix && (format != Format::mxfp4 || expert);
      changed += after[i] != before[i] ? 1 : 0;
      EXPECT_EQ(after[i], wanted ? through(format, before[i]) : before[i]) << p.name;
    }
    EXPECT_EQ(changed != 0,
              numerics::is_quantized(format) || (format == Format::bf16 && model->config().format == Format::f32));
    EXPECT_EQ(rows(gguf).count(), 40);
  }
}

TEST_P(Convert, PackedExpertsAreTheSameBitsInBothForms) {
  const auto model = make(true);
  convert_model(plain, gguf, {.to_gguf = true, .type = Format::mxfp4});
  const auto packed = folder.path / "packed", again = folder.path / "again.gguf";
  const ConvertReport report = convert_model(gguf, packed, {.to_gguf = false});
  EXPECT_TRUE(load_config(packed).experts.packed);
  const auto a = all_values(packed), b = all_values(gguf);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const Parameter& p = model->parameters()[i];
    const bool narrowed = model->config().format == Format::f32 && p.kind != ParameterKind::vector &&
                          p.kind != ParameterKind::conv && p.kind != ParameterKind::router &&
                          p.name.find(".experts.") == std::string::npos;
    EXPECT_EQ(a[i], narrowed ? through(Format::bf16, b[i]) : b[i]) << p.name;
  }
  EXPECT_EQ(report.notices.size(), model->config().format == Format::f32 ? 2U : 1U);
  if (model->config().format == Format::bf16) {
    EXPECT_TRUE(same_bits(rows(packed), rows(gguf)));
  }
  convert_model(packed, again, {.to_gguf = true});
  EXPECT_EQ(GgufStored(again).tensor("blk.1.ffn_up_exps.weight").bytes,
            GgufStored(gguf).tensor("blk.1.ffn_up_exps.weight").bytes);
}

TEST_P(Convert, RowsThatAreNoWholeBlocksKeepTheirNumbers) {
  const auto model = make(false);
  EXPECT_GT(convert_model(plain, gguf, {.to_gguf = true, .type = Format::q8_0}).kept, 0U);
  EXPECT_EQ(all_values(gguf)[static_cast<std::size_t>(model->head)],
            all_values(plain)[static_cast<std::size_t>(model->head)]);
}

TEST_P(Convert, WhatATargetCannotHoldIsRefusedBeforeAnythingIsWritten) {
  make(true);
  const auto out = folder.path / "out";
  expect_refused(ErrorCode::not_supported, "q8_0",
                 [&] { convert_model(plain, out, {.to_gguf = false, .type = Format::q8_0}); });
  expect_refused(ErrorCode::invalid_argument, ".gguf", [&] { convert_model(plain, out, {.to_gguf = true}); });
  convert_model(plain, gguf, {.to_gguf = true, .type = Format::q8_0});
  expect_refused(ErrorCode::not_supported, "is q8_0", [&] { convert_model(gguf, out, {.to_gguf = false}); });
  EXPECT_FALSE(std::filesystem::exists(out));
  convert_model(gguf, out, {.to_gguf = false, .type = Format::f32});
  EXPECT_EQ(all_values(out), all_values(gguf));
  expect_refused(ErrorCode::invalid_argument, "not an empty folder",
                 [&] { convert_model(gguf, out, {.to_gguf = false, .type = Format::f32}); });
}

TEST_P(Convert, TheVocabularyGoesAlong) {
  make(false);
  const ConvertReport report = convert_model(plain, gguf, {.to_gguf = true});
  EXPECT_NE(report.notices.front().find("no vocabulary"), std::string::npos);
  EXPECT_EQ(open_weights(gguf)->config().end_tokens, (std::vector<std::int32_t>{5, 7}));
  EXPECT_FALSE(load_tokenizer(gguf).has_text());
  GgufStored file(gguf);
  file.key("tokenizer.ggml.model") = GgufValue::of("gpt2");
  file.metadata.emplace_back("tokenizer.ggml.tokens", GgufValue::list(std::vector<std::string>(67, "x")));
  file.write(gguf);
  const auto again = folder.path / "y.gguf";
  convert_model(gguf, again, {.to_gguf = true});
  GgufStored kept(again);
  EXPECT_EQ(kept.key("tokenizer.ggml.tokens").size(), 67U);
  EXPECT_EQ(kept.key("tokenizer.ggml.model"), GgufValue::of("gpt2"));
}

TEST(ConvertNano, KeepsItsTokenizerAndItsTokens) {
  TemporaryFolder folder;
  const auto nano = std::filesystem::path(TIDELOCK_SOURCE_DIR) / "models/nano", gguf = folder.path / "nano.gguf",
             back = folder.path / "back";
  convert_model(nano, gguf, {.to_gguf = true});
  const Tokenizer a = load_tokenizer(nano), b = load_tokenizer(gguf);
  ASSERT_EQ(a.vocab_size(), b.vocab_size());
  for (TokenId id = 0; id < a.vocab_size(); ++id) {
    EXPECT_EQ(a.token_bytes(id), b.token_bytes(id));
    EXPECT_EQ(a.is_special(id), b.is_special(id));
  }
  for (const std::string text : {"the sum of 17 and 25 is 42", "x\n\n  y\xc3\xa9\xff", " print(1)"})
    EXPECT_EQ(a.encode_text(text), b.encode_text(text));
  // Every token of several bytes is made by one merge, in the order of ids: from_gguf has checked that.
  const GgufModel file(gguf);
  EXPECT_EQ(file.find_key("tokenizer.ggml.merges")->size(), 448U - 256U);
  const auto tokens = a.encode_text("the quick brown fox: 12 + 30 =");
  EXPECT_TRUE(
      same_bits(Runner(*load_model(gguf, false)).whole(tokens), Runner(*load_model(nano, false)).whole(tokens)));
  convert_model(nano, back, {.to_gguf = false});
  EXPECT_EQ(read_file(back / "tiktoken.model"), read_file(nano / "tiktoken.model"));
}

}  // namespace convert_test
}  // namespace tidelock::model
