#include "sandbox/copy_tree.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {
namespace {

constexpr int kMaxDepth = 400;  // two open directories per level
constexpr std::size_t kBuffer = 256U << 10;

class Copier {
 public:
  explicit Copier(int top) : top_(top), buffer_(kBuffer) {}

  void directory(int from, int to, const std::string& path, int depth) {
    if (depth > kMaxDepth) {
      fail(ErrorCode::exhausted, "copy of the sandbox's files: directories nested deeper than {}", kMaxDepth);
    }
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(fdopendir(dup_close_on_exec(from)), closedir);
    must(stream != nullptr, "read", path);
    while (const dirent* entry = next(stream.get(), path)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") {
        item(from, to, name, path.empty() ? name : fmt::format("{}/{}", path, name), depth);
      }
    }
    attributes(from, to);
  }

  static void owner_mode_times(int to, const struct stat& info) {
    const timespec times[2] = {info.st_atim, info.st_mtim};
    // The owner first: a change of owner clears set-id bits of the mode.
    must(fchown(to, info.st_uid, info.st_gid) == 0 && fchmod(to, info.st_mode & 07777) == 0 && futimens(to, times) == 0,
         "set owner, mode and time of", "a file");
  }

 private:
  static void must(bool done, const char* step, const std::string& path) {
    if (!done) {
      const int error = errno;
      fail(error == ENOSPC ? ErrorCode::exhausted : ErrorCode::io, "copy of the sandbox's files: {} {}: {}", step, path,
           std::strerror(error));
    }
  }

  static int dup_close_on_exec(int fd) {
    const int copy = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);  // own position
    must(copy >= 0, "open", "a directory");
    return copy;
  }

  static const dirent* next(DIR* stream, const std::string& path) {
    errno = 0;
    const dirent* entry = readdir(stream);
    must(entry != nullptr || errno == 0, "read", path);
    return entry;
  }

  void item(int from, int to, const std::string& name, const std::string& path, int depth) {
    struct stat info {};
    must(fstatat(from, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0, "look at", path);
    if (S_ISDIR(info.st_mode)) {
      const FileDescriptor source(openat(from, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      must(static_cast<bool>(source) && mkdirat(to, name.c_str(), 0700) == 0, "copy", path);
      const FileDescriptor target(openat(to, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      must(static_cast<bool>(target), "open", path);
      directory(source.get(), target.get(), path, depth + 1);
      owner_mode_times(target.get(), info);
      return;
    }
    if (info.st_nlink > 1) {
      const auto [known, is_new] = links_.try_emplace(info.st_ino, path);
      if (!is_new) {
        must(linkat(top_, known->second.c_str(), to, name.c_str(), 0) == 0, "link", path);
        return;
      }
    }
    if (S_ISREG(info.st_mode)) {
      file(from, to, name, path, info);
      return;
    }
    if (S_ISLNK(info.st_mode)) {
      std::string target(static_cast<std::size_t>(info.st_size) + 1, '\0');
      const ssize_t got = readlinkat(from, name.c_str(), target.data(), target.size());
      must(got >= 0, "read link", path);
      target.resize(static_cast<std::size_t>(got));
      must(symlinkat(target.c_str(), to, name.c_str()) == 0, "link", path);
    } else {  // pipes, sockets, and whiteouts: the overlay's character devices 0:0
      must(mknodat(to, name.c_str(), info.st_mode, info.st_rdev) == 0, "make", path);
      must(fchmodat(to, name.c_str(), info.st_mode & 07777, 0) == 0, "set mode of", path);
    }
    const timespec times[2] = {info.st_atim, info.st_mtim};
    must(fchownat(to, name.c_str(), info.st_uid, info.st_gid, AT_SYMLINK_NOFOLLOW) == 0 &&
             utimensat(to, name.c_str(), times, AT_SYMLINK_NOFOLLOW) == 0,
         "set owner and time of", path);
  }

  void file(int from, int to, const std::string& name, const std::string& path, const struct stat& info) {
    const FileDescriptor source(openat(from, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    must(static_cast<bool>(source), "open", path);
    const FileDescriptor target(openat(to, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    must(static_cast<bool>(target), "make", path);
    off_t at = 0;
    while ((at = lseek(source.get(), at, SEEK_DATA)) >= 0) {  // fails with ENXIO after the last data
      const off_t hole = lseek(source.get(), at, SEEK_HOLE);
      must(hole >= at, "read", path);
      while (at < hole) {
        const auto want = std::min<std::size_t>(buffer_.size(), static_cast<std::size_t>(hole - at));
        const ssize_t got = pread(source.get(), buffer_.data(), want, at);
        must(got >= 0, "read", path);
        if (got == 0) {
          break;
        }
        const ssize_t put = pwrite(target.get(), buffer_.data(), static_cast<std::size_t>(got), at);
        must(put > 0, "write", path);
        at += put;
      }
      if (at < hole) {
        break;  // shrunk while it was read
      }
    }
    must(ftruncate(target.get(), info.st_size) == 0, "set size of", path);
    attributes(source.get(), target.get());
    owner_mode_times(target.get(), info);
  }

  // Opaque marks, redirects and the user's own attributes. security.* stays behind: a copy grants no capabilities.
  void attributes(int from, int to) {
    char names[4096];
    const ssize_t size = flistxattr(from, names, sizeof names);
    if (size <= 0) {
      must(size == 0 || errno == EOPNOTSUPP || errno == ERANGE, "list attributes of", "a file");
      return;
    }
    for (const char* name = names; name < names + size; name += std::strlen(name) + 1) {
      const std::string_view text(name);
      if (text.starts_with("trusted.overlay.") || text.starts_with("user.")) {
        const ssize_t got = fgetxattr(from, name, buffer_.data(), buffer_.size());
        must(got >= 0 && fsetxattr(to, name, buffer_.data(), static_cast<std::size_t>(got), 0) == 0, "copy attribute",
             name);
      }
    }
  }

  int top_;
  std::vector<char> buffer_;
  std::map<ino_t, std::string> links_;
};

}  // namespace

void copy_tree(int from, int to) {
  struct stat info {};
  if (fstat(from, &info) != 0) {
    fail(ErrorCode::io, "copy of the sandbox's files: {}", std::strerror(errno));
  }
  Copier(to).directory(from, to, "", 0);
  Copier::owner_mode_times(to, info);
}

}  // namespace tidelock::sandbox
