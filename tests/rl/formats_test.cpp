// Files of a run: ATIF trajectories, metrics.jsonl, TensorBoard events.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/random.hpp"
#include "model/json.hpp"
#include "rl/atif.hpp"
#include "rl/metrics.hpp"
#include "rl/tensorboard.hpp"

namespace tidelock::rl {
namespace formats_test {

class Formats : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / fmt::format("tidelock-formats-{}", ::getpid());
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  std::filesystem::path root_;
};

std::vector<model::Message> messages() {
  model::Message message;
  message.role = "user";
  message.content = "37*58? \"quoted\"\n";
  return {message};
}

std::vector<std::int32_t> ids(Random& random, int count) {
  std::vector<std::int32_t> result;
  for (int i = 0; i < count; ++i) result.push_back(random.between(0, 511));
  return result;
}

void sample(Trajectory& t, Random& random, int count, std::uint64_t version) {
  std::vector<float> logprobs;
  // All kinds of bits: tiny, huge, ordinary.
  for (int i = 0; i < count; ++i) logprobs.push_back(-std::ldexp(random.uniform(), random.between(-140, 8)));
  t.append_sampled(ids(random, count), logprobs, version);
}

Trajectory example(std::uint64_t seed) {
  Random random(seed);
  Trajectory t;
  t.task_id = "calc-2-7";
  t.family = "calc";
  t.group = 3;
  t.member = static_cast<std::int64_t>(seed);
  t.seed = ~seed;
  t.append_prompt(ids(random, 9));
  sample(t, random, 5, 1);
  sample(t, random, 2, 2);  // the weights changed within the turn
  t.append_tool(ids(random, 4));
  sample(t, random, 3, 2);
  t.append_tool(ids(random, static_cast<int>(seed % 3)));  // what follows the last turn
  t.turns = {{"let me see",
              {{"c1", "shell", R"json({"command": "echo $((37*58))"})json", "2146", 0.001},
               {"c2", "shell", "not JSON", "bad", 0}}},
             {"2146", {}}};
  t.status = Status::truncated;
  t.reward = 0.1 + 0.2;
  t.reward_detail = {{"speed", 1.0 / 3}};
  t.tool_calls = 2;
  t.sandbox = {1.5, 0.25, 1.0 / 3};
  t.answer = "2146";
  return t;
}

TEST_F(Formats, AtifRoundTripKeepsEveryBit) {
  std::vector<std::string> lines;
  std::vector<Trajectory> written;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    written.push_back(example(seed));
    lines.push_back(atif_line({"run", "nano", "0.1"}, messages(), written.back()));
  }
  Trajectory empty;  // aborted before anything was sampled
  empty.task_id = "x";
  empty.status = Status::aborted;
  empty.append_prompt(std::vector<std::int32_t>{1, 2});
  written.push_back(empty);
  lines.push_back(atif_line({"run", "nano", "0.1"}, messages(), empty));
  write_atif(root_ / "trajectories" / "step_3.jsonl", lines);
  const auto read = read_atif(root_ / "trajectories" / "step_3.jsonl");
  ASSERT_EQ(read.size(), written.size());
  for (std::size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(read[i], written[i]) << i;
    ASSERT_EQ(read[i].logprobs.size(), written[i].logprobs.size());
    for (std::size_t t = 0; t < read[i].logprobs.size(); ++t)
      EXPECT_EQ(std::bit_cast<std::uint32_t>(read[i].logprobs[t]),
                std::bit_cast<std::uint32_t>(written[i].logprobs[t]));
  }
}

TEST_F(Formats, AtifHasTheFieldsOfTheStandard) {
  const auto document = model::parse_json(atif_line({"run", "nano", "0.1"}, messages(), example(2)), "line");
  EXPECT_EQ(document.at("schema_version"), "ATIF-v1.7");
  EXPECT_EQ(document.at("agent").at("model_name"), "nano");
  const auto& steps = document.at("steps");
  ASSERT_EQ(steps.size(), 3U);
  for (std::size_t i = 0; i < steps.size(); ++i) EXPECT_EQ(steps[i].at("step_id"), i + 1);
  EXPECT_EQ(steps[0].at("source"), "user");
  EXPECT_EQ(steps[1].at("source"), "agent");
  EXPECT_EQ(steps[1].at("tool_calls")[0].at("function_name"), "shell");
  EXPECT_EQ(steps[1].at("tool_calls")[0].at("arguments").at("command"), "echo $((37*58))");
  EXPECT_EQ(steps[1].at("tool_calls")[1].at("arguments").at("raw"), "not JSON");
  EXPECT_EQ(steps[1].at("observation").at("results")[0].at("source_call_id"), "c1");
  const auto& metrics = steps[2].at("metrics");
  EXPECT_EQ(metrics.at("prompt_token_ids").size(), 9U + 7 + 4);
  EXPECT_EQ(metrics.at("completion_token_ids").size(), 3U);
  EXPECT_EQ(metrics.at("logprobs").size(), 3U);
  EXPECT_EQ(metrics.at("prompt_tokens"), 20);
}

TEST_F(Formats, AtifReaderRefusesWhatDoesNotFit) {
  const std::string line = atif_line({"run", "nano", "0.1"}, messages(), example(2));
  const auto changed = [&](auto&& change) {
    auto document = model::parse_json(line, "line");
    change(document);
    return document.dump();
  };
  const auto refused = [](const std::string& text) {
    try {
      parse_atif(text);
    } catch (const Error& error) {
      return error.code() == ErrorCode::corrupt_data;
    }
    return false;
  };
  EXPECT_FALSE(refused(line));
  EXPECT_TRUE(refused(line.substr(0, line.size() / 2)));
  EXPECT_TRUE(refused(changed([](auto& d) { d["schema_version"] = "ATIF-v9"; })));
  EXPECT_TRUE(refused(changed([](auto& d) { d["steps"][2]["metrics"]["prompt_token_ids"][3] = 9999; })));
  EXPECT_TRUE(refused(changed([](auto& d) { d["steps"][1]["metrics"]["logprobs"].erase(0); })));
  EXPECT_TRUE(refused(changed([](auto& d) { d["extra"]["tidelock"]["spans"][1]["end"] = 1; })));
  EXPECT_TRUE(refused(changed([](auto& d) { d["extra"]["tidelock"]["spans"][1]["end"] = 1LL << 60; })));
  EXPECT_TRUE(refused(changed([](auto& d) { d["extra"]["tidelock"].erase("seed"); })));
  EXPECT_TRUE(refused(changed([](auto& d) { d["extra"]["tidelock"]["reward"] = "1"; })));
  EXPECT_TRUE(refused("[]"));
  write_file_atomic(root_ / "bad.jsonl", line + "\n{}\n");
  try {
    read_atif(root_ / "bad.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("bad.jsonl:2:"), std::string::npos);
  }
}

TEST_F(Formats, MetricsRowIsOneJsonObject) {
  MetricsRow row(3);
  row.set("reward_mean", 0.5);
  row.set("count", 7);
  row.set("sha", "a\"b");
  row.set("ok", true);
  row.set("bad", std::numeric_limits<double>::quiet_NaN());
  row.set("count", 8);
  EXPECT_EQ(row.json(), R"({"step":3,"reward_mean":0.5,"count":8,"sha":"a\"b","ok":true,"bad":null})");
  EXPECT_THROW(row.set("step", 4), Error);
}

std::vector<std::string> lines_of(const std::filesystem::path& path) {
  std::istringstream text(read_file(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

std::filesystem::path events_of(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory / "tensorboard"))
    files.push_back(entry.path());
  EXPECT_EQ(files.size(), 1U);
  EXPECT_TRUE(files.at(0).filename().string().starts_with("events.out.tfevents."));
  return files.at(0);
}

void write_steps(MetricsWriter& writer, int first, int last) {
  for (int step = first; step <= last; ++step) {
    MetricsRow row(step);
    row.set("reward_mean", step / 10.0);
    row.set("adapter_sha256", "text does not go to TensorBoard");
    writer.write(row);
    if (step % 2 == 0) {
      MetricsRow evaluation(step);
      evaluation.set("mean_at_k", step / 20.0);
      writer.write(evaluation, "eval");
    }
  }
}

TEST_F(Formats, AResumedRunCountsNothingTwice) {
  {
    MetricsWriter writer(root_ / "whole", {.sync = true});
    write_steps(writer, 1, 6);
  }
  {
    MetricsWriter writer(root_ / "killed", {});
    write_steps(writer, 1, 5);
  }
  // Killed while writing: both files end in half a record.
  const auto tear = [](const std::filesystem::path& path) {
    write_file_atomic(path, read_file(path) + read_file(path).substr(0, 11));
  };
  tear(root_ / "killed" / "metrics.jsonl");
  tear(events_of(root_ / "killed"));
  EXPECT_TRUE(read_tensorboard(events_of(root_ / "killed")).torn);
  {
    MetricsWriter writer(root_ / "killed", {.resumed_step = 4});
    write_steps(writer, 5, 6);
  }
  EXPECT_EQ(read_file(root_ / "killed" / "metrics.jsonl"), read_file(root_ / "whole" / "metrics.jsonl"));
  EXPECT_EQ(lines_of(root_ / "killed" / "metrics.jsonl").size(), 9U);
  const auto whole = read_tensorboard(events_of(root_ / "whole")),
             killed = read_tensorboard(events_of(root_ / "killed"));
  EXPECT_FALSE(killed.torn);
  ASSERT_EQ(killed.events.size(), whole.events.size());
  EXPECT_EQ(killed.events.at(0).file_version, "brain.Event:2");
  for (std::size_t i = 0; i < whole.events.size(); ++i) {
    EXPECT_EQ(killed.events[i].step, whole.events[i].step);
    EXPECT_EQ(killed.events[i].values, whole.events[i].values);
  }
  EXPECT_EQ(killed.events.at(3).values, (std::vector<std::pair<std::string, float>>{{"eval/mean_at_k", 0.1F}}));
  // A new run in the same folder starts empty.
  {
    MetricsWriter writer(root_ / "killed", {});
    write_steps(writer, 1, 1);
  }
  EXPECT_EQ(lines_of(root_ / "killed" / "metrics.jsonl").size(), 1U);
  EXPECT_EQ(read_tensorboard(events_of(root_ / "killed")).events.size(), 2U);
}

TEST_F(Formats, MetricsThatAreNoRowsAreNotCutAway) {
  write_file_atomic(root_ / "m.jsonl", "{\"step\":1}\nnot a row\n{\"step\":2}\n");
  EXPECT_THROW(cut_back_metrics(root_ / "m.jsonl", 1), Error);
  EXPECT_EQ(lines_of(root_ / "m.jsonl").size(), 3U);
  cut_back_metrics(root_ / "none.jsonl", 1);
  EXPECT_FALSE(std::filesystem::exists(root_ / "none.jsonl"));
}

TEST_F(Formats, TensorBoardFrameByHand) {
  // By hand, from the protobuf wire format: {wall_time: 1.5, step: 300, summary {value {tag: "a", simple_value: 2}}}.
  const std::string data(
      "\x09\x00\x00\x00\x00\x00\x00\xF8\x3F\x10\xAC\x02\x2A\x0A\x0A\x08\x0A\x01"
      "a\x15\x00\x00\x00\x40",
      24);
  const std::string frame =
      tensorboard_frame({.wall_time = 1.5, .step = 300, .file_version = {}, .values = {{"a", 2.0F}}});
  ASSERT_EQ(frame.size(), 12 + data.size() + 4);
  EXPECT_EQ(frame.substr(12, data.size()), data);
  EXPECT_EQ(frame[0], 24);
  std::uint32_t stored = 0;
  std::memcpy(&stored, frame.data() + 12 + data.size(), 4);
  const std::uint32_t crc = crc32c(data);
  EXPECT_EQ(stored, ((crc >> 15) | (crc << 17)) + 0xa282ead8U);
  std::memcpy(&stored, frame.data() + 8, 4);
  const std::uint32_t length_crc = crc32c(std::string_view(frame).substr(0, 8));
  EXPECT_EQ(stored, ((length_crc >> 15) | (length_crc << 17)) + 0xa282ead8U);
}

TEST_F(Formats, TensorBoardDamageIsNotATornTail) {
  std::string content;
  for (int step = 1; step <= 3; ++step)
    content += tensorboard_frame({.wall_time = 0, .step = step, .file_version = {}, .values = {{"a", 1.0F}}});
  const auto path = root_ / "events";
  for (std::size_t size = 0; size <= content.size(); ++size) {  // cut anywhere: whole frames are read, no error
    std::ofstream(path, std::ios::binary) << content.substr(0, size);
    const auto file = read_tensorboard(path);
    EXPECT_EQ(file.events.size(), size / (content.size() / 3));
    EXPECT_EQ(file.torn, size % (content.size() / 3) != 0);
  }
  std::string damaged = content;
  damaged[20] = static_cast<char>(damaged[20] ^ 1);
  write_file_atomic(path, damaged);
  EXPECT_THROW(read_tensorboard(path), Error);
}

}  // namespace formats_test
}  // namespace tidelock::rl
