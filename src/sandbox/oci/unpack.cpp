#include "sandbox/oci/unpack.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "base/error.hpp"
#include "base/log.hpp"

namespace tidelock::sandbox::oci {
namespace fs = std::filesystem;
namespace {

constexpr const char* kOpaque = ".wh..wh..opq";
constexpr const char* kWhiteout = ".wh.";

std::string parent_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

std::string name_of(const std::string& path) {
  return path.substr(path.rfind('/') + 1);
}

// A folder that is the top of the file system for every name looked up in it.
class Root {
 public:
  Root(const fs::path& path, std::string what)
      : top_(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), what_(std::move(what)) {
    if (!top_) {
      fail_errno("open", path.string());
    }
  }

  // The folder of that path; links within it lead where they would in the guest.
  FileDescriptor folder(const std::string& path, bool make) const {
    open_how how{};
    how.flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    how.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;
    const char* name = path.empty() ? "." : path.c_str();
    FileDescriptor out(static_cast<int>(syscall(SYS_openat2, top_.get(), name, &how, sizeof how)));
    if (!out && errno == ENOENT && make && !path.empty()) {
      const FileDescriptor above = folder(parent_of(path), true);
      if (mkdirat(above.get(), name_of(path).c_str(), 0755) != 0) {
        if (errno == EEXIST) {
          fail(ErrorCode::corrupt_data, "{}: '{}' is a link that leads to nothing, but something is to be in it", what_,
               path);
        }
        fail_errno("make folder", what_ + ": " + path);
      }
      out.reset(static_cast<int>(syscall(SYS_openat2, top_.get(), name, &how, sizeof how)));
    }
    if (!out && (errno == ENOTDIR || errno == ELOOP || errno == ENOENT)) {
      fail(ErrorCode::corrupt_data, "{}: '{}' is no folder, but something is to be in it", what_, path);
    }
    if (!out) {
      fail_errno("open folder", what_ + ": " + path);
    }
    return out;
  }

  // Whatever is there goes, with all below. Links are not followed.
  static void remove(int folder, const std::string& name) {
    std::error_code error;
    fs::remove_all(fs::path("/proc/self/fd") / std::to_string(folder) / name, error);
    if (error) {
      fail(ErrorCode::io, "cannot remove {} of a lower layer: {}", name, error.message());
    }
  }

 private:
  FileDescriptor top_;
  std::string what_;
};

class Unpacker {
 public:
  Unpacker(const Source& layer, const std::string& what, const fs::path& root, UnpackLimits& limits)
      : reader_(layer, what), what_(what), root_(root, what), limits_(limits) {}

  std::size_t run() {
    TarEntry entry;
    while (reader_.next(entry)) {
      if (limits_.entries == 0) {
        fail(ErrorCode::exhausted, "{}: more entries than an image may have", what_);
      }
      --limits_.entries;
      apply(entry);
    }
    return devices_;
  }

 private:
  void apply(const TarEntry& entry) {
    if (entry.path.empty()) {
      if (entry.kind == TarEntry::Kind::folder) {
        dress(root_.folder("", false).get(), entry);
      }
      return;
    }
    const FileDescriptor folder = root_.folder(parent_of(entry.path), true);
    const std::string name = name_of(entry.path);
    if (name == kOpaque) {
      remove_lower(folder.get(), parent_of(entry.path));
    } else if (name.starts_with(kWhiteout)) {
      const std::string gone = name.substr(std::strlen(kWhiteout));
      if (gone.empty() || gone == "." || gone == "..") {
        fail(ErrorCode::corrupt_data, "{}: the whiteout '{}' names nothing", what_, entry.path);
      }
      Root::remove(folder.get(), gone);
    } else {
      make(folder.get(), name, entry);
      made_.insert(entry.path);
    }
  }

  // What lower layers have in a folder; what this layer put there stays.
  void remove_lower(int folder, const std::string& path) {
    const std::unique_ptr<DIR, int (*)(DIR*)> list(fdopendir(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
                                                   closedir);
    if (list == nullptr) {
      fail_errno("list", what_ + ": " + path);
    }
    std::vector<std::string> names;
    while (const dirent* one = readdir(list.get())) {
      names.emplace_back(one->d_name);
    }
    for (const std::string& name : names) {
      if (name == "." || name == "..") {
        continue;
      }
      std::string full = path;
      full.append(path.empty() ? 0 : 1, '/').append(name);
      const auto within = made_.lower_bound(full);
      const bool kept = within != made_.end() && (*within == full || within->starts_with(full + "/"));
      const FileDescriptor inner(kept ? openat(folder, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                                      : -1);
      if (!kept) {
        Root::remove(folder, name);
      } else if (inner) {
        remove_lower(inner.get(), full);
      }
    }
  }

  void make(int folder, const std::string& name, const TarEntry& entry) {
    struct stat there {};
    const bool exists = fstatat(folder, name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0;
    const bool same_folder = exists && S_ISDIR(there.st_mode) && entry.kind == TarEntry::Kind::folder;
    if (entry.kind == TarEntry::Kind::device) {
      ++devices_;
      return;
    }
    if (exists && !same_folder) {
      Root::remove(folder, name);
    }
    int result = 0;
    switch (entry.kind) {
      case TarEntry::Kind::folder:
        result = same_folder ? 0 : mkdirat(folder, name.c_str(), 0700);
        break;
      case TarEntry::Kind::symbolic_link:
        result = symlinkat(entry.target.c_str(), folder, name.c_str());
        break;
      case TarEntry::Kind::fifo:
        result = mkfifoat(folder, name.c_str(), 0600);
        break;
      case TarEntry::Kind::hard_link:
        link(folder, name, entry);
        return;  // it has what the file has
      default:
        write(folder, name, entry);
        return;
    }
    if (result != 0) {
      fail_errno("make", what_ + ": " + entry.path);
    }
    if (entry.kind == TarEntry::Kind::symbolic_link) {
      if (geteuid() == 0 && fchownat(folder, name.c_str(), entry.uid, entry.gid, AT_SYMLINK_NOFOLLOW) != 0) {
        fail_errno("give an owner to", what_ + ": " + entry.path);
      }
      return;
    }
    const FileDescriptor made(openat(folder, name.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
    if (!made) {
      fail_errno("open", what_ + ": " + entry.path);
    }
    dress(made.get(), entry);
  }

  void link(int folder, const std::string& name, const TarEntry& entry) {
    const FileDescriptor other = root_.folder(parent_of(entry.target), false);
    const std::string other_name = name_of(entry.target);
    struct stat info {};
    if (other_name.empty() || fstatat(other.get(), other_name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        S_ISDIR(info.st_mode)) {
      fail(ErrorCode::corrupt_data, "{}: '{}' is a hard link to '{}', which is no file", what_, entry.path,
           entry.target);
    }
    if (linkat(other.get(), other_name.c_str(), folder, name.c_str(), 0) != 0) {
      fail_errno("link", what_ + ": " + entry.path);
    }
  }

  void write(int folder, const std::string& name, const TarEntry& entry) {
    if (entry.size > limits_.bytes) {
      fail(ErrorCode::exhausted, "{}: '{}' has {} bytes, of which {} are left to the image", what_, entry.path,
           entry.size, limits_.bytes);
    }
    limits_.bytes -= entry.size;
    const FileDescriptor file(openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file) {
      fail_errno("create", what_ + ": " + entry.path);
    }
    char part[64U << 10];
    for (std::size_t got = 0; (got = reader_.read(part, sizeof part)) > 0;) {
      for (std::size_t done = 0; done < got;) {
        const ssize_t put = ::write(file.get(), part + done, got - done);
        if (put <= 0) {
          fail_errno("write", what_ + ": " + entry.path);
        }
        done += static_cast<std::size_t>(put);
      }
    }
    dress(file.get(), entry);
  }

  // Owner first: a change of owner takes the set-user-id bit away.
  void dress(int file, const TarEntry& entry) const {
    const timespec times[2] = {{entry.modified, 0}, {entry.modified, 0}};
    if ((geteuid() == 0 && fchown(file, entry.uid, entry.gid) != 0) || fchmod(file, entry.mode) != 0 ||
        futimens(file, times) != 0) {
      fail_errno("give owner, mode and time to", what_ + ": " + entry.path);
    }
  }

  TarReader reader_;
  std::string what_;
  Root root_;
  UnpackLimits& limits_;
  std::set<std::string> made_;  // by this layer
  std::size_t devices_ = 0;
};

}  // namespace

std::size_t apply_layer(const Source& layer, const std::string& what, const fs::path& root, UnpackLimits& limits) {
  return Unpacker(layer, what, root, limits).run();
}

void unpack(Layout& layout, const Image& image, const fs::path& root, UnpackLimits limits) {
  fs::create_directories(root);
  fs::permissions(root, fs::perms(0755));
  std::size_t devices = 0;
  for (std::size_t i = 0; i < image.layers.size(); ++i) {
    const Layout::Layer layer = layout.open_layer(image.layers[i], image.config.diff_digests.at(i));
    devices += apply_layer(layer.source, "layer " + image.layers[i].digest, root, limits);
    layer.check_end();
  }
  if (devices > 0) {
    spdlog::info("image {}: {} devices were left out", image.digest, devices);
  }
}

void complete_root(const fs::path& path) {
  const Root root(path, path.string());
  for (const char* folder : {"dev", "proc", "sys", "root", "tmp", "bin", "etc"}) {
    root.folder(folder, true);
  }
  const FileDescriptor programs = root.folder("bin", false);
  struct stat info {};
  if (fstatat(programs.get(), "bash", &info, AT_SYMLINK_NOFOLLOW) == 0 ||
      fstatat(programs.get(), "sh", &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return;
  }
  const FileDescriptor file(openat(programs.get(), "bash", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755));
  constexpr std::string_view kText = "#!/bin/sh\nexec /bin/sh \"$@\"\n";
  if (!file || ::write(file.get(), kText.data(), kText.size()) != static_cast<ssize_t>(kText.size()) ||
      fchmod(file.get(), 0755) != 0) {
    fail_errno("write", "/bin/bash of an image");
  }
}

}  // namespace tidelock::sandbox::oci
