// Nothing left behind: whatever ends - a sandbox, the runtime, the program, its helper, both at once - in the end no
// process, no cgroup, no mount and no folder of it is on the host. Each test first shows that the look it takes at the
// host does see them while they live.
#include <csignal>
#include <fstream>

#include "sandbox/container.hpp"
#include "sandbox/run_directory.hpp"
#include "sandbox/support.hpp"

namespace tidelock::sandbox::testing {
namespace lifecycle_test {

class Lifecycle : public ::testing::Test {
 protected:
  std::unique_ptr<ContainerRuntime> runtime() {
    ContainerOptions options;
    options.directory = folder_.path();
    return std::make_unique<ContainerRuntime>(options, Features{});
  }
  void start_marked(Sandbox& box) {
    box.exec(shell("sleep " + marker_ + " > /dev/null 2>&1 & setsid sleep " + marker_ + " > /dev/null 2>&1 &"));
    ASSERT_TRUE(eventually([&] { return processes_with(marker_).size() >= 2; }));
  }
  bool nothing_left() const { return processes_with(marker_).empty() && traces_of(folder_.path()).empty(); }
  std::string left() const {
    std::string text = std::to_string(processes_with(marker_).size()) + " processes";
    for (const std::string& trace : traces_of(folder_.path())) {
      text += "\n" + trace;
    }
    return text;
  }

  Folder folder_;
  std::string marker_ = unique_marker();
};

TEST_F(Lifecycle, ADestroyedSandboxLeavesNothing) {
  auto host = runtime();
  auto box = host->create({});
  const std::vector<std::string> without = [&] {
    auto other = host->create({});
    start_marked(*other);
    EXPECT_GT(traces_of(folder_.path()).size(), 1U);
    return traces_of(folder_.path());
  }();
  EXPECT_TRUE(processes_with(marker_).empty());
  // One run folder, one cgroup for each hierarchy; the folder's own files do not count.
  for (const std::string& trace : traces_of(folder_.path())) {
    EXPECT_TRUE(trace.starts_with("folder") || trace.starts_with("cgroup")) << trace;
  }
  for (const fs::path& cgroup : cgroups()) {
    if (cgroup.filename() == runs_under(folder_.path()).front()) {
      int children = 0;
      for (const fs::directory_entry& child : fs::directory_iterator(cgroup)) {
        children += child.is_directory() ? 1 : 0;
      }
      EXPECT_EQ(children, 1) << cgroup;  // of `box`
    }
  }
}

TEST_F(Lifecycle, ADestroyedRuntimeLeavesNothingAndItsSandboxesSaySo) {
  auto host = runtime();
  auto box = host->create({});
  auto frozen = host->create({});
  start_marked(*box);
  start_marked(*frozen);
  frozen->freeze();
  const int helper = host->helper().pid();
  EXPECT_TRUE(alive(helper));
  host.reset();
  EXPECT_TRUE(nothing_left()) << left();
  EXPECT_FALSE(alive(helper));
  EXPECT_EQ(code_of([&] { box->exec(shell("true")); }), ErrorCode::io);
  EXPECT_NE(code_of([&] { box->fork_filesystem(); }), ErrorCode::internal);
}

TEST_F(Lifecycle, AKilledProgramLeavesNothing) {
  Victim victim(folder_.path(), marker_);
  ASSERT_EQ(processes_with(marker_).size(), 5U);  // the victim itself and two in each sandbox
  ASSERT_GT(traces_of(folder_.path()).size(), 1U);
  victim.kill_now();
  EXPECT_TRUE(eventually([&] { return nothing_left() && !alive(victim.helper_pid()); })) << left();
}

TEST_F(Lifecycle, AKilledProgramAndHelperLeaveNoProcessAndTheNextStartSweepsTheRest) {
  Victim victim(folder_.path(), marker_);
  ASSERT_EQ(processes_with(marker_).size(), 5U);
  kill(victim.helper_pid(), SIGSTOP);  // so that it can do nothing between the two
  victim.kill_now();
  kill(victim.helper_pid(), SIGKILL);
  EXPECT_TRUE(eventually([&] { return processes_with(marker_).empty(); })) << left();
  EXPECT_FALSE(traces_of(folder_.path()).empty());
  runtime().reset();
  EXPECT_TRUE(nothing_left()) << left();
}

TEST_F(Lifecycle, ALivingRunIsNotSwept) {
  auto first = runtime();
  auto box = first->create({});
  start_marked(*box);
  runtime().reset();
  EXPECT_EQ(box->exec(shell("echo well")).output, "well\n");
  EXPECT_EQ(first->create({})->exec(shell("echo well")).output, "well\n");
}

TEST_F(Lifecycle, FoldersOfOthersAreNotSwept) {
  const fs::path foreign = folder_.path() / "tidelock-sandbox-foreign";
  const fs::path target = folder_.path() / "target";
  fs::create_directories(target);
  { std::ofstream(target / "lock") << "x"; }
  { std::ofstream(target / "cgroups") << "/proc\n/sys/fs/cgroup\n" << (folder_.path() / "target").string() << "\n"; }
  fs::create_directory_symlink(target, foreign);
  runtime().reset();
  EXPECT_TRUE(fs::exists(target / "lock"));
  // The same through a real folder: it is stale, so it goes, but the paths in its list are not cgroups of ours.
  fs::remove(foreign);
  fs::create_directories(foreign);
  fs::copy(target, foreign, fs::copy_options::recursive);
  runtime().reset();
  EXPECT_FALSE(fs::exists(foreign));
  EXPECT_TRUE(fs::exists(target / "lock"));
}

TEST_F(Lifecycle, AKilledHelperEndsItsSandboxesAndIsReported) {
  auto host = runtime();
  auto box = host->create({});
  start_marked(*box);
  kill(host->helper().pid(), SIGKILL);
  EXPECT_TRUE(eventually([&] { return processes_with(marker_).empty(); }));
  EXPECT_EQ(code_of([&] { box->exec(shell("true")); }), ErrorCode::io);
  EXPECT_EQ(code_of([&] { host->create({}); }), ErrorCode::io);
  box.reset();
  host.reset();
  EXPECT_TRUE(nothing_left()) << left();
}

TEST_F(Lifecycle, ATerminatedHelperCleansUp) {
  auto host = runtime();
  auto box = host->create({});
  start_marked(*box);
  kill(host->helper().pid(), SIGTERM);
  EXPECT_TRUE(eventually([&] { return nothing_left(); })) << left();
  kill(host->helper().pid(), SIGINT);
}

TEST_F(Lifecycle, AHelperThatIsNoneIsReported) {
  ContainerOptions options;
  options.directory = folder_.path();
  options.helper_program = "/bin/true";
  EXPECT_EQ(code_of([&] { make_container_runtime(options); }), ErrorCode::internal);
  options.helper_program = "/no/such/program";
  EXPECT_EQ(code_of([&] { make_container_runtime(options); }), ErrorCode::io);
  options.helper_program.clear();
  { std::ofstream(folder_.path() / "file") << "x"; }
  options.directory = folder_.path() / "file";
  EXPECT_EQ(code_of([&] { make_container_runtime(options); }), ErrorCode::io);
  fs::remove(folder_.path() / "file");
  EXPECT_TRUE(nothing_left()) << left();
}

TEST_F(Lifecycle, DescriptorsAreGivenBack) {
  const auto open_files = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator{});
  };
  auto host = runtime();
  host->create({})->exec(shell("true"));
  const auto before = open_files();
  for (int i = 0; i < 30; ++i) {
    auto box = host->create({});
    box->exec(shell("sleep 100 & echo x"));
    box->fork_filesystem();
  }
  EXPECT_EQ(open_files(), before);
  EXPECT_EQ(std::distance(fs::directory_iterator("/proc/" + std::to_string(host->helper().pid()) + "/fd"),
                          fs::directory_iterator{}),
            6);  // standard three, control, lock, signals
}

}  // namespace lifecycle_test
}  // namespace tidelock::sandbox::testing
