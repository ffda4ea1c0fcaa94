// From the kernel's hand to a working system: modules, the disk as root, the port to the program.

#include <dirent.h>
#include <fcntl.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "sandbox/agent/agent.hpp"

namespace tidelock::sandbox::agent {
namespace {

constexpr int kPatience = 1000;  // looks, 10 ms apart, for a device to appear

void mount_or_die(const char* source, const char* target, const char* type, unsigned long flags, const char* data) {
  mkdir(target, 0755);
  if (mount(source, target, type, flags, data) != 0) {
    die("mount", target);
  }
}

// In the order in which the template builder listed them: what others need comes first.
void load_modules() {
  FILE* list = fopen("/modules/list", "re");
  if (list == nullptr) {
    die("open", "/modules/list");
  }
  char name[256];
  while (fgets(name, sizeof name, list) != nullptr) {
    std::string path = std::string("/modules/") + name;
    path.erase(path.find_last_not_of('\n') + 1);
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0 || (syscall(SYS_finit_module, file, "", 0) != 0 && errno != EEXIST)) {
      die("load", path.c_str());
    }
    close(file);
  }
  fclose(list);
}

void raise_loopback() {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  request.ifr_name[0] = 'l', request.ifr_name[1] = 'o';
  if (fd >= 0 && ioctl(fd, SIOCGIFFLAGS, &request) == 0) {
    request.ifr_flags = static_cast<short>(request.ifr_flags | IFF_UP);
    ioctl(fd, SIOCSIFFLAGS, &request);
  }
  close(fd);
}

void wait_for(const char* path) {
  struct stat info {};
  for (int i = 0; stat(path, &info) != 0; ++i) {
    if (i == kPatience) {
      die("wait for", path);
    }
    usleep(10'000);
  }
}

}  // namespace

void die(const char* step, const char* what) {
  const int error = errno;
  fprintf(stderr, "tidelock agent: cannot %s %s: errno %d\n", step, what, error);
  exit(1);  // the kernel panics, QEMU ends, and the program sees it at once
}

void boot() {
  mount_or_die("dev", "/dev", "devtmpfs", 0, nullptr);
  const int console = open("/dev/ttyS0", O_RDWR | O_NOCTTY);
  for (int fd = 0; console >= 0 && fd < 3; ++fd) {
    dup2(console, fd);
  }
  load_modules();
  wait_for("/dev/vda");
  mount_or_die("/dev/vda", "/newroot", "ext4", MS_NODEV, nullptr);
  if (mount("/dev", "/newroot/dev", nullptr, MS_MOVE, nullptr) != 0 || chdir("/newroot") != 0 ||
      mount(".", "/", nullptr, MS_MOVE, nullptr) != 0 || chroot(".") != 0 || chdir("/") != 0) {
    die("enter", "/newroot");
  }
  mount_or_die("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr);
  mount_or_die("sys", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, nullptr);
  mount_or_die("pts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "mode=620,ptmxmode=666");
  mount_or_die("shm", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
  symlink("/proc/self/fd", "/dev/fd");
  if (chown("/root", kUser, kUser) != 0 || chmod("/tmp", 01777) != 0) {
    die("prepare", "/root and /tmp");
  }
  raise_loopback();
  sethostname("sandbox", 7);
}

int open_port() {
  for (int i = 0; i < kPatience; ++i) {
    DIR* folder = opendir("/dev");
    std::string path;
    while (const dirent* entry = folder != nullptr ? readdir(folder) : nullptr) {
      if (std::string_view(entry->d_name).substr(0, 5) == "vport") {
        path = std::string("/dev/") + entry->d_name;
      }
    }
    closedir(folder);
    const int port = path.empty() ? -1 : open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (port >= 0) {
      return port;
    }
    usleep(10'000);
  }
  die("open", "the port to the program");
}

}  // namespace tidelock::sandbox::agent
