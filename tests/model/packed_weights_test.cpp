// Files of packed weights. What must never break: whatever lies in the file, the model that comes out is the
// checkpoint's, by bits; and no file but one of packed weights is ever written over.
#include "model/packed_weights.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <fstream>
#include <map>

#include "base/content_hasher.hpp"
#include "model/content_hash.hpp"
#include "model/convert.hpp"
#include "model/expect_refused.hpp"
#include "model/gguf_stored.hpp"
#include "model/temporary_folder.hpp"

namespace tidelock::model {
namespace packed_weights_test {

using namespace testing;

std::unique_ptr<Model> load(const std::filesystem::path& checkpoint, const PackedOptions& options, int threads = 2) {
  Team team(threads);
  return load_packed(*open_weights(checkpoint), options, team);
}

ino_t inode(const std::filesystem::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) fail_errno("cannot stat", path.string());
  return info.st_ino;
}

void overwrite(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
}

class PackedWeights : public ::testing::TestWithParam<Variant> {
 protected:
  TemporaryFolder folder;
  std::filesystem::path plain = folder.path / "plain", gguf = folder.path / "x.gguf", packed = folder.path / "packed";
  const std::vector<std::int32_t> tokens = random_tokens(40, 1);

  void SetUp() override {
    write_plain(7);
    convert_model(plain, gguf, {.to_gguf = true, .type = Format::q8_0});
  }
  void write_plain(std::uint64_t seed) {
    const auto model = make_small_model(gguf_config_of(GetParam(), true), seed, false);
    std::vector<std::vector<float>> values;
    for (ParameterId id = 0; id < static_cast<ParameterId>(model->parameters().size()); ++id)
      values.push_back(small_values(*model, id, seed));
    save_model(
        *model, [&](ParameterId id) { return std::span<const float>(values[static_cast<std::size_t>(id)]); }, plain);
  }
  Rows rows(const Model& model) { return Runner(model).whole(tokens); }
  // The same rows and the same weights as load_model's, whether they were used for these rows or not.
  void expect_same(const Model& model, const std::filesystem::path& checkpoint) {
    const auto expected = load_model(checkpoint, false);
    EXPECT_TRUE(same_bits(rows(model), rows(*expected)));
    EXPECT_EQ(content_hash(model, solo_team()), content_hash(*expected, solo_team()));
    EXPECT_EQ(model.weight_bytes(), expected->weight_bytes());
  }
};
INSTANTIATE_TEST_SUITE_P(Family, PackedWeights, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(PackedWeights, EveryWayOfLoadingIsTheSameModel) {
  for (const auto& checkpoint : {plain, gguf}) {
    SCOPED_TRACE(checkpoint.string());
    std::filesystem::remove(packed);
    expect_same(*load(checkpoint, {}), checkpoint);
    expect_same(*load(checkpoint, {packed, true}), checkpoint);  // makes it
    const auto first = inode(packed);
    for (const bool map : {false, true}) {
      const auto model = load(checkpoint, {packed, map}, map ? 1 : 2);
      EXPECT_EQ(model->mapped(), map);
      expect_same(*model, checkpoint);
    }
    EXPECT_EQ(inode(packed), first) << "it was made a second time";
  }
}

TEST_P(PackedWeights, AFileOfAnotherCheckpointIsMadeAnew) {
  load(gguf, {packed, false});
  const auto first = inode(packed);
  expect_same(*load(plain, {packed, false}), plain);
  EXPECT_NE(inode(packed), first);
  // The same names and sizes, other weights.
  write_plain(8);
  for (const bool map : {false, true}) expect_same(*load(plain, {packed, map}), plain);
  // The twin: with the old times of change and sizes the old weights would be taken for the new ones.
  std::map<std::filesystem::path, std::filesystem::file_time_type> times;
  for (const char* name : {"config.json", "model.safetensors"})
    times[plain / name] = std::filesystem::last_write_time(plain / name);
  write_plain(9);
  for (const auto& [path, time] : times) std::filesystem::last_write_time(path, time);
  EXPECT_FALSE(same_bits(rows(*load(plain, {packed, false})), rows(*load_model(plain, false))));
}

TEST_P(PackedWeights, DamageIsSeenAndMended) {
  load(gguf, {packed, false});
  const std::string whole = read_file(packed);
  Random random(3);
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < 96; i += 5) places.push_back(i);
  for (int i = 0; i < 30; ++i) places.push_back(random.below(static_cast<std::uint32_t>(whole.size())));
  for (const std::size_t at : places) {
    SCOPED_TRACE(at);
    std::string damaged = whole;
    damaged[at] ^= static_cast<char>(1U << random.below(8));
    overwrite(packed, damaged);
    if (at < 8) {
      expect_refused(ErrorCode::invalid_argument, "is not a file of packed weights", [&] {
        load(gguf, {packed, false});
      });
      EXPECT_EQ(read_file(packed), damaged);
      overwrite(packed, whole);
      continue;
    }
    expect_same(*load(gguf, {packed, false}), gguf);
  }
  for (const std::size_t size : {whole.size() - 1, whole.size() / 2, std::size_t{97}, std::size_t{8}}) {
    overwrite(packed, whole.substr(0, size));
    if (size >= 96) expect_same(*load(gguf, {packed, true}), gguf);
  }
  // The twin: mapped data are not verified, and a turned bit shows in the rows.
  overwrite(packed, whole);
  std::string damaged = whole;
  for (std::size_t at = whole.size() / 2; at < whole.size(); ++at) damaged[at] ^= 0x11;
  overwrite(packed, damaged);
  EXPECT_FALSE(same_bits(rows(*load(gguf, {packed, true})), rows(*load_model(gguf, false))));
}

TEST_P(PackedWeights, OtherFilesAreLeftAlone) {
  const std::string before = read_file(gguf);
  for (const bool map : {false, true})
    expect_refused(ErrorCode::invalid_argument, "is not a file of packed weights", [&] { load(plain, {gguf, map}); });
  EXPECT_EQ(read_file(gguf), before);
  overwrite(packed, "");
  expect_refused(ErrorCode::invalid_argument, "is not a file of packed weights", [&] { load(gguf, {packed, false}); });
  expect_refused(ErrorCode::invalid_argument, "need a file of packed weights", [&] { load(gguf, {{}, true}); });
  expect_refused(ErrorCode::not_found, "cannot create", [&] { load(gguf, {folder.path / "no" / "such", false}); });
}

TEST_P(PackedWeights, OneProcessMakesIt) {
  const std::string temporary = packed.string() + ".tmp";
  const int fd = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  expect_refused(ErrorCode::invalid_argument, "is being made by another process", [&] { load(gguf, {packed, false}); });
  ::close(fd);  // it was killed; what it left behind is taken over
  expect_same(*load(gguf, {packed, false}), gguf);
  EXPECT_FALSE(std::filesystem::exists(temporary));
}

TEST_P(PackedWeights, AFullDiskIsAClearError) {
  const auto small = folder.path / "small";
  std::filesystem::create_directory(small);
  if (::mount("none", small.c_str(), "tmpfs", 0, "size=64k") != 0) GTEST_SKIP() << "needs root to mount a tmpfs";
  expect_refused(ErrorCode::exhausted, "no room for", [&] { load(gguf, {small / "packed", false}); });
  EXPECT_TRUE(std::filesystem::is_empty(small));
  ::umount(small.c_str());
}

}  // namespace packed_weights_test
}  // namespace tidelock::model
