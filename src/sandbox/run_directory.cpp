#include "sandbox/run_directory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <set>

#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/cgroup.hpp"

namespace tidelock::sandbox {
namespace fs = std::filesystem;
namespace {

constexpr const char* kPrefix = "tidelock-sandbox-";
constexpr std::time_t kUnlockedAgeSeconds = 60;  // a directory without a lock may be one just being made

bool same_file(int descriptor, const fs::path& path) {
  struct stat opened {
  }, named{};
  return fstat(descriptor, &opened) == 0 && lstat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

void sweep_one(const fs::path& path) {
  struct stat info {};
  // Others may plant names in a shared temporary folder: only real directories of our own are touched.
  if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid()) {
    return;
  }
  const FileDescriptor lock(open((path / "lock").c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!lock) {
    if (errno == ENOENT && std::time(nullptr) - info.st_mtime > kUnlockedAgeSeconds) {
      remove_run_directory(path);
    }
    return;
  }
  if (flock(lock.get(), LOCK_EX | LOCK_NB) == 0 && same_file(lock.get(), path / "lock")) {
    remove_run_directory(path);
  }
}

}  // namespace

RunDirectory make_run_directory(const fs::path& base) {
  std::error_code error;
  fs::create_directories(base, error);
  if (!fs::is_directory(base, error)) {
    fail(ErrorCode::io, "sandbox directory {}: is not a directory and cannot be made", base.string());
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(base, error)) {
    if (entry.path().filename().string().starts_with(kPrefix)) {
      sweep_one(entry.path());
    }
  }
  for (int attempt = 0; attempt < 16; ++attempt) {
    std::string name = (fs::absolute(base) / (std::string(kPrefix) + "XXXXXX")).string();
    if (mkdtemp(name.data()) == nullptr) {
      fail_errno("make sandbox directory", name);
    }
    RunDirectory run{name, FileDescriptor(open((name + "/lock").c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600))};
    // Another start may have swept the directory between the two calls: then try again under a new name.
    if (run.lock && flock(run.lock.get(), LOCK_EX | LOCK_NB) == 0 && same_file(run.lock.get(), run.path / "lock")) {
      for (const char* directory : {"mnt", "empty"}) {
        if (mkdir((run.path / directory).c_str(), 0755) != 0) {
          fail_errno("make sandbox directory", (run.path / directory).string());
        }
      }
      return run;
    }
  }
  fail(ErrorCode::io, "sandbox directory under {}: another process keeps removing it", base.string());
}

void remove_run_directory(const fs::path& path) noexcept {
  try {
    std::ifstream list(path / "cgroups");
    std::set<std::string> seen;
    for (std::string line; std::getline(list, line);) {
      if (seen.insert(line).second && !remove_stale_cgroup(line)) {
        spdlog::warn("sandbox: cgroup {} of a run that is over cannot be removed", line);
      }
    }
    std::error_code error;
    fs::remove_all(path, error);
    if (error) {
      spdlog::warn("sandbox: {} of a run that is over cannot be removed: {}", path.string(), error.message());
    }
  } catch (const std::exception& exception) {
    spdlog::warn("sandbox: {} of a run that is over cannot be removed: {}", path.string(), exception.what());
  }
}

void record_cgroup(const fs::path& run, const fs::path& cgroup) {
  std::ofstream list(run / "cgroups", std::ios::app);
  list << cgroup.string() << '\n';
  if (!list.flush()) {
    fail(ErrorCode::io, "sandbox: cannot write {}", (run / "cgroups").string());
  }
}

}  // namespace tidelock::sandbox
