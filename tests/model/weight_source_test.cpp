// Weights where files have them: each lie of a file is refused by the name of its tensor, before a weight is read.
#include "model/weight_source.hpp"

#include <algorithm>

#include "model/convert.hpp"
#include "model/expect_refused.hpp"
#include "model/gguf_stored.hpp"
#include "model/plan.hpp"
#include "model/stored_tensors.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace weight_source_test {

using namespace testing;

void open_and_bind(const std::filesystem::path& path) {
  const auto source = open_weights(path);
  const Model model(source->config(), false);
  source->bind(model);
}

// One model as a folder with MXFP4 experts, and as a GGUF file with them.
class WeightSources : public ::testing::TestWithParam<Family> {
 protected:
  TemporaryFolder folder;
  std::filesystem::path plain = folder.path / "plain", packed = folder.path / "packed", gguf = folder.path / "x.gguf";
  StoredFile tensors;
  GgufStored file;

  WeightSources() {
    const auto model = make_small_model(gguf_config_of({GetParam(), Format::bf16}, true), 7, false);
    std::vector<float> values;
    save_model(
        *model,
        [&](ParameterId id) {
          values = small_values(*model, id, 7);
          return std::span<const float>(values);
        },
        plain);
    convert_model(plain, gguf, {.to_gguf = true, .type = Format::mxfp4});
    convert_model(plain, packed, {.to_gguf = false, .type = Format::mxfp4});
    tensors = StoredFile(packed / "model.safetensors");
    file = GgufStored(gguf);
  }
  Stored& tensor(const std::string& end) {
    for (Stored& t : tensors.tensors)
      if (t.name.ends_with(end)) return t;
    throw std::logic_error(end);
  }
  void refuse_folder(const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    SCOPED_TRACE(part);
    tensors.write(packed / "model.safetensors");
    expect_refused(code, part, [&] { open_and_bind(packed); });
  }
  void refuse_file(const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    SCOPED_TRACE(part);
    file.write(gguf);
    expect_refused(code, part, [&] { open_and_bind(gguf); });
  }
};
std::string family_of(const ::testing::TestParamInfo<Family>& test) {
  return Variant{test.param, Format::bf16}.name();
}
INSTANTIATE_TEST_SUITE_P(Family, WeightSources, ::testing::Values(Family::linear, Family::k3, Family::k31), family_of);

TEST_P(WeightSources, BothFormsOpen) {  // the twin of what follows
  EXPECT_NO_THROW(open_and_bind(packed));
  EXPECT_NO_THROW(open_and_bind(gguf));
  EXPECT_NE(open_weights(packed)->kind().find("1 safetensors file"), std::string::npos);
  EXPECT_NE(open_weights(gguf)->kind().find("GGUF v3"), std::string::npos);
}

TEST_P(WeightSources, PackedExpertsAreChecked) {
  const auto all = tensors.tensors;
  const std::string name = "layers.1.block_sparse_moe.experts.2.w1.weight";
  std::erase_if(tensors.tensors, [&](const Stored& t) { return t.name.ends_with(name + "_scale"); });
  refuse_folder(name + "_scale is missing beside");
  tensors.tensors = all;
  std::erase_if(tensors.tensors, [&](const Stored& t) { return t.name.ends_with(name + "_packed"); });
  refuse_folder(name + "_packed is missing beside");
  tensors.tensors = all;
  std::reverse(tensor(name + "_packed").shape.begin(), tensor(name + "_packed").shape.end());
  if (tensor(name + "_packed").shape[0] != tensor(name + "_packed").shape[1]) refuse_folder(name + "_packed has shape");
  tensors.tensors = all;
  tensor(name + "_scale").dtype = Dtype::i8;
  refuse_folder(name + "_scale is I8, expected U8");
  tensors.tensors = all;
  tensor(name + "_scale").bytes[1] = std::byte{255};  // NaN of E8M0: found when it is loaded
  tensors.write(packed / "model.safetensors");
  expect_refused(ErrorCode::corrupt_data, name, [&] { load_model(packed, false); });
}

TEST_P(WeightSources, PackingMustBeSaidByTheConfigAndIsForExpertsOnly) {
  const std::string config = read_file(packed / "config.json");
  write_file_atomic(packed / "config.json", read_file(plain / "config.json"));
  refuse_folder("only routed experts may be packed", ErrorCode::not_supported);
  write_file_atomic(packed / "config.json", config);
  Stored& q = tensor("layers.0.self_attn.q_proj.weight");
  q.name += "_packed";
  refuse_folder("only routed experts may be packed", ErrorCode::not_supported);
  auto other = config;
  other.replace(other.find("mxfp4-pack-quantized"), 5, "nvfp4");
  write_file_atomic(packed / "config.json", other);
  refuse_folder("nvfp4-pack-quantized", ErrorCode::not_supported);
  other = config;
  other.replace(other.find("\"group_size\": 32"), 16, "\"group_size\": 16");
  write_file_atomic(packed / "config.json", other);
  refuse_folder("group_size = 16", ErrorCode::not_supported);
  other = config;
  other.replace(other.find("bfloat16"), 8, "float32");
  write_file_atomic(packed / "config.json", other);
  refuse_folder("torch_dtype must be bfloat16", ErrorCode::not_supported);
}

TEST_P(WeightSources, ThePrefixIsThatOfTheTensors) {
  const std::string prefix = GetParam() == Family::linear ? "" : "language_model.";
  const std::string other = prefix.empty() ? "language_model." : "";
  for (Stored& t : tensors.tensors) t.name = other + t.name.substr(prefix.size());
  tensors.write(packed / "model.safetensors");
  EXPECT_NO_THROW(open_and_bind(packed));
  EXPECT_EQ(open_weights(packed)->config().tensor_prefix, other);
  tensors.tensors.push_back(tensor("model.embed_tokens.weight"));
  tensors.tensors.back().name = prefix + "model.embed_tokens.weight";
  refuse_folder("both model.embed_tokens.weight");
  std::erase_if(tensors.tensors, [](const Stored& t) { return t.name.ends_with("embed_tokens.weight"); });
  refuse_folder("neither model.embed_tokens.weight");
}

TEST_P(WeightSources, GgufTensorsAreChecked) {
  const auto all = file.tensors;
  const auto with = [&](auto&& change, const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    file.tensors = all;
    change();
    refuse_file(part, code);
  };
  const auto remove = [&](const std::string& name) {
    return [this, name] { std::erase_if(file.tensors, [&](const auto& t) { return t.name == name; }); };
  };
  for (const char* name : {"token_embd.weight", "output.weight", "blk.0.ssm_a", "blk.1.ffn_up_exps.weight",
                           "blk.1.exp_probs_b.bias", "blk.0.ssm_conv1d_k.weight"})
    with(remove(name), fmt::format("tensor {} [", name));
  const std::string mla = GetParam() == Family::linear ? "blk.2." : "blk.1.";
  with(remove(mla + "attn_v_b.weight"), "tensor " + mla + "attn_v_b.weight [");
  with(
      [&] {
        file.tensors.push_back({"blk.0.attn_sinks.weight", ggml::f32, {1}, std::vector<std::byte>(4)});
      },
      "tensor \"blk.0.attn_sinks.weight\" is not part of the model");
  with([&] { std::swap(file.tensor("blk.0.ffn_down.weight").ne[0], file.tensor("blk.0.ffn_down.weight").ne[1]); },
       "tensor blk.0.ffn_down.weight has shape");
  const auto retype = [&](const std::string& name, std::uint32_t type) {
    return [this, name, type] {
      auto& t = file.tensor(name);
      t.type = type;
      const GgmlType* info = find_ggml_type(type);
      std::int64_t n = 1;
      for (const auto d : t.ne) n *= d;
      t.bytes.assign(static_cast<std::size_t>(n / info->block) * info->bytes, std::byte{0});
    };
  };
  with(retype("blk.0.attn_q.weight", 9), "tensor blk.0.attn_q.weight is Q8_1, expected F32, F16",
       ErrorCode::not_supported);
  with(retype("blk.0.attn_norm.weight", ggml::q8_0), "tensor blk.0.attn_norm.weight is Q8_0, expected F32, F16 or BF16",
       ErrorCode::not_supported);
  with(retype("blk.0.ssm_dt.bias", 26), "tensor blk.0.ssm_dt.bias is I32", ErrorCode::not_supported);
}

TEST_P(WeightSources, GgufValuesAreChecked) {
  const auto all = file.tensors;
  const auto refused = [&](const std::string& part) {
    SCOPED_TRACE(part);
    file.write(gguf);
    expect_refused(ErrorCode::corrupt_data, part, [&] { load_model(gguf, false); });
    file.tensors = all;
  };
  std::fill_n(file.tensor("blk.0.ssm_a").bytes.begin(), 4, std::byte{0});
  refused("tensor blk.0.ssm_a holds 0, expected values below 0");
  file.tensor("blk.1.ffn_down_exps.weight").bytes[17] = std::byte{255};
  refused("experts.0.w2.weight");
  std::fill_n(file.tensor("output_norm.weight").bytes.begin(), 4, std::byte{0xFF});
  refused("model.norm.weight");
  file.write(gguf);
  EXPECT_NO_THROW(load_model(gguf, false));
}

TEST_P(WeightSources, ShapesOfOtherWritersAreTaken) {
  const auto expected = Runner(*load_model(gguf, false)).whole(random_tokens(30, 1));
  file.tensor("blk.0.ssm_conv1d_q.weight").ne = {4, 1, file.tensor("blk.0.ssm_conv1d_q.weight").ne[2]};
  file.tensor("blk.0.ssm_a").ne = {1, 3};
  file.write(gguf);
  EXPECT_TRUE(same_bits(Runner(*load_model(gguf, false)).whole(random_tokens(30, 1)), expected));
}

TEST_P(WeightSources, HalvesAreWidened) {
  auto& q = file.tensor("blk.0.attn_q.weight");
  ASSERT_EQ(q.type, ggml::bf16);
  for (std::size_t i = 0; i < q.bytes.size(); i += 2) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &q.bytes[i], 2);
    bits = numerics::float_to_f16(numerics::to_float(numerics::bf16{bits}));
    std::memcpy(&q.bytes[i], &bits, 2);
  }
  q.type = ggml::f16;
  file.write(gguf);
  const auto source = open_weights(gguf);
  const Model model(source->config(), false);
  source->bind(model);
  std::vector<float> values;
  source->values(model.layers[0].kda.q, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &q.bytes[2 * i], 2);
    ASSERT_EQ(values[i], numerics::f16_to_float(bits));
  }
  EXPECT_EQ(source->stored(model.layers[0].kda.q).type, "F16");
  EXPECT_EQ(Runner(*load_model(gguf, false)).whole(random_tokens(5, 1)).count(), 5);
}

TEST_P(WeightSources, AModelLargerThanMemoryIsRefusedWithTheNumbers) {
  for (const bool training : {false, true}) {
    const auto loaded = load_model(gguf, training);
    const auto source = open_weights(gguf);
    const Model model(source->config(), training);
    source->bind(model);
    const auto format = [&](ParameterId id, int piece) { return source->format(id, piece); };
    const std::uint64_t needed = loaded->weight_bytes();
    // A transposed copy has panels of its own, so the need for training is a little below what is allocated.
    const std::uint64_t enough = training ? needed : needed - 1;
    expect_refused(ErrorCode::exhausted, bytes_text(enough / 2) + " are free",
                   [&] { check_memory(model, format, gguf, enough / 2); });
    EXPECT_NO_THROW(check_memory(model, format, gguf, needed));
    if (!training)
      expect_refused(ErrorCode::exhausted, "the weights need", [&] { check_memory(model, format, gguf, enough); });
  }
}

TEST(Nibbles, MoveWithoutLoss) {
  // Element i has the code i % 16, so each place is told from the others.
  std::byte packed[16], block[16], back[16];
  for (int i = 0; i < 16; ++i) packed[i] = static_cast<std::byte>((2 * i) % 16 | ((2 * i + 1) % 16) << 4);
  packed[3] = std::byte{0x5A};
  to_ggml_nibbles(packed, block);
  const auto code = [&](int i) { return std::to_integer<int>(packed[i / 2] >> (i % 2 * 4)) & 15; };
  for (int j = 0; j < 16; ++j) EXPECT_EQ(std::to_integer<int>(block[j]), code(j) | code(j + 16) << 4) << j;
  from_ggml_nibbles(block, back);
  EXPECT_EQ(std::memcmp(packed, back, 16), 0);
}

TEST(OpenWeights, SaysWhatAPathIsNot) {
  TemporaryFolder folder;
  write_file_atomic(folder.path / "x.bin", "x");
  expect_refused(ErrorCode::invalid_argument, "neither a checkpoint folder nor a .gguf file",
                 [&] { open_weights(folder.path / "x.bin"); });
  expect_refused(ErrorCode::not_found, "does not exist", [&] { open_weights(folder.path / "y.gguf"); });
  expect_refused(ErrorCode::not_found, "config.json", [&] { open_weights(folder.path); });
}

}  // namespace weight_source_test
}  // namespace tidelock::model
