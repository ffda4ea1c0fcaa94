// Checkpoints: what was saved is what is loaded, bit for bit, and nothing wrong is loaded.
#include <spdlog/sinks/ostream_sink.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "model/expect_refused.hpp"
#include "model/safetensors.hpp"
#include "model/small_model.hpp"
#include "model/stored_tensors.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace checkpoint_io_test {

using namespace testing;

class CheckpointIo : public ::testing::TestWithParam<Variant> {
 protected:
  TemporaryFolder folder;
  std::unique_ptr<Model> model = make_small_model(small_config(GetParam()));
  std::vector<std::vector<float>> values;
  StoredFile file;

  CheckpointIo() {
    for (ParameterId id = 0; id < count(); ++id) values.push_back(small_values(*model, id, 7));
    save_model(*model, source(), folder.path);
    file = StoredFile(folder.path / "model.safetensors");
  }
  ParameterId count() const { return static_cast<ParameterId>(model->parameters().size()); }
  ValueSource source() const {
    return [this](ParameterId id) { return std::span<const float>(values[static_cast<std::size_t>(id)]); };
  }
  const std::string& name(ParameterId id) const { return model->parameter(id).name; }
  Stored& tensor(const std::string& wanted) {
    for (Stored& t : file.tensors)
      if (t.name == wanted) return t;
    throw std::logic_error(wanted);
  }
  static std::vector<std::byte> as_bytes(const std::vector<float>& x) {
    const auto bytes = std::as_bytes(std::span(x));
    return {bytes.begin(), bytes.end()};
  }
  void write() { file.write(folder.path / "model.safetensors"); }
  std::unique_ptr<Model> load() { return load_model(folder.path, true); }
  void expect_load_refused(const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    expect_refused(code, part, [&] { load(); });
  }
  void expect_loads_the_same() { EXPECT_TRUE(same_bits(Runner(*load()).whole(tokens), Runner(*model).whole(tokens))); }
  const std::vector<std::int32_t> tokens = random_tokens(40, 1);
};
INSTANTIATE_TEST_SUITE_P(Family, CheckpointIo, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(CheckpointIo, ARoundTripKeepsTheBits) {
  expect_loads_the_same();
  std::vector<std::vector<float>> raw(values.size());
  load_model(folder.path, false, [&](ParameterId id, std::span<const float> v) {
    raw[static_cast<std::size_t>(id)].assign(v.begin(), v.end());
  });
  const bool narrow = model->config().format == Format::bf16;
  bool rounded = false;
  for (ParameterId id = 0; id < count(); ++id) {
    const ParameterKind kind = model->parameter(id).kind;
    std::vector<float> expected = values[static_cast<std::size_t>(id)];
    // Matrices are rounded once; vectors, convolutions and the router stay float32.
    if (narrow &&
        (kind == ParameterKind::linear || kind == ParameterKind::absorbed || kind == ParameterKind::embedding))
      for (float& x : expected) x = numerics::to_float(numerics::to_bf16(x));
    rounded = rounded || expected != values[static_cast<std::size_t>(id)];
    EXPECT_EQ(raw[static_cast<std::size_t>(id)], expected) << name(id);
  }
  EXPECT_EQ(rounded, narrow);
  // Saved again, the file is the same file.
  const std::string first = read_file(folder.path / "model.safetensors"),
                    config = read_file(folder.path / "config.json");
  values = raw;
  save_model(*model, source(), folder.path);
  EXPECT_EQ(sha256_hex(read_file(folder.path / "model.safetensors")), sha256_hex(first));
  EXPECT_EQ(read_file(folder.path / "config.json"), config);
}

TEST_P(CheckpointIo, AChangedBitIsADifferentModel) {
  tensor(name(model->final_norm)).bytes[2] ^= std::byte{1};
  write();
  EXPECT_FALSE(same_bits(Runner(*load()).whole(tokens), Runner(*model).whole(tokens)));
}

TEST_P(CheckpointIo, OtherShapesOfTheSameValuesAreAccepted) {
  const KdaIds& kda = model->layers[0].kda;
  const auto heads = static_cast<std::int64_t>(model->config().kda.heads);
  Stored& a_log = tensor(name(kda.a_log));
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{1, 1, heads, 1}, {heads, 1}}) {
    a_log.shape = shape;
    write();
    expect_loads_the_same();
  }
  std::vector<float> padded(values[static_cast<std::size_t>(kda.a_log)]);
  padded.resize(static_cast<std::size_t>(heads) + 5, 99.0F);
  a_log.shape = {heads + 5};
  a_log.bytes = as_bytes(padded);
  Stored& conv = tensor(name(kda.q_conv));
  ASSERT_EQ(conv.shape, (std::vector<std::int64_t>{model->config().kda.channels(), 1, 4}));
  conv.shape = {model->config().kda.channels(), 4};
  if (model->output_mix_proj != kNone) tensor(name(model->output_mix_proj)).shape = {model->config().hidden};
  write();
  expect_loads_the_same();
  a_log.shape = {heads - 1};
  a_log.bytes.resize(static_cast<std::size_t>(heads - 1) * 4);
  write();
  expect_load_refused(a_log.name);
}

TEST_P(CheckpointIo, AFloat32FileOfTheModelIsRoundedOnce) {
  for (ParameterId id = 0; id < count(); ++id) {
    Stored& t = tensor(name(id));
    if (model->parameter(id).kind == ParameterKind::conv) continue;  // file.tensors as float32, in another order
    t.dtype = Dtype::f32;
    t.bytes = as_bytes(values[static_cast<std::size_t>(id)]);
  }
  write();
  expect_loads_the_same();
}

TEST_P(CheckpointIo, EveryMissingTensorIsNamed) {
  const auto all = file.tensors;
  for (std::size_t i = 0; i < all.size(); i += 7) {
    file.tensors = all;
    file.tensors.erase(file.tensors.begin() + static_cast<std::ptrdiff_t>(i));
    write();
    expect_load_refused(all[i].name + " ");
  }
}

TEST_P(CheckpointIo, AnUnknownTensorIsNamed) {
  file.tensors.push_back({"model.layers.0.self_attn.z_proj.weight", Dtype::f32, {1}, std::vector<std::byte>(4)});
  write();
  expect_load_refused("model.layers.0.self_attn.z_proj.weight");
}

TEST_P(CheckpointIo, VisionTensorsAreLeftOutWithANotice) {
  file.tensors.push_back({"vision_tower.patch.weight", Dtype::f32, {2}, std::vector<std::byte>(8)});
  file.tensors.push_back({"mm_projector.proj.0.weight", Dtype::u8, {3}, std::vector<std::byte>(3)});
  write();
  std::ostringstream log;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(log)));
  expect_loads_the_same();
  spdlog::set_default_logger(before);
  EXPECT_NE(log.str().find("2 vision tensors"), std::string::npos) << log.str();
}

TEST_P(CheckpointIo, WrongShapesAndTypesAreNamed) {
  const auto all = file.tensors;
  const LayerIds& first = model->layers[0];
  for (const ParameterId id : {model->head, first.kda.q, first.ffn.down, first.attention_norm, first.kda.v_conv}) {
    file.tensors = all;
    Stored& turned = tensor(name(id));
    std::reverse(turned.shape.begin(), turned.shape.end());
    turned.shape.push_back(1);
    write();
    expect_load_refused(turned.name);
    file.tensors = all;
    Stored& integers = tensor(name(id));
    integers.dtype = integers.dtype == Dtype::bf16 ? Dtype::i16 : Dtype::i32;
    write();
    expect_load_refused(integers.name);
  }
}

TEST_P(CheckpointIo, NanAndInfinityAreNamed) {
  const auto all = file.tensors;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()})
    for (const ParameterId id : {model->embedding, model->layers[0].kda.dt_bias, model->layers[1].ffn.expert_up[2],
                                 model->layers[0].kda.a_log}) {
      file.tensors = all;
      Stored& t = tensor(name(id));
      const std::uint32_t bits = std::bit_cast<std::uint32_t>(bad);
      const std::size_t size = dtype_size(t.dtype);
      std::memcpy(t.bytes.data() + t.bytes.size() - size, reinterpret_cast<const char*>(&bits) + 4 - size, size);
      write();
      expect_load_refused(t.name);
    }
}

TEST_P(CheckpointIo, ATruncatedFileIsRefused) {
  const std::string whole = read_file(folder.path / "model.safetensors");
  for (const std::size_t length :
       {std::size_t{0}, std::size_t{7}, std::size_t{8}, std::size_t{100}, whole.size() / 2, whole.size() - 1}) {
    write_file_atomic(folder.path / "model.safetensors", whole.substr(0, length));
    expect_load_refused("model.safetensors");
  }
  write_file_atomic(folder.path / "model.safetensors", whole);
  expect_loads_the_same();
}

TEST_P(CheckpointIo, AnotherContractIsRefused) {
  ASSERT_EQ(file.metadata["tidelock_contract"], numerics::kContractName);
  file.metadata["tidelock_contract"] = "tidelock-0";
  write();
  expect_load_refused("tidelock-0", ErrorCode::mismatch);
  file.metadata.clear();  // another program's file
  write();
  expect_loads_the_same();
}

TEST_P(CheckpointIo, ABadConfigIsRefusedBeforeAnyWeight) {
  write_file_atomic(folder.path / "model.safetensors", "no tensors at all");
  const std::string config = read_file(folder.path / "config.json");
  expect_load_refused("model.safetensors");
  auto at = config.find("\"hidden_size\"");
  write_file_atomic(folder.path / "config.json", std::string(config).replace(at, 13, "\"hidden_seize\""));
  expect_load_refused("hidden_size", ErrorCode::invalid_argument);
  at = config.find("\"tie_word_embeddings\": false");
  write_file_atomic(folder.path / "config.json", std::string(config).replace(at, 28, "\"tie_word_embeddings\": true"));
  expect_load_refused("tie_word_embeddings", ErrorCode::not_supported);
  std::filesystem::remove(folder.path / "config.json");
  expect_load_refused("config.json", ErrorCode::not_found);
}

}  // namespace checkpoint_io_test
}  // namespace tidelock::model
