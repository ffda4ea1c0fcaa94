#include "sandbox/cgroup.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <sstream>
#include <thread>

#include "base/error.hpp"
#include "base/files.hpp"

namespace tidelock::sandbox {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kPeriodMicroseconds = 100'000;

bool try_write(const fs::path& path, std::string_view text) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  return file && write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

void must_write(const fs::path& path, std::string_view text) {
  if (!try_write(path, text)) {
    fail(ErrorCode::io, "cgroup: write '{}' to {}: {}", text, path.string(), std::strerror(errno));
  }
}

std::vector<std::string> words(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream{std::string(text)};
  for (std::string word; std::getline(stream, word, separator);) {
    if (!word.empty()) {
      parts.push_back(word);
    }
  }
  return parts;
}

bool contains(const std::vector<std::string>& list, std::string_view value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Pseudo files have no size: read until the end.
std::string slurp(const fs::path& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char part[4096];
  for (ssize_t got = 0; file && (got = read(file.get(), part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(got));
  }
  return text;
}

// Our own place in a hierarchy, so that limits set above us keep holding for what we make.
fs::path own_directory(const CgroupMount& mount, const std::string& controller) {
  const std::optional<std::string> own =
      parse_own_cgroup(slurp("/proc/self/cgroup"), mount.version2 ? std::string{} : controller);
  if (own) {
    std::string relative = *own;
    if (mount.root != "/" && relative.starts_with(mount.root)) {
      relative.erase(0, mount.root.size());
    }
    fs::path directory = mount.path / fs::path(relative).relative_path();
    std::error_code ignored;
    if (fs::is_directory(directory, ignored)) {
      return directory;
    }
  }
  return mount.path;
}

}  // namespace

std::vector<CgroupMount> parse_cgroup_mounts(std::string_view mountinfo) {
  std::vector<CgroupMount> mounts;
  for (const std::string& line : words(mountinfo, '\n')) {
    // id parent major:minor root mountpoint options [tags...] - type source super-options
    const std::vector<std::string> fields = words(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (fields.size() < 6 || fields.end() - dash < 4) {
      continue;
    }
    const std::string& type = dash[1];
    if (type == "cgroup") {
      mounts.push_back({fields[4], fields[3], false, words(dash[3], ',')});
    } else if (type == "cgroup2") {
      mounts.push_back({fields[4], fields[3], true, {}});
    }
  }
  return mounts;
}

std::optional<std::string> parse_own_cgroup(std::string_view text, std::string_view controller) {
  for (const std::string& line : words(text, '\n')) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string names = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? names.empty() : contains(words(names, ','), controller)) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

void CgroupTree::add(const CgroupMount& mount, const std::string& controller, const std::string& run_name,
                     const std::function<void(const fs::path&)>& record) {
  const bool is_freezer = controller == "freezer";
  const auto assign = [&](Hierarchy& hierarchy) {
    if (is_freezer) {
      hierarchy.freezer = true;
    } else {
      hierarchy.controllers.push_back(controller);
    }
  };
  std::vector<fs::path> parents{own_directory(mount, controller)};
  if (mount.version2) {
    parents = {mount.path, parents.front()};  // only a parent without processes of its own can hand down controllers
  }
  for (const fs::path& parent : parents) {
    const fs::path directory = parent / run_name;
    const auto known = std::find_if(hierarchies_.begin(), hierarchies_.end(),
                                    [&](const Hierarchy& hierarchy) { return hierarchy.directory == directory; });
    const bool is_new = known == hierarchies_.end();
    if (is_new) {
      record(directory);
      if (mkdir(directory.c_str(), 0755) != 0) {
        continue;
      }
    }
    const bool usable =
        is_freezer ? access((directory / (mount.version2 ? "cgroup.procs" : "freezer.state")).c_str(), W_OK) == 0
                   : !mount.version2 || try_write(directory / "cgroup.subtree_control", "+" + controller);
    if (usable) {
      if (is_new) {
        hierarchies_.push_back({directory, mount.version2, {}, false});
        assign(hierarchies_.back());
      } else {
        assign(*known);
      }
      return;
    }
    if (is_new) {
      rmdir(directory.c_str());
    }
  }
}

CgroupTree::CgroupTree(const std::string& run_name, const Features& features,
                       const std::function<void(const fs::path&)>& record) {
  const std::vector<CgroupMount> mounts = parse_cgroup_mounts(slurp("/proc/self/mountinfo"));
  const auto try_version = [&](const std::string& controller, bool version2) {
    for (const CgroupMount& mount : mounts) {
      if (mount.version2 == version2 && (!version2 || features.cgroup_version2) &&
          (version2 || contains(mount.controllers, controller))) {
        add(mount, controller, run_name, record);
        return;
      }
    }
  };
  if (features.cgroup_limits) {
    for (const char* controller : {"memory", "pids", "cpu"}) {
      try_version(controller, false);
      if (!limits(controller)) {
        try_version(controller, true);
      }
    }
  }
  if (features.cgroup_freezer) {
    try_version("freezer", true);  // version 2 first: what it has frozen can still be killed
    if (freezer() == Freezer::signals) {
      try_version("freezer", false);
    }
  }
}

ContainerCgroup CgroupTree::create(const CreateRequest& request) const {
  std::vector<ContainerCgroup::Part> parts;
  const Limits& wanted = request.limits;
  // Files of a container live in memory: the group holds them beside what the processes may use.
  const auto memory = std::to_string(wanted.memory_bytes + wanted.disk_bytes);
  const auto processes = std::to_string(wanted.processes + 1);  // init counts too
  const auto quota =
      std::to_string(std::max<std::uint64_t>(1000, static_cast<std::uint64_t>(wanted.cpus * kPeriodMicroseconds)));
  try {
    for (const Hierarchy& hierarchy : hierarchies_) {
      const fs::path directory = hierarchy.directory / request.id;
      if (mkdir(directory.c_str(), 0755) != 0) {
        fail_errno("make cgroup", directory.string());
      }
      parts.push_back({directory, hierarchy.version2, hierarchy.freezer});
      if (contains(hierarchy.controllers, "memory")) {
        must_write(directory / (hierarchy.version2 ? "memory.max" : "memory.limit_in_bytes"), memory);
        // Swap is no way around the limit; where swap is not accounted the file does not exist.
        try_write(directory / (hierarchy.version2 ? "memory.swap.max" : "memory.memsw.limit_in_bytes"),
                  hierarchy.version2 ? "0" : memory);
      }
      if (contains(hierarchy.controllers, "pids")) {
        must_write(directory / "pids.max", processes);
      }
      if (contains(hierarchy.controllers, "cpu")) {
        if (hierarchy.version2) {
          must_write(directory / "cpu.max", quota + " " + std::to_string(kPeriodMicroseconds));
        } else {
          must_write(directory / "cpu.cfs_quota_us", quota);  // of the default period of 100 ms
        }
      }
    }
  } catch (const Error&) {
    ContainerCgroup(parts).remove();
    throw;
  }
  return ContainerCgroup(std::move(parts));
}

bool CgroupTree::limits(std::string_view controller) const {
  return std::any_of(hierarchies_.begin(), hierarchies_.end(),
                     [&](const Hierarchy& hierarchy) { return contains(hierarchy.controllers, controller); });
}

Freezer CgroupTree::freezer() const {
  for (const Hierarchy& hierarchy : hierarchies_) {
    if (hierarchy.freezer) {
      return hierarchy.version2 ? Freezer::version2 : Freezer::version1;
    }
  }
  return Freezer::signals;
}

void CgroupTree::remove() const {
  for (const Hierarchy& hierarchy : hierarchies_) {
    rmdir(hierarchy.directory.c_str());
  }
}

std::string CgroupTree::describe() const {
  std::string text;
  for (const Hierarchy& hierarchy : hierarchies_) {
    for (const std::string& controller : hierarchy.controllers) {
      text += (text.empty() ? "" : ", ") + controller + " by cgroup " + (hierarchy.version2 ? "v2" : "v1");
    }
  }
  if (!limits_memory()) {
    text += (text.empty() ? "" : ", ") + std::string("memory by rlimit (per process)");
  }
  if (!limits_processes()) {
    text += ", processes by rlimit";
  }
  if (!limits("cpu")) {
    text += ", cpu not limited";
  }
  constexpr const char* kFreezers[] = {"SIGSTOP", "cgroup v1", "cgroup v2"};
  text += std::string("; freeze by ") + kFreezers[static_cast<int>(freezer())];
  return text;
}

FileDescriptor ContainerCgroup::open_version2() const {
  for (const Part& part : parts_) {
    if (part.version2) {
      FileDescriptor directory(open(part.directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
      if (!directory) {
        fail_errno("open cgroup", part.directory.string());
      }
      return directory;
    }
  }
  return {};
}

void ContainerCgroup::enter_version1() const {
  for (const Part& part : parts_) {
    if (!part.version2) {
      // "0" into `tasks`, not a pid into `cgroup.procs`: moving oneself as a thread takes no system-wide lock.
      must_write(part.directory / "tasks", "0");
    }
  }
}

std::vector<FileDescriptor> ContainerCgroup::open_freezer() const {
  std::vector<FileDescriptor> files;
  for (const Part& part : parts_) {
    if (part.freezer) {
      const fs::path control = part.directory / (part.version2 ? "cgroup.freeze" : "freezer.state");
      const fs::path events = part.version2 ? part.directory / "cgroup.events" : control;
      files.emplace_back(open(control.c_str(), O_WRONLY | O_CLOEXEC));
      files.emplace_back(open(events.c_str(), O_RDONLY | O_CLOEXEC));
      if (!files[0] || !files[1]) {
        fail_errno("open freezer", control.string());
      }
    }
  }
  return files;
}

void ContainerCgroup::thaw() const {
  for (const Part& part : parts_) {
    if (part.freezer) {
      try_write(part.directory / (part.version2 ? "cgroup.freeze" : "freezer.state"), part.version2 ? "0" : "THAWED");
    }
  }
}

bool ContainerCgroup::remove() const {
  bool gone = true;
  for (const Part& part : parts_) {
    gone = (rmdir(part.directory.c_str()) == 0 || errno == ENOENT) && gone;
  }
  return gone;
}

bool remove_stale_cgroup(const fs::path& directory) {
  using namespace std::chrono_literals;
  // The name is checked because the list of directories was read from a file.
  if (!directory.filename().string().starts_with("tidelock-") || !fs::exists(directory / "cgroup.procs")) {
    return !fs::exists(directory);
  }
  std::vector<fs::path> leaves;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    if (entry.is_directory()) {
      leaves.push_back(entry.path());
    }
  }
  leaves.push_back(directory);
  bool gone = true;
  for (const fs::path& leaf : leaves) {
    bool removed = false;
    for (int attempt = 0; attempt < 200 && !removed; ++attempt) {
      for (const std::string& pid : words(slurp(leaf / "cgroup.procs"), '\n')) {
        const int number = std::atoi(pid.c_str());
        if (number > 1) {
          kill(number, SIGKILL);
        }
      }
      try_write(leaf / "freezer.state", "THAWED");  // a process frozen by version 1 dies only when thawed
      removed = rmdir(leaf.c_str()) == 0 || errno == ENOENT;
      if (!removed) {
        std::this_thread::sleep_for(5ms);
      }
    }
    gone = removed && gone;
  }
  return gone;
}

}  // namespace tidelock::sandbox
