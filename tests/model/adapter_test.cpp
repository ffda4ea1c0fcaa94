// Adapters in PEFT form: what was saved is what is loaded, and nothing is left out silently.
#include <cmath>
#include <limits>
#include <tuple>

#include "model/expect_refused.hpp"
#include "model/safetensors.hpp"
#include "model/small_model.hpp"
#include "model/stored_tensors.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace adapter_test {

using namespace testing;

class AdapterIo : public ::testing::TestWithParam<Variant> {
 protected:
  TemporaryFolder folder;
  std::unique_ptr<Model> model = make_small_model(small_config(GetParam()));
  AdapterValues values = random_adapter(*model, 3, 0.1F, 5);
  StoredFile file;

  AdapterIo() {
    save_adapter(*model, values, folder.path, "base");
    file = StoredFile(folder.path / "adapter_model.safetensors");
    config = read_file(folder.path / "adapter_config.json");
  }
  void write() { file.write(folder.path / "adapter_model.safetensors"); }
  void expect_load_refused(const std::string& part, ErrorCode code = ErrorCode::corrupt_data) {
    expect_refused(code, part, [&] { load_adapter(*model, folder.path); });
  }
  // Replaces text of adapter_config.json.
  void edit(const std::string& from, const std::string& to) {
    std::string text = config;
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write_file_atomic(folder.path / "adapter_config.json", text.replace(at, from.size(), to));
  }
  std::string config;  // adapter_config.json as saved
};
INSTANTIATE_TEST_SUITE_P(Family, AdapterIo,
                         ::testing::Values(Variant{Family::linear, Format::bf16}, Variant{Family::k31, Format::f32}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(AdapterIo, ARoundTripKeepsTheBits) {
  const AdapterValues loaded = load_adapter(*model, folder.path);
  EXPECT_EQ(loaded.rank, values.rank);
  EXPECT_EQ(loaded.alpha, values.alpha);
  ASSERT_EQ(loaded.pairs.size(), values.pairs.size());
  for (std::size_t i = 0; i < values.pairs.size(); ++i) {
    EXPECT_EQ(loaded.pairs[i].id, values.pairs[i].id);
    EXPECT_EQ(loaded.pairs[i].a, values.pairs[i].a);
    EXPECT_EQ(loaded.pairs[i].b, values.pairs[i].b);
  }
  EXPECT_EQ(loaded.sha256(*model), values.sha256(*model));
  EXPECT_EQ(make_adapter(*model, loaded)->values().sha256(*model), values.sha256(*model));
  const std::string first = read_file(folder.path / "adapter_model.safetensors");
  save_adapter(*model, loaded, folder.path, "base");
  EXPECT_EQ(read_file(folder.path / "adapter_model.safetensors"), first);
  EXPECT_EQ(read_file(folder.path / "adapter_config.json"), config);
}

// One bit in what the kernels read, anywhere.
TEST_P(AdapterIo, TheValuesAreThoseThatThePassReads) {
  const auto adapter = make_adapter(*model, values);
  const std::string hash = values.sha256(*model);
  ASSERT_EQ(adapter->values().sha256(*model), hash);
  int flipped = 0;
  for (const auto& pair : values.pairs) {
    const AdapterPart* parts = adapter->parts(pair.id);
    const bool absorbed = model->parameter(pair.id).kind == ParameterKind::absorbed;
    const int count = absorbed ? 2 * model->config().mla.heads : 1;
    for (int i = 0; i < count; ++i) {
      for (const auto* matrix : {&parts[i].down, &parts[i].up}) {
        auto* byte = const_cast<std::byte*>(matrix->data());
        *byte ^= std::byte{1};
        bool found = false;
        try {
          found = adapter->values().sha256(*model) != hash;
        } catch (const Error& error) {
          found = error.code() == ErrorCode::mismatch;
        }
        EXPECT_TRUE(found) << model->parameter(pair.id).name << " part " << i;
        *byte ^= std::byte{1};
        ++flipped;
      }
    }
  }
  EXPECT_GT(flipped, 20);
  EXPECT_EQ(adapter->values().sha256(*model), hash);
}

TEST_P(AdapterIo, TheHashSeesEverything) {
  const std::string hash = values.sha256(*model);
  const auto differs = [&](const std::function<void(AdapterValues&)>& change) {
    AdapterValues other = values;
    change(other);
    return other.sha256(*model) != hash;
  };
  EXPECT_TRUE(
      differs([](AdapterValues& v) { v.pairs.back().b.back() = std::nextafter(v.pairs.back().b.back(), 9.0F); }));
  EXPECT_TRUE(differs([](AdapterValues& v) { v.alpha += 1; }));
  EXPECT_TRUE(differs([](AdapterValues& v) { v.rank += 1; }));
  EXPECT_TRUE(differs([](AdapterValues& v) { v.pairs.pop_back(); }));
  EXPECT_TRUE(differs([](AdapterValues& v) { std::swap(v.pairs[0].id, v.pairs[1].id); }));
  EXPECT_TRUE(differs([](AdapterValues& v) { std::swap(v.pairs[0].a, v.pairs[0].b); }));
  EXPECT_FALSE(differs([](AdapterValues&) {}));
}

TEST_P(AdapterIo, TheHashFollowsWhatIsSet) {
  const auto adapter = make_adapter(*model, values);
  EXPECT_EQ(adapter->sha256(), values.sha256(*model));
  values.pairs.back().b.back() += 1;
  adapter->set(values.pairs.back().id, values.pairs.back().a, values.pairs.back().b);
  EXPECT_EQ(adapter->sha256(), values.sha256(*model));
}

TEST_P(AdapterIo, ChangedValuesDoNotMatchTheirHash) {
  file.tensors[3].bytes[0] ^= std::byte{1};
  write();
  expect_load_refused("hash", ErrorCode::mismatch);
  file.metadata.erase("tidelock_sha256");  // another program's adapter has none
  write();
  EXPECT_NE(load_adapter(*model, folder.path).sha256(*model), values.sha256(*model));
}

TEST_P(AdapterIo, AnotherContractIsRefused) {
  file.metadata["tidelock_contract"] = "tidelock-0";
  write();
  expect_load_refused("tidelock-0", ErrorCode::mismatch);
}

TEST_P(AdapterIo, TensorsThatDoNotBelongAreNamed) {
  const auto all = file.tensors;
  const std::string prefix = "base_model.model.";
  const std::string module = file.tensors[0].name.substr(0, file.tensors[0].name.rfind(".lora_"));
  for (const std::string& name :
       {prefix + "model.layers.77.self_attn.q_proj.lora_A.weight", prefix + "lm_head.lora_A.weight",
        module + ".lora_magnitude_vector", module + ".lora_A.other.weight", std::string("free.weight")}) {
    file.tensors = all;
    file.tensors.push_back({name, Dtype::f32, {1}, std::vector<std::byte>(4)});
    write();
    expect_load_refused(name);
  }
}

TEST_P(AdapterIo, HalfAPairIsNamed) {
  const auto all = file.tensors;
  for (const std::size_t i : {std::size_t{0}, std::size_t{1}, all.size() - 1}) {
    file.tensors = all;
    file.tensors.erase(file.tensors.begin() + static_cast<std::ptrdiff_t>(i));
    write();
    expect_load_refused("only one of lora_A and lora_B");
  }
}

TEST_P(AdapterIo, WrongShapesAreNamed) {
  const auto all = file.tensors;
  for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
    file.tensors = all;
    std::swap(file.tensors[i].shape[0], file.tensors[i].shape[1]);
    write();
    expect_load_refused(file.tensors[i].name);
  }
  file.tensors = all;
  write();
  edit("\"r\": 3", "\"r\": 4");  // the config promises another rank than the tensors have
  expect_load_refused("lora_A");
}

TEST_P(AdapterIo, NanIsNamed) {
  const float bad = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(file.tensors[2].bytes.data(), &bad, 4);
  write();
  expect_load_refused(file.tensors[2].name);
}

TEST_P(AdapterIo, BadConfigsAreRefused) {
  const std::tuple<const char*, const char*, const char*, ErrorCode> cases[] = {
      {"\"r\": 3", "\"r\": 0", "r = 0", ErrorCode::corrupt_data},
      {"\"r\": 3", "\"r\": \"3\"", "r = ", ErrorCode::corrupt_data},
      {"\"r\": 3", "\"r\": 4294967299", "r = ", ErrorCode::corrupt_data},
      {"\"r\": 3", "\"rank\": 3", "r = null", ErrorCode::corrupt_data},
      {"\"lora_alpha\": 6.0", "\"lora_alpha\": 0", "lora_alpha", ErrorCode::corrupt_data},
      {"\"lora_alpha\": 6.0", "\"lora_alpha\": \"6\"", "lora_alpha", ErrorCode::corrupt_data},
      {"\"lora_alpha\": 6.0", "\"alpha\": 6.0", "lora_alpha", ErrorCode::corrupt_data},
      {"\"LORA\"", "\"IA3\"", "peft_type", ErrorCode::not_supported},
      {"\"LORA\"", "5", "peft_type", ErrorCode::not_supported},
      {"\"use_dora\": false", "\"use_dora\": true", "use_dora", ErrorCode::not_supported},
      {"\"use_rslora\": false", "\"use_rslora\": true", "use_rslora", ErrorCode::not_supported},
      {"\"fan_in_fan_out\": false", "\"fan_in_fan_out\": true", "fan_in_fan_out", ErrorCode::not_supported},
      {"{", "[", "adapter_config.json", ErrorCode::corrupt_data}};
  for (const auto& [from, to, part, code] : cases) {
    edit(from, to);
    expect_load_refused(part, code);
  }
  write_file_atomic(folder.path / "adapter_config.json", "[]");
  expect_load_refused("adapter_config.json");
  std::filesystem::remove(folder.path / "adapter_config.json");
  expect_load_refused("adapter_config.json", ErrorCode::not_found);
}

TEST_P(AdapterIo, MapsThatTakeNoAdapterRefuseOne) {
  Adapter adapter(*model, 2, 4);
  const LayerIds& layer = model->layers[1];
  for (const ParameterId id : {model->head, model->embedding, model->final_norm, layer.ffn.router}) {
    const auto& p = model->parameter(id);
    const auto n = static_cast<std::size_t>(2 * p.count());
    expect_refused(ErrorCode::not_supported, p.name,
                   [&] { adapter.set(id, std::vector<float>(n), std::vector<float>(n)); });
  }
  EXPECT_THROW(adapter.set(model->layers[0].kda.q, std::vector<float>(3), std::vector<float>(3)), Error);
  EXPECT_THROW(Adapter(*model, 0, 4), Error);
}

}  // namespace adapter_test
}  // namespace tidelock::model
