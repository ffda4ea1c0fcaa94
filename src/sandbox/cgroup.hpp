// Limits and freezing by control groups, version 1, version 2 or both at once, where they are writable.
//
// One directory `tidelock-<run>` per hierarchy in use, one child of it per container. Settings of the host are never
// changed: a controller that the host does not hand down is not used.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

struct CgroupMount {
  std::filesystem::path path;
  std::string root;  // which part of the hierarchy is mounted
  bool version2 = false;
  std::vector<std::string> controllers;  // version 1: from the mount's options
};

// From the text of /proc/self/mountinfo.
std::vector<CgroupMount> parse_cgroup_mounts(std::string_view mountinfo);
// From the text of /proc/self/cgroup: our own path in the hierarchy of `controller` ("" for version 2).
std::optional<std::string> parse_own_cgroup(std::string_view text, std::string_view controller);

// The cgroups of one container.
class ContainerCgroup {
 public:
  struct Part {
    std::filesystem::path directory;
    bool version2 = false;
    bool freezer = false;
  };
  explicit ContainerCgroup(std::vector<Part> parts) : parts_(std::move(parts)) {}
  FileDescriptor open_version2() const;              // for clone3; empty when there is none
  void enter_version1() const;                       // moves the calling (single-threaded) process
  std::vector<FileDescriptor> open_freezer() const;  // [write end, event file]; empty when there is none
  void thaw() const;
  bool remove() const;  // false while processes are left

 private:
  std::vector<Part> parts_;
};

// The cgroups of one run of the helper.
class CgroupTree {
 public:
  // Chooses hierarchies; `record` is told each directory before it is made, so that a later start can remove it.
  CgroupTree(const std::string& run_name, const Features& features,
             const std::function<void(const std::filesystem::path&)>& record);
  ContainerCgroup create(const CreateRequest& request) const;  // throws Error{io}
  void remove() const;
  bool limits_memory() const { return limits("memory"); }
  bool limits_processes() const { return limits("pids"); }
  Freezer freezer() const;
  std::string describe() const;  // "memory, pids, cpu by cgroup v1; freeze by cgroup v2"

 private:
  struct Hierarchy {
    std::filesystem::path directory;
    bool version2 = false;
    std::vector<std::string> controllers;  // of memory, pids, cpu
    bool freezer = false;
  };
  bool limits(std::string_view controller) const;
  void add(const CgroupMount& mount, const std::string& controller, const std::string& run_name,
           const std::function<void(const std::filesystem::path&)>& record);
  std::vector<Hierarchy> hierarchies_;
};

// Ends every process in `directory` (a `tidelock-` cgroup of a run that is over) and removes it. False when it stays.
bool remove_stale_cgroup(const std::filesystem::path& directory);

}  // namespace tidelock::sandbox
