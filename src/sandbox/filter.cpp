#include "sandbox/filter.hpp"

#include <fcntl.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>

#include "base/error.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {
namespace {

constexpr const char* kAllowed[] = {
    // files
    "read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "open",
    "openat", "openat2", "creat", "close", "close_range", "lseek", "dup", "dup2", "dup3", "fcntl", "flock", "fsync",
    "fdatasync", "sync", "syncfs", "sync_file_range", "truncate", "ftruncate", "fallocate", "fadvise64", "readahead",
    "sendfile", "splice", "tee", "vmsplice", "copy_file_range", "stat", "fstat", "lstat", "newfstatat", "statx",
    "statfs", "fstatfs", "access", "faccessat", "faccessat2", "getdents", "getdents64", "getcwd", "chdir", "fchdir",
    "rename", "renameat", "renameat2", "mkdir", "mkdirat", "rmdir", "link", "linkat", "unlink", "unlinkat", "symlink",
    "symlinkat", "readlink", "readlinkat", "mknod", "mknodat", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown",
    "fchown", "lchown", "fchownat", "umask", "utime", "utimes", "utimensat", "futimesat", "getxattr", "lgetxattr",
    "fgetxattr", "listxattr", "llistxattr", "flistxattr", "setxattr", "lsetxattr", "fsetxattr", "removexattr",
    "lremovexattr", "fremovexattr", "memfd_create", "pipe", "pipe2", "inotify_init", "inotify_init1",
    "inotify_add_watch", "inotify_rm_watch",
    // memory
    "brk", "mmap", "munmap", "mprotect", "mremap", "madvise", "msync", "mincore", "mlock", "mlock2", "munlock",
    "mlockall", "munlockall", "membarrier", "pkey_alloc", "pkey_free", "pkey_mprotect", "shmget", "shmat", "shmdt",
    "shmctl",
    // processes and threads
    "fork", "vfork", "execve", "execveat", "exit", "exit_group", "wait4", "waitid", "kill", "tkill", "tgkill", "getpid",
    "getppid", "gettid", "getpgid", "setpgid", "getpgrp", "getsid", "setsid", "set_tid_address", "set_robust_list",
    "get_robust_list", "futex", "futex_waitv", "futex_wake", "futex_wait", "futex_requeue", "rseq", "arch_prctl",
    "prctl", "prlimit64", "getrlimit", "setrlimit", "getrusage", "times", "sched_yield", "sched_getaffinity",
    "sched_setaffinity", "sched_getparam", "sched_setparam", "sched_getscheduler", "sched_setscheduler",
    "sched_getattr", "sched_setattr", "sched_get_priority_max", "sched_get_priority_min", "sched_rr_get_interval",
    "getpriority", "setpriority", "ioprio_get", "ioprio_set", "getcpu", "pidfd_open", "pidfd_send_signal",
    "restart_syscall", "seccomp",
    // identity
    "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid", "getgroups", "setuid", "setgid", "setreuid",
    "setregid", "setresuid", "setresgid", "setfsuid", "setfsgid", "setgroups", "capget", "capset", "uname", "sysinfo",
    // signals and time
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "rt_sigsuspend", "rt_sigtimedwait",
    "rt_sigqueueinfo", "rt_tgsigqueueinfo", "sigaltstack", "signalfd", "signalfd4", "pause", "alarm", "getitimer",
    "setitimer", "nanosleep", "clock_nanosleep", "clock_gettime", "clock_getres", "gettimeofday", "time",
    "timer_create", "timer_settime", "timer_gettime", "timer_getoverrun", "timer_delete", "timerfd_create",
    "timerfd_settime", "timerfd_gettime",
    // waiting
    "select", "pselect6", "poll", "ppoll", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait",
    "epoll_pwait2", "eventfd", "eventfd2",
    // sockets (which families: below)
    "socketpair", "bind", "listen", "accept", "accept4", "connect", "getsockname", "getpeername", "sendto", "recvfrom",
    "sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "shutdown", "setsockopt", "getsockopt", "ioctl",
    // messages between processes
    "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink",
    "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr", "getrandom"};

// Known and refused: EPERM says "not here" where ENOSYS would say "too old a kernel".
constexpr const char* kRefused[] = {"mount",
                                    "umount2",
                                    "pivot_root",
                                    "chroot",
                                    "open_tree",
                                    "move_mount",
                                    "fsopen",
                                    "fsconfig",
                                    "fsmount",
                                    "fspick",
                                    "mount_setattr",
                                    "swapon",
                                    "swapoff",
                                    "quotactl",
                                    "quotactl_fd",
                                    "unshare",
                                    "setns",
                                    "ptrace",
                                    "process_vm_readv",
                                    "process_vm_writev",
                                    "process_madvise",
                                    "process_mrelease",
                                    "pidfd_getfd",
                                    "kcmp",
                                    "bpf",
                                    "perf_event_open",
                                    "userfaultfd",
                                    "keyctl",
                                    "add_key",
                                    "request_key",
                                    "kexec_load",
                                    "kexec_file_load",
                                    "init_module",
                                    "finit_module",
                                    "delete_module",
                                    "io_uring_setup",
                                    "io_uring_enter",
                                    "io_uring_register",
                                    "reboot",
                                    "acct",
                                    "syslog",
                                    "vhangup",
                                    "iopl",
                                    "ioperm",
                                    "modify_ldt",
                                    "settimeofday",
                                    "clock_settime",
                                    "clock_adjtime",
                                    "adjtimex",
                                    "sethostname",
                                    "setdomainname",
                                    "open_by_handle_at",
                                    "name_to_handle_at",
                                    "lookup_dcookie",
                                    "fanotify_init",
                                    "fanotify_mark",
                                    "nfsservctl",
                                    "mbind",
                                    "set_mempolicy",
                                    "get_mempolicy",
                                    "migrate_pages",
                                    "move_pages",
                                    "landlock_create_ruleset",
                                    "memfd_secret",
                                    "uselib",
                                    "ustat",
                                    "sysfs",
                                    "io_setup",
                                    "io_submit",
                                    "io_destroy",
                                    "io_getevents",
                                    "io_cancel"};

class Filter {
 public:
  Filter() : context_(seccomp_init(SCMP_ACT_ERRNO(ENOSYS))) {
    if (context_ == nullptr) {
      throw Error(ErrorCode::not_supported, "sandbox: libseccomp does not know this machine");
    }
  }
  ~Filter() { seccomp_release(context_); }
  Filter(const Filter&) = delete;
  Filter& operator=(const Filter&) = delete;

  void rule(std::uint32_t action, const char* name, std::initializer_list<scmp_arg_cmp> conditions = {}) {
    const int number = seccomp_syscall_resolve_name(name);
    if (number == __NR_SCMP_ERROR) {
      return;  // newer than this libseccomp: stays at ENOSYS
    }
    check(
        seccomp_rule_add_array(context_, action, number, static_cast<unsigned>(conditions.size()), conditions.begin()),
        name);
  }

  std::vector<sock_filter> compile() {
    check(seccomp_attr_set(context_, SCMP_FLTATR_CTL_OPTIMIZE, 2), "binary tree");
    check(seccomp_attr_set(context_, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_KILL_PROCESS), "other architectures");
    const FileDescriptor file(memfd_create("filter", MFD_CLOEXEC));
    check(seccomp_export_bpf(context_, file.get()), "export");
    const off_t size = lseek(file.get(), 0, SEEK_END);
    std::vector<sock_filter> program(static_cast<std::size_t>(size) / sizeof(sock_filter));
    if (size <= 0 || pread(file.get(), program.data(), static_cast<std::size_t>(size), 0) != size) {
      fail(ErrorCode::internal, "sandbox: the compiled system call filter cannot be read back");
    }
    return program;
  }

 private:
  static void check(int result, const char* what) {
    if (result != 0) {
      fail(ErrorCode::not_supported, "sandbox: system call filter: {}: {}", what, std::strerror(-result));
    }
  }
  scmp_filter_ctx context_;
};

scmp_arg_cmp equals(unsigned argument, std::uint64_t value) {
  return {argument, SCMP_CMP_EQ, value, 0};
}
scmp_arg_cmp masked(unsigned argument, std::uint64_t mask, std::uint64_t value) {
  return {argument, SCMP_CMP_MASKED_EQ, mask, value};
}

}  // namespace

std::vector<sock_filter> compile_filter() {
  Filter filter;
  for (const char* name : kAllowed) {
    filter.rule(SCMP_ACT_ALLOW, name);
  }
  for (const char* name : kRefused) {
    filter.rule(SCMP_ACT_ERRNO(EPERM), name);
  }
  // clone without new namespaces. clone3 hides its flags in memory, so it stays at ENOSYS and callers fall back to
  // clone.
  constexpr std::uint64_t kNamespaces =
      CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET;
  filter.rule(SCMP_ACT_ALLOW, "clone", {masked(0, kNamespaces, 0)});
  for (const std::uint64_t flag :
       {CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET}) {
    filter.rule(SCMP_ACT_ERRNO(EPERM), "clone", {masked(0, flag, flag)});
  }
  // Sockets: local and IP (the network holds nothing but the container's own loopback), streams and datagrams.
  constexpr std::uint64_t kTypeMask = 0xf;
  for (const std::uint64_t family : {AF_UNIX, AF_INET, AF_INET6}) {
    for (const std::uint64_t type : {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET}) {
      filter.rule(SCMP_ACT_ALLOW, "socket", {equals(0, family), masked(1, kTypeMask, type)});
    }
    for (const std::uint64_t type : {SOCK_RAW, SOCK_RDM, SOCK_DCCP, SOCK_PACKET}) {
      filter.rule(SCMP_ACT_ERRNO(EPERM), "socket", {equals(0, family), masked(1, kTypeMask, type)});
    }
  }
  filter.rule(SCMP_ACT_ERRNO(EPERM), "socket", {{0, SCMP_CMP_GT, AF_INET6, 0}});
  // ioctl is in the list without conditions: no terminal and no device but the harmless ones exists in a container.
  constexpr std::uint64_t kWord = 0xffffffff;
  for (const std::uint64_t persona : {std::uint64_t{0}, kWord}) {
    filter.rule(SCMP_ACT_ALLOW, "personality", {equals(0, persona)});
  }
  return filter.compile();
}

bool install_filter(const std::vector<sock_filter>& program) noexcept {
  sock_fprog description{static_cast<unsigned short>(program.size()), const_cast<sock_filter*>(program.data())};
  return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &description) == 0;
}

}  // namespace tidelock::sandbox
