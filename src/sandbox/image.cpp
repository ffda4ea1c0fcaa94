#include "sandbox/image.hpp"

#include <elf.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "sandbox/wire.hpp"

extern char** environ;

namespace tidelock::sandbox {
namespace fs = std::filesystem;
namespace {

fs::path find_static_busybox() {
  for (const char* candidate : {"/bin/busybox", "/usr/bin/busybox", "/usr/lib/busybox/busybox", "/sbin/busybox"}) {
    if (fs::exists(candidate) && is_static_executable(candidate)) {
      return candidate;
    }
  }
  throw Error(ErrorCode::not_supported, "image 'busybox': no static busybox on this host",
              "install the package busybox-static, or name a directory as image");
}

// The links that a busybox offers, as it lists them: "usr/bin/awk" a line.
std::string list_applets(const fs::path& busybox) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail_errno("make pipe for", busybox.string());
  }
  FileDescriptor from(ends[0]), to(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to.get(), 1);
  std::string name = busybox.string(), flag = "--list-full";
  char* argv[] = {name.data(), flag.data(), nullptr};
  pid_t pid = 0;
  const int error = posix_spawn(&pid, name.c_str(), &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    fail(ErrorCode::io, "image 'busybox': cannot run {}: {}", name, std::strerror(error));
  }
  to.reset();
  std::string text;
  char part[8192];
  for (ssize_t got = 0; (got = read(from.get(), part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(got));
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || text.empty()) {
    fail(ErrorCode::io, "image 'busybox': {} --list-full failed (status {})", name, status);
  }
  return text;
}

void write_text(const fs::path& path, const char* text) {
  std::ofstream file(path);
  file << text;
  if (!file.flush()) {
    fail(ErrorCode::io, "image 'busybox': cannot write {}", path.string());
  }
  fs::permissions(path, fs::perms(0644));
}

}  // namespace

bool is_static_executable(const fs::path& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  Elf64_Ehdr header{};
  if (bytes.size() < sizeof header) {
    return false;
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phoff > bytes.size() ||
      header.e_phnum * sizeof(Elf64_Phdr) > bytes.size() - header.e_phoff) {
    return false;
  }
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    std::memcpy(&segment, bytes.data() + header.e_phoff + i * sizeof segment, sizeof segment);
    if (segment.p_type == PT_INTERP) {
      return false;
    }
  }
  return true;
}

void build_busybox_image(const fs::path& root) {
  const fs::path busybox = find_static_busybox();
  const std::string applets = list_applets(busybox);
  const fs::path part = root.string() + ".part";  // renamed when complete: a half-made image is never used
  fs::remove_all(part);
  for (const char* directory :
       {"bin", "sbin", "usr/bin", "usr/sbin", "etc", "root", "tmp", "proc", "dev", "var/tmp", "home", "opt"}) {
    fs::create_directories(part / directory);
  }
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(part)) {
    fs::permissions(entry.path(), fs::perms(0755));  // whatever the umask of the program: others must be able to enter
  }
  fs::permissions(part, fs::perms(0755));
  write_file_atomic(part / "bin/busybox", read_file(busybox));
  fs::permissions(part / "bin/busybox", fs::perms(0755));
  std::istringstream lines(applets);
  for (std::string line; std::getline(lines, line);) {
    if (line != "bin/busybox" && line != "linuxrc" && line.find("..") == std::string::npos) {
      std::error_code ignored;  // an applet of a folder that the image does not have is left out
      fs::create_symlink("/bin/busybox", part / line, ignored);
    }
  }
  // Programs for agents ask for bash by its path; busybox has a shell, which understands -l and -c, but not under this
  // name.
  if (!fs::exists(fs::symlink_status(part / "bin/bash"))) {
    write_text(part / "bin/bash", "#!/bin/sh\nexec /bin/sh \"$@\"\n");
    fs::permissions(part / "bin/bash", fs::perms(0755));
  }
  write_text(part / "etc/passwd",
             "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/root:/bin/sh\n"
             "nobody:x:65534:65534:nobody:/:/bin/false\n");
  write_text(part / "etc/group", "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n");
  write_text(part / "etc/hosts", "127.0.0.1 localhost\n::1 localhost\n");
  fs::permissions(part / "tmp", fs::perms(01777));
  fs::permissions(part / "var/tmp", fs::perms(01777));
  fs::rename(part, root);
}

}  // namespace tidelock::sandbox
