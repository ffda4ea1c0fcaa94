// The event log: every decision that was told can be made again from what was told, and a changed one is noticed.
#include "serve/event_log.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "model/expect_refused.hpp"
#include "model/json.hpp"
#include "serve/engine_loop.hpp"
#include "serve/event_replay.hpp"
#include "serve/support.hpp"

namespace tidelock::serve {
namespace event_log_test {

namespace fs = std::filesystem;
using model::Json;
using model::testing::expect_refused;
using testing::nano_model;

class EventLogTest : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_ = fs::temp_directory_path() / fmt::format("tidelock-events-{}", ::getpid());
  fs::path file_ = folder_ / "events";
};

void wait_until_idle(EngineLoop& loop) {
  for (int i = 0; i < 6000; ++i) {
    const auto now = loop.counters();
    if (now.waiting == 0 && now.running == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "it does not come to rest";
}

std::vector<std::int32_t> prompt_of(std::size_t tokens, std::uint64_t seed) {
  std::vector<std::int32_t> out(tokens);
  for (std::size_t i = 0; i < tokens; ++i) out[i] = static_cast<std::int32_t>(philox(seed, i, 0)[0] % 200);
  return out;
}

// More than fits: prompts of several classes and priorities, sequences that are set back, written out and started
// again.
void run_a_crowd(const fs::path& file, const fs::path& disk) {
  const model::StateLayout layout(nano_model().config());
  EngineLoopOptions options{.running = 6, .waiting = 100};
  options.engine.state_limit = 6 * layout.recurrent_bytes() + 16 * layout.block_bytes();
  options.engine.reuse = true;
  options.engine.disk_folder = disk;
  options.engine.disk_limit = 64U << 20;
  options.engine.step_tokens = 128;
  options.engine.step_seconds = 1e-3;
  options.first_token_seconds = 0.05;
  options.events = std::make_shared<EventLog>(file);
  EngineLoop loop(nano_model(), solo_team(), options);
  std::vector<engine::SamplingParams> long_ones(5);
  for (auto& params : long_ones) params.max_tokens = 500;
  loop.submit(std::make_shared<Generation>(Wanted{prompt_of(3, 99), long_ones}, [] {}));
  for (std::uint64_t i = 0; i < 60; ++i) {
    engine::SamplingParams params;
    params.max_tokens = 40 + static_cast<std::int64_t>(i % 5) * 80;
    params.seed = i;
    Wanted wanted{prompt_of(1 + 37 * (i % 9), i % 20), {1 + i % 2, params}};
    wanted.priority = static_cast<int>(i % 3) - 1;
    loop.submit(std::make_shared<Generation>(std::move(wanted), [] {}));
    if (i % 7 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  wait_until_idle(loop);
  EXPECT_GT(loop.counters().set_back, 0);
}

std::vector<std::string> lines_of(const fs::path& file) {
  std::istringstream stream(read_file(file));
  std::vector<std::string> out;
  for (std::string line; std::getline(stream, line);) out.push_back(line);
  return out;
}

// Changes one thing that a decision was made from, or the decision.
void spoil(Json& event) {
  const std::string name = event.at("event");
  if (name == "plan") event["items"].push_back({999, 1});
  if (name == "budget") event["after"] = event["after"].get<std::int64_t>() + 1;
  if (name == "set_back") event["held"].push_back({999, true});
  if (name == "admit") event["chosen"] = 99;
  if (name == "first_token") event["expected"] = event["expected"].get<double>() + 1e-9;
}

// ---- what must never break

TEST_F(EventLogTest, EveryDecisionIsMadeAgainFromWhatWasTold) {
  run_a_crowd(file_, folder_ / "disk");
  const EventReplay replay = replay_events(file_);
  EXPECT_EQ(replay.differences, 0) << fmt::format("{}", fmt::join(replay.different, "\n"));
  for (const char* name : {"plan", "budget", "set_back", "admit", "first_token", "start"})
    EXPECT_GT(replay.events.contains(name) ? replay.events.at(name) : 0, 0) << name;
  EXPECT_GT(replay.decided, 100);
}

TEST_F(EventLogTest, OneChangedDecisionOfAnyKindIsNoticed) {  // the twin of the test before
  run_a_crowd(file_, folder_ / "disk");
  const auto lines = lines_of(file_);
  std::map<std::string, int> seen;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    Json event = Json::parse(lines[i]);
    const std::string name = event.at("event");
    if (name == "start" || ++seen[name] > 3) continue;
    spoil(event);
    const fs::path spoilt = folder_ / "spoilt";
    {
      std::ofstream out(spoilt);
      for (std::size_t j = 0; j < lines.size(); ++j) out << (j == i ? event.dump() : lines[j]) << "\n";
    }
    const EventReplay replay = replay_events(spoilt);
    ASSERT_EQ(replay.differences, 1) << lines[i];
    EXPECT_TRUE(replay.different.at(0).starts_with(fmt::format("line {}: {}: ", i + 1, name)))
        << replay.different.at(0);
  }
  EXPECT_EQ(seen.size(), 5U);
}

// ---- the rest

TEST_F(EventLogTest, WhatRepeatsItselfIsToldOnce) {
  EventLog log(file_);
  const std::vector<engine::PlanInput> sequences{{7, 1}};
  const std::vector<engine::StepPlanItem> items{{7, 1}};
  for (int i = 0; i < 100; ++i) log.planned({}, sequences, 64, items);
  const std::vector<WaitingRequest> waiting{{engine::PromptClass::huge}};
  for (int i = 0; i < 100; ++i) log.admitted(waiting, {{0, Room::none}}, std::nullopt);
  EXPECT_EQ(lines_of(file_).size(), 2U);
  EXPECT_EQ(replay_events(file_).decided, 2);
}

TEST_F(EventLogTest, ALongFileIsPutAsideAndOneOlderIsKept) {
  EventLog log(file_, 10'000);
  for (std::int64_t i = 0; i < 1000; ++i) log.started(i, 10, 0, false);
  EXPECT_LE(fs::file_size(file_), 10'200U);
  const auto older = lines_of(file_.string() + ".1"), newer = lines_of(file_);
  EXPECT_EQ(Json::parse(newer.back()).at("sequence"), 999);
  EXPECT_EQ(Json::parse(older.back()).at("sequence").get<int>() + 1,
            Json::parse(newer.front()).at("sequence").get<int>());
}

TEST_F(EventLogTest, WhatIsNoEventIsNamedByItsLineAndATornLineIsLeftOut) {
  {
    EventLog log(file_);
    log.started(1, 10, 0, false);
  }
  const std::string good = read_file(file_);
  const auto with = [&](const std::string& more) {
    std::ofstream(file_) << good << more;
    return file_;
  };
  EXPECT_EQ(replay_events(with("{\"event\":\"pl")).events.at("start"), 1);
  for (const char* bad :
       {"{}", "[]", "x", R"({"event":"other"})", R"({"event":"plan"})", R"({"event":5})",
        R"({"event":"plan","owed":[1,2,3,4],"turn":9,"begun":true,"budget":5,"sequences":[],"items":[]})",
        R"({"event":"admit","waiting":[[7,0,0,0]],"rooms":[],"chosen":null})"})
    expect_refused(ErrorCode::corrupt_data, "line 2", [&] { replay_events(with(std::string(bad) + "\n")); });
  expect_refused(ErrorCode::not_found, "absent", [&] { replay_events(folder_ / "absent"); });
  expect_refused(ErrorCode::not_found, "nowhere", [&] { EventLog(folder_ / "nowhere/events"); });
}

}  // namespace event_log_test
}  // namespace tidelock::serve
