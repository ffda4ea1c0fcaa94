// States that went to disk and came back: a sequence's tokens and log-probabilities are those of an engine that knows
// nothing, wherever its state lay and whatever the disk did.
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/base.hpp"
#include "engine/engine.hpp"
#include "engine/reuse_fixture.hpp"
#include "model/content_hash.hpp"
#include "model/expect_refused.hpp"
#include "model/small_model.hpp"
#include "model/temporary_folder.hpp"
#include "state/faulty_io.hpp"
#include "state/record.hpp"

namespace tidelock::engine {
namespace disk_test {

namespace fs = std::filesystem;
using namespace model::testing;
using namespace testing;

class Disk : public Reuse {
 protected:
  const TemporaryFolder folder;
  const fs::path path = folder.path / "states";

  EngineOptions on_disk(std::size_t limit = state::Pool::kNoLimit) const {
    EngineOptions options{.step_tokens = 50, .state_limit = limit, .reuse = true};
    options.disk_folder = path;
    options.disk_limit = 1 << 30;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Family, Disk,
                         ::testing::Values(Variant{Family::linear, Format::bf16}, Variant{Family::k3, Format::f32},
                                           Variant{Family::k31, Format::bf16}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(Disk, ARestartEqualsColdAtEveryCut) {
  const Tokens first = random_tokens(150, 1);
  Engine writer(*model, solo_team(), on_disk());
  std::vector<Tokens> prompts;
  for (std::int64_t cut = 1; cut <= 150; cut += cut % 16 < 2 || cut % 16 > 13 ? 1 : 5) {
    prompts.emplace_back(first.begin(), first.begin() + cut);
    const Tokens other = random_tokens(4, 90 + static_cast<std::uint64_t>(cut));
    // Ends of requests, at every cut: what the next life goes on from.
    const SamplingParams one = params(1, 1);
    const SequenceId id = writer.add(prompts.back(), std::span(&one, 1)).front();
    drain(writer);
    writer.remove(id);
    prompts.back().insert(prompts.back().end(), other.begin(), other.end());
  }
  writer.write_back();
  EXPECT_GT(writer.disk_counters().stored, std::ssize(prompts) / 2);
  // A second engine cannot have the folder while the first one has it.
  expect_refused(ErrorCode::invalid_argument, "is in use", [&] { Engine(*model, solo_team(), on_disk()); });
  const fs::path taken = folder.path / "taken";
  fs::copy(path, taken);
  for (const Tokens& prompt : prompts) {
    EngineOptions options = on_disk();
    options.disk_folder = taken;
    Engine engine(*model, solo_team(), options);
    const auto cut = static_cast<std::int64_t>(prompt.size()) - 4;
    EXPECT_EQ(run(engine, prompt, params(2, 5)), cold(prompt, params(2, 5))) << "cut at " << cut;
    EXPECT_GE(engine.reuse_counters().hit_tokens, cut);  // more where the new tokens happen to go on like the old ones
    EXPECT_EQ(engine.disk_counters().loads, 1);
  }
}

// The twin: a state whose content was changed, with checksums to match, must show in what is sampled.
TEST_P(Disk, AChangedStateWouldBeSeen) {
  const Tokens prompt = random_tokens(150, 1);
  {
    Engine engine(*model, solo_team(), on_disk());
    run(engine, prompt, params(1, 3));
    engine.write_back();
  }
  const state::Digest identity = [&] {
    std::ifstream title(path / "store");
    std::string format, hex;
    std::getline(title, format);
    std::getline(title, hex);
    state::Digest d{};
    for (std::size_t i = 0; i < d.size(); ++i)
      d[i] = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
    return d;
  }();
  for (const auto& entry : fs::directory_iterator(path)) {
    if (!entry.path().filename().string().starts_with("segment")) continue;
    std::string bytes = read_file(entry.path());
    const auto raw = std::as_writable_bytes(std::span(bytes));
    for (std::size_t at = 0; at + state::kHeadBytes <= raw.size();) {
      const auto head = state::read_head(raw.subspan(at).first<state::kHeadBytes>(), identity);
      ASSERT_TRUE(head);
      const auto content = raw.subspan(at + state::kHeadBytes, head->content_bytes);
      for (std::size_t i = 1; i < content.size(); i += 64) content[i] ^= std::byte{0x11};
      ContentHasher hasher;
      hasher.add(content);
      const auto forged = state::write_head(head->info, identity, head->content_bytes, hasher.result());
      std::copy(forged.begin(), forged.end(), raw.begin() + static_cast<std::ptrdiff_t>(at));
      at += state::record_bytes(head->content_bytes);
    }
    std::ofstream(entry.path(), std::ios::binary) << bytes;
  }
  Engine engine(*model, solo_team(), on_disk());
  EXPECT_NE(run(engine, prompt, params(1, 3)), cold(prompt, params(1, 3)));
  EXPECT_EQ(engine.disk_counters().loads, 1) << "the forgery was not loaded at all";
}

TEST_P(Disk, AnySpoiltRecordIsAMissAndTheAnswerStays) {
  const Tokens prompt = random_tokens(150, 1);
  const Sampled expected = cold(prompt, params(1, 3));
  {
    Engine engine(*model, solo_team(), on_disk());
    run(engine, prompt, params(1, 3));
    engine.write_back();
  }
  const fs::path good = folder.path / "good";
  fs::copy(path, good);
  std::int64_t failures = 0;
  for (int round = 0; round < 12; ++round) {
    EngineOptions options = on_disk();
    options.disk_folder = folder.path / "spoilt";
    options.disk_io = [round] {
      return std::make_unique<state::testing::SpoiledIo>(
          state::testing::random_faults(static_cast<std::uint64_t>(round), 2));
    };
    fs::copy(good, options.disk_folder);
    Engine engine(*model, solo_team(), options);
    EXPECT_EQ(run(engine, prompt, params(1, 3)), expected) << "round " << round;
    const state::DiskCounters c = engine.disk_counters();
    failures += c.loads_corrupt + c.loads_failed + c.loads_missing;
    fs::remove_all(options.disk_folder);
  }
  EXPECT_GT(failures, 1);
}

// The head property: any traffic, under any limits, on a disk that may fail, gives what cold engines give.
TEST_P(Disk, AnyTrafficUnderAnyLimitChangesNoBit) {
  std::int64_t loads = 0, set_back = 0;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    Random random(seed);
    EngineOptions options = on_disk(bytes_for(256, 1 + static_cast<std::int64_t>(random.below(4))));
    options.step_tokens = 16 + random.below(80);
    options.disk_limit = bytes_for(256, 1) * (2 + random.below(40));
    if (seed % 3 == 2)
      options.disk_io = [seed]() -> std::unique_ptr<state::DiskIo> {
        return std::make_unique<state::testing::SpoiledIo>(state::testing::random_faults(seed, 10));
      };
    Team team(1 + static_cast<int>(random.below(2)));
    Engine engine(*model, team, options);
    run_traffic(engine, random, options.state_limit, seed);
    if (!options
             .disk_io) {  // what traffic finds on disk depends on how fast that is; this it finds wherever it has room
      const Tokens prompt = random_tokens(120, 900 + seed);
      const Sampled expected = cold(prompt, params(1, 3));
      EXPECT_EQ(run(engine, prompt, params(1, 3)), expected);
      engine.rest();
      EXPECT_EQ(engine.state_bytes(), 0U);
      EXPECT_EQ(run(engine, prompt, params(1, 3)), expected);
    }
    loads += engine.disk_counters().loads;
    set_back += engine.counters().set_back;
    fs::remove_all(path);
  }
  EXPECT_GT(loads, 3);
  EXPECT_GT(set_back, 0);
}

TEST_P(Disk, AHintBringsUpWhatIsAskedForLater) {
  const Tokens prompt = random_tokens(150, 1), other = random_tokens(150, 2);
  {
    Engine engine(*model, solo_team(), on_disk());
    run(engine, prompt, params(1, 3));
    engine.write_back();
  }
  Engine engine(*model, solo_team(), on_disk(bytes_for(300, 6)));
  EXPECT_EQ(engine.prefetch(other, nullptr, "").coming, 0) << "nothing is known of it";
  EXPECT_EQ(engine.prefetch(prompt, nullptr, "salt").coming, 0);
  EXPECT_EQ(engine.prefetch({}, nullptr, "").coming, 0);
  const auto hint = engine.prefetch(prompt, nullptr, "");
  EXPECT_EQ(hint.ready, 0);
  EXPECT_GE(hint.coming, 64);
  EXPECT_LT(hint.coming, 150);
  for (int i = 0; i < 10000 && engine.counters().prefetched_tokens == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(engine.prefetch(prompt, nullptr, "").coming, hint.coming) << "once is enough";
  }
  EXPECT_EQ(engine.prefetch(prompt, nullptr, "").ready, hint.coming);
  EXPECT_EQ(engine.counters().prefetches, 1);
  const auto loads = engine.disk_counters().loads;
  EXPECT_EQ(run(engine, prompt, params(2, 5)), cold(prompt, params(2, 5)));
  EXPECT_EQ(engine.reuse_counters().hit_tokens, hint.coming);
  EXPECT_EQ(engine.disk_counters().loads, loads) << "it was not read twice";
  EXPECT_EQ(engine.counters().prefetches_late, 0);
}

TEST_P(Disk, AHintThatComesLateIsWaitedForAndOneThatIsNotAskedForIsLetGo) {
  const Tokens prompt = random_tokens(150, 1);
  {
    Engine engine(*model, solo_team(), on_disk());
    run(engine, prompt, params(1, 3));
    engine.write_back();
  }
  {
    Engine engine(*model, solo_team(), on_disk());
    const auto coming = engine.prefetch(prompt, nullptr, "").coming;
    EXPECT_EQ(run(engine, prompt, params(2, 5)), cold(prompt, params(2, 5)));  // takes it over
    EXPECT_EQ(engine.counters().prefetches_late, 1);
    EXPECT_EQ(engine.disk_counters().loads, 1);
    EXPECT_EQ(engine.reuse_counters().hit_tokens, coming);
  }
  Engine engine(*model, solo_team(), on_disk());
  engine.prefetch(prompt, nullptr, "");
  engine.rest();
  EXPECT_EQ(engine.state_bytes(), 0U);
  engine.prefetch(prompt, nullptr, "");
  engine.forget();
  EXPECT_EQ(engine.prefetch(prompt, nullptr, "").coming, 0);
  EXPECT_EQ(run(engine, prompt, params(2, 5)), cold(prompt, params(2, 5)));
}

TEST_P(Disk, StatesOfOtherWeightsAreNeverUsed) {
  const Tokens prompt = random_tokens(150, 1);
  {
    Engine engine(*model, solo_team(), on_disk());
    run(engine, prompt, params(1, 3));
    engine.write_back();
  }
  auto other = make_small_model(small_config(GetParam()), 7, false);
  EXPECT_EQ(content_hash(*other, solo_team()), content_hash(*model, solo_team()));
  const auto id = other->final_norm;
  std::vector<float> values(other->vector(id), other->vector(id) + other->parameter(id).count());
  values[0] = std::nextafter(values[0], 10.0F);
  other->set(id, values);
  EXPECT_NE(content_hash(*other, solo_team()), content_hash(*model, solo_team()));
  Engine engine(*other, solo_team(), on_disk());
  run(engine, prompt, params(1, 3));
  EXPECT_EQ(engine.disk_counters().found + engine.disk_counters().loads, 0);
}

}  // namespace disk_test
}  // namespace tidelock::engine
