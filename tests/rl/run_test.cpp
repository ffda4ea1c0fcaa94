// Checkpoints and whole runs.
#include "rl/run.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/base.hpp"
#include "rl/checkpoint.hpp"
#include "rl/support.hpp"

namespace tidelock::rl {
namespace run_test {

namespace fs = std::filesystem;
using testing::Folder;
using testing::random_model;

struct Trained {
  train::LoraParameters parameters{random_model(), 2, 4, {"all-linear"}};
  train::AdamW optimizer{parameters.values().size()};

  explicit Trained(std::uint64_t seed) {
    parameters.initialize(seed);
    for (int step = 0; step < 2; ++step) {
      std::vector<float> gradient(parameters.values().size());
      Random random(seed, static_cast<std::uint64_t>(step));
      for (float& g : gradient) g = random.normal();
      optimizer.step(parameters.values(), gradient, 1, {});
    }
  }
  void save(const fs::path& run, const RunState& state, std::int64_t keep = 2) {
    save_checkpoint(run, state, random_model(), parameters, optimizer, "base", keep);
  }
  bool same_as(Trained& other) {
    const auto equal = [](std::span<const float> a, std::span<const float> b) {
      return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
    };
    return equal(parameters.values(), other.parameters.values()) && equal(optimizer.m(), other.optimizer.m()) &&
           equal(optimizer.v(), other.optimizer.v()) && optimizer.steps() == other.optimizer.steps();
  }
};

RunState state_at(std::int64_t step) {
  RunState s;
  s.step = step;
  s.weight_version = static_cast<std::uint64_t>(step);
  s.compared_tokens = 1234;
  s.mismatch_tokens = 1;
  s.mismatch_max_abs = 0.1;
  s.elapsed_s = 1.0 / 3;
  s.rollout_s = 0.25;
  s.rewards = {0.1, 1.0 / 3};
  s.evaluations.push_back({0, {8, 64, {0.25, 0.2, 0.3}, {0.5, 0.4, 0.6}}});
  return s;
}

void edit(const fs::path& path, const std::string& find, const std::string& replace) {
  std::string text = read_file(path);
  const std::size_t at = text.find(find);
  ASSERT_NE(at, std::string::npos) << find;
  write_file_atomic(path, text.replace(at, find.size(), replace));
}

TEST(Checkpoint, GivesBackWhatWasSaved) {
  const Folder run;
  Trained saved(1), loaded(2);
  ASSERT_FALSE(saved.same_as(loaded));
  EXPECT_FALSE(newest_checkpoint(run.path()));
  saved.save(run.path(), state_at(2));
  const auto newest = newest_checkpoint(run.path());
  ASSERT_TRUE(newest);
  EXPECT_EQ(*newest, run.path() / "checkpoints/step_2");
  const RunState state = load_checkpoint(*newest, random_model(), loaded.parameters, loaded.optimizer);
  EXPECT_TRUE(saved.same_as(loaded));
  const RunState expected = state_at(2);
  EXPECT_EQ(state.step, 2);
  EXPECT_EQ(state.weight_version, 2U);
  EXPECT_EQ(state.compared_tokens, 1234);
  EXPECT_EQ(state.mismatch_tokens, 1);
  EXPECT_EQ(state.mismatch_max_abs, expected.mismatch_max_abs);
  EXPECT_EQ(state.elapsed_s, expected.elapsed_s);
  EXPECT_EQ(state.rollout_s, expected.rollout_s);
  EXPECT_EQ(state.rewards, expected.rewards);
  ASSERT_EQ(state.evaluations.size(), 1U);
  EXPECT_EQ(state.evaluations[0].result.n, 64);
  EXPECT_EQ(state.evaluations[0].result.pass_at_k.high, 0.6);
}

TEST(Checkpoint, TheNewestOfWholeOnesCounts) {
  const Folder run;
  Trained trained(1);
  for (const std::int64_t step : {9, 10, 11}) trained.save(run.path(), state_at(step));
  const fs::path folder = run.path() / "checkpoints";
  EXPECT_FALSE(fs::exists(folder / "step_9"));  // two are kept
  EXPECT_TRUE(fs::exists(folder / "step_10"));
  for (const char* name : {".step_12.tmp", "step_13x", "step_", "step_14.tmp", "other"})
    fs::create_directory(folder / name);
  EXPECT_EQ(*newest_checkpoint(run.path()), folder / "step_11");  // by number, not by letter
  // What a killed save left is no hindrance to the next one.
  write_file_atomic(folder / ".step_12.tmp/adapter_config.json", "half");
  trained.save(run.path(), state_at(12));
  EXPECT_EQ(*newest_checkpoint(run.path()), folder / "step_12");
  EXPECT_FALSE(fs::exists(folder / ".step_12.tmp"));
  Trained loaded(2);
  load_checkpoint(folder / "step_12", random_model(), loaded.parameters, loaded.optimizer);
  EXPECT_TRUE(trained.same_as(loaded));
}

TEST(Checkpoint, DamageIsNamed) {
  const Folder run;
  Trained trained(1);
  const fs::path folder = run.path() / "checkpoints/step_3";
  const auto refusal = [&](ErrorCode code, const std::string& says, const std::function<void()>& damage) {
    fs::remove_all(run.path() / "checkpoints");
    trained.save(run.path(), state_at(3));
    damage();
    Trained loaded(2);
    try {
      load_checkpoint(folder, random_model(), loaded.parameters, loaded.optimizer);
      ADD_FAILURE() << "accepted: " << says;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(folder.string()), std::string::npos) << error.what();
    }
  };
  const fs::path state = folder / "state.json", optimizer = folder / "optimizer.safetensors";
  refusal(ErrorCode::corrupt_data, "state.json", [&] { write_file_atomic(state, "{\"format\": 1"); });
  refusal(ErrorCode::corrupt_data, "state.json", [&] { write_file_atomic(state, "[]"); });
  refusal(ErrorCode::corrupt_data, "state.json", [&] { edit(state, "\"format\": 1", "\"format\": 2"); });
  refusal(ErrorCode::corrupt_data, "state.json", [&] { edit(state, "\"rewards\"", "\"rewardz\""); });
  refusal(ErrorCode::mismatch, "contract", [&] { edit(state, "\"contract\": \"", "\"contract\": \"other-"); });
  refusal(ErrorCode::mismatch, "adapter", [&] {
    Trained(5).save(run.path() / "x", state_at(3));
    fs::copy_file(run.path() / "x/checkpoints/step_3/adapter_model.safetensors", folder / "adapter_model.safetensors",
                  fs::copy_options::overwrite_existing);
  });
  refusal(ErrorCode::corrupt_data, "optimizer.safetensors",
          [&] { fs::resize_file(optimizer, fs::file_size(optimizer) - 4); });
  refusal(ErrorCode::corrupt_data, "optimizer.safetensors", [&] { edit(optimizer, "\"m\"", "\"q\""); });
  refusal(ErrorCode::not_found, "optimizer.safetensors", [&] { fs::remove(optimizer); });
  refusal(ErrorCode::not_found, "state.json", [&] { fs::remove(state); });
}

TEST(Checkpoint, AFailedSaveLeavesTheEarlierOnes) {
  const Folder run;
  Trained trained(1);
  trained.save(run.path(), state_at(1));
  // A file where the temporary folder would be made: the save cannot succeed, whoever runs it.
  fs::create_directory(run.path() / "elsewhere");
  fs::rename(run.path() / "checkpoints", run.path() / "kept");
  std::ofstream(run.path() / "checkpoints") << "in the way";
  EXPECT_ANY_THROW(trained.save(run.path(), state_at(2)));
  fs::remove(run.path() / "checkpoints");
  fs::rename(run.path() / "kept", run.path() / "checkpoints");
  EXPECT_EQ(*newest_checkpoint(run.path()), run.path() / "checkpoints/step_1");
}

bool broken_verifier = false;  // of put_lottery's tasks

// Harbor tasks whose grader rewards answers by their checksum: whatever the model says, a step teaches something.
void put_lottery(const fs::path& folder) {
  for (int i = 0; i < 24; ++i) {
    const fs::path task = folder / fmt::format("product-{}", i);
    fs::create_directories(task / "tests");
    write_file_atomic(task / "task.toml", "version = \"1.0\"\n");
    write_file_atomic(task / "instruction.md", fmt::format("{}*{}?", 11 + i, 50 - i));
    write_file_atomic(task / "tests/test.sh", broken_verifier
                                                  ? "exit 1\n"
                                                  : "digit=$(md5sum </logs/agent/answer.txt | tr -dc 0-9 | cut -c 1)\n"
                                                    "echo 0.$digit >/logs/verifier/reward.txt\n");
  }
}

// A small run in real sandboxes, in this process.
RunSummary run(const fs::path& folder, bool resume, std::int64_t stop_after, int threads, const std::string& more = {},
               const std::vector<std::string>& overrides = {}) {
  const fs::path tasks = folder / "tasks";
  put_lottery(tasks);
  const std::string text = fmt::format(
      "model.path = \"{}\"\ntasks.dir = \"{}\"\nadapter.rank = 2\nrl.steps = 2\nrl.groups = 2\nrl.group_size = 4\n"
      "rl.kl_coefficient = 0.01\nrollout.max_tokens = 64\neval.tasks = 1\neval.samples = 2\n",
      testing::nano_folder().string(), tasks.string());
  const Settings settings = Settings::parse(text + more, "test", rl_schema(), overrides);
  RunOptions options;
  options.directory = folder;
  options.resume = resume;
  options.stop_after = stop_after;
  options.threads = threads;
  std::int64_t frames = 0;
  options.watch = [&](const ViewState& state) { frames += state.steps; };
  const RunSummary summary = run_rl(settings, options);
  EXPECT_GT(frames, 0);
  return summary;
}

// What run() throws on this folder, of that code.
std::string refusal(const fs::path& folder, bool resume, ErrorCode code) {
  try {
    run(folder, resume, 0, 1);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "";
}

TEST(Run, AFolderInUseIsRefused) {
  const Folder folder;
  write_file_atomic(folder.path() / "recipe.toml", "left by the other run");
  {
    const FolderLock other(folder.path());
    for (const bool resume : {false, true})
      EXPECT_NE(refusal(folder.path(), resume, ErrorCode::invalid_argument)
                    .find(fmt::format("in use by process {}", ::getpid())),
                std::string::npos);
    EXPECT_ANY_THROW(FolderLock{folder.path()});
  }
  EXPECT_NO_THROW(FolderLock{folder.path()});
}

TEST(Run, ANewRunRemovesNothingThatItFinds) {
  for (const char* name : {"checkpoints", "adapter", "trajectories", "tensorboard", "recipe.toml", "metrics.jsonl"}) {
    const Folder folder;
    const bool file = std::string_view(name).find('.') != std::string_view::npos;
    const fs::path kept = file ? folder.path() / name : folder.path() / name / "step_3";
    fs::create_directories(kept.parent_path());
    write_file_atomic(kept, "somebody's work");
    EXPECT_NE(refusal(folder.path(), false, ErrorCode::invalid_argument).find(name), std::string::npos);
    EXPECT_EQ(read_file(kept), "somebody's work");
  }
}

TEST(Run, EveryGradingFailedEndsTheRun) {
  const Folder folder;
  broken_verifier = true;
  const std::string message = refusal(folder.path(), false, ErrorCode::io);
  broken_verifier = false;
  EXPECT_NE(message.find("gradings failed"), std::string::npos) << message;
  EXPECT_NE(message.find("left no reward"), std::string::npos) << message;
}

// The largest value of a number in the rows of metrics.jsonl.
double largest(const fs::path& folder, const std::string& name) {
  double most = 0;
  std::ifstream lines(folder / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains(name)) most = std::max(most, row.at(name).get<double>());
  }
  return most;
}

// With and without trajectories that are set aside between the steps.
class ResumedRun : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(IterationTokens, ResumedRun, ::testing::Values(0, 12));

TEST_P(ResumedRun, EqualsUninterrupted) {
  const Folder one, two;
  const std::vector<std::string> keys{fmt::format("rollout.iteration_tokens={}", GetParam()), "rl.groups=8",
                                      "rl.group_size=2"};
  const RunSummary whole = run(one.path(), false, 0, 2, {}, keys);
  EXPECT_EQ(whole.steps, 2);
  EXPECT_GT(whole.compared_tokens, 0);
  EXPECT_EQ(whole.mismatch_tokens, 0);
  EXPECT_EQ(whole.evaluations.size(), 2U);
  const RunSummary first = run(two.path(), false, 1, 1, {}, keys);
  EXPECT_EQ(first.steps, 1);
  EXPECT_NE(first.adapter_sha256, whole.adapter_sha256);
  const RunSummary rest = run(two.path(), true, 0, 1, {}, keys);
  EXPECT_EQ(rest.adapter_sha256, whole.adapter_sha256);
  EXPECT_EQ(rest.compared_tokens, whole.compared_tokens);
  EXPECT_EQ(read_file(one.path() / "adapter/adapter_model.safetensors"),
            read_file(two.path() / "adapter/adapter_model.safetensors"));
  for (const char* name : {"set_aside", "continued", "older_tokens"}) {
    EXPECT_EQ(largest(one.path(), name) > 0, GetParam() > 0) << name;
    EXPECT_EQ(largest(two.path(), name), largest(one.path(), name)) << name;
  }
  EXPECT_EQ(fs::exists(two.path() / "checkpoints/step_1/unfinished.json"), GetParam() > 0);
  EXPECT_FALSE(fs::exists(two.path() / "checkpoints/step_2/unfinished.json"));
}

TEST(Run, MemoryThatGoesToAndFroChangesNoBit) {
  const Folder plain, tight, on_disk, lent;
  const std::string folder = on_disk.path().string(), tight_memory = "rollout.state_memory = 1\n";
  const RunSummary whole = run(plain.path(), false, 0, 2);
  EXPECT_EQ(largest(plain.path(), "states_set_back"), 0);
  EXPECT_EQ(largest(plain.path(), "optimizer_bytes_away"), 0);
  const std::vector<std::pair<const Folder&, std::string>> ways{
      {tight, tight_memory},
      {on_disk, tight_memory + fmt::format("rollout.state_folder = \"{}/states\"\n", folder)},
      {lent, tight_memory + fmt::format("rl.optimizer_folder = \"{}/away\"\n", folder)}};
  for (const auto& [where, keys] : ways) {
    SCOPED_TRACE(keys);
    const RunSummary again = run(where.path(), false, 0, 2, keys);
    EXPECT_EQ(again.adapter_sha256, whole.adapter_sha256);
    EXPECT_EQ(again.compared_tokens, whole.compared_tokens);
    EXPECT_EQ(again.mismatch_tokens, 0);
    const char* moments = "checkpoints/step_2/optimizer.safetensors";
    EXPECT_EQ(read_file(where.path() / moments), read_file(plain.path() / moments));
  }
  EXPECT_GT(largest(tight.path(), "states_set_back"), 0);
  EXPECT_GT(largest(on_disk.path(), "states_set_back"), 0);
  EXPECT_LT(largest(lent.path(), "states_set_back"), largest(tight.path(), "states_set_back"))
      << "the optimizer's memory went to the states";
  // Two moments, and the gradient, which is as large as one.
  const auto moments = static_cast<double>(fs::file_size(lent.path() / "checkpoints/step_2/optimizer.safetensors"));
  EXPECT_NEAR(largest(lent.path(), "optimizer_bytes_away"), 1.5 * moments, 0.01 * moments);
  EXPECT_TRUE(fs::is_empty(on_disk.path() / "away")) << "the file has no name";
}

TEST(Run, AFolderForTheOptimizerThatCannotBeIsNamed) {
  const Folder folder;
  write_file_atomic(folder.path() / "file", "");
  try {
    run(folder.path(), false, 0, 1, fmt::format("rl.optimizer_folder = \"{}/file/x\"\n", folder.path().string()));
    ADD_FAILURE() << "accepted";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("file/x"), std::string::npos) << error.what();
  }
}

}  // namespace run_test
}  // namespace tidelock::rl
