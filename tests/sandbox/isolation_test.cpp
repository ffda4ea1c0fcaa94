// The parts that isolation is made of, each alone: the system call filter refuses even root, the fall-backs hold where
// no cgroup is writable, an ordinary user gets the same sandbox, and messages that cannot be are refused.
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>

#include "sandbox/cgroup.hpp"
#include "sandbox/container.hpp"
#include "sandbox/filter.hpp"
#include "sandbox/support.hpp"
#include "sandbox/unprivileged.hpp"

extern char** environ;

namespace tidelock::sandbox::testing {
namespace isolation_test {

// The errno of `call` in a child process, with or without the filter; 0 when it succeeds.
int errno_of(const std::function<long()>& call, bool filtered) {
  const std::vector<sock_filter> program = compile_filter();
  const pid_t child = fork();
  if (child == 0) {
    if (filtered && (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || !install_filter(program))) {
      _exit(255);
    }
    errno = 0;
    const long result = call();
    _exit(result < 0 ? errno : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Filter, RefusesWhatWouldReachTheKernelOrTheHost) {
  const std::vector<std::pair<const char*, std::function<long()>>> refused = {
      {"unshare mount", [] { return unshare(CLONE_NEWNS); }},
      {"unshare user", [] { return unshare(CLONE_NEWUSER); }},
      {"clone with namespace", [] { return syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0); }},
      {"mount", [] { return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr); }},
      {"ptrace", [] { return ptrace(PTRACE_TRACEME, 0, nullptr, nullptr); }},
      {"raw socket", [] { return socket(AF_INET, SOCK_RAW, 1); }},
      {"netlink socket", [] { return socket(AF_NETLINK, SOCK_DGRAM, 0); }},
      {"packet socket", [] { return socket(AF_PACKET, SOCK_RAW, 0); }},
      {"chroot", [] { return chroot("/"); }},
      {"setns", [] { return syscall(SYS_setns, open("/proc/self/ns/net", O_RDONLY), 0); }},
      {"bpf", [] { return syscall(SYS_bpf, 0, nullptr, 0); }},
      {"keyctl", [] { return syscall(SYS_keyctl, 0, -3, 0); }},
      {"io_uring",
       [] {
         char p[256] = {};
         return syscall(SYS_io_uring_setup, 1, p);
       }},
      {"perf",
       [] {
         char p[256] = {};
         return syscall(SYS_perf_event_open, p, 0, -1, -1, 0);
       }},
      {"userfaultfd", [] { return syscall(SYS_userfaultfd, 0); }},
      {"module", [] { return syscall(SYS_init_module, nullptr, 0, ""); }},
      {"kexec", [] { return syscall(SYS_kexec_load, 0, 0, nullptr, 0); }},
      {"host name", [] { return sethostname("x", 0); }},
  };
  for (const auto& [name, call] : refused) {
    EXPECT_EQ(errno_of(call, true), EPERM) << name;
  }
  EXPECT_EQ(errno_of([] { return syscall(SYS_clone3, nullptr, 0); }, true), ENOSYS);
  EXPECT_EQ(errno_of([] { return syscall(5000); }, true), ENOSYS);
  // The same calls without the filter: were they refused anyway, the test would prove nothing.
  if (geteuid() == 0) {
    for (const char* name :
         {"unshare mount", "clone with namespace", "ptrace", "raw socket", "netlink socket", "chroot"}) {
      for (const auto& [other, call] : refused) {
        if (std::string_view(name) == other) {
          EXPECT_EQ(errno_of(call, false), 0) << name;
        }
      }
    }
  }
}

TEST(Filter, AllowsWhatProgramsNeed) {
  for (const auto& [name, call] : std::vector<std::pair<const char*, std::function<long()>>>{
           {"local socket", [] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }},
           {"tcp socket", [] { return socket(AF_INET, SOCK_STREAM, 0); }},
           {"udp socket", [] { return socket(AF_INET6, SOCK_DGRAM, 0); }},
           {"fork", [] { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }},
           {"memory", [] { return syscall(SYS_brk, 0); }},
           {"file", [] { return open("/dev/null", O_RDWR); }},
           {"memfd", [] { return syscall(SYS_memfd_create, "x", 0); }}}) {
    EXPECT_EQ(errno_of(call, true), 0) << name;
  }
}

TEST(Cgroups, MountTableIsUnderstood) {
  const auto mounts = parse_cgroup_mounts(
      "30 24 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755\n"
      "31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
      "34 30 0:30 /docker/x /sys/fs/cgroup/cpu,cpuacct rw shared:1 master:2 - cgroup cgroup rw,cpu,cpuacct\n"
      "broken line\n");
  ASSERT_EQ(mounts.size(), 2U);
  EXPECT_TRUE(mounts[0].version2);
  EXPECT_EQ(mounts[0].path, "/sys/fs/cgroup/unified");
  EXPECT_EQ(mounts[1].root, "/docker/x");
  EXPECT_EQ(mounts[1].controllers, (std::vector<std::string>{"rw", "cpu", "cpuacct"}));
  const char* own = "4:memory:/a/b\n3:cpu,cpuacct:/c:d\n0::/user.slice\n";
  EXPECT_EQ(parse_own_cgroup(own, "memory"), "/a/b");
  EXPECT_EQ(parse_own_cgroup(own, "cpuacct"), "/c:d");
  EXPECT_EQ(parse_own_cgroup(own, ""), "/user.slice");
  EXPECT_EQ(parse_own_cgroup(own, "pids"), std::nullopt);
}

void expect_sandbox_works(Runtime& runtime) {
  auto box = runtime.create({});
  EXPECT_EQ(box->exec(shell("echo $((37*58)); cd /root; echo x > a; cat a")).output, "2146\nx\n");
  EXPECT_EQ(box->exec(shell("cat /proc/self/oom_score_adj")).output, "500\n");
  EXPECT_TRUE(box->exec(shell("sleep 100", 200ms)).timed_out);
  box->write_file("/data/b", "y");
  EXPECT_EQ(box->fork_filesystem()->read_file("/data/b"), "y");
  expect_freeze_works(*box);
  // Limits hold by whatever means there are.
  EXPECT_NE(box->exec(shell("dd if=/dev/zero of=/dev/null bs=350M count=1 && echo eaten", 60s)).output, "eaten\n");
  const ExecResult many =
      box->exec(shell("i=0; while [ $i -lt 100 ]; do sleep 5 & i=$((i+1)); done 2> /dev/null; echo $i"));
  EXPECT_NE(many.output, "100\n");
}

TEST(FallBack, WithoutCgroupsLimitsAndFreezingStillHold) {
  const Folder folder;
  ContainerOptions options;
  options.directory = folder.path();
  ContainerRuntime runtime(options,
                           Features{.cgroup_limits = false, .cgroup_freezer = false, .cgroup_version2 = false});
  EXPECT_NE(runtime.capabilities().isolation.find("by rlimit"), std::string::npos);
  EXPECT_NE(runtime.capabilities().isolation.find("freeze by SIGSTOP"), std::string::npos);
  expect_sandbox_works(runtime);
}

TEST(FallBack, WithVersion1Only) {
  const Folder folder;
  ContainerOptions options;
  options.directory = folder.path();
  {
    ContainerRuntime runtime(options, Features{.cgroup_version2 = false});
    EXPECT_EQ(runtime.capabilities().isolation.find("v2"), std::string::npos);
    expect_sandbox_works(runtime);
    auto box = runtime.create({});
    box->exec(shell("sleep 1000 > /dev/null 2>&1 &"));
    box->freeze();  // what version 1 has frozen dies only when thawed
  }
  EXPECT_TRUE(traces_of(folder.path()).empty());
}

TEST(FallBack, AnOrdinaryUserGetsTheSameSandbox) {
  std::string name = "test_sandbox", verb = "unprivileged";
  char* argv[] = {name.data(), verb.data(), nullptr};
  pid_t pid = 0;
  ASSERT_EQ(posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv, environ), 0);
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace isolation_test

int unprivileged_main(int, char**) {
  constexpr unsigned kNobody = 65534;
  if (geteuid() == 0 && (setgroups(0, nullptr) != 0 || setresgid(kNobody, kNobody, kNobody) != 0 ||
                         setresuid(kNobody, kNobody, kNobody) != 0 || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) != 0)) {
    std::cerr << "cannot become an ordinary user\n";
    return 1;
  }
  try {
    const Folder folder;
    {
      const auto runtime = make_container_runtime({folder.path(), {}});
      std::cout << runtime->capabilities().isolation << "\n";
      isolation_test::expect_sandbox_works(*runtime);
      auto box = runtime->create({});
      const ExecResult attack =
          box->exec(shell("id -u; kill -9 1; cat /proc/1/mem; ls /proc/1/root/; mount -t tmpfs x /tmp"));
      EXPECT_EQ(attack.output, "1000\n");
      EXPECT_EQ(box->exec(shell("echo well")).output, "well\n");
    }
    EXPECT_TRUE(traces_of(folder.path()).empty());
  } catch (const std::exception& exception) {
    std::cerr << exception.what() << "\n";
    return 1;
  }
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace tidelock::sandbox::testing
