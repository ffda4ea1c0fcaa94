// What the sandbox tests share: short forms, and a look at the host from outside for what a sandbox may have left.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox::testing {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

ExecRequest command(std::vector<std::string> argv);
ExecRequest shell(const std::string& script, std::chrono::milliseconds timeout = 20s);

// The code of the Error that `action` throws; fails the test when it throws none.
ErrorCode code_of(const std::function<void()>& action);

// A folder of this test, removed at its end.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Every file and folder of the cgroup tree.
std::vector<std::filesystem::path> cgroups();

// A text that no other process of this machine has in its command line.
std::string unique_marker();
// Host pids of processes with `marker` in their command line.
std::set<int> processes_with(const std::string& marker);
bool alive(int pid);
// Processor time that the processes with `marker` have used, in clock ticks.
long ticks_of(const std::string& marker);
// Starts a process in `box` that never rests, and checks that freeze stops it (its processor time stands still) and
// thaw sets it going again.
void expect_freeze_works(Sandbox& box);
// Everything on the host that belongs to runs whose directory lies under `base`: their folders, their cgroups, mounts.
std::vector<std::string> traces_of(const fs::path& base);
// The names of the run directories under `base`.
std::vector<std::string> runs_under(const fs::path& base);
// Waits up to `patience` until `condition` holds; whether it did.
bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience = 20s);
std::string slurp(const fs::path& path);

// Another program that uses sandboxes, to be killed: this test program with the verb `victim`.
// Makes two sandboxes under `base` with a marked process in each, one of them frozen, and says so.
class Victim {
 public:
  Victim(const fs::path& base, const std::string& marker);
  ~Victim();
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;
  int pid() const { return pid_; }
  int helper_pid() const { return helper_pid_; }
  void kill_now();

 private:
  int pid_ = -1, helper_pid_ = -1;
};
int victim_main(int argc, char** argv);

}  // namespace tidelock::sandbox::testing
