#include "rl/harbor.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {
namespace harbor_test {

// A folder of tasks that is removed again.
class Harbor : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / fmt::format("tidelock-harbor-{}", ::getpid());
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void put(const std::string& path, const std::string& content) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    write_file_atomic(root_ / path, content);
  }
  // A whole task: count the lines of a file.
  void put_task(const std::string& name, const std::string& toml = "version = \"1.0\"\n") const {
    put(name + "/task.toml", toml);
    put(name + "/instruction.md", "How many lines has log.txt?\nWrite the number to count.txt.\n");
    put(name + "/environment/Dockerfile",
        "# a comment\nFROM busybox:1.36\nWORKDIR /app\nENV LC_ALL=C \\\n    TEAM=blue\nCOPY log.txt data/ .\nLABEL "
        "a=b\n");
    put(name + "/environment/log.txt", "a\nb\nc\n");
    put(name + "/environment/data/inner/deep.txt", "deep\n");
    put(name + "/tests/test.sh",
        "#!/bin/sh\n. /tests/lib.sh\nif [ \"$(cat /app/count.txt)\" = 3 ]; then reward 1; else reward 0; fi\n");
    put(name + "/tests/lib.sh", "reward() { echo \"{\\\"reward\\\": $1}\" >/logs/verifier/reward.json; }\n");
    put(name + "/solution/solve.sh", "wc -l <log.txt >count.txt\n");
  }
  // The message with which the task is refused.
  std::string refusal(const std::string& name, const HarborOptions& options = {}) const {
    try {
      load_harbor_task(root_ / name, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
  void expect_refused(const std::string& toml, const std::string& part) const {
    put_task("refused", toml);
    EXPECT_NE(refusal("refused").find(part), std::string::npos) << toml << "\n" << refusal("refused");
  }

  std::filesystem::path root_;
};

TEST_F(Harbor, ReadsATask) {
  put_task("lines", R"(schema_version = "1.1"
[task]
name = "a/lines"
keywords = ["files"]
[metadata]
anything = { goes = 1 }
[verifier]
timeout_sec = 7.5
env = { MODE = "strict" }
environment_mode = "shared"
[agent]
timeout_sec = 120.0
[environment]
build_timeout_sec = 600.0
cpus = 2
memory_mb = 512
storage_mb = 1024
allow_internet = false
)");
  const Episode task = load_harbor_task(root_ / "lines");
  EXPECT_EQ(task.id, "lines");
  EXPECT_EQ(task.key, "harbor:lines");
  EXPECT_EQ(task.messages.at(0).content, "How many lines has log.txt?\nWrite the number to count.txt.");
  EXPECT_EQ(task.image, "busybox");
  EXPECT_EQ(task.directory, "/app");
  EXPECT_EQ(task.environment, (std::map<std::string, std::string>{{"LC_ALL", "C"}, {"TEAM", "blue"}}));
  EXPECT_EQ(task.limits.memory_bytes, 512ULL << 20);
  EXPECT_EQ(task.limits.disk_bytes, 1024ULL << 20);
  EXPECT_EQ(task.limits.cpus, 2.0);
  EXPECT_EQ(task.agent_timeout.count(), 120'000);
  EXPECT_EQ(task.verifier.timeout.count(), 7'500);
  EXPECT_EQ(task.verifier.environment.at("MODE"), "strict");
  EXPECT_EQ(task.verifier.environment.at("TEAM"), "blue");
  ASSERT_EQ(task.files.size(), 2U);
  EXPECT_EQ(task.files[0].path, "/app/log.txt");
  EXPECT_EQ(task.files[1].path, "/app/inner/deep.txt");
  EXPECT_EQ(task.files[1].content, "deep\n");
  ASSERT_EQ(task.verifier.files.size(), 2U);
  for (const auto& file : task.files) EXPECT_EQ(file.content.find("solve"), std::string::npos);
}

TEST_F(Harbor, SizesOfTheFirstSchema) {
  put_task("old", "version = \"1.0\"\n[environment]\nmemory = \"2G\"\nstorage = \"512M\"\n");
  const Episode task = load_harbor_task(root_ / "old");
  EXPECT_EQ(task.limits.memory_bytes, 2ULL << 30);
  EXPECT_EQ(task.limits.disk_bytes, 512ULL << 20);
  expect_refused("[environment]\nmemory = \"2X\"", "environment.memory = 2X: expected a size");
}

TEST_F(Harbor, RefusesByName) {
  expect_refused("version = \"9\"", "version is 9, expected 1.0 or 1.1");
  expect_refused("steps = []", "steps is not supported");
  expect_refused("multi_step_reward_strategy = \"mean\"", "multi_step_reward_strategy is not supported");
  expect_refused("[environment]\nallow_internet = true", "environment.allow_internet = true: a sandbox has no network");
  expect_refused("[environment]\ngpus = 1", "environment.gpus = 1: a sandbox has no GPU");
  expect_refused("[environment]\nmcp_servers = []", "environment.mcp_servers is not supported");
  expect_refused("[environment]\ndocker_image = \"ubuntu:24.04\"", "the image ubuntu:24.04 is not known here");
  expect_refused("[environment.env]\nKEY = \"${HOST_KEY}\"", "environment.env.KEY = ${HOST_KEY}");
  expect_refused("[verifier]\nenvironment_mode = \"separate\"", "verifier.environment_mode = separate");
  expect_refused("[[verifier.collect]]\npath = \"/x\"", "verifier.collect is not supported");
  expect_refused("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec: expected a number above 0");
  expect_refused("[verifier]\ntimeout_sec = inf", "verifier.timeout_sec: expected a number above 0");
  expect_refused("[agent]\nnetwork_mode = \"public\"", "agent.network_mode = public");
  expect_refused("agent = 3", "agent: expected a table");
  expect_refused("[agent", "task.toml:1: not valid TOML");
}

TEST_F(Harbor, RefusesWhatNeedsABuild) {
  const auto dockerfile = [&](const std::string& text, const std::string& part) {
    put_task("build");
    put("build/environment/Dockerfile", text);
    EXPECT_NE(refusal("build").find(part), std::string::npos) << text << "\n" << refusal("build");
  };
  dockerfile("FROM busybox\nRUN apt-get install x\n", "Dockerfile:2: RUN apt-get install x: this instruction needs");
  dockerfile("FROM busybox\n\nentrypoint [\"x\"]\n", "Dockerfile:3: ENTRYPOINT");
  dockerfile("FROM debian:12\n", "the image debian:12 is not known here");
  dockerfile("FROM busybox AS a\n", "expected one image name");
  dockerfile("FROM busybox\nFROM busybox\n", "a second stage");
  dockerfile("WORKDIR /x\nFROM busybox\n", "stands before FROM");
  dockerfile("FROM busybox\nCOPY ../../x /x\n", "lies outside the task");
  dockerfile("FROM busybox\nCOPY --chown=a log.txt /x\n", "--chown=a is not supported");
  dockerfile("FROM busybox\nCOPY nothing.txt /x\n", "there is no");
  dockerfile("FROM busybox\nENV A=$B\n", "variables are not supported");
  dockerfile("# only a comment\n", "no FROM");
  put_task("compose");
  put("compose/environment/docker-compose.yaml", "services: {}\n");
  EXPECT_NE(refusal("compose").find("docker-compose.yaml is not supported"), std::string::npos);
  put_task("bash");
  put("bash/tests/test.sh", "#!/usr/bin/env bash\n");
  EXPECT_NE(refusal("bash").find("#!/usr/bin/env bash"), std::string::npos);
  put_task("untested");
  std::filesystem::remove(root_ / "untested/tests/test.sh");
  EXPECT_NE(refusal("untested").find("test.sh is missing"), std::string::npos);
  put("legacy/task.yaml", "x");
  EXPECT_NE(refusal("legacy").find("Terminal-Bench"), std::string::npos);
  put_task("linked");
  std::filesystem::create_symlink("/etc/passwd", root_ / "linked/tests/passwd");
  EXPECT_NE(refusal("linked").find("links"), std::string::npos);
}

TEST_F(Harbor, ImagesAreMapped) {
  put_task("mapped");
  put("mapped/environment/Dockerfile", "FROM debian:12\n");
  EXPECT_EQ(load_harbor_task(root_ / "mapped", {.images = {{"debian:12", "/images/debian"}}}).image, "/images/debian");
}

TEST_F(Harbor, FamilySplitsByName) {
  for (int i = 0; i < 12; ++i) put_task(fmt::format("task-{}", i));
  put("not-a-task/readme.md", "x");
  const auto family = make_harbor_family(root_);
  std::set<std::string> train, held_out;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    train.insert(family->make(seed, 1, Split::train).id);
    held_out.insert(family->make(seed, 1, Split::held_out).id);
  }
  EXPECT_EQ(train.size() + held_out.size(), 12U);
  for (const auto& id : held_out) EXPECT_EQ(split_of("harbor:" + id), Split::held_out);
  EXPECT_THROW(load_harbor_tasks(root_ / "not-a-task"), Error);
  EXPECT_THROW(load_harbor_tasks(root_ / "nowhere"), Error);
}

TEST_F(Harbor, WorksInASandbox) {
  put_task("lines");
  const Episode task = load_harbor_task(root_ / "lines");
  const auto runtime = sandbox::make_container_runtime();
  const auto box = open_sandbox(*runtime, task);
  const auto run = [&](const std::string& command) {
    return run_shell_tool(*box, task, shell_arguments(command)).text;
  };
  EXPECT_EQ(run("ls; pwd; echo $TEAM; ls -d /tests /solution /logs 2>/dev/null | wc -l"),
            "inner\nlog.txt\n/app\nblue\n0");
  GradeResult before = grade(*box, task, "");
  EXPECT_TRUE(before.graded) << before.reason;
  EXPECT_EQ(before.reward, 0);
  // What grading left is writable now: an agent that rewrites the tests' library is graded by the real one.
  run("wc -l <log.txt >count.txt; echo 'reward() { :; }' >/tests/lib.sh");
  const GradeResult after = grade(*box, task, "");
  EXPECT_TRUE(after.graded) << after.reason;
  EXPECT_EQ(after.reward, 1);
}

TEST_F(Harbor, AWorkingDirectoryWithoutFilesIsThereAndWritable) {
  put_task("empty");
  put("empty/environment/Dockerfile", "FROM busybox\nWORKDIR /srv/work\n");
  put("empty/tests/test.sh", "[ -s made ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n");
  const Episode task = load_harbor_task(root_ / "empty");
  const auto runtime = sandbox::make_container_runtime();
  const auto box = open_sandbox(*runtime, task);
  EXPECT_EQ(run_shell_tool(*box, task, shell_arguments("pwd; ls -A; echo x >made")).text, "/srv/work");
  EXPECT_EQ(grade(*box, task, "").reward, 1);  // a script without #! runs too, in the working directory
}

}  // namespace harbor_test
}  // namespace tidelock::rl
