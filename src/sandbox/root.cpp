#include "sandbox/root.hpp"

#include <fcntl.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "sandbox/copy_tree.hpp"

namespace tidelock::sandbox {
namespace {

constexpr unsigned long kQuiet = MS_NOSUID | MS_NODEV;
constexpr std::size_t kAccountFileLimit = 1U << 20;

void must(bool done, const char* step, const std::string& what) {
  if (!done) {
    const int error = errno;
    fail(error == EPERM || error == ENOSYS || error == ENODEV ? ErrorCode::not_supported : ErrorCode::io,
         "container root: {} {}: {}", step, what, std::strerror(error));
  }
}

void make_directory(const char* path, mode_t mode) {
  must(mkdir(path, mode) == 0 || errno == EEXIST, "make directory", path);
  must(chmod(path, mode) == 0, "set mode of", path);
}

void write_file_at(const char* path, std::string_view text, mode_t mode) {
  const FileDescriptor file(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode));
  must(file && write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()), "write", path);
}

// A file of the image, "" when there is none. Links are followed inside the image only: an image that links its
// /etc/passwd to the host's must not get it.
std::string read_image_file(const std::string& image, const char* path) {
  const FileDescriptor root(open(image.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  open_how how{};
  how.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  how.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS;
  const FileDescriptor file(static_cast<int>(syscall(SYS_openat2, root.get(), path, &how, sizeof how)));
  struct stat info {};
  if (!file || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_size > static_cast<off_t>(kAccountFileLimit)) {
    return {};
  }
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  const ssize_t got = read(file.get(), text.data(), text.size());
  text.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  if (!text.empty() && text.back() != '\n') {
    text += '\n';
  }
  return text;
}

// What every container has, whatever its image: an account for the user, its home, a place for temporary files.
void furnish_upper(const RootPlan& plan) {
  const std::string id = std::to_string(plan.uid);
  make_directory("u/etc", 0755);
  write_file_at("u/etc/passwd",
                read_image_file(plan.image_root, "etc/passwd") + "agent:x:" + id + ":" + id + "::/root:/bin/sh\n",
                0644);
  write_file_at("u/etc/group", read_image_file(plan.image_root, "etc/group") + "agent:x:" + id + ":\n", 0644);
  make_directory("u/root", 0755);
  must(chown("u/root", plan.uid, plan.uid) == 0, "give to the user", "/root");
  make_directory("u/tmp", 01777);
  make_directory("u/proc", 0755);
  make_directory("u/dev", 0755);
}

void mount_overlay(const RootPlan& plan) {
  const auto bytes = std::max<std::uint64_t>(plan.disk_bytes, 1U << 20);
  const std::string options = "mode=0755,size=" + std::to_string(bytes) +
                              ",nr_inodes=" + std::to_string(std::max<std::uint64_t>(1024, bytes / 2048));
  must(mount("tmpfs", plan.mount_point.c_str(), "tmpfs", kQuiet, options.c_str()) == 0, "mount tmpfs at",
       plan.mount_point);
  must(chdir(plan.mount_point.c_str()) == 0, "enter", plan.mount_point);
  for (const char* directory : {"l", "u", "w", "r", "shm"}) {
    make_directory(directory, std::strcmp(directory, "shm") == 0 ? 01777 : 0755);
  }
  must(mount(plan.image_root.c_str(), "l", nullptr, MS_BIND, nullptr) == 0, "bind image", plan.image_root);
  if (plan.copy_from >= 0) {
    const FileDescriptor upper(open("u", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    copy_tree(plan.copy_from, upper.get());  // with its account: a copy runs as the same user
  } else {
    furnish_upper(plan);
  }
  // Relative names: the image's place on the host does not show in the container's mount table.
  std::string layers =
      "lowerdir=l,upperdir=u,workdir=w,index=off,metacopy=off";  // both would tie the upper to its inodes
  layers += plan.user_namespace ? ",userxattr" : "";
  must(mount("overlay", "r", "overlay", kQuiet, layers.c_str()) == 0, "mount", "overlay");
}

void make_devices(const RootPlan& plan) {
  must(mount("tmpfs", "r/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=64k,nr_inodes=64") == 0, "mount",
       "/dev");
  struct Device {
    const char* name;
    unsigned major, minor;
  };
  for (const Device& device :
       {Device{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}) {
    const std::string path = std::string("r/dev/") + device.name;
    if (plan.user_namespace) {  // may not make devices: shows the host's
      const FileDescriptor place(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
      const std::string host = std::string("/dev/") + device.name;
      must(mount(host.c_str(), path.c_str(), nullptr, MS_BIND, nullptr) == 0, "bind", host);
    } else {
      must(mknod(path.c_str(), S_IFCHR | 0666, makedev(device.major, device.minor)) == 0, "make device", path);
    }
  }
  must(symlink("/proc/self/fd", "r/dev/fd") == 0 && symlink("/proc/self/fd/0", "r/dev/stdin") == 0 &&
           symlink("/proc/self/fd/1", "r/dev/stdout") == 0 && symlink("/proc/self/fd/2", "r/dev/stderr") == 0,
       "link", "/dev/fd");
  make_directory("r/dev/shm", 01777);
  must(mount("shm", "r/dev/shm", nullptr, MS_BIND, nullptr) == 0, "bind", "/dev/shm");  // counts as disk
  must(mount(nullptr, "r/dev", nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, nullptr) == 0,
       "make read-only", "/dev");
}

// /proc of the new pid namespace, without the parts through which root acts on the whole machine: init writes files
// as root.
void mount_proc() {
  must(mount("proc", "r/proc", "proc", kQuiet | MS_NOEXEC, nullptr) == 0, "mount", "/proc");
  for (const char* path : {"r/proc/sys", "r/proc/irq", "r/proc/bus", "r/proc/fs"}) {
    if (mount(path, path, nullptr, MS_BIND | MS_REC, nullptr) == 0) {
      must(mount(nullptr, path, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY | kQuiet | MS_NOEXEC, nullptr) == 0,
           "make read-only", path);
    } else {
      must(errno == ENOENT, "bind", path);
    }
  }
  for (const char* path :
       {"r/proc/sysrq-trigger", "r/proc/kcore", "r/proc/keys", "r/proc/key-users", "r/proc/timer_list",
        "r/proc/kallsyms", "r/proc/kpagecount", "r/proc/kpageflags", "r/proc/kpagecgroup"}) {
    must(mount("r/dev/null", path, nullptr, MS_BIND, nullptr) == 0 || errno == ENOENT, "mask", path);
  }
}

}  // namespace

FileDescriptor enter_root(const RootPlan& plan) {
  umask(0);
  must(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "make private", "/");
  mount_overlay(plan);
  make_devices(plan);
  mount_proc();
  FileDescriptor upper(open("u", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  must(static_cast<bool>(upper), "open", "upper");
  must(chdir("r") == 0, "enter", "root");
  must(syscall(SYS_pivot_root, ".", ".") == 0, "pivot to", "root");
  must(umount2(".", MNT_DETACH) == 0, "leave", "the host's root");
  must(chdir("/") == 0, "enter", "/");
  return upper;
}

void raise_loopback() {
  const FileDescriptor any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  must(any && ioctl(any.get(), SIOCSIFFLAGS, &request) == 0, "raise", "lo");
}

}  // namespace tidelock::sandbox
